"""Bias correction: what rounding the weights shifts each output channel by, on average, its bias takes back.

The expected output changes by (Q(W) - W) E[x], as in Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction" (2019); E[x] of each input channel is what calibration measured of the float model.
"""

from __future__ import annotations

import numpy as np

from jq.calibration.stats import Stats
from jq.graph import Graph, Node
from jq.ops.table import lookup
from jq.plan import Plan


def correct_biases(graph: Graph, plan: Plan, stats: Stats) -> Graph:
    """Return the graph with the biases of Conv and Gemm corrected for the rounding of a plan's weights.

    Where zeros pad an image, its border sees less of the shift than is corrected. A bias that others read too stays.
    """
    found = {}
    for node in graph.nodes:
        if (shift := output_shift(graph, plan, stats, node)) is not None:
            bias = graph.params[node.inputs[2]]
            corrected = (bias - shift.reshape(bias.shape)).astype(bias.dtype)
            if np.isfinite(corrected).all():  # means near the end of float32 overflow
                found[node.inputs[2]] = corrected
    return graph.with_arrays({**graph.arrays, **found}) if found else graph


def output_shift(graph: Graph, plan: Plan, stats: Stats, node: Node) -> np.ndarray | None:
    """What rounding its weight adds to each output channel of a node on average; None where it cannot be taken back."""
    entry = lookup(node, graph.opset(node.domain))
    if entry is None or entry.quant.of_means is None or len(node.inputs) < 3:
        return None
    x, weight, bias = node.inputs[:3]
    known = x in stats.tensors and stats.tensors[x].get("means") and weight in plan.weights and bias in graph.params
    if not known or graph.sole_reader(bias) is None or node.attrs.get("beta", 1.0) != 1 or node.attrs.get("transA", 0):
        return None
    seen = stats.rows(x, "means")
    mean = seen["total"] / np.maximum(seen["count"], 1)
    array = graph.params[weight]
    shift = entry.quant.of_means(plan.weights[weight].given_back(array) - array.astype(np.float64), mean, node.attrs)
    return shift if graph.params[bias].shape in (shift.shape, (1, *shift.shape)) else None
