"""Where a chip rounds: exact integers become the integers of a tensor of the file.

The first form that is exact for the target is taken: a shift, a short product and a shift, a division, a product with
a 24-bit significand; or float32, if that is being modelled.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.numerics import WIDEST, Mode, divide, round_divide, round_product, round_shift, rounded
from jq.npu.targets import Target
from jq.ops.integer.fixed import (
    FLOAT32_BITS,
    Fixed,
    Grid,
    Scale,
    Table,
    float32,
    is_power_of_two,
    position,
    round_fraction,
)

Array = Any

_SIGNIFICAND = 24

# Only functions of these names compute in float32, so that a program can be searched for any others.
FLOAT32_FORMS = ("_dequantize", "_quantize_real", "float32_requantize", "_float32_magnitudes", "_softmax_bits")


def quantize(x: Fixed | Table, grid: Grid, target: Target) -> Fixed | None:
    """Return the integers of a tensor of the file; None if the target has no exact way to them."""
    if target.requantize == "float32" and isinstance(x, Fixed) and x.grid is not None and _rounds_twice(x, grid):
        table = x.table()
        x = x if table is None else table
    low, high = (np.clip(end, *grid.ends) for end in cut(x, grid, target))
    if isinstance(x, Table):
        entries = np.clip(x.nearest(grid, target.rounding) + grid.zero, low, high)
        integers: Array = x.look_up(entries.astype(grid.dtype))
    elif unchanged(x, grid):
        integers = x.array if not x.waits else jnp.clip(x.array, *np.array((low, high), x.array.dtype))
    else:
        whole = rescaled(x, grid, target)
        if whole is None:
            return None
        integers = jnp.clip(whole, low, high).astype(grid.dtype)
    return Fixed.of(integers, grid)


def _rounds_twice(x: Fixed, grid: Grid) -> bool:
    """Whether float32 rounds what integers of a tensor stand for, and once more in steps of another grid."""
    return (x.floating or not is_power_of_two(grid.scale) or x.slope is not None) and not unchanged(x, grid)


def unchanged(x: Fixed, grid: Grid | None) -> bool:
    """Whether the integers of a tensor are those of another one: at most cut."""
    if x.grid is None or grid is None or x.grid.grid != grid.grid:
        return False
    return (x.scale, x.zero, x.slope) == (grid.scale, grid.zero, None)


def cut(x: Fixed | Table, grid: Grid, target: Target) -> tuple[int, int]:
    """The ends of the interval that the activation which waits leaves, as integers of the grid."""
    low, high = grid.ends
    if isinstance(x, Table):
        return low, high
    if x.low is not None:
        low = _end(x.low, grid, target)
    if x.high is None:
        return low, high
    six = x.low == 0 and x.high == 6 and is_power_of_two(grid.scale)
    if six and target.relu6 is not None and position(grid.scale) <= target.relu6_position:
        return low, target.relu6 + grid.zero
    return low, min(high, _end(x.high, grid, target))


def _end(number: Fraction, grid: Grid, target: Target) -> int:
    if target.requantize == "float32":
        return int(np.clip(np.rint(np.float32(number) / np.float32(grid.scale)), -WIDEST, WIDEST)) + grid.zero
    return round_fraction(number / grid.scale, target.rounding) + grid.zero


def rescaled(x: Fixed, grid: Grid, target: Target) -> Array | None:
    """The integers of the grid, before they saturate."""
    if x.slope is not None and x.fraction is not None:
        below, above = x.below_zero(), rescaled(x.replace(slope=None), grid, target)
        sloped = None if below is None else rescaled(below, grid, target)
        if above is None or sloped is None:
            return None
        return jnp.where(x.array + (x.fraction[0] >> x.fraction[1]) < 0, sloped, above)
    joined = x.joined(grid)
    if joined is None:
        return None
    x = joined
    v, ratio = x.integers(), x.scale / grid.scale
    whole = _multiplied(v, ratio, x, grid, target)
    if x.slope is None or whole is None:
        return whole
    below_zero = _multiplied(v, ratio * x.slope, x, grid, target)
    return None if below_zero is None else jnp.where(v < 0, below_zero, whole)


def ties(x: Fixed, grid: Grid, target: Target) -> Array:
    """Whether the value lies halfway between two integers, where a number and its negative both round up."""
    if unchanged(x, grid):
        return jnp.zeros(x.array.shape, bool)
    joined = x.joined(grid)
    x = x if joined is None else joined
    origin, v = dataclasses.replace(grid, zero_point=grid.middle), x.integers()
    upwards = dataclasses.replace(target, rounding="half_up", requantize="shift")

    def of(ratio: Scale) -> Array:
        both = [_multiplied(part, ratio, x, origin, upwards) for part in (v, -v)]
        if both[0] is None:  # float scales: as precisely as float32 can tell
            value = v.astype(jnp.float32) * float32(ratio)
            return value - jnp.floor(value) == 0.5
        return both[0] + both[1] != 0

    ratio = x.scale / grid.scale
    return of(ratio) if x.slope is None else jnp.where(v < 0, of(ratio * x.slope), of(ratio))


def _multiplied(v: Array, ratio: Scale, x: Fixed, grid: Grid, target: Target) -> Array | None:
    """round(v * ratio) + zero, by the first form that is exact for the target."""
    ratios = np.asarray(ratio).reshape(-1)
    if x.bound >= WIDEST or any(r < 0 for r in ratios):
        return None
    mode, zero, shape = target.rounding, grid.zero, np.shape(ratio)
    if target.requantize == "significand" and (x.floating or not is_power_of_two(grid.scale)):
        factor = _float32_ratio(x, grid, ratio)
        return by_significand(v, factor, zero, _beyond(grid)) if np.all(factor < 2.0 ** (_SIGNIFICAND - 1)) else None
    if all(map(is_power_of_two, ratios)):
        return round_shift(v, np.array([position(r) for r in ratios]).reshape(shape), mode) + zero
    dyadic = all(r.denominator & (r.denominator - 1) == 0 for r in ratios)
    most = max(r.numerator for r in ratios)
    # If float32 is being modelled, short products are exact in it too.
    room = WIDEST if target.requantize != "float32" else 1 << FLOAT32_BITS
    shifts = np.array([r.denominator.bit_length() - 1 for r in ratios]).reshape(shape)
    if dyadic and most * x.bound < room:
        return round_shift(v * np.array([r.numerator for r in ratios], np.int32).reshape(shape), shifts, mode) + zero
    if target.requantize == "float32":
        return float32_requantize(v, _float32_ratio(x, grid, ratio), zero)
    if dyadic and most < 1 << _SIGNIFICAND:
        return round_product(v, np.array([r.numerator for r in ratios]).reshape(shape), shifts, mode) + zero
    if isinstance(ratio, Fraction) and most * x.bound < WIDEST and ratio.denominator <= WIDEST:
        return round_divide(v * most, ratio.denominator, mode) + zero
    return None


def _beyond(grid: Grid) -> int:
    """A distance from the zero point that no integer of a grid has."""
    return 1 << grid.grid.bits + 1


def _float32_ratio(x: Fixed, grid: Grid, ratio: Scale) -> np.ndarray:
    """The float32 factor: of the products' scale, itself rounded, over the output's; or as that times a slope."""
    if x.slope is None:
        return float32(x.scale) / np.float32(grid.scale)
    return float32(ratio)


def by_significand(v: Array, factor: np.ndarray, zero: int, most: int = WIDEST) -> Array:
    """round(v * factor + zero), half to even, of the exact product with a float32 factor or one per channel.

    What is beyond `most` is only that.

    >>> int(by_significand(jnp.int32(-777), np.float32(0.05), 0))
    -39
    """
    return round_product(v, *significand(factor), "half_even", zero, most)


def significand(factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positive float32 numbers as m / 2**s, with m of 24 bits.

    >>> [int(part) for part in significand(np.float32(0.0031))]
    [13314399, 32]
    """
    fraction, exponent = np.frexp(np.asarray(factor, np.float32))
    return (fraction * 2**_SIGNIFICAND).astype(np.int32), _SIGNIFICAND - exponent


@jax.jit
def float32_requantize(v: Array, factor: Array, zero: Array) -> Array:
    """As onnxruntime: the accumulator as float32, times the factor, rounded half to even."""
    return jnp.clip(jnp.round(rounded(v.astype(jnp.float32) * factor)), -WIDEST, WIDEST).astype(jnp.int32) + zero


def quantize_real(x: Array, grid: Grid, target: Target) -> Fixed:
    """The integers of a tensor of floats, where these come into a quantized region."""

    def integers(x: Array) -> Array:
        held = _quantize_real(x, np.float32(grid.scale), target.rounding, *grid.ends, grid.zero)
        return held.astype(grid.dtype)

    return Fixed.of(layout.mapped(integers, x), grid, entry=True)


def _quantize_real_(x: Array, scale: Array, mode: Mode, low: int, high: int, zero: int) -> Array:
    value = divide(x, scale)
    below = jnp.floor(value)
    rest = value - below  # at worst rounded to a half from above
    match mode:
        case "half_even":
            near = jnp.round(value)
        case "half_up":
            near = below + (rest >= 0.5)
        case "half_away":  # of the magnitude, whose fraction is exact
            size = jnp.abs(value)
            near = jnp.sign(value) * (jnp.floor(size) + (size - jnp.floor(size) >= 0.5))
        case "floor":
            near = below
    # NaN becomes the lowest code, as in onnxruntime.
    return jnp.where(near >= low - zero, jnp.minimum(near, high - zero), low - zero).astype(jnp.int32) + zero


_quantize_real_.__name__ = "_quantize_real"
_quantize_real = jax.jit(_quantize_real_, static_argnames=("mode", "low", "high", "zero"))
