"""If with a constant condition: exporters leave them where a rank decides which branch runs."""

from __future__ import annotations

from jq.graph import Graph, Node
from jq.graph.edit import fresh, rename


def inline_branches(graph: Graph) -> Graph:
    """Return the graph with each If of constant condition replaced by the branch that is taken."""
    taken, labels = set(graph.tensors), {n.name for n in graph.nodes}
    nodes: list[Node] = []
    for node in graph.nodes:
        known = node.op_type == "If" and not node.domain and node.inputs and node.inputs[0] in graph.constants
        nodes += _branch(node, bool(graph.constants[node.inputs[0]].all()), taken, labels) if known else [node]
    return graph if tuple(nodes) == graph.nodes else graph.replace(nodes=tuple(nodes))


def _branch(node: Node, condition: bool, taken: set[str], labels: set[str]) -> list[Node]:
    body = node.subgraphs.get("then_branch" if condition else "else_branch")
    if body is None:
        return [node]
    # Two branches may use one name for different tensors or nodes; in the outer graph they would collide.
    names = {o: fresh(f"{node.label}/{o}", taken) for o in body.producer}
    sources = [names.get(v.name, v.name) for v in body.outputs]
    inner = [n.replace(name=n.name and fresh(n.name, labels)) for n in rename(body, names).nodes]
    pairs = [(s, o) for s, o in zip(sources, node.outputs, strict=False) if o]
    return [*inner, *(Node("Identity", (s,), (o,), {}, fresh(f"{node.label}/{o}", labels)) for s, o in pairs)]
