"""Folding of BatchNormalization into the linear operator before it."""

from __future__ import annotations

import numpy as np

from jq.graph import Graph, Node
from jq.ops.linear import scale_and_shift
from jq.passes.affine import absorb, linear_before


def fold_batchnorm(graph: Graph) -> Graph:
    """Return the graph with each BatchNormalization folded into the Conv, ConvTranspose or Gemm that it alone reads."""
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        if node.op_type != "BatchNormalization" or node.domain:
            continue
        linear, normalization = linear_before(graph, node.inputs[0]), scale_and_shift(graph, node)
        if linear is None or normalization is None or (folded := absorb(graph, linear, *normalization, taken)) is None:
            continue
        nodes |= {linear: folded[0].replace(outputs=node.outputs[:1]), node: None}
        arrays |= folded[1]
    return graph.edit(nodes, arrays) if nodes else graph
