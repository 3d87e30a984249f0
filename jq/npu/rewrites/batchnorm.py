"""A BatchNormalization that no linear operator takes in, and the depthwise 1x1 Conv that it becomes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.unused import remove_unused
from jq.npu.rewrites.edits import Applies, candidates, everywhere, static_shape, substitute
from jq.ops.linear import scale_and_shift


def batchnorm_to_conv(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with each BatchNormalization of an image as a depthwise 1x1 Conv.

    An epsilon that the node does not state is ONNX's 1e-5; the vendor's tool takes 1e-10.
    """
    taken = set(graph.tensors)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in candidates(graph, applies, "BatchNormalization"):
        normalization = scale_and_shift(graph, node)
        if normalization is None or static_shape(graph, node.inputs[0], 4) is None:
            continue
        dtype = graph.values[node.inputs[0]].dtype  # since opset 15 the statistics may have another
        scale, centre, shift = normalization
        with np.errstate(all="ignore"):
            weight, bias = scale.astype(dtype), (shift - centre * scale).astype(dtype)
        if not np.isfinite(weight).all() or not np.isfinite(bias).all():
            continue
        output, channels = node.outputs[0], weight.size
        names = fresh(f"{output}weights", taken), fresh(f"{output}bias", taken)
        arrays |= {names[0]: weight.reshape(channels, 1, 1, 1), names[1]: bias}
        attrs = {"group": channels, "kernel_shape": (1, 1), "strides": (1, 1)}
        nodes[node] = (Node("Conv", (node.inputs[0], *names), (output,), attrs, name=node.name),)
    return substitute(graph, nodes, arrays)


def depthwise_to_dense(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with an ordinary 1x1 Conv of a diagonal weight for each depthwise one, which X2 leaves to the CPU.

    Sums of one product and zeros: exact, at the cost of the multiplications.
    """
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in candidates(graph, applies, "Conv"):
        weight = graph.params.get(node.inputs[1])
        if weight is None or weight.ndim != 4 or weight.shape[1:] != (1, 1, 1):
            continue
        if node.attrs.get("group", 1) == len(weight) > 1:
            name = fresh(f"{node.inputs[1]}_dense", taken)
            arrays[name] = np.diag(weight.ravel())[:, :, None, None]
            attrs = {**node.attrs, "group": 1}
            nodes[node] = node.replace(inputs=(node.inputs[0], name, *node.inputs[2:]), attrs=attrs)
    return remove_unused(graph.edit(nodes, arrays)) if nodes else graph
