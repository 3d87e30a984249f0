"""The order of a graph's nodes: each after those that make what it reads."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from jq.errors import ModelError
from jq.graph.model import Node, Value


def sorted_nodes(nodes: Sequence[Node], known: set[str] | frozenset[str], outputs: Iterable[Value]) -> tuple[Node, ...]:
    """Nodes in dependency order (stable), or a ModelError that names the cause."""
    producer: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.outputs):
            if name in producer or name in known:
                raise ModelError(f"node {node.label!r} ({node.op_type}): its output {name!r} is defined twice")
            producer[name] = index
    waiting: list[set[int]] = []
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        before = set()
        for name in dict.fromkeys(node.reads()):
            if name in producer:
                before.add(producer[name])
            elif name not in known:
                reads = f"node {node.label!r} ({node.op_type}) reads {name!r}"
                raise ModelError(f"{reads}, which is not an input, an initializer or a node output")
        for source in before:
            readers.setdefault(source, []).append(index)
        waiting.append(before)
    for value in outputs:
        if value.name and value.name not in producer and value.name not in known:
            raise ModelError(f"no node produces graph output {value.name!r}")
    ready = [i for i, before in enumerate(waiting) if not before]
    order: list[Node] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(nodes[index])
        for reader in readers.get(index, ()):
            waiting[reader].discard(index)
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        stuck = next(n for i, n in enumerate(nodes) if waiting[i])
        raise ModelError(f"the graph is cyclic: node {stuck.label!r} ({stuck.op_type}) depends on itself")
    return tuple(order)
