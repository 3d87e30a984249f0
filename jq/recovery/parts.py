"""A network in parts, each of which is tuned by itself: layers, or blocks between cuts that one tensor crosses.

Units of like structure are one to the compiler: a `Pattern` names tensors by their order, so that what is compiled
for one residual block serves all of its shape.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jq.graph import Graph, Node, Value
from jq.graph.edit import rename
from jq.ops.linear import linear_layer
from jq.ops.table import demanded
from jq.plan import Plan
from jq.plan.placement import absorbed
from jq.recovery.means import activation
from jq.util.digest import digest

Kind = Literal["layer", "block", "network"]
_programs = [8]  # of a function, that are kept compiled; the last counts
_LAYERS = 3  # of a block, where structure alone would make it smaller


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A part of a network whatever its tensors are called; of its weights it has the shapes, as programs are kept."""

    key: str
    graph: Graph = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """A part of a network: consecutive nodes, what they read from before, and what is read of them after."""

    nodes: tuple[Node, ...]
    layers: tuple[Node, ...]  # the nodes with weights that a plan quantizes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pattern: Pattern
    names: Mapping[str, str]  # of tensors, in the pattern
    sample_bytes: int  # of its largest tensor, for one sample

    @property
    def label(self) -> str:
        """How messages call it."""
        named = self.layers or self.nodes
        return named[0].label if len(named) == 1 else f"{named[0].label} .. {named[-1].label}"

    @property
    def layer(self) -> int | None:
        """Which node is the unit's one layer, if it has just one."""
        return self.nodes.index(self.layers[0]) if len(self.layers) == 1 else None

    @functools.cached_property
    def watched(self) -> int | None:
        """The layer, if it goes on in an activation, after which its means are not what its form says."""
        graph, layer = self.pattern.graph, self.layer
        return layer if layer is not None and activation(graph, graph.nodes[layer]).nodes else None

    def inside(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the network's values that the pattern has, by its names."""
        return {self.names[k]: v for k, v in values.items() if k in self.names}

    def outside(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the pattern by the network's names."""
        own = {v: k for k, v in self.names.items()}
        return {own[k]: v for k, v in values.items()}

    def plan(self, plan: Plan) -> Plan:
        """The plan of the pattern. Its inputs come quantized, but for those of the network."""
        made = {o for n in self.nodes for o in n.outputs}
        return Plan(
            activations=self.inside({k: q for k, q in plan.activations.items() if k in made}),
            weights=self.inside(plan.weights),
            nodes=frozenset(self.names[o] for o in plan.nodes if o in made),
            forms=plan.forms,
        )


_compiler: contextvars.ContextVar[Callable[[Any], Future[Any]] | None] = contextvars.ContextVar(
    "compiler", default=None
)


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """In this thread programs are compiled for their arguments, by others, and not run: they return zeros.

    A compilation that failed is raised at the end.
    """
    failures: list[BaseException] = []

    def compiled(lowered: Any) -> Future[Any]:
        future = pool.submit(lowered.compile)
        future.add_done_callback(lambda done: failures.extend(filter(None, [done.exception()])))
        return future

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a compilation takes a hundred megabytes: no more than help
        token = _compiler.set(compiled)
        try:
            yield
        finally:
            _compiler.reset(token)
    if failures:
        raise failures[0]


@contextlib.contextmanager
def keeping_programs(most: int = 1024) -> Iterator[None]:
    """Keep programs compiled from one walk to the next, at most `most` of each function."""
    _programs.append(most)
    try:
        yield
    finally:
        _programs.pop()


_Coming: TypeAlias = dict[Any, tuple[Future[Any], Any]]  # by what arguments are like: a compilation, and what it gives


def program(statics: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for the first of its arguments, of which the first is a pattern.

    Programs of the last few patterns are kept: each holds some megabytes, and like units are near each other.
    """

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        made: dict[tuple[Any, ...], tuple[Any, _Coming]] = {}  # the last used at the end
        lock = threading.Lock()

        def compiled(*static: Any) -> tuple[Any, _Coming]:
            with lock:
                made[static] = entry = made.pop(static, None) or (jax.jit(functools.partial(fn, *static)), {})
                while len(made) > _programs[-1]:
                    del made[next(iter(made))]
                return entry

        @functools.wraps(fn)
        def call(*arguments: Any) -> Any:
            (run, coming), given = compiled(*arguments[:statics]), arguments[statics:]
            if compiler := _compiler.get():
                leaves, structure = jax.tree.flatten(given)
                key = structure, tuple(map(jax.typeof, leaves))
                if key not in coming:
                    lowered = run.lower(*given)
                    coming[key] = compiler(lowered), lowered.out_info
                return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), coming[key][1])
            wait([future for future, _ in tuple(coming.values())])
            return run(*given)

        return call

    return wrap


def units(graph: Graph, plan: Plan, kind: Kind) -> list[Unit]:
    """Return the parts of a graph, in order, all nodes in one of them."""
    layers = [n for n in graph.nodes if is_layer(graph, plan, n)]
    ends = [len(graph.nodes)]
    if kind != "network":
        allowed = dict(cuts(graph))
        if kind == "layer":
            chosen = set(layers)
            ends = [i for i, n in enumerate(graph.nodes) if n in chosen and i in allowed and i] + ends
        else:
            raw = absorbed(graph).keys()  # where an operator goes on in its activation
            alone = [i for i, live in allowed.items() if i and len(live) == 1 and live.isdisjoint(raw)]
            ends = _blocks(graph, alone, set(layers)) + ends
    parts = (graph.nodes[a:b] for a, b in itertools.pairwise([0, *ends]))
    return [_unit(graph, part, layers) for part in parts if part]


def is_layer(graph: Graph, plan: Plan, node: Node) -> bool:
    """Whether a node has a weight with channels that a plan quantizes and no other node reads."""
    layer = linear_layer(graph, node)
    return layer is not None and layer.weight in plan.weights and graph.sole_reader(layer.weight) is not None


def cuts(graph: Graph) -> Iterator[tuple[int, frozenset[str]]]:
    """Where the graph may be cut, before the node of each index, with the tensors that go on there."""
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.reads()}
    steering, values = demanded(graph), graph.values
    live = {v.name for v in graph.inputs}
    for i, node in enumerate(graph.nodes):
        live = {t for t in live if last.get(t, -1) >= i}
        types = (values[t].dtype if t in values else None for t in live)
        if live.isdisjoint(steering) and all(d in (None, np.float32) for d in types):
            yield i, frozenset(live)
        live.update(o for o in node.outputs if o)


def _blocks(graph: Graph, cuts: Sequence[int], layers: Set[Node]) -> list[int]:
    """Those of the cuts that end a block: parts of a chain are taken together up to some layers."""
    ends, count = [], 0
    for start, end in itertools.pairwise([0, *cuts, len(graph.nodes)]):
        here = sum(n in layers for n in graph.nodes[start:end])
        if count and count + here > _LAYERS:
            ends.append(start)
            count = 0
        count += here
    return ends


def _unit(graph: Graph, nodes: Sequence[Node], layers: Sequence[Node]) -> Unit:
    made = dict.fromkeys(o for n in nodes for o in n.outputs if o)
    read = dict.fromkeys(r for n in nodes for r in n.reads() if r not in made)
    inputs = [r for r in read if r not in graph.arrays]
    within = set(nodes)
    outputs = [o for o in made if o in graph.output_names or not within.issuperset(graph.consumers.get(o, ()))]
    names = {t: f"t{i}" for i, t in enumerate((*read, *made))}
    return Unit(
        tuple(nodes),
        tuple(n for n in nodes if n in layers),
        tuple(inputs),
        tuple(outputs),
        _pattern(graph, nodes, inputs, outputs, names),
        names,
        max((_bytes(graph.values[t]) for t in (*inputs, *made) if t in graph.values), default=1),
    )


def _bytes(value: Value) -> int:
    """Bytes of one sample; its free dims count as one."""
    return 4 * math.prod(d for d in value.shape or () if isinstance(d, int))


def _pattern(
    graph: Graph, nodes: Sequence[Node], inputs: Iterable[str], outputs: Iterable[str], names: Mapping[str, str]
) -> Pattern:
    part = rename(graph.replace(nodes=tuple(n.replace(name="") for n in nodes)), names)
    part = part.replace(
        # The NPU's forms, as of pools, depend on shapes.
        inputs=tuple(dataclasses.replace(graph.values.get(i, Value(i)), name=names[i]) for i in inputs),
        outputs=tuple(Value(names[o]) for o in outputs),
        declared={},
        metadata={},
        name="part",
    ).with_arrays({names[k]: a for k, a in graph.arrays.items() if k in names})
    known = demanded(part) | part.constants.keys()
    # What is compiled in: structure and known values. Weights are arguments.
    arrays = {k: a if k in known else (a.dtype, a.shape) for k, a in part.arrays.items()}
    key = digest(part.nodes, part.inputs, part.outputs, arrays, graph.opsets)
    weights = {k: a for k, a in part.params.items() if k not in known and a.size > 1}
    shapes = {k: np.broadcast_to(np.zeros((), a.dtype), a.shape) for k, a in weights.items()}
    return Pattern(key, part.replace(params={**part.params, **shapes}))
