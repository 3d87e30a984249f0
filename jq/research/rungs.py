"""The rungs of `jq.auto`: each is a small value that makes the next config from the best model so far.

A rung of your own is one more value: `jq.auto(..., rungs=[*RUNGS, Rung("mine", applies, config)])`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jq.arithmetic.formats import BFLOAT16, INT16, UINT8
from jq.config import QuantConfig, presets
from jq.npu.facts import BACKEND_FORMATS, CHIPS
from jq.pipeline import Calibrated, Result
from jq.plan.placement import absorbed
from jq.plan.scales import channel_axes
from jq.plan.selection import literal
from jq.research.goals import Score
from jq.research.islands import FLOAT_BITS, bits, choose, products
from jq.research.sensitivities import sensitivity
from jq.util.progress import log

Wide = Literal["float", "bf16", "int16"]
_WIDE: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"activation": BFLOAT16, "weight": BFLOAT16},
    "int16": {"activation": INT16, "weight": INT16},
}
_LOOKED = 4  # samples on which sensitivities are measured


@dataclasses.dataclass(frozen=True)
class Limits:
    """The chip, and how much more than 8 bits everywhere a model may cost on it."""

    chip: str
    most: float  # bit operations, in units of those of 8 bits
    islands: int  # that a rung may add
    wide: Wide  # what they are in

    @property
    def formats(self) -> tuple[str, ...]:
        """The presets that the chip's default backend takes."""
        device = CHIPS[self.chip]
        return (*BACKEND_FORMATS[device.backends[0]], *(("BF16",) if device.bfloat16 else ()))


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A model that a rung made, and what it is worth."""

    rung: str
    config: QuantConfig
    score: Score
    cost: float  # bit operations, in units of 8 bits everywhere
    narrow: float  # the share of products in 8 bits
    islands: int
    size: int  # bytes
    forecast: str  # of the places
    result: Result | None  # None where a ledger told of it


@dataclasses.dataclass(frozen=True, eq=False)
class Climb:
    """The state that a rung can look at: the best model so far, and all that were tried."""

    limits: Limits
    calibrated: Callable[[QuantConfig], Calibrated]  # the model by a config, before anything is tuned
    labels: frozenset[str] = frozenset()  # of the model's own nodes, which a config can name
    best: Candidate | None = None
    tried: tuple[Candidate, ...] = ()  # and within the limits
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)  # what is measured once


@dataclasses.dataclass(frozen=True)
class Rung:
    """One thing to try: where it applies, and the config that it makes from the best model so far."""

    name: str
    applies: Callable[[Climb], bool]
    config: Callable[[Climb], QuantConfig | None]  # None where there is nothing to change


def _preset(name: str, how: str = "", **options: Any) -> Rung:
    config = presets[name].replace(**options)
    return Rung(name + how, lambda climb: name in climb.limits.formats, lambda climb: config)


def _tuned(stages: str) -> Rung:
    def config(climb: Climb) -> QuantConfig | None:
        assert climb.best is not None
        return climb.best.config.replace(finetune=stages)

    return Rung(stages, lambda climb: climb.best is not None and climb.best.score.error > 0, config)


def _has_room(climb: Climb) -> bool:
    limits, best = climb.limits, climb.best
    return best is not None and limits.islands > 0 and best.cost < limits.most and best.narrow > 0


def _islands(climb: Climb) -> QuantConfig | None:
    """The best with the regions that lose most in the wide format, within the limits; None where no region fits."""
    limits, best = climb.limits, climb.best
    assert best is not None
    ready = climb.calibrated(best.config)
    graph, plan = ready.graph, ready.guarded.plan
    if "losses" not in climb.notes:
        climb.notes["losses"] = node_losses(ready)
    losses = climb.notes["losses"]
    # What `prepare` made has a name that no config can give, so that it cannot be part of a region.
    nodes = [n for n in graph.nodes if n.outputs and n.outputs[0] in plan.nodes and n.label in climb.labels]
    axes, place = channel_axes(graph), {n.outputs[0]: i for i, n in enumerate(nodes)}
    counts = [products(graph, n, axes) for n in nodes]
    narrow = bits(best.config.activation) * bits(best.config.weight)
    width = (FLOAT_BITS**2 - narrow) / narrow / max(sum(products(graph, n, axes) for n in graph.nodes), 1)
    sources = [[place[s] for s in n.reads() if s in place] for n in nodes]
    gains = [losses.get(n.outputs[0], 0.0) for n in nodes]
    taken = choose(gains, [count * width for count in counts], sources, limits.most - best.cost, limits.islands)
    labels = [n.label for n, inside in zip(nodes, taken, strict=True) if inside]
    if not any(count for count, inside in zip(counts, taken, strict=True) if inside):
        return None
    log.info("islands: %d nodes, %s to %s", len(labels), labels[0], labels[-1])
    if limits.wide == "float":
        return best.config.replace(exclude=(*best.config.exclude, *map(literal, labels)))
    overrides = {name: dict(options) for name, options in best.config.overrides}
    for pattern in map(literal, labels):
        overrides[pattern] = overrides.get(pattern, {}) | dict(_WIDE[limits.wide])
    return best.config.replace(overrides=overrides)


def node_losses(ready: Calibrated) -> dict[str, float]:
    """Return what each node's weights and result lose at the outputs, alone, by the node's first output."""
    graph, plan, inside = ready.graph, ready.guarded.plan, absorbed(ready.graph)
    groups: dict[str, list[str]] = {}
    for tensor in plan:
        node = graph.consumers[tensor][0] if tensor in plan.weights else graph.producer.get(tensor)
        if node is not None:
            taker = inside.get(node.outputs[0], node) if tensor in plan.weights else node
            groups.setdefault(taker.outputs[0], []).append(tensor)
    measured = sensitivity(
        graph, plan, ready.data, by=groups, loss="mse", limit=_LOOKED, seed=ready.guarded.config.seed
    )
    return {row.name: row.loss for row in measured.rows}


def ladder() -> Iterator[Rung]:
    """The rungs in their order: the cheap ones first."""
    yield _preset("XINT8")
    yield _preset("A8W8")
    yield _preset("A8W8", " per channel", per_channel=True)
    yield _preset("A8W8", " asymmetric", per_channel=True, activation=UINT8, symmetric=False, method="mse")
    yield _tuned("adaround")
    yield Rung("islands", _has_room, _islands)
    yield _tuned("adaquant")
    yield _preset("A16W8")
    yield _preset("BF16")


RUNGS: Sequence[Rung] = tuple(ladder())
