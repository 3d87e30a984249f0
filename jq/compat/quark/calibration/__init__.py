"""`quark.onnx.calibration`: methods of calibration, and readers of calibration data."""

from jq.compat.quark.calibration.data_readers import CachedDataReader, PathDataReader, RandomDataReader
from jq.compat.quark.calibration.methods import (
    CalibrationDataReader,
    CalibrationMethod,
    ExtendedCalibrationMethod,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
)

__all__ = [
    "CachedDataReader", "CalibrationDataReader", "CalibrationMethod", "ExtendedCalibrationMethod", "Int16Method",
    "LayerWiseMethod", "PathDataReader", "PowerOfTwoMethod", "RandomDataReader",
]  # fmt: skip
