"""Options: what is refused, what is suggested, and the round trip through JSON."""

from __future__ import annotations

import ast
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jq
from jq.arithmetic.formats import BLOCKS, FLOATS, INT4, INT8, INT16, UINT8, UINT16
from jq.config import CONSTRAINTS, LOCAL, POWER_OF_TWO_METHODS, STAGES, QuantConfig, presets, resolve
from jq.graph import Node
from jq.npu.facts import NPU_OPS
from jq.npu.rewrites import FORMS, KEEPS_WHOLE, STRUCTURE

FLOAT_METHODS = ["minmax", "percentile", "entropy", "mse", "layerwise_percentile"]


class TestRefuses:
    @pytest.mark.parametrize(
        ("option", "near"),
        [
            ("metod", "method"),
            ("weightmethod", "weight_method"),
            ("constraint", "constraints"),
            ("excludes", "exclude"),
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
            ("bias", "int8", "int32"),
            ("finetune", "adaround2", "adaround"),
        ],
    )
    def test_unknown_choices_and_suggests_the_nearest(self, option, value, near):
        with pytest.raises(jq.ConfigError, match=f"{option} needs .*; got '{value}'.*Did you mean '{near}'"):
            QuantConfig().replace(**{option: value})

    @pytest.mark.parametrize(
        ("option", "member", "near"),
        [
            ("rewrites", "split_to_slices", "split_to_slice"),
            ("forms", "leaky_alpha", "leaky_relu_alpha"),
            ("constraints", "shift_cuts", "shift_cut"),
        ],
    )
    def test_unknown_members_and_suggests_the_nearest(self, option, member, near):
        with pytest.raises(jq.ConfigError, match=f"{option} needs .*; got .*{member}.*Did you mean '{near}'"):
            QuantConfig().replace(**{option: (member,)})

    def test_overrides_of_what_is_not_a_nodes_and_suggests_the_nearest(self):
        with pytest.raises(jq.ConfigError, match=r"an override has no option 'wieght'.*Did you mean 'weight'"):
            QuantConfig(overrides={"Conv": {"wieght": INT4}})
        for odd in ({}, [], {"a": 1}):
            with pytest.raises(jq.ConfigError, match=r"the override of 'Conv': symmetric needs True or False; got"):
                jq.QuantConfig(overrides={"Conv": {"symmetric": odd}})
        with pytest.raises(jq.ConfigError, match="an override has no option 'batch'"):
            QuantConfig(overrides={"Conv": {"batch": 4}})

    def test_overrides_that_do_not_go_with_the_rest_and_names_their_pattern(self):
        with pytest.raises(jq.ConfigError, match=r"the override of 'conv\*': per_channel needs scale='float'"):
            QuantConfig(overrides={"conv*": {"per_channel": True}})
        with pytest.raises(jq.ConfigError, match=r"the override of 'Conv': method needs .*; got 'min'"):
            QuantConfig(overrides={"Conv": {"method": "min"}})
        with pytest.raises(jq.ConfigError, match=r"the override of 'Conv': activation needs .*; got 'int8'"):
            QuantConfig(overrides={"Conv": {"activation": "int8"}})

    @pytest.mark.parametrize(
        ("option", "value"),
        [("seed", -1), ("forms", 5), ("constraints", True), ("rewrites", "abc"), ("overrides", 5), ("overrides", [1]),
         ("overrides", {"n": 3}), ("activation", [1])],
    )  # fmt: skip
    def test_values_of_another_kind(self, option, value):
        with pytest.raises(jq.ConfigError, match=option):
            QuantConfig().replace(**{option: value})

    @pytest.mark.parametrize("format", ["int9", "uint", "INT8", ""])
    def test_unknown_formats(self, format):
        with pytest.raises(jq.ConfigError, match="format needs one of"):
            QuantConfig.from_dict({"activation": format})
        with pytest.raises(jq.ConfigError, match="format needs one of"):
            QuantConfig.from_dict({"overrides": {"Conv": {"weight": format}}})

    def test_unknown_presets(self):
        for find in (resolve, presets.__getitem__):
            for name, near in (
                ("XINT9", "XINT8"),
                ("xint8", "XINT8"),
                ("MXFP5", "MXFP"),
                ("A8W8_ADAROUNDS", "A8W8_ADA"),
            ):
                with pytest.raises(jq.ConfigError, match=f"no preset '{name}'.*Did you mean '{near}"):
                    find(name)
        assert resolve("XINT8") is resolve("XINT8_CONFIG") is presets["XINT8"]
        config = QuantConfig(batch=7)
        assert resolve(config) is config

    @pytest.mark.parametrize("method", sorted(POWER_OF_TWO_METHODS))
    def test_float_scales_of_a_method_for_powers_of_two(self, method):
        with pytest.raises(jq.ConfigError, match=f"method='{method}' needs scale='power_of_two'"):
            QuantConfig(scale="float", method=method, weight_method="minmax", constraints=())

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"per_channel": True}, "per_channel needs scale='float'"),
            ({"symmetric": False}, "symmetric=False needs scale='float'"),
            ({"weight_symmetric": False}, "weight_symmetric=False needs scale='float'"),
            (
                {"scale": "float", "method": "minmax", "weight_method": "minmax"},
                "constraints needs scale='power_of_two'",
            ),
            ({"scale": "float", "method": "minmax", "constraints": ()}, "weight_method='minmse' needs"),
            ({"bias": "int32", "weight": FLOATS["bfloat16"]}, "bias='int32' needs integer"),
            ({"bias": "int32", "activation": BLOCKS["mx6"]}, "bias='int32' needs integer"),
            ({"moving_average": 0}, "moving_average"),
            ({"moving_average": 1.5}, "moving_average"),
            ({"moving_average": float("nan")}, "moving_average"),
            ({"moving_average": 0.1}, "needs method='minmax' or 'nonoverflow'; got 'minmse'"),
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
            {"op_types": ["Conv", 1]},
            {"exclude": "conv1"},
            {"exclude_subgraphs": ["conv1"]},
            {"exclude_subgraphs": [[["conv1"], []]]},
            {"input_nodes": [None]},
            {"cle": 1},
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
    first = QuantConfig(overrides={"Conv": {"weight": INT4, "bias": "float"}})
    assert hash(first) == hash(QuantConfig(overrides={"Conv": {"bias": "float", "weight": INT4}}))
    assert len({*presets.values(), first, config}) == len({*presets.values(), first})
    with pytest.raises(TypeError):
        presets["mine"] = config


class TestOverrides:
    CONFIG = QuantConfig(
        overrides={
            "stem*": {"weight": INT4},
            "Conv": {"weight": INT16, "activation": INT16},
            "*.last": {"bias": "float"},
        }
    )

    @staticmethod
    def node(name, op_type="Conv"):
        return Node(op_type, ("x",), (f"{name}_out",), name=name)

    def test_those_of_the_name_go_before_those_of_the_type(self):
        of = self.CONFIG.of(self.node("stem.last"))
        assert (of.weight, of.activation, of.bias, of.overrides) == (INT4, INT16, "float", ())
        of = self.CONFIG.of(self.node("head"))
        assert (of.weight, of.activation, of.bias) == (INT16, INT16, "weight")
        of = self.CONFIG.of(self.node("stem", "Gemm"))
        assert (of.weight, of.activation, of.bias) == (INT4, UINT8, "weight")
        assert self.CONFIG.of(self.node("fc", "Gemm")) == QuantConfig()

    def test_later_ones_of_a_name_go_before_earlier_ones(self):
        config = QuantConfig(overrides={"a*": {"weight": INT4}, "*b": {"weight": INT16}})
        assert config.of(self.node("ab")).weight == INT16
        assert config.of(self.node("a")).weight == INT4

    def test_patterns_know_case(self):
        assert self.CONFIG.of(self.node("Stem", "Gemm")).weight == INT8

    def test_may_be_given_in_any_form(self):
        pairs = QuantConfig(overrides=(("Conv", (("weight", INT4),)),))
        assert (
            pairs
            == QuantConfig(overrides={"Conv": {"weight": INT4}})
            == QuantConfig(overrides=[("Conv", {"weight": INT4})])
        )

    @given(
        st.dictionaries(
            st.sampled_from(["Conv", "stem*", "[ab]?", "a.b/c"]),
            st.fixed_dictionaries(
                {},
                optional={
                    "weight": st.sampled_from([INT4, INT8, INT16]),
                    "activation": st.sampled_from([INT8, UINT8, INT16]),
                    "bias": st.sampled_from(["weight", "int32", "float"]),
                    "method": st.sampled_from(["nonoverflow", "minmax"]),
                },
            ),
        )
    )
    @settings(deadline=None)
    def test_round_trip(self, overrides):
        config = QuantConfig(overrides=overrides)
        described = json.loads(json.dumps(config.to_dict()))
        assert QuantConfig.from_dict(described) == config
        assert described["overrides"].keys() == overrides.keys()

    def test_are_of_options_that_there_are(self):
        assert set(LOCAL) < {f.name for f in dataclasses.fields(QuantConfig)}


class TestPresets:
    def test_names(self):
        assert {"XINT8", "A8W8", "A16W8", "VINT8", "BF16", "MX6", "MXINT8_ADAQUANT", "XINT8_ADAROUND"} < set(presets)
        assert not any(name.endswith("_CONFIG") for name in presets)
        assert len(presets) == len(list(presets)) == len(set(presets)) > 45

    @pytest.mark.parametrize("name", presets)
    def test_each(self, name):
        config = presets[name]
        assert presets[f"{name}_CONFIG"] is resolve(f"{name}_CONFIG") is resolve(name) is config
        described = json.loads(json.dumps(config.to_dict()))
        assert QuantConfig.from_dict(described) == config and hash(QuantConfig.from_dict(described)) == hash(config)
        assert config.finetune == next(
            (m for m in ("adaround", "adaquant") if name.endswith(m.upper())), config.finetune
        )
        base = name.removesuffix("_ADAROUND").removesuffix("_ADAQUANT")
        assert presets[base].replace(finetune=config.finetune) == config

    def test_the_most_accurate_one_tunes_layers_then_blocks(self):
        assert presets["XINT8_ACCURATE"] == presets["XINT8"].replace(finetune="adaround+exponents")

    @pytest.mark.parametrize(
        "stages", ["", "adaround+", "+block", "adaround block", "adaround+qdrop", 5, ("block",), True]
    )
    def test_stages_that_are_not_there(self, stages):
        with pytest.raises(jq.ConfigError, match=r"finetune needs .*stages with . between: bias, adaround, .*; got"):
            QuantConfig(finetune=stages)

    @pytest.mark.parametrize(
        "options",
        [
            {"finetune_steps": 0},
            {"finetune_steps": 1.5},
            {"finetune_rate": 0.0},
            {"finetune_rate": -1.0},
            {"finetune_rate": "x"},
        ],
    )
    def test_steps_and_rates_that_cannot_be(self, options):
        with pytest.raises(jq.ConfigError, match=f"{next(iter(options))} needs "):
            QuantConfig(**options)

    @pytest.mark.parametrize(("family", "member"), [("MXFP8", "E4M3"), ("MXFP6", "E2M3"), ("MXFP4", "E2M1")])
    def test_families(self, family, member):
        assert presets[family] is resolve(family) is presets[f"{family}_CONFIG"] is presets[f"{family}{member}"]
        assert presets[f"{family}_ADAQUANT"] is presets[f"{family}{member}_ADAQUANT"]
        assert family in presets and family not in list(presets)

    def test_is_a_mapping(self):
        assert "XINT8" in presets and "XINT8_CONFIG" in presets and "XINT9" not in presets and "" not in presets
        assert presets.get("XINT9") is None and presets.get("XINT9", QuantConfig()) == presets.get("XINT8")
        assert dict(presets) == {name: presets[name] for name in presets}

    @pytest.mark.parametrize("name", presets)
    def test_prints_every_option_on_its_line(self, name):
        lines = str(presets[name]).splitlines()
        assert all(len(line) <= 120 for line in lines)
        found = [line.partition(" = ")[0] for line in lines if not line.startswith(" ")]
        assert found == [f.name for f in dataclasses.fields(QuantConfig)]
        joined = "".join(line if line.startswith(" ") else f"\n{line}" for line in lines).strip().splitlines()
        assert (
            QuantConfig.from_dict({k: ast.literal_eval(v) for k, _, v in (j.partition(" = ") for j in joined)})
            == presets[name]
        )


# What Quark's configs of the same name say: scales, method, activations (are they symmetric?), weights (likewise), biases.
PRESETS = {
    "XINT8": ("power_of_two", "minmse", UINT8, True, INT8, True, "weight"),
    "VINT8": ("power_of_two", "minmse", INT8, True, INT8, True, "weight"),
    "A8W8": ("float", "minmax", INT8, True, INT8, True, "int32"),
    "A16W8": ("float", "minmax", INT16, True, INT8, True, "int32"),
    "S8S8_AAWS": ("float", "percentile", INT8, False, INT8, True, "int32"),
    "U8S8_AAWS": ("float", "percentile", UINT8, False, INT8, True, "int32"),
    "U8U8_AAWA": ("float", "percentile", UINT8, False, UINT8, False, "int32"),
    "S16S8_ASWS": ("float", "percentile", INT16, True, INT8, True, "int32"),
    "U16S8_AAWS": ("float", "percentile", UINT16, False, INT8, True, "int32"),
    "INT8_CNN_DEFAULT": ("float", "minmax", UINT8, False, INT8, True, "int32"),
    "INT8_CNN_ACCURATE": ("float", "percentile", UINT8, False, INT8, True, "int32"),
    "INT16_CNN_DEFAULT": ("float", "minmax", UINT16, False, INT16, True, "int32"),
    "INT16_CNN_ACCURATE": ("float", "percentile", UINT16, False, INT16, True, "int32"),
}
CASTS = {
    "FP16": "float16", "BF16": "bfloat16", "BFP16": "bfp16", "MX4": "mx4", "MX6": "mx6", "MX9": "mx9",
    "MXFP8E5M2": "mxfp8e5m2", "MXFP8E4M3": "mxfp8e4m3", "MXFP6E3M2": "mxfp6e3m2", "MXFP6E2M3": "mxfp6e2m3",
    "MXFP4E2M1": "mxfp4e2m1", "MXINT8": "mxint8",
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_integer_presets_are_those_of_the_vendor(name):
    config = presets[name]
    found = (config.scale, config.method, config.activation, config.symmetric, config.weight, config.weight_symmetric)
    assert (*found, config.bias) == PRESETS[name]
    assert not config.per_channel and config.moving_average is None and config.calibrates
    assert config.percentile == (99.9999 if name in ("S8S8_AAWS",) or name.endswith("ACCURATE") else 99.999)
    assert config.finetune == ("adaround" if name.endswith("ACCURATE") else None)


@pytest.mark.parametrize("name", CASTS)
def test_casting_presets_are_those_of_the_vendor(name):
    config = presets[name]
    assert config.activation == config.weight == (FLOATS | BLOCKS)[CASTS[name]]
    assert config.bias == "weight" and not config.calibrates and not config.constraints
    assert (config.op_types is None) == (name == "BF16")
    with pytest.raises(jq.ConfigError, match="no integer codes"):
        config.activation_grid  # noqa: B018


def test_npu_presets_do_what_the_npu_needs():
    xint8, vint8 = presets["XINT8"], presets["VINT8"]
    assert xint8.constraints == CONSTRAINTS and xint8.cle and xint8.fuse_activations and xint8.op_types == NPU_OPS
    usual = tuple(name for name in STRUCTURE if name not in KEEPS_WHOLE)  # these are made where `whole` asks for it
    assert (xint8.rewrites, xint8.forms, xint8.whole) == (usual, tuple(FORMS), None)
    assert (vint8.constraints, vint8.forms, vint8.op_types, vint8.fuse_activations) == ((), (), None, False)
    assert set(vint8.rewrites) == {"batchnorm_to_conv", "split_to_slice"}
    assert (xint8.activation_grid.qmin, xint8.activation_grid.qmax, xint8.activation_grid.middle) == (0, 255, 128)
    assert (xint8.weight_grid.qmin, xint8.weight_grid.qmax) == (-127, 127)
    a8w8 = presets["A8W8"]
    assert (a8w8.activation_grid.qmin, a8w8.activation_grid.qmax) == (-127, 127)
    assert a8w8.replace(symmetric=False).activation_grid.qmin == -128
    assert a8w8.constraints == a8w8.forms == ()


def test_ops_of_the_vendor():
    # as printed by its registry; BatchNormalization comes from its pass that makes a Conv of it
    assert len(NPU_OPS) == 43 and {"HardSigmoid", "PRelu", "Slice", "BatchNormalization"} < set(NPU_OPS)
    assert set(presets["U8S8_AAWS"].op_types) < set(NPU_OPS) and len(presets["U8S8_AAWS"].op_types) == 30
    assert presets["U16S8_AAWS"].op_types == presets["INT16_CNN_DEFAULT"].op_types == presets["MX6"].op_types == NPU_OPS


def test_dynamic():
    config = presets["UINT8_DYNAMIC_QUANT"]
    assert config.dynamic and not config.calibrates and config.bias == "float" and config.weight == UINT8
    assert config.activation == UINT8 and "Conv" in config.op_types and "Relu" not in config.op_types
    for other in (INT8, INT16, FLOATS["bfloat16"]):  # what DynamicQuantizeLinear gives is uint8
        with pytest.raises(jq.ConfigError, match=f"dynamic needs activation=UINT8; got {other}"):
            config.replace(activation=other)


def test_an_override_can_ask_for_calibration():
    bf16 = presets["BF16"]
    assert bf16.replace(overrides={"Conv": {"activation": INT8}}).calibrates
    assert not bf16.replace(overrides={"Conv": {"weight": INT8}}).calibrates
    assert not bf16.replace(weights_only=True, overrides={"Conv": {"activation": INT8}}).calibrates


def test_strict_quark_takes_its_histograms():
    assert QuantConfig(strict_quark=True).method == "minmse_hist"
    assert QuantConfig(strict_quark=True, method="nonoverflow").method == "nonoverflow"


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
            "weight_symmetric": st.booleans(),
            "constraints": st.just(()),
        }
    ),
)
NAMES = st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple)
SOME = NAMES.filter(bool)
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
        "op_types": st.none() | NAMES,
        "exclude": NAMES,
        "exclude_subgraphs": st.lists(st.tuples(SOME, SOME), max_size=2).map(tuple),
        "input_nodes": NAMES,
        "output_nodes": NAMES,
        "rewrites": st.sets(st.sampled_from(list(STRUCTURE))).map(sorted).map(tuple),
        "forms": st.sets(st.sampled_from(list(FORMS))).map(sorted).map(tuple),
        "bias": st.sampled_from(["weight", "int32", "float"]),
        "finetune": st.none() | st.lists(st.sampled_from(STAGES), min_size=1, max_size=3).map("+".join),
        "finetune_steps": st.none() | st.integers(1, 1000),
        "finetune_rate": st.none() | st.floats(1e-6, 10),
        **{name: st.booleans() for name in ("weights_only", "dynamic", "fuse_activations", "cle")},
        "batch": st.integers(1, 1 << 20),
        "seed": st.integers(0, 1 << 30),
    },
)


def together(scales, others):
    """The others without those that the rest rules out."""
    ruled_out = set()
    if scales["method"] not in ("minmax", "nonoverflow"):
        ruled_out.add("moving_average")
    if others.get("dynamic"):
        ruled_out.add("activation")
    return {k: v for k, v in others.items() if k not in ruled_out}


@given(SCALES, OTHERS)
@settings(max_examples=200, deadline=None)
def test_round_trip_through_json(scales, others):
    others = together(scales, others)
    config = QuantConfig(**scales, **others)
    described = json.loads(json.dumps(config.to_dict()))
    assert set(described) == {f.name for f in dataclasses.fields(QuantConfig)}
    assert QuantConfig.from_dict(described) == config
    assert {k: getattr(config, k) for k in scales | others} == scales | others


@given(SCALES, OTHERS)
@settings(max_examples=50, deadline=None)
def test_part_of_the_options_is_enough(scales, others):
    others = together(scales, others)
    config = QuantConfig(**scales, **others)
    described = config.to_dict()
    assert QuantConfig.from_dict({k: described[k] for k in scales | others}) == config
