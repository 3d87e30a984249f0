"""Convolution, pooling and matrix products."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq import kernels, layout
from jq.errors import ModelError, UnsupportedOp
from jq.integer.fixed import Fixed, Table
from jq.integer.means import average
from jq.integer.products import products
from jq.numerics import divide
from jq.registry import Array, Context, IntegerContext, Linear, Quant, astype, integer, namespace, op

_LINEAR = Quant(absorbs=True, bias="b")
_FARTHEST = 1 << 20  # pixels; beyond it lie damaged attributes, for which XLA's sizes and our tables overflow


def windows(
    spatial: Sequence[int], kernel: Sequence[int], strides: Sequence[int] | None, dilations: Sequence[int] | None,
    pads: Sequence[int] | None, auto_pad: str = "NOTSET", ceil_mode: int = 0,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:  # fmt: skip
    """Strides, dilations and explicit (begin, end) pads of a convolution or pool, defaults filled in.

    With `ceil_mode` the end pads are those that the last window needs.
    """
    rank = len(kernel)
    if not rank:
        raise ModelError("a convolution or pool needs at least one spatial dim, as in (N, C, length)")
    strides = tuple(strides or (1,) * rank)
    dilations = tuple(dilations or (1,) * rank)
    if min(*strides, *dilations) < 1:
        raise ModelError(f"strides {strides} and dilations {dilations} must be positive")
    if max(*strides, *dilations, *map(abs, pads or ())) > _FARTHEST:
        raise ModelError(f"strides {strides}, dilations {dilations} or pads {pads} are larger than any image")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        found = []
        for size, k, s, d in zip(spatial, kernel, strides, dilations, strict=True):
            total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            small, large = total // 2, total - total // 2
            found.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
        return strides, dilations, tuple(found)
    if auto_pad == "VALID" or not pads:
        pads = (0,) * (2 * rank)
    found = list(zip(pads[:rank], pads[rank:], strict=True))
    if ceil_mode:
        for i, (size, k, s, d, (lo, hi)) in enumerate(zip(spatial, kernel, strides, dilations, found, strict=True)):
            reach = (k - 1) * d + 1
            count = -(-(size + lo + hi - reach) // s) + 1
            count -= (count - 1) * s >= size + lo  # the last window must start inside the image or its begin pad
            found[i] = (lo, (count - 1) * s + reach - size - lo)
    return strides, dilations, tuple(found)


def _conv_of_means(w: np.ndarray, means: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    """Where zeros pad an image, its border has less of it."""
    groups = attrs.get("group", 1)
    by_group = w.reshape(groups, -1, w.shape[1], math.prod(w.shape[2:])).sum(-1)
    return np.einsum("goi,gi->go", by_group, means.reshape(groups, -1)).reshape(-1)


def _conv_rows(x: Array, w: Array, attrs: Mapping[str, Any], places: np.ndarray | None) -> Array:
    """By one gather of padded images: a slice for each tap would copy them as often."""
    groups, names = attrs.get("group", 1), ("strides", "dilations", "pads", "auto_pad")
    given = {k: attrs[k] for k in names if k in attrs}
    strides, dilations, pads = windows(
        x.shape[2:], w.shape[2:], **{"strides": None, "dilations": None, "pads": None, **given}
    )
    images = lax.pad(jnp.moveaxis(x, 1, -1), jnp.zeros((), x.dtype), [(0, 0, 0), *((*p, 0) for p in pads), (0, 0, 0)])
    size = images.shape[1:-1]
    counts = [
        (s - (k - 1) * d - 1) // st + 1 for s, k, d, st in zip(size, w.shape[2:], dilations, strides, strict=True)
    ]
    start, tap = (
        np.ravel_multi_index(np.indices(dims).reshape(len(dims), -1) * np.reshape(steps, (-1, 1)), size)
        for dims, steps in ((counts, strides), (w.shape[2:], dilations))
    )
    pixels = (start if places is None else start[places])[:, None] + tap
    rows = images.reshape(len(images), -1, groups, images.shape[-1] // groups)[:, pixels]
    return jnp.moveaxis(rows, 3, -1).reshape(-1, rows.shape[2] * rows.shape[4], groups)


def _at_places(images: Array, places: np.ndarray | None) -> Array:
    """The pixels of (N, *spatial, C) as (positions, C): all, or those of each image at some places."""
    pixels = images.reshape(images.shape[0], -1, images.shape[-1])
    return (pixels if places is None else pixels[:, places]).reshape(-1, images.shape[-1])


def _conv_columns(w: Array, attrs: Mapping[str, Any]) -> Array:
    groups, rank = attrs.get("group", 1), w.ndim
    columns = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    return columns.transpose(0, *range(3, rank + 1), 2, 1).reshape(groups, -1, w.shape[0] // groups)


def _conv_weights(columns: Array, shape: Sequence[int], attrs: Mapping[str, Any]) -> Array:
    rank = len(shape)
    apart = columns.reshape(columns.shape[0], *shape[2:], shape[1], columns.shape[-1])
    return apart.transpose(0, rank, rank - 1, *range(1, rank - 1)).reshape(shape)


_CONV_PRODUCTS = Linear("w", _conv_rows, _conv_columns, _conv_weights)


@op(
    "Conv",
    weight="w",
    layout="last",
    channels=lambda attrs: ("w", 0),
    quant=dataclasses.replace(_LINEAR, of_means=_conv_of_means, linear=_CONV_PRODUCTS),
)
def conv(
    x: Array, w: Array, b: Array | None = None, *, auto_pad: str, dilations: Any, group: int, kernel_shape: Any,
    pads: Any, strides: Any, ctx: Context,
) -> Array:  # fmt: skip
    strides, dilations, pads = windows(x.shape[1:-1], w.shape[2:], strides, dilations, pads, auto_pad)
    w, dtype = layout.ordered(w, layout.weight_order(len(w.shape))), x.dtype
    if ctx.lowering == "cpu":  # where half precision would also be summed in half
        x, w = _wide(x), _wide(w)
    y = kernels.conv(x, w, strides=strides, dilations=dilations, pads=pads, group=group, lowering=ctx.lowering)
    return (y if b is None else y + b).astype(dtype)


@integer("Conv")
def integer_conv(
    x: Fixed, w: Fixed, b: Fixed | None = None, *, auto_pad: str, dilations: Any, group: int, kernel_shape: Any,
    pads: Any, strides: Any, ctx: IntegerContext,
) -> Fixed:  # fmt: skip
    strides, dilations, pads = windows(x.array.shape[1:-1], w.array.shape[2:], strides, dilations, pads, auto_pad)

    def multiply(image: Array, weight: Array, zero: int) -> Array:
        image, border = _bordered(image, pads, zero)
        window = {"strides": strides, "dilations": dilations, "pads": border, "group": group}
        return kernels.conv(image, weight, lowering=ctx.lowering, dtype=_sum_type(image), **window)

    kernel = layout.ordered(w.array, layout.weight_order(len(w.array.shape)))
    ones = (*kernel.shape[:-1], group)
    return products(x, w, b, multiply, kernel, ones, ctx.target, channel=0, summed=range(kernel.ndim - 1), groups=group)


def _bordered(image: Array, pads: Any, zero: int) -> tuple[Array, Any]:
    """An image of integers, padded if its padding is not with zeros, and the pads that are left."""
    if not zero or not np.any(pads):
        return image, pads
    image = lax.pad(image, jnp.asarray(zero, image.dtype), [(0, 0, 0), *((lo, hi, 0) for lo, hi in pads), (0, 0, 0)])
    return image, ((0, 0),) * len(pads)


def _sum_type(image: Array) -> Any:
    return jnp.int32 if jnp.issubdtype(image.dtype, jnp.integer) else image.dtype


def _wide(x: Array) -> Array:
    """Half precision as single, for sums; anything else as it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


# Of com.microsoft's fused operators, with their parameters in ONNX's order.
_ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "Relu": lambda x: jnp.maximum(x, 0),
    "LeakyRelu": lambda x, alpha=0.01: jnp.where(x < 0, x * alpha, x),
    "Tanh": jnp.tanh,
    "Sigmoid": jax.nn.sigmoid,
    "Clip": jnp.clip,
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: jnp.clip(alpha * x + beta, 0, 1),
    "Elu": lambda x, alpha=1.0: jax.nn.elu(x, alpha),
    "Softplus": jax.nn.softplus,
    "": lambda x: x,
}


def _activation(name: str | None, y: Array, parameters: Sequence[float] = ()) -> Array:
    if (name or "") not in _ACTIVATIONS:
        raise UnsupportedOp(f"activation {name!r}; known: {', '.join(filter(None, _ACTIVATIONS))}")
    return _ACTIVATIONS[name or ""](y, *parameters).astype(y.dtype)


@op("FusedConv", domain="com.microsoft", weight="w", layout="last")
def fused_conv(
    x: Array, w: Array, b: Array | None = None, z: Array | None = None, *, auto_pad: str = "NOTSET", dilations: Any,
    group: int = 1, kernel_shape: Any, pads: Any, strides: Any, activation: str = "",
    activation_params: Sequence[float] = (), ctx: Context,
) -> Array:  # fmt: skip
    """Return the activation of Conv(x, w, b) + z."""
    window = {"auto_pad": auto_pad, "dilations": dilations, "kernel_shape": None, "pads": pads, "strides": strides}
    y = conv(x, w, b, group=group, ctx=ctx, **window)
    return _activation(activation, y if z is None else y + jnp.moveaxis(z, 1, -1), activation_params or ())


@op("CausalConvWithState", since=27)
def causal_conv_with_state(
    x: Array, w: Array, b: Array | None = None, past: Array | None = None, *, activation: str = "none", ctx: Context
) -> tuple[Array, Array]:
    reach = w.shape[-1] - 1
    past = jnp.zeros((*x.shape[:2], reach), x.dtype) if past is None else past
    x = jnp.concatenate([past, x], axis=2)
    options = {"strides": (1,), "dilations": (1,), "pads": ((0, 0),), "group": x.shape[1], "lowering": ctx.lowering}
    y = jnp.moveaxis(kernels.conv(_wide(jnp.moveaxis(x, 1, -1)), _wide(jnp.transpose(w, (2, 1, 0))), **options), -1, 1)
    y = y if b is None else y + b[:, None]
    return (jax.nn.silu(y) if activation in ("silu", "swish") else y).astype(x.dtype), x[:, :, x.shape[2] - reach :]


def _transposed_pads(
    spatial: Sequence[int], reach: Sequence[int], strides: Sequence[int], pads: Sequence[tuple[int, int]],
    output_padding: Sequence[int], output_shape: Sequence[int] | None, auto_pad: str,
) -> list[tuple[int, int]]:  # fmt: skip
    """What to cut, per spatial dim, from the (begin, end) of the full transposed convolution."""
    if output_shape is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        output_shape = [n * s for n, s in zip(spatial, strides, strict=True)]
    if output_shape is None:
        return [(lo, hi - extra) for (lo, hi), extra in zip(pads, output_padding, strict=True)]
    sizes = output_shape[-len(spatial) :]
    cuts = []
    for n, r, s, extra, size in zip(spatial, reach, strides, output_padding, sizes, strict=True):
        total = (n - 1) * s + r - size
        shared = max(total + extra, 0)
        lo = shared // 2 if auto_pad == "SAME_UPPER" else shared - shared // 2
        cuts.append((lo, total - lo))
    return cuts


def _transposed_windows(
    spatial: Sequence[int], kernel: Sequence[int], strides: Any, dilations: Any, pads: Any, output_padding: Any,
    output_shape: Any, auto_pad: str,
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]:  # fmt: skip
    """Strides, dilations and what to cut of a transposed convolution, defaults filled in."""
    explicit = None if auto_pad == "VALID" else pads
    strides, dilations, pads = windows(spatial, kernel, strides, dilations, explicit)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    extra = output_padding or (0,) * len(kernel)
    return strides, dilations, _transposed_pads(spatial, reach, strides, pads, extra, output_shape, auto_pad)


@op("ConvTranspose", layout="last", channels=lambda attrs: ("w", 1), quant=_LINEAR)
def conv_transpose(
    x: Array, w: Array, b: Array | None = None, *, auto_pad: str, dilations: Any, group: int, kernel_shape: Any,
    output_padding: Any, output_shape: Any, pads: Any, strides: Any, ctx: Context,
) -> Array:  # fmt: skip
    window = (strides, dilations, pads, output_padding, output_shape, auto_pad)
    strides, dilations, cuts = _transposed_windows(x.shape[1:-1], w.shape[2:], *window)
    w, dtype = _transposed_weight(w, group), x.dtype
    if ctx.lowering == "cpu":
        x, w = _wide(x), _wide(w)
    options = {"strides": strides, "dilations": dilations, "crops": cuts, "group": group, "lowering": ctx.lowering}
    y = kernels.conv_transpose(x, w, **options)
    return (y if b is None else y + b).astype(dtype)


def _transposed_weight(w: Array, group: int) -> Array:
    """From ONNX's (C, O / group, *kernel) to (*kernel, C / group, O)."""
    kernel = w.shape[2:]
    w = w.reshape(group, w.shape[0] // group, w.shape[1], *kernel)
    return jnp.moveaxis(w, (1, 0, 2), (-3, -2, -1)).reshape(*kernel, w.shape[1], -1)


@integer("ConvTranspose")
def integer_conv_transpose(
    x: Fixed, w: Fixed, b: Fixed | None = None, *, auto_pad: str, dilations: Any, group: int, kernel_shape: Any,
    output_padding: Any, output_shape: Any, pads: Any, strides: Any, ctx: IntegerContext,
) -> Fixed:  # fmt: skip
    if x.zero or w.zero:  # what the crops extend, and the ends that few taps reach, would need their own sums
        return NotImplemented
    window = (strides, dilations, pads, output_padding, output_shape, auto_pad)
    strides, dilations, cuts = _transposed_windows(x.array.shape[1:-1], w.array.shape[2:], *window)

    def multiply(image: Array, weight: Array, zero: int) -> Array:
        window = {"strides": strides, "dilations": dilations, "crops": cuts, "group": group}
        return kernels.conv_transpose(image, weight, lowering=ctx.lowering, dtype=_sum_type(image), **window)

    weight = _transposed_weight(w.array, group)
    ones, summed = (*weight.shape[:-1], group), range(weight.ndim - 1)
    return products(
        x, w, b, multiply, weight, ones, ctx.target, channel=1, summed=summed, groups=group, transposed=True
    )


@op("DeformConv", layout="last")
def deform_conv(
    x: Array, w: Array, offset: Array, b: Array | None = None, mask: Array | None = None, *, dilations: Any, group: int,
    kernel_shape: Any, offset_group: int, pads: Any, strides: Any,
) -> Array:  # fmt: skip
    """Return a convolution that reads x between its pixels, zero outside (https://arxiv.org/abs/1811.11168)."""
    (n, *spatial, channels), (outputs, depth, *kernel) = x.shape, w.shape
    strides, dilations, pads = windows(spatial, kernel, strides, dilations, pads)
    out, rank, taps = offset.shape[2:], len(kernel), math.prod(kernel)
    offset = offset.reshape(n, offset_group, taps, rank, *out)
    places = []  # per spatial dim, where each tap of each window reads: (n, offset_group, taps, *out)
    for i, row in enumerate(zip(spatial, kernel, strides, dilations, pads, strict=True)):
        grid = _places(*row).T
        if grid.shape[1] != out[i]:
            raise ModelError(f"offset is for {out[i]} windows in spatial dim {i}, but there are {grid.shape[1]}")
        grid = grid.reshape([kernel[i] if a == i else out[i] if a == rank + i else 1 for a in range(2 * rank)])
        grid = np.broadcast_to(grid, [*kernel, *grid.shape[rank:]]).reshape(taps, *grid.shape[rank:])
        places.append(offset[:, :, :, i] + jnp.asarray(grid, offset.dtype))
    pixels = jnp.moveaxis(x.reshape(n, math.prod(spatial), offset_group, channels // offset_group), 2, 1)
    read = jax.vmap(jax.vmap(lambda pixels, index: pixels[index]))
    total: Array = 0
    for corner in itertools.product((0, 1), repeat=rank):
        index, weight = 0, jnp.ones((), x.dtype)
        for place, size, up in zip(places, spatial, corner, strict=True):
            low = jnp.floor(place)
            at, part = low + up, place - low
            weight = weight * jnp.where((at >= 0) & (at < size), part if up else 1 - part, 0)
            index = index * size + jnp.clip(at, 0, size - 1).astype(jnp.int32)
        total = total + read(pixels, index) * weight[..., None].astype(x.dtype)
    if mask is not None:
        total = total * mask.reshape(n, offset_group, taps, *out, 1)
    # (n, offset_group, taps, *out, C / offset_group) -> (n, taps, out, group, C / group)
    total = jnp.moveaxis(total, 1, -2).reshape(n, taps, math.prod(out), group, depth)
    w = w.reshape(group, outputs // group, depth, taps)
    y = jnp.einsum("ntpgc,goct->npgo", total, w).reshape(n, *out, outputs)
    return y if b is None else y + b


def _places(size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int]) -> np.ndarray:
    """The positions that each window of one spatial dim reads: (windows, kernel), outside of [0, size) on pads."""
    count = (size + sum(pads) - (kernel - 1) * dilation - 1) // stride + 1
    return np.arange(count)[:, None] * stride - pads[0] + np.arange(kernel) * dilation


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
    found = jnp.take_along_axis(sources, jnp.argmax(windows, axis=-2, keepdims=True), axis=-2)[..., 0, :]
    images = jnp.arange(n * channels).reshape(n, *(1,) * rank, channels)
    return astype(found + images * math.prod(spatial), np.int64)


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
    return y, _argmax(x, [_places(*row) for row in rows], storage_order)


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
        place, size = _places(*row), row[0]
        first, last = (-begin, size + end) if count_include_pad else (0, size)
        count = count[..., None] * ((place >= first) & (place < last)).sum(axis=1)
    total = _window_sums(_wide(x), kernel_shape, strides, dilations, pads)
    each = count[..., None] if np.any(count != count.flat[0]) else count.flat[0]
    # As runtimes divide: what comes next may be rounded to codes.
    return divide(total, jnp.asarray(each, total.dtype)).astype(x.dtype)


def _power(x: Array, p: float) -> Array:
    x = _wide(x)
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
    total = jnp.sum(_wide(x), axis=_spatial(x), keepdims=True)
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


def _gemm_summed(attrs: Mapping[str, Any], index: int) -> int:
    if index > 1:
        return -1
    return int(bool(attrs.get("transB" if index else "transA", 0)) == bool(index))


def _gemm_of_means(b: np.ndarray, means: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    return attrs.get("alpha", 1.0) * ((b if attrs.get("transB", 0) else b.T) @ means)


def _gemm_rows(a: Array, b: Array, attrs: Mapping[str, Any], places: np.ndarray | None) -> Array:
    return attrs.get("alpha", 1.0) * (a.T if attrs.get("transA", 0) else a)[..., None]


def _gemm_columns(b: Array, attrs: Mapping[str, Any]) -> Array:
    return (b.T if attrs.get("transB", 0) else b)[None]


def _gemm_weights(columns: Array, shape: Sequence[int], attrs: Mapping[str, Any]) -> Array:
    return columns[0].T if attrs.get("transB", 0) else columns[0]


def _matmul_rows(a: Array, b: Array, attrs: Mapping[str, Any], places: np.ndarray | None) -> Array:
    return _at_places(a, places if a.ndim > 2 else None)[..., None]


_GEMM_PRODUCTS = Linear(
    "b",
    _gemm_rows,
    _gemm_columns,
    _gemm_weights,
    when=lambda attrs, rank: not attrs.get("transA", 0),
)
_MATMUL_PRODUCTS = Linear(
    "b",
    _matmul_rows,
    columns=lambda b, attrs: b[None],
    weights=lambda columns, shape, attrs: columns[0],
    when=lambda attrs, rank: rank == 2,
)


@op(
    "Gemm",
    channels=lambda attrs: ("b", 0 if attrs.get("transB") else 1),
    quant=Quant(absorbs=True, bias="c", summed=_gemm_summed, of_means=_gemm_of_means, linear=_GEMM_PRODUCTS),
)
def gemm(a: Array, b: Array, c: Array | None = None, *, alpha: float, beta: float, transA: int, transB: int) -> Array:
    y = (a.T if transA else a) @ layout.ordered(b, (1, 0) if transB else (0, 1))
    y = y if alpha == 1 else y * jnp.asarray(alpha, y.dtype)
    if c is None or beta == 0:
        return y
    return y + (c if beta == 1 else c * jnp.asarray(beta, c.dtype))


@integer("Gemm")
def integer_gemm(
    a: Fixed,
    b: Fixed,
    c: Fixed | None = None,
    *,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
    ctx: IntegerContext,
) -> Fixed:
    if alpha != 1 or (c is not None and beta != 1):
        return NotImplemented
    a = a.replace(array=a.array.T) if transA else a
    weight = layout.ordered(b.array, (1, 0) if transB else (0, 1))
    channel = 0 if transB else 1
    return products(a, b, c, _dot, weight, (weight.shape[0], 1), ctx.target, channel=channel, summed=(0,))


def _dot(a: Array, b: Array, zero: int) -> Array:
    return jnp.matmul(a, b, preferred_element_type=_sum_type(a))


@op("FusedGemm", domain="com.microsoft")
def fused_gemm(
    a: Array, b: Array, c: Array | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0, activation: str = "", activation_alpha: float | None = None, activation_beta: float | None = None,
) -> Array:  # fmt: skip
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _activation(activation, y, [p for p in (activation_alpha, activation_beta) if p is not None])


_PRODUCT = Quant(absorbs=True, summed=lambda attrs, index: -1 if index == 0 else -2, linear=_MATMUL_PRODUCTS)


@op("MatMul", host=True, channels=lambda attrs: ("b", -1), quant=_PRODUCT)
def matmul(a: Array, b: Array) -> Array:
    return namespace(a, b).matmul(a, b)


@integer("MatMul")
def integer_matmul(a: Fixed, b: Fixed, *, ctx: IntegerContext) -> Fixed:
    if min(a.array.ndim, b.array.ndim) < 2:
        return NotImplemented
    return products(a, b, None, _dot, b.array, (b.array.shape[-2], 1), ctx.target, channel=-1, summed=(-2,))


@op("FusedMatMul", domain="com.microsoft")
@op("TransposeMatMul", domain="com.microsoft")
def fused_matmul(
    a: Array, b: Array, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:  # fmt: skip
    """Return alpha * a @ b; `transBatch` moves the first axis of an operand behind its batch axes."""
    a, b = (jnp.moveaxis(x, 0, -2) if batch else x for x, batch in ((a, transBatchA), (b, transBatchB)))
    a, b = (jnp.swapaxes(x, -1, -2) if trans and x.ndim > 1 else x for x, trans in ((a, transA), (b, transB)))
    y = a @ b
    return y if alpha == 1 else y * jnp.asarray(alpha, y.dtype)


@op("Det")
def det(x: Array) -> Array:
    return jnp.linalg.det(_wide(x)).astype(x.dtype)
