"""Exponents that change the network's outputs least: several ways to a plan, judged on samples that are held back."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jq.config import QuantConfig
from jq.data.arrays import Sample
from jq.errors import ModelError
from jq.graph import Graph
from jq.plan import Plan
from jq.recovery.exponents.descent import Moves, Step, Way, descend
from jq.recovery.exponents.segments import Loss, PlanLosses, SampleBlock, Segments, blocks_of
from jq.recovery.exponents.sequential import in_turn
from jq.recovery.exponents.weighted import at_least_cost
from jq.recovery.streams import APART
from jq.util import markup

Method = Literal["joint", "coordinate", "beam", "weighted", "sequential"]

_JOINT: tuple[Method, ...] = ("weighted", "sequential", "coordinate")
_WAYS = 16  # of a method, that are looked at there


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """The result of a search; losses are means over the samples held back. As text, a line for each move."""

    plan: Plan
    before: float
    after: float
    steps: tuple[Step, ...]  # that lead to the plan

    def __repr__(self) -> str:
        return f"Search({len(self.steps)} moves, loss {self.before:.4g} -> {self.after:.4g})"

    def __str__(self) -> str:
        return "\n".join([repr(self), *map(str, self.steps)])

    def _repr_html_(self) -> str:
        rows = [(", ".join(s.tensors), s.before, s.after, f"{s.gain:.2e}", f"{s.error:.1e}") for s in self.steps]
        return markup.preview(repr(self), ("tensors", "exponent", "after", "gain", "+-"), rows)


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedNetwork:
    """All that segments are made of."""

    graph: Graph
    params: Mapping[str, Any]
    plan: Plan
    loss: Loss
    sample: Sample

    def segments(self) -> Segments:
        """The segments, whose programs are compiled when they are used."""
        return Segments.of(self.graph, self.params, self.plan, self.loss, self.sample)


@dataclasses.dataclass(frozen=True, eq=False)
class Searching:
    """A search of a network's exponents, and the data of its two parts."""

    network: SearchedNetwork
    segments: PlanLosses
    kept: Sequence[SampleBlock]
    apart: Sequence[SampleBlock]
    moves: Moves
    config: QuantConfig

    def run(self, method: Method = "joint", width: int = 1, sweeps: int = 1) -> Search:
        """The best plan by a method, or by several, each from the best before it, on the samples held back."""
        joint, begin = method == "joint", self.segments.begin(self.apart)

        def lost(way: Way) -> float:
            losses = self.segments.losses(0, [way.plan], [0], begin, self.apart)
            return float(np.concatenate(list(losses), 1).mean())

        best = Way(self.network.plan)
        before = least = lost(best)
        for each in _JOINT if joint else (method,):
            try:
                tried = _some(list(self._ways(each, best, width, sweeps)))
            except ModelError:
                if not joint or each != "weighted":
                    raise
                continue  # without gradients the others are left
            for way in tried:
                if (loss_there := lost(way)) < least:
                    best, least = way, loss_there
        return Search(best.plan, before, least, best.steps)

    def _ways(self, method: Method, way: Way, width: int, sweeps: int) -> Iterator[Way]:
        graph, params = self.network.graph, self.network.params
        match method:
            case "weighted":
                key = jax.random.key(self.config.seed)
                return at_least_cost(graph, self.kept, way, self.moves, self.network.loss, key)
            case "sequential":
                return in_turn(graph, self.kept, way, self.moves, params)
            case _:
                return descend(self.segments, self.kept, way, self.moves, width if method == "beam" else 1, sweeps)


def _some(ways: Sequence[Way]) -> Sequence[Way]:
    """Some of the plans on a method's way, the last among them."""
    return [ways[i] for i in sorted({round(i) for i in np.linspace(len(ways) - 1, 0, _WAYS)})] if ways else ways


def searched(
    graph: Graph, params: Mapping[str, Any], plan: Plan, samples: Sequence[Sample], config: QuantConfig
) -> Search:
    """Return the exponents of activations with which these weights make the outputs nearest to the float network's.

    With fewer samples than are held back in turn, of which there is a warning, or nothing that could move, they stay.
    """
    moves = Moves.of(graph, plan, config, weights=False)
    if len(samples) < APART:
        text = f"the stage 'exponents' needs {APART} samples or more; got {len(samples)}, so the exponents stay"
        warnings.warn(text, stacklevel=2)
    if not moves.groups or len(samples) < APART:
        return Search(plan, float("nan"), float("nan"), ())
    kept, apart = blocks_of(graph, samples, config)
    network = SearchedNetwork(graph, params, plan, "mse", {k: v[0] for k, v in kept[0].inputs.items()})
    return Searching(network, network.segments(), kept, apart, moves, config).run()
