"""Rows of the reference's page of Quark: for each option, tool and name, its meaning in jq."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jq.compat.quark import ABSENT
from jq.compat.quark.options import AS_FIELDS, EXTRA_OPTIONS, FAST_FINETUNE, FIELDS
from jq.compat.quark.quantization.config.algorithm import AutoMixprecisionConfig, CLEConfig, FinetuneConfig
from jq.compat.quark.quantization.config.config import QuantizationConfig
from jq.compat.quark.translate import parameters

Rows = Mapping[str, str]

# Fields of `QuantizationConfig` that `translate` reads to choose a preset and its nodes.
_SETTINGS: Rows = {
    "calibrate_method": "sets scale and method",
    "quant_format": "chooses the operators and the format of the file: QDQ, QOperator, VitisQuantFormat's",
    "activation_type": "sets activation",
    "weight_type": "sets weight",
    "input_nodes": "sets input_nodes",
    "output_nodes": "sets output_nodes",
    "op_types_to_quantize": "sets op_types",
    "nodes_to_quantize": "excludes all others",
    "extra_op_types_to_quantize": "adds to op_types",
    "nodes_to_exclude": "sets exclude; a name that begins with ^ is a regular expression",
    "subgraphs_to_exclude": "sets exclude_subgraphs",
    "per_channel": "sets per_channel, for float scales",
    "optimize_model": "False: a warning, because jq always simplifies a graph; HardSwish stays one operator",
    "use_dynamic_quant": "selects the preset UINT8_DYNAMIC_QUANT",
    "include_cle": "sets cle; jq's own factors, unless strict_quark is on",
    "include_fast_ft": "sets finetune, with the parameters in extra_options['FastFinetune']",
    "enable_npu_cnn": "selects the preset XINT8 with its rewrites, forms and constraints; a warning with Quark's own QDQ "
    "format, where it has no effect in Quark either",
    "enable_npu_transformer": "quantizes only Gemm and MatMul",
    "print_summary": "prints the tensors with the largest losses",
    "extra_options": "the table below",
}
_NEWER: Rows = {
    "global_config": "sets scale, method, formats and symmetry; input_tensors and weight need one scale_type",
    "specific_layer_config": "becomes overrides for nodes, with their formats, symmetry and per_channel",
    "layer_type_config": "becomes overrides for all nodes of a type; None excludes them",
    "exclude": "sets exclude and exclude_subgraphs",
    "algo_config": "CLEConfig, BiasCorrectionConfig, AdaRoundConfig, AdaQuantConfig and AutoMixprecisionConfig; others are refused",
    "use_external_data_format": FIELDS["use_external_data_format"].effect,
    "extra_options": "the table above; includes the keyword arguments of QConfig",
    "input_tensors": "sets activation, or the format of the outputs of the nodes before a layer",
    "activation": "the older name of input_tensors",
    "output_tensors": "sets the format of a layer's outputs",
    "weight": "sets weight",
    "bias": "sets bias: int32, or the format of the weights",
    "symmetric": "sets symmetric, or weight_symmetric",
    "scale_type": "sets scale: Float32 or PowerOf2; Int16 is refused",
    "calibration_method": "sets method; Distribution is refused",
    "quant_granularity": "Channel sets per_channel, for weights; Group is refused",
    "data_type": "sets the format",
}
_MIXING: Rows = {
    "target_layer_config": "the 8-bit formats of the layers that are lowered",
    "metric_threshold": "the target of the search; None is refused",
    "metric_default": "kl or sqnr; others are refused",
    "metric_evaluate_fn": "a function from a model to a score, to which the target applies",
}
_SEARCH: Rows = {
    "search_space": "all combinations are tried; one that jq refuses is named in auto_search.log",
    "search_metric": "L2, L1, cos, psnr or ssim of the outputs; for the last three, more is better",
    "search_algo": "grid_search or random; AutoSearchPro: Grid, or draws at random from a fixed seed instead of optuna's samplers",
    "search_evaluator": "a function from a file to a score; the loss of score is counted",
    "search_metric_tolerance": "models within it are kept as candidates",
    "search_output_dir": "where models and auto_search.log are written",
    "search_stop_condition": "find_n_candidates, iteration_limit and time_limit",
    "two_stage_search": "the best calibration first, then its finetuning",
    "search_cache_dir, search_log_path, n_jobs, search_devices": "no effect: nothing is cached in files, and all cores compute",
    "advanced_fastft_search": "refused: use two_stage_search",
}
TOOLS: Rows = {
    "convert_fp32_to_bf16": "jq.convert(to='bf16'): with_cast, customqdq or bf16; simulate_bf16 is refused",
    "convert_fp16_to_bf16": "the same from a float16 model",
    "convert_fp32_to_fp16": "jq.convert(to='fp16', form='native')",
    "convert_fp16_to_fp32": "jq.convert(to='fp32'); --subgraphs_to_include is refused",
    "convert_nchw_to_nhwc": "jq.convert(nhwc=True)",
    "convert_opset_version": "jq.convert(opset=...)",
    "convert_dynamic_to_fixed": "jq.convert(shapes=...)",
    "convert_quant_to_float": "jq.convert(dequantize=True)",
    "convert_s8s8_to_u8s8": "jq.convert(uint8_activations=True)",
    "fix_shapes": "jq.convert(shapes=...), outputs checked",
    "random_quantize": "jq.quantize on random data",
    "remove_qdq": "jq.convert(dequantize=True)",
    "replace_inf_weights": "the same",
    "evaluate": "jq-quant evaluate",
    "convert_fp32_to_bfp16": "not here: use jq.quantize(..., 'BFP16')",
    "convert_fp16_to_bfp16": "not here: use convert_fp16_to_fp32, then jq.quantize(..., 'BFP16')",
    "convert_qdq_to_qop": "not here: use jq.quantize(..., format='qoperator')",
    "convert_customqdq_to_qdq": "not here: jq writes ONNX's quantizers where they suffice, and reads Quark's",
    "convert_custom_ops": "not here: jq-quant simulate and jq.split_quantizers read both names of the vendor's domains",
    "convert_a8w8_npu_to_a8w8_cpu": "not here: jq's A8W8 runs on both",
    "convert_u16s8_to_s16s8": "not here: use the preset S16S8_ASWS",
    "convert_u16u8_to_u8u8": "not here: use the preset U8U8_AAWA",
    "convert_bias_int32_to_int16": "not here: biases have 32 bits, or as many as the weights",
    "convert_resize_fs_to_pof2s": "not here: all scales of XINT8 are powers of two",
    "convert_shared_initializer_to_unique": "not here: a weight that several nodes share is quantized once",
    "convert_lstm_to_customlstm": "not here: jq reads ONNX's LSTM",
    "convert_onnx_to_onnxtxt": "not here: use onnx.printer.to_text",
    "convert_onnxtxt_to_onnx": "not here: use onnx.parser.parse_model",
    "float16": "not here: use jq.convert(to='fp32')",
    "insert_clip_bfloat16_qdq": "not here: values beyond bfloat16 become infinite, and jq.convert(data=...) names them",
    "print_a16w8_a8w8_nodes": "not here: jq.split_quantizers gives the format of every tensor",
    "remove_bf16_cast": "not here: use jq.convert(dequantize=True)",
    "remove_initializer_from_input": "not here: jq writes no initializer as an input",
    "remove_qdq_between_ops": "not here: quantize with float_tensors",
    "remove_qdq_mul_add": "not here: quantize with float_tensors",
    "replace_bfloat16_qdq_cast": "not here: jq.convert writes Casts unless form='qdq'",
    "save_tensor_hist": "not here: jq-quant compare --report draws the histogram of every tensor",
    "save_weights_hist": "not here: jq-quant compare --report draws the histogram of every weight",
}
NAMES: Rows = {
    **ABSENT,
    "get_library_path": "raises: models that jq writes for onnxruntime need no library of operators",
}


def rows() -> dict[str, Rows]:
    """Return what each option becomes, or why it cannot be had, by the place where it is given.

    >>> rows()["`extra_options`"]["Int32Bias"]
    'True: quantized at the scale of the products; False: like a weight with a scale of its own'
    """
    named = {f.name: _SETTINGS.get(f.name) or FIELDS[f.name].effect for f in dataclasses.fields(QuantizationConfig)}
    extra = {name: option.effect for name, option in EXTRA_OPTIONS.items()}
    extra |= {name: f"the field {field} of QuantizationConfig" for name, field in AS_FIELDS.items()}
    tuned = {name: option.effect for name, option in FAST_FINETUNE.items()}
    fields = {name: tuned[option] for name, option in _spelled(FinetuneConfig()).items()}
    cle = {name: extra[option] for name, option in _spelled(CLEConfig()).items()}
    other = "no effect: it steers Quark's own search"
    mixing = {f.name: _MIXING.get(f.name, other) for f in dataclasses.fields(AutoMixprecisionConfig)}
    return {
        "Fields of `QuantizationConfig`": named,
        "`extra_options`": extra,
        "`extra_options['FastFinetune']`": tuned,
        "`QConfig`, `QLayerConfig` and the specs": _NEWER,
        "`AdaRoundConfig` and `AdaQuantConfig`": fields,
        "`CLEConfig`": cle,
        "`AutoMixprecisionConfig`": mixing,
        "`AutoSearch` and `AutoSearchPro`": _SEARCH,
        "`SmoothQuantConfig`, `GPTQConfig`, `QuarotConfig`": {
            "all fields": "refused: jq has no SmoothQuant, GPTQ or rotations; it offers cle and finetune instead"
        },
    }


def _spelled(config: FinetuneConfig | CLEConfig) -> Rows:
    """Return the options that an algorithm's fields stand for."""
    return dict(zip((f.name for f in dataclasses.fields(config)), parameters(config), strict=True))
