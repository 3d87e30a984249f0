"""Channels-last while tracing: the only place that knows which order XLA's CPU backend likes.

ONNX lays activations out as (N, C, *spatial). XLA's CPU backend reaches its convolution library only
with (N, *spatial, C) operands, so convolutions and pools return a `ChannelsLast` value, elementwise
rules pass it on, and rules with an axis get the axis moved. Whoever cannot take it asks for `plain`,
which transposes, once. So a chain of convolutions holds no transpose at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.graph import Graph
from jq.registry import Array, Layout


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelsLast:
    """An ONNX tensor (N, C, *spatial) held as (N, *spatial, C)."""

    array: Array
    origin: Array | None = None  # the plain tensor that it was moved from

    @classmethod
    def of(cls, plain: Array) -> ChannelsLast:
        """A tensor in ONNX's order, moved once for all its readers."""
        return cls(permuted(plain, (0, *range(2, plain.ndim), 1)), plain)

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
    return value.array if isinstance(value, ChannelsLast) else permuted(value, (0, *range(2, np.ndim(value)), 1))


def apply(layout: Layout, names: Sequence[str], rule: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
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
    """A weight that the host has permuted to the order its convolution reads."""

    array: Array
    order: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in ONNX's order."""
        return tuple(self.array.shape[self.order.index(i)] for i in range(len(self.order)))


_WEIGHT = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}  # which input of a convolution


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


# Above about this many bytes per intermediate tensor, a CPU spends its time on cache misses and on
# the page faults of freshly mapped buffers: MobileNetV2 takes 70 ms at once, 45 in chunks of two.
_CHUNK_BYTES = 12 << 20


def chunked(fn: Callable[[Any, Any], Any], size: int | None = None) -> Callable[[Any, Any], Any]:
    """Return `fn(params, inputs)` evaluated over chunks of the batch, for a model that treats images apart.

    Every input and output leads with the batch. Without `size`, a chunk is as large as keeps the
    largest intermediate tensor in the caches of a CPU; a last short chunk runs by itself.

    >>> import jq, jax
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> forward = jax.jit(jq.chunked(jq.trace(graph)))
    >>> images, labels = jq.zoo.calibration_set()
    >>> forward(jq.pack(graph), {"input": images})["logits"].shape
    (512, 10)
    """

    def mapped(params: Any, inputs: Any) -> Any:
        batch = jax.tree.leaves(inputs)[0].shape[0]
        chunk = min(batch, size or _chunk_size(fn, params, inputs))
        if chunk >= batch:
            return fn(params, inputs)
        whole = batch // chunk
        stacked = jax.tree.map(lambda x: x[: whole * chunk].reshape(whole, chunk, *x.shape[1:]), inputs)
        outputs = jax.lax.map(lambda x: fn(params, x), stacked)
        outputs = jax.tree.map(lambda y: y.reshape(whole * chunk, *y.shape[2:]), outputs)
        if whole * chunk == batch:
            return outputs
        rest = fn(params, jax.tree.map(lambda x: x[whole * chunk :], inputs))
        return jax.tree.map(lambda y, z: jnp.concatenate([y, z]), outputs, rest)

    return mapped


def _chunk_size(fn: Callable[[Any, Any], Any], params: Any, inputs: Any) -> int:
    """The chunk whose largest intermediate fits `_CHUNK_BYTES`, made a divisor of the batch if one is near."""
    batch = jax.tree.leaves(inputs)[0].shape[0]
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), inputs)
    program = jax.make_jaxpr(fn)(jax.tree.map(jax.typeof, params), one)
    largest = max((v.aval.size * v.aval.dtype.itemsize for e in program.eqns for v in e.outvars), default=1)
    fitting = max(1, min(batch, _CHUNK_BYTES // max(1, largest)))
    return next((c for c in range(fitting, fitting // 2, -1) if batch % c == 0), fitting)


def pack(graph: Graph, params: Mapping[str, Array] | None = None) -> dict[str, Any]:
    """Return params on the device, with convolution weights in the order that XLA's library reads.

    The traced function takes packed and plain params alike. Plain ones stay in ONNX's order, which is
    what gradients and exports want; packed ones save transposing every weight at every call.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> fn, params = jq.trace(graph), jq.pack(graph)
    """
    params = graph.params if params is None else params
    weights = {n.inputs[_WEIGHT[n.op_type]] for n in graph.nodes if n.op_type in _WEIGHT}
    elsewhere = {i for n in graph.walk() for k, i in enumerate(n.reads()) if k != _WEIGHT.get(n.op_type)}

    def place(name: str, array: Array) -> Any:
        if name in weights and name not in elsewhere | graph.output_names:
            order = weight_order(np.ndim(array))
            return Packed(jax.device_put(np.ascontiguousarray(np.transpose(array, order))), order)
        return jax.device_put(array)

    return {name: place(name, array) for name, array in params.items()}
