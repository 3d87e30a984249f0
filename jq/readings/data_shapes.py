"""Nodes behind which shapes depend on the data, as behind NonZero and NonMaxSuppression, and which cannot be traced.

A detector that ends in a suppression is a network like any other up to that node. So the graph up to there is calibrated,
tuned and compared, with the tensors that the rest reads as its outputs, and the rest stays in float.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jq.graph import Graph, Node, Value
from jq.ops.table import demanded, lookup
from jq.readings.walk import evaluate


def untraceable(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes whose shapes depend on values of the data, and all that follow, in their order.

    Data are inputs of two and more dims; others, such as a threshold or a number of boxes, may be the same for all samples.
    """
    varying, behind, nodes = {v.name for v in graph.inputs if _is_data(v)}, set[str](), list[Node]()
    for node in graph.nodes:
        entry = lookup(node, graph.opset(node.domain))
        read, outputs = set(node.reads()), set(filter(None, node.outputs))
        static = {node.inputs[i] for i in entry.static_positions(len(node.inputs))} if entry is not None else set()
        static = static.union(*(demanded(g) & g.captured for g in node.subgraphs.values()))
        if not behind.isdisjoint(read) or not varying.isdisjoint(static):
            nodes.append(node)
            behind |= outputs
        elif not varying.isdisjoint(read) and not (entry is not None and entry.shape_only):
            varying |= outputs
    return tuple(nodes)


def parted(graph: Graph) -> tuple[Graph, tuple[Node, ...]]:
    """Return the graph up to where values of the data decide shapes, and the nodes from there on.

    Outputs are those that are left, and all that the rest reads. The graph itself if nothing is behind.
    """
    behind = untraceable(graph)
    if not behind:
        return graph, ()
    apart = set(behind)
    nodes = tuple(n for n in graph.nodes if n not in apart)
    made = {o for n in nodes for o in n.outputs}
    outputs = {v.name: v for v in graph.outputs if v.name in made}
    outputs |= {i: graph.values.get(i, Value(i)) for n in behind for i in n.reads() if i in made}
    return graph.replace(nodes=nodes, outputs=tuple(outputs.values())), behind


def traceable(graph: Graph) -> Graph:
    """Return the graph up to where values of the data decide shapes, or up to the floats that these come from.

    So for a mask of values above a threshold, the compared tensor is an output, where errors can be measured.
    """
    front, behind = parted(graph)
    if not behind:
        return graph
    outputs = {v.name: v for end in front.outputs for v in _floats(front, end)}
    return front.replace(outputs=tuple(outputs.values()))


def finished(graph: Graph, behind: tuple[Node, ...], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs of a graph, of which the nodes from where data decide shapes are computed now."""
    scope: dict[str, Any] = {**graph.arrays, **{k: np.asarray(v) for k, v in known.items()}}
    for node in behind:
        made = evaluate(node, graph.opset(node.domain), scope)
        scope |= {name: value for name, value in zip(node.outputs, made, strict=False) if name}
    return {v.name: scope[v.name] for v in graph.outputs}


def _floats(graph: Graph, end: Value) -> Iterator[Value]:
    """The floats that an end of a graph holds or comes from."""
    if end.dtype in (None, np.float32) and end.shape != () and not end.containers:
        yield end
    elif end.name in graph.producer:
        for name in graph.producer[end.name].reads():
            if name in graph.producer:
                yield from _floats(graph, graph.values.get(name, Value(name)))


def _is_data(value: Value) -> bool:
    return value.dtype == np.float32 if value.shape is None else sum(d != 1 for d in value.shape) > 1
