"""Shared by the rewrites: which nodes they touch, and how one node becomes several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh

Applies = Callable[[Node], bool]


def everywhere(node: Node) -> bool:
    """True: no node is excluded."""
    return True


class Rewrite(Protocol):
    """A rewrite of the nodes that `applies` accepts; it returns `graph` itself if there are none."""

    def __call__(self, graph: Graph, applies: Applies = everywhere) -> Graph:
        """The rewritten graph."""
        ...


def candidates(graph: Graph, applies: Applies, *op_types: str) -> Iterator[Node]:
    """The nodes of these standard operators that are to be quantized."""
    return (n for n in graph.nodes if n.op_type in op_types and not n.domain and applies(n))


def substitute(
    graph: Graph, nodes: Mapping[Node, Sequence[Node]], arrays: Mapping[str, np.ndarray] | None = None
) -> Graph:
    """The graph with each of these nodes replaced by several, and some arrays added; itself if there are none."""
    if not nodes:
        return graph
    spliced = tuple(m for n in graph.nodes for m in nodes.get(n, (n,)))
    return graph.with_arrays({**graph.arrays, **(arrays or {})}, nodes=spliced)


def multiply(graph: Graph, factors: Mapping[Node, float]) -> Graph:
    """The graph with the first output of each of these nodes multiplied by a number.

    The product takes the output's name, so that readers, graph outputs and quantizers keep it.
    """
    taken, named = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for node, factor in factors.items():
        output = node.outputs[0]
        value = graph.values.get(output)
        dtype = np.dtype(np.float32) if value is None or value.dtype is None else value.dtype
        inner, scale = fresh(f"{output}_Mul", taken), fresh(f"{output}_Scale", taken)
        arrays[scale] = np.asarray(factor, dtype)
        attrs = {"broadcast": 1} if graph.opset() < 7 else {}
        product = Node("Mul", (inner, scale), (output,), attrs, name=fresh(f"{output}_Mul", named))
        nodes[node] = (node.replace(outputs=(inner, *node.outputs[1:])), product)
    return substitute(graph, nodes, arrays)


def node_names(graph: Graph) -> set[str]:
    """The names of all nodes; onnxruntime refuses a model that has one of them twice."""
    return {n.name for n in graph.walk()}


def static_shape(graph: Graph, name: str, rank: int) -> tuple[int | None, ...] | None:
    """The dims of a float tensor of this rank, with None for those that depend on the data; None for any other tensor."""
    value = graph.values.get(name)
    if value is None or value.dtype is None or value.dtype.kind != "f" or value.shape is None:
        return None
    return tuple(d if isinstance(d, int) and d > 0 else None for d in value.shape) if len(value.shape) == rank else None
