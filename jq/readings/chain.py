"""A pass over data as a chain of programs, one for each piece of a network.

Blocks that a network repeats are pieces of one structure, and one program, whatever their weights and the names of their
tensors; what lies between them is cut only where it is long, as the compiler takes longer for each node of a large network.
So a chain compiles in a time that grows with what is different in a network. Its programs are kept on disk: see
`util.programs`.

A pass watches tensors. What it makes of them merges over samples, and a `Watcher` says how.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jq.arithmetic.layout import going_on
from jq.data.arrays import Sample
from jq.data.stream import Program, Stream, divided, folding
from jq.errors import Error
from jq.graph import Graph, Node, Value
from jq.ops.table import lookup
from jq.readings.patterns import Pattern, cuts, pattern_of, sample_bytes
from jq.readings.tracing import AnyOrder, Tap, tapped, trace
from jq.util import programs
from jq.util.digest import digest
from jq.util.memory import trim

State = Any  # a tree of arrays

_NODES = (4, 24)  # of a block: at least, and at most where the network can be cut
# Times that a block is there, from which on it is a program of its own. XLA makes kernels that are alike once for a program,
# so that cutting what hardly repeats costs time: MobileNetV2 in 17 programs takes twice as long to compile as in one.
_OFTEN = 4
_LONGEST = 100  # nodes of a piece between such blocks, about
_NEAR = 4  # times as many bytes as least may go on to the next piece, where that makes a block shorter


class Watcher(Protocol):
    """States of the tensors that a pass watches, and how they merge. It has a digest: see `jq.util.digest`."""

    @property
    def tensors(self) -> Sequence[str]: ...  # noqa: D102  in the order of the network
    @property
    def lasting(self) -> bool: ...  # noqa: D102  whether all of its code is this package's

    def within(self, names: Mapping[str, str]) -> Watcher:
        """The same of those tensors alone that have another name here, by that name and in this order."""
        ...

    def tap(self, tensor: str, argument: Any) -> Tap:
        """The function of a tensor, given its own argument."""
        ...

    def state(self, seen: Mapping[str, Any]) -> State:
        """The state of one sample, of what was made of its tensors."""
        ...

    def none(self) -> State:
        """The state of no data."""
        ...

    def merged(self, a: State, b: State) -> State:
        """The state of a's data followed by b's."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive nodes of a network, what they read from before, and what is read of them after."""

    pattern: Pattern
    names: Mapping[str, str]  # of tensors, in the pattern
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    watched: tuple[str, ...]  # what its nodes make, and inputs of the network that no piece before reads
    watcher: Watcher  # of these, by the pattern's names

    @classmethod
    def of(cls, graph: Graph, start: int, end: int, watcher: Watcher) -> Piece:
        """The piece from one node of a graph to before another."""
        nodes = graph.nodes[start:end]
        made = dict.fromkeys(o for n in nodes for o in n.outputs if o)
        read = dict.fromkeys(r for n in nodes for r in n.reads() if r not in made)
        within, unread = set(nodes), [v.name for v in graph.inputs if not start and v.name not in graph.consumers]
        begun = [v.name for v in graph.inputs if v.name in read and graph.consumers[v.name][0] in within] + unread
        inputs = [r for r in dict.fromkeys((*read, *begun)) if r not in graph.arrays]
        outputs = [o for o in made if not within.issuperset(graph.consumers.get(o, ()))]
        names = {t: f"t{i}" for i, t in enumerate(dict.fromkeys((*read, *begun, *made)))}
        # Inputs without types: the arrays that come have them.
        pattern = pattern_of(graph, nodes, map(Value, inputs), outputs, names)
        own = watcher.within({t: names[t] for t in (*begun, *made)})
        there = frozenset(own.tensors)
        watched = tuple(t for t in (*begun, *made) if names[t] in there)
        return cls(pattern, names, tuple(inputs), tuple(outputs), watched, own)

    def inside(self, values: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
        """The values of some tensors, as far as they have any, by the pattern's names."""
        return {self.names[t]: values[t] for t in tensors if t in values}


def pieces(graph: Graph, watcher: Watcher) -> Iterator[Piece]:
    """Yield the pieces of a graph, in order, all nodes in one of them."""
    spans = list(itertools.pairwise([0, *_ends(graph), len(graph.nodes)]))
    small = [Piece.of(graph, *span, watcher) for span in spans]
    often = Counter(piece.pattern.key for piece in small)
    start = 0
    for (begin, end), piece, after in zip(spans, small, [*small[1:], None], strict=True):
        if often[piece.pattern.key] >= _OFTEN:
            yield piece
        elif after is not None and often[after.pattern.key] < _OFTEN and end - start < _LONGEST:
            continue
        else:
            yield piece if begin == start else Piece.of(graph, start, end, watcher)
        start = end


def _ends(graph: Graph) -> Iterator[int]:
    """Where blocks end: behind some nodes, at the first of the cuts that the fewest tensors and few bytes go through.

    So those of a network that repeats a block begin and end where it does. An activation stays with its layer.
    """
    values, start, at = graph.values, 0, 0
    places = [  # where arrays of floats go on: others are no arguments of programs
        (i, len(live), sum(sample_bytes(values[t]) for t in live))
        for i, live in cuts(graph)
        if i <= len(graph.nodes) - _NODES[0]
        and all(t in values and values[t].dtype == np.float32 and not values[t].containers for t in live)
        and not _is_activation(graph, graph.nodes[i])
    ]
    while True:
        at = next((k for k in range(at, len(places)) if places[k][0] >= start + _NODES[0]), len(places))
        near = [place for place in places[at : at + _NODES[1]] if place[0] <= start + _NODES[1]] or places[at : at + 1]
        if not near:
            return
        fewest = min(count for _, count, _ in near)
        least = min(size for _, count, size in near if count == fewest)
        start = next(i for i, count, size in near if count == fewest and size <= _NEAR * least)
        yield start


def _is_activation(graph: Graph, node: Node) -> bool:
    entry = lookup(node, graph.opset(node.domain))
    return entry is not None and entry.cuts


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """The programs of a pass: a function of (weights, the watched tensors' arguments), of inputs and of their numbers.

    It returns the state of each piece.
    """

    graph: Graph
    pieces: tuple[Piece, ...]
    mesh: Mesh
    known: Mapping[str, np.ndarray]  # inputs that decide shapes
    options: dict[str, Any] | None  # for XLA
    programs: dict[Any, list[Program]] = dataclasses.field(default_factory=dict)  # by shapes of inputs

    @classmethod
    def of(cls, graph: Graph, watcher: Watcher, stream: Stream) -> Chain:
        """The chain for samples like those of a stream."""
        trace(graph)  # says which operators have no rule
        # The widest vectors make what is all arithmetic, as error tables are, a fifth faster and nothing slower.
        on_cpu = stream.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_cpu_prefer_vector_width": 512} if on_cpu else None
        return cls(graph, tuple(pieces(graph, watcher)), stream.mesh, stream.known, options)

    def __call__(
        self, arguments: tuple[Mapping[str, Any], Mapping[str, Any]], inputs: Sample, numbers: Any
    ) -> list[State]:
        """The states of the samples, which may still be under way."""
        states, values = [], dict(inputs)
        for i, (piece, program) in enumerate(zip(self.pieces, self.compiled(arguments, inputs, numbers), strict=True)):
            state, made = program(*_given(piece, arguments, values), numbers)
            states.append(state)
            values |= {name: made[piece.names[name]] for name in piece.outputs}
            values = {name: value for name, value in values.items() if self._last.get(name, -1) > i}
        return states

    def compiled(self, arguments: Any, inputs: Sample, numbers: Any) -> list[Program]:
        """The program of each piece for these arguments or the like of them, which are compiled once for their shapes."""
        key = tuple(v.shape for v in inputs.values())
        if key not in self.programs:
            self.programs[key] = self._compiled(arguments, inputs, numbers)
        return self.programs[key]

    @functools.cached_property
    def _last(self) -> dict[str, int]:
        """The last piece that reads each tensor."""
        return {name: i for i, piece in enumerate(self.pieces) for name in piece.inputs}

    def _compiled(self, arguments: Any, inputs: Sample, numbers: Any) -> list[Program]:
        """The program of each piece; pieces alike share one."""
        known: dict[str, tuple[Program, Any]] = {}
        made, values, split = [], dict[str, Any](inputs), divided(self.mesh)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # a compilation takes a hundred megabytes: no more than help
            for piece in self.pieces:
                given = *_given(piece, arguments, values), numbers
                key = digest(piece.pattern.key, piece.watcher, self._fixed(piece), programs.kinds(given))
                if key not in known:
                    try:
                        known[key] = self._program(piece, key, given, pool)
                    except Error:
                        self._explain(arguments, inputs)
                        raise
                program, (_, on) = known[key]
                made.append(program)
                on = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=split), on)
                values |= {name: on[piece.names[name]] for name in piece.outputs}
        trim()  # a program in the making takes more than all that it will compute on
        return made

    def _program(self, piece: Piece, key: str, given: Any, pool: ThreadPoolExecutor) -> tuple[Program, Any]:
        pattern, watcher, fixed = piece.pattern, piece.watcher, self._fixed(piece)
        outputs = [piece.names[name] for name in piece.outputs]

        def one(arguments: Any, sample: Sample) -> tuple[State, dict[str, Any]]:
            return _evaluated(pattern, watcher, outputs, arguments, {**sample, **fixed})

        function = folding(one, watcher.merged, self.mesh, init=lambda _: watcher.none())
        lasting = watcher.lasting and pattern.is_lasting
        return programs.compiled(key if lasting else None, function, given, pool, self.options)

    def _fixed(self, piece: Piece) -> dict[str, np.ndarray]:
        return piece.inside(self.known, piece.inputs)

    def _explain(self, arguments: Any, inputs: Sample) -> None:
        """Raise what a piece raises as the whole network does, whose tensors have the names that the user knows."""
        fn = trace(self.graph)
        head = {k: jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for k, v in inputs.items()}
        jax.eval_shape(lambda params, sample: fn(params, {**sample, **self.known}), arguments[0], head)


def _given(piece: Piece, arguments: Any, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a piece's program, and its inputs; those that decide shapes are no arguments."""
    params, own = arguments
    return (piece.inside(params, piece.names), piece.inside(own, piece.watched)), piece.inside(values, piece.inputs)


def _evaluated(
    pattern: Pattern, watcher: Watcher, outputs: Sequence[str], arguments: Any, sample: Mapping[str, Any]
) -> tuple[State, dict[str, Any]]:
    """The state of what is watched of one sample, and the tensors that go on, as they lie."""
    params, own = arguments

    def tap(tensor: str) -> AnyOrder:
        observe = watcher.tap(tensor, own.get(tensor)) if tensor in watcher.tensors else None
        return AnyOrder(lambda v: (tapped(observe, v) if observe else None, going_on(v) if tensor in outputs else None))

    taps = {t: tap(t) for t in dict.fromkeys((*watcher.tensors, *outputs))}
    seen = trace(pattern.graph, outputs=(), taps=taps)(params, sample)[1] if taps else {}
    return watcher.state({t: seen[t][0] for t in watcher.tensors}), {t: seen[t][1] for t in outputs}
