"""Subgraphs of random graphs: none is left and entered again, and no two neighbours could be one."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from hypothesis import given
from hypothesis import strategies as st

from jq.graph import Node
from jq.npu.pieces import pieces
from jq.npu.units import ComputeUnit


@st.composite
def graphs(draw):
    """Sources of each unit, all in front of it, and whether it is on the NPU."""
    count = draw(st.integers(1, 12))
    sources = [draw(st.frozensets(st.integers(0, n - 1), max_size=3)) if n else frozenset() for n in range(count)]
    return sources, draw(st.lists(st.booleans(), min_size=count, max_size=count))


def is_acyclic(sources, groups) -> bool:
    """Whether the graph of groups of units has an order."""
    before: dict[object, set[object]] = {g: set() for g in groups}
    for unit, own in enumerate(sources):
        before[groups[unit]] |= {groups[s] for s in own} - {groups[unit]}
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


@given(graphs())
def test_pieces_are_convex_and_as_large_as_they_can_be(graph):
    sources, on_npu = graph
    units = [ComputeUnit((Node("Relu", (), ()),), own, (), (), True) for own in sources]
    found = pieces(units, on_npu)
    assert [piece is not None for piece in found] == on_npu
    groups = [("cpu", n) if piece is None else piece for n, piece in enumerate(found)]
    assert is_acyclic(sources, groups)
    for unit, own in enumerate(sources):
        for source in own:
            if on_npu[unit] and on_npu[source] and groups[unit] != groups[source]:
                merged = [groups[source] if g == groups[unit] else g for g in groups]
                assert not is_acyclic(sources, merged)
