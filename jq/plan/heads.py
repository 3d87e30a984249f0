"""Heads of detectors: the nodes that decode boxes and scores from the outputs of the last layers, recognised by structure.

A single scale for boxes of up to 640 pixels and scores of at most 1 would erase the scores, and a distribution over
distances, a grid or an exponential needs more than 8 bits. So a head stays in float. It begins right behind the last
layers, whose outputs are quantized one by one.

The tail of a graph is the nodes from which no layer is reached, where a layer is an operator with a learned weight:
decoding multiplies by constants too. A connected part of the tail is a head if it

    joins maps of several layers whose positions have become rows, like the candidates of several scales;
    joins values of different functions, one of which saturates, like that of scores;
    joins rows of four saturated values with others, or has both as outputs: boxes in units of the image, and scores; or
    suppresses all but the best of overlapping boxes.

The joined values come from results of layers, and none is a softmax distribution or an average by attention.
Tails of classifiers, segmentation, recognizers and encoders do none of these.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jq.graph import Graph, Node
from jq.graph.model import Dim
from jq.ops.kinds import (
    adds,
    averages,
    is_cast,
    is_concat,
    is_product,
    is_softmax,
    recurs,
    reshapes,
    saturates,
    suppresses,
)
from jq.ops.linear import linear_layer
from jq.ops.table import lookup

_BOX = 4  # numbers
_PEEK = 64  # elements of a weight that mostly tell


@dataclasses.dataclass(frozen=True)
class Head:
    """The nodes of a head, in topological order, and the tensors of the body that they read."""

    nodes: tuple[Node, ...]
    entries: tuple[str, ...]

    @property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The labels of the first nodes and of the last, as `exclude_subgraphs` takes them."""
        made = {o for n in self.nodes for o in n.outputs}
        read = {i for n in self.nodes for i in n.reads()}
        first = tuple(n.label for n in self.nodes if made.isdisjoint(n.reads()))
        return first, tuple(n.label for n in self.nodes if read.isdisjoint(n.outputs))


def heads(graph: Graph) -> tuple[Head, ...]:
    """Return the heads of a detector; none of any other network."""
    rows = _rows(graph, graph.output_names)
    parts = _connected(_tail(graph))
    return tuple(Head(part, _entries(graph, part)) for part in parts if any(_signs(graph, part, rows)))


def _entries(graph: Graph, part: tuple[Node, ...]) -> tuple[str, ...]:
    own = set(part)
    read = dict.fromkeys(i for n in part for i in n.reads() if i in graph.producer)
    return tuple(i for i in read if graph.producer[i] not in own)


# --- The tail ---


def _tail(graph: Graph) -> list[Node]:
    """The nodes from which no layer is reached, without those that complete the layer before them."""
    layers = {node for node in graph.nodes if _is_layer(graph, node)}
    body = set(layers)
    for node in reversed(graph.nodes):
        if any(reader in body for o in node.outputs for reader in graph.consumers.get(o, ())):
            body.add(node)
    features = {o for node in layers for o in node.outputs if o}
    for node in graph.nodes:
        if node not in body and _completes(graph, node, features):
            body.add(node)
            features.update(node.outputs)
    return [node for node in graph.nodes if node not in body]


def _is_layer(graph: Graph, node: Node) -> bool:
    """Whether a node has a learned weight, or a subgraph with such a node."""
    if recurs(node) or any(_is_layer(g, n) for g in node.subgraphs.values() for n in g.nodes):
        return True
    layer = linear_layer(graph, node)
    if layer is None:
        return False
    weight = graph.params[layer.weight]
    outputs = weight.shape[layer.axis] if weight.ndim > 1 else 1
    if outputs == 1 and _is_distribution(graph, node.inputs[0]):
        return False  # an expectation
    with np.errstate(all="ignore"):  # counts and halves are no learned numbers
        return any(bool(np.any(2 * part % 1)) for part in (weight.reshape(-1)[:_PEEK], weight))


def _is_distribution(graph: Graph, tensor: str) -> bool:
    """Whether a tensor holds the values of a Softmax."""
    node = graph.producer.get(tensor)
    while node is not None and (entry := lookup(node, graph.opset(node.domain))) is not None and entry.moves:
        node = graph.producer.get(node.inputs[0])
    return node is not None and is_softmax(node)


def _completes(graph: Graph, node: Node, features: set[str]) -> bool:
    """Whether a node is part of the layer whose features it reads: a bias, or their activation."""
    if features.isdisjoint(node.inputs):
        return False
    others = [graph.arrays.get(i) for i in node.inputs if i and i not in features]
    if adds(node):
        return all(a is not None and a.size == max(a.shape, default=1) for a in others)
    if saturates(node):
        reader = graph.sole_reader(node.outputs[0])
        return reader is not None and is_product(reader) and {*reader.inputs} == {node.inputs[0], node.outputs[0]}
    if is_product(node):
        return not others
    entry = lookup(node, graph.opset(node.domain))
    activates = None if entry is None else entry.quant.absorbed
    return activates is not None and activates(node.attrs, [graph.arrays.get(i) for i in node.inputs])


def _connected(nodes: list[Node]) -> list[tuple[Node, ...]]:
    """The nodes by what tensors connect, each part in topological order, and the parts in the order in which they end."""
    maker = {o: number for number, node in enumerate(nodes) for o in node.outputs if o}
    first = list(range(len(nodes)))  # of each node's part, as far as it is known

    def root(number: int) -> int:
        while first[number] != number:
            first[number] = number = first[first[number]]
        return number

    for number, node in enumerate(nodes):
        for name in node.reads():
            if name in maker:
                first[root(number)] = root(maker[name])
    parts: dict[int, list[Node]] = {}
    for number in reversed(range(len(nodes))):
        parts.setdefault(root(number), []).append(nodes[number])
    return [tuple(reversed(part)) for part in reversed(parts.values())]


# --- The signs of a head ---


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The features that a tensor of the tail comes from, and what was made of them."""

    features: frozenset[str] = frozenset()
    steps: frozenset[str] = frozenset()  # operators that give other values
    saturated: bool = False
    in_rows: bool = False  # positions of a map have become rows


def _signs(graph: Graph, part: tuple[Node, ...], rows: _Rows) -> Iterator[bool]:
    """Yield whether a part of the tail has each sign of a head; `rows` are those of the graph's outputs."""
    yield any(map(suppresses, part))
    joins = [n for n in part if is_concat(n)]
    if not joins and (len(graph.outputs) == 1 or not any(map(saturates, part))):
        return
    origins: dict[str, _Origin] = {}
    own = frozenset(part)
    results = {entry for entry in _entries(graph, part) if _is_result(graph, entry, own)}
    for node in part:
        origins |= dict.fromkeys(node.outputs, _origin(graph, node, origins))
    for node in joins:
        operands = {i: o for i in node.inputs if (o := _origin_of(graph, i, origins)).features}
        if any(results.isdisjoint(o.features) for o in operands.values()):
            continue
        several = len(_all_features(operands.values())) > 1
        yield several and all(o.in_rows for o in operands.values())
        yield len({o.steps for o in operands.values()}) > 1 and any(o.saturated for o in operands.values())
        yield several and _has_boxes(graph, operands, _rows(graph, operands))
    yield _has_boxes(graph, {name: o for name, o in origins.items() if name in graph.output_names}, rows)


def _is_result(graph: Graph, entry: str, part: frozenset[Node]) -> bool:
    """Whether a tensor that a part of the tail reads is made by a layer or read by nothing else: others go on to layers."""
    return _is_layer(graph, graph.producer[entry]) or part.issuperset(graph.consumers[entry])


def _origin_of(graph: Graph, tensor: str, origins: Mapping[str, _Origin]) -> _Origin:
    if tensor in origins or tensor not in graph.producer:
        return origins.get(tensor, _Origin())
    value = graph.values.get(tensor)
    return _Origin(frozenset({tensor}) if value is None or value.dtype in (None, np.float32) else frozenset())


def _all_features(origins: Iterable[_Origin]) -> frozenset[str]:
    return frozenset(itertools.chain.from_iterable(o.features for o in origins))


def _origin(graph: Graph, node: Node, origins: Mapping[str, _Origin]) -> _Origin:
    """The origin of a node's outputs, from those of what it reads."""
    entry = lookup(node, graph.opset(node.domain))
    given = {i: o for i in node.reads() if (o := _origin_of(graph, i, origins)).features}
    if not given or (entry is not None and entry.shape_only):
        return _Origin()
    weighed = [o for i, o in given.items() if i not in graph.producer or not saturates(graph.producer[i])]
    if is_product(node) and len(given) > len(weighed) == 1:  # a gate leaves the kind of what it weighs
        return dataclasses.replace(weighed[0], features=_all_features(given.values()))
    kept = averages(node) or is_cast(node) or is_concat(node)
    kept |= entry is not None and (entry.cuts or entry.moves is not None or entry.quant.shares)
    before = given.values()
    averages_others = entry is not None and entry.linear is not None and len(given) > 1  # as attention does
    return _Origin(
        _all_features(before),
        frozenset[str]().union(() if kept else (node.op_type,), *(o.steps for o in before)),
        saturates(node) or (any(o.saturated for o in before) and not averages_others),
        any(o.in_rows for o in before) or (reshapes(node) and _flattens(graph, node)),
    )


def _flattens(graph: Graph, node: Node) -> bool:
    before, after = (sum(d != 1 for d in _shape(graph, name)[1:]) for name in (node.inputs[0], node.outputs[0]))
    return before > after > 0


_Rows = Mapping[tuple[Dim, ...], set[Dim]]  # sizes of an axis of tensors of rank 3, by the axis and their other sizes


def _rows(graph: Graph, tensors: Iterable[str]) -> _Rows:
    rows: dict[tuple[Dim, ...], set[Dim]] = {}
    for shape in (_shape(graph, tensor) for tensor in tensors):
        for axis in (1, 2) if len(shape) == 3 else ():
            rows.setdefault((axis, *shape[:axis], *shape[axis + 1 :]), set()).add(shape[axis])
    return rows


def _has_boxes(graph: Graph, origins: Mapping[str, _Origin], rows: _Rows) -> bool:
    """Whether some tensors are rows of four saturated values, and others have as many rows."""
    for tensor, origin in origins.items():
        shape = _shape(graph, tensor)
        if not origin.saturated or len(shape) != 3 or 1 in shape[1:] or _is_distribution(graph, tensor):
            continue
        for axis in (1, 2):
            if shape[axis] == _BOX and rows.get((axis, *shape[:axis], *shape[axis + 1 :]), set()) - {_BOX}:
                return True
    return False


def _shape(graph: Graph, tensor: str) -> tuple[Dim, ...]:
    value = graph.values.get(tensor)
    return () if value is None or value.shape is None else value.shape
