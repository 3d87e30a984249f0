"""A matrix product with a bias as a Gemm, whose bias is added before anything is rounded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.npu.rewrites.edits import Applies, everywhere, node_names, substitute


def matmul_to_gemm(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with MatMul by a constant matrix and Add of a constant bias as Gemm, where all shapes are known.

    Of more dims than two, with a Reshape before and after. Weights are transposed and names given as onnxslim does
    it, which the vendor's tool runs first.
    """
    return _fused(graph, applies, rows_known=True)


def dynamic_matmul_to_gemm(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with MatMul and Add as Gemm where the number of rows is free, of two dims."""
    return _fused(graph, applies, rows_known=False)


def _fused(graph: Graph, applies: Applies, *, rows_known: bool) -> Graph:
    taken, named = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        if node.op_type != "MatMul" or node.domain or not applies(node) or graph.opset() < 7:
            continue
        add, weight, shape = graph.sole_reader(node.outputs[0]), graph.params.get(node.inputs[1]), _rows(graph, node)
        if add is None or add.op_type != "Add" or add.domain or weight is None or weight.ndim != 2 or not shape:
            continue
        bias = graph.params.get(add.inputs[1 if add.inputs[0] == node.outputs[0] else 0])
        known = all(isinstance(d, int) for d in shape)
        if bias is None or bias.size != weight.shape[1] or bias.shape[-1:] != weight.shape[1:]:
            continue
        if bias.ndim > len(shape) or known != rows_known or (len(shape) > 2 and not known):
            continue  # the bias has more dims than the product, or the rows are another form's
        product, output = node.outputs[0], add.outputs[0]
        names = [fresh(f"{product}_{part}", taken) for part in ("weight", "bias")]
        arrays |= {names[0]: np.ascontiguousarray(weight.T), names[1]: bias.reshape(-1)}
        label = fresh(product, named)
        gemm = Node("Gemm", (node.inputs[0], *names), (output,), {"alpha": 1.0, "beta": 1.0, "transB": 1}, label)
        reshaped = (product, shape, weight, arrays, taken, named)
        nodes |= {node: (), add: (gemm,) if len(shape) == 2 else _between_reshapes(gemm, *reshaped)}
    return substitute(graph, nodes, arrays)


def _between_reshapes(
    gemm: Node, product: str, shape: Sequence[int | str | None], weight: np.ndarray, arrays: dict[str, np.ndarray],
    taken: set[str], named: set[str],
) -> tuple[Node, ...]:  # fmt: skip
    parts = ("pre_reshape_in", "pre_reshape_out", "post_reshape_in", "gemm_out")
    before, rows, after, made = (fresh(f"{product}_{part}", taken) for part in parts)
    arrays[before] = np.array([-1, weight.shape[0]], np.int64)
    arrays[after] = np.array([*shape[:-1], weight.shape[1]], np.int64)
    return (
        Node("Reshape", (gemm.inputs[0], before), (rows,), {}, fresh(f"{product}_pre_reshape", named)),
        gemm.replace(inputs=(rows, *gemm.inputs[1:]), outputs=(made,)),
        Node("Reshape", (made, after), gemm.outputs, {}, fresh(f"{product}_post_reshape", named)),
    )


def _rows(graph: Graph, node: Node) -> tuple[int | str | None, ...]:
    """The dims of the first operand, if it is a matrix or a stack of them and not empty."""
    value = graph.values.get(node.inputs[0])
    if value is None or value.shape is None or len(value.shape) < 2 or node.inputs[0] in graph.arrays:
        return ()
    return value.shape if math.prod(d for d in value.shape if isinstance(d, int)) else ()
