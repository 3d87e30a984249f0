"""Channels-last while tracing: the only place that knows which order XLA's CPU backend likes.

ONNX lays activations out as (N, C, *spatial). XLA's CPU backend reaches its convolution library only
with (N, *spatial, C) operands, so convolutions and pools return a `ChannelsLast` value, elementwise
rules pass it on, and rules with an axis get the axis moved. Whoever cannot take it asks for `plain`,
which transposes, once. So a chain of convolutions holds no transpose at all.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jq.graph import Graph, Node
from jq.registry import Array, Layout, lookup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ChannelsLast:
    """An ONNX tensor (N, C, *spatial) held as (N, *spatial, C)."""

    array: Array
    origin: Array | None = None  # the plain tensor that it was moved from

    @classmethod
    def of(cls, plain: Array) -> ChannelsLast:
        """A tensor in ONNX's order, moved once for all its readers."""
        return cls(channels_last(plain), plain)

    @property
    def plain(self) -> Array:
        """The tensor in the order that ONNX defines; not kept, as a body of `lax.scan` may be what asks."""
        return jnp.moveaxis(self.array, -1, 1) if self.origin is None else self.origin


def permuted(x: Array, order: Sequence[int]) -> Array:
    """The array with its axes in this order.

    XLA makes the transpose of a convolution's 8-bit operand a layout and then misses its library (512
    channels: 2000 ms); a gather is opaque to it (7 ms).
    """
    if not isinstance(x, jax.Array) or x.dtype not in (jnp.int8, jnp.uint8) or x.ndim < 3:
        return jnp.transpose(x, order)
    shape = [x.shape[axis] for axis in order]
    steps = [math.prod(x.shape[axis + 1 :]) for axis in order]
    places = (lax.broadcasted_iota(jnp.int32, shape, i) * step for i, step in enumerate(steps))
    return x.reshape(-1)[sum(places)]


def plain(value: Any) -> Any:
    """A traced value in ONNX's order."""
    return value.plain if isinstance(value, ChannelsLast) else value


def channels_last(value: Any) -> Array:
    """A traced value as (N, *spatial, C)."""
    if isinstance(value, ChannelsLast) or np.ndim(value) < 2:
        return value.array if isinstance(value, ChannelsLast) else value
    return permuted(value, (0, *range(2, value.ndim), 1))


def apply(
    layout: Layout, names: Sequence[str], rule: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]
) -> Any:
    """Call a rule with its operands in the layout that it declares, and tag what it returns."""
    if layout == "last":
        first, *rest = arguments
        return _tagged(rule(channels_last(first), *map(plain, rest), **keywords), np.ndim(channels_last(first)))
    ranks = {a.array.ndim for a in arguments if isinstance(a, ChannelsLast)}
    if layout == "plain" or len(ranks) != 1:
        return rule(*map(plain, arguments), **keywords)
    (rank,) = ranks
    if layout == "same":
        moved = [_broadcastable(a, rank) for a in arguments]
        if any(np.ndim(m) > rank for m in moved if m is not None):
            return rule(*map(plain, arguments), **keywords)
        return _tagged(rule(*moved, **keywords), rank)
    if keywords.get("keepdims", 1) == 0 or keywords.get("noop_with_empty_axes", 0):
        return rule(*map(plain, arguments), **keywords)
    arguments = [channels_last(a) if isinstance(a, ChannelsLast) or _rank(a) == rank else a for a in arguments]
    for name in layout:
        if name in keywords:
            keywords[name] = _moved_axes(keywords[name], rank)
        else:
            arguments[names.index(name)] = _moved_axes(arguments[names.index(name)], rank)
    return _tagged(rule(*arguments, **keywords), rank)


def _rank(value: Any) -> int:
    return value.ndim if isinstance(value, (np.ndarray, jax.Array)) else -1


def _moved_axes(axes: Any, rank: int) -> Any:
    """Axes of (N, C, *spatial) as axes of (N, *spatial, C)."""
    axes = np.arange(rank) if axes is None else np.asarray(axes) % rank
    moved = np.where(axes == 0, 0, np.where(axes == 1, rank - 1, axes - 1))
    return int(moved) if moved.ndim == 0 else moved


def _broadcastable(value: Any, rank: int) -> Any:
    """An operand that broadcasts against a channels-last one as it did against the plain one."""
    if isinstance(value, ChannelsLast):
        return value.array
    if value is None or np.size(value) == 1 or np.ndim(value) > rank:
        return value
    value = value.reshape((1,) * (rank - value.ndim) + value.shape)
    return jnp.moveaxis(value, 1, -1) if isinstance(value, jax.Array) else np.moveaxis(value, 1, -1)


def _tagged(results: Any, rank: int) -> Any:
    if isinstance(results, tuple):
        return tuple(_tagged(r, rank) for r in results)
    return ChannelsLast(results) if _rank(results) == rank and rank >= 3 else results


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A weight that the host has permuted to the order in which it is read."""

    array: Array
    order: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in ONNX's order."""
        return tuple(self.array.shape[self.order.index(i)] for i in range(len(self.order)))


def ordered(weight: Array | Packed, order: tuple[int, ...]) -> Array:
    """A weight with its axes in this order: free where `pack` did it on the host."""
    if isinstance(weight, Packed):
        if weight.order == order:
            return weight.array
        return jnp.transpose(weight.array, [weight.order.index(i) for i in order])
    return permuted(weight, order)


def weight_order(rank: int) -> tuple[int, ...]:
    """From ONNX's (O, I, *spatial) to (*spatial, I, O)."""
    return (*range(2, rank), 1, 0)


def read_order(graph: Graph, node: Node, tensor: str, rank: int) -> tuple[int, ...] | None:
    """The order in which a node multiplies its weight; None if this tensor is not that, or lies in it already."""
    entry = lookup(node, graph.opset(node.domain))
    if entry is None:
        return None
    parameter, channel = entry.channels(node.attrs) if entry.channels is not None else (entry.weight, None)
    if parameter is None or entry.operands(node, frozenset({parameter})) != [tensor]:
        return None
    if parameter == entry.weight:
        return weight_order(rank)
    return (1, 0) if rank == 2 and channel == 0 else None


def pack(graph: Graph, params: Mapping[str, Array] | None = None, mesh: Mesh | None = None) -> dict[str, Any]:
    """Return params on the device, or on all of a mesh, with weights in the order that XLA reads.

    The traced function takes packed and plain params alike. Plain ones stay in ONNX's order, which is
    what gradients and exports want; packed ones save transposing every weight at every call.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> fn, params = jq.trace(graph), jq.pack(graph)
    """
    params = graph.params if params is None else params
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    orders: dict[str, set[tuple[int, ...] | None]] = {name: {None} for name in graph.output_names}
    for node in graph.walk():
        for name, reads in collections.Counter(node.reads()).items():
            if name in params:
                order = read_order(graph, node, name, np.ndim(params[name])) if reads == 1 else None
                orders.setdefault(name, set()).add(order)

    def place(name: str, array: Array) -> Any:
        (order, *others) = orders.get(name, {None})
        if order is None or others:
            return jax.device_put(array, where)
        return Packed(jax.device_put(np.ascontiguousarray(np.transpose(array, order)), where), order)

    return {name: place(name, array) for name, array in params.items()}
