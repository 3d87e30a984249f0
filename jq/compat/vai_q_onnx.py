"""The names of `vai_q_onnx`, AMD's older quantizer: `quantize_static`, and the words that it takes.

Options have the meaning that they have as fields of `QuantizationConfig` in `jq.compat.quark`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from onnx import ModelProto

from jq.compat.quark.calibration import CalibrationDataReader, CalibrationMethod, PowerOfTwoMethod
from jq.compat.quark.quantization.api import ModelQuantizer
from jq.compat.quark.quantization.config.config import Config, QuantizationConfig
from jq.compat.quark.quantization.quant_utils import QuantFormat, QuantType, VitisQuantFormat, VitisQuantType
from jq.errors import ConfigError

__all__ = [
    "CalibrationDataReader", "CalibrationMethod", "PowerOfTwoMethod", "QuantFormat", "QuantType", "VitisQuantFormat",
    "VitisQuantType", "quantize_static",
]  # fmt: skip


def quantize_static(
    model_input: str | os.PathLike[str] | ModelProto,
    model_output: str | os.PathLike[str] | None,
    calibration_data_reader: Any = None,
    quant_format: Enum = VitisQuantFormat.FixNeuron,
    calibrate_method: Enum = PowerOfTwoMethod.MinMSE,
    input_nodes: Sequence[str] | None = None,
    output_nodes: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
    *,
    op_types_to_quantize: Sequence[str] | None = None,
    random_data_reader_input_shape: Any = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Enum = QuantType.QInt8,
    weight_type: Enum = QuantType.QInt8,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    optimize_model: bool = True,
    use_external_data_format: bool = False,
    execution_providers: Sequence[str] | None = ("CPUExecutionProvider",),
    enable_dpu: bool = False,
    convert_fp16_to_fp32: bool = False,
    convert_nchw_to_nhwc: bool = False,
    include_cle: bool = False,
    include_sq: bool = False,
    include_fast_ft: bool = False,
    enable_ipu_cnn: bool = False,
    enable_ipu_transformer: bool = False,
    debug_mode: bool = False,
    print_summary: bool = True,
) -> ModelProto:
    """Return a quantized model, and write it to `model_output`; without a reader, it is calibrated on random data.

    The NPU's position constraints apply with `enable_dpu` or `enable_ipu_cnn`.

    >>> import jq
    >>> images, _ = jq.zoo.calibration_set()
    >>> model = quantize_static(jq.zoo.path("fashion_resnet"), None, [{"input": images[:16]}], print_summary=False)
    >>> {node.op_type for node in model.graph.node if node.domain}
    {'FixNeuron'}
    """
    if extra_options is not None and not isinstance(extra_options, Mapping):
        raise ConfigError(f"extra_options is a {type(extra_options).__name__}; expected options by name")
    options = dict(extra_options or {})
    if random_data_reader_input_shape:
        options["RandomDataReaderInputShape"] = random_data_reader_input_shape
    config = QuantizationConfig(
        calibrate_method=calibrate_method,
        quant_format=quant_format,
        activation_type=activation_type,
        weight_type=weight_type,
        input_nodes=list(input_nodes or ()),
        output_nodes=list(output_nodes or ()),
        op_types_to_quantize=list(op_types_to_quantize or ()),
        nodes_to_quantize=list(nodes_to_quantize or ()),
        nodes_to_exclude=list(nodes_to_exclude or ()),
        execution_providers=list(execution_providers or ()),
        per_channel=per_channel,
        reduce_range=reduce_range,
        optimize_model=optimize_model,
        use_external_data_format=use_external_data_format,
        convert_fp16_to_fp32=convert_fp16_to_fp32,
        convert_nchw_to_nhwc=convert_nchw_to_nhwc,
        include_cle=include_cle,
        include_sq=include_sq,
        include_fast_ft=include_fast_ft,
        enable_npu_cnn=enable_dpu or enable_ipu_cnn,
        enable_npu_transformer=enable_ipu_transformer,
        debug_mode=debug_mode,
        print_summary=print_summary,
        extra_options=options,
    )
    return ModelQuantizer(Config(config)).quantize_model(model_input, model_output, calibration_data_reader)
