"""Clips behind layers that a quantizer makes by itself: Relu for those from zero, nothing for others.

X2 leaves a layer of 8 bits with a Clip to the CPU, unless the layer is depthwise; and a Clip to other bounds than those of
ReLU6 is an operator of its own, whose input is rounded over a range that the Clip then cuts. A quantizer cuts at its
largest and at its least code. Where the bounds get those codes, or would get ones beyond, a Relu, or nothing, gives every
value the code that the Clip gives it: the two are one, whatever the data. Where a bound lies between the codes,

    fitted    the tensor is scaled, the layers in front and behind divide, and the bound is the largest code's value: exact;
    measured  else the Clip goes where no value of the data exceeds it, or where the squared error of what passes, relative
              to the power and summed over all such Clips, is no more than the config allows (`QuantConfig.whole`).

A Clip of its own is first moved to the ends of the codes, where it is one with its layer: its input is rounded no more.
Clips are replaced once there is a final plan, so that finetuning aims at the float network with its bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
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
from jq.recovery.equalization.groups import FIXED, Groups, find_groups, scaled
from jq.util.progress import log

_LARGEST = 8  # bits of activations for which the NPU has no Clip behind a layer
# Of a code: from the last one but this on, a value is rounded to the last one, whatever the rounding of ties.
_TIE = 0.49


@dataclasses.dataclass(frozen=True)
class BoundChoice:
    """Clips behind layers, and which of them go: for a Relu, or, not from zero, for nothing."""

    exact: tuple[str, ...]  # outputs of Clips whose bounds have the last codes
    losses: Mapping[str, float]  # of the others: the squared error that going adds on the data, relative to the power
    most: float  # that may be lost in sum
    moved: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of those among `exact` that were moved there

    @property
    def measured(self) -> tuple[str, ...]:
        """The outputs of the Clips that go by what they lose, the least first."""
        return _within(self.losses, self.most - sum(self.moved.values()))

    @property
    def gone(self) -> tuple[str, ...]:
        """The outputs of the Clips that go."""
        return (*self.exact, *self.measured)

    def __str__(self) -> str:
        parts = (
            [f"{len(self.exact)} are removed exactly, because their bounds lie at the last codes"] if self.exact else []
        )
        if measured := self.measured:
            loss = sum(self.losses[name] for name in measured)
            lost = f"loses {loss:.2g} in total" if loss else "loses nothing on the data"
            parts.append(f"{len(measured)} are removed, which {lost}")
        if loss := sum(self.moved.values()):
            parts.append(
                f"of the exact ones, {len(self.moved)} were moved to the last codes, which loses {loss:.2g} in total"
            )
        if left := {name: loss for name, loss in self.losses.items() if name not in measured}:
            worst = max(left, key=lambda name: left[name])
            parts.append(
                f"{len(left)} stay: removing them would lose {sum(left.values()):.2g} in total, at most {left[worst]:.2g} at "
                f"{worst!r}, and with the others more than whole={self.most:g}"
            )
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class FittedBounds:
    """A graph in which Clips were scaled, or moved to the last codes, and what the moves lose, by output."""

    graph: Graph
    moved: Mapping[str, float]


def fitted_bounds(graph: Graph, plan: Plan, config: QuantConfig, data: Any) -> FittedBounds:
    """Return the graph with Clips whose bounds are the last codes: exactly by scaling, or moved there at a measured loss.

    The factor is the nearest to one with which a bound of b is 127 * 2**e: then a scale of 2**e cuts there. It is the
    same graph if there is nothing to change.
    """
    clips = dict(_behind_layers(graph, plan, config))
    own = {n: bounds for n, bounds in clips.items() if n.inputs[0] in plan}
    exact = config.scale == "power_of_two"
    ends = {
        n: _last(b) for n, b in own.items() if exact and _last(b)[1] < INT8.qmax
    }  # with which a Clip is its layer's
    kept = {n for n, last in ends.items() if _cuts(plan, n, own[n]) and _ends(plan[n.outputs[0]], own[n]) == last}
    waiting = {n.outputs[0] for n, (low, _) in own.items() if low == 0 and n not in kept}
    waiting |= {n.outputs[0] for n, b in clips.items() if exact and n not in own and not _cuts(plan, n, b)}
    made = _scaled(graph, waiting) if waiting else graph
    left = {n: (own[n], last) for n, last in ends.items() if n not in kept and n in made.nodes}  # not scaled
    losses = _losses(made, left, config, data) if left else {}
    moved = {name: losses[name] for name in _within(losses, config.whole or 0.0)}
    taken = {n.outputs[0]: last for n, last in ends.items() if n in kept or n.outputs[0] in moved}
    if taken:
        log.info("bounds: %d Clips are moved to the last codes, %d of them at a loss", len(taken), len(moved))
    return FittedBounds(_with_bounds(made, taken) if taken else made, moved)


def bound_choice(
    graph: Graph, plan: Plan, config: QuantConfig, data: Any, moved: Mapping[str, float] | None = None
) -> BoundChoice | None:
    """Return the choice for the Clips behind layers; None where there are none, or where the config asks for none."""
    bounded = {n: b for n, b in _behind_layers(graph, plan, config) if n.inputs[0] not in plan}
    if config.whole is None or not bounded:
        return None
    exact = tuple(node.outputs[0] for node, bounds in bounded.items() if _cuts(plan, node, bounds))
    rest = {n: (b, _ends(plan[n.outputs[0]], b)) for n, b in bounded.items() if n.outputs[0] not in exact}
    return BoundChoice(exact, _losses(graph, rest, config, data) if rest else {}, config.whole, moved or {})


def without_clips(graph: Graph, choice: BoundChoice | None) -> Graph:
    """Return the graph with a Relu, or nothing, for each Clip that was chosen."""
    chosen: Collection[str] = () if choice is None else choice.gone
    nodes: dict[Node, Node | None] = {}
    for clip in (n for n in graph.nodes if is_clip(n) and n.outputs[0] in chosen):
        low, _ = _bounds(graph, clip) or (0.0, 0.0)
        if low == 0:
            nodes[clip] = clip.replace(op_type="Relu", inputs=clip.inputs[:1], attrs={})
        else:
            layer = graph.producer[clip.inputs[0]]
            nodes |= {clip: None, layer: layer.replace(outputs=clip.outputs)}
    return remove_unused(graph.edit(nodes)) if nodes else graph


# --- Parts ---

_Bounds = tuple[float, float]


def _behind_layers(graph: Graph, plan: Plan, config: QuantConfig) -> Iterator[tuple[Node, _Bounds]]:
    """Clips to an interval that has a zero, to 8 bits or fewer, that alone read a layer that is not depthwise."""
    for node in graph.nodes if config.whole is not None and not config.strict_quark else ():
        layer = graph.producer.get(node.inputs[0]) if is_clip(node) else None
        if layer is None or not is_layer(layer) or is_depthwise(graph, layer):
            continue
        bounds, qparams = _bounds(graph, node), plan.get(node.outputs[0])
        if bounds is None or qparams is None or graph.sole_reader(node.inputs[0]) is not node:
            continue
        if isinstance(qparams.grid, Integer) and qparams.grid.bits <= _LARGEST and not qparams.dynamic:
            yield node, bounds


def _bounds(graph: Graph, node: Node) -> _Bounds | None:
    """The finite bounds of a Clip around or from zero; None if they are others, or computed."""
    given = [node.attrs.get(k) for k in ("min", "max")]
    for index, name in enumerate(node.inputs[1:3]):
        array = graph.arrays.get(name)
        given[index] = None if array is None or array.size != 1 else array.reshape(())
    low, high = (None if g is None else float(g) for g in given)
    return (low, high) if low is not None and high is not None and -math.inf < low <= 0 < high < math.inf else None


def _cuts(plan: Plan, node: Node, bounds: _Bounds) -> bool:
    """Whether a Clip's bounds have the last codes of its output, to which all beyond is then cut; zero is a Relu's."""
    qparams = plan[node.outputs[0]]
    assert isinstance(qparams.grid, Integer)
    low, high = (b / np.asarray(qparams.scale, np.float64) + np.asarray(qparams.zero_point, np.float64) for b in bounds)
    least = qparams.grid.qmin + _TIE
    return bool((high >= qparams.grid.qmax - _TIE).all() and (bounds[0] == 0 or (low <= least).all()))


def _ends(qparams: QParams, bounds: _Bounds) -> _Bounds:
    """The values of the last codes: of zero, which a Relu cuts at, and the largest; or of the least and the largest."""
    assert isinstance(qparams.grid, Integer)
    ends, scale = (qparams.grid.qmin, qparams.grid.qmax), np.asarray(qparams.scale, np.float64)
    low, high = ((e - np.asarray(qparams.zero_point, np.float64)) * scale for e in ends)
    return 0.0 if bounds[0] == 0 else float(np.min(low)), float(np.max(high))


def _last(bounds: _Bounds) -> _Bounds:
    """The ends of 8 bits at the finest scale that reaches both bounds but for a step; of zero, zero."""
    step = 2.0 ** math.ceil(math.log2(max(-bounds[0], bounds[1]) / -INT8.qmin))
    return (0.0 if bounds[0] == 0 else INT8.qmin * step), INT8.qmax * step


def _within(losses: Mapping[str, float], most: float) -> tuple[str, ...]:
    """The names of the least losses, as many as their sum allows."""
    order = sorted(losses, key=lambda name: losses[name])
    sums = np.cumsum([losses[name] for name in order])
    return tuple(name for name, lost in zip(order, sums.tolist(), strict=True) if lost <= most)


def _scaled(graph: Graph, waiting: Collection[str]) -> Graph:
    """The graph with these Clips scaled, and those that are scaled with them, where that is possible."""
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
    return _with_bounds(made, {node.outputs[0]: (0.0, bound) for node, bound in bounds.items()})


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


def _with_bounds(graph: Graph, bounds: Mapping[str, _Bounds]) -> Graph:
    """The graph with other bounds of some Clips, as inputs or as the attributes of old operator sets."""
    taken, nodes, arrays = set(graph.tensors), dict[Node, Node | None](), dict[str, np.ndarray]()
    for node in (n for n in graph.nodes if is_clip(n) and n.outputs[0] in bounds):
        low, high = bounds[node.outputs[0]]
        given = {"min": low, "max": high}
        if len(node.inputs) > 2:
            names = {k: fresh(f"{node.label}_{k}", taken) for k in given}
            arrays |= {names[k]: np.asarray(v, graph.arrays[node.inputs[2]].dtype) for k, v in given.items()}
            nodes[node] = node.replace(inputs=(node.inputs[0], *names.values()))
        else:
            nodes[node] = node.replace(attrs={**node.attrs, **given})
    return remove_unused(graph.edit(nodes, arrays))


def _losses(
    graph: Graph, clips: Mapping[Node, tuple[_Bounds, _Bounds]], config: QuantConfig, data: Any
) -> dict[str, float]:
    """The squared error of other ends than the bounds for each Clip on the data, relative to the power of what it makes."""

    def sums(bounds: _Bounds, ends: _Bounds, value: Any) -> dict[str, Any]:
        x = jnp.asarray(layout.raw(value)).astype(jnp.float32)
        made = jnp.clip(x, *bounds)
        return {"lost": jnp.square(jnp.clip(x, *ends) - made).sum(), "power": jnp.square(made).sum()}

    def added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
        return {name: {k: part[k] + b[name][k] for k in part} for name, part in a.items()}

    def tap(bounds: _Bounds, ends: _Bounds) -> AnyOrder:
        return AnyOrder(lambda value: sums(bounds, ends, value))

    taps = {n.inputs[0]: tap(bounds, ends) for n, (bounds, ends) in clips.items()}
    fn, source = trace(graph, taps=taps), open_source(data, graph.inputs, seed=config.seed)
    stream = Stream.of(source, config.batch, fn)
    program = stream.folded(lambda params, sample: fn(params, sample)[1], added)
    total = stream.total(program, pack(graph), added)
    parts = {node.outputs[0]: total[node.inputs[0]] for node in clips}
    return {k: float(p["lost"] / p["power"]) if p["power"] else 0.0 for k, p in parts.items()}
