"""Layers and blocks of a network: what errors are summed over, what the drawing shows and tables unfold."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from jq.graph import Graph, Node
from jq.npu.facts import PLACE_RULES
from jq.npu.placing import Place
from jq.ops.linear import linear_layer
from jq.plan import Plan
from jq.recovery.parts import blocks

CHIP = "stx"  # whose compiler's rules say in reports where layers run


@dataclasses.dataclass(frozen=True)
class NetworkLayer:
    """A linear node with the activation behind it, any other node, or an input."""

    name: str
    op: str
    nodes: tuple[str, ...]  # labels; none of an input
    sources: tuple[int, ...] = ()  # the layers that it reads, by their number
    block: str = ""
    place: str = ""  # where it runs, if that is known
    rule: str = ""  # why there


def layer_of(graph: Graph, plan: Plan, node: Node) -> Node:
    """Return the linear node whose unrounded result a node turns into its own, or the node itself."""
    if linear_layer(graph, node) is not None:
        return node
    inputs = [name for name in node.inputs if name and name not in graph.arrays]
    before = graph.producer.get(inputs[0]) if len(inputs) == 1 else None
    alone = before is not None and inputs[0] not in plan and graph.sole_reader(inputs[0]) is node
    return before if alone and before is not None and linear_layer(graph, before) is not None else node


def layers_of(graph: Graph, plan: Plan, places: Mapping[str, Place] | None = None) -> tuple[NetworkLayer, ...]:
    """Return the inputs and the layers of a graph in its order, each with those that it reads.

    `places` are those of the nodes, by label, where they are known.
    """
    made: dict[str, int] = {v.name: i for i, v in enumerate(graph.inputs)}
    layers = [NetworkLayer(v.name, "input", ()) for v in graph.inputs]
    numbers: dict[Node, int] = {}
    block_of = blocks(graph, plan)
    for node in graph.nodes:
        first = layer_of(graph, plan, node)
        number = numbers.setdefault(first, len(layers))
        if number == len(layers):
            place = (places or {}).get(first.label)
            where = (place.place, PLACE_RULES[place.rule].says) if place is not None else ("", "")
            layers.append(NetworkLayer(first.label, first.op_type, (), (), block_of.get(first.label, ""), *where))
        sources = {made[name] for name in node.reads() if name in made} - {number}
        layer = layers[number]
        joined = tuple(sorted({*layer.sources, *sources}))
        layers[number] = dataclasses.replace(layer, nodes=(*layer.nodes, node.label), sources=joined)
        made |= dict.fromkeys(node.outputs, number)
    return tuple(layers)


def depths_of(layers: Sequence[NetworkLayer]) -> list[int]:
    """Return how many layers lie before each on the longest way from an input.

    >>> sources = {"x": (), "conv": (0,), "add": (0, 1)}
    >>> depths_of([NetworkLayer(name, "", (name,), read) for name, read in sources.items()])
    [0, 1, 2]
    """
    depths: list[int] = []
    for layer in layers:
        depths.append(max((depths[s] + 1 for s in layer.sources if s < len(depths)), default=0))
    return depths


def lanes_of(depths: Sequence[int]) -> list[int]:
    """Return a lane for each layer, none twice at one depth.

    >>> lanes_of([0, 1, 1, 2])
    [0, 0, 1, 0]
    """
    used: dict[int, itertools.count[int]] = {}
    return [next(used.setdefault(depth, itertools.count())) for depth in depths]
