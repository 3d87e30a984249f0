"""Resizes as what the NPU's provider takes: those that interpolate were seen on the CPU, and 16 bits list none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.schemas import attributes
from jq.npu.rewrites.edits import Applies, candidates, everywhere, node_names, static_shape, substitute
from jq.ops.kinds import is_layer
from jq.ops.resizing import interpolations, nearest_elements

_SWAP = (0, 1, 3, 2)  # height and width
_Part = tuple[str, tuple[str, ...], Mapping[str, Any]]  # an operator, its constant operands, its attributes


def resize_to_matmul(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with a MatMul along width, and one along height between Transposes, for each Resize that interpolates.

    Interpolation is linear and goes along one axis after the other, in whatever mode: exact in float, at the cost of
    multiplications. Only where a layer follows: at the end of a network a Resize on the CPU breaks nothing.
    """
    taken, named = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in candidates(graph, applies, "Resize"):
        weights = _weights(graph, node)
        if weights and weights.keys() <= {2, 3} and _feeds_a_layer(graph, node):
            parts: list[_Part] = []
            for axis in sorted(weights, reverse=True):
                matrix = fresh(f"{node.label}_axis{axis}", taken)
                arrays[matrix] = weights[axis].T.astype(graph.values[node.inputs[0]].dtype)
                swap: list[_Part] = [("Transpose", (), {"perm": _SWAP})] if axis == 2 else []
                parts += [*swap, ("MatMul", (matrix,), {}), *swap]
            made, x = [], node.inputs[0]
            for number, (op_type, operands, attrs) in enumerate(parts):
                last = number == len(parts) - 1
                y = node.outputs[0] if last else fresh(f"{node.outputs[0]}_part", taken)
                made.append(Node(op_type, (x, *operands), (y,), attrs, fresh(f"{node.label}_{op_type}", named)))
                x = y
            nodes[node] = made
    return substitute(graph, nodes, arrays)


def resize_to_depth_to_space(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with copies of channels and DepthToSpace for each Resize that repeats pixels: exact, elements move alone."""
    taken, named = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    for node in candidates(graph, applies, "Resize"):
        times = _repeats(graph, node)
        if times and _feeds_a_layer(graph, node):
            copies, label = fresh(f"{node.outputs[0]}_copies", taken), fresh(f"{node.label}_Concat", named)
            concat = Node("Concat", node.inputs[:1] * times**2, (copies,), {"axis": 1}, label)
            nodes[node] = (concat, Node("DepthToSpace", (copies,), node.outputs, {"blocksize": times}, node.name))
    return substitute(graph, nodes)


def _weights(graph: Graph, node: Node) -> dict[int, np.ndarray] | None:
    operands = _operands(graph, node)
    return None if operands is None else interpolations(operands[0], attributes(graph, node), *operands[1:])


def _repeats(graph: Graph, node: Node) -> int:
    """How often a Resize repeats each pixel of an image along both sides; 0 if it does something else."""
    operands, attrs = _operands(graph, node), attributes(graph, node)
    crops = attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if operands is None or attrs["mode"] != "nearest" or crops:
        return 0
    shape = operands[0]
    taken = nearest_elements(shape, attrs, *operands[1:])
    times = {len(index) // shape[axis] for axis, index in taken.items()}
    if taken.keys() != {2, 3} or len(times) != 1 or (count := times.pop()) < 2:
        return 0
    alike = (np.array_equal(index, np.repeat(np.arange(shape[axis]), count)) for axis, index in taken.items())
    return count if all(alike) else 0


def _operands(graph: Graph, node: Node) -> tuple[list[int], np.ndarray | None, np.ndarray | None] | None:
    """The shape of the image that a Resize reads, and its constant scales and sizes; None where one of them is not known."""
    shape = static_shape(graph, node.inputs[0], 4)
    given = [graph.arrays.get(name) if name else None for name in node.inputs[1:]]
    if shape is None or any(a is None for a, name in zip(given, node.inputs[1:], strict=True) if name):
        return None
    sides = [d for d in shape if d is not None]
    scales, sizes = (given[0], None) if graph.opset() < 11 else (*given[1:3], None, None)[:2]
    return (sides, scales, sizes) if len(sides) == 4 else None


def _feeds_a_layer(graph: Graph, node: Node) -> bool:
    waiting, seen = list(node.outputs), set[str]()
    while waiting:
        for reader in graph.consumers.get(waiting.pop(), ()):
            if is_layer(reader):
                return True
            waiting += [o for o in reader.outputs if o not in seen]
            seen.update(reader.outputs)
    return False
