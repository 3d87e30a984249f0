"""Calibration methods by Quark's names, beside onnxruntime's own."""

from enum import Enum

from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod

__all__ = [
    "CalibrationDataReader", "CalibrationMethod", "ExtendedCalibrationMethod", "Int16Method", "LayerWiseMethod",
    "PowerOfTwoMethod",
]  # fmt: skip


class PowerOfTwoMethod(Enum):
    """Methods for power-of-two scales, those of AMD's NPU."""

    NonOverflow = 0
    MinMSE = 1


class Int16Method(Enum):
    """Methods for scales that are an int16 times a power of two; jq has none."""

    MinMax = 0


class LayerWiseMethod(Enum):
    """Methods that choose separately for each tensor."""

    LayerWisePercentile = 0


class ExtendedCalibrationMethod(Enum):
    """Further methods for float scales."""

    MinMSE = 0
