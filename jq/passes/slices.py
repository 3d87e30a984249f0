"""A Slice of a Slice."""

from __future__ import annotations

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh

_PARTS = ("starts", "ends", "axes", "steps")


def merge_slices(graph: Graph) -> Graph:
    """The graph with a Slice along some axes of one along others as one Slice along all."""
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        inner = graph.producer.get(node.inputs[0]) if node.op_type == "Slice" else None
        if inner is None or inner in nodes or graph.sole_reader(inner.outputs[0]) is None:
            continue
        first, second = _known(graph, inner), _known(graph, node)
        if first is None or second is None or not set(first[2]).isdisjoint(second[2]):
            continue
        names = [fresh(f"{node.outputs[0]}_{part}", taken) for part in _PARTS]
        arrays |= {name: np.concatenate(pair) for name, *pair in zip(names, first, second, strict=True)}
        nodes |= {inner: None, node: node.replace(inputs=(inner.inputs[0], *names))}
    return graph.edit(nodes, arrays) if nodes else graph


def _known(graph: Graph, node: Node) -> tuple[np.ndarray, ...] | None:
    """Starts, ends, steps and non-negative axes of a Slice if they are constant."""
    if node.op_type != "Slice" or node.domain or graph.opset() < 10:
        return None
    arrays = [graph.arrays.get(i) for i in node.inputs[1:] if i]
    given = [a.astype(np.int64) for a in arrays if a is not None and a.ndim == 1]
    if len(given) < len(arrays) or not all(node.inputs[1:4]) or len(given) < 3 or (given[2] < 0).any():
        return None
    return tuple(given if len(given) == len(_PARTS) else (*given, np.ones_like(given[0])))
