"""Long lists of cases, of which the default suite runs a share, and `-m slow` the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> Iterator[Any]:
    """Yield cases as parameters, a tuple for several; all but each `every`th are slow."""
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        yield pytest.param(*values, marks=[pytest.mark.slow] * bool(number % every))
