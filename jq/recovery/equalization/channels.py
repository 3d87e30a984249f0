"""Statistics of the float model's channels, from one streaming pass over the calibration data.

For each channel of each tensor that matters: its range, mean and power, how often it is not zero, and for the input of
a Clip, how far it exceeds the bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jq.arithmetic.layout import channels_last
from jq.config import QuantConfig
from jq.data.sources import open_source
from jq.data.stream import Stream, devices_of
from jq.graph import Graph
from jq.ops.kinds import cuts
from jq.readings.chain import Chain
from jq.readings.packing import pack
from jq.readings.tracing import AnyOrder, trace
from jq.recovery.equalization.groups import Groups

Sums = dict[str, Any]  # arrays by kind
_KINDS = ("over", "beyond", "reach", "total", "squares", "active")
_OF_CLIPS = ("over", "beyond")
_NEAR = 1 << 16  # elements of a tensor that fits the nearer caches
_PIECE = 1024  # elements of a piece, whose sums stay in the nearest one
_TOGETHER = (2, 3)  # pieces that are added up at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Channels:
    """Statistics of the channels of one tensor, each an array [C]."""

    reach: np.ndarray  # largest magnitude; of a Clip's output, without its upper bound
    mean: np.ndarray
    power: np.ndarray  # mean square
    active: np.ndarray  # part of the values that is not zero
    over: np.ndarray  # mean of what exceeds a Clip's bound
    beyond: np.ndarray  # and its mean square
    pixels: int  # values of a channel in one sample

    @property
    def variance(self) -> np.ndarray:
        """Mean square about the mean."""
        return np.maximum(self.power - self.mean**2, 0)

    @property
    def is_finite(self) -> bool:
        """Whether the model overflowed on no value."""
        return all(np.isfinite(v).all() for v in (self.reach, self.mean, self.power))

    @classmethod
    def unknown(cls, count: int) -> Channels:
        """Without data: channels alike, of standard normal values."""
        one, zero = np.ones(count), np.zeros(count)
        return cls(4 * one, zero, one, one, zero, zero, 1)


def measure(
    graph: Graph, groups: Groups, data: Any, config: QuantConfig, mesh: Mesh | None = None
) -> dict[str, Channels]:
    """Return the statistics of all tensors with channels, but for what a Relu or Clip alone reads; on one device or a mesh."""
    wanted = _wanted(graph, groups)
    order = [name for name in (*(v.name for v in graph.inputs), *graph.producer) if name in wanted]
    watcher = _SumWatcher(tuple((name, len(groups.channels[wanted[name][1]]), wanted[name][0]) for name in order))
    source = open_source(data, graph.inputs, seed=config.seed)
    stream = Stream.of(source, config.batch, trace(graph), mesh=mesh)
    chain, merged = Chain.of(graph, watcher, stream), functools.partial(_merged_all, maximum=np.maximum)
    alone = devices_of(stream.mesh) == 1  # several compute at the same time already
    total = stream.total(chain, (pack(graph, mesh=stream.mesh), {}), merged, concurrent=alone)
    own: list[Sums] = []
    for piece, sums in zip(chain.pieces, total, strict=True):
        assert isinstance(piece.watcher, _SumWatcher)
        own += piece.watcher.split(sums)
    return {wanted[name][1]: _finished(sums) for name, sums in zip(order, own, strict=True)}


def _wanted(graph: Graph, groups: Groups) -> dict[str, tuple[float | None, str]]:
    """The tensors to observe, each with the bound of the Clip that reads it, and the tensor that it is observed for."""
    tensors: dict[str, tuple[float | None, str]] = {name: (None, name) for name in groups.channels}
    for node in graph.nodes:  # what is cut at once is never rounded
        if cuts(node) and graph.sole_reader(node.inputs[0]) is node:
            tensors.pop(node.inputs[0], None)
    for node, bound in groups.clips:
        tensors.pop(node.outputs[0], None)
        tensors[node.inputs[0]] = bound, node.outputs[0]
    return tensors


@dataclasses.dataclass(frozen=True)
class _SumWatcher:
    """Sums over samples of tensors, by kind, the tensors' channels behind each other."""

    own: tuple[tuple[str, int, float | None], ...]  # tensors, their channels, and the bound of the Clip that reads them

    lasting = True

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors, in the order of the network."""
        return tuple(name for name, _, _ in self.own)

    def within(self, names: Mapping[str, str]) -> _SumWatcher:
        """The same of some tensors alone, by other names."""
        return _SumWatcher(tuple((names[name], *self._by_tensor[name]) for name in names if name in self._by_tensor))

    def tap(self, tensor: str, argument: Any) -> AnyOrder:
        """The function from a tensor to its sums; from a Clip's input to those of its output, but for the largest value."""
        return AnyOrder(functools.partial(_sums, self._by_tensor[tensor][1]))

    def state(self, seen: Mapping[str, Sums]) -> Sums:
        """The sums of a sample: behind each other, as what merges them is a kernel to compile for each array."""
        own = {kind: [sums[kind] for sums in seen.values() if kind in sums] for kind in (*self._counts, "pixels")}
        return {k: jnp.concatenate(v) for k, v in own.items()} | {"samples": jnp.float32(1)} if seen else {}

    def none(self) -> Sums:
        """The sums of no data."""
        none = {kind: np.zeros(count, np.float32) for kind, count in self._counts.items()}
        return none | {"pixels": np.zeros(len(self.own), np.float32), "samples": np.float32(0)} if self.own else {}

    def merged(self, a: Sums, b: Sums) -> Sums:
        """The sums of both's data."""
        return _merged(a, b)

    def split(self, sums: Sums) -> Iterator[Sums]:
        """Yield the sums of each tensor."""
        at = dict.fromkeys(_KINDS, 0)
        for i, (_, count, bound) in enumerate(self.own):
            kinds = [k for k in _KINDS if bound is not None or k not in _OF_CLIPS]
            yield {k: sums[k][at[k] : at[k] + count] for k in kinds} | {
                "pixels": sums["pixels"][i],
                "samples": sums["samples"],
            }
            at |= {k: at[k] + count for k in kinds}

    @functools.cached_property
    def _by_tensor(self) -> dict[str, tuple[int, float | None]]:
        return {name: (count, bound) for name, count, bound in self.own}

    @property
    def _counts(self) -> dict[str, int]:
        """The channels of all tensors together, by kind."""
        clipped = sum(count for _, count, bound in self.own if bound is not None)
        counts = {k: clipped if k in _OF_CLIPS else sum(count for _, count, _ in self.own) for k in _KINDS}
        return {k: count for k, count in counts.items() if count}


def _sums(bound: float | None, value: Any) -> Sums:
    """The sums of one sample.

    Of a tensor that lies in the nearer caches each is a reduction by XLA's library, which compiles nothing. A larger one is
    read once for all: pieces of some rows are added up elementwise, several at a time so that sums are loaded and stored
    once for them, and reduced last. For each shape that is a kernel for each sum, of 20 ms to compile.
    """
    array = channels_last(value).astype(jnp.float32)
    pixels = jnp.full(1, array.size / array.shape[-1], jnp.float32)
    array = array if array.size else jnp.zeros((1, array.shape[-1]))  # zeros change no sum
    rows = functools.partial(jnp.reshape, shape=(-1, array.shape[-1]))
    if array.size <= _NEAR:
        terms, reach = _library_terms(rows(array), None if bound is None else rows(jnp.clip(array, 0, bound)))
        return {k: v.sum(0) for k, v in terms.items()} | {"reach": reach.max(0), "pixels": pixels}
    x = rows(array)
    together, length = _pieces(*x.shape)
    x = jnp.pad(x, ((0, -len(x) % (together * length)), (0, 0)))

    def step(index: jax.Array, state: tuple[Sums, jax.Array]) -> tuple[Sums, jax.Array]:
        sums, reach = state
        for i in range(together):
            piece = lax.dynamic_slice(x, ((index * together + i) * length, 0), (length, x.shape[1]))
            sums = {k: sums[k] + v for k, v in _terms(bound, piece).items()}
            reach = jnp.maximum(reach, jnp.abs(piece) if bound is None else piece)
        return sums, reach

    none = jax.tree.map(jnp.zeros_like, jax.eval_shape(functools.partial(_terms, bound), x[:length]))
    by_row, most = lax.fori_loop(0, len(x) // (together * length), step, (none, jnp.zeros((length, x.shape[1]))))
    return {k: v.sum(0) for k, v in by_row.items()} | {"reach": most.max(0), "pixels": pixels}


def _pieces(count: int, width: int) -> tuple[int, int]:
    """How many pieces of rows are added up at a time, and the rows of one: numbers that leave no rest, if that can be."""
    together = next((n for n in _TOGETHER if count % n == 0), min(count, _TOGETHER[0]))
    most = max(1, min(_PIECE // width, count // together))
    return together, next((n for n in range(most, 0, -1) if count % (together * n) == 0), most)


def _terms(bound: float | None, x: jax.Array) -> dict[str, jax.Array]:
    """The terms of the sums, elementwise."""
    terms = {}
    if bound is not None:
        over = jnp.maximum(x - bound, 0)
        terms = {"over": over, "beyond": jnp.square(over)}
        x = jnp.clip(x, 0, bound)
    return terms | {"total": x, "squares": jnp.square(x), "active": (x != 0).astype(jnp.float32)}


def _library_terms(x: jax.Array, clipped: jax.Array | None) -> tuple[dict[str, jax.Array], jax.Array]:
    """The same terms, and the magnitude, in the form in which the library reduces them as it computes them.

    It takes products, differences and extremes that nothing else reads: where two sums have a part in common, or both
    compare with a number, that part is a tensor to write and a kernel to compile. So zero is a value less itself.
    """
    if clipped is None:
        terms = {"total": x, "squares": jnp.square(x), "active": jnp.abs(jnp.sign(x))}
        return terms, jnp.maximum(x, -x)
    terms = {
        "over": jnp.maximum(x - clipped, clipped - clipped),
        "beyond": jnp.square(clipped + jnp.minimum(-x, -clipped)),
    }
    terms |= {"total": clipped, "squares": jnp.square(clipped), "active": jnp.sign(clipped)}
    return terms, jnp.maximum(x, clipped)


def _merged(a: Sums, b: Sums, maximum: Callable[..., Any] = jnp.maximum) -> Sums:
    return {k: maximum(a[k], b[k]) if k == "reach" else a[k] + b[k] for k in a}


def _merged_all(a: list[Sums], b: list[Sums], maximum: Callable[..., Any]) -> list[Sums]:
    return [_merged(x, y, maximum) for x, y in zip(a, b, strict=True)]


def _finished(sums: Mapping[str, np.ndarray]) -> Channels:
    pixels, zero = float(sums["pixels"]), np.zeros_like(sums["reach"])
    names = ("total", "squares", "active", "over", "beyond")
    mean, power, active, over, beyond = (sums.get(name, zero) / pixels for name in names)
    return Channels(sums["reach"], mean, power, active, over, beyond, round(pixels / float(sums["samples"])))
