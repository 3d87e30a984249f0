"""Fusion of Pad into an operator that pads by itself."""

from __future__ import annotations

from collections.abc import Sequence

from jq.graph import Graph, Node
from jq.ops.padding import padding


def fuse_pads(graph: Graph) -> Graph:
    """Return the graph with zero padding moved into the Conv, or the only AveragePool, that reads it."""
    nodes: dict[Node, Node | None] = {}
    for node in graph.nodes:
        source = graph.producer.get(node.inputs[0]) if node.inputs else None
        if node.op_type not in ("Conv", "AveragePool") or node.domain or source is None:
            continue
        pad = padding(graph, source)
        around = None if pad is None else pad.zeros_around
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
