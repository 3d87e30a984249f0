"""How ranges are found, by Quark's names; onnxruntime's own methods are beside them."""

from enum import Enum

from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod

__all__ = [
    "CalibrationDataReader",
    "CalibrationMethod",
    "ExtendedCalibrationMethod",
    "Int16Method",
    "LayerWiseMethod",
    "PowerOfTwoMethod",
]


class PowerOfTwoMethod(Enum):
    """Methods that find powers of two, the scales that AMD's NPU has."""

    NonOverflow = 0
    MinMSE = 1


class Int16Method(Enum):
    """Methods of scales that are an int16 times a power of two; jq has none."""

    MinMax = 0


class LayerWiseMethod(Enum):
    """Methods that choose anew for each tensor."""

    LayerWisePercentile = 0


class ExtendedCalibrationMethod(Enum):
    """Methods of float scales beyond onnxruntime's."""

    MinMSE = 0
