"""Split as the slices that it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.npu.rewrites.edits import Applies, candidates, everywhere, node_names, substitute


def split_to_slice(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with a Slice for each output of each Split whose sizes are known."""
    taken, names = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in candidates(graph, applies, "Split"):
        value = graph.values.get(node.inputs[0])
        shape = None if value is None else value.shape
        axis = node.attrs.get("axis", 0)
        if shape is not None:
            if not -len(shape) <= axis < len(shape):
                continue
            axis %= len(shape)  # early opsets have no negative axes in Slice
        sizes = _sizes(graph, node, None if shape is None else shape[axis])
        if sizes is None:
            continue
        ends = list(itertools.accumulate(sizes))
        slices = []
        for index, (output, size, end) in enumerate(zip(node.outputs, sizes, ends, strict=True)):
            if not output:
                continue
            inputs, attrs = node.inputs[:1], {}
            if graph.opset() < 10:
                attrs = {"starts": (end - size,), "ends": (end,), "axes": (axis,)}
            else:
                given = {"starts": end - size, "ends": end, "axes": axis, "steps": 1}
                named = {fresh(f"{output}_{k}_{index}", taken): np.array([v], np.int64) for k, v in given.items()}
                inputs, arrays = (*inputs, *named), arrays | named
            slices.append(Node("Slice", inputs, (output,), attrs, name=fresh(f"{output}_{index}", names)))
        nodes[node] = slices
    return substitute(graph, nodes, arrays)


def _sizes(graph: Graph, node: Node, whole: int | str | None) -> list[int] | None:
    """How many elements go to each output; None where only the data tell, or where they do not fit."""
    count = len(node.outputs)
    if len(node.inputs) > 1 and node.inputs[1]:
        given = graph.arrays.get(node.inputs[1])  # opset 1 has it in the type of the data
        if given is None:
            return None
        sizes = [int(s) for s in given.reshape(-1)]
    elif "split" in node.attrs:
        sizes = list(node.attrs["split"])
    elif isinstance(whole, int):
        largest = -(-whole // count)
        sizes = [largest] * (count - 1) + [whole - largest * (count - 1)]  # the last one may be smaller
        if "num_outputs" not in node.attrs and sizes[-1] != largest:
            return None
    else:
        return None
    fits = len(sizes) == count and min(sizes) >= 0 and (not isinstance(whole, int) or sum(sizes) == whole)
    return sizes if fits else None
