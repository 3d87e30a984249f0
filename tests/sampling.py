"""Long lists of cases, of which the default suite runs a share, and `-m slow` the others."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

_CASES = 6  # of a test that run, and of those above it
_SHARE = 4  # one in so many


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Return cases as parameters, a tuple for several; all but each `every`th are slow."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*v, marks=[pytest.mark.slow] * bool(number % every)) for number, v in enumerate(values)]


def mark_most(items: Sequence[pytest.Item]) -> None:
    """Mark all but a share of the cases of each test as slow, chosen by a hash, unless the test is marked `every_case`."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("every_case")):
            cases[item.nodeid.partition("[")[0]].append(item)
    for several in cases.values():
        kept = _CASES + (len(several) - _CASES) // _SHARE
        if len(several) > kept:
            shuffled = sorted(several, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
            for item in shuffled[kept:]:
                item.add_marker(pytest.mark.slow)
