"""Preparation: from the exported graph to the graph that is calibrated and quantized."""

from __future__ import annotations

from jq.arithmetic.formats import Integer
from jq.config import QuantConfig, resolve
from jq.graph import Graph
from jq.npu.facts import NPU_FORMATS
from jq.npu.rewrites import KEEPS_WHOLE, NOT_QUARKS, STRUCTURE, Rewrite
from jq.passes import CLEANING, QUARKS, simplify
from jq.passes.biases import own_biases
from jq.passes.canonical import Canonical, put_together
from jq.plan.selection import check_names, named, selected
from jq.readings.diagnosis import blames_model
from jq.util.progress import log


@blames_model
def prepare(graph: Graph, config: QuantConfig | str | None = None) -> Graph:
    """Return a simplified graph; with a config, one made of operators that its target has.

    The function does not change: operators that the target computes in another form get it in the plan
    (`QuantConfig.forms`).

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
    everything = config.replace(op_types=None)  # a rewrite also changes operators that are not quantized themselves
    for name in made_of(config):
        graph = _rewritten(graph, STRUCTURE[name], selected(graph, everything))
    return own_biases(graph) if config.bias == "int32" else graph


def made_of(config: QuantConfig) -> tuple[str, ...]:
    """Return the names of the rewrites of a config, in their order, with those that keep a network whole in its format."""
    wanted = set(config.rewrites)
    if config.whole is not None and not config.strict_quark:
        wanted.update(KEEPS_WHOLE)
        format = vendor_format(config)
        listed = {op for op, formats in NPU_FORMATS.items() if format in formats}
        gates = "HardSwish" in listed and "HardSigmoid" not in listed
        wanted -= {"hard_swish_to_product"} if gates else {"hard_sigmoid_to_clip"}
        wanted -= {"resize_to_depth_to_space"} if "Resize" in listed or not format else set()
    return tuple(n for n in STRUCTURE if n in wanted and not (config.strict_quark and n in NOT_QUARKS))


def vendor_format(config: QuantConfig) -> str:
    """Return the vendor's name of a format of integers, or an empty string; int8 with float scales is always A8W8."""
    bits = config.activation.bits if isinstance(config.activation, Integer) else 0
    if config.scale == "power_of_two":
        return "XINT8" if bits == 8 else ""
    return {16: "A16W8", 8: "A8W8"}.get(bits, "")


def canonical(graph: Graph, config: QuantConfig) -> Canonical:
    """Return a simplified graph in canonical form, except for nodes that the config excludes or names."""
    chosen = selected(graph, config.replace(op_types=None)) - named(graph, config)
    return put_together(graph, config.canonical, lambda node: not chosen.isdisjoint(node.outputs[:1]))


def _rewritten(graph: Graph, rewrite: Rewrite, chosen: frozenset[str]) -> Graph:
    return rewrite(graph, lambda node: node.outputs[0] in chosen)
