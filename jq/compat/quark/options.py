"""Quark's options and what jq does for each: one table for each place where options stand.

An option sets a field of `jq.QuantConfig`; or is not supported, which is a ConfigError that says why; or is a hint about
speed, memory or logging, which changes no number; or jq serves its purpose in another way, which is a warning if
the option differs from Quark's default.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from jq.arithmetic.formats import Integer
from jq.compat.quark.calibration import CalibrationMethod, ExtendedCalibrationMethod
from jq.compat.quark.draft import Draft, Option, count, flag, number, numbers, word
from jq.compat.quark.inputs import check_names, ranges_of, shapes_of
from jq.compat.quark.quantization.config.algorithm import FinetuneConfig
from jq.config import CANONICAL, CONSTRAINTS
from jq.errors import ConfigError, check_choice
from jq.npu.rewrites import FORMS, STRUCTURE
from jq.recovery.adaquant import AdaQuant
from jq.recovery.adaround import AdaRound

# --- Kinds of options ---


def _sets(field: str, kind: Callable[[str, Any], Any]) -> Option:
    def change(draft: Draft, name: str, value: Any) -> None:
        draft[field] = kind(name, value)

    return Option(f"sets {field}", change)


def _member(field: str, *members: str) -> Option:
    """A switch that adds or removes a canonical form, a rewrite, a form or a constraint."""
    order = {
        "canonical": CANONICAL, "rewrites": tuple(STRUCTURE), "forms": tuple(FORMS), "constraints": CONSTRAINTS
    }[field]  # fmt: skip

    def change(draft: Draft, name: str, value: Any) -> None:
        if flag(name, value) and field == "constraints" and draft["scale"] == "float":
            draft.notes.append(f"{name}=True: float scales need not be equal, so each tensor keeps its own")
            return
        kept = {*draft[field], *members} if value else {*draft[field]} - {*members}
        draft[field] = tuple(m for m in order if m in kept)

    return Option(f"adds to {field}, or removes from it: {', '.join(members)}", change)


def _hard_sigmoid(draft: Draft, name: str, value: Any) -> None:
    """Sigmoid as HardSigmoid whatever it loses, where a script asks for it."""
    _member("forms", "sigmoid_to_hard_sigmoid").apply(draft, name, value)
    draft["form_loss"] = None if value else draft["form_loss"]


def _switch(effect: str, field: str, values: Mapping[bool, Any]) -> Option:
    """A switch that sets a field where it has a value for True, or for False."""

    def change(draft: Draft, name: str, value: Any) -> None:
        if flag(name, value) in values:
            draft[field] = values[value]

    return Option(effect, change)


def _refused(why: str) -> Option:
    """An option that may only be off: False, None, or empty."""

    def change(draft: Draft, name: str, value: Any) -> None:
        if value:
            raise ConfigError(f"{name}={value!r} is not supported: {why}")

    return Option(f"refused: {why}", change)


def _only(*values: Any, why: str) -> Option:
    """An option that may only have its default value."""

    def change(draft: Draft, name: str, value: Any) -> None:
        if value not in values:
            raise ConfigError(f"{name}={value!r} is not supported: {why}. Omit it, or set it to {values[0]!r}")

    return Option(f"only {values[0]!r}: {why}", change)


def _hint(what: str) -> Option:
    return Option(f"no effect on the result: {what}", lambda draft, name, value: None)


def _noted(quiet: Any, what: str) -> Option:
    """An option that jq serves in another way; asking for it gives a warning."""

    def change(draft: Draft, name: str, value: Any) -> None:
        if value != quiet:
            draft.notes.append(f"{name}={value!r}: {what}")

    return Option(what, change)


def _method_of_weights(draft: Draft, name: str, value: Any) -> None:
    methods: Mapping[Enum, str] = {CalibrationMethod.MinMax: "minmax", ExtendedCalibrationMethod.MinMSE: "mse"}
    if value is None:
        return
    if not isinstance(value, Enum) or value not in methods:
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(map(str, methods))}")
    if draft["scale"] != "float":
        raise ConfigError(f"{name} applies to float scales only; powers of two are searched as for activations")
    draft["weight_method"] = methods[value]


def _bins(draft: Draft, name: str, value: Any) -> None:
    bins, method = count(name, value), draft["method"]
    if bins:
        draft["bins"] = bins
        draft["method"] = "minmse_hist" if method == "minmse" else method
    elif method != "minmse":
        raise ConfigError(f"{name}=0 works only with MinMSE, which then uses the values themselves; got {method}")


def _moving_constant(draft: Draft, name: str, value: Any) -> None:
    constant = number(name, value)
    if draft["moving_average"] is None:
        draft.notes.append(f"{name}={value!r} has no effect without CalibMovingAverage=True")
    else:
        draft["moving_average"] = constant


def _range_symmetric(draft: Draft, name: str, value: Any) -> None:
    if value is not None and flag(name, value) != draft["symmetric"]:
        raise ConfigError(
            f"{name}={value!r} with ActivationSymmetric={draft['symmetric']}: in jq, ranges are symmetric if codes are"
        )


def _like_activations(draft: Draft, name: str, value: Any) -> None:
    activation = draft["activation"]
    if not flag(name, value) or not isinstance(activation, Integer):
        return
    params = draft.graph.params
    with_constants = {n.op_type for n in draft.graph.nodes if any(name in params for name in n.inputs)}
    for operator in sorted(with_constants & {"Add", "Div", "Max", "Min", "Mul", "Sub"}):
        draft.override(operator, weight=activation, weight_symmetric=draft["symmetric"])


def _constant_products(draft: Draft, name: str, value: Any) -> None:
    if flag(name, value):
        graph = draft.graph
        draft.exclude([n.label for n in graph.nodes if n.op_type == "MatMul" and n.inputs[1] not in graph.params])


def _opset(draft: Draft, name: str, value: Any) -> None:
    draft.opset = None if value is None else count(name, value)


def _samples(draft: Draft, name: str, value: Any) -> None:
    draft.samples = None if value is None else count(name, value)
    if draft.samples == 0:
        raise ConfigError(f"{name}=0: expected a number of samples, at least 1")


def _ranges_file(draft: Draft, name: str, value: Any) -> None:
    if value is not None:
        draft.ranges_file = word(name, value)


def _random(draft: Draft, name: str, value: Any) -> None:
    draft.random = flag(name, value)


def _random_shapes(draft: Draft, name: str, value: Any) -> None:
    if value:
        draft.shapes = shapes_of(name, value, draft.graph.inputs)
        check_names(name, draft.shapes, draft.graph.inputs)


def _random_ranges(draft: Draft, name: str, value: Any) -> None:
    if value:
        draft.ranges = ranges_of(name, value)
        check_names(name, draft.ranges, draft.graph.inputs)


def _preference(draft: Draft, name: str, value: Any) -> None:
    if value is not None:
        check_choice(name, value, ("accuracy", "speed", "resource_efficiency"))


def _read_together(effect: str) -> Option:
    """An option that `jq.compat.quark.translate` reads together with others."""
    return Option(effect, lambda draft, name, value: None)


_SIMPLE = "jq always simplifies a graph, which does not change its results"
_FUSED = "jq's op table decides what is fused, and treats all of these operators alike"
_ALWAYS = "jq always gives a single scale to tensors whose values only move"
_FORMS_ONLY = "jq has no such form of the operator"
_PER_TENSOR = "formats belong to nodes in jq: use specific_layer_config or layer_type_config of QConfig"
_FACTORS = "jq chooses the factors of all channels at once, to minimize the predicted noise"
_MIXED = (
    "give an AutoMixprecisionConfig among the algorithms, with a metric_threshold; or name layers in specific_layer_config of "
    "QConfig"
)
_ALIKE = "every tensor in a file that jq writes has its type and shape"
_RESTORED = "saves the calibration in this file and two beside it, and reuses it the next time"

EXTRA_OPTIONS: Mapping[str, Option] = {
    # Which nodes
    "QuantizeAllOpTypes": _switch("quantizes operators of every type", "op_types", {True: None}),
    "MatMulConstBOnly": Option("leaves products of two activations in float", _constant_products),
    "WeightsOnly": _sets("weights_only", flag),
    "ForceQuantizeNoInputCheck": _hint("an operator that only moves values is quantized like its input"),
    "EnableSubgraph": _refused("nodes inside If and Loop stay in float"),
    "OpTypesToExcludeOutputQuantization": _refused(
        "a node is quantized together with its outputs; use nodes_to_exclude"
    ),
    "NodesToExcludeOutputQuantization": _refused("a node is quantized together with its outputs; use nodes_to_exclude"),
    # Formats and symmetry
    "ActivationSymmetric": _read_together("sets symmetric, or weight_symmetric"),
    "WeightSymmetric": _read_together("sets symmetric, or weight_symmetric"),
    "BFPAttributes": _read_together("selects the block format that QBFP stands for"),
    "MXAttributes": _read_together("selects the block format that QMX stands for"),
    "AlignEltwiseQuantType": Option(
        "gives constant operands of Add, Mul and similar operators the format of activations", _like_activations
    ),
    "TensorQuantOverrides": _refused(_PER_TENSOR),
    "MixedPrecisionTensor": _refused(_PER_TENSOR),
    "SpecificTensorPrecision": _refused(_PER_TENSOR),
    "Int16Scale": _refused("scales are floats or powers of two"),
    "UseUnsignedReLU": _refused("all operators share one format of activations"),
    "QDQOpTypePerChannelSupportToAxis": _refused("the op table defines the channel axis"),
    "QuantizeFP16": _refused("jq quantizes float32 models; use convert_fp16_to_fp32"),
    "UseFP32Scale": _only(None, True, why="scales are float32"),
    "ActivationScaled": _refused("bfloat16 and float16 have no scale in jq"),
    "WeightScaled": _refused("bfloat16 and float16 have no scale in jq"),
    "BF16WithClip": _refused("values beyond bfloat16 become infinite"),
    "RefineBlockAxis": _only(True, None, why="blocks lie along the axis that products are summed over"),
    "BF16QDQToCast": _noted(True, "bfloat16 is written as Casts; the numbers are the same"),
    "EnableVaimlBF16": _refused("bfloat16 is written as Casts between float32 operators"),
    "UseMatMulNBits": _refused("jq quantizes no weights to 4 bits in groups"),
    "MatMulNBitsParams": _refused("jq quantizes no weights to 4 bits in groups"),
    # Biases
    "Int32Bias": _switch(
        "True: quantized at the scale of the products; False: like a weight with a scale of its own",
        "bias",
        {True: "int32", False: "weight"},
    ),
    "QuantizeBias": _switch("False leaves biases in float", "bias", {False: "float"}),
    "Int16Bias": _refused("biases have 32 bits, or as many as the weights"),
    "AdjustBiasScale": _only(True, None, why="a bias in 32 bits has the scale of its products"),
    "AdjustWeightScaleForInt32Bias": _refused("scales of weights come from the weights"),
    # Calibration
    "CalibTensorRangeSymmetric": Option("must equal ActivationSymmetric", _range_symmetric),
    "CalibMovingAverage": _switch("sets moving_average", "moving_average", {True: 0.01, False: None}),
    "CalibMovingAverageConstant": Option("sets moving_average", _moving_constant),
    "Percentile": _sets("percentile", number),
    "PercentileCandidates": _sets("percentiles", numbers),
    "LWPMetric": _sets("percentile_metric", word),
    "LWPUseHistogram": _only(True, why="errors are measured on histograms"),
    "NumBins": Option(
        "sets bins; with MinMSE it selects Quark's histogram, because jq otherwise uses the values themselves", _bins
    ),
    "MinMSEModePof2Scale": _only("All", None, why="jq always minimizes the error over all data"),
    "MinMSEModeFloatScale": _refused("the only search for float scales is WeightCalibrateMethod=MinMSE"),
    "WeightCalibrateMethod": Option("sets weight_method, of float scales", _method_of_weights),
    "CalibDataSize": Option("use at most this many samples", _samples),
    "UseRandomData": Option("calibrates on random data, even if other data are given", _random),
    "RandomDataReaderInputShape": Option(
        "sets the shapes of random data if the model leaves dims free", _random_shapes
    ),
    "RandomDataReaderInputDataRange": Option("draws random data uniformly between these bounds", _random_ranges),
    "CalibPassthroughOpTypes": _refused("jq calibrates every tensor that it quantizes"),
    "SaveAndRestore": Option(_RESTORED, _ranges_file),
    "TensorsRangeFile": Option(_RESTORED, _ranges_file),
    "SaveTensorHistFig": _refused("the report of jq.compare draws the histogram of every tensor"),
    "NumQuantizedBins": _sets("quantized_bins", count),
    "Scenario": _refused("it configures Quark's float8, which jq does not calibrate"),
    "CalibOptimizeMem": _hint("memory does not grow with the data"),
    "CalibOptimizeDisk": _hint("calibration keeps nothing in files"),
    "CalibWorkerNum": _hint("all cores compute"),
    "TmpDir": _hint("calibration keeps nothing in files"),
    "QuantizationPreference": Option("no effect on the result: jq always prefers accuracy", _preference),
    # The graph
    "SimplifyModel": _noted(True, _SIMPLE),
    "SimplifyModelOptions": _refused(_SIMPLE),
    "SkipPreprocess": _noted(False, _SIMPLE),
    "RemoveInputInit": _hint("initializers are not inputs"),
    "FoldBatchNorm": _noted(True, "jq always folds BatchNormalization where it can"),
    "FuseInstanceNorm": _member("canonical", "instance_norm"),
    "FuseL2Norm": _member("canonical", "lp_norm"),
    "FuseGelu": _member("canonical", "gelu", "gelu_tanh"),
    "FuseLayerNorm": _member("canonical", "layer_norm"),
    "CopySharedInit": _refused("an array read by several nodes is quantized once"),
    "CopyBiasInit": _hint("biases at the scale of products are copied where they are shared"),
    "ConvertBNToConv": _member("rewrites", "batchnorm_to_conv"),
    "ConvertReduceMeanToGlobalAvgPool": _member("rewrites", "reduce_mean_to_pool"),
    "SplitLargeKernelPool": _member("rewrites", "split_large_pool"),
    "ConvertSplitToSlice": _member("rewrites", "split_to_slice"),
    "ConvertClipToRelu": _noted(False, "a Clip stays a Clip; the codes are the same"),
    "ReplaceClip6Relu": _noted(False, "equalization goes through ReLU6 without replacing it"),
    "ConvertOpsetVersion": Option("sets the opset of the result", _opset),
    "FixShapes": _read_together("fixes shapes of inputs"),
    "ShapeShifterYaml": _refused("a list of shapes is not read from a file; use FixShapes"),
    "PreprocessYAML": _refused("a list of passes is not read"),
    "FillAllValueInfo": _hint(_ALIKE),
    # Quantizers
    "AddQDQPairToWeight": _refused("weights are stored as their codes"),
    "MatMulToGemm": _noted(False, "a MatMul with constant weights is quantized like a Gemm, but stays a MatMul"),
    "UseQDQVitisCustomOps": _noted(
        True, "files hold ONNX's own quantizers; quant_format=VitisQuantFormat.QDQ has the vendor's"
    ),
    "DedicatedQDQPair": _switch(
        "True gives each reader quantizers of its own", "pairs", {True: "each", False: "shared"}
    ),
    "DedicateDQNode": _noted(False, "all readers of a tensor share its dequantizer; the numbers are the same"),
    "EnableDualQuantNodePairs": _refused("a tensor has one format"),
    "FoldRelu": _hint("a Relu that the codes make redundant stays; the numbers are the same"),
    "RemoveQDQConvClip": _sets("fuse_activations", flag),
    "RemoveQDQConvRelu": _sets("fuse_activations", flag),
    "RemoveQDQConvLeakyRelu": _sets("fuse_activations", flag),
    "RemoveQDQConvPRelu": _sets("fuse_activations", flag),
    "RemoveQDQConvGelu": _refused(_FUSED),
    "RemoveQDQMulAdd": _refused(_FUSED),
    "RemoveQDQInstanceNorm": _refused(_FUSED),
    "RemoveQDQBetweenOps": _refused(_FUSED),
    "RemoveFusedQDQ": _refused(_FUSED),
    # Forms of operators on the NPU, and its positions
    "ConvertLeakyReluToDPUVersion": _member("forms", "leaky_relu_alpha"),
    "ConvertSigmoidToHardSigmoid": Option("replaces all Sigmoids by HardSigmoid, or none", _hard_sigmoid),
    "ConvertHardSigmoidToDPUVersion": _member("forms", "hard_sigmoid_factor"),
    "ConvertAvgPoolToDPUVersion": _member("forms", "average_pool_factor", "rectangular_pool_factor"),
    "ConvertReduceMeanToDPUVersion": _member("forms", "reduce_mean_factor"),
    "ConvertSoftmaxToDPUVersion": _refused(_FORMS_ONLY),
    "ConvertInstanceNormToDPUVersion": _refused(_FORMS_ONLY),
    "ConvertClipToDPUVersion": _refused(_FORMS_ONLY),
    "SimulateDPU": _switch("False disables all forms", "forms", {False: ()}),
    "AlignConcat": _member("constraints", "align_concat"),
    "AlignPool": _member("constraints", "align_pool"),
    "AlignPad": _member("constraints", "align_pad"),
    "AlignSlice": _member("constraints", "align_slice"),
    "AlignTranspose": _only(True, None, why=_ALWAYS),
    "AlignReshape": _only(True, None, why=_ALWAYS),
    "AdjustShiftCut": _member("constraints", "shift_cut"),
    "AdjustShiftBias": _member("constraints", "shift_bias"),
    "AdjustShiftRead": _member("constraints", "shift_read"),
    "AdjustShiftWrite": _member("constraints", "shift_write"),
    "AdjustHardSigmoid": _member("constraints", "hard_sigmoid"),
    "AdjustShiftSwish": _member("constraints", "shift_swish"),
    "NPULimitationCheck": _switch("False disables all constraints", "constraints", {False: ()}),
    "MaxLoopNum": _noted(5, "constraints are applied until nothing changes"),
    # Accuracy recovery
    "BiasCorrection": _sets("bias_correction", flag),
    "FastFinetune": _read_together("the parameters in the table below"),
    "CLESteps": _only(1, None, why=_FACTORS),
    "CLEBalanceMethod": _only("max", None, why=_FACTORS),
    "CLEWeightThreshold": _only(0.5, None, why=_FACTORS),
    "CLEScaleAppendBias": _only(True, None, why=_FACTORS),
    "CLEScaleUseThreshold": _only(True, None, why=_FACTORS),
    "CLETotalLayerDiffThreshold": _only(2e-7, 1.9e-7, None, why=_FACTORS),
    "SmoothAlpha": _refused("jq has no SmoothQuant; its equalization is include_cle"),
    "UseGPTQ": _refused("jq has no GPTQ; AdaRound rounds by the same second moments"),
    "GPTQParams": _refused("jq has no GPTQ; AdaRound rounds by the same second moments"),
    "RMatrixDim": _refused("jq has no rotations"),
    "UseRandomHad": _refused("jq has no rotations"),
    "RConfigPath": _refused("jq has no rotations"),
    "AutoMixprecision": _refused(_MIXED),
    "NodesWithMixedPrecision": _refused(_MIXED),
    # The rest
    "EvalMetrics": _refused("the report of jq.quantize has these figures for every tensor"),
    "EvalDataReader": _refused("the report of jq.quantize has these figures for every tensor"),
    "EncryptionAlgorithm": _refused("files are not encrypted"),
    "UserCustomOpLibPath": _refused("jq computes with rules of its own"),
}

# Options that are fields of `QuantizationConfig` under another name.
AS_FIELDS: Mapping[str, str] = {
    "InputNodes": "input_nodes",
    "OutputNodes": "output_nodes",
    "OpTypesToQuantize": "op_types_to_quantize",
    "ExtraOpTypesToQuantize": "extra_op_types_to_quantize",
    "NodesToQuantize": "nodes_to_quantize",
    "ExecutionProviders": "execution_providers",
    "OptimizeModel": "optimize_model",
    "EnableNPUCnn": "enable_npu_cnn",
    "ConvertFP16ToFP32": "convert_fp16_to_fp32",
    "ConvertNCHWToNHWC": "convert_nchw_to_nhwc",
    "DebugMode": "debug_mode",
    "CryptoMode": "crypto_mode",
    "PrintSummary": "print_summary",
    "IgnoreWarnings": "ignore_warnings",
}

# Fields of `QuantizationConfig` beside those that say what is quantized, and how; `translate` reads these.
FIELDS: Mapping[str, Option] = {
    "specific_tensor_precision": _refused(_PER_TENSOR),
    "execution_providers": _hint("JAX computes, on the device that it finds"),
    "reduce_range": _refused("codes use all bits; XINT8's scales leave enough room anyway"),
    "use_external_data_format": _read_together("writes weights to <name>.data beside the model"),
    "convert_fp16_to_fp32": _read_together("converts float16 tensors to float32"),
    "convert_nchw_to_nhwc": _read_together(
        "the result takes images in channels-last order; the data keep the original one"
    ),
    "include_sq": _refused("jq has no SmoothQuant; its equalization is include_cle"),
    "include_rotation": _refused("jq has no rotations"),
    "include_auto_mp": _refused(_MIXED),
    "debug_mode": _hint("applies to logging"),
    "crypto_mode": _refused("files are not encrypted"),
    "ignore_warnings": _hint("Python's warnings module silences warnings"),
    "log_severity_level": _hint("applies to logging"),
}


# Both algorithms count in jq on the quadratic form of a layer's error over all data, where Quark takes batches of one
# or two samples: their default numbers mean different things, and jq's own are the better ones. So what is as Quark
# has it by default stays as jq has it by default, and iterations and learning rates count relative to it.
_OWN: Mapping[str, Any] = {"adaround": AdaRound(), "adaquant": AdaQuant()}


def tuning(
    algorithm: str, usual: Mapping[str, Any], *, steps: int | None = None, rate: float | None = None
) -> dict[str, Any]:
    """Return the options of finetuning that stand for Quark's iterations and learning rate, of which some are `usual`.

    >>> tuning("adaround", {"NumIterations": 1000}, steps=2000)["finetune_steps"] == 2 * AdaRound().steps
    True
    """
    own, fields = _OWN[algorithm], dict[str, Any]()
    if steps is not None:
        fields["finetune_steps"] = max(1, round(own.steps * steps / usual["NumIterations"]))
    if rate is not None:
        fields["finetune_rate"] = own.learning_rate * (rate / usual["LearningRate"])
    return fields


def _steps(draft: Draft, name: str, value: Any) -> None:
    if not count(name, value):
        raise ConfigError(f"{name}=0: expected at least 1")
    draft.changes |= tuning(draft["finetune"], draft.usual, steps=value)


def _rate(draft: Draft, name: str, value: Any) -> None:
    draft.changes |= tuning(draft["finetune"], draft.usual, rate=number(name, value))


def _on_disk(draft: Draft, name: str, value: Any) -> None:
    if value not in (0, 1, 2):
        raise ConfigError(f"{name} is {value!r}; expected 0, 1 or 2")
    draft.spill = tempfile.gettempdir() if value == 2 else None


def _folder(draft: Draft, name: str, value: Any) -> None:
    if draft.spill is not None and value is not None:
        draft.spill = value


_DEVICE = _noted("cpu", "JAX computes, on the device that it finds")

FAST_FINETUNE: Mapping[str, Option] = {
    "OptimAlgorithm": _read_together("sets finetune"),
    "NumIterations": Option("sets finetune_steps: jq's own number, times this over Quark's default", _steps),
    "LearningRate": Option("sets finetune_rate: jq's own, times this over Quark's default", _rate),
    "BatchSize": _sets("finetune_batch", count),
    "FixedSeed": _sets("seed", count),
    "DropRatio": _only(
        1.0, why="layers are tuned on the quantized network's activations; finetune='block' mixes in float ones"
    ),
    "DataSize": _noted(None, "all calibration data are used"),
    "NumBatches": _only(1, why="a step uses one batch, or all data"),
    "EarlyStop": _hint("steps are few, and changes that do not reduce the error are discarded"),
    "SelectiveUpdate": _hint("changes that do not reduce a layer's error are discarded"),
    "UpdateBias": _noted(True, "biases are tuned with the weights"),
    "RegParam": _only(0.01, why="the error is relative, so one weight of the regularizer serves all layers"),
    "BetaRange": _only((20, 2), [20, 2], why="the regularizer's exponent falls from 20 to 2"),
    "WarmStart": _only(0.2, why="the first fifth of the steps runs without the regularizer"),
    "LRAdjust": _refused("steps are relative to a layer's scale and error"),
    "OutputQDQ": _refused("the error is measured on the sums, before they are rounded"),
    "TargetOpType": _only(
        FinetuneConfig().target_op_type, why="every layer with weights is tuned; exclude nodes from quantization"
    ),
    "OutputIndex": _only(0, None, why="layers are tuned to their own outputs"),
    "RefModelPath": _refused("the float model is the one that is quantized"),
    "SelectMaxMemLayer": _refused("jq tunes all layers"),
    "MemOptLevel": Option("2 keeps activations in files", _on_disk),
    "CacheDir": Option("the folder of these files", _folder),
    "OptimDevice": _DEVICE,
    "InferDevice": _DEVICE,
    "DynamicBatch": _hint("all batches have the same size"),
    "Parallel": _refused("each layer is tuned on the outputs of the tuned layers before it"),
    "LogPeriod": _hint("applies to logging"),
    "NumWorkers": _hint("all cores compute"),
    "PinMemory": _hint("applies to GPU memory"),
    "UseGDS": _hint("applies to GPU memory"),
}
