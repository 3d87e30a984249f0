"""A quantized graph as the provider sees it: units of nodes that compute between quantizers, and what they read.

A unit is a set of nodes that hand each other float tensors; between units stand quantizers. A graph without quantizers
is one unit or few.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.quantizers import computes_on_codes, is_dequantize, is_quantize
from jq.ops.kinds import is_layer


@dataclasses.dataclass(frozen=True)
class Codes:
    """How a tensor is held: the type of its codes, and whether scale and zero point are what X1 takes."""

    bits: int
    power_of_two: bool
    centred: bool  # a zero point of 0 for signed codes, of half the range for others
    scales: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class ComputeUnit:
    """Nodes that compute between quantizers, in the order of the graph."""

    nodes: tuple[Node, ...]
    sources: frozenset[int]  # the units whose tensors it reads
    activations: tuple[Codes, ...]
    weights: tuple[Codes, ...]
    between: bool  # whether it reads and writes quantized tensors alone, weights of layers among them

    @property
    def layer(self) -> Node:
        """The node that the unit is called after: its first."""
        return self.nodes[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Units:
    """A graph's units in an order in which each stands behind its sources, and the units of each quantizer."""

    graph: Graph
    units: tuple[ComputeUnit, ...]
    of_node: Mapping[Node, int]
    quantizers: Mapping[Node, tuple[int, ...]]  # of a QuantizeLinear, who makes its tensor; else who reads it


def constant(graph: Graph, name: str) -> np.ndarray | None:
    """The array behind a tensor, codes where it is dequantized; None if it is computed."""
    seen = 0
    while name not in graph.arrays:
        node = graph.producer.get(name)
        if node is None or not (is_dequantize(node) or is_quantize(node)) or seen > 8:
            return None
        name, seen = node.inputs[0], seen + 1
    return graph.arrays[name]


def is_quantizer(node: Node) -> bool:
    """Whether a node is a QuantizeLinear or a DequantizeLinear, in whatever vendor's form."""
    return is_quantize(node) or is_dequantize(node)


def units_of(graph: Graph) -> Units:
    """Return a graph's units."""
    computing = [n for n in graph.nodes if not is_quantizer(n)]
    groups = _groups(graph, computing)
    of_node = {node: number for number, nodes in enumerate(groups) for node in nodes}
    origins = _origins(graph)
    units = tuple(_unit(graph, nodes, of_node, origins) for nodes in groups)
    order = _ordered(units)
    renumbered = {old: new for new, old in enumerate(order)}
    units = tuple(
        dataclasses.replace(units[old], sources=frozenset(renumbered[s] for s in units[old].sources)) for old in order
    )
    of_node = {node: renumbered[number] for node, number in of_node.items()}
    return Units(graph, units, of_node, _quantizers(graph, of_node, origins))


def _groups(graph: Graph, nodes: Sequence[Node]) -> list[tuple[Node, ...]]:
    """Nodes that hand each other tensors without a quantizer, together."""
    parent = {n: n for n in nodes}

    def root(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in nodes:
        for name in node.reads():
            source = graph.producer.get(name)
            if source is not None and source in parent and not computes_on_codes(source):
                parent[root(node)] = root(source)
    members: dict[Node, list[Node]] = {}
    for node in nodes:
        members.setdefault(root(node), []).append(node)
    return [tuple(group) for group in members.values()]


def _origins(graph: Graph) -> dict[str, Node | None]:
    """The node that computes what each quantizer makes, through all quantizers before it; None for inputs and constants."""
    origins: dict[str, Node | None] = {}
    for node in filter(is_quantizer, graph.nodes):
        source = graph.producer.get(node.inputs[0])
        origin = source if source is None or not is_quantizer(source) else origins[node.inputs[0]]
        origins |= dict.fromkeys(filter(None, node.outputs), origin)
    return origins


def _unit(
    graph: Graph, nodes: tuple[Node, ...], of_node: Mapping[Node, int], origins: Mapping[str, Node | None]
) -> ComputeUnit:
    own = of_node[nodes[0]]
    sources, activations, weights, between = set(), [], [], True
    for node in nodes:
        between &= not (is_layer(node) and any(name in graph.arrays for name in node.inputs[1:2]))
        for name in node.reads():
            if name in graph.arrays:
                continue
            maker = graph.producer.get(name)
            quantizer = maker if maker is not None and is_quantizer(maker) else None
            source = maker if quantizer is None else origins[name]
            if source is not None and of_node[source] == own and quantizer is None:
                continue
            if source is not None:
                sources.add(of_node[source])
            if constant(graph, name) is not None:
                weights += [] if quantizer is None else [codes_of(graph, quantizer)]
            elif quantizer is not None and is_dequantize(quantizer):
                activations.append(codes_of(graph, quantizer))
            else:
                between &= computes_on_codes(node)
        for name in filter(None, node.outputs):
            readers = [r for r in graph.consumers.get(name, ()) if of_node.get(r, -1) != own]
            activations += [codes_of(graph, r) for r in readers if is_quantize(r)]
            leaves = any(not is_quantize(r) for r in readers) or name in graph.output_names
            between &= not leaves or computes_on_codes(node)
    return ComputeUnit(nodes, frozenset(sources - {own}), tuple(activations), tuple(weights), between)


def codes_of(graph: Graph, quantizer: Node) -> Codes:
    """How a quantizer holds its tensor."""
    arrays = [graph.arrays.get(name) for name in quantizer.inputs[1:3]]
    scale, zero = arrays + [None] * (2 - len(arrays))
    dtype = np.dtype(np.uint8) if zero is None else zero.dtype
    bits = {"int4": 4, "uint4": 4}.get(dtype.name, dtype.itemsize * 8)
    values = np.ones(1) if scale is None else np.asarray(scale, np.float64).ravel()
    exact = scale is not None and all(v > 0 and math.frexp(v)[0] == 0.5 for v in values.tolist())
    middle = 0 if dtype.name.startswith("int") else 1 << bits - 1
    centred = dtype.name.startswith("int") if zero is None else bool((np.asarray(zero, np.int64) == middle).all())
    return Codes(bits, exact, centred, values.size)


def _ordered(units: Sequence[ComputeUnit]) -> list[int]:
    """Numbers of units, each behind its sources; those of a cycle, through float tensors, stay as they stand."""
    order: list[int] = []
    state = [0] * len(units)
    for first in range(len(units)):
        stack = [(first, False)]
        while stack:
            number, done = stack.pop()
            if done:
                order.append(number)
            elif not state[number]:
                state[number] = 1
                stack.append((number, True))
                stack += [(s, False) for s in units[number].sources if not state[s]]
    return order


def _quantizers(
    graph: Graph, of_node: Mapping[Node, int], origins: Mapping[str, Node | None]
) -> dict[Node, tuple[int, ...]]:
    """The units of each quantizer: of a QuantizeLinear, who makes its tensor; else who reads it, the nearest first."""
    readers: dict[Node, dict[int, None]] = {}
    for node in filter(is_quantizer, reversed(graph.nodes)):
        direct = [reader for o in node.outputs for reader in graph.consumers.get(o, ())]
        near = dict.fromkeys(of_node[reader] for reader in direct if reader in of_node)
        for reader in reversed(direct):
            near |= readers.get(reader, {})
        readers[node] = near
    units = {}
    for node in filter(is_quantizer, graph.nodes):
        origin = origins.get(node.outputs[0])
        made = () if origin is None else (of_node[origin],)
        units[node] = made if is_quantize(node) else tuple(readers[node])
    return units
