"""Preparation: from the exported graph to the graph that is calibrated and quantized."""

from __future__ import annotations

from jq.config import QuantConfig, resolve
from jq.graph import Graph
from jq.npu.rewrites import KEEPS_WHOLE, NOT_QUARKS, STRUCTURE, Rewrite
from jq.passes import CLEANING, QUARKS, simplify
from jq.passes.biases import own_biases
from jq.passes.canonical import Canonical, put_together
from jq.plan.selection import check_names, named, selected
from jq.util.progress import log


def prepare(graph: Graph, config: QuantConfig | str | None = None) -> Graph:
    """Return a simplified graph and, with a config, one made of operators that its target has.

    The function is unchanged: what the target computes in another form is so in the plan (`QuantConfig.forms`).

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> len(graph.nodes), len(jq.prepare(graph, "XINT8").nodes)
    (53, 38)
    """
    if config is None:
        return simplify(graph)
    config = resolve(config)
    check_names(graph, config)
    graph = simplify(graph, QUARKS if config.strict_quark else CLEANING)
    if not config.strict_quark:
        made = canonical(graph, config)
        log.info("canonical forms: %s", made)
        graph = simplify(made.graph) if made.graph is not graph else graph
    everything = config.replace(op_types=None)  # a rewrite is of operators that are not quantized as they are
    wanted = {*config.rewrites, *(() if config.whole is None else KEEPS_WHOLE)}
    for name in (n for n in STRUCTURE if n in wanted and not (config.strict_quark and n in NOT_QUARKS)):
        graph = _rewritten(graph, STRUCTURE[name], selected(graph, everything))
    return own_biases(graph) if config.bias == "int32" else graph


def canonical(graph: Graph, config: QuantConfig) -> Canonical:
    """Return a simplified graph in canonical form, but for nodes that the config excludes or names."""
    chosen = selected(graph, config.replace(op_types=None)) - named(graph, config)
    return put_together(graph, config.canonical, lambda node: not chosen.isdisjoint(node.outputs[:1]))


def _rewritten(graph: Graph, rewrite: Rewrite, chosen: frozenset[str]) -> Graph:
    return rewrite(graph, lambda node: node.outputs[0] in chosen)
