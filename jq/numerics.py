"""Power-of-two arithmetic. `exponent` means scale = 2**exponent; the vendor's `position` is its negative."""

from __future__ import annotations

from typing import Any

import jax
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


def fake_quant(x: Array, scale: Array, zero_point: Array, grid: Integer) -> Array:
    """Return what quantizing and dequantizing makes of x; its gradient is that of clipping alone.

    >>> from jq.formats import INT8
    >>> fake_quant(jnp.array([0.3, -9.0]), 0.25, 0, INT8)
    Array([ 0.25, -9.  ], dtype=float32)
    """
    return rounded((codes(x, scale, zero_point, grid) - zero_point) * scale)
