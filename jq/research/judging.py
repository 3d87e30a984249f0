"""How near a model is to a goal, on samples that it was not made from.

A goal holds when the confidence interval says so, not the mean alone: of 20 samples that agree, all that is known is that
86 % do. Models are ranked by a finer measure than the goal's, `jq.research.losses.divergences`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from onnx import ModelProto

from jq.data.arrays import Sample
from jq.graph import Graph
from jq.graph.write import to_model
from jq.research.goals import Goal
from jq.research.intervals import difference_low, interval, share_interval
from jq.research.losses import Measure, divergences
from jq.research.metrics import METRICS, Deciding, Evaluate, Metric, Outputs, own

_LEAST = 1e-30  # of a part's error, whose logarithm is taken


@dataclasses.dataclass(frozen=True)
class Score:
    """How near a model is to the goal on the deciding samples."""

    value: float
    low: float | None  # both ends with 95 % confidence each; None where a function gives one number
    high: float | None
    samples: int | None
    error: float  # by which models are ranked
    holds: bool  # the goal, with confidence where there is an interval


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """The measure of models: the goal, its metric, and the deciding samples."""

    goal: Goal
    metric: Metric
    deciding: Deciding
    measure: Measure  # of the error of each part of the outputs
    floats: np.ndarray  # the float network's own values; empty of metrics that compare with it

    @classmethod
    def of(
        cls, goal: Goal, graph: Graph, samples: Sequence[Sample], labels: np.ndarray | None, evaluate: Evaluate | None
    ) -> Judge:
        """The judge, once the float network has run."""
        metric = METRICS[goal.metric] if evaluate is None else own(evaluate)
        deciding = Deciding.of(graph, samples, labels)
        floats = np.empty(0) if metric.compares else metric.values(deciding, to_model(graph), deciding.reference)
        return cls(goal, metric, deciding, divergences(graph, metric.classes), floats)

    @property
    def whole(self) -> float:
        """The float network's own value; nan of metrics that compare with it."""
        return float(self.floats.mean()) if self.floats.size else math.nan

    def score(self, model: ModelProto) -> Score:
        """The score of a quantized model, which runs in onnxruntime."""
        outputs, metric = self.deciding.outputs(model), self.metric
        each = metric.values(self.deciding, model, outputs)
        value = float(each.mean())
        error = -value if metric.ranks else self.error(outputs)
        if metric.ranks and each.size == 1:
            return Score(value, None, None, None, error, value >= self._bound)
        low, high = share_interval(each) if metric.shares else interval(each)
        return Score(value, low, high, len(each), error, self._holds(each, low, high))

    def error(self, outputs: Sequence[Outputs]) -> float:
        """The geometric mean of the errors of the outputs' parts, so that all count, whatever their units.

        Of samples the roots are averaged: of 25 images one that lies between two classes has most of the KL divergence,
        and would decide alone.
        """
        measure = jax.jit(self.measure)
        made = [measure(a, b) for a, b in zip(self.deciding.reference, outputs, strict=True)]
        parts = [float(np.mean(np.sqrt([m[k] for m in made], dtype=np.float64)) ** 2) for k in made[0]]
        if not all(map(math.isfinite, parts)):
            return math.inf
        return math.exp(float(np.mean(np.log(np.maximum(parts, _LEAST))))) if any(parts) else 0.0

    @property
    def _bound(self) -> float:
        goal = self.goal
        return -math.inf if goal.bound is None else goal.bound + (self.whole if goal.relative else 0)

    def _holds(self, each: np.ndarray, low: float, high: float) -> bool:
        goal = self.goal
        if goal.bound is None:
            return True
        if goal.relative and len(each) == len(self.floats):  # paired with the float network
            drops = each - self.floats
            return (difference_low(drops) if self.metric.shares else interval(drops)[0]) >= goal.bound
        return low >= self._bound if self.metric.higher else high <= goal.bound
