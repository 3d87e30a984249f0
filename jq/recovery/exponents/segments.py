"""The loss of many plans of one network, on data, without computing again what they have in common.

The graph is cut into segments of about equal cost. The tensors that a plan yields between segments are kept, as codes;
plans that differ only from a segment on are evaluated from there. They are one stacked pytree, and one program for each
segment takes them all in a call, one after the other: `vmap` would make grouped convolutions of weights that differ,
which XLA's CPU backend takes seven times as long for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.formats import Integer
from jq.arithmetic.losses import kl, relative_mse
from jq.arithmetic.numerics import nearest
from jq.config import QuantConfig
from jq.data.arrays import Sample
from jq.data.sources import in_memory, open_source
from jq.data.stream import Stream, concurrently
from jq.errors import DataError, ModelError
from jq.graph import Graph, Value
from jq.graph.unused import remove_unused
from jq.plan import Plan, QParams
from jq.readings.fake import as_planned
from jq.readings.packing import pack
from jq.readings.patterns import cuts
from jq.readings.tracing import Traced, trace
from jq.recovery.streams import APART, Kept

Array = Any
Loss = Literal["mse", "kl"]
_LOSSES = {"mse": relative_mse, "kl": kl}
State = dict[str, Kept]  # the inputs of a segment, for the samples of a block

_SEGMENTS = 5
_ELEMENT = 100  # multiply-adds that writing and rounding an element costs as much as, about
_BLOCK = 16  # samples that a call evaluates
_FEW = 4  # samples at once: 16 take MobileNetV2 four times as long
_BYTES = 12 << 20  # that their largest tensor may have


@dataclasses.dataclass(frozen=True, eq=False)
class SampleBlock:
    """Some samples, and the outputs of the float network on them."""

    inputs: Mapping[str, np.ndarray]  # [samples, batch, ...]
    targets: Mapping[str, Array]  # outputs that are floats
    valid: np.ndarray  # bool; False for samples that fill the block up


def blocks_of(
    graph: Graph, data: Any, config: QuantConfig, *, apart: int = APART
) -> tuple[list[SampleBlock], list[SampleBlock]]:
    """Return the data in two parts: the second has every `apart`th sample, the first has the others."""
    fn, params = trace(graph), pack(graph)
    read = Stream.of(open_source(data, graph.inputs, seed=config.seed), 1, fn)
    samples = [{k: v[0] for k, v in batch.inputs.items()} for batch in read.alike("a search")]
    if (count := len(samples)) < apart:
        raise DataError(f"a search needs {apart} samples or more, because every {apart}th is held back; got {count}")

    def floats(params: Mapping[str, Any], sample: Sample, _: Array) -> dict[str, Array]:
        return {k: v for k, v in fn(params, sample).items() if jnp.issubdtype(v.dtype, jnp.floating)}

    program = read.each(floats)

    def blocks(chosen: Sequence[Sample]) -> list[SampleBlock]:
        size = -(-len(chosen) // -(-len(chosen) // _BLOCK))  # such that few are there twice
        stream = Stream.of(in_memory(chosen), size, fn)
        results = stream.results(program, params, concurrent=True)
        return [SampleBlock(batch.inputs, jax.tree.map(jnp.asarray, made), batch.valid) for batch, made in results]

    kept, held = blocks([x for i, x in enumerate(samples) if (i + 1) % apart]), blocks(samples[apart - 1 :: apart])
    if not kept[0].targets:
        raise ModelError("no output of the model holds floats, so there is nothing to approximate")
    return kept, held


class PlanLosses(Protocol):
    """The losses of plans from a segment on, here or elsewhere; only it knows what its states are."""

    @property
    def parts(self) -> Sequence[Any]: ...  # noqa: D102
    @property
    def first(self) -> Mapping[str, int]: ...  # noqa: D102  the segment in which a tensor is first read or made

    def begin(self, blocks: Sequence[SampleBlock]) -> list[list[Any]]: ...  # noqa: D102

    def advance(  # noqa: D102
        self, segment: int, plans: Sequence[Plan], parents: Sequence[int], states: Sequence[Sequence[Any]]
    ) -> list[list[Any]]: ...

    def losses(  # noqa: D102
        self, segment: int, plans: Sequence[Plan], parents: Sequence[int], states: Sequence[Sequence[Any]],
        blocks: Sequence[SampleBlock],
    ) -> Iterator[np.ndarray]: ...  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """A network in segments, from any of which on plans like one of them are evaluated."""

    parts: tuple[Part, ...]
    first: Mapping[str, int]  # the segment in which a tensor is first read or made
    params: Mapping[str, Any]

    @classmethod
    def of(cls, graph: Graph, params: Mapping[str, Any], plan: Plan, loss: Loss, sample: Sample) -> Segments:
        """The segments of a graph in the forms that a plan wants, for samples like this one."""
        graph = as_planned(graph, plan)
        sizes = sizes_of(graph, sample)
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

    def begin(self, blocks: Sequence[SampleBlock]) -> list[list[State]]:
        """The inputs of the first segment by block: the data, for one plan as for any."""
        return [[{k: Kept.quantized(jnp.asarray(v), None) for k, v in b.inputs.items()}] for b in blocks]

    def advance(
        self, segment: int, plans: Sequence[Plan], parents: Sequence[int], states: Sequence[Sequence[State]]
    ) -> list[list[State]]:
        """The inputs of the next segment by block and plan; each plan continues from its parent's state."""
        fn = functools.partial(self.parts[segment].advanced, self.params)
        ways = list(zip(plans, parents, strict=True))
        return list(concurrently(lambda state: [fn(plan, state[parent]) for plan, parent in ways], states))

    def losses(
        self, segment: int, plans: Sequence[Plan], parents: Sequence[int], states: Sequence[Sequence[State]],
        blocks: Sequence[SampleBlock],
    ) -> Iterator[np.ndarray]:  # fmt: skip
        """Yield the losses [plans, samples] of each block, evaluated from a segment on."""
        given = _stacked(plans), jnp.asarray(parents, jnp.int32)

        def step(state: Sequence[State], block: SampleBlock) -> np.ndarray:
            losses = self.parts[segment].losses(self.params, *given, _stacked(state), dict(block.targets))
            return np.asarray(losses, np.float64)[:, block.valid]

        return concurrently(step, states, blocks)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The programs of a segment: from it to the next one, and to the outputs."""

    body: Traced
    rest: Traced
    loss: Loss
    at_once: int  # samples
    shifted: frozenset[str]  # tensors whose scales are powers of two

    @functools.cached_property
    def losses(self) -> Callable[..., Array]:
        """The losses [plans, samples] of stacked plans, each after the state of its parent."""

        @jax.jit
        def run(params: Any, plans: Plan, parents: Array, states: State, targets: Any) -> Array:
            def of(given: tuple[Plan, Array]) -> Array:
                state = jax.tree.map(lambda leaf: leaf[given[1]], states)
                return _distance(self.loss, self._evaluated(self.rest, params, given[0], state), targets)

            return jax.lax.map(of, (plans, parents))

        return run

    @functools.cached_property
    def advanced(self) -> Callable[..., State]:
        """The inputs of the next segment."""

        @jax.jit
        def run(params: Any, plan: Plan, state: State) -> State:
            made = self._evaluated(self.body, params, plan, state)
            return {k: Kept.quantized(v, plan.activations.get(k)) for k, v in made.items()}

        return run

    def _evaluated(self, fn: Traced, params: Mapping[str, Any], plan: Plan, state: State) -> dict[str, Array]:
        """The outputs of a function on all samples, a few at a time; weights are rounded once."""
        rounding = Shifts(plan, self.shifted)
        own = {k: rounding.fake_quant(k, v) for k, v in params.items() if k in fn.graph.params}
        rounding = Shifts(dataclasses.replace(plan, weights={}), self.shifted)
        samples = len(next(iter(state.values())).array)
        size = next(n for n in range(min(self.at_once, samples), 0, -1) if samples % n == 0)
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
        """The tensor as its readers get it."""
        if name not in self.shifted or name not in self.plan:
            return self.plan.fake_quant(name, value)
        return layout.mapped(lambda x: _shifted(self.plan[name], jnp.asarray(x)), value)


def is_shift(qparams: QParams) -> bool:
    """Whether a tensor is rounded to integers at one power of two that has an inverse."""
    whole = isinstance(qparams.grid, Integer) and not qparams.dynamic and qparams.coded is None and qparams.axis is None
    return whole and qparams.is_power_of_two and abs(int(qparams.exponent)) < 126


def _shifted(qparams: QParams, x: Array) -> Array:
    assert isinstance(qparams.grid, Integer)
    low, high = qparams.grid.qmin - qparams.zero_point, qparams.grid.qmax - qparams.zero_point
    return jnp.clip(nearest(x * (1 / qparams.scale)), low, high) * qparams.scale


def _distance(loss: Loss, y: Mapping[str, Array], targets: Mapping[str, Array]) -> Array:
    """The loss of each sample, the mean over the outputs."""
    return sum(jax.vmap(_LOSSES[loss])(targets[name], y[name]) for name in targets) / len(targets)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _starts(graph: Graph, sizes: Mapping[str, int]) -> list[tuple[int, tuple[str, ...]]]:
    """The first nodes of segments of about equal cost, and the inputs of each: near the place, where they are smallest."""
    costs = []
    for node in graph.nodes:
        weights = [graph.params[i] for i in node.inputs[1:2] if i in graph.params and graph.params[i].ndim > 1]
        each = _ELEMENT + sum(w.size / max(1, w.shape[0]) for w in weights)
        costs.append(each * sum(sizes.get(o, 0) for o in node.outputs))
    before = np.cumsum([0, *costs]) / max(sum(costs), 1) * _SEGMENTS
    allowed = [(i, tuple(sorted(names))) for i, names in cuts(graph) if i]
    starts = [(0, tuple(v.name for v in graph.inputs))]
    for number in range(1, _SEGMENTS):
        near = [c for c in allowed if abs(before[c[0]] - number) < 0.5 and c[0] > starts[-1][0]]
        if near:
            starts.append(min(near, key=lambda c: (sum(sizes.get(t, 0) for t in c[1]), abs(before[c[0]] - number))))
    return starts


def sizes_of(graph: Graph, sample: Sample) -> dict[str, int]:
    """Bytes of every tensor of a sample."""
    fn = trace(graph, taps=[o for n in graph.nodes for o in n.outputs if o])
    seen = jax.eval_shape(lambda params, inputs: fn(params, inputs)[1], dict(graph.params), dict(sample))
    return {k: v.size * v.dtype.itemsize for k, v in seen.items() if isinstance(v, jax.ShapeDtypeStruct)}


def _part(graph: Graph, start: int, end: int | None, inputs: Iterable[str], outputs: Iterable[str]) -> Graph:
    """Some nodes of a graph as one of its own."""
    declared = {v.name: v for v in graph.inputs}
    ends = {"inputs": tuple(declared.get(i, Value(i)) for i in inputs), "outputs": tuple(map(Value, outputs))}
    return remove_unused(graph.replace(nodes=graph.nodes[start:end], declared={}, **ends))
