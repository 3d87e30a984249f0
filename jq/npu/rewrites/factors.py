"""Multiplications after means and HardSigmoids that stand for the chip's constants.

Where the chip multiplies by its nearest constant, the form is the operator as ONNX defines it times the chip's factor.
`without_factors` is the inverse: an integer reading has the constants itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import bypass
from jq.graph.schemas import attributes
from jq.npu.facts import HARD_SIGMOID, SIXTH_FACTOR, is_hard_sigmoid, mean_factor, pool_factor
from jq.npu.rewrites.edits import Applies, candidates, everywhere, multiply, static_shape
from jq.npu.rewrites.pools import reduced_axes


def hard_sigmoid_factor(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with each HardSigmoid of slope 1/6 multiplied by what the chip has for 1/6, over 1/6."""
    gates = [n for n in candidates(graph, applies, "HardSigmoid") if is_hard_sigmoid(attributes(graph, n))]
    exact: dict[Node, Node | None] = {  # of the slope that the chip has, however many digits the exporter wrote
        n: n.replace(attrs={**n.attrs, **HARD_SIGMOID})
        for n in gates
        if any(attributes(graph, n)[k] != v for k, v in HARD_SIGMOID.items())
    }
    return _multiplied(graph.edit(exact) if exact else graph, [exact.get(n) or n for n in gates])


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
    return _multiplied(graph, candidates(graph, applies, "ReduceMean"))


def without_factors(graph: Graph) -> Graph:
    """The graph without the products that the forms above put in."""
    products = {n: _product(graph, n) for n in graph.nodes if not _counts_on_host(graph, n)}
    return bypass(graph, {p.outputs[0]: n.outputs[0] for n, p in products.items() if p is not None})


def _multiplied(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """The graph with these nodes' outputs multiplied by the chip's factor, where that is known and not done yet."""
    factors = {n: _factor(graph, n) for n in nodes if _product(graph, n) is None}
    return multiply(graph, {n: factor for n, factor in factors.items() if factor is not None})


def _pools(graph: Graph, applies: Applies, square: bool) -> Graph:
    pools = {n: _window(graph, n) for n in candidates(graph, applies, "AveragePool", "GlobalAveragePool")}
    return _multiplied(graph, [n for n, window in pools.items() if window and (window[0] == window[1]) is square])


def _product(graph: Graph, node: Node) -> Node | None:
    """The Mul that stands for the chip's constant behind a node, if it has one."""
    factor = _factor(graph, node)
    product = None if factor is None else graph.sole_reader(node.outputs[0])
    if product is None or product.op_type != "Mul" or len(product.inputs) != 2:
        return None
    number = graph.arrays.get(next((i for i in product.inputs if i != node.outputs[0]), ""))
    held = number is not None and number.size == 1 and number.reshape(()) == np.asarray(factor, number.dtype)
    return product if held else None


def _factor(graph: Graph, node: Node) -> float | None:
    """The chip's factor of a node's output; None where it has no constant of its own, or the size is not known."""
    if node.domain:
        return None
    if node.op_type == "HardSigmoid":
        return SIXTH_FACTOR if is_hard_sigmoid(attributes(graph, node)) else None
    if node.op_type == "ReduceMean":
        axes, value = reduced_axes(graph, node), graph.values.get(node.inputs[0])
        shape = () if value is None or value.shape is None else value.shape
        dims = [shape[a] for a in axes or () if -len(shape) <= a < len(shape)]
        sizes = [d for d in dims if isinstance(d, int) and d > 0]
        return mean_factor(math.prod(sizes)) if axes and len(sizes) == len(axes) else None
    window = _window(graph, node)
    return None if window is None else pool_factor(*window)


def _window(graph: Graph, node: Node) -> tuple[int, int] | None:
    """The height and width that a pool averages over. Its pads count on the chip, whatever the node says."""
    if node.op_type == "AveragePool":
        kernel = tuple(node.attrs.get("kernel_shape", ()))
        return (kernel[0], kernel[1]) if len(kernel) == 2 and min(kernel) > 0 else None
    if node.op_type == "GlobalAveragePool":
        match static_shape(graph, node.inputs[0], 4):
            case (_, _, int(height), int(width)):
                return height, width
    return None


def _counts_on_host(graph: Graph, node: Node) -> bool:
    """Whether an AveragePool leaves its padding out, which the chip counts: it and its factor are the host's."""
    attrs = attributes(graph, node) if node.op_type == "AveragePool" else {}
    padded = np.any(attrs.get("pads") or 0) or attrs.get("auto_pad", "NOTSET") != "NOTSET" or attrs.get("ceil_mode")
    return bool(padded) and not attrs.get("count_include_pad")
