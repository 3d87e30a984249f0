"""Widths of integers: where a graph's int64 values are data that 32 bits may not hold."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from onnx import TensorProto

from jq.graph import Graph, Node
from jq.ops.kinds import is_cast, outgrows
from jq.ops.table import lookup

_INT32 = np.iinfo(np.int32)


def computes_wide(graph: Graph, known: Collection[str]) -> bool:
    """Whether int64 values that depend on the graph's inputs, but for `known` ones, are computed from.

    Shapes and their arithmetic are known while tracing, and computed by numpy in their own type. What depends on the
    data is int64 where it is cast to it, is arithmetic of such values, or is read beside a constant of more than 32 bits.
    """
    return _computes(graph, {v.name for v in graph.inputs if v.name not in known}, graph)


def _computes(graph: Graph, dependent: set[str], outermost: Graph) -> bool:
    dependent = set(dependent)
    for node in graph.nodes:
        entry = lookup(node, outermost.opset(node.domain))
        if (entry is not None and entry.shape_only) or dependent.isdisjoint(node.reads()):
            continue
        if _is_wide(node, graph, outermost):
            return True
        for inner in node.subgraphs.values():
            if _computes(inner, dependent | {v.name for v in inner.inputs}, outermost):
                return True
        dependent.update(filter(None, node.outputs))
    return False


def _is_wide(node: Node, graph: Graph, outermost: Graph) -> bool:
    """Whether a node of dependent operands computes what 32 bits may not hold."""
    if is_cast(node):
        return node.attrs.get("to") == TensorProto.INT64
    value = graph.values.get(node.outputs[0]) if outgrows(node) else None
    if value is not None and value.dtype == np.int64:
        return True
    entry = lookup(node, outermost.opset(node.domain))
    bounds = {*entry.static, *entry.settled, *entry.steering} if entry is not None else set()
    named = entry.inputs if entry is not None and entry.variadic is None else ()
    for index, name in enumerate(node.inputs):
        array = outermost.constants.get(name)
        if (
            array is None
            or array.dtype != np.int64
            or not array.size
            or not bounds.isdisjoint(named[index : index + 1])
        ):
            continue
        if array.min() < _INT32.min or array.max() > _INT32.max:
            return True
    return False
