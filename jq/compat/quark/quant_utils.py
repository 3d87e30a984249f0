"""`quark.onnx.quant_utils`, where scripts for older versions of Quark import formats, methods and readers from."""

from jq.compat.quark.calibration import (
    CachedDataReader,
    CalibrationDataReader,
    CalibrationMethod,
    ExtendedCalibrationMethod,
    Int16Method,
    LayerWiseMethod,
    PathDataReader,
    PowerOfTwoMethod,
    RandomDataReader,
)
from jq.compat.quark.quantization.quant_utils import (
    ExtendedQuantFormat,
    ExtendedQuantType,
    QuantFormat,
    QuantType,
    VitisQuantFormat,
    VitisQuantType,
)

__all__ = [
    "CachedDataReader", "CalibrationDataReader", "CalibrationMethod", "ExtendedCalibrationMethod", "ExtendedQuantFormat",
    "ExtendedQuantType", "Int16Method", "LayerWiseMethod", "PathDataReader", "PowerOfTwoMethod", "QuantFormat",
    "QuantType", "RandomDataReader", "VitisQuantFormat", "VitisQuantType",
]  # fmt: skip
