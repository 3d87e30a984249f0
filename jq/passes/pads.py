"""Pad before an operator that pads by itself."""

from __future__ import annotations

import numpy as np

from jq.graph import Graph, Node
from jq.registry import schema


def fuse_pads(graph: Graph) -> Graph:
    """Return the graph with zeros around images padded by the Conv that reads them, or by their only AveragePool."""
    nodes: dict[Node, Node | None] = {}
    for node in graph.nodes:
        source = graph.producer.get(node.inputs[0]) if node.inputs else None
        if node.op_type not in ("Conv", "AveragePool") or node.domain or source is None or source.op_type != "Pad":
            continue
        around = _zeros_around(graph, source)
        if around is None or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
            continue
        attrs = dict(node.attrs)
        own = attrs.get("pads") or (0,) * len(around)
        if node.op_type == "AveragePool":
            counted = attrs.get("count_include_pad", 0) or not any(own)
            if (
                not counted
                or attrs.get("ceil_mode", 0)
                or graph.sole_reader(node.inputs[0]) is None
                or graph.opset() < 7
            ):
                continue
            attrs["count_include_pad"] = 1  # the zeros of the Pad are pixels like others
        if len(own) != len(around):
            continue
        attrs["pads"] = tuple(a + b for a, b in zip(own, around, strict=True))
        if node.op_type == "AveragePool" and any(
            p >= k for p, k in zip(attrs["pads"], attrs["kernel_shape"] * 2, strict=True)
        ):
            continue  # onnxruntime wants a pixel in every window
        nodes[node] = node.replace(inputs=(source.inputs[0], *node.inputs[1:]), attrs=attrs)
    return graph.edit(nodes) if nodes else graph


def _zeros_around(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The pads of the spatial axes of a Pad that puts zeros there, and nowhere else."""
    names = [i.name for i in found.inputs] if (found := schema("Pad", "", graph.opset())) else []
    given = {name: graph.arrays.get(i) for name, i in zip(names, node.inputs, strict=False) if i and name != "data"}
    if node.domain or node.attrs.get("mode", "constant") != "constant" or any(v is None for v in given.values()):
        return None
    value = given.get("constant_value", np.asarray(node.attrs.get("value", 0.0)))
    pads = given.get("pads", np.asarray(node.attrs.get("pads", node.attrs.get("paddings", ()))))
    if (
        "axes" in given
        or value is None
        or pads is None
        or value.any()
        or pads.ndim != 1
        or pads.size < 6
        or pads.size % 2
    ):
        return None
    begin, end = pads[: pads.size // 2], pads[pads.size // 2 :]
    if begin[:2].any() or end[:2].any() or (pads < 0).any():
        return None
    return (*map(int, begin[2:]), *map(int, end[2:]))
