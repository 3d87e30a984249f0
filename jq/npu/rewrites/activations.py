"""Activations that the NPU has in another form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.schemas import attributes
from jq.npu.rewrites.edits import Applies, candidates, everywhere, multiply, substitute

_SIXTH = float(np.float32(1 / 6))
_HARD_SIGMOID = {"alpha": _SIXTH, "beta": 0.5}
SIXTH_FACTOR = 2731 / 2**14 * 6  # the chip has 1/6 as 2731 / 2**14
_NEAR = 1e-6  # exporters write 1/6 with more or fewer digits


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
        nodes[node] = (
            Node("HardSigmoid", (source,), (gate,), dict(_HARD_SIGMOID)),
            Node("Mul", (source, gate), node.outputs, name=node.name),
        )
    return substitute(graph, nodes)


def leaky_relu_alpha(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with each alpha of LeakyRelu in 256ths, ONNX's default of 0.01 too.

    The vendor's tool sees the default only where onnxruntime has written it out, that is, wherever its basic
    optimizations found anything to change in the model.
    """
    nodes: dict[Node, Node | None] = {}
    for node in candidates(graph, applies, "LeakyRelu"):
        alpha = attributes(graph, node)["alpha"]
        if math.isfinite(alpha) and (held := chips_slope(alpha)) != alpha:
            nodes[node] = node.replace(attrs={**node.attrs, "alpha": held})
    return graph.edit(nodes) if nodes else graph


def chips_slope(alpha: float) -> float:
    """The slope that the chip has for a LeakyRelu of a finite one.

    >>> chips_slope(0.1) * 256
    26.0
    """
    return round(alpha * 256) / 256


def sigmoid_to_hard_sigmoid(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with Sigmoid as HardSigmoid of slope 1/6, the only one that the chip has."""
    found = candidates(graph, applies, "Sigmoid")
    nodes: dict[Node, Node | None] = {
        n: n.replace(op_type="HardSigmoid", inputs=n.inputs[:1], attrs=dict(_HARD_SIGMOID)) for n in found
    }
    return graph.edit(nodes) if nodes else graph


def hard_sigmoid_factor(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with each HardSigmoid of slope 1/6 multiplied by what the chip has for 1/6, over 1/6."""
    found = candidates(graph, applies, "HardSigmoid")
    return multiply(graph, {n: SIXTH_FACTOR for n in found if _is_chips(graph, n)})


def _is_chips(graph: Graph, node: Node) -> bool:
    attrs = attributes(graph, node)
    return abs(attrs["alpha"] - 1 / 6) < _NEAR and abs(attrs["beta"] - 0.5) < _NEAR
