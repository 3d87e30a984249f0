"""Linear layers: what the op table says of operators that are sums of products."""

from __future__ import annotations

import numpy as np

from jq.graph import Graph, Node
from jq.graph.schemas import attributes


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
