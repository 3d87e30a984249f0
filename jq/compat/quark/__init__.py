"""The names of `quark.onnx`, AMD's quantizer of ONNX models, for scripts that are written for it.

>>> from jq.compat.quark import Config, ModelQuantizer, get_default_config
>>> quantizer = ModelQuantizer(Config(global_quant_config=get_default_config("XINT8")))

What jq computes is its own, for the same formats, operators and constraints:

- Options are Quark's; `jq.compat.quark.options` has a row for each, with what it becomes or why it cannot be had. What
  jq does in another way is a warning.
- Equalization and bias correction are those of `jq.equalize` and `jq.correct_biases`; the latter is on where Quark's is
  off, and `extra_options={"BiasCorrection": False}` turns it off.
- AdaRound and AdaQuant work on the quadratic form of a layer's error over all calibration data, not on batches of one
  or two samples. So Quark's default numbers stand for jq's own, and others count relative to them: twice as many
  NumIterations are twice as many steps. Biases are always tuned too, and what does not lessen the error is not kept.
- Statistics come from the values themselves; `extra_options={"NumBins": 2048}` takes Quark's histogram.
"""

from typing import Any

from onnxruntime.quantization.calibrate import CalibraterBase, MinMaxCalibrater
from onnxruntime.quantization.quant_utils import QuantizationMode, write_calibration_table

from jq.compat.quark import auto_search
from jq.compat.quark.calibration import *
from jq.compat.quark.operators.custom_ops import get_library_path
from jq.compat.quark.quantization import *
from jq.compat.quark.quantization.api import ModelQuantizer
from jq.compat.quark.quantization.auto_search import (
    AutoSearch,
    AutoSearchPro,
    SearchSpace,
    generate_all_configs,
    get_auto_search_config,
)
from jq.compat.quark.quantization.config import *
from jq.compat.quark.quantization.config import custom_config
from jq.compat.quark.quantization.config.custom_config import *
from jq.compat.quark.quantization.config.data_type import *
from jq.compat.quark.quantization.config.spec import *
from jq.compat.quark.quantization.quant_utils import *
from jq.errors import ConfigError

__all__ = [
    "BFP16", "DEFAULT_ADAQUANT_PARAMS", "DEFAULT_ADAROUND_PARAMS", "DEFAULT_BFP_PARAMS",
    "DEFAULT_MICROEXPONENTS_PARAMS", "DEFAULT_MICROSCALING_PARAMS", "AdaQuantConfig", "AdaRoundConfig",
    "AlgoConfig", "AutoMixprecisionConfig", "AutoSearch", "AutoSearchPro", "BFP16Spec", "BFloat16", "BFloat16Spec",
    "BiasCorrectionConfig", "CLEConfig", "CachedDataReader", "CalibMethod", "CalibraterBase",
    "CalibrationDataReader", "CalibrationMethod", "Config", "DataType", "ExtendedCalibrationMethod",
    "ExtendedQuantFormat", "ExtendedQuantType", "Float16", "Float16Spec", "GPTQConfig", "Int8", "Int8Spec", "Int16",
    "Int16Method", "Int16Spec", "Int32", "Int32Spec", "LayerWiseMethod", "MX4Spec", "MX6Spec", "MX9Spec",
    "MXFP4E2M1Spec", "MXFP6E2M3Spec", "MXFP6E3M2Spec", "MXFP8E4M3Spec", "MXFP8E5M2Spec", "MXInt8Spec",
    "MinMaxCalibrater", "ModelQuantizer", "PathDataReader", "PowerOfTwoMethod", "QConfig", "QLayerConfig",
    "QTensorConfig", "QuantFormat", "QuantGranularity", "QuantType", "QuantizationConfig", "QuantizationMode",
    "QuarotConfig", "RandomDataReader", "ScaleType", "SearchSpace", "SmoothQuantConfig", "UInt8", "UInt8Spec",
    "UInt16", "UInt16Spec", "UInt32", "UInt32Spec", "VitisQuantFormat", "VitisQuantType", "XInt8Spec",
    "auto_search", "generate_all_configs", "get_auto_search_config", "get_default_config",
    "get_default_config_mapping", "get_library_path", "write_calibration_table",
]  # fmt: skip

# Quark names that jq does not have.
ABSENT = {
    "quantize_static": "use ModelQuantizer, or quantize_static of jq.compat.vai_q_onnx",
    "quantize_dynamic": "use get_default_config('UINT8_DYNAMIC_QUANT')",
    "create_calibrator_power_of_two": "jq.calibrate measures all tensors in one pass",
    "create_calibrator_float_scale": "jq.calibrate measures all tensors in one pass",
    "dump_model": "`jq-quant simulate --dump` writes the integers of every tensor",
    "VitisExtendedQuantizer": "use ModelQuantizer",
}


def __getattr__(name: str) -> Any:
    """Return a named config such as XINT8_QCONFIG, created on access."""
    if name.endswith(("_CONFIG", "_QCONFIG")):
        return getattr(custom_config, name)
    if name in ABSENT:
        raise ConfigError(f"jq.compat.quark has no {name}: {ABSENT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
