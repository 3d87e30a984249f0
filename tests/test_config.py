"""Options: what is refused, what is suggested, and the round trip through JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jq
from jq.config import POWER_OF_TWO_METHODS, QuantConfig, presets, resolve
from jq.formats import INT8, INT16, UINT8, UINT16

FLOAT_METHODS = ["minmax", "percentile", "entropy", "mse", "layerwise_percentile"]


class TestRefuses:
    @pytest.mark.parametrize(
        ("option", "near"),
        [
            ("metod", "method"),
            ("weights", "weight"),
            ("per_chanel", "per_channel"),
            ("Batch", "batch"),
            ("bin", "bins"),
        ],
    )
    def test_unknown_options_and_suggests_the_nearest(self, option, near):
        with pytest.raises(jq.ConfigError, match=f"no option '{option}'.*Did you mean '{near}'"):
            QuantConfig().replace(**{option: 1})
        with pytest.raises(jq.ConfigError, match=f"no option '{option}'.*Did you mean '{near}'"):
            QuantConfig.from_dict({option: 1})

    @pytest.mark.parametrize(
        ("option", "value", "near"),
        [
            ("scale", "powers_of_two", "power_of_two"),
            ("method", "min_mse", "minmse"),
            ("method", "nonoverflows", "nonoverflow"),
            ("weight_method", "percentiles", "percentile"),
            ("percentile_metric", "maes", "mae"),
            ("histogram_range", "al", "all"),
        ],
    )
    def test_unknown_choices_and_suggests_the_nearest(self, option, value, near):
        with pytest.raises(jq.ConfigError, match=f"{option} is '{value}'.*Did you mean '{near}'"):
            QuantConfig().replace(**{option: value})

    @pytest.mark.parametrize("format", ["int9", "uint", "INT8", ""])
    def test_unknown_formats(self, format):
        with pytest.raises(jq.ConfigError, match="no format"):
            QuantConfig.from_dict({"activation": format})

    def test_unknown_presets(self):
        with pytest.raises(jq.ConfigError, match=r"no preset 'XINT'.*Did you mean 'XINT8'"):
            resolve("XINT")
        assert resolve("XINT8") is resolve("XINT8_CONFIG") is presets["XINT8"]
        config = QuantConfig(batch=7)
        assert resolve(config) is config

    @pytest.mark.parametrize("method", sorted(POWER_OF_TWO_METHODS))
    def test_float_scales_of_a_method_for_powers_of_two(self, method):
        with pytest.raises(jq.ConfigError, match="finds powers of two"):
            QuantConfig(scale="float", method=method, weight_method="minmax")

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"per_channel": True}, "per_channel needs scale='float'"),
            ({"symmetric": False}, "symmetric=False needs scale='float'"),
            ({"scale": "float", "method": "minmax"}, "weight_method 'minmse'"),
            ({"moving_average": 0}, "moving_average"),
            ({"moving_average": 1.5}, "moving_average"),
            ({"moving_average": float("nan")}, "moving_average"),
            ({"moving_average": 0.1}, "no use for it"),
            ({"bins": 0}, "bins"),
            ({"batch": 0}, "batch"),
            ({"batch": -1}, "batch"),
            ({"quantized_bins": 1 << 30}, "quantized_bins"),
            ({"percentile": 0}, "percentile"),
            ({"percentile": 100.1}, "percentile"),
            ({"percentiles": (99, 0)}, "percentile"),
            ({"percentile": float("nan")}, "percentile"),
        ],
    )
    def test_what_does_not_go_together_or_is_out_of_bounds(self, options, match):
        with pytest.raises(jq.ConfigError, match=match):
            QuantConfig(**options)
        with pytest.raises(jq.ConfigError, match=match):
            QuantConfig().replace(**options)

    @pytest.mark.parametrize(
        "options",
        [
            {"method": ["minmse"]},
            {"scale": None},
            {"bins": "many"},
            {"batch": 2.5},
            {"batch": None},
            {"percentiles": 99},
            {"percentile": "99"},
            {"symmetric": "no"},
            {"per_channel": 0},
            {"activation": 8},
            {"moving_average": "x"},
            {"percentiles": []},
        ],
        ids=str,
    )
    def test_values_of_another_type(self, options):
        with pytest.raises(jq.ConfigError):
            QuantConfig.from_dict(options)


def test_is_immutable_and_hashable():
    config = QuantConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.method = "minmax"
    assert hash(config) == hash(QuantConfig()) and config == QuantConfig()
    assert config.replace(batch=4) != config and config.batch == 8
    with pytest.raises(TypeError):
        presets["mine"] = config


def test_presets_are_those_of_the_vendor():
    xint8, a8w8 = presets["XINT8"], presets["A8W8"]
    assert (xint8.scale, xint8.method, xint8.weight_method) == ("power_of_two", "minmse", "minmse")
    assert (xint8.activation_grid.qmin, xint8.activation_grid.qmax, xint8.activation_grid.middle) == (0, 255, 128)
    assert (xint8.weight_grid.qmin, xint8.weight_grid.qmax) == (-127, 127)
    assert (a8w8.scale, a8w8.method, a8w8.symmetric) == ("float", "minmax", True)
    assert (a8w8.activation_grid.qmin, a8w8.activation_grid.qmax) == (-127, 127)
    assert (a8w8.replace(symmetric=False).activation_grid.qmin) == -128


FORMATS = st.sampled_from([INT8, UINT8, INT16, UINT16])
PERCENTS = st.floats(0, 100, exclude_min=True)
SCALES = st.one_of(
    st.fixed_dictionaries(
        {
            "scale": st.just("power_of_two"),
            "method": st.sampled_from([*sorted(POWER_OF_TWO_METHODS), *FLOAT_METHODS]),
            "weight_method": st.sampled_from(["minmse", "minmax", "percentile", "mse"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "scale": st.just("float"),
            "method": st.sampled_from(FLOAT_METHODS),
            "weight_method": st.sampled_from(["minmax", "percentile", "mse"]),
            "per_channel": st.booleans(),
            "symmetric": st.booleans(),
        }
    ),
)
OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "activation": FORMATS,
        "weight": FORMATS,
        "percentile": PERCENTS,
        "percentiles": st.lists(PERCENTS, min_size=1, max_size=4).map(tuple),
        "percentile_metric": st.sampled_from(["mae", "mse"]),
        "bins": st.integers(1, 1 << 20),
        "quantized_bins": st.integers(1, 1 << 20),
        "histogram_range": st.sampled_from(["first", "all"]),
        "error_parts": st.booleans(),
        "moving_average": st.none() | st.floats(0, 1, exclude_min=True),
        "batch": st.integers(1, 1 << 20),
        "seed": st.integers(0, 1 << 30),
    },
)


@given(SCALES, OTHERS)
@settings(max_examples=200, deadline=None)
def test_round_trip_through_json(scales, others):
    others = {k: v for k, v in others.items() if k != "moving_average" or scales["method"] in ("minmax", "nonoverflow")}
    assume(others.get("moving_average") is None or scales["method"] in ("minmax", "nonoverflow"))
    config = QuantConfig(**scales, **others)
    described = json.loads(json.dumps(config.to_dict()))
    assert set(described) == {f.name for f in dataclasses.fields(QuantConfig)}
    assert QuantConfig.from_dict(described) == config
    assert {k: getattr(config, k) for k in scales | others} == scales | others


@given(SCALES, OTHERS)
@settings(max_examples=50, deadline=None)
def test_part_of_the_options_is_enough(scales, others):
    others = {k: v for k, v in others.items() if k != "moving_average" or scales["method"] in ("minmax", "nonoverflow")}
    assume(others.get("moving_average") is None or scales["method"] in ("minmax", "nonoverflow"))
    config = QuantConfig(**scales, **others)
    described = config.to_dict()
    assert QuantConfig.from_dict({k: described[k] for k in scales | others}) == config
