"""A scale and shift of each channel after a linear operator belongs into its weights, a BatchNormalization too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.ops.linear import linear_layer, scale_and_shift

Affine = tuple[np.ndarray, np.ndarray, np.ndarray]  # scale, centre and shift of each channel
LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm"})


def fuse_affine(graph: Graph, operators: Collection[str] = ("Add", "Sub", "Mul", "Div")) -> Graph:
    """The graph with Add, Sub, Mul and Div by per-channel constants after Conv, ConvTranspose and Gemm fused."""
    return _absorbed(graph, operators, functools.partial(_scale_and_shift, graph))


def fold_batchnorm(graph: Graph) -> Graph:
    """The graph with each BatchNormalization folded into the Conv, ConvTranspose or Gemm that it alone reads."""
    return _absorbed(graph, ("BatchNormalization",), lambda node, linear: scale_and_shift(graph, node))


def _absorbed(graph: Graph, operators: Collection[str], affine: Callable[[Node, Node], Affine | None]) -> Graph:
    """The graph without those of the operators whose scale, centre and shift the linear one before them can take in."""
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        if node.op_type not in operators or node.domain:
            continue
        linear = next(filter(None, (linear_before(graph, i) for i in node.inputs)), None)
        if linear is None or linear in nodes or (scaled := affine(node, linear)) is None:
            continue
        if (fused := absorb(graph, linear, *scaled, taken)) is not None:
            nodes |= {linear: fused[0].replace(outputs=node.outputs[:1]), node: None}
            arrays |= fused[1]
    return graph.edit(nodes, arrays) if nodes else graph


def linear_before(graph: Graph, name: str) -> Node | None:
    """The linear operator that makes a tensor for one reader only."""
    node = graph.producer.get(name)
    return node if node and node.op_type in LINEAR and not node.domain and graph.sole_reader(name) else None


def absorb(
    graph: Graph, node: Node, scale: np.ndarray, centre: np.ndarray, shift: np.ndarray, taken: set[str]
) -> tuple[Node, dict[str, np.ndarray]] | None:
    """A linear operator and its new arrays, such that it computes `scale * (y - centre) + shift`; None if it cannot.

    Arrays that others read too are not touched: the node gets its own, under names not in `taken`.
    """
    layer, bias = linear_layer(graph, node), np.zeros(1, np.float32)
    if layer is None or node.inputs.count(layer.weight) > 1:
        return None
    weight = graph.params[layer.weight]
    by_output = layer.unfolded(weight)
    if by_output is None or not is_float(weight.dtype):
        return None
    if len(node.inputs) > 2 and node.inputs[2]:
        if (given := graph.params.get(node.inputs[2])) is None:
            return None
        bias = given.astype(np.result_type(given, np.float32))
    attrs = dict(node.attrs)
    if node.op_type == "Gemm":
        bias = bias * attrs.pop("beta", 1.0)
        if graph.opset() < 7:
            attrs["broadcast"] = 1
    count = len(by_output.weight)
    if not {1, count} >= {scale.size, centre.size, shift.size, *bias.shape[-1:]}:
        return None
    with np.errstate(all="ignore"):
        wide = weight.astype(np.result_type(weight, np.float32), copy=False)
        factor = by_output.folded(np.broadcast_to(scale.reshape(-1, 1, 1), by_output.weight.shape))
        new_weight = (wide * factor).astype(weight.dtype)
        new_bias = ((bias - centre) * scale + shift + np.zeros(count, np.float32)).astype(weight.dtype)
    if not all(np.isfinite(a.astype(np.float64)).all() for a in (new_weight, new_bias)):
        return None
    weight_name = own_name(graph, node, 1, "weight", taken) if scale.size > 1 or scale.item() != 1 else node.inputs[1]
    bias_name = own_name(graph, node, 2, "bias", taken)
    inputs = (node.inputs[0], weight_name, bias_name)
    return node.replace(inputs=inputs, attrs=attrs), {weight_name: new_weight, bias_name: new_bias}


def is_float(dtype: np.dtype) -> bool:
    """Whether weights of this type can be multiplied and rounded to it again."""
    return dtype.kind == "f" or dtype.name == "bfloat16"  # which is no float to numpy


def own_name(graph: Graph, node: Node, index: int, role: str, taken: set[str]) -> str:
    """A name for an array of this node alone: the present one if nobody else reads it."""
    name = node.inputs[index] if index < len(node.inputs) else ""
    if name and graph.sole_reader(name):
        return name
    return fresh(f"{node.label}.{role}", taken)


def _scale_and_shift(graph: Graph, node: Node, linear: Node) -> Affine | None:
    """Scale, centre and shift of each channel of a linear operator's output that an elementwise node makes."""
    first = node.inputs[0] in linear.outputs
    weight, constant = graph.params.get(linear.inputs[1]), graph.params.get(node.inputs[1 if first else 0])
    if weight is None or constant is None or (node.op_type == "Div" and not first):
        return None
    if graph.opset() < 7 and node.attrs.get("axis", -1) >= 0:  # where the constant's first axis goes
        constant = constant.reshape(*constant.shape, *(1,) * (weight.ndim - node.attrs["axis"] - constant.ndim))
    aligned = (1,) * (weight.ndim - constant.ndim) + constant.shape
    if len(aligned) != weight.ndim or weight.ndim < 2 or constant.size != aligned[1]:
        return None
    value = constant.astype(np.result_type(constant, np.float32)).reshape(-1)
    one, zero = np.ones(1, value.dtype), np.zeros(1, value.dtype)
    match node.op_type:
        case "Add":
            return one, zero, value
        case "Sub":
            return (one, value, zero) if first else (-one, zero, value)
        case "Mul":
            return value, zero, zero
    return (1 / value, zero, zero) if value.all() else None
