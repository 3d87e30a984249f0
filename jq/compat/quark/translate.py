"""Translation of Quark's configs: formats and families here, `QConfig` in `newer`, single options in `options`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from jq.arithmetic import formats
from jq.arithmetic.formats import Block, Format, Integer
from jq.compat.quark.calibration import CalibrationMethod, ExtendedCalibrationMethod, LayerWiseMethod, PowerOfTwoMethod
from jq.compat.quark.draft import Draft, apply, matching, names
from jq.compat.quark.inputs import Inputs, converted
from jq.compat.quark.newer import add_layers, older
from jq.compat.quark.options import AS_FIELDS, EXTRA_OPTIONS, FAST_FINETUNE, FIELDS
from jq.compat.quark.quantization.config import algorithm, custom_config
from jq.compat.quark.quantization.config.config import Config, QConfig, QuantizationConfig
from jq.compat.quark.quantization.config.data_type import DataType
from jq.compat.quark.quantization.quant_utils import ExtendedQuantFormat, QuantFormat, VitisQuantFormat
from jq.config import QuantConfig, presets
from jq.errors import ConfigError, check_choice, suggest
from jq.graph import Graph


@dataclasses.dataclass(frozen=True)
class Translation:
    """A translated Quark config: a `QuantConfig`, and the other arguments of `jq.quantize`."""

    config: QuantConfig
    inputs: Inputs
    graph: Graph | None = None  # the graph to quantize, if it is not the model itself
    format: Any = "qdq"
    opset: int | None = None
    spill: str | os.PathLike[str] | None = None
    ranges_file: str | None = None  # where calibration is kept, and taken from
    external: bool = False  # whether weights are stored in a file beside the model
    summary: bool = True  # whether to print what came of it
    notes: tuple[str, ...] = ()  # where we do something other than an option says


def translate(config: Config | QConfig, graph: Graph, algorithms: Sequence[algorithm.AlgoConfig] = ()) -> Translation:
    """Return the translation of a Quark config for a float graph; a ConfigError names what is not supported.

    >>> import jq
    >>> from jq.compat.quark import Config, get_default_config
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> translate(Config(get_default_config("XINT8")), graph).config == jq.presets["XINT8"]
    True
    """
    if isinstance(config, QConfig):
        settings, algorithms = older(config), config.algo_config
    elif isinstance(config, Config) and isinstance(config.global_quant_config, QuantizationConfig):
        settings = config.global_quant_config
    else:
        raise ConfigError(f"expected a Config or a QConfig; got {type(config).__name__!r}")
    extra = _options("extra_options", settings.extra_options)
    settings = dataclasses.replace(settings, **{AS_FIELDS[k]: extra.pop(k) for k in [*extra] if k in AS_FIELDS})
    extra.setdefault("MatMulConstBOnly", settings.enable_npu_transformer)
    _check_switches(settings)
    fed, taken = _converted(settings, extra, graph)
    moved = () if taken is fed else tuple(v.name for v in fed.inputs if v.shape is not None and len(v.shape) == 4)
    graph, given = taken, graph
    draft = _family(settings, extra, graph)
    apply(FIELDS, {name: getattr(settings, name) for name in FIELDS}, draft, "QuantizationConfig")
    _choose_nodes(settings, draft)
    apply(EXTRA_OPTIONS, extra, draft, "extra_options")
    _check_fused(extra)
    if settings.include_fast_ft:
        _finetune(_options("FastFinetune", extra.get("FastFinetune")), draft)
    elif extra.get("FastFinetune"):
        draft.notes.append("FastFinetune has no effect without include_fast_ft=True")
    _algorithms(algorithms, draft)
    if isinstance(config, QConfig):
        add_layers(config, draft)
    return Translation(
        draft.base.replace(**draft.changes),
        Inputs(fed.inputs, moved, draft.samples, draft.random, draft.shapes, draft.ranges),
        None if graph is given else graph,
        _FILES[settings.quant_format],
        draft.opset,
        draft.spill,
        draft.ranges_file,
        settings.use_external_data_format,
        settings.print_summary,
        tuple(draft.notes),
    )


def _options(name: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is a {type(given).__name__}; expected options by name")
    return dict(given)


def _converted(settings: QuantizationConfig, extra: Mapping[str, Any], graph: Graph) -> tuple[Graph, Graph]:
    try:
        shapes, last = extra.get("FixShapes"), settings.convert_nchw_to_nhwc
        return converted(graph, float32=settings.convert_fp16_to_fp32, shapes=shapes, channels_last=last)
    except ConfigError as error:
        asked = [n for n in ("convert_fp16_to_fp32", "convert_nchw_to_nhwc") if getattr(settings, n)]
        asked += ["FixShapes"] if extra.get("FixShapes") else []
        raise ConfigError(f"{', '.join(asked)}: {error}") from error


def _check_switches(settings: QuantizationConfig) -> None:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{field.name} is {value!r}; expected True or False")


# --- Families: what decides which of Quark's quantizers is meant ---

_METHODS: Mapping[Enum, tuple[str, str]] = {
    CalibrationMethod.MinMax: ("float", "minmax"),
    CalibrationMethod.Entropy: ("float", "entropy"),
    CalibrationMethod.Percentile: ("float", "percentile"),
    LayerWiseMethod.LayerWisePercentile: ("float", "layerwise_percentile"),
    ExtendedCalibrationMethod.MinMSE: ("float", "mse"),
    PowerOfTwoMethod.NonOverflow: ("power_of_two", "nonoverflow"),
    PowerOfTwoMethod.MinMSE: ("power_of_two", "minmse"),
}
_FILES: Mapping[Enum, str] = {
    QuantFormat.QDQ: "qdq",
    QuantFormat.QOperator: "qoperator",
    ExtendedQuantFormat.QDQ: "qdq",
    ExtendedQuantFormat.QOperator: "qoperator",
    VitisQuantFormat.QDQ: "vitis_qdq",
    VitisQuantFormat.FixNeuron: "fix_neuron",
}
_TYPES: Mapping[str, Format] = {
    "QInt4": formats.INT4,
    "QUInt4": formats.UINT4,
    "QInt8": formats.INT8,
    "QUInt8": formats.UINT8,
    "QInt16": formats.INT16,
    "QUInt16": formats.UINT16,
    "QFloat16": formats.FLOAT16,
    "QBFloat16": formats.BFLOAT16,
}
_ATTENTION = ("Gemm", "MatMul")  # what enable_npu_transformer quantizes


def _family(settings: QuantizationConfig, extra: Mapping[str, Any], graph: Graph) -> Draft:
    """Return the preset with the placement and rewrites of one of Quark's quantizers, with formats and scales."""
    _known("quant_format", settings.quant_format, _FILES)
    if settings.use_dynamic_quant:
        if settings.enable_npu_cnn or settings.enable_npu_transformer:
            raise ConfigError(
                "use_dynamic_quant=True: the NPU does not support scales that are computed while the model runs"
            )
        draft = Draft(presets["UINT8_DYNAMIC_QUANT"], graph)
        draft["weight"] = _type("weight_type", settings.weight_type, extra)
        draft["weight_symmetric"] = _symmetric("WeightSymmetric", extra, draft["weight"].signed)
        draft["per_channel"] = settings.per_channel
        return draft
    scale, method = _known("calibrate_method", settings.calibrate_method, _METHODS)
    activation = _type("activation_type", settings.activation_type, extra)
    weight = _type("weight_type", settings.weight_type, extra)
    power, unheeded = scale == "power_of_two", list[str]()
    if settings.enable_npu_cnn and not power and isinstance(settings.quant_format, ExtendedQuantFormat):
        settings = dataclasses.replace(settings, enable_npu_cnn=False)
        unheeded = [f"enable_npu_cnn=True has no effect with {settings.quant_format}, as in Quark"]
    if settings.enable_npu_cnn and not power:
        raise ConfigError(
            f"enable_npu_cnn=True with calibrate_method={settings.calibrate_method}: the NPU needs scales that are powers "
            "of two; use PowerOfTwoMethod.MinMSE or NonOverflow"
        )
    if settings.quant_format == VitisQuantFormat.FixNeuron and not power:
        raise ConfigError(
            f"quant_format=VitisQuantFormat.FixNeuron with calibrate_method={settings.calibrate_method}: a FixNeuron needs "
            "a power-of-two scale; use a PowerOfTwoMethod, or QuantFormat.QDQ"
        )
    plain = isinstance(settings.quant_format, QuantFormat) and not settings.enable_npu_transformer
    draft = Draft(presets["XINT8" if settings.enable_npu_cnn else "INT8_CNN_DEFAULT" if plain else "A8W8"], graph)
    draft.notes.extend(unheeded)
    integers = isinstance(activation, Integer) and isinstance(weight, Integer)
    signed = power or not isinstance(weight, Integer) or weight.signed
    draft.changes = {
        "scale": scale,
        "method": method,
        "activation": activation,
        "weight": weight,
        "symmetric": _symmetric("ActivationSymmetric", extra, power or not isinstance(activation, Integer)),
        "weight_symmetric": _symmetric("WeightSymmetric", extra, signed),
        "weight_method": "minmse" if method == "minmse" else "minmax",
        "per_channel": settings.per_channel,
        "bias": "int32" if integers and not settings.enable_npu_cnn else "weight",
        "fuse_activations": not isinstance(weight, Block),  # as Quark places its quantizers of blocks
        "cle": settings.include_cle,
    }
    if settings.enable_npu_transformer:
        draft["op_types"] = _ATTENTION
    if not settings.optimize_model:
        draft["rewrites"] = tuple(r for r in draft["rewrites"] if r != "hard_swish_to_product")
        draft.notes.append("optimize_model=False: jq always simplifies a graph, which does not change its results")
    return draft


def _known(field: str, value: Any, table: Mapping[Enum, Any]) -> Any:
    if not isinstance(value, Enum) or value not in table:
        raise ConfigError(f"{field} is {value!r}; expected one of {', '.join(map(str, table))}")
    return table[value]


def _symmetric(option: str, extra: Mapping[str, Any], otherwise: bool) -> bool:
    given = extra.get(option)
    if given is not None and not isinstance(given, bool):
        raise ConfigError(f"{option} is {given!r}; expected True or False")
    return otherwise if given is None else given


def _type(field: str, value: Any, extra: Mapping[str, Any]) -> Format:
    if isinstance(value, DataType):
        format: Format = value.value
        return format
    name = value.name if isinstance(value, Enum) else None
    if name == "QBFP":
        return _block("BFPAttributes", extra, _BFP)
    if name == "QMX":
        return _block("MXAttributes", extra, _MX)
    if name is None or name not in _TYPES:
        known = ", ".join([*_TYPES, "QBFP", "QMX"])
        raise ConfigError(f"{field} is {value!r}, which is not a tensor format of jq; expected one of {known}")
    return _TYPES[name]


_BFP = (
    (custom_config.DEFAULT_BFP_PARAMS, formats.BFP16),
    ({**custom_config.DEFAULT_MICROEXPONENTS_PARAMS, "bit_width": 11}, formats.MX4),
    (custom_config.DEFAULT_MICROEXPONENTS_PARAMS, formats.MX6),
    ({**custom_config.DEFAULT_MICROEXPONENTS_PARAMS, "bit_width": 16}, formats.MX9),
)
_MX = tuple(
    ({**custom_config.DEFAULT_MICROSCALING_PARAMS, "element_dtype": block.element.name}, block)
    for block in formats.BLOCKS.values()
    if block.kind == "mx"
)


def _block(option: str, extra: Mapping[str, Any], known: Sequence[tuple[Mapping[str, Any], Block]]) -> Block:
    """The block format with these attributes; its axis is the one that products are summed over, as in Quark."""
    given = _options(option, extra.get(option))
    for attributes, block in known:
        if {**attributes, **given, "axis": 1} == attributes:
            return block
    blocks = "; ".join(f"{block}: {dict(attributes)}" for attributes, block in known)
    raise ConfigError(f"{option} is {given!r}, which describes no format of jq; expected one of {blocks}")


def _choose_nodes(settings: QuantizationConfig, draft: Draft) -> None:
    """Choose the nodes that are quantized."""
    graph = draft.graph
    if types := names("op_types_to_quantize", settings.op_types_to_quantize):
        draft["op_types"] = types
    if more := names("extra_op_types_to_quantize", settings.extra_op_types_to_quantize):
        draft["op_types"] = None if draft["op_types"] is None else tuple(dict.fromkeys((*draft["op_types"], *more)))
    draft["input_nodes"] = names("input_nodes", settings.input_nodes)
    draft["output_nodes"] = names("output_nodes", settings.output_nodes)
    draft.exclude(matching("nodes_to_exclude", settings.nodes_to_exclude, graph))
    if settings.nodes_to_quantize:
        chosen = set(matching("nodes_to_quantize", settings.nodes_to_quantize, graph))
        if unknown := sorted(chosen - {n.label for n in graph.nodes}):
            near = suggest(unknown[0], [n.label for n in graph.nodes])
            raise ConfigError(f"nodes_to_quantize: no node {unknown[0]!r}.{near}")
        draft.exclude([n.label for n in graph.nodes if n.label not in chosen])
    parts = settings.subgraphs_to_exclude or []
    if not all(isinstance(part, (list, tuple)) and len(part) == 2 for part in parts):
        raise ConfigError(f"subgraphs_to_exclude is {parts!r}; expected pairs ([first nodes], [last nodes])")
    draft["exclude_subgraphs"] = tuple(tuple(names("subgraphs_to_exclude", ends) for ends in part) for part in parts)


def _check_fused(extra: Mapping[str, Any]) -> None:
    """Check that the four switches for fused activations agree: jq has one switch for all."""
    keys = [f"RemoveQDQConv{kind}" for kind in ("Clip", "Relu", "LeakyRelu", "PRelu")]
    if len({extra.get(key, True) for key in keys}) > 1:
        raise ConfigError(f"{', '.join(keys)} must be equal: jq fuses all of these activations, or none")


# --- Algorithms ---

_PARAMS = {"adaround": custom_config.DEFAULT_ADAROUND_PARAMS, "adaquant": custom_config.DEFAULT_ADAQUANT_PARAMS}


def _finetune(given: Mapping[str, Any], draft: Draft, usual: Mapping[str, Any] | None = None) -> None:
    name = given.get("OptimAlgorithm", "adaround")
    check_choice("OptimAlgorithm", name, _PARAMS)
    draft["finetune"] = name
    draft.usual = usual or {**parameters(algorithm.FinetuneConfig()), "UpdateBias": True, **_PARAMS[name]}
    asked = {k: v for k, v in given.items() if k not in draft.usual or v != draft.usual[k]}
    apply(FAST_FINETUNE, asked, draft, "FastFinetune")


def parameters(config: algorithm.AlgoConfig) -> dict[str, Any]:
    """An algorithm's fields by the names that options have: num_iterations is NumIterations."""
    short = {"lr": "LR", "qdq": "QDQ", "gds": "GDS", "cle": "CLE"}

    def camel(field: str) -> str:
        return "".join(short.get(part, part.title()) for part in field.split("_"))

    return {camel(f.name): getattr(config, f.name) for f in dataclasses.fields(config)}


def _algorithms(algorithms: Iterable[Any], draft: Draft) -> None:
    tuned = [a for a in algorithms if isinstance(a, algorithm.FinetuneConfig)]
    if len(tuned) > 1 or (tuned and draft["finetune"]):
        raise ConfigError("AdaRound and AdaQuant are mutually exclusive; give one of them")
    for algo in algorithms:
        if isinstance(algo, algorithm.AutoMixprecisionConfig):
            continue  # a search over configs: `jq.compat.quark.mixed`
        if isinstance(algo, algorithm.CLEConfig):
            apply(EXTRA_OPTIONS, parameters(algo), draft, "CLEConfig")
            draft["cle"] = True
        elif isinstance(algo, algorithm.BiasCorrectionConfig):
            draft["bias_correction"] = True
        elif isinstance(algo, algorithm.FinetuneConfig):
            kind = "adaquant" if isinstance(algo, algorithm.AdaQuantConfig) else "adaround"
            _finetune({**parameters(algo), "OptimAlgorithm": kind}, draft, parameters(type(algo)()))
        else:
            raise ConfigError(
                f"{type(algo).__name__} is not supported: jq has CLEConfig, BiasCorrectionConfig, AdaRoundConfig, "
                "AdaQuantConfig and AutoMixprecisionConfig"
            )
