"""Float32 values rounded to a block format or to a small float.

All of it is integer arithmetic on the bit patterns: a float32 is a significand below 2**24 times a
power of two, and rounding is a shift of the significand. So it is exact also where XLA's devices flush
subnormal operands and results to zero, and nothing depends on how exp2, log2 or a quotient round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic.formats import BFLOAT16, Block, Float, Rounding

Array = Any  # numpy or jax

_BIAS, _FRACTION = 127, 23  # of float32
_ONE = 1 << _FRACTION
_INFINITY = 0xFF << _FRACTION  # greater patterns are NaN
_SIGN = np.int32(-(2**31))

# Whether a magnitude halfway between `low` and `low + 1` becomes the greater.
_TIES: dict[Rounding, Callable[[Array, Array], Array]] = {
    "half_even": lambda low, negative: low % 2 == 1,
    "half_away": lambda low, negative: low >= 0,
    "half_up": lambda low, negative: ~negative,
}


def cast(x: Array, fmt: Float | Block, axis: int) -> Array:
    """Return x rounded to what the format can hold, in float32; blocks lie along `axis`, the last one filled with zeros.

    Zeros keep their sign. A derivative is for the caller to define: as written it is zero.

    >>> from jq.arithmetic.formats import BFP16
    >>> cast(jnp.array([1.0, 0.01, -127.4]), BFP16, axis=0)
    Array([   1.,    0., -127.], dtype=float32)
    """
    bits = lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.int32)
    if isinstance(fmt, Block):
        bits = _to_float(bits, BFLOAT16) if fmt.through_bfloat16 else bits
        bits = _to_blocks(bits, fmt, axis % bits.ndim)
    else:
        bits = _to_float(bits, fmt)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _to_float(bits: Array, fmt: Float) -> Array:
    magnitude, negative = bits & ~_SIGN, bits < 0
    largest = int(np.float32(fmt.largest).view(np.int32))
    rounded = _rounded(magnitude, negative, fmt.emin + _BIAS, fmt.fraction, "half_even")
    rounded = jnp.where(rounded > largest, largest if fmt.saturates else _INFINITY, rounded)
    return jnp.where(magnitude > _INFINITY, bits, rounded | (bits & _SIGN))


def _to_blocks(bits: Array, fmt: Block, axis: int) -> Array:
    """Split `axis` in three: blocks, sub-blocks of a block, elements of a sub-block."""
    length = bits.shape[axis]
    # Blocks longer than the axis, of whatever size a file states, are not filled up: zeros decide nothing.
    sub_size = max(1, min(fmt.sub_size, length))
    size = max(1, min(fmt.size, math.ceil(length / sub_size) * sub_size))
    count = math.ceil(length / size)
    padding = [(0, count * size - length) if i == axis else (0, 0) for i in range(bits.ndim)]
    split = (*bits.shape[:axis], count, size // sub_size, sub_size, *bits.shape[axis + 1 :])
    joined = (*bits.shape[:axis], count * size, *bits.shape[axis + 1 :])
    rounded = _round_blocks(jnp.pad(bits, padding).reshape(split), fmt, axis + 1)
    return lax.slice_in_dim(rounded.reshape(joined), 0, length, axis=axis)


def _round_blocks(bits: Array, fmt: Block, axis: int) -> Array:
    """The same for blocks that lie along `axis` and the one after it."""
    special = (bits & _INFINITY) == _INFINITY
    magnitude, negative, sign = jnp.where(special, 0, bits & ~_SIGN), bits < 0, bits & _SIGN
    magnitude = jnp.where(magnitude < _ONE, 0, magnitude) if fmt.flushes else magnitude
    within = jnp.max(magnitude >> _FRACTION, axis + 1, keepdims=True)
    top = jnp.max(within, axis, keepdims=True)
    top = top - jnp.minimum(top - within, 2**fmt.shift_bits - 1)
    rounded = _round_elements(magnitude, negative, top, fmt)
    if fmt.raises:
        beyond = (rounded >= (top + 1) << _FRACTION) & ~negative  # the lowest code is one further from zero
        top = top + jnp.any(beyond, (axis, axis + 1), keepdims=True)
        rounded = _round_elements(magnitude, negative, top, fmt)
    else:
        bounds = fmt.element.largest, -fmt.element.lowest
        highest, lowest = (_scaled(bound, fmt.element.emax, top) for bound in bounds)
        rounded = jnp.minimum(rounded, jnp.where(negative, lowest, highest))
    if fmt.poisons:
        bits = _INFINITY | _ONE >> 1  # NaN
        special = jnp.any(special, (axis, axis + 1), keepdims=True)
    return jnp.where(special, bits, rounded | sign)


def _round_elements(magnitude: Array, negative: Array, top: Array, fmt: Block) -> Array:
    """Elements of blocks whose biased exponent is `top`, however large."""
    least = top - (fmt.element.emax - fmt.element.emin)
    return _rounded(magnitude, negative, least, fmt.element.fraction, fmt.rounding)


def _scaled(bound: float, emax: int, top: Array) -> Array:
    """The pattern of a bound of elements with the largest exponent `emax`; infinity where it is beyond float32."""
    value = bound / 2.0**emax  # 1 to 2
    # The exponent 0 is that of the subnormals, half of that of the least normal numbers.
    return jnp.where(top > 0, (top << _FRACTION) + round((value - 1) * _ONE), round(value * _ONE) >> 1)


def _rounded(magnitude: Array, negative: Array, least: Array, fraction: int, rounding: Rounding) -> Array:
    """The finite magnitude rounded to `fraction` bits after the leading one, or after that of the exponent `least`.

    Magnitudes are float32 patterns without the sign, and `least` is biased like their exponents. A normal
    magnitude becomes zero or no smaller than the power of two below it, so that every result has a pattern:
    that of infinity where it is beyond float32.
    """
    exponent = jnp.maximum(magnitude >> _FRACTION, 1)  # of the subnormals too
    significand = magnitude - ((exponent - 1) << _FRACTION)  # with the leading one
    leading = (lax.bitcast_convert_type(significand.astype(jnp.float32), jnp.int32) >> _FRACTION) - _BIAS
    # A significand has 24 bits, so that from 25 dropped ones on the result is zero.
    dropped = jnp.clip(jnp.maximum(leading, least - exponent + _FRACTION) - fraction, 0, _FRACTION + 2)
    unit = 1 << dropped
    low, rest = significand >> dropped, significand & (unit - 1)
    tie = (2 * rest == unit) & _TIES[rounding](low, negative)
    rounded = (low + ((2 * rest > unit) | tie)) << dropped
    return jnp.where(rounded > 0, rounded + ((exponent - 1) << _FRACTION), 0)
