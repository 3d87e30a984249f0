"""The config that Quark's guides show."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from jq.compat.quark.calibration import CalibrationMethod
from jq.compat.quark.quantization.config.fields import Fields
from jq.compat.quark.quantization.quant_utils import QuantFormat, QuantType


@dataclasses.dataclass
class QuantizationConfig(Fields):
    """How a model is quantized, in Quark's words; `jq.compat.quark.options` lists what jq does for each.

    >>> QuantizationConfig(include_cle=False, extra_options={"Percentile": 99.9}).weight_type.name
    'QInt8'
    """

    calibrate_method: Enum = CalibrationMethod.MinMax
    quant_format: Enum = QuantFormat.QDQ
    activation_type: Enum = QuantType.QInt8
    weight_type: Enum = QuantType.QInt8

    input_nodes: list[str] = dataclasses.field(default_factory=list)
    output_nodes: list[str] = dataclasses.field(default_factory=list)
    op_types_to_quantize: list[str] = dataclasses.field(default_factory=list)
    nodes_to_quantize: list[str] = dataclasses.field(default_factory=list)
    extra_op_types_to_quantize: list[str] = dataclasses.field(default_factory=list)
    nodes_to_exclude: list[str] = dataclasses.field(default_factory=list)
    subgraphs_to_exclude: list[tuple[list[str], list[str]]] = dataclasses.field(default_factory=list)

    specific_tensor_precision: bool = False
    execution_providers: list[str] = dataclasses.field(default_factory=lambda: ["CPUExecutionProvider"])

    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_dynamic_quant: bool = False
    use_external_data_format: bool = False

    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False

    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = True
    include_auto_mp: bool = False
    include_fast_ft: bool = False

    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False

    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: Any = None

    extra_options: dict[str, Any] = dataclasses.field(default_factory=dict)
