"""Searches for a power-of-two scale: the exponents that are compared, the error at each, and the one that wins.

Candidates are listed from the coarsest down. The least squared error wins; ties go to the coarser. Errors are in units
of the candidate's scale, so that no square overflows or vanishes; `least_squares` compares them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic.formats import Integer
from jq.arithmetic.numerics import FINEST, exponent_of

Array = Any  # numpy or jax

MINMSE = (1, 0, -1, -2, -3)  # Quark's five candidates, from the exponent of the range
NEIGHBOURS = (-2, -1, 1, 2)  # compared with an exponent that a plan has
LONGEST = 4096  # elements that are accumulated at a time
# Of which the sizes of many tensors are multiples: images of 224 pixels and their halves, of powers of two, of 640.
# XLA compiles a kernel for each length.
_LENGTHS = (3136, 4096, 3200, 3072)


def base_exponent(low: Array, high: Array, grid: Integer) -> np.ndarray:
    """Return the exponent nearest to the symmetric scale of a range.

    >>> from jq.arithmetic.formats import INT8
    >>> int(base_exponent(-1.0, 3.0, INT8.narrow))  # 6 / 254 lies nearest to 2**-5
    -5
    """
    reach = np.maximum(np.maximum(-np.asarray(low, np.float64), np.asarray(high, np.float64)), 0)
    scale = (2 * reach / (grid.qmax - grid.qmin)).astype(np.float32)
    return exponent_of(np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale))


def descending(coarsest: Array, count: int) -> np.ndarray:
    """Return [..., count] exponents from the coarsest down; those below `FINEST` repeat that one, and so never win."""
    return np.maximum(np.asarray(coarsest)[..., None] - np.arange(count, dtype=np.int32), FINEST)


def minmse_candidates(low: Array, high: Array, grid: Integer) -> np.ndarray:
    """Return the exponents [..., 5] that MinMSE compares for a range.

    >>> from jq.arithmetic.formats import INT8
    >>> minmse_candidates(-1.0, 3.0, INT8.narrow).tolist()
    [-4, -5, -6, -7, -8]
    """
    return descending(base_exponent(low, high, grid) + MINMSE[0], len(MINMSE))


def least_squares(exponents: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return the exponent of least squared error [...] among candidates [..., K]; ties go to the coarser.

    >>> int(least_squares(np.array([-1, -2]), np.array([1.0, 4.0])))  # 1 / 4 and 4 / 16
    -1
    """
    best = np.ldexp(squares, 2 * exponents).argmin(-1)
    return np.take_along_axis(exponents, best[..., None], -1)[..., 0]


def residual(steps: Array, least: Array, most: Array) -> Array:
    """Return values in units of the scale less their codes between two integers, half to even."""
    if isinstance(steps, np.ndarray):
        return steps - np.clip(np.rint(steps), least, most)
    return steps - lax.round(jnp.clip(steps, least, most), lax.RoundingMethod.TO_NEAREST_EVEN)


class ErrorSums(NamedTuple):
    """Sums over a tensor at each candidate [K]."""

    total: Array  # of the residuals
    square: Array  # of their squares

    def merged(self, other: ErrorSums) -> ErrorSums:
        """The sums over both parts of a tensor."""
        return ErrorSums(self.total + other.total, self.square + other.square)

    def reduced(self) -> ErrorSums:
        """The sums over the last axis."""
        return ErrorSums(self.total.sum(-1), self.square.sum(-1))


def error_sums(
    x: Array,
    inverse: Array,
    least: Array,
    most: Array,
    *,
    slopes: Array | None = None,
    behind: tuple[Array, Array] | None = None,
    length: int | None = None,
) -> ErrorSums:
    """Return the sums of x's residuals, if given times slopes, at candidates with these inverse scales [K].

    `behind` is a function's values at x, of which the slopes are, and at both ends of each candidate [2, K]: the residual
    of what is clipped is then that of the function.

    They are accumulated elementwise over pieces of the tensor and reduced last: a reduction of each candidate's errors
    costs ten times as much, as XLA does not vectorize a clip inside one. The slice is of the flat tensor because XLA
    divides indices to slice a reshaped one, and the reshape stands inside the loop because it would be fused with what
    computes the tensor. ErrorSums that the caller does not use cost nothing.
    """
    arrays = [v for v in (x, slopes, None if behind is None else behind[0]) if v is not None]
    length = _piece(x.size) if length is None else length
    inverse, least, most = (jnp.reshape(v, (-1, 1)) for v in (inverse, least, most))
    low, high = (None, None) if behind is None else jnp.reshape(behind[1], (2, -1, 1))

    def terms(piece: Array, *slope: Array) -> ErrorSums:
        errors = residual(piece * inverse, least, most)
        errors = errors * slope[0] if slope else errors
        if behind is not None:
            for end, beyond in ((low, piece * inverse < least), (high, piece * inverse > most)):
                errors = jnp.where(beyond, (slope[1] - end) * inverse, errors)
        return ErrorSums(errors, jnp.square(errors))

    def step(index: Array, state: ErrorSums) -> ErrorSums:
        pieces = (lax.dynamic_slice(v.reshape(-1), (index * length,), (length,)) for v in arrays)
        return state.merged(terms(*pieces))

    zeros, count = jnp.zeros((inverse.size, length)), x.size // length
    # A scan over numbers is one kernel more to compile.
    sums = lax.fori_loop(0, count, step, ErrorSums(zeros, zeros)).reduced()
    rest = [v.reshape(-1)[count * length :] for v in arrays]
    return sums.merged(terms(*rest).reduced()) if rest[0].size else sums


def _piece(size: int) -> int:
    """The length of the pieces that a tensor is cut into: one that leaves no rest, if that can be, and that others have."""
    longest = min(size, LONGEST)
    known = (n for n in _LENGTHS if size % n == 0)
    return next(itertools.chain(known, (n for n in range(longest, LONGEST // 4, -1) if size % n == 0)), longest)
