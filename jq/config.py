"""What the user wants of a quantization, as data."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from jq.arithmetic.formats import (
    BFLOAT16,
    BFP16,
    FLOAT16,
    INT8,
    INT16,
    MX4,
    MX6,
    MX9,
    MXFP4E2M1,
    MXFP6E2M3,
    MXFP6E3M2,
    MXFP8E4M3,
    MXFP8E5M2,
    MXINT8,
    UINT8,
    UINT16,
    Block,
    Float,
    Format,
    Integer,
    format_named,
)
from jq.errors import ConfigError, suggest
from jq.graph import Node
from jq.npu.facts import CNN_OPS, NPU_OPS
from jq.npu.rewrites import FORMS, STRUCTURE
from jq.util import markup

Method = Literal[
    "minmse", "minmse_hist", "nonoverflow", "minmax", "percentile", "entropy", "mse", "layerwise_percentile"
]
WeightMethod = Literal["minmax", "percentile", "mse"]  # of float scales
PercentileMetric = Literal["mae", "mse"]
LAYERWISE_PERCENTS = (99.99, 99.999, 99.99999)
Scale = Literal["power_of_two", "float"]
POWER_OF_TWO_METHODS: frozenset[str] = frozenset({"minmse", "minmse_hist", "nonoverflow"})
Bias = Literal["weight", "int32", "float"]
STAGES = ("bias", "adaround", "adaquant", "block", "network")  # of finetuning

DYNAMIC_OPS = ("Conv", "EmbedLayerNormalization", "Gather", "MatMul", "Transpose")
CONSTRAINTS = (
    "align_concat", "align_pool", "align_pad", "align_slice", "shift_read", "shift_write", "shift_cut", "shift_bias",
    "hard_sigmoid", "shift_swish",
)  # fmt: skip
# What an override of a node may say otherwise.
LOCAL = ("method", "activation", "symmetric", "weight", "weight_method", "weight_symmetric", "per_channel", "bias")


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

    activation: Format = UINT8
    symmetric: bool = True  # activations
    weight: Format = INT8
    weight_symmetric: bool = True
    weight_method: Literal["minmse"] | WeightMethod = "minmse"
    per_channel: bool = False  # weights, with float scales
    bias: Bias = "weight"  # quantized as a weight of its own; at the scale of the products; not at all

    # Choose the nodes that are quantized. Names are node names; exclude and overrides take patterns as of a shell (conv*),
    # and operator types.
    op_types: tuple[str, ...] | None = NPU_OPS  # None for all
    exclude: tuple[str, ...] = ()
    exclude_subgraphs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()  # (first nodes, last nodes) of each
    input_nodes: tuple[str, ...] = ()  # only what follows them, they included
    output_nodes: tuple[str, ...] = ()  # only what leads to them, they included
    overrides: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()  # {node or type: {option: value}}
    weights_only: bool = False
    dynamic: bool = False  # scales of activations come from the data that the model runs on
    fuse_activations: bool = True  # no rounding between a linear operator and the ReLU that alone reads it

    # What is done to the graph: rewrites before calibration, forms after it (`jq.npu.rewrites`); cross-layer
    # equalization; and the NPU's position constraints.
    rewrites: tuple[str, ...] = tuple(STRUCTURE)
    forms: tuple[str, ...] = tuple(FORMS)
    cle: bool = True
    bias_correction: bool = True  # biases take up what rounding of the weights shifts the outputs by, on average
    constraints: tuple[str, ...] = CONSTRAINTS
    strict_quark: bool = False  # every position and code as Quark computes them, its defects included
    # Stages of finetuning, with a + between: bias, biases alone, layer by layer; adaround and adaquant, rounding and
    # weights, too; block, weights, biases and exponents of activations, block by block; network, of all at once.
    finetune: str | None = None
    finetune_steps: int | None = None  # of each unit; None for the method's own
    finetune_rate: float | None = None  # learning rate of weights at first, in codes per step; of logits in adaround
    finetune_batch: int = 10  # samples per step, where a method has batches
    finetune_drop: float = 0.5  # of blocks: share of the inputs that come from the float network

    percentile: float = 99.999
    percentiles: tuple[float, ...] = LAYERWISE_PERCENTS  # that layerwise_percentile chooses from
    percentile_metric: PercentileMetric = "mae"
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
        object.__setattr__(self, "overrides", _overrides(self.overrides))
        if self.strict_quark and self.method == "minmse":
            object.__setattr__(self, "method", "minmse_hist")  # what Quark's minmse is
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name))
        for pattern, options in self.overrides:
            self._merged(options, f"the override of {pattern!r}: ")
        if self.scale == "float" and self.method in POWER_OF_TWO_METHODS:
            raise ConfigError(
                f"method {self.method!r} finds powers of two, but scale='float'; take one of "
                f"{', '.join(m for m in get_args(Method) if m not in POWER_OF_TWO_METHODS)}"
            )
        if self.scale == "power_of_two" and self.per_channel:
            raise ConfigError("per_channel needs scale='float': the NPU has one power of two per tensor")
        if self.scale == "power_of_two" and not self.symmetric:
            raise ConfigError("symmetric=False needs scale='float': power-of-two scales have their zero in the middle")
        if self.scale == "power_of_two" and not self.weight_symmetric:
            raise ConfigError("weight_symmetric=False needs scale='float'")
        if self.scale == "float" and self.constraints:
            raise ConfigError("constraints are of power-of-two scales; with scale='float' give constraints=()")
        if self.bias == "int32" and not (isinstance(self.weight, Integer) and isinstance(self.activation, Integer)):
            raise ConfigError(f"bias='int32' is of integer products, but the weights are {self.weight}")
        if self.dynamic and self.activation != UINT8:
            raise ConfigError(
                f"dynamic scales are of uint8, as DynamicQuantizeLinear finds them, not {self.activation}"
            )
        if self.scale == "float" and self.weight_method == "minmse":
            raise ConfigError("weight_method 'minmse' finds powers of two, but scale='float'; take minmax, or mse")
        if self.moving_average is not None and not 0 < self.moving_average <= 1:
            raise ConfigError(f"moving_average is {self.moving_average}; expected a weight above 0, at most 1")
        if self.moving_average is not None and self.method not in ("minmax", "nonoverflow"):
            raise ConfigError(f"moving_average is of ranges; method {self.method!r} has no use for it")
        if not 0 <= self.finetune_drop <= 1:
            raise ConfigError(f"finetune_drop is {self.finetune_drop}; expected a share, 0 to 1")
        for name in ("bins", "quantized_bins", "batch", "finetune_batch"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 to {1 << 20}")
        for percent in (self.percentile, *self.percentiles):
            if not 0 < percent <= 100:
                raise ConfigError(f"percentile {percent}; expected more than 0, at most 100")

    def __str__(self) -> str:
        """All options, each on a line of its own, as `from_dict` takes them."""
        wrap = textwrap.TextWrapper(120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(wrap.fill(f"{name} = {value!r}") for name, value in self.to_dict().items())

    @property
    def activation_grid(self) -> Integer:
        """The codes that activations use, where they are integers."""
        return _grid("activation", self.activation, self.symmetric)

    @property
    def weight_grid(self) -> Integer:
        """The codes that weights use, where they are integers."""
        return _grid("weight", self.weight, self.weight_symmetric)

    @property
    def calibrates(self) -> bool:
        """Whether scales of activations, of some nodes at least, come from calibration data."""
        formats = [self.activation, *(dict(options).get("activation") for _, options in self.overrides)]
        return any(isinstance(f, Integer) for f in formats) and not (self.weights_only or self.dynamic)

    @property
    def corrects_bias(self) -> bool:
        """Whether calibration measures what bias correction needs, and biases are corrected."""
        integers = isinstance(self.weight, Integer) and self.calibrates
        return self.bias_correction and integers and not self.strict_quark

    @functools.lru_cache(maxsize=1024)  # noqa: B019  a config is small
    def of(self, node: Node) -> QuantConfig:
        """The options of one node: with the overrides of its type, and those of its name after them."""
        changes: dict[str, Any] = {}
        for pattern, options in self.overrides:
            if pattern == node.op_type:
                changes |= dict(options)
        for pattern, options in self.overrides:
            if pattern != node.op_type and fnmatch.fnmatchcase(node.label, pattern):
                changes |= dict(options)
        return self._merged(tuple(changes.items()))

    def _merged(self, options: tuple[tuple[str, Any], ...], where: str = "") -> QuantConfig:
        try:
            return self.replace(overrides=(), **dict(options))
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from error

    def _repr_html_(self) -> str:
        own, default = self.to_dict(), type(self)().to_dict()
        changed = [name for name, value in own.items() if value != default[name]]
        rows = [(name, own[name], default[name]) for name in (*changed, *(n for n in own if n not in changed))]
        title = f"QuantConfig: {len(changed)} options are not the default"
        return markup.preview(title, ("option", "value", "default"), rows)

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
        values["overrides"] = {pattern: dict(options) for pattern, options in self.overrides}
        found = _plain(values)
        assert isinstance(found, dict)
        return found

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> QuantConfig:
        """The config that `to_dict` described.

        >>> QuantConfig.from_dict(presets["A8W8"].to_dict()) == presets["A8W8"]
        True
        """
        return cls().replace(**{k: cls.read(k, v) for k, v in options.items()})

    @staticmethod
    def read(name: str, value: Any) -> Any:
        """The value of an option that JSON holds."""
        return _read(name, value)


def _grid(role: str, format: Format, symmetric: bool) -> Integer:
    if not isinstance(format, Integer):
        raise ConfigError(f"{role} is {format}, which has no integer codes")
    return format.narrow if symmetric else format


def _plain(value: Any) -> Any:
    """Options as JSON holds them."""
    if isinstance(value, (Integer, Float, Block)):
        return value.name
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _read(name: str, value: Any) -> Any:
    """What `_plain` made of an option, undone."""
    if name in ("activation", "weight"):
        return format_named(value)
    if name == "op_types" and value == "all":  # where there is no null
        return None
    if name == "overrides" and isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values()):
        return {pattern: {k: _read(k, v) for k, v in options.items()} for pattern, options in value.items()}
    return tuple(_read("", v) for v in value) if isinstance(value, list) else value


def _overrides(given: Any) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """Overrides, that may be given as dicts, as tuples, which a config can be hashed with."""
    found = []
    try:
        pairs = [(str(pattern), dict(options)) for pattern, options in dict(given).items()]
    except (TypeError, ValueError):
        raise ConfigError(f"overrides is {given!r}; expected {{node or operator: {{option: value}}}}") from None
    for pattern, options in pairs:
        for name in options:
            if name not in LOCAL:
                raise ConfigError(
                    f"an override has no option {name!r}.{suggest(name, LOCAL)} It has: {', '.join(LOCAL)}"
                )
        found.append((pattern, tuple(sorted(options.items()))))
    return tuple(found)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "scale": get_args(Scale),
    "method": get_args(Method),
    "weight_method": ("minmse", *get_args(WeightMethod)),
    "percentile_metric": get_args(PercentileMetric),
    "histogram_range": ("first", "all"),
    "bias": get_args(Bias),
}
_MEMBERS: dict[str, tuple[str, ...]] = {
    "rewrites": tuple(STRUCTURE),
    "forms": tuple(FORMS),
    "constraints": CONSTRAINTS,
}
_NUMBERS: dict[str, type] = {
    "bins": int, "quantized_bins": int, "batch": int, "seed": int, "percentile": float, "finetune_batch": int,
    "finetune_drop": float,
}  # fmt: skip
_SWITCHES = (
    "symmetric", "weight_symmetric", "per_channel", "error_parts", "weights_only", "dynamic", "fuse_activations", "cle",
    "bias_correction", "strict_quark",
)  # fmt: skip
_NAMES = ("exclude", "input_nodes", "output_nodes")


def _check(name: str, value: Any) -> None:
    """Whether an option has a value of its kind."""
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        known = [str(c) for c in choices]
        raise ConfigError(f"{name} is {value!r}; there are {', '.join(known)}.{suggest(str(value), known)}")
    expected = None
    if name in _NUMBERS and not _is_number(value, _NUMBERS[name]):
        expected = "a whole number" if _NUMBERS[name] is int else "a number"
    elif name in _SWITCHES and not isinstance(value, bool):
        expected = "True or False"
    elif name in ("activation", "weight") and not (
        isinstance(value, (Integer, Float, Block)) and value == format_named(value.name)
    ):
        expected = "a format such as jq.formats.INT8; symmetry narrows it"
    elif name == "finetune" and value is not None:
        stages = value.split("+") if isinstance(value, str) else [value]
        unknown = [str(v) for v in stages if v not in STAGES]
        if unknown:
            hint = suggest(unknown[0], list(STAGES))
            raise ConfigError(f"finetune is {value!r}; there are None, {', '.join(STAGES)}, with + between.{hint}")
    elif name == "finetune_steps" and not (value is None or (_is_number(value, int) and value > 0)):
        expected = "None or a whole number above 0"
    elif name == "finetune_rate" and not (value is None or (_is_number(value, float) and value > 0)):
        expected = "None or a number above 0"
    elif name == "moving_average" and not (value is None or _is_number(value, float)):
        expected = "None or a number"
    elif name == "percentiles" and not (
        isinstance(value, tuple) and value and all(_is_number(v, float) for v in value)
    ):
        expected = "a tuple of numbers"
    elif (name in _NAMES or (name == "op_types" and value is not None)) and not _is_names(value):
        expected = "a tuple of names"
    elif name == "exclude_subgraphs" and not (
        isinstance(value, tuple)
        and all(isinstance(v, tuple) and len(v) == 2 and all(_is_names(part) and part for part in v) for v in value)
    ):
        expected = "a tuple of (first nodes, last nodes), each a tuple of names"
    elif name in _MEMBERS and not _is_names(value):
        expected = f"a tuple of names, of {', '.join(_MEMBERS[name])}"
    elif name == "seed" and value < 0:
        expected = "0 or more"
    if expected:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")
    for member in value if name in _MEMBERS else ():
        known = list(_MEMBERS[name])
        if member not in known:
            raise ConfigError(f"{name}: no {member!r}.{suggest(str(member), known)} There are: {', '.join(known)}")


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, str) for v in value)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


# The presets mean what those of Quark with the same names do.
_XINT8 = QuantConfig()
_FLOAT = _XINT8.replace(  # float scales, biases at the scale of the products, no NPU forms or constraints
    scale="float",
    method="minmax",
    activation=INT8,
    weight_method="minmax",
    bias="int32",
    forms=(),
    constraints=(),
)
_PLAIN = {"op_types": CNN_OPS, "rewrites": ("hard_swish_to_product",)}  # of onnxruntime's own scheme, for 8 bits
_ASYMMETRIC = _FLOAT.replace(activation=UINT8, symmetric=False, method="percentile", **_PLAIN)
_WIDE = _FLOAT.replace(activation=UINT16, symmetric=False, method="percentile")
_ACCURATE = {"percentile": 99.9999, "finetune": "adaround"}
_BASES = {
    "XINT8": _XINT8,
    "A8W8": _FLOAT,
    "A16W8": _FLOAT.replace(activation=INT16),
    "S8S8_AAWS": _ASYMMETRIC.replace(activation=INT8, percentile=99.9999),
    "U8S8_AAWS": _ASYMMETRIC,
    "S16S8_ASWS": _FLOAT.replace(activation=INT16, method="percentile"),
    "U16S8_AAWS": _WIDE,
}
_CAST = _FLOAT.replace(bias="weight")
_CASTS = {
    "FP16": FLOAT16, "BF16": BFLOAT16, "BFP16": BFP16, "MX4": MX4, "MX6": MX6, "MX9": MX9, "MXFP8E5M2": MXFP8E5M2,
    "MXFP8E4M3": MXFP8E4M3, "MXFP6E3M2": MXFP6E3M2, "MXFP6E2M3": MXFP6E2M3, "MXFP4E2M1": MXFP4E2M1, "MXINT8": MXINT8,
}  # fmt: skip
_CASTING = {name: _CAST.replace(activation=format, weight=format) for name, format in _CASTS.items()}
_CASTING |= {k: c.replace(fuse_activations=False) for k, c in _CASTING.items() if isinstance(c.weight, Block)}
_CASTING["BF16"] = _CASTING["BF16"].replace(op_types=None)

_PRESETS = {
    **{
        f"{name}{suffix}": config.replace(finetune=finetune)
        for name, config in _BASES.items()
        for suffix, finetune in (("", None), ("_ADAROUND", "adaround"), ("_ADAQUANT", "adaquant"))
    },
    "XINT8_ACCURATE": _XINT8.replace(finetune="adaround+block"),
    "VINT8": _XINT8.replace(
        activation=INT8,
        rewrites=("batchnorm_to_conv", "split_to_slice"),
        forms=(),
        constraints=(),
        fuse_activations=False,
        op_types=None,
    ),
    "U8U8_AAWA": _ASYMMETRIC.replace(weight=UINT8, weight_symmetric=False),
    "INT8_CNN_DEFAULT": _ASYMMETRIC.replace(method="minmax"),
    "INT8_CNN_ACCURATE": _ASYMMETRIC.replace(**_ACCURATE),
    "INT16_CNN_DEFAULT": _WIDE.replace(weight=INT16, method="minmax"),
    "INT16_CNN_ACCURATE": _WIDE.replace(weight=INT16, **_ACCURATE),
    **_CASTING,
    **{f"{name}_ADAQUANT": config.replace(finetune="adaquant") for name, config in _CASTING.items()},
    "UINT8_DYNAMIC_QUANT": _ASYMMETRIC.replace(
        weight=UINT8, weight_symmetric=False, bias="float", dynamic=True, op_types=DYNAMIC_OPS, rewrites=(), cle=False
    ),
}
# Names of the whole family in the issues and guides: the usual member.
_FAMILIES = {"MXFP8": "MXFP8E4M3", "MXFP6": "MXFP6E2M3", "MXFP4": "MXFP4E2M1"}


class _UnknownPresetError(ConfigError, KeyError):
    """What a mapping raises, for `in` and `get`; with the text of an error, where a KeyError's is a repr."""

    __str__ = Exception.__str__


class Presets(Mapping[str, QuantConfig]):
    """Configs by the names that Quark gives them, with or without its `_CONFIG`; MXFP8, -6 and -4 are the usual ones.

    >>> presets["MXFP8"] == presets["MXFP8E4M3_CONFIG"], "XINT9" in presets
    (True, False)
    """

    def __init__(self, configs: Mapping[str, QuantConfig]) -> None:
        self._configs = dict(configs)

    def __getitem__(self, name: str) -> QuantConfig:
        family, *rest = str(name).removesuffix("_CONFIG").split("_")
        full = "_".join((_FAMILIES.get(family, family), *rest))
        if full not in self._configs:
            near = suggest(full.upper(), [*self._configs, *_FAMILIES])
            raise _UnknownPresetError(f"no preset {name!r}.{near} There are: {', '.join(self._configs)}")
        return self._configs[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)


presets = Presets(_PRESETS)


def resolve(config: QuantConfig | str) -> QuantConfig:
    """The config itself, or the preset of that name."""
    return config if isinstance(config, QuantConfig) else presets[config]
