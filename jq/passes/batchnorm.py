"""BatchNormalization after a linear operator."""

from __future__ import annotations

import numpy as np

from jq.graph import Graph, Node
from jq.passes.affine import absorb, linear_before
from jq.registry import attributes


def fold_batchnorm(graph: Graph) -> Graph:
    """Return the graph with each BatchNormalization folded into the Conv, ConvTranspose or Gemm that it alone reads."""
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        if node.op_type != "BatchNormalization" or node.domain:
            continue
        linear, found = linear_before(graph, node.inputs[0]), scale_and_shift(graph, node)
        if linear is None or found is None or (folded := absorb(graph, linear, *found, taken)) is None:
            continue
        nodes |= {linear: folded[0].replace(outputs=node.outputs[:1]), node: None}
        arrays |= folded[1]
    return graph.edit(nodes, arrays) if nodes else graph


def scale_and_shift(graph: Graph, node: Node) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Scale, centre and shift of a BatchNormalization with constant statistics; None if it trains.

    In the precision of its arrays, as runtimes fold it: codes of folded weights are then the same everywhere.
    """
    attrs = attributes(graph, node)
    trains = (
        attrs.get("training_mode", 0) or len(node.outputs) > 1 or (graph.opset() < 7 and not attrs.get("is_test", 0))
    )
    given = [graph.params.get(i) for i in node.inputs[1:5]]
    if trains or attrs.get("spatial", 1) == 0 or len({a.shape for a in given if a is not None}) != 1:
        return None
    arrays = [a.astype(np.result_type(a, np.float32), copy=False) for a in given if a is not None]
    if len(arrays) != 4:
        return None
    gamma, beta, mean, variance = arrays
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + variance.dtype.type(attrs["epsilon"]))  # 1e-5 by ONNX's default
        return scale, mean, beta
