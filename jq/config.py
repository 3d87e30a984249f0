"""What the user wants of a quantization, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from jq.errors import ConfigError, suggest
from jq.formats import INT8, UINT8, Integer, integer
from jq.ranges import LAYERWISE_PERCENTS, Metric, WeightMethod

Method = Literal[
    "minmse", "minmse_hist", "nonoverflow", "minmax", "percentile", "entropy", "mse", "layerwise_percentile"
]
Scale = Literal["power_of_two", "float"]
POWER_OF_TWO_METHODS: frozenset[str] = frozenset({"minmse", "minmse_hist", "nonoverflow"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """How a model is quantized. Immutable: `replace` makes a changed copy.

    >>> presets["XINT8"].replace(method="nonoverflow").method
    'nonoverflow'
    """

    # Which scales there may be, and how an activation's is found. minmse: least squared error, on the values
    # themselves; minmse_hist: on Quark's histogram of 2048 bins; nonoverflow: the range alone. The others give a
    # float range; with power-of-two scales its nearest one is taken.
    scale: Scale = "power_of_two"
    method: Method = "minmse"

    activation: Integer = UINT8
    symmetric: bool = True  # activations; weights always are
    weight: Integer = INT8
    weight_method: Literal["minmse"] | WeightMethod = "minmse"
    per_channel: bool = False  # weights, with float scales

    percentile: float = 99.999
    percentiles: tuple[float, ...] = LAYERWISE_PERCENTS  # that layerwise_percentile chooses from
    percentile_metric: Metric = "mae"
    bins: int = 2048
    quantized_bins: int = 128  # of entropy; onnxruntime's default, bins = quantized_bins, leaves nothing to search
    # Where a float method's histogram gets its range from: all data, as in onnxruntime, which reads them twice; or
    # the first data, with more bins where later data need them, as in Quark and always in minmse_hist.
    histogram_range: Literal["first", "all"] = "all"
    error_parts: bool = False  # of minmse: keep what clipping causes at all candidates, at twice the cost
    moving_average: float | None = None  # weight of a new sample in an average of minima and maxima

    batch: int = 8  # samples per step
    seed: int = 0  # of random calibration data

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name))
        if self.scale == "float" and self.method in POWER_OF_TWO_METHODS:
            raise ConfigError(
                f"method {self.method!r} finds powers of two, but scale='float'; take one of "
                f"{', '.join(m for m in get_args(Method) if m not in POWER_OF_TWO_METHODS)}"
            )
        if self.scale == "power_of_two" and self.per_channel:
            raise ConfigError("per_channel needs scale='float': the NPU has one power of two per tensor")
        if self.scale == "power_of_two" and not self.symmetric:
            raise ConfigError("symmetric=False needs scale='float': power-of-two scales have their zero in the middle")
        if self.scale == "float" and self.weight_method == "minmse":
            raise ConfigError("weight_method 'minmse' finds powers of two, but scale='float'; take minmax, or mse")
        if self.moving_average is not None and not 0 < self.moving_average <= 1:
            raise ConfigError(f"moving_average is {self.moving_average}; expected a weight above 0, at most 1")
        if self.moving_average is not None and self.method not in ("minmax", "nonoverflow"):
            raise ConfigError(f"moving_average is of ranges; method {self.method!r} has no use for it")
        for name in ("bins", "quantized_bins", "batch"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 to {1 << 20}")
        for percent in (self.percentile, *self.percentiles):
            if not 0 < percent <= 100:
                raise ConfigError(f"percentile {percent}; expected more than 0, at most 100")

    @property
    def activation_grid(self) -> Integer:
        """The codes that activations use."""
        return self.activation.narrow if self.symmetric else self.activation

    @property
    def weight_grid(self) -> Integer:
        """The codes that weights use."""
        return self.weight.narrow

    def replace(self, **changes: Any) -> QuantConfig:
        """A copy with some options changed; an unknown one is a ConfigError."""
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"no option {name!r}.{suggest(name, known)} There are: {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON holds them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            k: v.name if isinstance(v, Integer) else list(v) if isinstance(v, tuple) else v for k, v in values.items()
        }

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> QuantConfig:
        """The config that `to_dict` described.

        >>> QuantConfig.from_dict(presets["A8W8"].to_dict()) == presets["A8W8"]
        True
        """
        formats = {k: integer(v) for k, v in options.items() if k in ("activation", "weight")}
        tuples = {k: tuple(v) for k, v in options.items() if isinstance(v, list)}
        return cls().replace(**(dict(options) | formats | tuples))


_CHOICES: dict[str, tuple[str, ...]] = {
    "scale": get_args(Scale),
    "method": get_args(Method),
    "weight_method": ("minmse", *get_args(WeightMethod)),
    "percentile_metric": get_args(Metric),
    "histogram_range": ("first", "all"),
}


_NUMBERS: dict[str, type] = {"bins": int, "quantized_bins": int, "batch": int, "seed": int, "percentile": float}
_SWITCHES = ("symmetric", "per_channel", "error_parts")


def _check(name: str, value: Any) -> None:
    """Whether an option has a value of its kind."""
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise ConfigError(f"{name} is {value!r}; there are {', '.join(choices)}.{suggest(str(value), choices)}")
    expected = None
    if name in _NUMBERS and not _is_number(value, _NUMBERS[name]):
        expected = "a whole number" if _NUMBERS[name] is int else "a number"
    elif name in _SWITCHES and not isinstance(value, bool):
        expected = "True or False"
    elif name in ("activation", "weight") and not (isinstance(value, Integer) and value == integer(value.name)):
        expected = "a format such as jq.formats.INT8; symmetry narrows it"
    elif name == "moving_average" and not (value is None or _is_number(value, float)):
        expected = "None or a number"
    elif name == "percentiles" and not (
        isinstance(value, tuple) and value and all(_is_number(v, float) for v in value)
    ):
        expected = "a tuple of numbers"
    if expected:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


presets: Mapping[str, QuantConfig] = MappingProxyType(
    {
        "XINT8": QuantConfig(),
        "A8W8": QuantConfig(scale="float", method="minmax", activation=INT8, weight_method="minmax"),
    }
)


def resolve(config: QuantConfig | str) -> QuantConfig:
    """The config itself, or the preset of that name."""
    if isinstance(config, QuantConfig):
        return config
    name = str(config).removesuffix("_CONFIG")
    if name not in presets:
        raise ConfigError(f"no preset {config!r}; there are {', '.join(presets)}.{suggest(name, presets)}")
    return presets[name]
