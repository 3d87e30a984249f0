"""Constant folding: nodes that read only constants are computed now."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from jq.errors import Error
from jq.graph import Graph, Node
from jq.graph.quantizers import quantizes
from jq.graph.read import SKELETON_BYTES
from jq.graph.schemas import schema
from jq.graph.write import node_proto
from jq.readings.walk import evaluate

RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

# An Expand or ConstantOfShape is shorter than what it makes. What is larger than its inputs is folded
# while it is small, or is a weight's size and the model stays ordinary.
_SMALL, _WEIGHT, _MODEL = 1 << 16, 1 << 24, 1 << 28


def fold_constants(graph: Graph) -> Graph:
    """The graph with every node computed whose inputs are all weights or constants.

    Random operators, Quantize- and DequantizeLinear, control flow, operators without a
    rule, and nodes whose result would make the model much larger stay.
    """
    arrays = dict(graph.arrays)
    room = _MODEL - sum(a.nbytes for a in arrays.values())
    folded: dict[Node, None] = {}
    for node in graph.nodes:
        inputs = {i: arrays[i] for i in node.inputs if i in arrays}
        if node.op_type in RANDOM or quantizes(node) or node.subgraphs or not inputs.keys() >= set(node.inputs) - {""}:
            continue
        sizes = [a.nbytes for a in inputs.values()]
        limit = max(_SMALL, min(_WEIGHT, room), min(_MODEL, sum(sizes)), *sizes)
        results = _results(node, graph.opset(node.domain), inputs, limit)
        if results is not None:
            arrays |= results
            room -= sum(a.nbytes for a in results.values())
            folded[node] = None
    return graph.edit(folded, arrays) if folded else graph


def _results(node: Node, opset: int, inputs: Mapping[str, np.ndarray], limit: int) -> dict[str, np.ndarray] | None:
    if _inferred_bytes(node, opset, inputs) > limit:  # before anything of that size is made
        return None
    try:
        computed = evaluate(node, opset, inputs)
    except Error:  # no rule, or operands that do not fit: who traces the graph is told
        return None
    results = {k: v for k, v in zip(node.outputs, computed, strict=False) if k}
    if not all(isinstance(v, np.ndarray) for v in results.values()) or sum(v.nbytes for v in results.values()) > limit:
        return None
    return results


def _inferred_bytes(node: Node, opset: int, inputs: Mapping[str, np.ndarray]) -> int:
    """The size in bytes of a node's outputs by ONNX's inference; 0 if unknown."""
    definition = schema(node.op_type, node.domain, opset)
    if definition is None:
        return 0
    types = {k: onnx.helper.make_tensor_type_proto(_elem(a), a.shape) for k, a in inputs.items()}
    small = {k: a for k, a in inputs.items() if a.nbytes <= SKELETON_BYTES and a.dtype != object}
    data = {k: numpy_helper.from_array(a) for k, a in small.items()}
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            definition, node_proto(node), types, data, opset_imports=[onnx.helper.make_opsetid(node.domain, opset)]
        )
    except Exception:  # onnx's C++ raises many kinds
        return 0
    return sum(_bytes(kind.tensor_type) for kind in inferred.values())


def _bytes(tensor: onnx.TypeProto.Tensor) -> int:
    dims = [d.dim_value for d in tensor.shape.dim if d.HasField("dim_value")]
    if not tensor.elem_type or not tensor.HasField("shape") or len(dims) < len(tensor.shape.dim):
        return 0
    return math.prod(dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize


def _elem(array: np.ndarray) -> int:
    return onnx.TensorProto.STRING if array.dtype == object else onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
