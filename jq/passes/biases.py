"""Biases that several operators share."""

from __future__ import annotations

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.ops.table import lookup


def own_biases(graph: Graph) -> Graph:
    """Return the graph with a bias of its own for each node that adds one: in 32 bits it has the scale of the products."""
    taken, used = set(graph.tensors), set[str]()
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        entry = lookup(node, graph.opset(node.domain))
        if entry is None or entry.quant.bias is None:
            continue
        for name in entry.operands(node, (entry.quant.bias,)):
            if name not in graph.params or graph.sole_reader(name) or name not in used:
                used.add(name)
                continue
            copy = fresh(f"{node.label}.bias", taken)
            arrays[copy] = graph.params[name]
            nodes[node] = node.replace(inputs=tuple(copy if i == name else i for i in node.inputs))
    return graph.edit(nodes, arrays) if nodes else graph
