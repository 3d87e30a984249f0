"""Number formats that a tensor is quantized to."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import ml_dtypes
import numpy as np

from jq.errors import check_choice

Rounding = Literal["half_even", "half_away", "half_up"]  # where a tie goes; up is towards plus infinity


@dataclasses.dataclass(frozen=True)
class Integer:
    """Integers of some bits.

    >>> INT8, INT8.narrow.qmin, UINT8.middle
    (int8, -127, 128)
    """

    bits: int
    signed: bool
    qmin: int
    qmax: int

    def __repr__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """As ONNX and numpy call the type that stores it."""
        return f"{'' if self.signed else 'u'}int{self.bits}"

    @property
    def dtype(self) -> np.dtype:
        """The numpy type that stores it: codes of 2 bits are stored in 4, the least that runtimes read."""
        return np.dtype(f"{'' if self.signed else 'u'}int{max(self.bits, 4)}")  # ml_dtypes has what numpy lacks

    @property
    def narrow(self) -> Integer:
        """The codes left when the lowest of a signed format is not used, so that the grid is symmetric.

        An unsigned format keeps all: its symmetric form has its zero point in the middle.
        """
        return dataclasses.replace(self, qmin=-self.qmax) if self.signed else self

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return (self.qmin + self.qmax + 1) // 2


@dataclasses.dataclass(frozen=True)
class Float:
    """A floating-point type that a tensor is rounded to, half to even and without a scale.

    >>> BFLOAT16, FLOAT16.largest
    (bfloat16, 65504.0)
    """

    name: str
    dtype: np.dtype
    saturates: bool  # values beyond the largest number, and infinities, become that number instead of infinity

    def __repr__(self) -> str:
        return self.name

    @property
    def fraction(self) -> int:
        """Bits after the leading one."""
        return int(ml_dtypes.finfo(self.dtype).nmant)

    @property
    def emin(self) -> int:
        """The exponent of the least normal number."""
        return int(ml_dtypes.finfo(self.dtype).minexp)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return float(ml_dtypes.finfo(self.dtype).max)


@dataclasses.dataclass(frozen=True)
class Element:
    """The storage of one value of a block: a small float, or an integer whose leading bit stands for 2**0.

    The integer is the float that has one exponent only: where `emin` is `emax`, all steps are equal.
    """

    name: str  # as the vendor's attribute `element_dtype`
    bits: int
    emax: int  # the exponent of the largest number; that number has the block's exponent
    emin: int  # the exponent of the least normal number
    fraction: int  # bits after the leading one
    largest: float
    lowest: float


@dataclasses.dataclass(frozen=True)
class Block:
    """Elements that share an exponent: that of the largest magnitude among `size` of them along an axis.

    >>> BFP16, BFP16.size, BFP16.bits, MX9.bits
    (bfp16, 8, 9.0, 9.0)
    """

    name: str
    kind: Literal["bfp", "bfp_prime", "mx"]  # the family: block floating point, microexponents, OCP microscaling
    size: int
    element: Element
    rounding: Rounding = "half_even"
    sub_size: int = 1  # how many elements share a shift ...
    shift_bits: int = 0  # ... of that many bits, which lowers the exponent where all of them are small
    raises: bool = False  # rounding up beyond the largest code raises the block's exponent, else it saturates
    flushes: bool = False  # subnormal values become zero
    poisons: bool = False  # a NaN or infinity makes the whole block NaN; otherwise it is kept and ignored
    through_bfloat16: bool = False  # values are rounded to bfloat16 first

    def __repr__(self) -> str:
        return self.name

    @property
    def bits(self) -> float:
        """Storage per element, with its part of the shared exponent and of the shifts."""
        return self.element.bits + 8 / self.size + self.shift_bits / self.sub_size


def magnitude(bits: int) -> Element:
    """Return the element of a sign and `bits` bits of magnitude.

    >>> magnitude(7).largest * 64
    127.0
    """
    largest = 2 - math.ldexp(1.0, 1 - bits)
    return Element(f"sign{bits}", bits + 1, 0, 0, bits - 1, largest, -largest)


ELEMENTS = {
    e.name: e
    for e in (
        Element("int8", 8, 0, 0, 6, 127 / 64, -2.0),
        Element("fp8_e5m2", 8, 15, -14, 2, 57344.0, -57344.0),
        Element("fp8_e4m3", 8, 8, -6, 3, 448.0, -448.0),
        Element("fp6_e3m2", 6, 4, -2, 2, 28.0, -28.0),
        Element("fp6_e2m3", 6, 2, 0, 3, 7.5, -7.5),
        Element("fp4_e2m1", 4, 2, 0, 1, 6.0, -6.0),
    )
}


def _microexponents(name: str, bits: int) -> Block:
    return Block(name, "bfp_prime", 16, magnitude(bits), sub_size=2, shift_bits=1, flushes=True, poisons=True)


INT2 = Integer(2, True, -2, 1)
INT4 = Integer(4, True, -8, 7)
UINT4 = Integer(4, False, 0, 15)
INT8 = Integer(8, True, -128, 127)
UINT8 = Integer(8, False, 0, 255)
INT16 = Integer(16, True, -32768, 32767)
UINT16 = Integer(16, False, 0, 65535)
INT32 = Integer(32, True, -(2**31), 2**31 - 1)
BFLOAT16 = Float("bfloat16", np.dtype(ml_dtypes.bfloat16), saturates=False)
FLOAT16 = Float("float16", np.dtype(np.float16), saturates=True)
BFP16 = Block("bfp16", "bfp", 8, magnitude(7))
MX9 = _microexponents("mx9", 7)
MX6 = _microexponents("mx6", 4)
MX4 = _microexponents("mx4", 2)
MXINT8 = Block("mxint8", "mx", 32, ELEMENTS["int8"])
MXFP8E5M2 = Block("mxfp8e5m2", "mx", 32, ELEMENTS["fp8_e5m2"])
MXFP8E4M3 = Block("mxfp8e4m3", "mx", 32, ELEMENTS["fp8_e4m3"])
MXFP6E3M2 = Block("mxfp6e3m2", "mx", 32, ELEMENTS["fp6_e3m2"])
MXFP6E2M3 = Block("mxfp6e2m3", "mx", 32, ELEMENTS["fp6_e2m3"])
MXFP4E2M1 = Block("mxfp4e2m1", "mx", 32, ELEMENTS["fp4_e2m1"])

INTEGERS = {f.name: f for f in (INT2, INT4, UINT4, INT8, UINT8, INT16, UINT16, INT32)}
FLOATS = {f.name: f for f in (BFLOAT16, FLOAT16)}
BLOCKS = {
    f.name: f for f in (BFP16, MX9, MX6, MX4, MXINT8, MXFP8E5M2, MXFP8E4M3, MXFP6E3M2, MXFP6E2M3, MXFP4E2M1)
}  # fmt: skip
Format = Integer | Float | Block
_ALL: dict[str, Format] = {**INTEGERS, **FLOATS, **BLOCKS}


def format_named(name: str) -> Format:
    """The format of that name, of any kind.

    >>> format_named("mxfp8e4m3").size, format_named("int4").qmin
    (32, -8)
    """
    check_choice("format", name, _ALL)
    return _ALL[name]
