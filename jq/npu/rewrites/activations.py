"""Activations that the NPU has in another form."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.schemas import attributes
from jq.npu.facts import HARD_SIGMOID, leaky_slope
from jq.npu.rewrites.edits import Applies, candidates, everywhere, substitute


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
