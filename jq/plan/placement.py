"""Placement: which tensors are quantized, operator by operator.

Each operator's own rule stands in its entry of the op table (`Quant`). What concerns two nodes is here:
an activation that is part of the operator before it, values that keep their scale on their way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from jq.config import QuantConfig
from jq.graph import Graph, Node
from jq.ops.masks import masks
from jq.ops.table import Quant, lookup
from jq.plan.selection import selected


@dataclasses.dataclass(frozen=True)
class Placement:
    """The quantized tensors of a graph, each with the node whose options it has."""

    activations: Mapping[str, Node]
    weights: Mapping[str, Node]
    products: Mapping[str, Node]  # biases that have the scale of the products that they are added to
    nodes: frozenset[str]  # first outputs of the nodes that are quantized


def place(graph: Graph, config: QuantConfig, floats: Collection[str]) -> Placement:
    """Place one scale for each tensor that is quantized; `floats` are the activations that may be."""
    chosen = selected(graph, config)
    masked = frozenset[str]() if config.strict_quark else masks(graph)
    floats, kept = frozenset(floats) - masked, frozenset(config.float_tensors)
    activations: dict[str, Node] = {}
    weights: dict[str, Node] = {}
    products: dict[str, Node] = {}
    for node in graph.nodes:
        rule = rule_of(graph, node)
        if rule is None or not node.outputs or node.outputs[0] not in chosen:
            continue
        if rule.follows and node.inputs[0] not in activations:
            continue
        options = config.of(node)
        for parameter, name in _operands(graph, node):
            if name in kept:
                continue
            if parameter == rule.bias and options.bias == "int32" and name in graph.params:
                products.setdefault(name, node)
            elif parameter == rule.bias and (options.bias == "float" or name not in graph.params):
                continue
            elif is_weight(graph, name) and name not in masked:
                weights.setdefault(name, node)
            elif name in floats and not config.weights_only:
                activations.setdefault(name, node)
        for name in node.outputs[: rule.outputs]:
            if name in floats and name not in kept and not config.weights_only:
                activations.setdefault(name, node)
    for name in absorbed(graph) if config.fuse_activations else ():
        activations.pop(name, None)
    return Placement(activations, weights, products, chosen)


def rule_of(graph: Graph, node: Node) -> Quant | None:
    """The op table's placement rule of a node; None if it cannot be quantized."""
    opset = graph.opset(node.domain)
    entry = lookup(node, opset)
    rule = Quant() if entry is None else entry.quant
    if opset < rule.since or (rule.when and not rule.when(node.attrs, [graph.arrays.get(i) for i in node.inputs])):
        return None
    return rule


def absorbed(graph: Graph) -> dict[str, Node]:
    """Tensors that are never rounded, with the node that takes them: an activation, or a pool that pads by itself."""
    takers = {}
    for node in graph.nodes:
        output = next(iter(node.outputs), "")
        reader = graph.sole_reader(output) if output else None
        if reader is None or reader.inputs[0] != output:
            continue
        before, after = rule_of(graph, node), rule_of(graph, reader)
        if before is None or after is None:
            continue
        operands = [graph.arrays.get(i) for i in reader.inputs]
        activation = before.absorbs and after.absorbed and after.absorbed(reader.attrs, operands)
        if activation or (after.absorbs_pads and before.pads):
            takers[output] = reader
    return takers


def shared(graph: Graph, nodes: Collection[str], tensors: Collection[str]) -> dict[str, str]:
    """Tensors that hold values of another one and so have its scale, with the first that these values come from."""
    sources: dict[str, str] = {}
    for node in graph.nodes:
        rule = rule_of(graph, node)
        if rule is None or not rule.shares or node.outputs[0] not in nodes or node.inputs[0] not in tensors:
            continue
        source = sources.get(node.inputs[0], node.inputs[0])
        sources |= {output: source for output in node.outputs[: rule.outputs] if output in tensors}
    return sources


def is_weight(graph: Graph, name: str) -> bool:
    """Whether a tensor is an array of the graph, and of the floats that quantizers take."""
    return name in graph.params and graph.params[name].dtype == np.float32


def _operands(graph: Graph, node: Node) -> Iterator[tuple[str, str]]:
    """The inputs of a node that are quantized, each with its parameter; what must be known while tracing is not."""
    entry, rule = lookup(node, graph.opset(node.domain)), rule_of(graph, node)
    for index, name in enumerate(node.inputs):
        named = entry is not None and entry.variadic is None and index < len(entry.inputs)
        parameter = entry.inputs[index] if named and entry is not None else ""
        known = entry is not None and parameter in (*entry.static, *entry.settled)
        if name and not known and rule is not None and (rule.inputs is None or parameter in rule.inputs):
            yield parameter, name
