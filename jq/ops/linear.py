"""The linear layer: one view of Conv, ConvTranspose, Gemm and MatMul with a constant weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jq.graph import Graph, Node
from jq.graph.schemas import attributes
from jq.ops.table import Product, lookup


@dataclasses.dataclass(frozen=True, eq=False)
class Unfolded:
    """A weight by output: each output channel sums its products with some of the input channels, over a kernel."""

    weight: np.ndarray  # [outputs, inputs of each, kernel]
    reads: np.ndarray  # int [outputs or 1, inputs of each]: the channel of the input that an element multiplies
    folded: Callable[[np.ndarray], np.ndarray]  # such an array in the shape of the weight: the inverse


@dataclasses.dataclass(frozen=True, eq=False)
class LinearLayer:
    """A node that multiplies what it reads by a constant weight."""

    node: Node
    weight: str  # the tensor
    bias: str | None  # a constant that no other node reads
    axis: int  # of the weight, along which outputs lie: those of one group, where `axis` is not 0
    groups: int
    product: Product | None  # the node as a matrix product, where it is one of activations with the weight

    def unfolded(self, weight: np.ndarray) -> Unfolded | None:
        """The weight, or an array of its shape, by output; None where groups do not divide it."""
        shape, groups = weight.shape, self.groups
        if weight.ndim < 2 or groups < 1 or shape[0] % groups or self.axis not in (0, 1):
            return None
        if self.axis == 0:
            (outputs, each), kernel = shape[:2], math.prod(shape[2:])
            first = np.arange(outputs) // max(1, outputs // groups) * each
            seen = weight.reshape(outputs, each, kernel)

            def folded(array: np.ndarray) -> np.ndarray:
                return array.reshape(shape)

        else:
            each, made, kernel = shape[0] // groups, shape[1], math.prod(shape[2:])
            first = np.repeat(np.arange(groups) * each, made)
            seen = weight.reshape(groups, each, made, kernel).swapaxes(1, 2).reshape(groups * made, each, kernel)

            def folded(array: np.ndarray) -> np.ndarray:
                return array.reshape(groups, made, each, kernel).swapaxes(1, 2).reshape(shape)

        return Unfolded(seen, (first[:1] if groups == 1 else first)[:, None] + np.arange(each), folded)

    def of_means(self, weight: np.ndarray, means: np.ndarray) -> np.ndarray:
        """The mean of each output channel, without bias, from those of the input channels, as if nothing were padded."""
        unfolded = self.unfolded(weight)
        assert unfolded is not None
        per_input = unfolded.weight.sum(-1)
        return self.node.attrs.get("alpha", 1.0) * (per_input * means[unfolded.reads]).sum(-1)


def linear_layer(graph: Graph, node: Node) -> LinearLayer | None:
    """The view of a node; None where it is not linear, or its weight is computed."""
    entry = lookup(node, graph.opset(node.domain))
    if entry is None or entry.linear is None:
        return None
    names = entry.operands(node, (entry.linear.weight,))
    if not names or names[0] not in graph.params:
        return None
    rank, product = graph.params[names[0]].ndim, entry.linear.product
    is_product = product is not None and node.inputs[0] not in graph.arrays and product.when(node.attrs, rank)
    axis = entry.linear.axis(node.attrs) % max(1, rank)
    groups = int(node.attrs.get("group", 1))
    return LinearLayer(node, names[0], bias_of(graph, node), axis, groups, product if is_product else None)


def is_linear(graph: Graph, node: Node) -> bool:
    """Whether a node is a linear operator, of constant or computed operands."""
    return (entry := lookup(node, graph.opset(node.domain))) is not None and entry.linear is not None


def has_product(graph: Graph, node: Node) -> bool:
    """Whether a node's operator can be a matrix product with its weight."""
    entry = lookup(node, graph.opset(node.domain))
    return entry is not None and entry.linear is not None and entry.linear.product is not None


def bias_of(graph: Graph, node: Node) -> str | None:
    """The constant that a node adds in its accumulator, if no other node reads it."""
    entry = lookup(node, graph.opset(node.domain))
    names = [] if entry is None or entry.quant.bias is None else entry.operands(node, (entry.quant.bias,))
    return names[0] if names and names[0] in graph.params and graph.sole_reader(names[0]) is not None else None


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
