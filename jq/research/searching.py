"""The losses of many plans, computed on an executor: what a search asks of `Segments`, block by block of the data.

A worker makes the same segments and programs of the same network, so that losses have the same bits. What enters a segment
follows from the plans before it; a worker computes it when it is asked for the first time, and keeps the last few.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jq.plan import Plan
from jq.recovery.exponents.search import SearchedNetwork
from jq.recovery.exponents.segments import SampleBlock, Segments, State
from jq.research.executors import Executor, Shipped, performed, shipping
from jq.util.cache import enable

_KEPT = 32  # states of blocks in a worker

Moved = tuple[tuple[str, float], ...]  # tensors with other scales than the network's plan has
History = tuple[Moved, ...]  # the plans of the segments before one


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentsElsewhere:
    """Segments as `descend` takes them, whose states are histories of plans."""

    network: SearchedNetwork
    local: Segments  # of which only the structure is used
    executor: Executor
    ship: Callable[[Any], Shipped]
    sent: dict[Any, Shipped]  # the network, and the blocks of the data

    @property
    def parts(self) -> Sequence[Any]:
        """The segments, one by one."""
        return self.local.parts

    @property
    def first(self) -> Mapping[str, int]:
        """The segment in which a tensor is first read or made."""
        return self.local.first

    def begin(self, blocks: Sequence[SampleBlock]) -> list[list[History]]:
        """The histories before the first segment."""
        return [[()] for _ in blocks]

    def advance(
        self, segment: int, plans: Sequence[Plan], parents: Sequence[int], states: Sequence[Sequence[History]]
    ) -> list[list[History]]:
        """The histories before the next segment by block and plan."""
        moved = [self._moved(plan) for plan in plans]
        return [[(*state[parent], own) for own, parent in zip(moved, parents, strict=True)] for state in states]

    def losses(
        self, segment: int, plans: Sequence[Plan], parents: Sequence[int], states: Sequence[Sequence[History]],
        blocks: Sequence[SampleBlock],
    ) -> Generator[np.ndarray, None, None]:  # fmt: skip
        """Yield the losses [plans, samples] of each block, evaluated from a segment on."""
        moved, network = tuple(map(self._moved, plans)), self._sent(self.network)
        items = [
            (network, self._sent(block), segment, moved, tuple(parents), tuple(state))
            for state, block in zip(states, blocks, strict=True)
        ]
        made, following = dict[int, np.ndarray](), 0
        with contextlib.closing(performed(self.executor, _losses, items)) as results:
            for number, losses in results:
                made[number] = losses
                while following in made:
                    yield made.pop(following)
                    following += 1

    def _sent(self, value: Any) -> Shipped:
        if value not in self.sent:
            self.sent[value] = self.ship(value)
        return self.sent[value]

    def _moved(self, plan: Plan) -> Moved:
        base = self.network.plan
        return tuple(
            (t, float(plan[t].scale)) for t in plan if np.ndim(plan[t].scale) == 0 and plan[t].scale != base[t].scale
        )


@contextlib.contextmanager
def elsewhere(network: SearchedNetwork, local: Segments, executor: Executor) -> Iterator[SegmentsElsewhere]:
    """Yield segments that are evaluated on an executor; what was sent to its workers is removed in the end."""
    with shipping() as ship:
        yield SegmentsElsewhere(network, local, executor, ship, {})


def _losses(
    network: Shipped, block: Shipped, segment: int, moved: Sequence[Moved], parents: Sequence[int],
    histories: Sequence[History],
) -> np.ndarray:  # fmt: skip
    """In a worker: the losses [plans, samples] on one block."""
    enable()
    states = [_state(network, block, history) for history in histories]
    plans = [_plan(network, own) for own in moved]
    (losses,) = _segments(network).losses(segment, plans, parents, [states], [block.value])
    return losses


@functools.lru_cache(maxsize=1)
def _segments(network: Shipped) -> Segments:
    own: SearchedNetwork = network.value
    return own.segments()


@functools.lru_cache(maxsize=_KEPT)
def _state(network: Shipped, block: Shipped, history: History) -> State:
    """The inputs of the segment after those of a history."""
    segments = _segments(network)
    if not history:
        return segments.begin([block.value])[0][0]
    before = _state(network, block, history[:-1])
    return segments.advance(len(history) - 1, [_plan(network, history[-1])], [0], [[before]])[0][0]


def _plan(network: Shipped, moved: Moved) -> Plan:
    plan: Plan = network.value.plan
    return plan.replace({t: dataclasses.replace(plan[t], scale=np.float32(scale)) for t, scale in moved})
