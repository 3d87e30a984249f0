"""Samples that a stage does not learn from, which decide whether its result is kept.

Blocks can come nearer to the float network's on a hundred samples, while the outputs on other samples get worse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jq.data.sources import in_memory
from jq.graph import Graph
from jq.plan import Plan
from jq.recovery.parts import Unit, units
from jq.recovery.streams import APART, Kept, Store
from jq.recovery.walk import Site, store_of, walk
from jq.util.progress import log


@dataclasses.dataclass(frozen=True, eq=False)
class HeldBack:
    """A network before a stage, and its error on the samples that are held back of the data."""

    graph: Graph
    parts: Sequence[Unit]
    store: Store  # of all samples, as the stages before had them, whose programs are used again
    others: Store
    before: float

    @classmethod
    def of(cls, graph: Graph, params: Mapping[str, Any], plan: Plan, store: Store) -> HeldBack | None:
        """The samples in two parts; None if there are too few, or no outputs that could be compared."""
        samples, parts = store.samples(), units(graph, plan, "layer")
        if len(samples) < APART:
            return None
        before = _error(graph, params, plan, parts, store)
        others = [x for i, x in enumerate(samples) if (i + 1) % APART]
        rest = store_of(graph, plan, in_memory(others), store.folder)
        return None if math.isnan(before) else cls(graph, parts, store, rest, before)

    def is_no_worse(self, params: Mapping[str, Any], plan: Plan) -> bool:
        """Whether the outputs of the network as it is now are as near to the float network's as before, or nearer."""
        after = _error(self.graph, params, plan, self.parts, self.store)
        better = after <= self.before
        log.info("error on samples held back: %.3g, then %.3g: %s", self.before, after, "kept" if better else "undone")
        return better


def _error(graph: Graph, params: Mapping[str, Any], plan: Plan, parts: Sequence[Unit], store: Store) -> float:
    """The squared error of the outputs that are floats, relative to their power, the mean over the samples held back.

    It is nan without such outputs.
    """
    made = walk(graph, {**params}, plan, parts, store, _untouched)
    held = np.flatnonzero(np.concatenate(made.valid))[APART - 1 :: APART]
    errors = []
    for name in made.floats:
        y, z = _samples(made.floats[name], held), _samples(made.codes[name], held)
        if y.dtype.kind == "f":
            axes = tuple(range(1, y.ndim))
            errors.append(np.mean((z - y) ** 2, axes, np.float64) / np.maximum(np.mean(y**2, axes, np.float64), 1e-30))
    return float(np.mean(errors)) if errors else math.nan


def _untouched(site: Site) -> tuple[Site, float, float]:
    return site, float("nan"), float("nan")


def _samples(chunks: Sequence[Kept], chosen: np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(chunk.value) for chunk in chunks])[chosen]
