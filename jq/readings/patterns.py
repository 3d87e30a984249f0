"""Parts of a network whatever its tensors are called: parts of like structure are one to the compiler."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jq.graph import Graph, Node, Value
from jq.graph.edit import rename
from jq.ops.table import demanded, lookup
from jq.util.digest import digest


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A part of a network regardless of its tensors' names, with the shapes of its weights: the key of a kept program."""

    key: str
    graph: Graph = dataclasses.field(compare=False)

    @functools.cached_property
    def is_lasting(self) -> bool:
        """Whether all of the rules of its nodes are this package's: of those of others no digest is known."""
        entries = (lookup(n, self.graph.opset(n.domain)) for n in self.graph.walk())
        return all(e is None or e.rule.__module__.startswith("jq.") for e in entries)


def pattern_of(
    graph: Graph, nodes: Sequence[Node], inputs: Iterable[Value], outputs: Iterable[str], names: Mapping[str, str]
) -> Pattern:
    """Return some consecutive nodes of a graph as a pattern, with other names for their tensors."""
    part = rename(graph.replace(nodes=tuple(n.replace(name="") for n in nodes)), names)
    part = part.replace(
        inputs=tuple(dataclasses.replace(v, name=names[v.name]) for v in inputs),
        outputs=tuple(Value(names[o]) for o in outputs),
        declared={},
        metadata={},
        name="part",
    ).with_arrays({inner: graph.arrays[k] for k, inner in names.items() if k in graph.arrays})
    known = demanded(part) | part.constants.keys()
    # Compiled in: structure and known values. Weights are arguments.
    arrays = {k: a if k in known else (a.dtype, a.shape) for k, a in part.arrays.items()}
    key = digest(part.nodes, part.inputs, part.outputs, arrays, graph.opsets)
    weights = {k: a for k, a in part.params.items() if k not in known and a.size > 1}
    shapes = {k: np.broadcast_to(np.zeros((), a.dtype), a.shape) for k, a in weights.items()}
    return Pattern(key, part.replace(params={**part.params, **shapes}))


def cuts(graph: Graph) -> Iterator[tuple[int, frozenset[str]]]:
    """Where the graph may be cut, before the node of each index, with the tensors that go on there."""
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.reads()}
    steering, values = demanded(graph), graph.values
    live = {v.name for v in graph.inputs}
    for i, node in enumerate(graph.nodes):
        live = {t for t in live if last.get(t, -1) >= i}
        if live.isdisjoint(steering) and all(_is_array(values[t]) for t in live if t in values):
            yield i, frozenset(live)
        live.update(o for o in node.outputs if o)


def _is_array(value: Value) -> bool:
    """Whether a value is an array of numbers, such as an activation, a mask or indices."""
    return not value.containers and (value.dtype is None or value.dtype.kind in "biuf")


def sample_bytes(value: Value) -> int:
    """Bytes of one sample; its free dims count as one."""
    return 4 * math.prod(d for d in value.shape or () if isinstance(d, int))
