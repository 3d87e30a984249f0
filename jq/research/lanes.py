"""Many quantizations of one network in one walk: what they share is computed once.

In a lane one group of tensors is quantized unlike in the base. Up to the first of these tensors the lane is the base
itself, so a tensor has only the lanes that parted from the base before it, and a quantizer adds its group's: n groups
in n places take about n / 2 forward passes. Where a node reads two tensors and one lacks a lane, it reads the base's.

The network is read by segments of a few quantized tensors. In each, the base and the lanes that part in it are computed
together, as one batch; those that parted before are mapped through it one after the other, so that a segment's tensors
stay in the caches: all lanes as one batch took half as long again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jq.arithmetic import layout
from jq.graph import Graph, Node
from jq.ops.table import demanded
from jq.plan import Plan
from jq.readings.walk import Reader, Scope, best_lowering, walk

Array = Any
BASE = -1  # the lane that all others start from
_PLACES = 3  # quantized tensors of a segment, at least
_NEAR = 4  # nodes among which it ends, where least goes on


@dataclasses.dataclass(frozen=True, eq=False)
class Laned:
    """A tensor in several lanes: arrays lead with rows, all samples of one lane before those of the next."""

    rows: Any  # a traced value [lanes * samples, *sample shape]
    lanes: tuple[int, ...]  # groups by number, and the base

    def over(self, lanes: Sequence[int]) -> Any:
        """The rows of these lanes; those of the base, for what has not parted from it yet."""
        if tuple(lanes) == self.lanes:
            return self.rows
        places = [self.lanes.index(i if i in self.lanes else BASE) for i in lanes]
        runs: list[list[int]] = []  # of neighbours, which are one slice
        for place in places:
            if runs and place == runs[-1][-1] + 1:
                runs[-1].append(place)
            else:
                runs.append([place])
        samples = jax.tree.leaves(self.rows)[0].shape[0] // len(self.lanes)
        slices = [slice(run[0] * samples, (run[-1] + 1) * samples) for run in runs]
        return stacked([jax.tree.map(lambda x, s=s: x[s], self.rows) for s in slices])

    def put(self, lanes: Sequence[int], rows: Any) -> Laned:
        """A copy in which these lanes, with their rows, are the last."""
        others = tuple(i for i in self.lanes if i not in lanes)
        return Laned(stacked([self.over(others), rows]), (*others, *lanes))


def stacked(parts: Sequence[Any]) -> Any:
    """Rows one after the other."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Lanes:
    """A graph read in a base and, beside it, in a lane for each group of tensors.

    In the base nothing is quantized, and in a lane its group; or, `inverted`, in the base all of the plan is, and in a
    lane its group is not.
    """

    graph: Graph  # in the forms that the plan wants
    groups: tuple[frozenset[str], ...]
    inverted: bool = False

    def __call__(
        self, params: Mapping[str, Any], plan: Plan, inputs: Mapping[str, Any], known: Mapping[str, Any]
    ) -> dict[str, Array]:
        """The outputs [1 + groups, samples, ...], the base first; inputs lead with samples, those that are `known` do not."""
        static = demanded(self.graph)
        params = {k: jax.tree.map(jnp.asarray, v) for k, v in params.items()}  # none of them is known
        scope: dict[str, Any] = {**self.graph.constants, **params, **known}
        scope |= {k: a for k, a in self.graph.params.items() if k in static}
        rounded = {k: plan.fake_quant(k, scope[k]) for k in plan.weights if k in scope}
        weights = {k: scope[k] for k in rounded} if self.inverted else rounded
        scope |= rounded if self.inverted else {}
        reader = Reader(best_lowering(), demanded(self.graph, steering=True), sys.maxsize)
        samples = len(jax.tree.leaves(dict(inputs))[0])
        alone = _Walk(self, plan, weights, {}, reader, samples)
        for part in segments(self.graph, plan, self.groups):
            here = dataclasses.replace(alone, groups={i: self.groups[i] for i in part.groups})
            scope |= {k: here.quantized(k, Laned(v, (BASE,))) for k, v in inputs.items() if k not in scope}
            scope |= _through(part, scope, here, alone)
        every = (BASE, *range(len(self.groups)))
        values = {v.name: scope[v.name] for v in self.graph.outputs}
        outputs = {k: jax.vmap(layout.plain)(v.over(every)) for k, v in values.items() if isinstance(v, Laned)}
        return {k: v.reshape(len(every), samples, *v.shape[1:]) for k, v in outputs.items()}


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of the walk."""

    nodes: tuple[Node, ...]
    groups: tuple[int, ...]  # that have a tensor in it
    outputs: frozenset[str]  # what is read after it


def segments(graph: Graph, plan: Plan, groups: Sequence[frozenset[str]]) -> list[Segment]:
    """The nodes in parts that end where little goes on; the graph's inputs are in the first."""
    sizes = {k: math.prod(d for d in v.shape or () if isinstance(d, int)) for k, v in graph.values.items()}
    own = [{o for o in n.outputs if o} | {k for k in n.reads() if k in plan.weights} for n in graph.nodes]
    places = [sum(k in plan for k in names) for names in own]
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.reads()}
    last |= dict.fromkeys(graph.output_names, len(graph.nodes))
    live: list[frozenset[str]] = [frozenset()]  # before each node, what it or a later one reads of those before
    for i, node in enumerate(graph.nodes):
        live.append(frozenset(k for k in (*live[-1], *node.outputs) if last.get(k, -1) > i))
    parts, start = [], 0
    while start < len(graph.nodes):
        end = start
        while end < len(graph.nodes) and sum(places[start:end]) < _PLACES:
            end += 1
        near = range(end, min(end + _NEAR, len(graph.nodes)) + 1)
        end = min(near, key=lambda e: sum(sizes.get(k, 0) for k in live[e]))
        inside = frozenset().union(*own[start:end]) | {v.name for v in graph.inputs if not start}
        here = tuple(i for i, group in enumerate(groups) if not inside.isdisjoint(group))
        parts.append(Segment(graph.nodes[start:end], here, live[end]))
        start = end
    return parts


def _through(segment: Segment, scope: Scope, parting: _Walk, alone: _Walk) -> dict[str, Any]:
    """The tensors that later segments read, in the lanes that part here and in those that parted before."""
    here = (BASE, *parting.groups)
    reads = {k for n in segment.nodes for k in n.reads()}
    entering = {k: scope[k] for k in scope.keys() & reads if isinstance(scope[k], Laned)}
    mine = {k: tuple(i for i in v.lanes if i in here) for k, v in entering.items()}
    made = parting.through(segment, {**scope, **{k: Laned(v.over(mine[k]), mine[k]) for k, v in entering.items()}})
    others = tuple(i for i in dict.fromkeys(itertools.chain(*(v.lanes for v in entering.values()))) if i not in here)
    if not others:
        return made

    def lane(rows: Mapping[str, Any]) -> dict[str, Any]:
        made = alone.through(segment, {**scope, **{k: Laned(v, (BASE,)) for k, v in rows.items()}})
        return {k: v.rows for k, v in made.items() if isinstance(v, Laned)}

    entering_rows = {
        k: jax.tree.map(lambda x: x.reshape(len(others), -1, *x.shape[1:]), v.over(others)) for k, v in entering.items()
    }
    for name, rows in _mapped(lane, entering_rows).items():
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
        made[name] = Laned(stacked([made[name].rows, rows]), (*made[name].lanes, *others))
    return made


def _mapped(fn: Callable[[Any], Any], xs: Any) -> Any:
    """The results of a function on each of `xs`, as `lax.map` gives them, in less memory.

    There they begin as zeros, which XLA writes when the program starts, so that those of all segments live at once: five
    times as much in a walk over a detector. Here they begin as a value of `xs`, and so not before it.
    """
    leaves = jax.tree.leaves(xs)
    count, first = len(leaves[0]), leaves[0].ravel()[0]
    like = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], xs))
    made = jax.tree.map(lambda y: jnp.broadcast_to(first.astype(y.dtype), (count, *y.shape)), like)

    def step(i: Array, made: Any) -> Any:
        return jax.tree.map(lambda all, y: all.at[i].set(y), made, fn(jax.tree.map(lambda x: x[i], xs)))

    return lax.fori_loop(0, count, step, made)


@dataclasses.dataclass(frozen=True, eq=False)
class _Walk:
    """Evaluates nodes in the base and in the lanes of some groups."""

    lanes: Lanes
    plan: Plan
    weights: Mapping[str, Any]  # as the lanes of their groups have them
    groups: Mapping[int, frozenset[str]]
    reader: Reader
    samples: int

    def through(self, segment: Segment, scope: Scope) -> dict[str, Any]:
        """The outputs of a segment that are made in it."""
        made = {k for node in segment.nodes for k in node.outputs} & segment.outputs
        return {k: v for k, v in walk(segment.nodes, scope, self.step, self.rounded).items() if k in made}

    def rounded(self, node: Node, scope: Scope) -> Scope:
        """A node's outputs as their readers get them."""
        return {k: self.quantized(k, scope[k]) for k in node.outputs if isinstance(scope.get(k), Laned)}

    def quantized(self, name: str, value: Laned) -> Laned:
        """A tensor as its readers get it, in each lane."""
        if name not in self.plan.activations:
            return value
        rounded = jax.vmap(lambda x: self.plan.fake_quant(name, x))
        here = tuple(i for i, group in self.groups.items() if name in group)
        if self.lanes.inverted:
            others = tuple(i for i in value.lanes if i not in here)
            base = Laned(rounded(value.over(others)), others)
            return base.put(here, value.over(here)) if here else base
        return value.put(here, rounded(value.over(here))) if here else value

    def step(self, node: Node, scope: Scope) -> Scope:
        """A node's outputs. Where it reads weights of some groups, their lanes are computed apart."""
        reads = set(node.reads())
        here = tuple(i for i, group in self.groups.items() if not reads.isdisjoint(group & self.weights.keys()))
        values = {k: scope[k] for k in reads if isinstance(scope.get(k), Laned)}
        widest_first = sorted((v.lanes for v in values.values()), key=len, reverse=True)
        others = tuple(i for i in dict.fromkeys(itertools.chain((BASE,), *widest_first)) if i not in here)
        known: dict[str, Any] = {}
        parts = [self._run(node, scope, {k: v.over(others) for k, v in values.items()}, known)]
        if not values and not here and self.plan.activations.keys().isdisjoint(node.outputs):
            return known | parts[0]
        for i in here:
            own = {k: self.weights[k] for k in reads & self.groups[i] & self.weights.keys()}
            parts.append(self._run(node, {**scope, **own}, {k: v.over((i,)) for k, v in values.items()}, known))
        if not values:  # made of weights alone, the same for all samples
            parts = [jax.tree.map(lambda x: jnp.broadcast_to(x, (self.samples, *x.shape)), part) for part in parts]
        made = {k: Laned(stacked([part[k] for part in parts]), (*others, *here)) for k in parts[0]}
        return known | made

    def _run(self, node: Node, scope: Scope, rows: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        """The node on each row; outputs that depend on no data, such as shapes, are put into `known`."""
        opset = self.lanes.graph.opset(node.domain)

        def one(row: Mapping[str, Any]) -> dict[str, Any]:
            stepped = self.reader.step(node, opset, {**scope, **row})
            made = {k: stepped[k] for k in node.outputs if k in stepped}
            known.update({k: v for k, v in made.items() if not _is_traced(v)})
            return {k: v for k, v in made.items() if _is_traced(v)}

        return jax.vmap(one)(dict(rows)) if rows else one({})


def _is_traced(value: Any) -> bool:
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))
