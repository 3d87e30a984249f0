"""Channels of a linear operator's output, followed through operators that only move elements.

The projections of attention are often one operator, whose output is split into queries, keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from jq.errors import Error
from jq.graph import Graph, Node
from jq.readings.walk import evaluate

_MOVES = frozenset({"Flatten", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
_ELEMENTS = 1 << 20


def origin(graph: Graph, tensor: str) -> str:
    """The tensor that a tensor's elements come from, all or some of them."""
    while (node := graph.producer.get(tensor)) is not None and _moves(graph, node, node.inputs[0]):
        tensor = node.inputs[0]
    return tensor


def channels_of(graph: Graph, tensor: str, root: str, axis: int) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """Which channels of a root end up in a tensor, and the tensors on their way; None if others get them too."""
    value = graph.values.get(root)
    shape = () if value is None or value.shape is None else value.shape
    dims = [d if isinstance(d, int) else 2 for d in shape]
    if not -len(dims) <= axis < len(dims) or not 0 < math.prod(dims) <= _ELEMENTS or not isinstance(shape[axis], int):
        return None
    index = np.arange(dims[axis]).reshape([-1 if a == axis % len(dims) else 1 for a in range(len(dims))])
    try:
        held = dict(_followed(graph, {root: np.broadcast_to(index, dims).copy()}, tensor))
    except Error:  # a broken node is reported where it is traced
        return None
    mine = np.isin(np.arange(dims[axis]), held[tensor]) if tensor in held else np.zeros(0, bool)
    way = tuple(t for t, made in held.items() if t != tensor and mine[made].any())
    read_elsewhere = (
        t in graph.output_names or any(not _moves(graph, reader, t) for reader in graph.consumers.get(t, ()))
        for t in way
    )
    return (mine, way) if mine.any() and not any(read_elsewhere) else None


def _followed(graph: Graph, held: Mapping[str, np.ndarray], last: str) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors that movements make of others, each with the channels that its elements come from."""
    waiting = dict(held)
    while waiting:
        name, made = waiting.popitem()
        yield name, made
        for node in graph.consumers.get(name, ()) if name != last else ():
            if _moves(graph, node, name):
                given = {i: graph.arrays[i] for i in node.inputs[1:] if i}
                outputs = evaluate(node, graph.opset(), {**given, name: made})
                waiting |= {o: np.asarray(a) for o, a in zip(node.outputs, outputs, strict=False) if o}


def _moves(graph: Graph, node: Node, tensor: str) -> bool:
    """Whether a node only moves elements of a tensor, and constants tell where."""
    known = all(i in graph.constants for i in node.inputs[1:] if i)
    return node.op_type in _MOVES and not node.domain and node.inputs[:1] == (tensor,) and known
