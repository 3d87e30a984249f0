"""Which nodes a config quantizes: by operator, by name, by where they stand, and none of a detector's head."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from jq.config import QuantConfig
from jq.errors import ConfigError, suggest
from jq.graph import Graph, Node
from jq.ops.linear import is_linear
from jq.plan.heads import Head, heads
from jq.readings.data_shapes import untraceable


def selected(graph: Graph, config: QuantConfig) -> frozenset[str]:
    """Return the first output of each node that is to be quantized."""
    nodes = [n for n in graph.nodes if config.op_types is None or n.op_type in config.op_types]
    nodes = [n for n in nodes if not any(_matches(n, pattern) for pattern in config.exclude)]
    if config.input_nodes or config.output_nodes:
        first, last = (_named(graph, names) for names in (config.input_nodes, config.output_nodes))
        inside = _between(graph, first, last)
        nodes = [n for n in nodes if n in inside]
    for starts, ends in config.exclude_subgraphs:
        inside = _between(graph, _named(graph, starts), _named(graph, ends))
        nodes = [n for n in nodes if n not in inside]
    decoding = {n for head in float_heads(graph, config) for n in head.nodes}
    apart = decoding.union(untraceable(graph))
    return frozenset(n.outputs[0] for n in nodes if n.outputs and n not in apart)


def float_heads(graph: Graph, config: QuantConfig) -> tuple[Head, ...]:
    """Return the heads that a config leaves in float."""
    return heads(graph) if config.head == "float" and config.calibrates and not config.strict_quark else ()


def end_tensors(graph: Graph, config: QuantConfig) -> frozenset[str]:
    """Return what the first and the last layers read, and the outputs, if a config has other formats for these.

    A first layer has no layer on one of its ways from the inputs of the graph, a last one none on one to the outputs.
    """
    if config.end_bits is None:
        return frozenset()
    layers = dict.fromkeys(node for node in graph.nodes if is_linear(graph, node))
    readers = {v.name for v in graph.inputs}
    for node in graph.nodes:
        if node not in layers and not readers.isdisjoint(node.reads()):
            readers.update(node.outputs)
    makers = set(graph.output_names)
    for node in reversed(graph.nodes):
        if node not in layers and not makers.isdisjoint(node.outputs):
            makers.update(node.reads())
    ends = [n for n in layers if not readers.isdisjoint(n.reads()) or not makers.isdisjoint(n.outputs)]
    return frozenset({*makers, *(name for node in ends for name in node.reads())})


def check_names(graph: Graph, config: QuantConfig) -> None:
    """Raise a ConfigError for a node or operator that the graph does not have."""
    labels = [n.label for n in graph.nodes]
    for pattern in (*config.exclude, *(pattern for pattern, _ in config.overrides)):
        if not any(_matches(node, pattern) for node in graph.nodes):
            known = [*labels, *{n.op_type for n in graph.nodes}]
            raise ConfigError(f"{pattern!r} matches no node, by name or operator.{suggest(pattern, known)}")
    _named(graph, (*config.input_nodes, *config.output_nodes))
    for starts, ends in config.exclude_subgraphs:
        _named(graph, (*starts, *ends))


def named(graph: Graph, config: QuantConfig) -> frozenset[str]:
    """Return the first output of each node that the config names, itself or by a pattern, whatever for."""
    subgraphs = (name for ends in config.exclude_subgraphs for names in ends for name in names)
    names = {*config.input_nodes, *config.output_nodes, *subgraphs}
    patterns = [pattern for pattern, _ in config.overrides]
    nodes = (n for n in graph.nodes if n.label in names or any(fnmatch.fnmatchcase(n.label, p) for p in patterns))
    return frozenset(n.outputs[0] for n in nodes if n.outputs)


def literal(name: str) -> str:
    """Return the pattern that matches this name only.

    >>> literal("block[0]")
    'block[[]0]'
    """
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _matches(node: Node, pattern: str) -> bool:
    return pattern == node.op_type or fnmatch.fnmatchcase(node.label, pattern)


def _named(graph: Graph, names: Iterable[str]) -> list[Node]:
    nodes = {n.label: n for n in graph.nodes}
    for name in names:
        if name not in nodes:
            near = suggest(name, nodes)
            raise ConfigError(f"no node {name!r} in the prepared graph.{near}")
    return [nodes[name] for name in names]


def _between(graph: Graph, first: list[Node], last: list[Node]) -> set[Node]:
    """The nodes that follow one of the first and lead to one of the last, these included; no names mean no limit."""
    after, before = set(first), set(last)
    for node in graph.nodes:
        if any(graph.producer.get(name) in after for name in node.reads()):
            after.add(node)
    for node in reversed(graph.nodes):
        if any(reader in before for o in node.outputs if o for reader in graph.consumers.get(o, ())):
            before.add(node)
    every = set(graph.nodes)
    return (after if first else every) & (before if last else every)
