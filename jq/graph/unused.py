"""Removal of unused nodes, optional outputs, weights and constants."""

from __future__ import annotations

from onnx.defs import OpSchema

from jq.graph import Graph, Node
from jq.graph.schemas import schema, schema_versions

_OPTIONAL = OpSchema.FormalParameterOption.Optional


def remove_unused(graph: Graph) -> Graph:
    """Return the graph without the nodes, optional outputs and arrays that no output depends on."""
    graph = _pruned(graph)
    read = graph.output_names.union(*(n.reads() for n in graph.nodes))
    if graph.arrays.keys() <= read:
        return graph
    return graph.with_arrays({k: a for k, a in graph.arrays.items() if k in read})


def _pruned(graph: Graph) -> Graph:
    needed = set(graph.output_names)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.isdisjoint(filter(None, node.outputs)):
            continue
        node = _trimmed(node, graph.opset(node.domain), needed)
        inner = node.subgraphs
        pruned = {k: _pruned(g) for k, g in inner.items()}
        if any(pruned[k] is not inner[k] for k in inner):
            node = node.replace(attrs=dict(node.attrs) | pruned)
        needed.update(node.reads())
        kept.append(node)
    nodes = tuple(reversed(kept))
    return graph if nodes == graph.nodes else graph.replace(nodes=nodes)


def _trimmed(node: Node, opset: int, needed: set[str]) -> Node:
    """Return the node without unused optional outputs, such as Dropout's mask or MaxPool's indices."""
    definition = schema(node.op_type, node.domain, opset)
    if len(node.outputs) < 2 or definition is None:
        return node
    # Before opset 14 a BatchNormalization is in training mode by the number of its outputs.
    if "training_mode" in schema_versions(node.op_type, node.domain)[-1].attributes:
        return node
    optional = {i for i, o in enumerate(definition.outputs) if o.option == _OPTIONAL}
    outputs = [o if o in needed or i not in optional else "" for i, o in enumerate(node.outputs)]
    while not outputs[-1]:
        outputs.pop()
    return node if tuple(outputs) == node.outputs else node.replace(outputs=tuple(outputs))
