"""Power-of-two arithmetic. `exponent` means scale = 2**exponent; the vendor's `position` is its negative."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from jq.arithmetic.formats import Integer

Array = Any  # numpy or jax
Mode = Literal["half_even", "half_up", "half_away", "floor"]  # where a tie goes; up is towards plus infinity

FINEST = -126  # the least exponent of a normal float32, below which devices flush to zero
_LIMIT = 127  # of the exponents that the vendor's tools know


def exponent_of(scale: ArrayLike) -> np.ndarray:
    """Return the exponent of the power of two that is nearest to a scale on a logarithmic axis.

    In float32, half to even and within +-127, as Quark's scale2pos.

    >>> int(exponent_of(0.5)), int(exponent_of(0.7)), int(exponent_of(0.72))
    (-1, -1, 0)
    """
    scale = np.clip(np.asarray(scale, np.float32), np.float32(2.0**-_LIMIT), np.float32(2.0**_LIMIT))
    return np.rint(np.log2(scale)).astype(np.int32)


def power_of_two(exponent: ArrayLike) -> np.ndarray:
    """Return 2**exponent in float32, exactly: also where it is subnormal.

    >>> float(power_of_two(-3))
    0.125
    """
    return np.ldexp(np.float32(1), np.asarray(exponent, np.int32))


def inverse_power(exponent: Array) -> Array:
    """Return 2**-exponent in float32, on the device; not below `FINEST`."""
    return jnp.ldexp(jnp.float32(1), -exponent)


def divide(x: Array, divisor: Array) -> Array:
    """Return `x / divisor`, correctly rounded.

    XLA turns division by a broadcast or constant value into multiplication with its reciprocal, one
    unit off in every seventh quotient, which is another code wherever the exact one is a tie. A divisor
    that seems to differ per element stops that; NaN / NaN is NaN as x / divisor was. And of a quotient that
    is divided again it makes one division by the product.
    """
    return rounded(x) / jnp.where(jnp.isnan(x), x, divisor)


def rounded(product: Array) -> Array:
    """Return a float product rounded before something is added: XLA's CPU backend would fuse the two."""
    return jnp.maximum(product, jnp.finfo(jnp.result_type(product)).min)


@jax.custom_jvp
def nearest(x: Array) -> Array:
    """Return the nearest integers, half to even, with the straight-through gradient: that of x.

    >>> float(nearest(jnp.float32(2.5))), float(jax.grad(nearest)(2.5))
    (2.0, 1.0)
    """
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


@nearest.defjvp
def _straight_through(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return nearest(*primals), tangents[0]


def codes(x: Array, scale: Array, zero_point: Array, grid: Integer) -> Array:
    """Return the quantized values as floats: clip(rint(x / scale) + zero_point), half to even."""
    return jnp.clip(nearest(divide(x, scale)) + zero_point, grid.qmin, grid.qmax)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def fake_quant(x: Array, scale: Array, zero_point: Array, grid: Integer) -> Array:
    """Return x quantized and dequantized.

    Rounding has the straight-through gradient, so that x has that of clipping alone, and the scale that of Jain et
    al., Trained Quantization Thresholds (arXiv:1903.08066): what rounding adds inside the range, the end outside.

    >>> from jq.arithmetic.formats import INT8
    >>> fake_quant(jnp.array([0.3, -9.0]), 0.25, 0, INT8)
    Array([ 0.25, -9.  ], dtype=float32)
    """
    return rounded((codes(x, scale, zero_point, grid) - zero_point) * scale)


@fake_quant.defjvp
def _trained_threshold(grid: Integer, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """By hand: what autodiff makes of the steps takes twenty times as long."""
    x, scale, zero_point = primals
    dx, dscale, _ = tangents
    ratio = x * (1 / scale)
    code = jnp.round(ratio) + zero_point
    inside = (code >= grid.qmin) & (code <= grid.qmax)
    end = jnp.clip(code, grid.qmin, grid.qmax) - zero_point
    return fake_quant(*primals, grid), jnp.where(inside, dx, 0) + dscale * (end - jnp.where(inside, ratio, 0))


# --- Integers alone ---

WIDEST = 1 << 30  # magnitude up to which int32 arithmetic here is exact
_LIMB = 12  # bits; products of two limbs, and sums of a few, fit int32
_LOW = (1 << _LIMB) - 1


def round_shift(v: Array, shift: ArrayLike, mode: Mode, most: int = WIDEST) -> Array:
    """Return round(v / 2**shift) of int32; a negative shift multiplies, and saturates at `most`.

    >>> [int(round_shift(jnp.int32(-96), 6, mode)) for mode in ("half_up", "half_even", "half_away", "floor")]
    [-1, -2, -2, -2]
    """
    s = np.asarray(shift, np.int32)
    if np.any(s < 0):
        left = np.clip(-s, 0, 30)
        end = (most >> left).astype(np.int32) if isinstance(left, np.ndarray) else most >> left
        low = -most - (most == jnp.iinfo(jnp.int32).max)
        v = jnp.where(v > end, most, jnp.where(v < -end, low, v << left))
        s = np.maximum(s, 0)
    if np.any(s > 31):  # more than int32 knows; all that is left of v is whether it is nothing
        v = jnp.where(s > 31, (v >> 8) | ((v & 255) != 0).astype(jnp.int32), v)
        s = np.minimum(np.where(s > 31, s - 8, s), 31)
    if not np.any(s):
        return v
    if mode == "half_up" and np.all(s > 1):
        return ((v >> (s - 1)) + 1) >> 1
    below = v >> s
    if mode == "floor":
        return below
    # Compared with a half, not added to it: the sum might not fit.
    rest = v & ((1 << s.astype(np.int64)) - 1).astype(np.int32)
    half = np.maximum(1 << s.astype(np.int64) >> 1, 1).astype(np.int32)
    tie: Array = {"half_up": 1, "half_even": below & 1, "half_away": (v >= 0).astype(jnp.int32)}[mode]
    return below + (rest > half - tie).astype(jnp.int32)


def round_divide(v: Array, divisor: int, mode: Mode) -> Array:
    """Return round(v / divisor) of int32, for 0 < divisor <= `WIDEST`.

    >>> [int(round_divide(jnp.int32(-9), 6, mode)) for mode in ("half_up", "half_even", "half_away", "floor")]
    [-1, -2, -2, -2]
    """
    quotient = jnp.floor_divide(v, divisor)
    return _rounded_pair(quotient, 2 * (v - quotient * divisor) - divisor, True, v, mode)


def round_product(
    v: Array, multiplier: ArrayLike, shift: ArrayLike, mode: Mode, zero: int = 0, most: int = WIDEST
) -> Array:
    """Return round(v * multiplier / 2**shift + zero) of int32, exactly; saturates beyond `WIDEST`.

    The multiplier has 24 bits; multiplier and shift may be one per index of the last axis. The product of 54 bits is
    held as high * 2**24 + low. `zero` decides which way a tie is even. Where results beyond `most` are all one to the
    caller, shorter products do for many factors.

    >>> int(round_product(jnp.int32(12345), 13314399, 32, "half_even"))
    38
    """
    m, s = np.asarray(multiplier, np.int32), np.asarray(shift, np.int32)
    if np.any((m < 0) | (m >> 2 * _LIMB > 0) | (s < 0)):
        raise ValueError(f"factor {m} / 2**{s}: expected a multiplier of 0 to 24 bits and a shift of 0 or more")
    upper, lower = m >> _LIMB, m & _LOW
    # Beyond it, the result is, too.
    limit = np.minimum(-(-most * 2.0**s // np.maximum(m, 1)), WIDEST).astype(np.int32)
    if np.all(limit < 1 << 30 - _LIMB) and np.all((s > _LIMB) & (s < 2 * _LIMB + 12)):
        v = jnp.clip(v, -limit, limit)
        return _round_short(v, v * upper, v * lower, s - _LIMB, mode, zero)
    top, bottom = v >> _LIMB, v & _LOW
    middle, base = top * lower, bottom * lower
    carry = (middle & _LOW) + bottom * upper + (base >> _LIMB)
    high = top * upper + (middle >> _LIMB) + (carry >> _LIMB)
    low = ((carry & _LOW) << _LIMB) | (base & _LOW)

    def within() -> Array:
        """The result where the last bit that is kept is a bit of `low`."""
        right = np.minimum(s, 24)
        end = ((WIDEST >> (24 - right)) - 1).astype(np.int32)
        inside = (high >= -end) & (high <= end)
        quotient = (jnp.clip(high, -end, end) << (24 - right)) + jnp.where(inside, low >> right, 0)
        rest, half = jnp.where(inside, low & ((1 << right) - 1), 0), (1 << right) >> 1
        return _rounded_pair(quotient, rest - half, half > 0, v, mode, zero)

    def beyond() -> Array:
        """The result where a half is a bit of `high`, so that `low` only tells a tie from values above it."""
        right = np.clip(s - 24, 1, 31).astype(np.int64)
        rest, half = high & ((1 << right) - 1).astype(np.int32), ((1 << right) >> 1).astype(np.int32)
        return _rounded_pair(high >> right.astype(np.int32), 2 * (rest - half) + (low > 0), True, v, mode, zero)

    near = s <= 24
    if near.all():
        return within()
    return jnp.where(near, within(), beyond()) if near.any() else beyond()


def _round_short(v: Array, upper: Array, lower: Array, shift: np.ndarray, mode: Mode, zero: int) -> Array:
    """round((upper + lower / 2**12) / 2**shift) + zero; the rest of `lower` only tells a tie from values above it."""
    total, half = upper + (lower >> _LIMB), (1 << shift >> 1).astype(np.int32)
    if mode == "floor":
        return (total >> shift) + zero
    if mode == "half_up":
        return ((total + half) >> shift) + zero
    rises = ((total >> shift) + zero) & 1 if mode == "half_even" else (v >= 0).astype(jnp.int32)
    more = ((lower & _LOW) != 0).astype(jnp.int32)
    return ((total + (half - 1) + (rises | more)) >> shift) + zero


def _rounded_pair(quotient: Array, above: Array, fraction: Any, v: Array, mode: Mode, zero: int = 0) -> Array:
    """A rounded quotient: `above` has the sign of its fraction minus a half, if it has a fraction."""
    if mode == "floor":
        return quotient + zero
    tie = {"half_up": jnp.ones((), bool), "half_even": (quotient + zero) & 1 == 1, "half_away": v > 0}[mode]
    rises = fraction & ((above > 0) | ((above == 0) & tie))
    return quotient + rises.astype(jnp.int32) + zero
