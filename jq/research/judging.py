"""How near a model is to a goal, on samples that it was not made from.

A goal holds when the confidence interval says so, not the mean alone: of 20 samples that agree, all that is known is that
86 % do. Models are ranked by a finer measure than the goal's, `jq.research.losses.divergences`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import ModelProto

from jq.arithmetic.losses import decibels
from jq.data.arrays import Sample
from jq.errors import ConfigError, DataError, Error
from jq.graph import Graph
from jq.graph.write import to_model
from jq.readings.runtime import onnxruntime_reading
from jq.research.goals import OWN, Evaluate, Goal
from jq.research.intervals import difference_low, interval, share_interval
from jq.research.losses import Measure, divergences, losses, scores

_LOUDEST = 300.0  # dB in place of infinity, of outputs that are equal
_SHARES = ("agreement", "top1")  # metrics in percent of the samples
_LEAST = 1e-30  # of a part's error, whose logarithm is taken

Outputs = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Score:
    """How near a model is to the goal on the deciding samples."""

    value: float
    low: float | None  # both ends with 95 % confidence each; None where a function gives one number
    high: float | None
    samples: int | None
    error: float  # by which models are ranked
    holds: bool  # the goal, with confidence where there is an interval


class EvaluationError(DataError):
    """A user's function that raised, or returned no number."""


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """The measure of models: the goal, the deciding samples, and the float network on them."""

    goal: Goal
    graph: Graph
    samples: Sequence[Sample]
    labels: np.ndarray | None
    evaluate: Evaluate | None
    measure: Measure  # of the error of each part of the outputs
    reference: Sequence[Outputs]  # of the float network
    whole: float  # the float network's own value; nan of metrics that compare with it

    @classmethod
    def of(
        cls, goal: Goal, graph: Graph, samples: Sequence[Sample], labels: np.ndarray | None, evaluate: Evaluate | None
    ) -> Judge:
        """The judge, once the float network has run."""
        if goal.metric == "top1" and labels is None:
            raise ConfigError("target top1 needs labels, one for each sample; take 'agreement 98', which needs none")
        run = onnxruntime_reading(graph)
        measure = divergences(graph, classes=goal.metric in (*_SHARES, "kl"))
        judge = cls(goal, graph, samples, labels, evaluate, measure, [run(s) for s in samples], math.nan)
        if goal.metric == OWN:
            return dataclasses.replace(judge, whole=float(judge.own(to_model(graph), judge.reference).mean()))
        if goal.metric == "top1":
            return dataclasses.replace(judge, whole=float(judge.hits(judge.reference).mean()))
        return judge

    def score(self, model: ModelProto) -> Score:
        """The score of a quantized model, which runs in onnxruntime."""
        run = onnxruntime_reading(model)
        outputs = [run(sample) for sample in self.samples]
        own = self.goal.metric == OWN
        each = self.values(model, outputs)
        value = float(each.mean())
        if own and each.size == 1:
            return Score(value, None, None, None, -value, value >= self._bound)
        low, high = share_interval(each) if self.goal.metric in _SHARES else interval(each)
        error = -value if own else self.error(outputs)
        return Score(value, low, high, len(each), error, self._holds(each, low, high))

    def values(self, model: ModelProto, outputs: Sequence[Outputs]) -> np.ndarray:
        """The goal's metric on each sample; of a function that gives one number for all, that alone."""
        match self.goal.metric:
            case "sqnr":
                return np.array([_sqnr(*pair) for pair in zip(self.reference, outputs, strict=True)])
            case "kl":
                return np.nan_to_num(self._losses(outputs, "kl"), nan=np.inf)
            case "agreement":
                return 100 * (1 - self._losses(outputs, "top1"))
            case "top1":
                return self.hits(outputs)
        return self.own(model, outputs)

    def error(self, outputs: Sequence[Outputs]) -> float:
        """The geometric mean of the errors of the outputs' parts, so that all count, whatever their units.

        Of samples the roots are averaged: of 25 images one that lies between two classes has most of the KL divergence,
        and would decide alone.
        """
        measure = jax.jit(self.measure)
        made = [measure(a, b) for a, b in zip(self.reference, outputs, strict=True)]
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
        if goal.metric == "top1" and goal.relative:  # paired with the float network
            return difference_low(each - self.hits(self.reference)) >= goal.bound
        return low >= self._bound if goal.higher else high <= goal.bound

    def own(self, model: ModelProto, outputs: Sequence[Outputs]) -> np.ndarray:
        """The values of the user's function: one, or one for each sample.

        The name of its first parameter says what it takes: `outputs` are the stacked ones of the deciding samples, with
        `labels` behind them where it has a second; anything else is the model.
        """
        assert self.evaluate is not None
        try:
            parameters = list(inspect.signature(self.evaluate).parameters)
        except (TypeError, ValueError):
            parameters = []
        given: list[Any] = [model]
        if parameters and parameters[0] == "outputs":
            given = [{k: np.concatenate([np.atleast_1d(o[k]) for o in outputs]) for k in outputs[0]}]
            given += [self.labels] if len(parameters) > 1 else []
        try:
            each = np.asarray(self.evaluate(*given), np.float64)
        except Error:
            raise
        except Exception as error:
            text = f"evaluate raised {type(error).__name__}: {error}"
            raise EvaluationError(text) from error
        if not each.size or not np.isfinite(each).all():
            raise EvaluationError(f"evaluate returned {each}; expected a finite number, or one for each sample")
        return each.reshape(-1)

    def hits(self, outputs: Sequence[Outputs]) -> np.ndarray:
        """100 for each sample whose highest score is the label's, else 0."""
        assert self.labels is not None
        rows = np.concatenate([_classes(o, self.graph) for o in outputs])
        if len(rows) != len(self.labels):
            raise DataError(f"there are {len(self.labels)} labels for {len(rows)} rows of scores")
        return 100.0 * (rows.argmax(1) == self.labels)

    def _losses(self, outputs: Sequence[Outputs], name: str) -> np.ndarray:
        """One of `jq.research.losses.losses` of each sample."""
        read, program = scores(self.graph), jax.jit(losses)
        pairs = zip(self.reference, outputs, strict=True)
        return np.array([program(read(a), read(b))[name] for a, b in pairs], np.float64)


def _sqnr(x: Outputs, y: Outputs) -> float:
    """The SQNR in dB of the output that loses most."""
    kept = [_LOUDEST]
    for name in (k for k, v in x.items() if _is_float(v)):
        a, b = (np.asarray(v[name], np.float64) for v in (x, y))
        noise = float(np.square(a - b).sum())
        kept.append(decibels(float(np.square(a).sum()), noise) if math.isfinite(noise) else -_LOUDEST)
    return max(-_LOUDEST, min(kept))


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _classes(outputs: Outputs, graph: Graph) -> np.ndarray:
    """The scores [rows, classes] of a classifier's outputs."""
    values = next((v for v in outputs.values() if _is_float(v) and v.ndim > 1), None)
    if values is None:
        raise DataError(f"{graph.name}: top1 needs an output of scores [samples, classes]")
    return values.reshape(values.shape[0], -1)
