"""Power-of-two arithmetic. `exponent` means scale = 2**exponent; the vendor's `position` is its negative."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from jq.formats import Integer

Array = Any  # numpy or jax

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


def codes(x: Array, scale: Array, zero_point: Array, grid: Integer) -> Array:
    """Return the quantized values as floats: clip(rint(x / scale) + zero_point), half to even."""
    return jnp.clip(lax.round(x / scale, lax.RoundingMethod.TO_NEAREST_EVEN) + zero_point, grid.qmin, grid.qmax)


def fake_quant(x: Array, scale: Array, zero_point: Array, grid: Integer) -> Array:
    """Return what quantizing and dequantizing makes of x.

    >>> from jq.formats import INT8
    >>> fake_quant(jnp.array([0.3, -9.0]), 0.25, 0, INT8)
    Array([ 0.25, -9.  ], dtype=float32)
    """
    return (codes(x, scale, zero_point, grid) - zero_point) * scale
