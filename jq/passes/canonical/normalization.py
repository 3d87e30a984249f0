"""Normalizations in any spelling: what divides a tensor by its spread over some axes.

Probing such a region with numbers tells all about it: zeros give the bias, large values the scale, small ones the epsilon,
and ones tell whether the mean is taken off. Others then show whether it is the form.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jq.graph import Node
from jq.passes.canonical.forms import CanonicalForm, Names, Written
from jq.passes.canonical.regions import REDUCING, Region, is_close, once

_ROOTS = frozenset({"Sqrt", "Pow", "ReduceL2"})
_ELEMENTS = 1 << 20  # of the largest probe
_LARGE, _SMALL = 2.0**20, 2.0**-30  # beside the one an epsilon is nothing, and the other is nothing beside it
_GUARD = 1e-7  # an epsilon that only keeps from dividing by zero: whether it is added or a bound is of no consequence
_LEAST = 1e-20  # where a bound on the root is so small that it does not show
Write = Callable[[Names], Written]


@dataclasses.dataclass(frozen=True, eq=False)
class Standardized:
    """scale * (x - mean) / sqrt(variance + epsilon) + bias over some axes, or the same without the mean."""

    axes: tuple[int, ...]
    dims: tuple[int, ...]  # of a probe: true along `axes`, and where the scale and the bias change
    centred: bool
    epsilon: float
    scale: np.ndarray  # float32, of the tensor's rank
    bias: np.ndarray

    def along(self, shape: Sequence[int | None], axes: tuple[int, ...]) -> tuple[np.ndarray, ...] | None:
        """Scale and bias as arrays over these axes of a tensor; None if they change along others, or its dims are not known."""
        known = [n for a in axes if (n := shape[a]) is not None]
        inside = all(n == 1 or a in axes for array in (self.scale, self.bias) for a, n in enumerate(array.shape))
        if len(known) < len(axes) or not inside:
            return None
        rest = tuple(a for a in range(len(shape)) if a not in axes)
        return tuple(np.broadcast_to(a.squeeze(rest), known).copy() for a in (self.scale, self.bias))


@once
def standardized(region: Region) -> Standardized | None:
    """The normalization that a region computes, if it is one."""
    if region.operators.isdisjoint(_ROOTS) or not (dims := probed(region)) or not (axes := reduced_axes(region)):
        return None
    wave = _wave(dims, axes)
    seen = [y for x in (0 * wave, 1 + 0 * wave, _LARGE * wave, _SMALL * wave) if (y := region(x)) is not None]
    if len(seen) < 4 or not np.isfinite(seen).all():
        return None
    bias, ones, large, small = seen
    centred = is_close(ones, bias)
    scale = (large - bias) / _normal(wave, axes, centred, 0.0)
    at = np.unravel_index(np.abs(scale).argmax(), dims)
    spread = _SMALL * (wave - centred * wave.mean(axes, keepdims=True))
    with np.errstate(all="ignore"):
        factor = (small - bias)[at] / (scale * spread)[at]
        variance = np.broadcast_to(np.square(spread).mean(axes, keepdims=True), dims)[at]
        epsilon = float(np.float32(1 / factor**2 - variance))
    if not -_LEAST < epsilon < 1:
        return None
    epsilon = max(epsilon, _LEAST)
    scale, bias = _least(scale), _least(bias)
    for size in (1 / 64 if epsilon < _GUARD else 4 * math.sqrt(epsilon), 1.0, 30.0):
        probe = size * (wave * np.cos(7 * wave) + 0.3)
        if not is_close(region(probe), scale * _normal(probe, axes, centred, epsilon) + bias):
            return None
    return Standardized(axes, dims, centred, epsilon, scale, bias)


def reduced_axes(region: Region) -> tuple[int, ...]:
    """The axes that all reductions in a region are over; none if they differ."""
    rank, over = len(region.shape or ()), set[tuple[int, ...]]()
    for node in region.nodes:
        if node.op_type in REDUCING:
            given = region.graph.arrays.get(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("axes")
            axes = np.arange(rank) if given is None else np.ravel(given)
            if (
                axes.dtype.kind != "i"
                or np.any(axes < -rank)
                or np.any(axes >= rank)
                or len({*(axes % rank)}) < axes.size
            ):
                return ()
            over.add(tuple(sorted((axes % rank).tolist())))
    return over.pop() if len(over) == 1 else ()


def probed(region: Region) -> tuple[int, ...]:
    """The dims of a probe: small where constants do not lie along an axis, nor the region normalizes over it."""
    if not (shape := region.shape):
        return ()
    held = [(len(shape) - a.ndim + i, n) for a in region.constants.values() if a.dtype.kind == "f"
            for i, n in enumerate(a.shape) if n > 1]  # fmt: skip
    if any(not 0 <= axis < len(shape) or shape[axis] != n for axis, n in held):
        return ()
    involved = {axis for axis, _ in held} | set(reduced_axes(region))
    dims = tuple((5 if n is None else n) if a in involved else 2 for a, n in enumerate(shape))
    enough = math.prod(dims[a] for a in reduced_axes(region)) > 2
    return dims if enough and math.prod(dims) <= _ELEMENTS else ()


def _wave(dims: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Numbers that alternate along the axes, none of them near their mean there."""
    over = tuple(dims[a] for a in axes)
    count = np.arange(math.prod(over))
    values = np.where(count % 2, -1, 1) * (1 + 0.5 * (count * 0.618 % 1))
    others = tuple(a for a in range(len(dims)) if a not in axes)
    rest = tuple(dims[a] for a in others)
    rows = 1 + 0.1 * (np.arange(math.prod(rest)) % 7)
    return (rows[:, None] * values).reshape(rest + over).transpose(np.argsort(others + axes))


def _normal(x: np.ndarray, axes: tuple[int, ...], centred: bool, epsilon: float) -> np.ndarray:
    spread = x - centred * x.mean(axes, keepdims=True)
    return np.asarray(spread / np.sqrt(np.square(spread).mean(axes, keepdims=True) + epsilon))


def _least(array: np.ndarray) -> np.ndarray:
    """An array as float32, with one element along each axis where it does not change."""
    for axis in range(array.ndim):
        first = array.take([0], axis)
        if np.allclose(array, first, rtol=1e-9, atol=1e-12):
            array = first
    return array.astype(np.float32)


# --- The operators ---


def _layer_norm(region: Region) -> Write | None:
    norm = standardized(region)
    return _over_last_axes(region, norm, "LayerNormalization") if norm and norm.centred else None


def _rms_norm(region: Region) -> Write | None:
    norm = standardized(region)
    if norm is None or norm.centred or norm.bias.any():
        return None
    return _over_last_axes(region, norm, "RMSNormalization")


def _lp_norm(region: Region) -> Write | None:
    """LpNormalization: over the root of the sum of squares, with an epsilon that is no more than a guard."""
    norm = standardized(region)
    if norm is None or norm.centred or norm.bias.any() or norm.scale.size > 1 or len(norm.axes) > 1:
        return None
    count = (region.shape or ())[norm.axes[0]]
    if (
        count is None
        or norm.epsilon * count > _GUARD**2
        or not math.isclose(norm.scale.item() ** 2 * count, 1, rel_tol=1e-5)
    ):
        return None
    node = Node(
        "LpNormalization", (region.source,), region.end.outputs, {"axis": norm.axes[0], "p": 2}, region.end.name
    )
    return lambda name: ([node], {})


def _over_last_axes(region: Region, norm: Standardized, op_type: str) -> Write | None:
    """The operator over the last axes; over the channels of an image, between Transposes."""
    shape = region.shape or ()
    channels_first = norm.axes == (1,) and len(shape) > 2
    order = (0, *range(2, len(shape)), 1) if channels_first else tuple(range(len(shape)))
    if norm.axes != order[-len(norm.axes) :] or (held := norm.along(shape, norm.axes)) is None:
        return None
    attrs = {"axis": -len(norm.axes), "epsilon": norm.epsilon}
    if not channels_first:
        return _written(region, op_type, attrs, held)

    def written(name: Names) -> Written:
        last, normalized = name("channels_last"), name("normalized")
        (node,), arrays = _written(region, op_type, attrs, held)(name)
        before = Node("Transpose", (region.source,), (last,), {"perm": order})
        back = (0, len(shape) - 1, *range(1, len(shape) - 1))
        after = Node("Transpose", (normalized,), node.outputs, {"perm": back})
        return [before, node.replace(inputs=(last, *node.inputs[1:]), outputs=(normalized,)), after], arrays

    return written


def _instance_norm(region: Region) -> Write | None:
    """InstanceNormalization: over all positions of each channel."""
    if (norm := standardized(region)) is None:
        return None
    shape = region.shape or ()
    if not norm.centred or len(shape) < 3 or norm.axes != tuple(range(2, len(shape))):
        return None
    before = region.graph.producer.get(region.source)
    grouped = before is not None and before.op_type == "Reshape"  # channels of an image in groups, but of tokens
    if len(shape) == 3 and norm.scale.shape[1] == norm.bias.shape[1] == 1 and not grouped:
        return None
    held = norm.along(shape, (1,))
    return None if held is None else _written(region, "InstanceNormalization", {"epsilon": norm.epsilon}, held)


def _written(region: Region, op_type: str, attrs: Mapping[str, Any], held: tuple[np.ndarray, ...]) -> Write:
    """One node, with a scale and, except for RMSNormalization, a bias."""

    def written(name: Names) -> Written:
        parts = ("scale",) if op_type == "RMSNormalization" else ("scale", "bias")
        arrays = {name(part): array for part, array in zip(parts, held, strict=False)}
        return [Node(op_type, (region.source, *arrays), region.end.outputs, attrs, region.end.name)], arrays

    return written


NORMALIZATIONS: Mapping[str, CanonicalForm] = MappingProxyType(
    {
        "instance_norm": CanonicalForm(1, _instance_norm),
        "layer_norm": CanonicalForm(17, _layer_norm),
        "lp_norm": CanonicalForm(1, _lp_norm),
        "rms_norm": CanonicalForm(23, _rms_norm),
    }
)
