"""The loss of many plans of one network, on data, without computing again what they have in common.

The graph is cut into segments of about equal cost. What a plan makes of the data up to a segment is kept, as codes;
plans that differ only from there on are evaluated from there on. They are one stacked pytree, and one program for each
segment takes them all in a call, one after the other: `vmap` would make grouped convolutions of weights that differ,
which XLA's CPU backend takes seven times as long for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.formats import Integer
from jq.arithmetic.losses import kl, relative_mse
from jq.arithmetic.numerics import nearest
from jq.config import QuantConfig
from jq.data.sources import Feed, open_source
from jq.errors import DataError, ModelError
from jq.graph import Graph, Value
from jq.graph.unused import remove_unused
from jq.plan import Plan, QParams
from jq.readings.fake import as_planned
from jq.readings.packing import pack
from jq.readings.tracing import Traced, trace
from jq.recovery.parts import cuts
from jq.recovery.streams import Kept

Array = Any
Loss = Literal["mse", "kl"]
_LOSSES = {"mse": relative_mse, "kl": kl}
State = dict[str, Kept]  # what flows into a segment, of the feeds of a block

_SEGMENTS = 5
_ELEMENT = 100  # multiply-adds that writing and rounding an element costs as much as, about
_BLOCK = 16  # feeds that a call evaluates
_FEW = 4  # feeds at once: 16 take MobileNetV2 four times as long
_BYTES = 12 << 20  # that their largest tensor may have
_AT_ONCE = 2  # blocks: XLA's CPU backend leaves cores idle on one


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Some feeds, and what the float network makes of them."""

    inputs: Mapping[str, np.ndarray]  # [feeds, batch, ...]
    targets: Mapping[str, Array]  # outputs that are floats
    valid: np.ndarray  # of feeds, which are not there twice


def blocks_of(graph: Graph, data: Any, config: QuantConfig, *, apart: int) -> tuple[list[Block], list[Block]]:
    """Return the data in two parts, the second of them every so manyth feed."""
    source = open_source(data, graph.inputs, seed=config.seed)
    feeds = list(source.feeds())
    if any({k: a.shape for k, a in f.items()} != {k: a.shape for k, a in source.head.items()} for f in feeds):
        raise DataError("a search needs samples of one shape")
    if len(feeds) < apart:
        raise DataError(f"{len(feeds)} samples: a search needs {apart} or more, of which every {apart}th is held back")
    fn, params = trace(graph), pack(graph)

    @jax.jit
    def floats(inputs: Feed, params: Mapping[str, Any]) -> dict[str, Array]:
        made = jax.lax.map(lambda x: fn(params, x), inputs)
        return {k: v for k, v in made.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def blocks(chosen: Sequence[Feed]) -> list[Block]:
        size = -(-len(chosen) // -(-len(chosen) // _BLOCK))  # such that few are there twice
        parts = [list(chosen[i : i + size]) for i in range(0, len(chosen), size)]
        valid = [np.arange(size) < len(part) for part in parts]
        parts = [part + part[-1:] * (size - len(part)) for part in parts]
        inputs = [{k: np.stack([f[k] for f in part]) for k in part[0]} for part in parts]
        targets = two_by_two(functools.partial(floats, params=params), inputs)
        return [Block(*found) for found in zip(inputs, targets, valid, strict=True)]

    kept, held = blocks([f for i, f in enumerate(feeds) if (i + 1) % apart]), blocks(feeds[apart - 1 :: apart])
    if not kept[0].targets:
        raise ModelError("no output of the model is of floats, so there is nothing to come near to")
    return kept, held


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """A network in segments, from any of which on plans like one of them are evaluated."""

    parts: tuple[Part, ...]
    first: Mapping[str, int]  # the segment in which a tensor is first read or made
    params: Mapping[str, Any]

    @classmethod
    def of(cls, graph: Graph, params: Mapping[str, Any], plan: Plan, loss: Loss, feed: Feed) -> Segments:
        """The segments of a graph in the forms that a plan wants, for feeds like this one."""
        graph = as_planned(graph, plan)
        sizes = _sizes(graph, feed)
        shifted = frozenset(t for t in plan if is_shift(plan[t]))
        starts = [*_starts(graph, sizes), (len(graph.nodes), tuple(graph.output_names))]
        parts, first = [], dict.fromkeys((v.name for v in graph.inputs), 0)
        for i, ((start, inputs), (end, outputs)) in enumerate(itertools.pairwise(starts)):
            nodes = graph.nodes[start:]
            largest = max((sizes.get(o, 1) for n in nodes for o in n.outputs), default=1)
            body = _part(graph, start, end, inputs, outputs)
            rest = _part(graph, start, None, inputs, graph.output_names)
            parts.append(Part(trace(body), trace(rest), loss, max(1, min(_FEW, _BYTES // largest)), shifted))
            first = {name: i for n in graph.nodes[start:end] for name in (*n.reads(), *n.outputs)} | first
        return cls(tuple(parts), first, pack(graph, {**graph.params, **params}))

    def begin(self, blocks: Sequence[Block]) -> list[list[State]]:
        """What flows into the first segment: the data of each block, of one plan as of any."""
        return [[{k: Kept.quantized(jnp.asarray(v), None) for k, v in b.inputs.items()}] for b in blocks]

    def advance(
        self, segment: int, plans: Sequence[Plan], parents: Sequence[int], states: Sequence[Sequence[State]]
    ) -> list[list[State]]:
        """What flows into the next segment, by block and plan; each plan goes on from the state that is its parent's."""
        fn = functools.partial(self.parts[segment].advanced, self.params)
        ways = list(zip(plans, parents, strict=True))
        return list(two_by_two(lambda state: [fn(plan, state[parent]) for plan, parent in ways], states))

    def losses(
        self, segment: int, plans: Sequence[Plan], parents: Sequence[int], states: Sequence[Sequence[State]],
        blocks: Sequence[Block],
    ) -> Iterator[np.ndarray]:  # fmt: skip
        """Yield the losses [plans, feeds] of each block, evaluated from a segment on."""
        given = _stacked(plans), jnp.asarray(parents, jnp.int32)

        def step(state: Sequence[State], block: Block) -> np.ndarray:
            found = self.parts[segment].losses(self.params, *given, _stacked(state), dict(block.targets))
            return np.asarray(found, np.float64)[:, block.valid]

        return two_by_two(step, states, blocks)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The programs of a segment: from it to the next one, and to the outputs."""

    body: Traced
    rest: Traced
    loss: Loss
    at_once: int  # feeds
    shifted: frozenset[str]  # tensors whose scales are powers of two

    @functools.cached_property
    def losses(self) -> Callable[..., Array]:
        """Of stacked plans, each after the state of its parent: [plans, feeds]."""

        @jax.jit
        def run(params: Any, plans: Plan, parents: Array, states: State, targets: Any) -> Array:
            def of(given: tuple[Plan, Array]) -> Array:
                state = jax.tree.map(lambda leaf: leaf[given[1]], states)
                return _distance(self.loss, self._evaluated(self.rest, params, given[0], state), targets)

            return jax.lax.map(of, (plans, parents))

        return run

    @functools.cached_property
    def advanced(self) -> Callable[..., State]:
        """What flows into the next segment."""

        @jax.jit
        def run(params: Any, plan: Plan, state: State) -> State:
            made = self._evaluated(self.body, params, plan, state)
            return {k: Kept.quantized(v, plan.activations.get(k)) for k, v in made.items()}

        return run

    def _evaluated(self, fn: Traced, params: Mapping[str, Any], plan: Plan, state: State) -> dict[str, Array]:
        """What a function makes of all feeds, a few at a time; weights are rounded once."""
        rounding = Shifts(plan, self.shifted)
        own = {k: rounding.fake_quant(k, v) for k, v in params.items() if k in fn.graph.params}
        rounding = Shifts(dataclasses.replace(plan, weights={}), self.shifted)
        feeds = len(next(iter(state.values())).array)
        size = next(n for n in range(min(self.at_once, feeds), 0, -1) if feeds % n == 0)
        arrays = {k: v.array.reshape(-1, size, *v.array.shape[1:]) for k, v in state.items()}

        def few(arrays: Mapping[str, Array]) -> dict[str, Array]:
            values = {k: dataclasses.replace(v, array=arrays[k]).value for k, v in state.items()}
            return jax.vmap(lambda x: fn.quantized(own, rounding, x))(values)

        return {k: v.reshape(-1, *v.shape[2:]) for k, v in jax.lax.map(few, arrays).items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Shifts:
    """A plan that multiplies by inverses of powers of two, where it may, instead of dividing: the same codes, and what
    XLA compiles takes half the time to compile, too."""

    plan: Plan
    shifted: frozenset[str]

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.plan

    def fake_quant(self, name: str, value: Any) -> Any:
        """What a tensor's readers get."""
        if name not in self.shifted or name not in self.plan:
            return self.plan.fake_quant(name, value)
        return layout.mapped(lambda x: _shifted(self.plan[name], jnp.asarray(x)), value)


def is_shift(found: QParams) -> bool:
    """Whether a tensor is rounded to integers at one power of two that has an inverse."""
    whole = isinstance(found.grid, Integer) and not found.dynamic and found.coded is None and found.axis is None
    return whole and found.is_power_of_two and abs(int(found.exponent)) < 126


def _shifted(found: QParams, x: Array) -> Array:
    assert isinstance(found.grid, Integer)
    low, high = found.grid.qmin - found.zero_point, found.grid.qmax - found.zero_point
    return jnp.clip(nearest(x * (1 / found.scale)), low, high) * found.scale


def two_by_two(step: Callable[..., Any], *given: Iterable[Any]) -> Iterator[Any]:
    """A step of each of some things, in order, two at once, and little further than they are asked for."""
    first, *waiting = zip(*given, strict=True)
    yield step(*first)  # compiles
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for start in range(0, len(waiting), _AT_ONCE):
            yield from pool.map(lambda one: jax.block_until_ready(step(*one)), waiting[start : start + _AT_ONCE])


def _distance(loss: Loss, y: Mapping[str, Array], targets: Mapping[str, Array]) -> Array:
    """The loss of each sample, the mean over the outputs."""
    return sum(jax.vmap(_LOSSES[loss])(targets[name], y[name]) for name in targets) / len(targets)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _starts(graph: Graph, sizes: Mapping[str, int]) -> list[tuple[int, tuple[str, ...]]]:
    """Where segments of about equal cost begin, and what flows into each: near the place, where the least does."""
    costs = []
    for node in graph.nodes:
        weights = [graph.params[i] for i in node.inputs[1:2] if i in graph.params and graph.params[i].ndim > 1]
        each = _ELEMENT + sum(w.size / max(1, w.shape[0]) for w in weights)
        costs.append(each * sum(sizes.get(o, 0) for o in node.outputs))
    before = np.cumsum([0, *costs]) / max(sum(costs), 1) * _SEGMENTS
    allowed = [(i, tuple(sorted(names))) for i, names in cuts(graph) if i]
    found = [(0, tuple(v.name for v in graph.inputs))]
    for number in range(1, _SEGMENTS):
        near = [c for c in allowed if abs(before[c[0]] - number) < 0.5 and c[0] > found[-1][0]]
        if near:
            found.append(min(near, key=lambda c: (sum(sizes.get(t, 0) for t in c[1]), abs(before[c[0]] - number))))
    return found


def _sizes(graph: Graph, feed: Feed) -> dict[str, int]:
    """Bytes of every tensor of a feed."""
    fn = trace(graph, taps=[o for n in graph.nodes for o in n.outputs if o])
    seen = jax.eval_shape(lambda params, inputs: fn(params, inputs)[1], dict(graph.params), dict(feed))
    return {k: v.size * v.dtype.itemsize for k, v in seen.items() if isinstance(v, jax.ShapeDtypeStruct)}


def _part(graph: Graph, start: int, end: int | None, inputs: Iterable[str], outputs: Iterable[str]) -> Graph:
    """Some nodes of a graph as one of its own."""
    declared = {v.name: v for v in graph.inputs}
    ends = {"inputs": tuple(declared.get(i, Value(i)) for i in inputs), "outputs": tuple(map(Value, outputs))}
    return remove_unused(graph.replace(nodes=graph.nodes[start:end], declared={}, **ends))
