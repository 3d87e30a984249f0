"""Means over an image as the pools that the NPU has."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.npu.facts import LARGEST_WINDOW
from jq.npu.rewrites.edits import Applies, candidates, everywhere, node_names, static_shape, substitute


def reduce_mean_to_pool(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with ReduceMean over height and width as GlobalAveragePool, where it keeps the dims."""
    nodes: dict[Node, Sequence[Node]] = {}
    for node in candidates(graph, applies, "ReduceMean"):
        axes = reduced_axes(graph, node)
        if axes is None or len(axes) != 2 or not node.attrs.get("keepdims", 1):
            continue
        # the rank, as negative axes count from the end; and a float tensor, as pools know no other
        if {a % 4 for a in axes} == {2, 3} and static_shape(graph, node.inputs[0], 4) is not None:
            nodes[node] = (node.replace(op_type="GlobalAveragePool", inputs=node.inputs[:1], attrs={}),)
    return substitute(graph, nodes)


def reduce_mean_to_flat_pool(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with ReduceMean over height and width as GlobalAveragePool and Flatten, where it drops the dims.

    A pool and its factor are a pair that the NPU's provider knows; a mean and a factor are not.
    """
    taken, named = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    for node in candidates(graph, applies, "ReduceMean"):
        axes = reduced_axes(graph, node)
        dropped = axes is not None and len(axes) == 2 and not node.attrs.get("keepdims", 1)
        if dropped and {a % 4 for a in axes or ()} == {2, 3} and static_shape(graph, node.inputs[0], 4) is not None:
            pooled, label = fresh(f"{node.outputs[0]}_Pool", taken), fresh(f"{node.label}_Pool", named)
            pool = Node("GlobalAveragePool", node.inputs[:1], (pooled,), {}, label)
            nodes[node] = (pool, Node("Flatten", (pooled,), node.outputs, {"axis": 1}, node.name))
    return substitute(graph, nodes)


def split_large_pool(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with GlobalAveragePool over more than 512 pixels in two steps, where two are enough.

    The first is an AveragePool by the smaller factor of each side.
    """
    taken, named = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    for node in candidates(graph, applies, "GlobalAveragePool"):
        match static_shape(graph, node.inputs[0], 4):
            case (_, _, int(height), int(width)) if kernel := split_kernel(height, width):
                between = fresh(f"{node.inputs[0]}_Split", taken)
                attrs, label = {"kernel_shape": kernel, "strides": kernel}, fresh(f"{node.inputs[0]}_Split", named)
                first = Node("AveragePool", node.inputs, (between,), attrs, name=label)
                nodes[node] = (first, node.replace(inputs=(between,)))
    return substitute(graph, nodes)


def split_kernel(height: int, width: int) -> tuple[int, int] | None:
    """The window of the first of two steps; None where one step is enough, or two are not.

    >>> split_kernel(28, 28), split_kernel(16, 16)
    ((4, 4), None)
    """
    kernel = _smaller_factor(height), _smaller_factor(width)
    rest = (height // kernel[0]) * (width // kernel[1])
    large, fits = height * width > LARGEST_WINDOW, max(math.prod(kernel), rest) <= LARGEST_WINDOW
    return kernel if large and fits else None


def reduced_axes(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The axes that a reduction states, by attribute or constant input; None where it states none."""
    if len(node.inputs) > 1 and node.inputs[1]:
        given = graph.constants.get(node.inputs[1])
        return None if given is None else tuple(given.reshape(-1).tolist())
    axes = node.attrs.get("axes")
    return None if axes is None else tuple(axes)


def _smaller_factor(size: int) -> int:
    """The smaller of the two most equal factors of a number."""
    return next(f for f in range(math.isqrt(size), 0, -1) if size % f == 0)
