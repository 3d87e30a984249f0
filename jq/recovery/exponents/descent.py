"""Coordinate descent and beam search over the exponents of a plan, on the loss of the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jq.arithmetic.numerics import power_of_two
from jq.config import QuantConfig
from jq.graph import Graph
from jq.npu.constraints import moving_together, violations
from jq.plan import Plan
from jq.recovery.exponents.segments import PlanLosses, SampleBlock
from jq.util.progress import unit_bar

_SURE = 1.0  # standard errors by which a move must pay, on average over the samples
_HOPELESS = 2.0  # standard errors by which it is worse, after which no more samples are looked at


@dataclasses.dataclass(frozen=True)
class Step:
    """A move of tensors that have one exponent."""

    tensors: tuple[str, ...]
    before: int
    after: int
    gain: float  # of the loss, by the samples of the search, as a method measures it
    error: float = 0.0  # its standard error

    def __str__(self) -> str:
        names = self.tensors[0] + (f" and {len(self.tensors) - 1} more" if len(self.tensors) > 1 else "")
        return f"{names}: 2^{self.before} -> 2^{self.after}, gain {self.gain:.2e} +- {self.error:.1e}"


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """A plan, and the moves that led to it."""

    plan: Plan
    steps: tuple[Step, ...] = ()

    def then(self, plan: Plan, step: Step) -> Way:
        """One move further."""
        return Way(plan, (*self.steps, step))


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """The moves of a search: groups of tensors with one exponent each, as long as no further rule is broken."""

    graph: Graph
    config: QuantConfig
    groups: tuple[tuple[str, ...], ...]
    standing: int  # rules that were broken before, in a plan that nothing constrained

    @classmethod
    def of(cls, graph: Graph, plan: Plan, config: QuantConfig, *, weights: bool) -> Moves:
        """The moves of a plan."""
        groups = [g for g in moving_together(graph, plan, config) if len({float(plan[t].scale) for t in g}) == 1]
        groups = [g for g in groups if weights or all(t in plan.activations for t in g)]
        return cls(graph, config, tuple(groups), len(violations(graph, plan, config)))

    def to(self, plan: Plan, group: Sequence[str], exponent: int) -> Plan | None:
        """The plan with a group at another exponent; None where the NPU could not compute with that."""
        moved = plan.replace({t: dataclasses.replace(plan[t], scale=power_of_two(exponent)) for t in group})
        return moved if len(violations(self.graph, moved, self.config)) <= self.standing else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Beam:
    way: Way
    losses: np.ndarray  # [samples]
    parent: int = 0  # the trial from whose state before the segment it continues


def descend(
    segments: PlanLosses, blocks: Sequence[SampleBlock], way: Way, moves: Moves, width: int, sweeps: int
) -> Iterator[Way]:
    """Yield the best way after each segment of each sweep.

    Groups are moved in the order of the network, by an octave up and down, from each of the best `width` ways so far.
    """
    last = len(segments.parts) - 1
    order = [[g for g in moves.groups if min(segments.first.get(t, 0) for t in g) == s] for s in range(last + 1)]
    beams: list[_Beam] = []
    with unit_bar("search", sweeps * len(moves.groups)) as report:
        for _ in range(sweeps):
            states = segments.begin(blocks)
            if not beams:
                same = [way.plan] * 2 * width, [0] * 2 * width  # as many as will be tried at once, for one program
                beams = [_Beam(way, np.concatenate(list(segments.losses(0, *same, states, blocks)), 1)[0])]
            beams = [dataclasses.replace(b, parent=0) for b in beams]
            for s, groups in enumerate(order):
                for group in groups:
                    before = beams[0].losses.mean()
                    beams = _expanded(segments, s, beams, states, blocks, group, moves, width)
                    report(group[0], before, beams[0].losses.mean())
                yield beams[0].way
                if s < last:
                    states = segments.advance(s, [b.way.plan for b in beams], [b.parent for b in beams], states)
                    beams = [dataclasses.replace(b, parent=i) for i, b in enumerate(beams)]


def _expanded(
    segments: PlanLosses, segment: int, beams: list[_Beam], states: Sequence[list[Any]], blocks: Sequence[SampleBlock],
    group: Sequence[str], moves: Moves, width: int,
) -> list[_Beam]:  # fmt: skip
    """The best beams among these and those after a move of a group."""
    here = [(beam, int(beam.way.plan[group[0]].exponent)) for beam in beams]
    steps = [(beam, Step(tuple(group), e, e + n, 0.0)) for beam, e in here for n in (-1, 1)]
    plans = [moves.to(beam.way.plan, group, step.after) for beam, step in steps]
    tried = [(beam, plan, step) for (beam, step), plan in zip(steps, plans, strict=True) if plan is not None]
    if not tried:
        return beams
    given = (tried + tried[:1] * 2 * width)[: 2 * width]  # always as many, for one program
    parts = segments.losses(segment, [plan for _, plan, _ in given], [b.parent for b, *_ in given], states, blocks)
    seen = np.zeros((len(tried), 0))
    for part in parts:
        seen = np.concatenate([seen, part[: len(tried)]], 1)
        gains = np.stack([b.losses[: seen.shape[1]] for b, *_ in tried]) - seen
        gain, error = gains.mean(1), gains.std(1, ddof=1) / np.sqrt(gains.shape[1])
        if (gain < -_HOPELESS * error).all():
            return beams
    pool = [(float(b.losses.mean()), b) for b in beams]
    for (beam, plan, step), losses, g, e in zip(tried, seen, gain.tolist(), error.tolist(), strict=True):
        step = dataclasses.replace(step, gain=g, error=e)
        pool.append((float(losses.mean()) + _SURE * e, _Beam(beam.way.then(plan, step), losses, beam.parent)))
    return [beam for _, beam in sorted(pool, key=lambda p: p[0])[:width]]
