"""Reductions and running sums over axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic.numerics import WIDEST
from jq.ops.integer.fixed import Fixed, Table
from jq.ops.integer.means import mean
from jq.ops.table import Array, IntegerContext, Moves, astype, integer, namespace, op


def _axes(axes: Any, noop_with_empty_axes: int) -> tuple[int, ...] | None:
    """The axes; absent and empty both mean all axes, or none if the node says so."""
    if axes is None or np.size(axes) == 0:
        return () if noop_with_empty_axes else None
    return tuple(int(a) for a in np.ravel(axes))


def _wide(x: Array) -> Array:
    """Halves as float32, so that their squares and sums do not overflow."""
    return x.astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x


def _extreme(name: str, sign: int) -> Callable[..., Array]:
    def reduced(xp: Any, x: Array, **kw: Any) -> Array:
        return getattr(xp, name)(x, **kw if x.size else {**kw, "initial": _identity(x.dtype, sign)})

    return reduced


def _identity(dtype: Any, sign: int) -> Any:
    """The identity of the maximum (-1) or minimum (1) of a type."""
    if dtype == np.bool_:
        return sign > 0
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if sign < 0 else jnp.iinfo(dtype).max
    return sign * np.inf


def _sum(xp: Any, x: Array, **kw: Any) -> Array:
    return xp.sum(x, dtype=x.dtype, **kw)  # numpy would widen small integers


_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "ReduceMax": _extreme("max", -1),
    "ReduceMin": _extreme("min", 1),
    "ReduceSum": _sum,
    "ReduceMean": lambda xp, x, **kw: xp.mean(_wide(x), **kw),
    "ReduceProd": lambda xp, x, **kw: xp.prod(x, dtype=x.dtype, **kw),
    "ReduceL1": lambda xp, x, **kw: _sum(xp, xp.abs(_wide(x)), **kw),
    "ReduceL2": lambda xp, x, **kw: xp.sqrt(_sum(xp, xp.square(_wide(x)), **kw)),
    "ReduceLogSum": lambda xp, x, **kw: xp.log(_sum(xp, _wide(x), **kw)),
    "ReduceSumSquare": lambda xp, x, **kw: _sum(xp, xp.square(_wide(x)), **kw),
}


def _reduction(name: str, function: Callable[..., Array]) -> None:
    moves: Moves = "by order" if name in ("ReduceMax", "ReduceMin") else None

    @op(name, static=("axes",), host=True, layout=("axes",), moves=moves)
    def rule(data: Array, axes: Array | None = None, *, keepdims: int, noop_with_empty_axes: int = 0) -> Array:
        reduced = function(namespace(data), data, axis=_axes(axes, noop_with_empty_axes), keepdims=bool(keepdims))
        return astype(reduced, data.dtype)


for _name, _function in _REDUCTIONS.items():
    _reduction(_name, _function)


@integer("ReduceMean", static=("axes",))
def integer_mean(
    data: Fixed, axes: Array | None = None, *, keepdims: int, noop_with_empty_axes: int = 0, ctx: IntegerContext
) -> Fixed | Table:
    total, sizes = _integer_sum(data, axes, keepdims, noop_with_empty_axes)
    return mean(data, total, sizes, ctx.target)


@integer("ReduceSum", static=("axes",))
def integer_sum(
    data: Fixed, axes: Array | None = None, *, keepdims: int, noop_with_empty_axes: int = 0, ctx: IntegerContext
) -> Fixed:
    total, sizes = _integer_sum(data, axes, keepdims, noop_with_empty_axes)
    bound = data.bound * math.prod(sizes)
    if not data.is_codes or bound >= WIDEST or (data.floating and ctx.target.requantize == "float32"):
        return NotImplemented
    return Fixed(total, data.scale, bound, floating=data.floating)


def _integer_sum(data: Fixed, axes: Any, keepdims: int, noop_with_empty_axes: int) -> tuple[Array, list[int]]:
    """The sum of the integers without their zero point, and the sizes of the axes that are summed over."""
    places = _axes(axes, noop_with_empty_axes)
    sizes = [data.array.shape[a] for a in (range(data.array.ndim) if places is None else places)]
    total = jnp.sum(data.array, places, dtype=jnp.int32, keepdims=bool(keepdims))
    return total - data.zero * math.prod(sizes), sizes


@op("ReduceLogSumExp", static=("axes",), layout=("axes",))
def reduce_log_sum_exp(
    data: Array, axes: Array | None = None, *, keepdims: int, noop_with_empty_axes: int = 0
) -> Array:
    axis = _axes(axes, noop_with_empty_axes)
    wide = data if jnp.issubdtype(data.dtype, jnp.floating) else data.astype(np.float32)
    return jax.nn.logsumexp(_wide(wide), axis=axis, keepdims=bool(keepdims)).astype(data.dtype)


def _arg(name: str) -> None:
    @op(name, host=True, layout=("axis",))
    def rule(data: Array, *, axis: int, keepdims: int, select_last_index: int = 0) -> Array:
        xp = namespace(data)
        searched = xp.flip(data, axis) if select_last_index else data
        index = getattr(xp, name.lower())(searched, axis=axis, keepdims=bool(keepdims))
        return astype(data.shape[axis] - 1 - index if select_last_index else index, np.int64)


_arg("ArgMax")
_arg("ArgMin")


def _running(name: str, unit: int) -> None:
    """Register a sum or product over all elements up to each one; `exclusive` leaves that one out."""

    @op(name, static=("axis",), host=True, layout=("axis",))
    def rule(x: Array, axis: Array, *, exclusive: int, reverse: int) -> Array:
        xp, index = namespace(x), int(np.ravel(axis)[0])
        x = xp.flip(x, index) if reverse else x
        if exclusive:
            first = xp.full_like(xp.take(x, np.arange(min(1, x.shape[index])), axis=index), unit)
            x = xp.concatenate([first, xp.take(x, np.arange(x.shape[index] - 1), axis=index)], axis=index)
        y = getattr(xp, name.lower())(x, axis=index, dtype=x.dtype)
        return xp.flip(y, index) if reverse else y


_running("CumSum", 0)
_running("CumProd", 1)
