"""Widening: the regions of a network that gain most from more bits, within bounds on cost and on their number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jq.arithmetic.formats import BFLOAT16, INT16
from jq.config import QuantConfig
from jq.data.sources import open_source
from jq.graph import Graph, Node
from jq.pipeline import Calibrated
from jq.plan.placement import absorbed
from jq.plan.scales import channel_axes
from jq.plan.selection import literal
from jq.readings.data_shapes import traceable
from jq.readings.fake import as_planned
from jq.research.islands import apart, choose, islands, products, work
from jq.research.losses import Measure
from jq.research.sensitivities import group_losses

Wide = Literal["float", "bf16", "int16"]
_LOOKED = 2, 4  # samples on which losses are measured, at least and at most
_ELEMENTS = 1 << 19  # of their inputs, which are enough: large images have many places each
_ROUNDS = 4  # of choosing, with less room where the model is too costly


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of regions: how a config asks for it, and what it costs, in products with 8 bits."""

    options: Mapping[str, Any] | None  # overrides; None: the nodes are excluded
    own: float  # more for each product of a node that is taken
    read: float  # more for each product of the nodes that read its result

    @property
    def weights(self) -> bool:
        """Whether a taken node's weights are not rounded to 8 bits either."""
        return self.own > 0


# A product counts the bits of both factors; what is float runs in bfloat16 (`islands.FLOAT_BITS`).
FORMATS: Mapping[Wide, Format] = {
    "float": Format(None, own=3, read=0),
    "bf16": Format({"activation": BFLOAT16, "weight": BFLOAT16, "bias": "weight"}, own=2, read=1),
    "int16": Format({"activation": INT16, "symmetric": True}, own=0, read=1),
}


@dataclasses.dataclass(frozen=True)
class Fused:
    """A node with those whose results it takes unrounded: they are widened together."""

    output: str
    nodes: tuple[Node, ...]
    entries: frozenset[str] = frozenset()  # inputs of the graph that it reads first, so that it decides their format

    def reads(self) -> set[str]:
        """The tensors that the nodes read, but for their own results."""
        return {k for n in self.nodes for k in n.reads()} - {o for n in self.nodes for o in n.outputs}


def part_losses(ready: Calibrated, measure: Measure, wide: Wide) -> dict[str, float]:
    """Return what rounding each part's results loses at the outputs, alone; and its weights ("weights of ..."), if a region in
    the wide format would not round these.

    Each is a share of what the whole plan loses there, added up over the parts of the outputs that `measure` tells apart.
    """
    plan = ready.guarded.plan
    graph = traceable(as_planned(ready.graph, plan))
    groups = {}
    for part in fused(ready.graph, ready.guarded.plan.nodes):
        results = {o for n in part.nodes for o in n.outputs} | part.entries
        groups[part.output] = frozenset(results & plan.activations.keys())
        if FORMATS[wide].weights:
            groups[_weights_of(part)] = frozenset(part.reads() & plan.weights.keys())
    groups = {name: tensors for name, tensors in groups.items() if tensors}
    source = open_source(ready.data, graph.inputs, seed=ready.guarded.config.seed)
    least, most = _LOOKED
    enough = math.ceil(_ELEMENTS / sum(np.size(value) for value in source.head.values()))
    looked = source.limited(min(max(enough, least), most))
    each, whole = group_losses(graph, None, plan, groups, looked, lambda _: measure)
    return {
        name: sum(float(v.mean()) / whole[k] for k, v in losses.items() if whole[k] > 0)
        for name, losses in each.items()
    }


def fused(graph: Graph, quantized: frozenset[str]) -> list[Fused]:
    """Return the quantized nodes in groups that are widened together, in the order of the graph."""
    inside, inputs = absorbed(graph), {value.name for value in graph.inputs}
    members: dict[str, list[Node]] = {}
    entries: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.outputs and node.outputs[0] in quantized:
            taker = node
            while taker.outputs[0] in inside:
                taker = inside[taker.outputs[0]]
            members.setdefault(taker.outputs[0], []).append(node)
            entries.setdefault(taker.outputs[0], set()).update(inputs.intersection(node.inputs))
            inputs.difference_update(node.inputs)
    return [Fused(output, tuple(nodes), frozenset(entries[output])) for output, nodes in members.items()]


def _weights_of(part: Fused) -> str:
    return f"weights of {part.output}"


def widened(
    config: QuantConfig,
    ready: Calibrated,
    losses: Mapping[str, float],
    wide: Wide,
    most: float,
    regions: int,
    named: frozenset[str],
    cost_of: Callable[[QuantConfig], float],
) -> QuantConfig | None:
    """Return a config with the regions in a wide format that lose most without it; None where none fits.

    `ready` is the model by the config, `losses` its `part_losses`. The model may cost `most`, as `cost_of` a config says,
    and have this many regions more. `named` are the nodes that a config can name: what `prepare` made has no such name, so
    that it cannot be part of a region.
    """
    graph, plan = ready.graph, ready.guarded.plan
    form, axes = FORMATS[wide], channel_axes(graph)
    there = frozenset[str]().union(*islands(graph, apart(graph, plan, config)))
    parts = fused(graph, plan.nodes | there)
    place = {part.output: i for i, part in enumerate(parts)}
    sources = [[place[k] for k in part.reads() if k in place] for part in parts]
    counts = np.array([sum(products(graph, n, axes) for n in part.nodes) for part in parts])
    reading = np.zeros(len(parts))
    for i, before in enumerate(sources):
        np.add.at(reading, sorted(set(before)), counts[i])
        reading[[j for j, part in enumerate(parts) if part.entries & parts[i].reads()]] += counts[i]
    total = max(sum(products(graph, n, axes) for n in graph.nodes), 1)
    wider = {i: True for i, part in enumerate(parts) if part.output in there}
    counts, reading = (np.where(np.isin(range(len(parts)), list(wider)), 0, v) for v in (counts, reading))
    costs = (form.own * counts + form.read * reading) / total
    gains = [losses.get(part.output, 0.0) for part in parts]
    own = [losses.get(_weights_of(part), 0.0) for part in parts] if form.weights else None
    unnamed = {i: False for i, part in enumerate(parts) if any(n.label not in named for n in part.nodes)}
    base = room = most - work(graph, plan)[0]
    for _ in range(_ROUNDS):
        if room <= 0 or not parts:
            return None
        taken = choose(gains, costs.tolist(), sources, room, regions, own, unnamed | wider)
        added = [part for i, part in enumerate(parts) if taken[i] and i not in wider]
        if not added:
            return None
        made = _with(config, [node for part in added for node in part.nodes], form)
        over = cost_of(made) - most
        if over <= 1e-9:
            return made
        room -= max(over, 0.1 * base)  # tensors that have one scale are widened together
    return None


def _with(config: QuantConfig, nodes: Sequence[Node], form: Format) -> QuantConfig:
    """The config with nodes in a wide format."""
    patterns = [literal(node.label) for node in nodes]
    if form.options is None:
        return config.replace(exclude=(*config.exclude, *patterns))
    overrides = {name: dict(options) for name, options in config.overrides}
    for pattern in patterns:
        overrides[pattern] = overrides.get(pattern, {}) | dict(form.options)
    return config.replace(overrides=overrides)
