"""Fusion of Pad into an operator that pads by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.schemas import schema


def fuse_pads(graph: Graph) -> Graph:
    """Return the graph with zero padding moved into the Conv, or the only AveragePool, that reads it."""
    nodes: dict[Node, Node | None] = {}
    for node in graph.nodes:
        source = graph.producer.get(node.inputs[0]) if node.inputs else None
        if node.op_type not in ("Conv", "AveragePool") or node.domain or source is None or source.op_type != "Pad":
            continue
        around = _zeros_around(graph, source)
        if around is None or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
            continue
        own, averages = node.attrs.get("pads") or (0,) * len(around), node.op_type == "AveragePool"
        if len(own) != len(around):
            continue
        pads = tuple(a + b for a, b in zip(own, around, strict=True))
        if averages and not _counts(graph, node, pads):
            continue
        counted = {"count_include_pad": 1} if averages else {}  # the zeros of the Pad are pixels like others
        attrs = {**node.attrs, "pads": pads, **counted}
        nodes[node] = node.replace(inputs=(source.inputs[0], *node.inputs[1:]), attrs=attrs)
    return graph.edit(nodes) if nodes else graph


def _counts(graph: Graph, node: Node, pads: Sequence[int]) -> bool:
    """Whether an AveragePool that alone reads an image may count zeros around it, up to these pads, as pixels."""
    counted = node.attrs.get("count_include_pad", 0) or not any(node.attrs.get("pads", ()))
    if not counted or node.attrs.get("ceil_mode", 0) or not graph.sole_reader(node.inputs[0]) or graph.opset() < 7:
        return False
    kernel = tuple(node.attrs.get("kernel_shape", ())) * 2
    # onnxruntime wants a pixel in every window
    return len(kernel) == len(pads) and all(p < k for p, k in zip(pads, kernel, strict=True))


def _zeros_around(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The pads of the spatial axes of a Pad that puts zeros there, and nowhere else."""
    names = [i.name for i in definition.inputs] if (definition := schema("Pad", "", graph.opset())) else []
    given = {name: graph.arrays.get(i) for name, i in zip(names, node.inputs, strict=False) if i and name != "data"}
    if node.domain or node.attrs.get("mode", "constant") != "constant" or any(v is None for v in given.values()):
        return None
    value = given.get("constant_value", np.asarray(node.attrs.get("value", 0.0)))
    pads = given.get("pads", np.asarray(node.attrs.get("pads", node.attrs.get("paddings", ()))))
    if "axes" in given or value is None or pads is None or value.any():
        return None
    if pads.ndim != 1 or pads.size < 6 or pads.size % 2:
        return None
    begin, end = pads[: pads.size // 2], pads[pads.size // 2 :]
    if begin[:2].any() or end[:2].any() or (pads < 0).any():
        return None
    return (*map(int, begin[2:]), *map(int, end[2:]))
