"""The order of axes: which one XLA's CPU backend prefers, and where each of ONNX's axes lies in it.

ONNX lays activations out as (N, C, *spatial). XLA's CPU backend reaches its convolution library only
with (N, *spatial, C) operands, so convolutions and pools return a `ChannelsLast` value, elementwise
rules pass it on, and rules with an axis get the axis moved. Whoever cannot take it asks for `plain`,
which transposes, once. So a chain of convolutions holds no transpose at all. Weights that the host
has permuted are `Packed`. No other module names the two classes: `raw`, `mapped`, `axis_of` and
`arranged` serve those who take a value as it lies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

Array = Any
Layout = Literal["plain", "same", "last"] | tuple[str, ...]  # what a rule does with channels-last operands


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ChannelsLast:
    """An ONNX tensor (N, C, *spatial) held as (N, *spatial, C)."""

    array: Array
    origin: Array | None = None  # the plain tensor that it was moved from

    @property
    def plain(self) -> Array:
        """The tensor in the order that ONNX defines; not kept, as a body of `lax.scan` may be what asks."""
        return channels_first(self.array) if self.origin is None else self.origin


export.register_pytree_node_serialization(
    ChannelsLast, serialized_name="jq.ChannelsLast", serialize_auxdata=lambda _: b"", deserialize_auxdata=lambda _: ()
)


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


def raw(value: Any) -> Any:
    """The array of a traced value or of a weight, in whatever order it lies."""
    return value.array if isinstance(value, (ChannelsLast, Packed)) else value


def going_on(value: Any) -> Any:
    """A traced value as one array that lies as it does, for another program."""
    return ChannelsLast(value.array) if isinstance(value, ChannelsLast) else value


def is_last(value: Any) -> bool:
    """Whether a traced value lies with its channels last."""
    return isinstance(value, ChannelsLast)


def mapped(fn: Callable[[Array], Array], value: Any) -> Any:
    """The value with `fn` of its array, which keeps the axes; `axis_of` tells `fn` where one of them lies."""
    if isinstance(value, ChannelsLast):
        return ChannelsLast(fn(value.array))
    return dataclasses.replace(value, array=fn(value.array)) if isinstance(value, Packed) else fn(value)


def axis_of(value: Any, axis: int) -> int:
    """Where an axis of ONNX's lies in the array of a value.

    >>> axis_of(ChannelsLast(jnp.zeros((8, 5, 5, 3))), 1), axis_of(jnp.zeros((8, 3, 5, 5)), 1)
    (3, 1)
    """
    if isinstance(value, ChannelsLast):
        return int(_moved_axes(axis, value.array.ndim))
    return value.order.index(axis % len(value.order)) if isinstance(value, Packed) else axis


def arranged(x: Array, value: Any) -> Array:
    """An array in ONNX's order with its axes as those of a value lie."""
    if isinstance(value, Packed):
        return jnp.transpose(x, value.order)
    return channels_last(x) if isinstance(value, ChannelsLast) else x


def moved(x: Array) -> ChannelsLast:
    """A tensor in ONNX's order with its channels last: moved once for all its readers."""
    return ChannelsLast(_operand(x), x)


def channels_last(x: Any, axis: int = 1) -> Array:
    """An array with its channels, which ONNX has at this axis behind those of the samples, last.

    >>> channels_last(np.zeros((8, 3, 5, 5))).shape, channels_last(np.zeros((2, 8, 3, 5, 5)), 2).shape
    ((8, 5, 5, 3), (2, 8, 5, 5, 3))
    """
    if isinstance(x, ChannelsLast):
        return x.array
    return x if np.ndim(x) < axis + 2 else _namespace(x).moveaxis(x, axis, -1)


def channels_first(x: Array, axis: int = 1) -> Array:
    """An array with its channels, which are last, at this axis, where ONNX has them: inverse of `channels_last`."""
    return x if np.ndim(x) < axis + 2 else _namespace(x).moveaxis(x, -1, axis)


def rows(x: Array, axis: int | None) -> Array:
    """[rows, *rest]: a row for each index of an axis, or one for all without.

    >>> rows(np.zeros((3, 4, 5)), 1).shape, rows(np.zeros((3, 4, 5)), None).shape
    ((4, 3, 5), (1, 3, 4, 5))
    """
    return x[None] if axis is None or not np.ndim(x) else _namespace(x).moveaxis(x, axis, 0)


def along(vector: Array, rank: int, axis: int) -> Array:
    """A vector, one value for each index of an axis, as an array of this rank that broadcasts.

    >>> along(np.arange(3), 4, 1).shape
    (1, 3, 1, 1)
    """
    return vector.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def _namespace(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _operand(value: Any) -> Array:
    """A traced value as the operand (N, *spatial, C) of a convolution."""
    if isinstance(value, ChannelsLast) or np.ndim(value) < 2:
        return raw(value)
    return permuted(value, (0, *range(2, value.ndim), 1))


def apply(
    layout: Layout, names: Sequence[str], rule: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]
) -> Any:
    """Call a rule with its operands in the layout that it declares, and tag what it returns."""
    if layout == "last":
        first, *rest = arguments
        operand = _operand(first)
        return _tagged(rule(operand, *map(plain, rest), **keywords), np.ndim(operand))
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
    arguments = [_operand(a) if isinstance(a, ChannelsLast) or _rank(a) == rank else a for a in arguments]
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
    return channels_last(value)


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


def packed(weight: np.ndarray, order: tuple[int, ...], device: Any = None) -> Packed:
    """A weight on a device, permuted by the host."""
    return Packed(jax.device_put(np.ascontiguousarray(np.transpose(weight, order)), device), order)


def like_packed(weight: Any, order: tuple[int, ...], device: Any = None) -> Packed:
    """The shape and type of what `packed` gives."""
    shape, kind = tuple(weight.shape[i] for i in order), jax.dtypes.canonicalize_dtype(weight.dtype)
    return Packed(jax.ShapeDtypeStruct(shape, kind, sharding=device), order)


def unpacked(weight: Array | Packed) -> Array:
    """A weight in ONNX's order; any other value unchanged."""
    return ordered(weight, tuple(range(len(weight.order)))) if isinstance(weight, Packed) else weight


def ordered(weight: Array | Packed, order: tuple[int, ...]) -> Array:
    """A weight with its axes in this order: free where `packed` did it on the host."""
    if isinstance(weight, Packed):
        if weight.order == order:
            return weight.array
        return jnp.transpose(weight.array, [weight.order.index(i) for i in order])
    return permuted(weight, order)


def weight_order(rank: int) -> tuple[int, ...]:
    """From ONNX's (O, I, *spatial) to (*spatial, I, O)."""
    return (*range(2, rank), 1, 0)
