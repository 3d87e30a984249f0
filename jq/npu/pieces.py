"""Subgraphs: which units of the NPU are compiled together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jq.npu.units import ComputeUnit


def pieces(units: Sequence[ComputeUnit], on_npu: Sequence[bool]) -> list[int | None]:
    """Return the subgraph of each unit, None for those on the CPU; units are in an order behind their sources.

    A subgraph starts when all that it reads is there and hands over when all of it is done, so no path leaves it for
    the CPU and comes back: where one unit reads another's tensor directly and, by another way, over the CPU, the two
    are in different subgraphs.
    """
    levels = _levels(units, on_npu)
    parent = list(range(len(units)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    edges = [(s, u) for u, unit in enumerate(units) for s in sorted(unit.sources) if on_npu[u] and on_npu[s]]
    for source, reader in edges:
        if levels[source] == levels[reader]:
            parent[root(reader)] = root(source)
    for source, reader in edges:
        if root(source) != root(reader) and not _detour(units, root, root(source), root(reader)):
            parent[root(reader)] = root(source)
    return [root(n) if on_npu[n] else None for n in range(len(units))]


def _levels(units: Sequence[ComputeUnit], on_npu: Sequence[bool]) -> list[int]:
    """How often the longest way to a unit returns from the CPU to the NPU."""
    levels = [0] * len(units)
    for number, unit in enumerate(units):
        levels[number] = max((levels[s] + (on_npu[number] and not on_npu[s]) for s in unit.sources), default=0)
    return levels


def _detour(units: Sequence[ComputeUnit], root: Callable[[int], int], first: int, second: int) -> bool:
    """Whether a way from one subgraph to another leads over units of neither."""
    members: dict[int, list[int]] = {}
    for number in range(len(units)):
        members.setdefault(root(number), []).append(number)
    waiting = {root(s) for m in members[second] for s in units[m].sources} - {first, second}
    seen: set[int] = set()
    while waiting:
        here = waiting.pop()
        seen.add(here)
        before = {root(s) for m in members[here] for s in units[m].sources}
        if first in before:
            return True
        waiting |= before - seen - {here}
    return False
