"""Convolutions, and the windows that pools share with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic import kernels, layout
from jq.errors import ModelError, UnsupportedOp
from jq.ops.integer.fixed import Fixed
from jq.ops.integer.products import products
from jq.ops.table import Array, Context, IntegerContext, Linear, Product, Quant, integer, op

_ACCUMULATES = Quant(absorbs=True, bias="b")
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
        ends = []
        for size, k, s, d in zip(spatial, kernel, strides, dilations, strict=True):
            total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            small, large = total // 2, total - total // 2
            ends.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
        return strides, dilations, tuple(ends)
    if auto_pad == "VALID" or not pads:
        pads = (0,) * (2 * rank)
    ends = list(zip(pads[:rank], pads[rank:], strict=True))
    if ceil_mode:
        for i, (size, k, s, d, (lo, hi)) in enumerate(zip(spatial, kernel, strides, dilations, ends, strict=True)):
            reach = (k - 1) * d + 1
            count = -(-(size + lo + hi - reach) // s) + 1
            count -= (count - 1) * s >= size + lo  # the last window must start inside the image or its begin pad
            ends[i] = (lo, (count - 1) * s + reach - size - lo)
    return strides, dilations, tuple(ends)


def _conv_rows(x: Array, w: Array, attrs: Mapping[str, Any], places: np.ndarray | None) -> Array:
    """By one gather of padded images: a slice for each tap would copy them as often."""
    strides, dilations, pads = (attrs.get(name) for name in ("strides", "dilations", "pads"))
    groups, auto_pad = attrs.get("group", 1), attrs.get("auto_pad", "NOTSET")
    strides, dilations, pads = windows(x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad)
    images = lax.pad(layout.channels_last(x), jnp.zeros((), x.dtype), [(0, 0, 0), *((*p, 0) for p in pads), (0, 0, 0)])
    size = images.shape[1:-1]
    each = zip(size, w.shape[2:], dilations, strides, strict=True)
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, d, s in each]
    start, tap = (
        np.ravel_multi_index(np.indices(dims).reshape(len(dims), -1) * np.reshape(steps, (-1, 1)), size)
        for dims, steps in ((counts, strides), (w.shape[2:], dilations))
    )
    pixels = (start if places is None else start[places])[:, None] + tap
    rows = images.reshape(len(images), -1, groups, images.shape[-1] // groups)[:, pixels]
    return jnp.moveaxis(rows, 3, -1).reshape(-1, rows.shape[2] * rows.shape[4], groups)


def at_places(images: Array, places: np.ndarray | None) -> Array:
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


_CONV = Linear("w", lambda attrs: 0, Product(_conv_rows, _conv_columns, _conv_weights))


@op("Conv", weight="w", layout="last", linear=_CONV, quant=_ACCUMULATES)
def conv(
    x: Array, w: Array, b: Array | None = None, *, auto_pad: str, dilations: Any, group: int, kernel_shape: Any,
    pads: Any, strides: Any, ctx: Context,
) -> Array:  # fmt: skip
    strides, dilations, pads = windows(x.shape[1:-1], w.shape[2:], strides, dilations, pads, auto_pad)
    w, dtype = layout.ordered(w, layout.weight_order(len(w.shape))), x.dtype
    if ctx.lowering == "cpu":  # where half precision would also be summed in half
        x, w = wide(x), wide(w)
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
        return kernels.conv(image, weight, lowering=ctx.lowering, dtype=sum_type(image), **window)

    kernel = layout.ordered(w.array, layout.weight_order(len(w.array.shape)))
    ones = (*kernel.shape[:-1], group)
    return products(x, w, b, multiply, kernel, ones, ctx.target, channel=0, summed=range(kernel.ndim - 1), groups=group)


def _bordered(image: Array, pads: Any, zero: int) -> tuple[Array, Any]:
    """An image of integers, padded if its padding is not with zeros, and the pads that are left."""
    if not zero or not np.any(pads):
        return image, pads
    image = lax.pad(image, jnp.asarray(zero, image.dtype), [(0, 0, 0), *((lo, hi, 0) for lo, hi in pads), (0, 0, 0)])
    return image, ((0, 0),) * len(pads)


def sum_type(image: Array) -> Any:
    return jnp.int32 if jnp.issubdtype(image.dtype, jnp.integer) else image.dtype


def wide(x: Array) -> Array:
    """Half precision as single, for sums; other types unchanged."""
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


def activate(name: str | None, y: Array, parameters: Sequence[float] = ()) -> Array:
    if (name or "") not in _ACTIVATIONS:
        raise UnsupportedOp(
            f"activation {name!r} is not supported; expected one of {', '.join(filter(None, _ACTIVATIONS))}"
        )
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
    return activate(activation, y if z is None else y + layout.channels_last(z), activation_params or ())


@op("CausalConvWithState", since=27)
def causal_conv_with_state(
    x: Array, w: Array, b: Array | None = None, past: Array | None = None, *, activation: str = "none", ctx: Context
) -> tuple[Array, Array]:
    reach = w.shape[-1] - 1
    past = jnp.zeros((*x.shape[:2], reach), x.dtype) if past is None else past
    x = jnp.concatenate([past, x], axis=2)
    options = {"strides": (1,), "dilations": (1,), "pads": ((0, 0),), "group": x.shape[1], "lowering": ctx.lowering}
    w = layout.ordered(w, layout.weight_order(3))
    y = layout.channels_first(kernels.conv(wide(layout.channels_last(x)), wide(w), **options))
    y = y if b is None else y + b[:, None]
    return (jax.nn.silu(y) if activation in ("silu", "swish") else y).astype(x.dtype), x[:, :, x.shape[2] - reach :]


def _transposed_pads(
    spatial: Sequence[int], reach: Sequence[int], strides: Sequence[int], pads: Sequence[tuple[int, int]],
    output_padding: Sequence[int], output_shape: Sequence[int] | None, auto_pad: str,
) -> list[tuple[int, int]]:  # fmt: skip
    """The pixels to cut, per spatial dim, from the (begin, end) of the full transposed convolution."""
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


@op("ConvTranspose", layout="last", linear=Linear("w", lambda attrs: 1), quant=_ACCUMULATES)
def conv_transpose(
    x: Array, w: Array, b: Array | None = None, *, auto_pad: str, dilations: Any, group: int, kernel_shape: Any,
    output_padding: Any, output_shape: Any, pads: Any, strides: Any, ctx: Context,
) -> Array:  # fmt: skip
    window = (strides, dilations, pads, output_padding, output_shape, auto_pad)
    strides, dilations, cuts = _transposed_windows(x.shape[1:-1], w.shape[2:], *window)
    w, dtype = _transposed_weight(w, group), x.dtype
    if ctx.lowering == "cpu":
        x, w = wide(x), wide(w)
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
        return kernels.conv_transpose(image, weight, lowering=ctx.lowering, dtype=sum_type(image), **window)

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
        grid = places_of(*row).T
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


def places_of(size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int]) -> np.ndarray:
    """The positions that each window of one spatial dim reads: (windows, kernel), outside of [0, size) on pads."""
    count = (size + sum(pads) - (kernel - 1) * dilation - 1) // stride + 1
    return np.arange(count)[:, None] * stride - pads[0] + np.arange(kernel) * dilation
