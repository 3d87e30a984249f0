"""Means as the chip computes them: the true mean, then the factor by which the chip is off."""

from __future__ import annotations

import math

from jq.graph import Graph, Node
from jq.npu.reciprocals import mean_factor, pool_factor
from jq.npu.rewrites.edits import Applies, candidates, everywhere, multiply, static_shape
from jq.npu.rewrites.pools import reduced_axes


def average_pool_factor(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with AveragePool and GlobalAveragePool over squares multiplied by the chip's factor.

    A factor of one is multiplied too: where the product stands, the vendor's tool looks for positions.
    """
    return _pools(graph, applies, square=True)


def rectangular_pool_factor(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with AveragePool and GlobalAveragePool over other rectangles multiplied by the chip's factor.

    The vendor's tool leaves these as they are; the chip does not.
    """
    return _pools(graph, applies, square=False)


def reduce_mean_factor(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with ReduceMean over stated axes of static size multiplied by the chip's factor."""
    factors = {}
    for node in candidates(graph, applies, "ReduceMean"):
        axes, value = reduced_axes(graph, node), graph.values.get(node.inputs[0])
        if (
            not axes
            or value is None
            or value.shape is None
            or not all(-len(value.shape) <= a < len(value.shape) for a in axes)
        ):
            continue
        dims = [d for d in (value.shape[a] for a in axes) if isinstance(d, int) and d > 0]
        if len(dims) == len(axes):
            factors[node] = mean_factor(math.prod(dims))
    return multiply(graph, factors)


def _pools(graph: Graph, applies: Applies, square: bool) -> Graph:
    factors = {}
    for node in candidates(graph, applies, "AveragePool", "GlobalAveragePool"):
        window = _window(graph, node)
        if window is not None and (window[0] == window[1]) is square:
            factors[node] = pool_factor(*window)
    return multiply(graph, factors)


def _window(graph: Graph, node: Node) -> tuple[int, int] | None:
    """The height and width that a pool averages over. Its pads count on the chip, whatever the node says."""
    if node.op_type == "AveragePool":
        kernel = tuple(node.attrs.get("kernel_shape", ()))
        return (kernel[0], kernel[1]) if len(kernel) == 2 and min(kernel) > 0 else None
    match static_shape(graph, node.inputs[0], 4):
        case (_, _, int(height), int(width)):
            return height, width
    return None
