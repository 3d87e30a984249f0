"""Quantized graphs made again with a rewrite, or with more quantizers, to see where their nodes would run then.

New tensors inherit the scales of the tensors they are made from: places do not depend on scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jq.exchange.export import quantized_graph
from jq.exchange.quantized import split_quantizers
from jq.graph import Graph, Node
from jq.npu.changes import Change
from jq.npu.facts import NPU_FORMATS, NPU_OPS
from jq.npu.rewrites import STRUCTURE
from jq.npu.units import is_quantizer
from jq.ops.kinds import is_gather, is_transpose
from jq.plan import Plan


def by_rewrite(name: str, kind: Callable[[Node], bool]) -> Callable[[Graph], Graph]:
    """Return the function that makes a quantized graph again with a rewrite of nodes of a kind.

    It returns the graph itself if there is nothing to change.
    """

    def apply(graph: Graph) -> Graph:
        if not any(map(kind, graph.nodes)):
            return graph
        floats, plan = split_quantizers(graph)
        made = STRUCTURE[name](floats, lambda node: node.outputs[0] in plan.activations)
        if made is floats:
            return graph
        return quantized_graph(
            made, _extended(made, plan, (n for n in made.nodes if n.outputs[0] not in floats.tensors))
        )

    return apply


def with_listed(graph: Graph, format: str) -> tuple[Graph, tuple[str, ...]]:
    """Return a quantized graph with quantizers around operators that the format lists and the default config leaves in float.

    Beside it are these operators; there are none where each has quantizers, or none of them is listed.
    """
    listed = {op for op, formats in NPU_FORMATS.items() if format in formats}.difference(NPU_OPS)
    if listed.isdisjoint(n.op_type for n in graph.nodes if not is_quantizer(n)):
        return graph, ()
    floats, plan = split_quantizers(graph)
    nodes = [n for n in floats.nodes if n.op_type in listed and not n.domain]
    more = _extended(floats, plan, nodes)
    added = [
        n for n in nodes if not (more.activations.keys() - plan.activations.keys()).isdisjoint((*n.reads(), *n.outputs))
    ]
    return (quantized_graph(floats, more), tuple(dict.fromkeys(n.op_type for n in added))) if added else (graph, ())


def _extended(graph: Graph, plan: Plan, nodes: Iterable[Node]) -> Plan:
    """The plan extended to the tensors of these nodes, each quantized like its neighbours in the node, or like any tensor."""
    activations, new = dict(plan.activations), set[str]()
    if not activations:
        return plan
    likeness = next(iter(activations.values()))
    for node in (n for n in nodes if _is_float(graph, n.outputs[0])):
        tensors = [name for name in (*node.inputs, *node.outputs) if name and name not in graph.arrays]
        floats = [name for name in tensors if _is_float(graph, name)]
        known = next((activations[name] for name in floats if name in activations), likeness)
        activations |= {name: known for name in floats if name not in activations}
        new |= {node.outputs[0]} if floats else set()
    return dataclasses.replace(plan, activations=activations, nodes=plan.nodes | new)


def _is_float(graph: Graph, name: str) -> bool:
    value = graph.values.get(name)
    return value is None or value.dtype is None or value.dtype.kind == "f"


REMADE = (
    Change(
        "transpose_in_four",
        "replace Transposes of more than four dims, with the Reshapes and Gathers around them, by swaps of neighbouring blocks; "
        "exact: whole=0 in the config, or transpose_in_four in rewrites",
        "guess",
        by_rewrite("transpose_in_four", is_transpose),
    ),
    Change(
        "gather_to_slice",
        "replace each Gather at constant, equal distances by Slice and Squeeze, which all formats list; exact: whole=0 in the "
        "config, or gather_to_slice in rewrites",
        "documented",
        by_rewrite("gather_to_slice", is_gather),
    ),
)
