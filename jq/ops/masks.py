"""Masks of scores: where a network adds or selects a number so far below them that a softmax makes it zero."""

from __future__ import annotations

import numpy as np

from jq.graph import Graph, Node
from jq.ops.kinds import combines, is_cast, is_softmax
from jq.ops.table import lookup

_FAR = 1e3  # from zero: scores are not, and exp(-1e3) is zero in every format


def masks(graph: Graph) -> frozenset[str]:
    """Return the tensors that hold masks, from the constant that is far from zero to what the softmax reads.

    Exporters write them as `(1 - mask) * -3.4e38`, `Where(mask, scores, -inf)`, or a constant that is added. The range
    of such a tensor says nothing of the scores in it, so no scale of integers serves both.

    >>> import jq
    >>> sorted(masks(jq.load(jq.zoo.path("fashion_resnet"))))
    []
    """
    far: set[str] = set()
    for node in filter(lambda n: _passes(graph, n), graph.nodes):
        far |= {i for i in node.inputs if i in graph.params and np.abs(graph.params[i]).max(initial=0) >= _FAR}
        if not far.isdisjoint(node.inputs):
            far.update(node.outputs)
    read: set[str] = set()
    for node in reversed(graph.nodes):
        if is_softmax(node):
            read.add(node.inputs[0])
        elif not read.isdisjoint(node.outputs) and _passes(graph, node):
            read.update(node.inputs)
    return frozenset(far & read)


def _passes(graph: Graph, node: Node) -> bool:
    """Whether a mask is still one behind a node."""
    entry = lookup(node, graph.opset(node.domain))
    return combines(node) or is_cast(node) or (entry is not None and entry.moves is not None)
