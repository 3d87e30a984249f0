"""Pools: the mean, the largest value or a norm of each window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic import kernels
from jq.arithmetic.numerics import divide
from jq.errors import ModelError
from jq.ops.convolutions import places_of, wide, windows
from jq.ops.integer.fixed import Fixed, Table
from jq.ops.integer.means import average
from jq.ops.table import Array, Context, IntegerContext, Quant, astype, integer, op


def _pool_windows(
    spatial: Sequence[int], kernel: Sequence[int], *args: Any
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
    """As `windows`, but a window that is larger than the padded image is refused."""
    strides, dilations, pads = windows(spatial, kernel, *args)
    for size, k, d, (lo, hi) in zip(spatial, kernel, dilations, pads, strict=True):
        if size + lo + hi < (k - 1) * d + 1:
            raise ModelError(f"the window {tuple(kernel)} does not fit into {tuple(spatial)} with pads {pads}")
    return strides, dilations, pads


def _argmax(x: Array, places: Sequence[np.ndarray], storage_order: int) -> Array:
    """Where in the flat (N, C, *spatial) tensor each window of x (N, *spatial, C) has its first maximum."""
    n, *spatial, channels = x.shape
    rank = len(spatial)
    source = np.zeros((1,) * (2 * rank), np.int64)
    windows = x
    for i, (size, place) in enumerate(zip(spatial, places, strict=True)):
        inside = (place >= 0) & (place < size)
        # A pad is read as the first pixel of its window: never larger, and so the result is never a pad.
        place = np.where(inside, place, np.take_along_axis(place, np.argmax(inside, axis=1)[:, None], axis=1))
        windows = jnp.take(windows, place, axis=2 * i + 1)
        step = math.prod(spatial[:i] if storage_order else spatial[i + 1 :])
        source = source + step * place.reshape([place.shape[a % 2] if a // 2 == i else 1 for a in range(2 * rank)])
    order = (*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))  # windows first, then the places in the window
    out = [p.shape[0] for p in places]
    windows = jnp.transpose(windows, (0, *(a + 1 for a in order), 2 * rank + 1)).reshape(n, *out, -1, channels)
    sources = jnp.asarray(np.transpose(source, order).reshape(1, *out, -1, 1))
    firsts = jnp.take_along_axis(sources, jnp.argmax(windows, axis=-2, keepdims=True), axis=-2)[..., 0, :]
    images = jnp.arange(n * channels).reshape(n, *(1,) * rank, channels)
    return astype(firsts + images * math.prod(spatial), np.int64)


@op("MaxPool", layout="last", quant=Quant(shares=True, absorbs=True, outputs=1, since=12), moves="by order")
def max_pool(
    x: Array, *, auto_pad: str, ceil_mode: int = 0, dilations: Any, kernel_shape: Any, pads: Any,
    storage_order: int = 0, strides: Any, ctx: Context,
) -> Array | tuple[Array, Array]:  # fmt: skip
    strides, dilations, pads = _pool_windows(x.shape[1:-1], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    y = kernels.max_pool(x, kernel_shape, strides, dilations, pads)
    if not ctx.wants(1):
        return y
    rows = zip(x.shape[1:-1], kernel_shape, strides, dilations, pads, strict=True)
    return y, _argmax(x, [places_of(*row) for row in rows], storage_order)


@op("NhwcMaxPool", domain="com.microsoft")
def nhwc_max_pool(
    x: Array, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Any, kernel_shape: Any, pads: Any,
    strides: Any,
) -> Array:  # fmt: skip
    strides, dilations, pads = _pool_windows(x.shape[1:-1], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return kernels.max_pool(x, kernel_shape, strides, dilations, pads)


@op("MaxUnpool", static=("output_shape",))
def max_unpool(
    x: Array, indices: Array, output_shape: np.ndarray | None = None, *, kernel_shape: Any, pads: Any, strides: Any
) -> Array:
    """Return x scattered to `indices` of the tensor that MaxPool read, zeros elsewhere."""
    strides, _, pads = windows(x.shape[2:], kernel_shape, strides, None, pads)
    rows = zip(x.shape[2:], kernel_shape, strides, pads, strict=True)
    shape = (*x.shape[:2], *((n - 1) * s + k - lo - hi for n, k, s, (lo, hi) in rows))
    y = jnp.zeros(math.prod(shape), x.dtype).at[indices.reshape(-1)].set(x.reshape(-1), mode="drop").reshape(shape)
    if output_shape is None:
        return y
    growth = [(0, int(want) - have, 0) for want, have in zip(output_shape, shape, strict=True)]
    return lax.pad(y, jnp.zeros((), y.dtype), growth)


def _window_sums(x: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Any) -> Array:
    """The sum of each window of x (N, *spatial, C)."""
    if tuple(kernel) == x.shape[1:-1] and not np.any(pads) and max(dilations) == 1:
        return jnp.sum(x, axis=tuple(range(1, x.ndim - 1)), keepdims=True)
    return kernels.sum_pool(x, kernel, strides, dilations, pads)


@op("AveragePool", layout="last", quant=Quant(absorbs=True, absorbs_pads=True))
def average_pool(
    x: Array, *, auto_pad: str, ceil_mode: int = 0, count_include_pad: int = 0, dilations: Any, kernel_shape: Any,
    pads: Any, strides: Any,
) -> Array:  # fmt: skip
    """Return the mean of each window: over its pixels, or with `count_include_pad` over its stated pads too."""
    spatial = x.shape[1:-1]
    _, _, stated = windows(spatial, kernel_shape, strides, dilations, pads, auto_pad)
    strides, dilations, pads = _pool_windows(spatial, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    count = np.ones(1, np.int64)
    for (begin, end), *row in zip(stated, spatial, kernel_shape, strides, dilations, pads, strict=True):
        place, size = places_of(*row), row[0]
        first, last = (-begin, size + end) if count_include_pad else (0, size)
        count = count[..., None] * ((place >= first) & (place < last)).sum(axis=1)
    total = _window_sums(wide(x), kernel_shape, strides, dilations, pads)
    each = count[..., None] if np.any(count != count.flat[0]) else count.flat[0]
    # As runtimes divide: what comes next may be rounded to codes.
    return divide(total, jnp.asarray(each, total.dtype)).astype(x.dtype)


def _power(x: Array, p: float) -> Array:
    x = wide(x)
    return jnp.abs(x) if p == 1 else x * x if p == 2 else jnp.abs(x) ** p


def _root(x: Array, p: float) -> Array:
    return x if p == 1 else jnp.sqrt(x) if p == 2 else x ** (1 / p)


@integer("AveragePool")
def integer_average_pool(
    x: Fixed, *, auto_pad: str, ceil_mode: int = 0, count_include_pad: int = 0, dilations: Any, kernel_shape: Any,
    pads: Any, strides: Any, ctx: IntegerContext,
) -> Fixed | Table:  # fmt: skip
    """The padding is counted, as the chip does and ONNX with `count_include_pad`; where it is not, there is no form."""
    spatial = x.array.shape[1:-1]
    _, _, stated = windows(spatial, kernel_shape, strides, dilations, pads, auto_pad)
    strides, dilations, pads = _pool_windows(spatial, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    if pads != stated or (np.any(pads) and not count_include_pad):
        return NotImplemented
    total = _window_sums(x.integers(), kernel_shape, strides, dilations, pads)
    return average(x, total, kernel_shape, ctx.target)


@op("LpPool", layout="last")
def lp_pool(
    x: Array, *, auto_pad: str, ceil_mode: int = 0, dilations: Any, kernel_shape: Any, p: float, pads: Any, strides: Any
) -> Array:
    strides, dilations, pads = _pool_windows(x.shape[1:-1], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return _root(_window_sums(_power(x, p), kernel_shape, strides, dilations, pads), p).astype(x.dtype)


def _spatial(x: Array) -> tuple[int, ...]:
    return tuple(range(1, x.ndim - 1))


@op("GlobalAveragePool", layout="last", quant=Quant(absorbs=True, absorbs_pads=True))
def global_average_pool(x: Array) -> Array:
    total = jnp.sum(wide(x), axis=_spatial(x), keepdims=True)
    return divide(total, jnp.asarray(math.prod(x.shape[1:-1]), total.dtype)).astype(x.dtype)


@integer("GlobalAveragePool")
def integer_global_average_pool(x: Fixed, *, ctx: IntegerContext) -> Fixed | Table:
    window = x.array.shape[1:-1]
    return average(x, kernels.image_sums(x.array) - x.zero * math.prod(window), window, ctx.target)


@op("GlobalMaxPool", layout="last", moves="by order")
def global_max_pool(x: Array) -> Array:
    return jnp.max(x, axis=_spatial(x), keepdims=True)


@op("GlobalLpPool", layout="last")
def global_lp_pool(x: Array, *, p: float) -> Array:
    return _root(jnp.sum(_power(x, p), axis=_spatial(x), keepdims=True), p).astype(x.dtype)
