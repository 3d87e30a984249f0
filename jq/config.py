"""The options of a quantization as data: `QuantConfig`, and the presets."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import textwrap
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Literal, get_args

from jq.arithmetic.formats import (
    BFLOAT16,
    BLOCKS,
    FLOAT16,
    INT2,
    INT4,
    INT8,
    INT16,
    UINT4,
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
from jq.npu.facts import CNN_OPS, DYNAMIC_OPS, NPU_OPS
from jq.npu.rewrites import FORMS, KEEPS_WHOLE, STRUCTURE
from jq.util import markup
from jq.util.fields import check, declared, documented, field

Method = Literal[
    "minmse", "minmse_hist", "nonoverflow", "minmax", "percentile", "entropy", "mse", "layerwise_percentile"
]
WeightMethod = Literal["minmax", "percentile", "mse"]  # of float scales
PercentileMetric = Literal["mae", "mse"]
LAYERWISE_PERCENTS = (99.99, 99.999, 99.99999)
Scale = Literal["power_of_two", "float"]
POWER_OF_TWO_METHODS: frozenset[str] = frozenset({"minmse", "minmse_hist", "nonoverflow"})
Bias = Literal["weight", "int32", "float"]
Pairs = Literal["shared", "edges", "each"]
STAGES = (  # of finetuning
    "bias", "adaround", "adaround_only", "descent", "adaquant", "gptq", "gpfq", "flexround", "exponents", "block",
    "brecq", "network",
)  # fmt: skip
OWN = "own:"  # a stage whose rounding is the user's: own:name

CONSTRAINTS = (
    "align_concat", "align_pool", "align_pad", "align_slice", "shift_read", "shift_write", "shift_cut", "shift_bias",
    "hard_sigmoid", "shift_swish",
)  # fmt: skip

CANONICAL = (  # of `jq.passes.canonical`
    "instance_norm", "layer_norm", "lp_norm", "rms_norm", "softmax", "hard_swish", "gelu", "gelu_tanh", "silu", "mish",
    "sigmoid", "hard_sigmoid", "group_norm", "factors",
)  # fmt: skip


def _is_format(value: Any) -> bool:
    return bool(value == format_named(value.name))


def _is_stages(value: str) -> bool:
    return all(s in STAGES or (s.startswith(OWN) and s.removeprefix(OWN).isidentifier()) for s in value.split("+"))


def _is_ends(value: tuple[tuple[tuple[str, ...], ...], ...]) -> bool:
    return all(names for ends in value for names in ends)


_FORMAT: dict[str, Any] = {"valid": _is_format, "needs": "a format such as jq.formats.INT8 (symmetry narrows it)"}
_STEPS: dict[str, Any] = {"least": 1, "most": 1 << 20}


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """The options of a quantization. Immutable: `replace` returns a changed copy.

    >>> presets["XINT8"].replace(method="nonoverflow").method
    'nonoverflow'
    """

    scale: Scale = field("power_of_two", "the scales that are allowed")
    method: Method = field(
        "minmse",
        "how the scales of activations are found: minmse minimizes the squared error over the values themselves, minmse_hist "
        "over Quark's histogram of 2048 bins, and nonoverflow covers the range; the other methods give a float range, and a "
        "power-of-two scale is then the nearest one; minmax with 8 bits and symmetric float scales clips a tensor that only a "
        "function such as SiLU reads, where that function is flat",
        local=True,
    )
    activation: Format = field(UINT8, "format of activations", local=True, **_FORMAT)
    symmetric: bool = field(
        True,
        "whether the codes of activations are symmetric around zero; False with powers of two, which needs constraints=(), "
        "gives all codes to the positive values of tensors that have no others",
        local=True,
    )
    weight: Format = field(INT8, "format of weights", local=True, **_FORMAT)
    weight_symmetric: bool = field(True, "whether the codes of weights are symmetric around zero", local=True)
    weight_method: Literal["minmse"] | WeightMethod = field("minmse", "how the scales of weights are found", local=True)
    per_channel: bool = field(
        False,
        "one scale for each output channel of a weight; needs float scales, or constraints=(), as the NPU has one per tensor",
        local=True,
    )
    bias: Bias = field(
        "weight",
        "how biases are quantized: weight, like a weight with a scale of its own; int32, at the scale of the products; float, not "
        "at all",
        local=True,
    )

    op_types: tuple[str, ...] | None = field(NPU_OPS, "operators to quantize; None quantizes all")
    exclude: tuple[str, ...] = field((), "nodes to leave in float: names, patterns (`conv*`) or operators")
    exclude_subgraphs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = field(
        (),
        "subgraphs to leave in float, each by its first and last nodes",
        valid=_is_ends,
        needs="a tuple of pairs (first nodes, last nodes), each a tuple of at least one name",
    )
    float_tensors: tuple[str, ...] = field((), "tensors of the prepared graph to leave in float, by name")
    input_nodes: tuple[str, ...] = field((), "quantize only these nodes and what follows them")
    output_nodes: tuple[str, ...] = field((), "quantize only these nodes and what leads to them")
    head: Literal["float", "int8"] = field(
        "float",
        "the nodes that decode a detector's boxes and scores behind its last layers: float leaves them in float, if "
        "activations are calibrated integers and strict_quark is off; int8 quantizes them like the rest",
    )
    overrides: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = field(
        (),
        "different options for some nodes, selected by name, pattern or operator",
        needs="{node or operator: {option: value}}",
    )
    end_bits: Literal[8, 16] | None = field(
        None,
        "the minimum bits of the weights of the first and last layers, of the activations that they read and of the outputs",
    )
    weights_only: bool = field(False, "quantize weights and leave activations in float")
    dynamic: bool = field(False, "compute the scales of activations while the model runs, from its own data")
    fuse_activations: bool = field(
        True, "do not round between a linear operator and the activation that is its only reader"
    )

    canonical: tuple[str, ...] = field(
        CANONICAL,
        "operators to restore where the exporter decomposed them, and constant factors to fold into linear layers, before "
        "anything is quantized; exact in float (`jq.passes.canonical`)",
        among=CANONICAL,
    )
    rewrites: tuple[str, ...] = field(
        tuple(name for name in STRUCTURE if name not in KEEPS_WHOLE),
        "changes to the graph before calibration (`jq.npu.rewrites`)",
        among=tuple(STRUCTURE),
    )
    forms: tuple[str, ...] = field(
        tuple(FORMS), "operators to replace by the NPU's forms of them, after calibration", among=tuple(FORMS)
    )
    form_loss: float | None = field(
        0.001,
        "the largest squared error, relative to the power and summed over all Sigmoids, at which they become HardSigmoids, the "
        "NPU's form, as measured on calibration data; None always replaces them, as Quark does",
        least=0,
    )
    whole: float | None = field(
        None,
        "keep the network in one piece on the NPU: replace each Clip behind a layer by a Relu, or remove it, where the codes or "
        "the data cut there anyway, or where the squared error that this adds, relative to the power and summed over all such "
        "Clips, is at most this number; also rewrite shuffles, Transposes of five dims, Gathers, depthwise 1x1 convolutions, "
        "means, Resizes and gates into what the NPU has, exactly; 0 allows only what is exact; ignored under strict_quark",
        least=0,
    )
    pairs: Pairs = field(
        "edges",
        "which readers of a tensor get quantizers of their own: edges, nodes in float (not in strict_quark); each, all; shared, "
        "none",
    )
    output_ties: float | None = field(
        0.02,
        "the share of calibration samples whose two largest outputs may become equal because, on the NPU, an average pool at "
        "the end of the network keeps the step of its input; above it, the pool stays in float on the host; None always "
        "quantizes the pool",
        least=0,
    )
    cle: bool | Literal["nagel"] = field(
        True,
        "cross-layer equalization: True for minimum noise, nagel for equal ranges as in arXiv:1906.04721 (`jq.equalize`)",
    )
    bias_correction: bool | Literal["statistics"] = field(
        True,
        "correct biases for the mean shift that the rounding of weights and of short negative tails causes: True also fits "
        "them layer by layer, where the guard finds that means shift and the outputs gain by it; statistics uses only "
        "what calibration measured, which takes no extra time",
    )
    constraints: tuple[str, ...] = field(CONSTRAINTS, "the NPU's constraints on exponents to apply", among=CONSTRAINTS)
    guard: float | None = field(
        18.0,
        "the lowest SQNR in dB that a tensor may keep after rounding, measured on calibration data; a tensor that would keep "
        "less is repaired or left in float, with a warning. The value applies to activations in 8 bits: each bit less lowers "
        "it by 6 dB; for weights, judged by their layer's output, and operands of a Concat it is 8 dB lower. None (off on the "
        "command line) disables the guard",
    )
    strict_quark: bool = field(False, "compute every exponent and code as Quark does, including its defects")
    finetune: str | None = field(
        None,
        "stages of finetuning, joined by +. Layer by layer: bias tunes biases; adaround runs AdaRound and then coordinate "
        "descent, which adaround_only and descent run alone; adaquant moves weights to any code; gptq, gpfq and flexround are the "
        "roundings of these papers; own:name runs a rounding of your own (see `jq.finetune`). Block by block: block tunes "
        "weights, biases and the exponents of activations; brecq does so with each weight between its "
        "two codes. All at once: network tunes the same as block; "
        "exponents searches those of activations, judged by the outputs, with the weights of the stages before it",
        among=STAGES,
        valid=_is_stages,
        needs=f"None, or stages with + between: {', '.join(STAGES)}, {OWN}name",
    )
    tune_weight_exponents: bool = field(
        False,
        "let finetuning choose the power-of-two scales of weights: layer stages choose, among three neighbours, the one with the "
        "smallest error of the layer; the other stages learn them together with the weights",
    )
    finetune_steps: int | None = field(None, "steps for each unit; None uses the method's own number", least=1)
    finetune_rate: float | None = field(
        None,
        "initial learning rate: of weights in codes per step, of AdaRound in logits; None uses the method's own",
        above=0,
    )
    finetune_batch: int = field(10, "samples for each step, in methods that use batches", **_STEPS)
    finetune_drop: float = field(
        0.5, "block finetuning: the share of inputs taken from the float network", least=0, most=1
    )
    finetune_norm: float = field(
        2.0,
        "block finetuning: errors count by this power of theirs: 2 by their squares, 4 the largest most",
        least=2,
        most=8,
    )

    percentile: float = field(99.999, "the percentile that method percentile keeps", above=0, most=100)
    percentiles: tuple[float, ...] = field(
        LAYERWISE_PERCENTS,
        "the percentiles among which layerwise_percentile chooses",
        above=0,
        most=100,
        valid=bool,
        needs="a tuple of at least one number above 0, at most 100",
    )
    percentile_metric: PercentileMetric = field("mae", "the error that layerwise_percentile minimizes")
    bins: int = field(2048, "number of bins in histograms", **_STEPS)
    quantized_bins: int = field(
        128,
        "quantized bins of method entropy; onnxruntime's default, bins = quantized_bins, leaves nothing to search",
        **_STEPS,
    )
    histogram_range: Literal["first", "all"] = field(
        "all",
        "the data that give a float method's histogram its range: all, which reads the data twice, as onnxruntime does; or "
        "first, which adds bins for later data, as Quark does and minmse_hist always does",
    )
    error_parts: bool = field(
        False, "method minmse: also keep the error that clipping causes at each candidate, at twice the cost"
    )
    moving_average: float | None = field(
        None, "the weight of a new sample in a moving average of minima and maxima", above=0, most=1
    )

    batch: int = field(8, "samples for each step of calibration", **_STEPS)
    held_out: int | None = field(
        None,
        "keep one sample in this many out of calibration and finetuning, for decisions on unseen data (`jq.auto`); None keeps "
        "none out",
        least=2,
    )
    seed: int = field(0, "the seed of random calibration data and of finetuning's batches", least=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", _overrides(self.overrides))
        if self.strict_quark and self.method == "minmse":
            object.__setattr__(self, "method", "minmse_hist")  # Quark's minmse
        check(self)
        for pattern, options in self.overrides:
            self._merged(options, f"the override of {pattern!r}: ")
        floats, integers = self.scale == "float", all(isinstance(f, Integer) for f in (self.weight, self.activation))
        methods = ", ".join(m for m in get_args(Method) if m not in POWER_OF_TWO_METHODS)
        pot, float_scales = "scale='power_of_two'; got scale='float'", "scale='float'; got scale='power_of_two'"
        for broken, needs in (
            (floats and self.method in POWER_OF_TWO_METHODS, f"method={self.method!r} needs {pot}; use one of {methods}"),
            (not floats and self.per_channel and self.constraints,
             f"per_channel needs {float_scales}; the NPU has one scale per tensor; for research, set constraints=()"),
            (not floats and not self.symmetric and (self.constraints or self.method != "minmse"),
             f"symmetric=False needs {float_scales}; use symmetric=True, or constraints=() and method='minmse'"),
            (not floats and not self.weight_symmetric and self.constraints,
             f"weight_symmetric=False needs {float_scales}; use weight_symmetric=True, or constraints=()"),
            (floats and self.constraints, f"constraints needs {pot}; use constraints=()"),
            (self.bias == "int32" and not integers, "bias='int32' needs integer activations and weights; got "
             f"{self.activation} and {self.weight}; use bias='weight'"),
            (self.dynamic and self.activation != UINT8, f"dynamic needs activation=UINT8; got {self.activation}; "
             "use uint8, which DynamicQuantizeLinear computes"),
            (self.strict_quark and self.cle == "nagel", "cle='nagel' needs strict_quark=False; got True; use cle=True"),
            (floats and self.weight_method == "minmse", f"weight_method='minmse' needs {pot}; use minmax or mse"),
            (self.moving_average is not None and self.method not in ("minmax", "nonoverflow"),
             f"moving_average needs method='minmax' or 'nonoverflow'; got {self.method!r}"),
        ):  # fmt: skip
            if broken:
                raise ConfigError(needs)

    def __str__(self) -> str:
        """All options, each on a line of its own, as `from_dict` takes them."""
        wrap = textwrap.TextWrapper(120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(wrap.fill(f"{name} = {value!r}") for name, value in self.to_dict().items())

    @property
    def activation_grid(self) -> Integer:
        """The codes that activations use, where they are integers."""
        return _grid("activation", self.activation, self.symmetric)

    @property
    def one_sided_grid(self) -> Integer | None:
        """The codes of tensors without negative values, as the positive half of a grid, where they have their own."""
        if self.scale == "float" or self.symmetric or not isinstance(self.activation, Integer):
            return None
        reach = self.activation.qmax - self.activation.qmin
        return Integer(self.activation.bits + 1, True, -reach - 1, reach)

    @property
    def measured_grid(self) -> Integer:
        """The codes whose errors calibration measures."""
        return self.one_sided_grid or self.activation_grid

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
    def stages(self) -> tuple[str, ...]:
        """The stages of finetuning, in order."""
        return tuple(self.finetune.split("+")) if self.finetune else ()

    @property
    def corrects_bias(self) -> bool:
        """Whether calibration measures what bias correction needs, and biases are corrected."""
        integers = isinstance(self.weight, Integer) and self.calibrates
        return bool(self.bias_correction) and integers and not self.strict_quark

    def of(self, node: Node) -> QuantConfig:
        """The options of one node: with the overrides of its type, and those of its name after them."""
        return self._named(node.op_type, node.label)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  a config is small
    def _named(self, op_type: str, label: str) -> QuantConfig:
        by_type = [options for pattern, options in self.overrides if pattern == op_type]
        by_name = [o for pattern, o in self.overrides if pattern != op_type and fnmatch.fnmatchcase(label, pattern)]
        return self._merged(tuple(itertools.chain(*by_type, *by_name)))

    @functools.lru_cache(maxsize=256)  # noqa: B019  nodes are many, their options few
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

    def at_ends(self) -> QuantConfig:
        """The options of the first and the last layers."""
        bits = self.end_bits or 0

        def widened(format: Format) -> Format:
            if not isinstance(format, Integer) or format.bits >= bits:
                return format
            return format_named(f"{'' if format.signed else 'u'}int{bits}")

        return self.replace(weight=widened(self.weight), activation=widened(self.activation))

    def replace(self, **changes: Any) -> QuantConfig:
        """A copy with some options changed; an unknown one is a ConfigError."""
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"no option {name!r}.{suggest(name, known)} Available: {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON holds them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["overrides"] = {pattern: dict(options) for pattern, options in self.overrides}
        return {name: _plain(value) for name, value in values.items()}

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
        read = QuantConfig.read
        if name in ("activation", "weight"):
            return format_named(value)
        if name == "op_types" and value == "all":  # where there is no null
            return None
        if name == "overrides" and isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values()):
            return {pattern: {k: read(k, v) for k, v in options.items()} for pattern, options in value.items()}
        return tuple(read("", v) for v in value) if isinstance(value, list) else value


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


def _overrides(given: Any) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """Overrides, given as dicts or pairs, as tuples, which can be hashed."""
    overrides = []
    try:
        pairs = [(str(pattern), dict(options)) for pattern, options in dict(given).items()]
    except (TypeError, ValueError):
        raise ConfigError(f"overrides needs {{node or operator: {{option: value}}}}; got {given!r}") from None
    for pattern, options in pairs:
        for name in options:
            if name not in LOCAL:
                near = suggest(name, LOCAL)
                raise ConfigError(f"an override has no option {name!r}.{near} It has: {', '.join(LOCAL)}")
            if not isinstance(options[name], Hashable):
                kind, own = declared(QuantConfig)[name]
                raise ConfigError(f"the override of {pattern!r}: {name} needs {own.words(kind)}; got {options[name]!r}")
        overrides.append((pattern, tuple(sorted(options.items()))))
    return tuple(overrides)


LOCAL = tuple(name for name, (_, own) in declared(QuantConfig).items() if own.local)  # options of an override


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
# Low bits, for research: powers of two that no NPU takes. Zero points stay in the middle, biases are exact.
_LOW = _XINT8.replace(weight=INT4, bias="int32", per_channel=True, end_bits=8, forms=(), constraints=())
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
_BLOCKS = ["BFP16", "MX4", "MX6", "MX9", "MXFP8E5M2", "MXFP8E4M3", "MXFP6E3M2", "MXFP6E2M3", "MXFP4E2M1", "MXINT8"]
_CASTS: Mapping[str, Format] = {"FP16": FLOAT16, "BF16": BFLOAT16} | {name: BLOCKS[name.lower()] for name in _BLOCKS}
_CASTING = {name: _CAST.replace(activation=format, weight=format) for name, format in _CASTS.items()}
_CASTING |= {k: c.replace(fuse_activations=False) for k, c in _CASTING.items() if isinstance(c.weight, Block)}
_CASTING["BF16"] = _CASTING["BF16"].replace(op_types=None)

_PRESETS = {
    **{
        f"{name}{suffix}": config.replace(finetune=finetune)
        for name, config in _BASES.items()
        for suffix, finetune in (("", None), ("_ADAROUND", "adaround"), ("_ADAQUANT", "adaquant"))
    },
    "XINT8_ACCURATE": _XINT8.replace(finetune="adaround+exponents"),
    "W4A8": _LOW,
    "W4A4": _LOW.replace(activation=UINT4, symmetric=False),
    "W2A4": _LOW.replace(weight=INT2, weight_symmetric=False, activation=UINT4, symmetric=False),
    "VINT8": _XINT8.replace(
        activation=INT8,
        rewrites=("batchnorm_to_conv", "split_to_slice"),
        forms=(),
        constraints=(),
        fuse_activations=False,
        op_types=None,
        pairs="each",
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
    """An unknown preset: a KeyError for `in` and `get`, printed as an error, where a KeyError prints a repr."""

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
            raise _UnknownPresetError(f"no preset {name!r}.{near} Available: {', '.join(self._configs)}")
        return self._configs[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)


presets = Presets(_PRESETS)


def resolve(config: QuantConfig | str) -> QuantConfig:
    """The config itself, or the preset of that name."""
    return config if isinstance(config, QuantConfig) else presets[config]
