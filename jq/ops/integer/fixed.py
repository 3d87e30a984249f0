"""Integers with an exact scale, not yet rounded: the values that the integer reading passes from operator to operator.

An operator's integer rule returns the exact result of its sums and products. A chip rounds where the model has a
QuantizeLinear, once for whatever lies between two of them, and `quantize` is where that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.formats import Integer
from jq.arithmetic.numerics import WIDEST, Mode, rounded
from jq.plan import QParams

Array = Any
Scale = Any  # a Fraction; or an array of them, one for each index of the last axis

FLOAT32_BITS = 24  # integers below 2**24 are exact in float32
_MOST_KEPT = 20  # bits of a fraction
LARGEST_TABLE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Grid(QParams):
    """The `QParams` of a tensor of the file in exact numbers, a Fraction and an int, and its codes as they are held."""

    grid: Integer

    @property
    def middle(self) -> int:
        """The number subtracted from codes so that a signed type of the same width holds them."""
        return 0 if self.grid.signed else self.grid.middle

    @property
    def zero(self) -> int:
        """The zero point of the integers as they are held."""
        return self.zero_point - self.middle

    @property
    def ends(self) -> tuple[int, int]:
        """The least and the largest integer as they are held."""
        return self.grid.qmin - self.middle, self.grid.qmax - self.middle

    @property
    def bound(self) -> int:
        """The largest magnitude without the zero point."""
        low, high = self.ends
        return max(self.zero - low, high - self.zero)

    @property
    def dtype(self) -> np.dtype:
        """The signed type that holds them."""
        return np.dtype(np.int8 if self.grid.bits <= 8 else np.int16 if self.grid.bits <= 16 else np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """Integers that stand for (array - zero) * scale, on which an activation may still wait.

    What waits is first the slope of negative values, then the cut to [low, high], which commutes with rounding.
    """

    array: Any  # int8, int16 or int32, in whatever order it lies
    scale: Scale
    bound: int  # no |array - zero| is larger
    zero: int = 0
    grid: Grid | None = None  # of a tensor of the file
    axis: int | None = None  # of a scale per channel: ONNX's of a weight, else the last one of the array
    slope: Scale | None = None
    low: Fraction | None = None
    high: Fraction | None = None
    host: np.ndarray | None = None  # the integers of a weight, for bounds
    floating: bool = False  # of scales that are no powers of two
    coded: bool = False  # the file has the integers themselves in this place, not what they stand for
    entry: bool = False  # quantized where it came in
    fraction: tuple[Array, int] | None = None  # still to be added: integers, and by how many bits they are finer
    terms: int = 1  # that were added up
    finest: int = 1  # how many steps of the finest grid, on which float32 would add, one of these integers has
    causes: frozenset[str] = frozenset()  # why this may not be what exact arithmetic on the model gives
    deviation: float = 0.0  # by how much of itself a mean is off, as the chip has its reciprocal
    magnitude: Callable[[], Array] | None = None  # the sum of the absolute products, which bounds partial sums

    @classmethod
    def of(cls, array: Any, grid: Grid, *, entry: bool = False) -> Fixed:
        """The integers of a tensor of the file, as it has them."""
        return cls(array, grid.scale, grid.bound, grid.zero, grid, coded=True, entry=entry)

    @property
    def waits(self) -> bool:
        """Whether an activation waits for the rounding."""
        return self.slope is not None or self.low is not None or self.high is not None

    @property
    def per_channel(self) -> bool:
        """Whether a scale, or a slope that waits, is one for each channel."""
        return isinstance(self.scale, np.ndarray) or isinstance(self.slope, np.ndarray)

    @property
    def is_codes(self) -> bool:
        """Whether these are the integers of a tensor with one scale, nothing waiting."""
        return self.grid is not None and not self.waits and not self.coded and isinstance(self.scale, Fraction)

    @property
    def is_dyadic(self) -> bool:
        """Whether the one scale is a power of two."""
        return isinstance(self.scale, Fraction) and is_power_of_two(self.scale)

    def replace(self, **changes: Any) -> Fixed:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def holding(self, array: Any, **changes: Any) -> Fixed:
        """A copy with other integers, and without what was known of these."""
        return self.replace(array=array, host=None, magnitude=None, **changes)

    def integers(self) -> Array:
        """The integers without their zero point, as int32."""
        wide = self.array.astype(jnp.int32)
        return wide - self.zero if self.zero else wide

    @property
    def is_increasing(self) -> bool:
        """Whether a larger integer never stands for less."""
        return self.slope is None or bool(np.all(np.asarray(self.slope) >= 0))

    def cut_now(self) -> Fixed | None:
        """The same without a cut that waits, if integers of the tensor can be cut as well."""
        if self.slope is not None or not isinstance(self.scale, Fraction) or self.grid is None or self.coded:
            return None
        ends = [None if end is None else end / self.scale + self.zero for end in (self.low, self.high)]
        if any(end is not None and end.denominator != 1 for end in ends):
            return None
        least, most = np.iinfo(self.array.dtype).min, np.iinfo(self.array.dtype).max
        low, high = (None if e is None else int(np.clip(int(e), least, most)) for e in ends)
        return self.holding(jnp.clip(self.array, low, high), low=None, high=None)

    def below_zero(self) -> Fixed | None:
        """The same times its slope: what it is where it is negative."""
        assert self.fraction is not None
        integers, bits = self.fraction
        slope = self.slope
        if not isinstance(slope, Fraction) or slope == 0 or slope.denominator & (slope.denominator - 1):
            return None
        times = slope.numerator
        if self.bound * times >= WIDEST or bits + times.bit_length() > 30:
            return None
        # The fraction is no negative number, so that it may be multiplied apart.
        part = (integers & ((1 << bits) - 1)) * times
        array = (self.array + (integers >> bits)) * times
        scale, bound = self.scale / slope.denominator, self.bound * times
        return self.replace(array=array, scale=scale, bound=bound, fraction=(part, bits), slope=None)

    def joined(self, grid: Grid) -> Fixed | None:
        """The same with its fraction, as far as that matters to rounding to a grid: to a bit below a half, and whether
        there is more. What int32 then does not hold saturates in any case.
        """
        if self.fraction is None:
            return self
        if self.slope is not None or not self.is_dyadic or not is_power_of_two(grid.scale):
            return None
        integers, bits = self.fraction
        keep = min(bits, max(0, position(grid.scale) - position(self.scale)) + 2)
        if keep > _MOST_KEPT:
            return None
        most, dropped = WIDEST >> keep + 2, bits - keep
        more = (integers & ((1 << dropped) - 1)) != 0
        below = ((integers >> dropped) << 1) | more.astype(jnp.int32)
        array = (jnp.clip(self.array, -most, most) << keep + 1) + below
        return self.replace(array=array, scale=self.scale / 2 ** (keep + 1), bound=WIDEST - 1, fraction=None)

    def span(self) -> tuple[int, int]:
        """The least and the largest integer without the zero point."""
        if self.grid is None:
            return -self.bound, self.bound
        low, high = self.grid.ends
        return low - self.zero, high - self.zero

    def real(self) -> Array:
        """The values of the integers, as float32."""
        scale = float32(self.scale)
        if self.axis is not None and self.host is not None:  # a weight's axis is ONNX's
            scale = layout.along(scale, self.host.ndim, self.axis)
        value = _dequantize(self.integers(), scale)
        if self.fraction is not None:
            value = value + _dequantize(self.fraction[0], float32(self.scale / 2 ** self.fraction[1]))
        return self._activated(jnp, value)

    def table(self) -> Table | None:
        """The same as a function of the integers, if they are few enough."""
        low, high = self.span()
        if high - low >= LARGEST_TABLE or self.per_channel or self.coded or self.fraction is not None:
            return None
        values = self._activated(np, np.arange(low, high + 1).astype(np.float32) * np.float32(self.scale))
        return Table(self.replace(host=None, slope=None, low=None, high=None), values)

    def _activated(self, xp: Any, value: Array) -> Array:
        """Values with the activation that waits."""
        if self.slope is not None:
            value = xp.where(value < 0, value * float32(self.slope), value)
        value = value if self.low is None else xp.maximum(value, np.float32(self.low))
        return value if self.high is None else xp.minimum(value, np.float32(self.high))


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A function of integers, in float32 as the model computes it: one value for each integer that there can be."""

    source: Fixed
    values: np.ndarray
    in_bfloat16: bool = False  # rounded as the chip's softmax ends: a half added in bfloat16, the fraction dropped

    @property
    def array(self) -> Any:
        """The integers that it is a function of."""
        return self.source.array

    @property
    def is_increasing(self) -> bool:
        """Whether a larger integer never stands for less."""
        return bool(np.all(np.diff(self.values) >= 0))

    def replace(self, **changes: Any) -> Table:
        """A copy with the source changed."""
        return dataclasses.replace(self, source=self.source.replace(**changes))

    def holding(self, array: Any) -> Table:
        """A copy with other integers."""
        return dataclasses.replace(self, source=self.source.holding(array))

    def look_up(self, entries: np.ndarray) -> Array:
        """One of the entries for each integer of the source."""
        index = self.source.integers() - self.source.span()[0]
        return jnp.asarray(entries).at[index].get(mode="promise_in_bounds")

    def nearest(self, grid: Grid, mode: Mode) -> np.ndarray:
        """The values on a grid, rounded; NaN is below all others, as in onnxruntime."""
        with np.errstate(all="ignore"):
            scaled = np.nan_to_num(np.asarray(self.values, np.float32) / np.float32(grid.scale), nan=-np.inf)
            if self.in_bfloat16:
                return np.trunc((scaled + np.float32(0.5)).astype(ml_dtypes.bfloat16).astype(np.float32))
        return _nearest(scaled, mode)

    def real(self) -> Array:
        """The values."""
        return self.look_up(self.values)


# --- Exact numbers ---


def is_power_of_two(number: Fraction) -> bool:
    """Whether a positive number is one.

    >>> is_power_of_two(Fraction(1, 8)), is_power_of_two(Fraction(3, 8))
    (True, False)
    """
    return number > 0 and all(part & (part - 1) == 0 for part in (number.numerator, number.denominator))


def position(scale: Fraction) -> int:
    """The vendor's word for a power of two: scale = 2**-position."""
    return scale.denominator.bit_length() - scale.numerator.bit_length()


def exact(values: Any) -> Scale:
    """Floats as exact numbers.

    >>> exact(np.float32(0.75)), exact(np.float32([1, 0.5]))
    (Fraction(3, 4), array([Fraction(1, 1), Fraction(1, 2)], dtype=object))
    """
    values = np.asarray(values)
    if values.ndim == 0:
        return Fraction(float(values))
    return np.array([Fraction(float(v)) for v in values.reshape(-1)], object).reshape(values.shape)


def round_fraction(number: Fraction, mode: Mode) -> int:
    """The integer that a number is rounded to.

    >>> round_fraction(Fraction(-3, 2), "half_up"), round_fraction(Fraction(-3, 2), "half_away")
    (-1, -2)
    """
    below = number.numerator // number.denominator
    rest = number - below
    if mode == "floor" or rest < Fraction(1, 2):
        return below
    if rest > Fraction(1, 2):
        return below + 1
    return below + {"half_up": 1, "half_even": below & 1, "half_away": int(number > 0)}[mode]


def float32(scale: Scale) -> np.ndarray:
    """Exact numbers as the nearest float32."""
    return np.asarray(scale).astype(np.float64).astype(np.float32)


def _nearest(values: np.ndarray, mode: Mode) -> np.ndarray:
    match mode:
        case "half_even":
            return np.rint(values)
        case "half_up":  # values are float32, so that a half can be added in float64
            return np.floor(values.astype(np.float64) + 0.5)
        case "half_away":
            return np.copysign(np.floor(np.abs(values.astype(np.float64)) + 0.5), values)
        case "floor":
            return np.floor(values)


@jax.jit
def _dequantize(v: Array, scale: Array) -> Array:
    return rounded(v.astype(jnp.float32) * scale)


def wrapped(codes: Any, grid: Grid) -> Fixed:
    """Integers of a file, as they are traced, in the order in which they lie."""
    return Fixed.of(layout.mapped(lambda c: (c.astype(jnp.int32) - grid.middle).astype(grid.dtype), codes), grid)
