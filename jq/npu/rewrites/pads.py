"""Pads as the pools that read them, and Pads that repeat the edge in the steps that the chip's compiler takes right.

The vendor's compiler takes edge for symmetric (zmaychek84/vaip, vaip_pass_to_xir_ops), which mirrors an image at its edge:
the two are one for a Pad of a pixel, and differ from the second pixel on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.unused import remove_unused
from jq.npu.rewrites.edits import Applies, candidates, everywhere, node_names, substitute
from jq.ops.kinds import is_clip, is_concat, keeps_sign
from jq.ops.padding import padding

_MOST = 8  # Pads in a row


def pad_to_pool(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with zeros around an image that has no negative values in the MaxPool that alone reads them: exact."""
    nodes: dict[Node, Node | None] = {}
    for node in candidates(graph, applies, "MaxPool"):
        source = graph.producer.get(node.inputs[0])
        pad = None if source is None or not applies(source) else padding(graph, source)
        around = None if pad is None else pad.zeros_around
        if source is None or around is None or graph.sole_reader(node.inputs[0]) is not node:
            continue
        if _takes(node, around) and _is_never_negative(graph, source.inputs[0]):
            attrs = {k: v for k, v in node.attrs.items() if k != "auto_pad"}
            nodes[node] = node.replace(inputs=source.inputs[:1], attrs={**attrs, "pads": around})
    return remove_unused(graph.edit(nodes)) if nodes else graph


def _takes(pool: Node, around: Sequence[int]) -> bool:
    """Whether a MaxPool without pads of its own may have these, with a pixel of the image in every window."""
    kernel = tuple(pool.attrs.get("kernel_shape", ())) * 2
    plain = len(pool.outputs) == 1 and not pool.attrs.get("ceil_mode", 0) and not any(pool.attrs.get("pads", ()))
    free = pool.attrs.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return plain and free and len(around) == len(kernel) and all(p < k for p, k in zip(around, kernel, strict=True))


def pad_by_ones(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with each Pad that repeats the edge by a few pixels as Pads of one pixel: exact."""
    taken, named = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in candidates(graph, applies, "Pad"):
        pad = padding(graph, node)
        ends = () if pad is None or pad.mode != "edge" else (*pad.front, *pad.behind)
        if not ends or min(ends) < 0 or not 1 < max(ends) <= _MOST:
            continue
        made, x = [], node.inputs[0]
        for step in range(max(ends)):
            last = step == max(ends) - 1
            ones = tuple(int(e > step) for e in ends)
            y = node.outputs[0] if last else fresh(f"{node.outputs[0]}_part", taken)
            own = node.replace(inputs=(x,), outputs=(y,), name=fresh(f"{node.label}_{step}", named))
            if graph.opset() < 11:
                own = own.replace(attrs={"mode": "edge", "pads": ones})
            else:
                amount = fresh(f"{node.label}_by_one", taken)
                arrays[amount] = np.array(ones, np.int64)
                own = own.replace(inputs=(x, amount))
            made.append(own)
            x = y
        nodes[node] = made
    return remove_unused(substitute(graph, nodes, arrays)) if nodes else graph


def _is_never_negative(graph: Graph, name: str) -> bool:
    """Whether the operators in front say that no element of a tensor is below zero."""
    node = graph.producer.get(name)
    if node is None or node.domain:
        return False
    if is_clip(node):
        low = graph.arrays.get(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("min")
        return low is not None and float(np.min(low)) >= 0
    if keeps_sign(node) or is_concat(node):
        return all(_is_never_negative(graph, i) for i in (node.inputs if is_concat(node) else node.inputs[:1]))
    return node.op_type in ("Relu", "Sigmoid", "HardSigmoid", "Softmax")
