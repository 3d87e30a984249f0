"""Outputs that need resolution: average pools that end a network, and ties of the two largest values.

On the NPU an average has the position of what it averages, whose range is wider: where pixels reach 100, logits have a
step of 1, and in many samples the two largest get one code. The host reads them anyway, so it can average in float.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection

from jq.arithmetic.formats import Integer
from jq.calibration.observed import last_code
from jq.calibration.stats import Stats
from jq.config import QuantConfig
from jq.graph import Graph, Node
from jq.ops.kinds import pools_average
from jq.plan import Plan, QParams
from jq.plan.placement import rule_of


@dataclasses.dataclass(frozen=True)
class PooledOutput:
    """An output of a network, and the nodes that make it of a map, in order: an average pool, and what moves values."""

    output: str
    nodes: tuple[Node, ...]


def pooled_outputs(graph: Graph) -> tuple[PooledOutput, ...]:
    """Return the outputs that are an average pool's, and that nothing in the network reads."""
    chains = ((value.name, _pooling(graph, value.name)) for value in graph.outputs)
    return tuple(PooledOutput(name, nodes) for name, nodes in chains if nodes)


def _pooling(graph: Graph, tensor: str) -> tuple[Node, ...]:
    """The nodes from an average pool to a tensor; none if there is no such chain of sole readers."""
    node = graph.producer.get(tensor)
    if node is None or len(graph.consumers.get(tensor, ())) > 1:
        return ()
    if pools_average(node):
        return (node,)
    before = _pooling(graph, node.inputs[0]) if _moves(graph, node) else ()
    return (*before, node) if before else ()


def _moves(graph: Graph, node: Node) -> bool:
    """Whether a node's output holds values of its first input."""
    rule = rule_of(graph, node)
    return rule is not None and rule.shares


def coarse_outputs(
    graph: Graph, plan: Plan, stats: Stats | None, config: QuantConfig, fixed: Collection[str] = ()
) -> tuple[PooledOutput, ...]:
    """Return the pooled outputs that a plan gives too coarse a step, as the NPU aligns it; none of those that are fixed."""
    if config.output_ties is None or config.strict_quark or "align_pool" not in config.constraints:
        return ()
    ties = ties_of_outputs(graph, plan, stats)
    return tuple(
        pooled
        for pooled in pooled_outputs(graph)
        if pooled.nodes[0].outputs[0] in plan
        and {o for n in pooled.nodes for o in n.outputs}.isdisjoint(fixed)
        and ties.get(pooled.output, 0.0) > config.output_ties
    )


def ties_of_outputs(graph: Graph, plan: Plan, stats: Stats | None) -> dict[str, float]:
    """Return the share of calibration samples whose two largest values get one code, of each output of one per class."""
    shares = {v.name: _ties(v.name, _rounded(graph, plan, v.name), stats) for v in graph.outputs}
    return {name: share for name, share in shares.items() if share is not None}


def left_to_host(graph: Graph, plan: Plan, stats: Stats | None, chosen: Collection[str]) -> list[str]:
    """Return a sentence for each pooled output that was chosen to be quantized, and that the plan leaves in float."""
    sentences = []
    for pooled in pooled_outputs(graph):
        made, source = pooled.nodes[0].outputs[0], pooled.nodes[0].inputs[0]
        share = _ties(pooled.output, plan.get(source), stats)
        if share is not None and made in chosen and made not in plan.nodes:
            labels = json.dumps([node.label for node in pooled.nodes])
            sentences.append(
                f"{pooled.output!r} is averaged in float: with the step of {source!r}, {float(plan[source].scale):g}, the "
                f"two largest values of {share:.1%} of the samples would get the same code; exclude={labels} does the "
                "same, output_ties=None quantizes it anyway"
            )
    return sentences


def _rounded(graph: Graph, plan: Plan, tensor: str) -> QParams | None:
    """How a tensor's values are rounded: as itself, or before they were moved to it."""
    node = graph.producer.get(tensor)
    while tensor not in plan and node is not None and _moves(graph, node):
        tensor = node.inputs[0]
        node = graph.producer.get(tensor)
    return plan.get(tensor)


def _ties(output: str, qparams: QParams | None, stats: Stats | None) -> float | None:
    """The share of ties at the top of an output that is rounded so; None where that is not known."""
    if stats is None or output not in stats.tensors or qparams is None or qparams.dynamic:
        return None
    if not isinstance(qparams.grid, Integer) or qparams.axis is not None:
        return None
    last = last_code(stats.config)
    return (
        stats.ties(output, float(qparams.scale), last)
        if last in (None, qparams.grid.qmax - qparams.grid.middle)
        else None
    )
