"""From the graph as it was exported to the graph that is calibrated and quantized."""

from __future__ import annotations

from jq.config import QuantConfig, resolve
from jq.graph import Graph
from jq.passes import simplify
from jq.passes.biases import own_biases
from jq.passes.npu import FORMS, STRUCTURE
from jq.selection import check_names, selected

# Forms that change what an activation computes: what follows is calibrated as it will be. Quark has them later.
_FUNCTIONS = ("leaky_relu_alpha", "sigmoid_to_hard_sigmoid")


def prepare(graph: Graph, config: QuantConfig | str | None = None) -> Graph:
    """Return a graph with less in it and, for a config, of the operators that its target has.

    Without a config the graph computes what it did; with one it does but for activations that the target
    has in another form: see `QuantConfig.forms`.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> len(graph.nodes), len(jq.prepare(graph, "XINT8").nodes)
    (53, 38)
    """
    if config is None:
        return simplify(graph)
    config = resolve(config)
    check_names(graph, config)
    graph = simplify(graph)
    rewrites = [rewrite for name, rewrite in STRUCTURE.items() if name in config.rewrites]
    if not config.strict_quark:
        rewrites += [FORMS[name] for name in _FUNCTIONS if name in config.forms]
    for rewrite in rewrites:
        chosen = selected(graph, config)
        graph = rewrite(graph, lambda node, chosen=chosen: node.outputs[0] in chosen)
    return own_biases(graph) if config.bias == "int32" else graph
