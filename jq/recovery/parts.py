"""A network in parts, each of which is tuned by itself: layers, or blocks between cuts that one tensor crosses.

Units of one pattern share their compiled programs: one residual block serves all of its shape.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jq.graph import Graph, Node, Value
from jq.ops.linear import linear_layer
from jq.plan import Plan
from jq.plan.placement import absorbed
from jq.readings.patterns import Pattern, cuts, pattern_of, sample_bytes
from jq.util import programs
from jq.util.digest import digest
from jq.util.programs import Executable

Kind = Literal["layer", "block", "network"]
_programs = [8]  # of a function, that are kept compiled; the last counts
_LAYERS = 3  # of a block, where structure alone would make it smaller


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """A part of a network: consecutive nodes, the tensors that they read, and those that later nodes read."""

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
        return _label(self.layers or self.nodes)

    @property
    def layer(self) -> int | None:
        """Which node is the unit's one layer, if it has just one."""
        return self.nodes.index(self.layers[0]) if len(self.layers) == 1 else None

    def inside(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the network's values that the pattern has, by its names."""
        return {self.names[k]: v for k, v in values.items() if k in self.names}

    def outside(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the pattern by the network's names."""
        own = {v: k for k, v in self.names.items()}
        return {own[k]: v for k, v in values.items()}

    def plan(self, plan: Plan) -> Plan:
        """The plan of the pattern. Its inputs arrive quantized, except for those of the network."""
        made = {o for n in self.nodes for o in n.outputs}
        return Plan(
            activations=self.inside({k: q for k, q in plan.activations.items() if k in made}),
            weights=self.inside(plan.weights),
            nodes=frozenset(self.names[o] for o in plan.nodes if o in made),
            forms=plan.forms,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Rehearsal:
    """Who compiles the programs of a walk that is not run, and what failed."""

    pool: ThreadPoolExecutor
    failures: list[BaseException] = dataclasses.field(default_factory=list)


_rehearsal: contextvars.ContextVar[_Rehearsal | None] = contextvars.ContextVar("rehearsal", default=None)


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """In this thread programs are compiled for their arguments, by others, and not run: they return zeros.

    A compilation that failed is raised at the end.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a compilation takes a hundred megabytes: no more than help
        rehearsal = _Rehearsal(pool)
        token = _rehearsal.set(rehearsal)
        try:
            yield
        finally:
            _rehearsal.reset(token)
    if rehearsal.failures:
        raise rehearsal.failures[0]


@contextlib.contextmanager
def keeping_programs(most: int = 1024) -> Iterator[None]:
    """Keep programs compiled from one walk to the next, at most `most` of each function."""
    _programs.append(most)
    try:
        yield
    finally:
        _programs.pop()


_Coming: TypeAlias = dict[Any, tuple[Executable, Any]]  # by what arguments are like: a program, and what it gives


def program(statics: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for the first of its arguments, of which the first is a pattern, and keep it on disk.

    Programs of the last few patterns are kept in memory: each holds some megabytes, and like units are near each other.
    """

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        made: dict[tuple[Any, ...], _Coming] = {}  # the last used at the end
        lock = threading.Lock()  # whoever rehearses and whoever runs may come to a program at the same time

        def coming(static: tuple[Any, ...]) -> _Coming:
            made[static] = entry = made.pop(static, {})
            while len(made) > _programs[-1]:
                del made[next(iter(made))]
            return entry

        @functools.wraps(fn)
        def call(*arguments: Any) -> Any:
            static, given = arguments[:statics], arguments[statics:]
            leaves, structure = jax.tree.flatten(given)
            if any(isinstance(v, jax.core.Tracer) for v in leaves):
                return fn(*arguments)
            rehearsal, key = _rehearsal.get(), (structure, tuple(map(programs.kind, leaves)))

            def compiled() -> tuple[Executable, Any]:
                pool = None if rehearsal is None else rehearsal.pool
                return programs.compiled(_key(fn, static), functools.partial(fn, *static), given, pool, None)

            with lock:
                known = coming(static)
                if key not in known:
                    known[key] = compiled()
                run, like = known[key]
            if rehearsal is None:
                if run.compiled.exception() is not None:  # it failed ahead; here it says what is wrong
                    run, _ = known[key] = compiled()
                return run(*given)
            run.compiled.add_done_callback(lambda done: rehearsal.failures.extend(filter(None, [done.exception()])))
            return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), like)

        return call

    return wrap


def _key(fn: Callable[..., Any], static: Sequence[Any]) -> str | None:
    """The name of a program on disk; None for one of code that is not this package's."""
    pattern = static[0] if static else None
    if pattern is not None and not pattern.is_lasting:
        return None
    return digest(f"{fn.__module__}.{fn.__qualname__}", static) if fn.__module__.startswith("jq.") else None


def units(graph: Graph, plan: Plan, kind: Kind) -> list[Unit]:
    """Return the parts of a graph, in order, all nodes in one of them."""
    layers = [n for n in graph.nodes if is_layer(graph, plan, n)]
    return [_unit(graph, part, layers) for part in _divided(graph, layers, kind)]


def blocks(graph: Graph, plan: Plan) -> dict[str, str]:
    """Return the label of each node's block, by the node's label; blocks are the units that finetuning tunes.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, jq.zoo.calibration_set()[0][:4]))
    >>> blocks(graph, plan) == {n.label: u.label for u in units(graph, plan, "block") for n in u.nodes}
    True
    """
    layers = [n for n in graph.nodes if is_layer(graph, plan, n)]
    chosen = set(layers)
    parts = _divided(graph, layers, "block")
    named = [(part, _label([n for n in part if n in chosen] or part)) for part in parts]
    return {node.label: label for part, label in named for node in part}


def _label(nodes: Sequence[Node]) -> str:
    """The labels of the first and the last of some nodes."""
    return nodes[0].label if len(nodes) == 1 else f"{nodes[0].label} .. {nodes[-1].label}"


def _divided(graph: Graph, layers: Sequence[Node], kind: Kind) -> list[tuple[Node, ...]]:
    """The nodes of each part, in order."""
    ends = [len(graph.nodes)]
    if kind != "network":
        allowed = dict(cuts(graph))
        if kind == "layer":
            chosen = set(layers)
            ends = [i for i, n in enumerate(graph.nodes) if n in chosen and i in allowed and i] + ends
        else:
            raw = absorbed(graph).keys()  # where an operator goes on in its activation
            behind = _behind(graph, layers)  # a mask or an index that passes by is no part of a residual
            alone = [i for i, live in allowed.items() if i and len(live & behind) == 1 and live.isdisjoint(raw)]
            ends = _blocks(graph, alone, set(layers)) + ends
    return [graph.nodes[a:b] for a, b in itertools.pairwise([0, *ends]) if a < b]


def is_layer(graph: Graph, plan: Plan, node: Node) -> bool:
    """Whether a node has a weight with channels that a plan quantizes and no other node reads."""
    layer = linear_layer(graph, node)
    return layer is not None and layer.weight in plan.weights and graph.sole_reader(layer.weight) is not None


def _behind(graph: Graph, layers: Iterable[Node]) -> set[str]:
    """The tensors that a layer has part in."""
    chosen, behind = set(layers), set[str]()
    for node in graph.nodes:
        if node in chosen or not behind.isdisjoint(node.reads()):
            behind.update(o for o in node.outputs if o)
    return behind


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
    # The NPU's forms, as of pools, depend on shapes.
    pattern = pattern_of(graph, nodes, [graph.values.get(i, Value(i)) for i in inputs], outputs, names)
    return Unit(
        tuple(nodes),
        tuple(n for n in nodes if n in layers),
        tuple(inputs),
        tuple(outputs),
        pattern,
        names,
        max((sample_bytes(graph.values[t]) for t in (*inputs, *made) if t in graph.values), default=1),
    )
