"""Number formats by the names that Quark's specs use."""

from __future__ import annotations

from enum import Enum

from jq.arithmetic import formats


class DataType(Enum):
    """A number format; its value is jq's.

    >>> BFP16.value.size, Int8 is DataType.Int8
    (8, True)
    """

    Int8 = formats.INT8
    UInt8 = formats.UINT8
    Int16 = formats.INT16
    UInt16 = formats.UINT16
    Int32 = formats.INT32
    UInt32 = formats.Integer(32, False, 0, 2**32 - 1)
    Float16 = formats.FLOAT16
    BFloat16 = formats.BFLOAT16
    BFP16 = formats.BFP16
    MX4 = formats.MX4
    MX6 = formats.MX6
    MX9 = formats.MX9
    MXFP4E2M1 = formats.MXFP4E2M1
    MXFP6E3M2 = formats.MXFP6E3M2
    MXFP6E2M3 = formats.MXFP6E2M3
    MXFP8E5M2 = formats.MXFP8E5M2
    MXFP8E4M3 = formats.MXFP8E4M3
    MXInt8 = formats.MXINT8


Int8, UInt8 = DataType.Int8, DataType.UInt8
Int16, UInt16 = DataType.Int16, DataType.UInt16
Int32, UInt32 = DataType.Int32, DataType.UInt32
Float16, BFloat16, BFP16 = DataType.Float16, DataType.BFloat16, DataType.BFP16
MX4, MX6, MX9 = DataType.MX4, DataType.MX6, DataType.MX9
MXFP4E2M1, MXFP6E3M2, MXFP6E2M3 = DataType.MXFP4E2M1, DataType.MXFP6E3M2, DataType.MXFP6E2M3
MXFP8E5M2, MXFP8E4M3, MXInt8 = DataType.MXFP8E5M2, DataType.MXFP8E4M3, DataType.MXInt8
