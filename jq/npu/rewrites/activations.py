"""Activations that the NPU has in another form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.schemas import attributes
from jq.graph.unused import remove_unused
from jq.npu.facts import GATE_POSITION, HARD_SIGMOID, leaky_slope
from jq.npu.rewrites.edits import Applies, candidates, everywhere, substitute

_LARGEST = float(np.finfo(np.float32).max)


def hard_swish_to_product(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with HardSwish as x * HardSigmoid(x), the tensors named as onnxruntime names them.

    onnxruntime, which the vendor's tool runs first, puts the operator's ONNX function body in its place.
    """
    taken = set(graph.tensors)
    nodes: dict[Node, Sequence[Node]] = {}
    swishes = [n for n in graph.nodes if n.op_type == "HardSwish" and not n.domain]
    for index, node in enumerate(swishes):  # one that is excluded has its number all the same
        if not applies(node):
            continue
        token = f"token_{index - 1}_" if index else ""
        gate = fresh(f"_inlfunc_HardSwish_{token}HS_X", taken)
        source = node.inputs[0]
        hard_sigmoid = Node("HardSigmoid", (source,), (gate,), dict(HARD_SIGMOID))
        nodes[node] = hard_sigmoid, Node("Mul", (source, gate), node.outputs, name=node.name)
    return substitute(graph, nodes)


def clip_to_relu(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with Relu for each Clip from zero that no number exceeds, of which the chip's compiler wants both bounds."""
    nodes: dict[Node, Node | None] = {}
    for node in candidates(graph, applies, "Clip"):
        ends = [node.attrs.get(k) if graph.opset() < 11 else None for k in ("min", "max")]
        names = (*node.inputs[1:3], "", "")[:2]
        arrays = [graph.arrays.get(name) for name in names]
        if any(n and (a is None or a.size != 1) for n, a in zip(names, arrays, strict=True)):
            continue  # computed
        low, high = (e if a is None else float(a.reshape(())) for e, a in zip(ends, arrays, strict=True))
        if low == 0 and (high is None or high >= _LARGEST):
            nodes[node] = node.replace(op_type="Relu", inputs=node.inputs[:1], attrs={})
    return remove_unused(graph.edit(nodes)) if nodes else graph


def hard_sigmoid_to_clip(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with each HardSigmoid that alone reads a Conv or Gemm in its weights, and a Clip from zero to one behind.

    The chip writes a HardSigmoid at a position of 7 at least, so the bound is the largest code there, 127/128.
    """
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in candidates(graph, applies, "HardSigmoid"):
        layer = graph.producer.get(node.inputs[0])
        weight = None if layer is None or graph.sole_reader(node.inputs[0]) is not node else _weight(graph, layer)
        if layer is None or weight is None or not applies(layer) or graph.opset() < 11:
            continue
        attrs, bias = attributes(graph, node), np.zeros(len(weight), weight.dtype)
        bias = graph.params[layer.inputs[2]] if len(layer.inputs) > 2 and layer.inputs[2] else bias
        names = [fresh(f"{node.label}_{part}", taken) for part in ("weight", "bias", "low", "high")]
        scale = np.asarray(attrs["alpha"], weight.dtype)
        shifted = (bias * scale + attrs["beta"]).astype(weight.dtype)
        ends = (0, 1 - 2.0**-GATE_POSITION)
        arrays |= dict(zip(names, (weight * scale, shifted, *(np.asarray(e, weight.dtype) for e in ends)), strict=True))
        nodes[layer] = layer.replace(inputs=(layer.inputs[0], *names[:2]))
        nodes[node] = node.replace(op_type="Clip", inputs=(node.inputs[0], *names[2:]), attrs={})
    return remove_unused(graph.edit(nodes, arrays)) if nodes else graph


def _weight(graph: Graph, layer: Node) -> np.ndarray | None:
    """The weight of a Conv, or of a Gemm that is a product and a sum, whose bias is a constant; None for other nodes."""
    plain = all(layer.attrs.get(k, 1.0) == 1 for k in ("alpha", "beta"))
    biased = len(layer.inputs) > 2 and layer.inputs[2]
    fits = layer.op_type == "Conv" or (layer.op_type == "Gemm" and plain and biased)
    known = not biased or layer.inputs[2] in graph.params
    return graph.params.get(layer.inputs[1]) if fits and known and not layer.domain else None


def leaky_relu_alpha(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with each alpha of LeakyRelu in 256ths, ONNX's default of 0.01 too.

    The vendor's tool sees the default only where onnxruntime has written it out, that is, wherever its basic
    optimizations found anything to change in the model.
    """
    nodes: dict[Node, Node | None] = {}
    for node in candidates(graph, applies, "LeakyRelu"):
        alpha = attributes(graph, node)["alpha"]
        if math.isfinite(alpha) and (held := leaky_slope(alpha)) != alpha:
            nodes[node] = node.replace(attrs={**node.attrs, "alpha": held})
    return graph.edit(nodes) if nodes else graph


def gates_itself(graph: Graph, node: Node) -> bool:
    """Whether an activation's input is multiplied by it, and by nothing else."""
    reader = graph.sole_reader(node.outputs[0])
    return reader is not None and reader.op_type == "Mul" and node.inputs[0] in reader.inputs


def sigmoids(graph: Graph) -> tuple[Node, ...]:
    """The nodes that `sigmoid_to_hard_sigmoid` may change."""
    return tuple(candidates(graph, everywhere, "Sigmoid"))


def sigmoid_to_hard_sigmoid(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with Sigmoid as HardSigmoid of slope 1/6, the only one that the chip has."""
    nodes: dict[Node, Node | None] = {
        n: n.replace(op_type="HardSigmoid", inputs=n.inputs[:1], attrs=dict(HARD_SIGMOID))
        for n in candidates(graph, applies, "Sigmoid")
    }
    return graph.edit(nodes) if nodes else graph
