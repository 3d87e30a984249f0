"""Multiplying: graphs with other arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.unused import remove_unused
from jq.recovery.equalization.groups import Groups


def scaled(graph: Graph, groups: Groups, factors: np.ndarray) -> Graph:
    """Return the graph with every channel multiplied by the factor of its class, and its readers' weights divided.

    Factors that are powers of two change no output by a bit. The graph itself if an array would not be finite.
    """
    changed: dict[Node, dict[int, np.ndarray]] = {}
    for layer in groups.layers:
        up, down = factors[groups.channels[layer.y]], factors[groups.channels[layer.x][layer.reads]]
        weight = graph.params[layer.node.inputs[1]]
        factor = np.broadcast_to((up[:, None] / down)[:, :, None], layer.weight.shape)
        with np.errstate(over="ignore"):
            arrays = {1: (weight * layer.turned(factor)).astype(weight.dtype)}
        if layer.bias is not None:
            bias = graph.params[layer.node.inputs[2]]
            with np.errstate(over="ignore"):
                own = (np.broadcast_to(bias.reshape(-1), up.shape) * up).astype(bias.dtype)
            own = own[:1] if (own == own[0]).all() and bias.size == 1 else own  # one number for all channels stays one
            arrays[2] = own.reshape(bias.shape) if bias.size == own.size else own
        if not all(np.isfinite(a).all() for a in arrays.values()):
            return graph
        changed[layer.node] = arrays
    return rewritten(graph, changed)


def rewritten(graph: Graph, arrays: Mapping[Node, Mapping[int, np.ndarray | None]]) -> Graph:
    """Return the graph with other arrays at these inputs of these nodes; an array that others read too is not touched."""
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    changed: dict[str, np.ndarray] = {}
    for node, of_node in arrays.items():
        inputs = list(node.inputs)
        for index, array in of_node.items():
            if array is None or np.array_equal(array, graph.params[inputs[index]]):
                continue
            if graph.sole_reader(inputs[index]) is None:
                inputs[index] = fresh(f"{node.label}.{inputs[index]}", taken)
            changed[inputs[index]] = array
        nodes[node] = node.replace(inputs=tuple(inputs))
    return remove_unused(graph.edit(nodes, changed)) if changed else graph
