"""Formats of tensors and of files beyond onnxruntime's, by Quark's names and numbers."""

from enum import Enum

from onnxruntime.quantization import QuantFormat, QuantType

__all__ = ["ExtendedQuantFormat", "ExtendedQuantType", "QuantFormat", "QuantType", "VitisQuantFormat", "VitisQuantType"]


class ExtendedQuantType(Enum):
    """Formats of tensors: integers, floats, and blocks that share an exponent."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    QBFP = 9
    QMX = 10


# The older name of `ExtendedQuantType`.
VitisQuantType = Enum(
    "VitisQuantType", "QInt8 QUInt8 QInt16 QUInt16 QInt32 QUInt32 QFloat16 QBFloat16 QBFP QMX", module=__name__
)


class ExtendedQuantFormat(Enum):
    """Files whose quantizers may be the vendor's operators."""

    QOperator = 0
    QDQ = 1


class VitisQuantFormat(Enum):
    """Files of AMD's older flow."""

    QDQ = 2
    FixNeuron = 3
    BFPFixNeuron = 4
    MXFixNeuron = 5
