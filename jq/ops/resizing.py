"""Resizing along an axis: where each place of the new axis lies on the old one, which elements it takes, by what weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.errors import ModelError
from jq.ops.table import Array


def interpolations(
    shape: Sequence[int], attrs: Mapping[str, Any], scales: Any, sizes: Any
) -> dict[int, np.ndarray] | None:
    """Return the weights [new, old] along each axis that a Resize changes, which is one matrix product after the other.

    None where the nearest elements are taken, or values from outside.
    """
    mode = attrs.get("coordinate_transformation_mode", "asymmetric")  # opset 10 has no other
    if attrs["mode"] == "nearest" or mode == "tf_crop_and_resize":
        return None
    axes = [int(a) % len(shape) for a in attrs.get("axes") or range(len(shape))]
    new, ratios = new_sizes([shape[a] for a in axes], scales, sizes, attrs.get("keep_aspect_ratio_policy"))
    weights = {}
    for axis, size, ratio in zip(axes, new, ratios, strict=True):
        old = shape[axis]
        if size != old or ratio != 1:
            places = coordinates(mode, old, size, np.float32(ratio), 0.0, 1.0)
            scale = min(ratio, 1.0) if attrs.get("antialias") else 1.0
            cubic, outside = attrs.get("cubic_coeff_a", -0.75), bool(attrs.get("exclude_outside"))
            index, taps = taps_of(places, old, scale, attrs["mode"], cubic, outside)
            weights[axis] = np.zeros((size, old))
            np.add.at(weights[axis], (np.arange(size)[:, None], index), taps)
    return weights


def nearest_elements(shape: Sequence[int], attrs: Mapping[str, Any], scales: Any, sizes: Any) -> dict[int, np.ndarray]:
    """Return the elements that a nearest Resize picks along each axis that it changes; in opset 10, as onnxruntime picks them."""
    axes = [int(a) % len(shape) for a in attrs.get("axes") or range(len(shape))]
    new, ratios = new_sizes([shape[a] for a in axes], scales, sizes, attrs.get("keep_aspect_ratio_policy"))
    mode, taken = attrs.get("coordinate_transformation_mode", "asymmetric"), {}
    for axis, size, ratio in zip(axes, new, ratios, strict=True):
        if size != shape[axis] or ratio != 1:
            places = coordinates(mode, shape[axis], size, np.float32(ratio), 0.0, 1.0)
            rounding = attrs.get("nearest_mode", "floor" if ratio >= 1 else "ceil")
            taken[axis] = np.clip(rounded(places, rounding), 0, shape[axis] - 1).astype(int)
    return taken


def new_sizes(old: Sequence[int], scales: Any, sizes: Any, policy: str | None) -> tuple[list[int], list[float]]:
    """New sizes and the scales, of which one is given."""
    if sizes is None or len(sizes) == 0:
        if scales is None or len(scales) != len(old):
            count = None if scales is None else len(scales)
            raise ModelError(f"needs {len(old)} scales or sizes; got {count} scales")
        scales = np.asarray(scales, np.float32)
        return [int(np.float32(n) * s) for n, s in zip(old, scales, strict=True)], scales.tolist()
    ratios = [int(m) / n for m, n in zip(sizes, old, strict=True)]
    if policy in (None, "stretch"):
        return [int(m) for m in sizes], ratios
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [int(scale * n + 0.5) for n in old], [scale] * len(old)


def coordinates(mode: str, old: int, new: int, scale: np.float32, start: float, end: float) -> np.ndarray:
    """Where each place of the resized axis lies on the original one: ONNX's formulas."""
    x, half = np.arange(new, dtype=np.float32), np.float32(0.5)
    exact = np.float32(old) * scale  # the size before it was cut to an integer
    match mode:
        case "half_pixel":
            return (x + half) / scale - half
        case "pytorch_half_pixel":
            return (x + half) / scale - half if new > 1 else 0 * x
        case "half_pixel_symmetric":
            return np.float32(old / 2 * (1 - new / exact)) + (x + half) / scale - half
        case "asymmetric":
            return x / scale
        case "tf_half_pixel_for_nn":
            return (x + half) / scale
        case "align_corners":
            return x * np.float32(old - 1) / (exact - 1) if exact != 1 else 0 * x
        case "tf_crop_and_resize":
            slope = (end - start) * (old - 1)
            shift = np.float32(start * (old - 1))
            return shift + x * np.float32(slope) / (exact - 1) if exact != 1 else shift + np.float32(slope / 2) + 0 * x
    raise ModelError(f"coordinate_transformation_mode {mode!r} is not defined by ONNX")


_NEAREST: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def rounded(x: np.ndarray, mode: str) -> np.ndarray:
    if mode not in _NEAREST:
        raise ModelError(f"nearest_mode {mode!r} is not defined by ONNX")
    return _NEAREST[mode](x)


def taps_of(
    places: np.ndarray, size: int, scale: float, mode: str, a: float, exclude_outside: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The places that each output reads, (count, taps), clamped to the axis, and their weights."""
    first = np.ceil(places) - 1  # so that the distance from it is in (0, 1]
    reach = math.floor(-(1 if mode == "linear" else 2) / scale) + 1
    offsets = np.arange(reach, 2 - reach)
    index = first[:, None].astype(int) + offsets
    distance = np.abs((offsets - (places - first).astype(np.float64)[:, None]) * scale)
    weights = np.maximum(1 - distance, 0) if mode == "linear" else cubic(distance, a)
    if exclude_outside:
        weights = np.where((index < 0) | (index >= size), 0, weights)
    if exclude_outside or scale < 1:
        weights = weights / weights.sum(1, keepdims=True)
    return np.clip(index, 0, size - 1), weights


def cubic(d: Array, a: float) -> Array:
    """Keys' kernel at the distances d >= 0 (IEEE ASSP 29, 1981)."""
    xp = jnp if isinstance(d, jax.Array) else np
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return xp.where(d <= 1, near, xp.where(d < 2, far, 0))
