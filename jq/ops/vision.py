"""Resampling, regions and boxes."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic import layout
from jq.arithmetic.numerics import Mode, round_shift
from jq.errors import ModelError
from jq.ops.integer.fixed import FLOAT32_BITS, Fixed
from jq.ops.resizing import coordinates, cubic, new_sizes, rounded, taps_of
from jq.ops.shape import take_known
from jq.ops.table import Array, IntegerContext, Quant, integer, op

# --- Resize: per axis, a table of the places it reads and their weights, made while tracing ---


@op("Upsample", static=("scales",), layout=("axes",))
def upsample(
    x: Array, scales: Any = None, axes: Any = None, *, mode: str, height_scale: float | None = None,
    width_scale: float | None = None,
) -> Array:  # fmt: skip
    """`axes` is for the layout: ONNX scales all of them, in their order."""
    scales = (1, 1, height_scale, width_scale) if scales is None else scales  # opset 1
    return resize_asymmetric(x, scales, axes, mode=mode)


@op("Resize", since=10, static=("scales",), layout=("axes",), quant=Quant(since=11))
def resize_asymmetric(x: Array, scales: np.ndarray, axes: Any = None, *, mode: str) -> Array:
    """Opset 10 leaves rounding open; onnxruntime takes the floor where it enlarges, else the ceiling."""
    axes, kind = range(x.ndim) if axes is None else map(int, axes), x.dtype
    for axis, scale in zip(axes, np.asarray(scales, np.float32), strict=True):
        places = np.arange(int(np.float32(x.shape[axis]) * scale), dtype=np.float32) / scale
        if mode == "nearest":
            x = _pick(x, axis, np.ceil(places) if scale < 1 else np.floor(places))
        elif scale != 1:
            x = _blend(x, axis, places, 1.0, "linear", 0.0, False)
    return _saturated(x, kind)


@op("Resize", since=11, static=("roi", "scales", "sizes"), layout=("axes",), quant=Quant(inputs=("x",), shares=True))
def resize(
    x: Array, roi: np.ndarray | None = None, scales: np.ndarray | None = None, sizes: np.ndarray | None = None, *,
    antialias: int | None = None, axes: Any = None, coordinate_transformation_mode: str, cubic_coeff_a: float,
    exclude_outside: int, extrapolation_value: float, keep_aspect_ratio_policy: str | None = None, mode: str,
    nearest_mode: str,
) -> Array:  # fmt: skip
    """Coordinates are float32, as onnxruntime's: that decides what a tie rounds to."""
    axes = [int(a) % x.ndim for a in (range(x.ndim) if axes is None else axes)]
    old = [x.shape[a] for a in axes]
    new, ratios = new_sizes(old, scales, sizes, keep_aspect_ratio_policy)
    kind, crop = x.dtype, coordinate_transformation_mode == "tf_crop_and_resize"
    if crop and (roi is None or len(roi) != 2 * len(axes)):
        raise ModelError(f"tf_crop_and_resize needs a roi of {2 * len(axes)} values")
    for i, axis in enumerate(axes):
        start, end = (roi[i], roi[i + len(axes)]) if crop and roi is not None else (0.0, 1.0)
        if new[i] == old[i] and ratios[i] == 1 and (start, end) == (0, 1):
            continue
        places = coordinates(coordinate_transformation_mode, old[i], new[i], np.float32(ratios[i]), start, end)
        outside = (places < 0) | (places > old[i] - 1)
        if mode == "nearest":
            x = _pick(x, axis, rounded(places, nearest_mode))
        else:
            x = _blend(x, axis, places, ratios[i] if antialias else 1.0, mode, cubic_coeff_a, bool(exclude_outside))
        if crop and outside.any():
            x = jnp.where(layout.along(outside, x.ndim, axis), jnp.asarray(extrapolation_value, x.dtype), x)
    return _saturated(x, kind)


_EXACT_BITS = 8  # of weights that a float reading interpolates with exactly


@integer("Resize", since=11, static=("roi", "scales", "sizes"))
def integer_resize(
    x: Fixed, roi: np.ndarray | None = None, scales: np.ndarray | None = None, sizes: np.ndarray | None = None, *,
    antialias: int | None = None, axes: Any = None, coordinate_transformation_mode: str, cubic_coeff_a: float,
    exclude_outside: int, extrapolation_value: float, keep_aspect_ratio_policy: str | None = None, mode: str,
    nearest_mode: str, ctx: IntegerContext,
) -> Fixed:  # fmt: skip
    """The nearest elements; or bilinear, if the weights are exact in few bits or the chip has its own."""
    if coordinate_transformation_mode == "tf_crop_and_resize" or antialias or exclude_outside or mode == "cubic":
        return NotImplemented
    if x.per_channel or x.fraction is not None:
        return NotImplemented
    rank = x.array.ndim
    places = [int(a) % rank for a in (range(rank) if axes is None else axes)]
    old = [x.array.shape[a] for a in places]
    new, ratios = new_sizes(old, scales, sizes, keep_aspect_ratio_policy)
    rows: dict[int, np.ndarray] = {}
    for axis, before, after, ratio in zip(places, old, new, ratios, strict=True):
        if after != before or ratio != 1:
            rows[axis] = coordinates(coordinate_transformation_mode, before, after, np.float32(ratio), 0.0, 1.0)
    if mode == "nearest":
        return x.holding(functools.reduce(lambda y, a: _pick(y, a, rounded(rows[a], nearest_mode)), rows, x.array))
    if x.waits or (x.floating and ctx.target.requantize == "float32"):
        return NotImplemented  # in float32 each term is rounded before it is added
    spans = {a: taps_of(row, x.array.shape[a], 1.0, "linear", 0.0, False) for a, row in rows.items()}
    if ctx.target.lerp_bits is None:
        return _interpolated(x, spans)
    spatial = [a for a in range(rank) if a in spans]
    if len(spatial) != 2:
        return NotImplemented
    return chips_bilinear(x, [spans[a] for a in spatial], spatial, ctx.target.lerp_bits, ctx.target.rounding)


def _interpolated(x: Fixed, spans: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> Fixed:
    """Exactly, along one axis after the other."""
    for axis, (index, weights) in spans.items():
        whole = weights * 2**_EXACT_BITS
        if np.any(whole != np.rint(whole)):
            return NotImplemented
        used = 1 << max(0, _EXACT_BITS - int(np.log2(np.gcd.reduce(whole.astype(np.int64), axis=None))))
        if x.bound * used >= 1 << FLOAT32_BITS:
            return NotImplemented
        array = _blended(x.integers(), axis, index, np.rint(weights * used).astype(np.int32))
        x = Fixed(array, x.scale / used, x.bound * used, floating=x.floating)
    return x


def _blended(v: Array, axis: int, index: np.ndarray, weights: np.ndarray) -> Array:
    parts = [take_known(v, axis, i) * layout.along(w, v.ndim, axis) for i, w in zip(index.T, weights.T, strict=True)]
    return functools.reduce(operator.add, parts)


def chips_bilinear(x: Fixed, spans: Sequence[Any], axes: Sequence[int], weight_bits: int, mode: Mode) -> Fixed:
    """Weights of `weight_bits` bits; rows first, rounded to 16 bits, then columns, which the output's rounding ends."""
    if not x.is_codes or x.bound > 128:
        return NotImplemented
    v, one, spare = x.integers(), 1 << weight_bits, 7  # of 16 bits, besides the 8 and the sign
    for step, (axis, (index, weights)) in enumerate(zip(axes, spans, strict=True)):
        v = _blended(v, axis, index, np.floor(weights * one + 0.5).astype(np.int32))
        v = round_shift(v, weight_bits - spare, mode) if step == 0 else v
    scale, bound = x.scale / 2 ** (weight_bits + spare), (x.bound + 1) << (weight_bits + spare)
    return Fixed(v, scale, bound, floating=x.floating, causes=frozenset({"interpolation"}))


def _pick(x: Array, axis: int, places: np.ndarray) -> Array:
    return take_known(x, axis, np.clip(places, 0, x.shape[axis] - 1).astype(int))


def _blend(x: Array, axis: int, places: np.ndarray, scale: float, mode: str, a: float, exclude_outside: bool) -> Array:
    """Interpolation along one axis; `scale` below 1 widens the kernel against aliasing."""
    index, weights = taps_of(places, x.shape[axis], min(scale, 1.0), mode, a, exclude_outside)
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    weights = weights.astype(x.dtype)
    if index.shape[1] > 4:
        dense = np.zeros((len(places), x.shape[axis]), x.dtype)
        np.add.at(dense, (np.arange(len(places))[:, None], index), weights)
        return jnp.moveaxis(jnp.tensordot(dense, x, (1, axis)), 0, axis)
    used = np.flatnonzero(weights.any(0)) if weights.any() else [0]
    return _blended(x, axis, index[:, used], weights[:, used])


def _saturated(x: Array, kind: Any) -> Array:
    """The type that came in; integers are rounded and saturated, as ONNX's reference does."""
    if x.dtype != kind and jnp.issubdtype(kind, jnp.integer):
        x = jnp.clip(jnp.round(x), jnp.iinfo(kind).min, jnp.iinfo(kind).max)
    return x.astype(kind)


# --- Sampling at given places ---


@op("GridSample", layout="last")
def grid_sample(x: Array, grid: Array, *, align_corners: int, mode: str, padding_mode: str) -> Array:
    """The last axis of the grid holds (x, y[, z]): the reverse of the order of the spatial axes."""
    sizes, mode = x.shape[1:-1], mode.removeprefix("bi")
    limits = [(0.0, n - 1.0) if align_corners else (-0.5, n - 0.5) for n in sizes]
    kind = jnp.promote_types(grid.dtype, jnp.float32)
    taps = []  # per spatial axis, pairs of (index, weight)
    for axis, size in enumerate(sizes):
        place = grid[..., len(sizes) - 1 - axis].astype(kind) + 1
        place = place / 2 * (size - 1) if align_corners else (place * size - 1) / 2
        place = jnp.round(place) if mode == "nearest" else place
        if padding_mode == "border" and mode != "cubic":  # whose taps are clamped one by one
            place = jnp.clip(place, 0, size - 1)
        elif padding_mode == "reflection":
            place = _reflect(place, *limits[axis])
        first = jnp.floor(place)
        reach = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}[mode]
        taps.append([(first + o, _grid_weight(jnp.abs(place - first - o), mode)) for o in reach])
    flat = x.reshape(x.shape[0], math.prod(sizes), x.shape[-1])
    total: Array = 0
    for corner in itertools.product(*taps):
        index: Array = 0
        weight: Array = 1
        for (i, w), size, limit in zip(corner, sizes, limits, strict=True):
            if padding_mode == "zeros":
                w = jnp.where((i >= 0) & (i < size), w, 0)
            elif padding_mode == "reflection":
                i = _reflect(i, *limit)
            index, weight = index * size + jnp.clip(i, 0, size - 1).astype(jnp.int32), weight * w
        values = jax.vmap(lambda v, k: v[k])(flat, index)
        total = total + values * weight[..., None].astype(kind)
    return total.astype(x.dtype)


def _grid_weight(distance: Array, mode: str) -> Array:
    if mode == "nearest":
        return jnp.ones_like(distance)
    return jnp.maximum(1 - distance, 0) if mode == "linear" else cubic(distance, -0.75)


def _reflect(x: Array, low: float, high: float) -> Array:
    """Fold x into [low, high] by mirrors at both ends."""
    span = high - low
    if span == 0:
        return jnp.full_like(x, low)
    inside = span - jnp.abs(jnp.mod(x - low, 2 * span) - span) + low
    return jnp.where((x < low) | (x > high), inside, x)


@op("AffineGrid", static=("size",))
def affine_grid(theta: Array, size: np.ndarray, *, align_corners: int) -> Array:
    sizes = [int(n) for n in size[2:]]
    steps = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in sizes]
    axes = np.meshgrid(*steps, indexing="ij")
    places = np.stack([*reversed(axes), np.ones(sizes)], -1).reshape(-1, len(sizes) + 1)
    grid = jnp.einsum("pk,njk->npj", jnp.asarray(places, theta.dtype), theta)
    return grid.reshape(theta.shape[0], *sizes, len(sizes))


# --- Regions ---


@op("RoiAlign", layout="last")
def roi_align(
    x: Array, rois: Array, batch_indices: Array, *, coordinate_transformation_mode: str | None = None, mode: str,
    output_height: int, output_width: int, sampling_ratio: int, spatial_scale: float,
) -> Array:  # fmt: skip
    """With `sampling_ratio` 0 a bin takes as many samples per axis as it has pixels, a number that depends
    on the data: here it is masked out of what a region of twice the map needs, and larger ones are
    sampled that often only. Mode "max" takes the largest weighted pixel, as onnxruntime does.
    """
    shift = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    sizes, bins = x.shape[1:3], (output_height, output_width)
    rois = rois.astype(jnp.promote_types(rois.dtype, jnp.float32)) * spatial_scale - shift

    def one(roi: Array, batch: Array) -> Array:
        lengths = [roi[3 - a] - roi[1 - a] for a in (0, 1)]
        lengths = lengths if shift else [jnp.maximum(n, 1) for n in lengths]
        (rows, wy, used_y), (columns, wx, used_x) = (
            _roi_samples(roi[1 - a], lengths[a], bins[a], sizes[a], sampling_ratio) for a in (0, 1)
        )
        pixels, count = x[batch], jnp.maximum(used_y.sum() * used_x.sum(), 1)
        if mode == "avg" and sampling_ratio == 0:  # many samples: as two matrix products
            dense = [
                (w[..., None] * jnp.maximum(1 - jnp.abs(p[..., None] - jnp.arange(n)), 0)).sum(1)
                for p, w, n in ((rows, wy, sizes[0]), (columns, wx, sizes[1]))
            ]
            return jnp.einsum("ph,hwc,qw->pqc", dense[0], pixels, dense[1]) / count
        parts = [
            pixels[i[:, :, None, None], j] * (v[:, :, None, None] * h)[..., None]
            for i, v in _neighbours(rows, wy, sizes[0])
            for j, h in _neighbours(columns, wx, sizes[1])
        ]  # each (output_height, samples, output_width, samples, C)
        if mode == "avg":
            return sum(parts[1:], parts[0]).sum((1, 3)) / count
        used = used_y[:, None, None, None] & used_x[:, None]
        return jnp.where(used.any(), jnp.where(used, jnp.stack(parts).max(0), -jnp.inf).max((1, 3)), 0)

    return lax.map(lambda pair: one(*pair), (rois, batch_indices)).astype(x.dtype)


def _roi_samples(start: Array, length: Array, bins: int, size: int, ratio: int) -> tuple[Array, Array, Array]:
    """Along one axis: where each bin's samples lie, (bins, samples), whether inside the map, and which are in use."""
    step, most = length / bins, ratio or -(-2 * size // bins)
    count = ratio or jnp.clip(jnp.ceil(step), 0, most)
    sample = jnp.arange(most)
    used = sample < count
    place = start + jnp.arange(bins)[:, None] * step + (sample + 0.5) * step / jnp.maximum(count, 1)
    weight = (used & (place >= -1) & (place <= size)).astype(step.dtype)
    return jnp.clip(place, 0, size - 1), weight, used


def _neighbours(place: Array, weight: Array, size: int) -> list[tuple[Array, Array]]:
    """The two pixels around each place, with their weights."""
    low = jnp.floor(place)
    index = low.astype(jnp.int32)
    return [(index, weight * (1 - (place - low))), (jnp.minimum(index + 1, size - 1), weight * (place - low))]


@op("MaxRoiPool", layout="last")
def max_roi_pool(x: Array, rois: Array, *, pooled_shape: Any, spatial_scale: float) -> Array:
    def one(roi: Array) -> Array:
        corners = jnp.floor(roi[1:] * spatial_scale + 0.5).astype(jnp.int32)
        pixels = x[roi[0].astype(jnp.int32)]
        for axis, bins in enumerate(pooled_shape):
            start = corners[1 - axis]
            length = jnp.maximum(corners[3 - axis] - start + 1, 1)
            bin, pixel = jnp.arange(bins)[:, None], jnp.arange(pixels.shape[axis]) - start
            inside = (pixel >= bin * length // bins) & (pixel < -(-(bin + 1) * length // bins))
            spread = jnp.expand_dims(pixels, axis)
            inside = inside.reshape(inside.shape + (1,) * (spread.ndim - axis - 2))
            pixels = jnp.where(inside, spread, -jnp.inf).max(axis + 1)
        return jnp.where(jnp.isneginf(pixels), 0, pixels)  # an empty bin

    return lax.map(one, rois).astype(x.dtype)


@op(
    "NonMaxSuppression",
    static=("boxes", "scores", "max_output_boxes_per_class", "iou_threshold", "score_threshold"),
    host=True,
)
def non_max_suppression(
    boxes: np.ndarray, scores: np.ndarray, max_output_boxes_per_class: np.ndarray | None = None,
    iou_threshold: np.ndarray | None = None, score_threshold: np.ndarray | None = None, *, center_point_box: int,
) -> np.ndarray:  # fmt: skip
    """How many boxes remain depends on the values, so they must be known while tracing."""
    most = 0 if max_output_boxes_per_class is None else int(max_output_boxes_per_class.item())
    overlap = 0.0 if iou_threshold is None else float(iou_threshold.item())
    least = -np.inf if score_threshold is None else float(score_threshold.item())
    if center_point_box:
        low, high = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
    else:
        low, high = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    kept: list[tuple[int, int, int]] = []
    for batch, kind in np.ndindex(*scores.shape[:2]):
        value = scores[batch, kind]
        order = np.argsort(-value, kind="stable")
        order = order[value[order] > least]
        chosen: list[int] = []
        while len(order) and len(chosen) < most:
            best, order = int(order[0]), order[1:]
            chosen.append(best)
            order = order[_overlap(low[batch], high[batch], best, order) <= overlap]
        kept += [(batch, kind, i) for i in chosen]
    return np.asarray(kept, np.int64).reshape(-1, 3)


def _overlap(low: np.ndarray, high: np.ndarray, box: int, others: np.ndarray) -> np.ndarray:
    """Intersection over union of a box with others; 0 where a box is empty."""
    area = np.prod(high - low, -1)
    shared = np.prod(np.maximum(np.minimum(high[box], high[others]) - np.maximum(low[box], low[others]), 0), -1)
    return np.where((area[box] > 0) & (area[others] > 0), shared / (area[box] + area[others] - shared), 0)


@op("Col2Im", static=("image_shape", "block_shape"))
def col2im(
    x: Array, image_shape: np.ndarray, block_shape: np.ndarray, *, dilations: Any = None, pads: Any = None,
    strides: Any = None,
) -> Array:  # fmt: skip
    """Each place of the block adds its pixels, spread by the strides, onto the image."""
    image, block = [int(n) for n in image_shape], [int(n) for n in block_shape]
    rank = len(image)
    dilations, strides, pads = dilations or (1,) * rank, strides or (1,) * rank, pads or (0,) * (2 * rank)
    padded = [n + pads[i] + pads[i + rank] for i, n in enumerate(image)]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in zip(padded, block, dilations, strides, strict=True)]
    x = x.reshape(x.shape[0], -1, *block, *counts)
    total = jnp.zeros((*x.shape[:2], *padded), x.dtype)
    for place in itertools.product(*map(range, block)):
        start = [p * d for p, d in zip(place, dilations, strict=True)]
        spots = tuple(slice(b, b + (n - 1) * s + 1, s) for b, n, s in zip(start, counts, strides, strict=True))
        total = total.at[(slice(None), slice(None), *spots)].add(x[(slice(None), slice(None), *place)])
    return total[(slice(None), slice(None), *(slice(pads[i], pads[i] + n) for i, n in enumerate(image)))]
