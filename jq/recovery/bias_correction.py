"""Bias correction: the mean shift of each output channel by rounding the weights is taken back by its bias.

The expected output changes by (Q(W) - W) E[x], as in Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction" (2019); E[x] of each input channel is what calibration measured of the float model.
"""

from __future__ import annotations

import numpy as np

from jq.calibration.stats import Stats
from jq.graph import Graph, Node
from jq.ops.linear import linear_layer
from jq.plan import Plan


def correct_biases(graph: Graph, plan: Plan, stats: Stats) -> Graph:
    """Return the graph with the biases of Conv and Gemm corrected for the rounding of a plan's weights.

    Where zeros pad an image, its border sees less of the shift than is corrected. A bias that others read too stays.
    """
    biases = {}
    for node in graph.nodes:
        if (shift := output_shift(graph, plan, stats, node)) is not None:
            bias = graph.params[node.inputs[2]]
            corrected = (bias - shift.reshape(bias.shape)).astype(bias.dtype)
            if np.isfinite(corrected).all():  # means near the end of float32 overflow
                biases[node.inputs[2]] = corrected
    return graph.with_arrays({**graph.arrays, **biases}) if biases else graph


def output_shift(graph: Graph, plan: Plan, stats: Stats, node: Node) -> np.ndarray | None:
    """The mean that rounding its weight adds to each output channel of a node; None where no bias can take it back."""
    layer, x = linear_layer(graph, node), node.inputs[0]
    if layer is None or layer.product is None or layer.bias is None or layer.weight not in plan.weights:
        return None
    if x not in stats.tensors or not stats.tensors[x].get("means") or node.attrs.get("beta", 1.0) != 1:
        return None
    seen = stats.rows(x, "means")
    mean = seen["total"] / np.maximum(seen["count"], 1)
    array = graph.params[layer.weight]
    shift = layer.of_means(plan.weights[layer.weight].given_back(array) - array.astype(np.float64), mean)
    return shift if graph.params[layer.bias].shape in (shift.shape, (1, *shift.shape)) else None
