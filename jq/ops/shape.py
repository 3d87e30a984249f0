"""Shapes, indexing and rearrangement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import helper

from jq.errors import ModelError
from jq.ops.integer.fixed import Fixed
from jq.ops.integer.rounding import unchanged
from jq.ops.integer.sums import aligned
from jq.ops.table import Array, Context, IntegerContext, Quant, astype, integer, namespace, op

_MOVES = Quant(shares=True)
_MOST_KNOWN = 1 << 26  # elements of a tensor that is known while tracing and made by growth

# --- Shapes ---


@op("Shape", shape_only=True, host=True)
def shape(x: Array, *, start: int = 0, end: int | None = None) -> np.ndarray:
    return np.asarray(np.shape(x)[start:end], np.int64)


@op("Size", shape_only=True, host=True)
def size(x: Array) -> np.ndarray:
    return np.asarray(np.size(x), np.int64)


@op("Identity", host=True, layout="same", moves="by place")
def identity(x: Any) -> Any:
    return x


@op("Reshape", static=("shape",), host=True, quant=_MOVES, moves="by place")
def reshape(x: Array, shape: np.ndarray, *, allowzero: int = 0) -> Array:
    return x.reshape([x.shape[i] if d == 0 and not allowzero else int(d) for i, d in enumerate(shape)])


@op("Flatten", host=True, quant=_MOVES, moves="by place")
def flatten(x: Array, *, axis: int) -> Array:
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@op("Transpose", host=True, quant=_MOVES, moves="by place")
def transpose(x: Array, *, perm: Any = None) -> Array:
    return namespace(x).transpose(x, perm)


@op("Squeeze", static=("axes",), host=True, quant=_MOVES, moves="by place")
def squeeze(x: Array, axes: np.ndarray | None = None) -> Array:
    return namespace(x).squeeze(x, None if axes is None else _ints(axes))


@op("Unsqueeze", static=("axes",), host=True, quant=_MOVES, moves="by place")
def unsqueeze(x: Array, axes: np.ndarray) -> Array:
    return namespace(x).expand_dims(x, _ints(axes))


@op("Expand", static=("shape",), host=True, moves="by place")
def expand(x: Array, shape: np.ndarray) -> Array:
    return namespace(x).broadcast_to(x, np.broadcast_shapes(x.shape, _ints(shape)))


@op("Tile", static=("tiles", "axis"), host=True, moves="by place")
def tile_one_axis(x: Array, tiles: np.ndarray, axis: np.ndarray) -> Array:
    repeats = [1] * x.ndim
    repeats[int(axis.item())] = int(tiles.item())
    return namespace(x).tile(x, repeats)


@op("Tile", since=6, static=("repeats",), host=True, moves="by place")
def tile(x: Array, repeats: np.ndarray) -> Array:
    times = _ints(repeats)
    _believe(namespace(x), (*x.shape, *times))
    return namespace(x).tile(x, times)


def _believe(xp: Any, factors: Iterable[int]) -> None:
    """Raise an error for a huge size before numpy allocates it; for jax arrays tracing makes only the shape."""
    if xp is np and (size := math.prod(factors)) > _MOST_KNOWN:
        raise ModelError(f"an output of {size} elements is out of all proportion to its input")


def _ints(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(v) for v in np.ravel(values))


# --- Made from a shape or a range ---


@op("Range", static=("start", "limit", "delta"), host=True)
def range_(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> np.ndarray:
    if delta.item() == 0:
        raise ModelError("the delta of a Range is 0; expected a nonzero number")
    first, last, step = (v.item() for v in (start, limit, delta))
    count = -((first - last) // step) if isinstance(step, int) else math.ceil((last - first) / step)
    _believe(np, [count])
    return (first + np.arange(max(count, 0)) * step).astype(start.dtype)


@op("ConstantOfShape", static=("shape",), host=True)
def constant_of_shape(shape: np.ndarray, *, value: np.ndarray | None = None) -> np.ndarray:
    value = np.zeros((), np.float32) if value is None else value
    return np.broadcast_to(value.reshape(-1)[0], _ints(shape))  # a view: a damaged shape costs no memory


@op("EyeLike", host=True)
def eye_like(x: Array, *, dtype: int | None = None, k: int) -> np.ndarray:
    rows, columns = x.shape
    return np.eye(rows, columns, k, x.dtype if dtype is None else helper.tensor_dtype_to_np_dtype(dtype))


@op("OneHot", static=("depth",), host=True)
def one_hot(indices: Array, depth: np.ndarray, values: Array, *, axis: int) -> Array:
    xp, size = namespace(indices, values), int(depth.item())
    _believe(xp, (*indices.shape, size))
    _believe(np, [size])
    indices = astype(indices, np.int64)  # truncates floats, and 255 + 1 fits
    places = np.arange(size).reshape([-1] + [1] * (indices.ndim - (axis % (indices.ndim + 1))))
    hot = xp.expand_dims(_from_start(indices, size), axis) == places
    return xp.where(hot, values[1], values[0])


@op("Trilu", static=("k",), host=True)
def trilu(x: Array, k: np.ndarray | None = None, *, upper: int) -> Array:
    xp = namespace(x)
    return (xp.triu if upper else xp.tril)(x, 0 if k is None else int(k.item()))


# --- Joining, cutting, padding ---


@op("Concat", host=True, layout=("axis",))
def concat(*xs: Array, axis: int | None = None) -> Array:
    return namespace(*xs).concatenate(xs, 1 if axis is None else axis)  # opset 1 had a default


@integer("Concat")
def integer_concat(*xs: Fixed, axis: int | None = None, ctx: IntegerContext) -> Fixed:
    """On one grid: that of all of them, or the finest."""
    if all(isinstance(x, Fixed) and x.is_codes and unchanged(x, xs[0].grid) for x in xs):
        return xs[0].holding(concat(*(x.array for x in xs), axis=axis))
    # Data that moves is shifted without guard bits.
    return aligned(xs, lambda parts: concat(*parts, axis=axis), dataclasses.replace(ctx.target, add_guard=None))


@op("Split", static=("split",), host=True, layout=("axis",), quant=_MOVES, moves="by place")
def split(
    x: Array, split: np.ndarray | None = None, *, axis: int | None = None, num_outputs: int | None = None, ctx: Context
) -> tuple[Array, ...]:  # fmt: skip
    axis = 0 if axis is None else axis
    if split is None:
        count = ctx.outputs if num_outputs is None else num_outputs
        chunk = -(-x.shape[axis] // count)
        split = np.full(count, chunk)
        split[-1] = x.shape[axis] - chunk * (count - 1)
    if len(split) < ctx.outputs or np.any(split < 0) or np.sum(split) != x.shape[axis]:
        raise ModelError(f"cannot split {x.shape[axis]} along axis {axis} into {ctx.outputs} parts of {split.tolist()}")
    return tuple(pieces(x, split, axis))


def pieces(x: Array, lengths: np.ndarray, axis: int) -> list[Array]:
    ends = np.cumsum(lengths).tolist()
    return [cut(x, {axis: slice(e - n, e)}) for e, n in zip(ends, np.asarray(lengths).tolist(), strict=True)]


def cut(x: Array, slices: dict[int, slice]) -> Array:
    index = [slice(None)] * x.ndim
    for axis, part in slices.items():
        index[axis] = part
    return x[tuple(index)]


@op("Slice", static=("starts", "ends", "axes", "steps"), host=True, layout=("axes",), moves="by place")
def slice_(
    x: Array, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None, steps: np.ndarray | None = None
) -> Array:  # fmt: skip
    """ONNX clamps bounds and counts from the end as Python's slices do."""
    axes = np.arange(len(starts)) if axes is None else axes
    steps = np.ones(len(starts), int) if steps is None else steps
    return cut(x, {a: slice(b, e, s) for a, b, e, s in zip(*map(_ints, (axes, starts, ends, steps)), strict=False)})


@op("Pad", static=("pads", "axes"), host=True, layout=("axes",), quant=Quant(pads=True))
def pad(
    x: Array, pads: Any = None, constant_value: Array | None = None, axes: np.ndarray | None = None, *, mode: str,
    value: float = 0.0, paddings: Any = None,
) -> Array:  # fmt: skip
    """Negative pads crop, before the others pad."""
    pads = _ints(paddings if pads is None else pads)
    places = range(x.ndim) if axes is None else [a % x.ndim for a in _ints(axes)]
    begins, ends = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    slices, widths = {}, [(0, 0)] * x.ndim
    for axis, begin, end in zip(places, begins, ends, strict=True):
        slices[axis] = slice(max(-begin, 0), x.shape[axis] + min(end, 0))
        widths[axis] = max(begin, 0), max(end, 0)
    x = cut(x, slices)
    if mode != "constant":
        if any(max(width) > 256 * size for width, size in zip(widths, x.shape, strict=True)):
            # JAX and numpy take a slice for each turn
            raise ModelError(f"pads {pads} repeat the shape {x.shape} implausibly often")
        return namespace(x).pad(x, widths, mode=mode)
    fill = value if constant_value is None or np.size(constant_value) == 0 else constant_value.reshape(())
    xp = namespace(x, fill)
    _believe(xp, (n + sum(width) for n, width in zip(x.shape, widths, strict=True)))
    return xp.pad(x, widths, constant_values=fill if x.dtype == object else xp.asarray(fill, x.dtype))


@integer("Pad", static=("pads", "constant_value", "axes"))
def integer_pad(
    x: Fixed, pads: Any = None, constant_value: Array | None = None, axes: np.ndarray | None = None, *, mode: str,
    value: float = 0.0, paddings: Any = None,
) -> Fixed:  # fmt: skip
    """The padding value must be one of the integers, and unchanged by a pending activation."""
    fill = value if constant_value is None or np.size(constant_value) == 0 else np.asarray(constant_value).item()
    if x.per_channel or x.fraction is not None or not math.isfinite(fill):
        return NotImplemented
    code = Fraction(fill) / x.scale + x.zero
    low, high = (-x.bound, x.bound) if x.grid is None else x.grid.ends
    kept = not x.waits or fill == 0
    if mode == "constant" and (code.denominator != 1 or not low <= code <= high or not kept):
        return NotImplemented
    held = np.asarray(int(code) if mode == "constant" else 0, x.array.dtype)
    return x.holding(pad(x.array, pads, held, axes, mode=mode, paddings=paddings))


@op("CenterCropPad", static=("shape",), host=True)
def center_crop_pad(x: Array, shape: np.ndarray, *, axes: Any = None) -> Array:
    """The excess or shortfall is halved; an odd one goes to the end."""
    axes = range(x.ndim) if axes is None else axes
    slices, widths = {}, [(0, 0)] * x.ndim
    for axis, want in zip(axes, _ints(shape), strict=True):
        have = x.shape[axis]
        start, before = max(have - want, 0) // 2, max(want - have, 0) // 2
        slices[axis] = slice(start, start + min(have, want))
        widths[axis] = (before, max(want - have, 0) - before)
    return namespace(x).pad(cut(x, slices), widths)


# --- Gather and scatter ---


@op("Gather", host=True, quant=Quant(inputs=("x",), shares=True), moves="by place")
def gather(x: Array, indices: Array, *, axis: int) -> Array:
    """Indices outside of the axis are an error where they are known, else clamped."""
    if namespace(x, indices) is np:
        return np.take(x, indices, axis)
    if isinstance(indices, np.ndarray) and indices.ndim < 2:
        if np.any(indices < -x.shape[axis]) or np.any(indices >= x.shape[axis]):
            raise ModelError(f"indices {indices.tolist()} are outside axis {axis}, which has {x.shape[axis]} elements")
        y = take_known(x, axis, np.atleast_1d(_from_start(indices, x.shape[axis])))
        return y if indices.ndim else y.squeeze(axis)
    return jnp.take(x, _from_start(indices, x.shape[axis]), axis, mode="clip")


def take_known(x: Array, axis: int, index: np.ndarray) -> Array:
    """`x[index]` along an axis; a regular index is a repeat or a strided slice."""
    size, count = x.shape[axis], len(index)
    if size and count and count % size == 0 and np.array_equal(index, np.arange(count) // (count // size)):
        return x if count == size else jnp.repeat(x, count // size, axis)
    steps = np.diff(index)
    if count == 1 or (count > 1 and steps[0] > 0 and np.all(steps == steps[0])):
        return lax.slice_in_dim(x, int(index[0]), int(index[-1]) + 1, int(steps[0]) if count > 1 else 1, axis)
    return jnp.take(x, index, axis, mode="clip")


@op("GatherElements", host=True)
def gather_elements(x: Array, indices: Array, *, axis: int) -> Array:
    axis = axis % x.ndim
    # The indices may be smaller than the data in the other axes too.
    x = cut(x, {a: slice(n) for a, n in enumerate(indices.shape) if a != axis})
    if namespace(x, indices) is np:
        return np.take_along_axis(x, indices, axis)
    return jnp.take_along_axis(x, _from_start(indices, x.shape[axis]), axis, mode="clip")


@op("GatherND", host=True)
def gather_nd(x: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    return namespace(x, indices).asarray(x)[_index(x.shape, indices, batch_dims)]


@op("ArrayFeatureExtractor", domain="ai.onnx.ml", host=True)
def array_feature_extractor(x: Array, y: Array) -> Array:
    return gather(x.reshape(-1, x.shape[-1]), y.reshape(-1), axis=1)


@op("Scatter", host=True)
def scatter(x: Array, indices: Array, updates: Array, *, axis: int) -> Array:
    return scatter_elements(x, indices, updates, axis=axis)


@op("ScatterElements", host=True)
def scatter_elements(x: Array, indices: Array, updates: Array, *, axis: int, reduction: str = "none") -> Array:
    places: list[Array] = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    places[axis] = indices
    return _put(x, tuple(places), updates, reduction)


@op("ScatterND", host=True)
def scatter_nd(x: Array, indices: Array, updates: Array, *, reduction: str = "none") -> Array:
    return _put(x, _index(x.shape, indices, 0), updates, reduction)


@op("TensorScatter")
def tensor_scatter(
    past_cache: Array, update: Array, write_indices: Array | None = None, *, axis: int, mode: str
) -> Array:
    cache, update = jnp.moveaxis(past_cache, axis, 1), jnp.moveaxis(update, axis, 1)
    starts = jnp.zeros(cache.shape[0], int) if write_indices is None else write_indices
    places = starts[:, None] + jnp.arange(update.shape[1], dtype=starts.dtype)
    places = places % cache.shape[1] if mode == "circular" else places
    return jnp.moveaxis(cache.at[jnp.arange(cache.shape[0])[:, None], places].set(update), 1, axis)


def _from_start(indices: Array, size: int) -> Array:
    return namespace(indices).where(indices < 0, indices + size, indices)


def _index(shape: tuple[int, ...], indices: Array, batch_dims: int) -> tuple[Array, ...]:
    """The index that picks `x[batch..., indices[batch..., i, :]]`."""
    xp = namespace(indices)
    grid = np.ogrid[tuple(slice(n) for n in shape[:batch_dims])] if batch_dims else ()
    batch = [b.reshape(b.shape + (1,) * (indices.ndim - 1 - batch_dims)) for b in grid]
    return (*batch, *xp.moveaxis(indices, -1, 0))


def _put(x: Array, places: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    if namespace(x, updates, *places) is np:
        x = x.copy()
        if reduction == "none":
            x[places] = updates
        else:
            combine: Any = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
            combine.at(x, places, updates)
        return x
    at = jnp.asarray(x).at[places]
    methods: dict[str, Any] = {"none": at.set, "add": at.add, "mul": at.multiply, "max": at.max, "min": at.min}
    return methods[reduction](jnp.asarray(updates, x.dtype))


# --- Sorting, and outputs whose shape depends on values ---


@op("TopK", static=("k",), host=True, layout=("axis",))
def top_k(x: Array, k: Any, *, axis: int, largest: int | None = None, sorted: int = 1) -> tuple[Array, Array]:
    """Always sorted, which `sorted=0` leaves open; equal values come in the order of their indices."""
    count, largest = int(np.asarray(k).item()), largest is None or largest
    if count > x.shape[axis]:
        raise ModelError(f"K is {count}, but axis {axis} has {x.shape[axis]} elements")
    if isinstance(x, np.ndarray):
        key = _descending(x) if largest else x
        order = cut(np.argsort(key, axis, kind="stable"), {axis: slice(count)})
        return np.take_along_axis(x, order, axis), order.astype(np.int64)
    x = jnp.moveaxis(x, axis, -1)
    values, places = lax.top_k(x if largest else _descending(x), count)
    values = values if largest else _descending(values)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(astype(places, np.int64), -1, axis)


def _descending(x: Array) -> Array:
    """Values of the same type in the opposite order: -x overflows for the smallest integer."""
    return ~x if np.issubdtype(x.dtype, np.integer) else -x


@op("NonZero", static=("x",), host=True)
def non_zero(x: np.ndarray) -> np.ndarray:
    """The shape depends on the values, so they must be known while tracing."""
    return np.stack(np.nonzero(np.atleast_1d(x))).astype(np.int64)


@op("Unique", static=("x",), host=True)
def unique(x: np.ndarray, *, axis: int | None = None, sorted: int) -> tuple[np.ndarray, ...]:
    """The shape depends on the values, so they must be known while tracing."""
    values, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    if not sorted:
        order = np.argsort(first)
        values, first, counts = np.take(values, order, 0 if axis is None else axis), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return values, first.astype(np.int64), inverse.reshape(-1).astype(np.int64), counts.astype(np.int64)


@op("Compress", static=("condition",), host=True)
def compress(x: Array, condition: np.ndarray, *, axis: int | None = None) -> Array:
    """The shape depends on the condition, so it must be known while tracing."""
    return namespace(x).take(x, np.flatnonzero(condition), axis)


# --- Rearrangement ---


@op("ReverseSequence")
def reverse_sequence(x: Array, sequence_lens: Array, *, batch_axis: int, time_axis: int) -> Array:
    x = jnp.moveaxis(x, (batch_axis, time_axis), (0, 1))
    time, lengths = jnp.arange(x.shape[1]), sequence_lens[:, None]
    places = jnp.where(time < lengths, lengths - 1 - time, time)
    y = x[jnp.arange(x.shape[0])[:, None], places]
    return jnp.moveaxis(y, (0, 1), (batch_axis, time_axis))


@op("DepthToSpace", layout="last", moves="by place")
def depth_to_space(x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    n, h, w, c = x.shape
    b, depth = blocksize, c // blocksize**2
    if mode == "CRD":
        x = x.reshape(n, h, w, depth, b, b).transpose(0, 1, 4, 2, 5, 3)
    else:
        x = x.reshape(n, h, w, b, b, depth).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(n, h * b, w * b, depth)


@op("SpaceToDepth", layout="last", moves="by place")
def space_to_depth(x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    n, h, w, c = x.shape
    b = blocksize
    x = x.reshape(n, h // b, b, w // b, b, c).transpose((0, 1, 3, 5, 2, 4) if mode == "CRD" else (0, 1, 3, 2, 4, 5))
    return x.reshape(n, h // b, w // b, c * b * b)
