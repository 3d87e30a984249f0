"""Edits that several passes share: renaming tensors, and redirecting their readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jq.graph import Graph, Node, Value

_MEANINGLESS = frozenset({None, "", "?", "-1", "None", "unk", "unknown"})


def rename(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Return the graph with its nodes' tensors renamed, subgraphs included."""

    def visit(node: Node) -> Node:
        node, outputs = reading(node, names), tuple(names.get(o, o) for o in node.outputs)
        return node if outputs == node.outputs else node.replace(outputs=outputs)

    return graph.replace(nodes=tuple(visit(n) for n in graph.nodes))


def reading(node: Node, names: Mapping[str, str]) -> Node:
    """Return the node with its inputs renamed, subgraphs included."""
    if names.keys().isdisjoint(node.reads()):
        return node
    attrs = dict(node.attrs)
    for key, inner in node.subgraphs.items():
        own = {v.name for v in inner.inputs} | inner.producer.keys()
        outer = {k: v for k, v in names.items() if k not in own}
        outputs = tuple(dataclasses.replace(v, name=outer.get(v.name, v.name)) for v in inner.outputs)
        attrs[key] = inner.replace(nodes=tuple(reading(n, outer) for n in inner.nodes), outputs=outputs)
    return node.replace(inputs=tuple(names.get(i, i) for i in node.inputs), attrs=attrs)


def bypass(graph: Graph, same: Mapping[str, str]) -> Graph:
    """Return the graph without the nodes all of whose outputs equal other tensors, as `same` maps them.

    Their readers read the other tensor instead. If the output is a graph output, the other tensor takes
    its name; if it cannot, because it is itself a graph input or output, the node stays.
    """

    def origin(name: str) -> str:
        while name in same:
            name = same[name]
        return name

    names: dict[str, str] = {}
    moved: dict[str, str] = {}  # the tensor that takes an output's name -> that name
    copied: dict[str, np.ndarray] = {}
    dropped: list[Node] = []
    for node in graph.nodes:
        made = {o: origin(o) for o in node.outputs if o}
        public = {o: x for o, x in made.items() if o in graph.output_names}
        free = {x: o for o, x in public.items() if x in graph.producer and x not in graph.output_names | moved.keys()}
        bound = any(free.get(x) != o and x not in graph.arrays for o, x in public.items())
        if bound or any(o == x for o, x in made.items()):
            continue
        dropped.append(node)
        moved |= free
        copied |= {o: graph.arrays[x] for o, x in public.items() if x not in free}
        names |= {o: x for o, x in made.items() if o not in public}
    if not dropped:
        return graph
    names = {o: moved.get(x, x) for o, x in names.items()} | moved
    return rename(graph.edit(dict.fromkeys(dropped), copied), names)


def undeclared(graph: Graph) -> Graph:
    """Return the graph without declared types of inner tensors: `values` then follows from the inputs alone.

    Tools that make a batch dynamic often change the inputs only and leave the old batch everywhere else.
    Input dims without a reliable name get a unique one: some exporters call every dim "?".
    """

    def named(value: Value) -> Value:
        if value.shape is None:
            return value
        dims = (f"{value.name}.{i}" if d in _MEANINGLESS else d for i, d in enumerate(value.shape))
        return dataclasses.replace(value, shape=tuple(dims))

    outputs = tuple(Value(v.name, v.dtype) for v in graph.outputs)
    return graph.replace(declared={}, inputs=tuple(map(named, graph.inputs)), outputs=outputs)


def fresh(name: str, taken: set[str]) -> str:
    """Return an unused name derived from this one, and mark it as taken.

    >>> names = {"a", "a.1"}
    >>> fresh("a", names), fresh("a", names), fresh("b", names)
    ('a.2', 'a.3', 'b')
    """
    if name in taken:
        used, free = 0, 1  # thousands of nodes may have one name: numbers are found by halving
        while f"{name}.{free}" in taken:
            used, free = free, 2 * free
        while free - used > 1:
            middle = (used + free) // 2
            used, free = (middle, free) if f"{name}.{middle}" in taken else (used, middle)
        name = f"{name}.{free}"
    taken.add(name)
    return name
