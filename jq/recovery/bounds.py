"""Relu for a Clip from zero to a bound, which X2 leaves to the CPU behind a layer of 8 bits that is not depthwise.

A quantizer cuts at its largest code. Where the bound gets that code, or a larger one would, a Relu gives every value the
code that the Clip gives it: the two are one, whatever the data. Where the bound lies below the largest code,

    fitted    the tensor is scaled, the layers in front and behind divide, and the bound is the largest code's value: exact;
    measured  else the Clip goes where no value of the data exceeds it, or where the squared error of what passes, relative
              to the power and summed over all such Clips, is no more than the config allows (`QuantConfig.whole`).

Clips are replaced once there is a final plan, so that finetuning aims at the float network with its bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.formats import INT8, Integer
from jq.config import QuantConfig
from jq.data.sources import open_source
from jq.data.stream import Stream
from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.unused import remove_unused
from jq.npu.placing import is_depthwise
from jq.ops.kinds import is_clip, is_layer
from jq.plan import Plan, QParams
from jq.readings.packing import pack
from jq.readings.tracing import AnyOrder, trace
from jq.recovery.equalization.groups import FIXED, Groups, find_groups, scaled, upper_bound
from jq.util.progress import log

_LARGEST = 8  # bits of activations for which the NPU has no Clip behind a layer
# Of a code: from the last one but this on, a value is rounded to the last one, whatever the rounding of ties.
_TIE = 0.49


@dataclasses.dataclass(frozen=True)
class BoundChoice:
    """Clips behind layers, and which of them become Relu."""

    exact: tuple[str, ...]  # outputs of Clips whose bound has the largest code
    losses: Mapping[str, float]  # of the others: the squared error that Relu adds on the data, relative to the power
    most: float  # that may be lost in sum

    @property
    def measured(self) -> tuple[str, ...]:
        """The outputs of the Clips that go by what they lose, the least first."""
        order = sorted(self.losses, key=lambda name: self.losses[name])
        sums = np.cumsum([self.losses[name] for name in order])
        return tuple(name for name, lost in zip(order, sums.tolist(), strict=True) if lost <= self.most)

    @property
    def relus(self) -> tuple[str, ...]:
        """The outputs of the Clips that become Relu."""
        return (*self.exact, *self.measured)

    def __str__(self) -> str:
        parts = [f"{len(self.exact)} become Relu exactly, as their bound has the largest code"] if self.exact else []
        if measured := self.measured:
            loss = sum(self.losses[name] for name in measured)
            lost = f"loses {loss:.2g} in sum" if loss else "loses nothing on the data"
            parts.append(f"{len(measured)} become Relu, which {lost}")
        if left := {name: loss for name, loss in self.losses.items() if name not in measured}:
            worst = max(left, key=lambda name: left[name])
            parts.append(
                f"{len(left)} stay: as Relu they would lose {sum(left.values()):.2g} in sum, the most {left[worst]:.2g} at "
                f"{worst!r}, and more than whole={self.most:g} with the others"
            )
        return "; ".join(parts)


def fitted_bounds(graph: Graph, plan: Plan, config: QuantConfig) -> Graph:
    """Return the graph with the Clips that need it scaled so that their bound is a largest code; itself if none can be.

    The factor is the nearest to one with which a bound of b is 127 * 2**e: then a scale of 2**e cuts there.
    """
    if config.scale != "power_of_two":
        return graph
    waiting = {node.outputs[0] for node, bound in _bounded(graph, plan, config) if not _cuts(plan, node, bound)}
    if not waiting:
        return graph
    groups = find_groups(graph)
    factors = np.ones(groups.count)
    bounds: dict[Node, float] = {}
    for node, bound in groups.clips:
        if node.outputs[0] in waiting and node not in bounds:
            factor, moved = _fit(groups, node, bound), _scaled_with(groups, node)
            if factor is not None and moved is not None and bounds.keys().isdisjoint(moved):
                factors[np.unique(groups.channels[node.outputs[0]])] = factor
                bounds |= {clip: own * factor for clip, own in moved.items()}
    made = scaled(graph, groups, factors) if bounds else graph
    if made is graph:
        return graph
    log.info("bounds: %d Clips are scaled to a largest code", len(bounds))
    return _with_bounds(made, {node.outputs[0]: bound for node, bound in bounds.items()})


def bound_choice(graph: Graph, plan: Plan, config: QuantConfig, data: Any) -> BoundChoice | None:
    """Return the choice for the Clips behind layers; None where there are none, or where the config asks for none."""
    bounded = dict(_bounded(graph, plan, config))
    if config.whole is None or not bounded:
        return None
    exact = tuple(node.outputs[0] for node, bound in bounded.items() if _cuts(plan, node, bound))
    rest = {node: bound for node, bound in bounded.items() if node.outputs[0] not in exact}
    return BoundChoice(exact, _losses(graph, plan, rest, config, data) if rest else {}, config.whole)


def with_relus(graph: Graph, choice: BoundChoice | None) -> Graph:
    """Return the graph with a Relu for each Clip that was chosen."""
    chosen: Collection[str] = () if choice is None else choice.relus
    clips = [node for node in graph.nodes if is_clip(node) and node.outputs[0] in chosen]
    relus = {node: node.replace(op_type="Relu", inputs=node.inputs[:1], attrs={}) for node in clips}
    return remove_unused(graph.edit(relus)) if relus else graph


# --- Parts ---


def _bounded(graph: Graph, plan: Plan, config: QuantConfig) -> list[tuple[Node, float]]:
    """The quantized Clips that the NPU leaves to the CPU with the layer before them, each with its bound."""
    clips = []
    for node in graph.nodes if config.whole is not None and not config.strict_quark else ():
        layer, bound = graph.producer.get(node.inputs[0]) if node.inputs else None, None
        if is_clip(node) and layer is not None and is_layer(layer) and not is_depthwise(graph, layer):
            bound = upper_bound(graph, node)
        qparams = plan.get(node.outputs[0]) if bound is not None else None
        if bound is None or qparams is None or node.inputs[0] in plan or graph.sole_reader(node.inputs[0]) is not node:
            continue
        if isinstance(qparams.grid, Integer) and qparams.grid.bits <= _LARGEST and not qparams.dynamic:
            clips.append((node, bound))
    return clips


def _cuts(plan: Plan, node: Node, bound: float) -> bool:
    """Whether a Clip's bound has the largest code of its output, to which all that exceeds it is then cut."""
    qparams = plan[node.outputs[0]]
    assert isinstance(qparams.grid, Integer)
    codes = bound / np.asarray(qparams.scale, np.float64) + np.asarray(qparams.zero_point, np.float64)
    return bool((codes >= qparams.grid.qmax - _TIE).all())


def _largest(qparams: QParams) -> float:
    """The value of the largest code."""
    assert isinstance(qparams.grid, Integer)
    return float(np.max((qparams.grid.qmax - np.asarray(qparams.zero_point, np.float64)) * np.asarray(qparams.scale)))


def _fit(groups: Groups, node: Node, bound: float) -> float | None:
    """The factor that makes a bound 127 * 2**e with e below zero; None where a channel has no factor."""
    if (groups.channels[node.outputs[0]] == FIXED).any():
        return None
    exponent = min(-1, round(math.log2(bound / INT8.qmax)))
    return math.ldexp(INT8.qmax, exponent) / bound


def _scaled_with(groups: Groups, node: Node) -> dict[Node, float] | None:
    """The Clips that a factor of all channels of one moves, with their bounds; None if it moves a part of one."""
    classes, moved = groups.channels[node.outputs[0]], {}
    for clip, bound in groups.clips:
        inside = np.isin(groups.channels[clip.outputs[0]], classes)
        if inside.any():
            moved[clip] = bound
        if inside.any() and not inside.all():
            return None
    return moved


def _with_bounds(graph: Graph, bounds: Mapping[str, float]) -> Graph:
    """The graph with other bounds of some Clips, as inputs or as the attributes of old operator sets."""
    taken, nodes, arrays = set(graph.tensors), dict[Node, Node | None](), dict[str, np.ndarray]()
    for node in (n for n in graph.nodes if is_clip(n) and n.outputs[0] in bounds):
        bound = bounds[node.outputs[0]]
        if len(node.inputs) > 2:
            name = fresh(f"{node.label}_bound", taken)
            arrays[name] = np.asarray(bound, graph.arrays[node.inputs[2]].dtype)
            nodes[node] = node.replace(inputs=(*node.inputs[:2], name))
        else:
            nodes[node] = node.replace(attrs={**node.attrs, "max": bound})
    return remove_unused(graph.edit(nodes, arrays))


def _losses(graph: Graph, plan: Plan, clips: Mapping[Node, float], config: QuantConfig, data: Any) -> dict[str, float]:
    """The squared error of a Relu for each Clip on the data, relative to the power of what it makes."""

    def sums(bound: float, largest: float, value: Any) -> dict[str, Any]:
        x = jnp.maximum(jnp.asarray(layout.raw(value)).astype(jnp.float32), 0)
        passed = jnp.maximum(jnp.minimum(x, largest) - bound, 0)
        return {"lost": jnp.square(passed).sum(), "power": jnp.square(jnp.minimum(x, bound)).sum()}

    def added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
        return {name: {k: part[k] + b[name][k] for k in part} for name, part in a.items()}

    def tap(bound: float, largest: float) -> AnyOrder:
        return AnyOrder(lambda value: sums(bound, largest, value))

    taps = {n.inputs[0]: tap(bound, _largest(plan[n.outputs[0]])) for n, bound in clips.items()}
    fn, source = trace(graph, taps=taps), open_source(data, graph.inputs, seed=config.seed)
    stream = Stream.of(source, config.batch, fn)
    program = stream.folded(lambda params, sample: fn(params, sample)[1], added)
    total = stream.total(program, pack(graph), added)
    parts = {node.outputs[0]: total[node.inputs[0]] for node in clips}
    return {k: float(p["lost"] / p["power"]) if p["power"] else 0.0 for k, p in parts.items()}
