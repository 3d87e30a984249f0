"""Concats of Concats as one: a copy fewer of what the inner one joins."""

from __future__ import annotations

from jq.graph import Graph, Node
from jq.graph.unused import remove_unused
from jq.npu.rewrites.edits import Applies, candidates, everywhere
from jq.ops.kinds import is_concat


def flat_concat(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with the operands of a Concat for its output, where another Concat along the same axis alone reads it."""
    nodes: dict[Node, Node | None] = {}
    for node in candidates(graph, applies, "Concat"):
        inner = {name: made for name in node.inputs if (made := _inner(graph, node, name)) and applies(made)}
        if inner and nodes.keys().isdisjoint(inner.values()):
            parts = (inner[name].inputs if name in inner else (name,) for name in node.inputs)
            nodes[node] = node.replace(inputs=tuple(name for part in parts for name in part))
    return flat_concat(remove_unused(graph.edit(nodes)), applies) if nodes else graph


def _inner(graph: Graph, node: Node, name: str) -> Node | None:
    made = graph.producer.get(name)
    alone = made is not None and is_concat(made) and graph.sole_reader(name) is node and node.inputs.count(name) == 1
    return made if alone and made is not None and _axis(graph, made) == _axis(graph, node) else None


def _axis(graph: Graph, node: Node) -> int:
    axis, value = int(node.attrs["axis"]), graph.values.get(node.outputs[0])
    return axis + len(value.shape) if axis < 0 and value is not None and value.shape is not None else axis
