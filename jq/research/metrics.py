"""The metrics of goals: what a model is worth on each of the samples that decide."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import ModelProto

from jq.arithmetic.losses import decibels
from jq.data.arrays import Sample
from jq.errors import ConfigError, DataError, Error
from jq.graph import Graph
from jq.readings.runtime import onnxruntime_reading
from jq.research.losses import losses, scores

_LOUDEST = 300.0  # dB in place of infinity, of outputs that are equal

Evaluate = Callable[..., Any]  # of the user's: of a model, or of outputs and labels
Outputs = Mapping[str, np.ndarray]


class EvaluationError(DataError):
    """A user's function that raised, or returned no number."""


@dataclasses.dataclass(frozen=True, eq=False)
class Deciding:
    """The samples that decide, and the outputs of the float network on them."""

    graph: Graph
    samples: Sequence[Sample]
    labels: np.ndarray | None
    reference: Sequence[Outputs]

    @classmethod
    def of(cls, graph: Graph, samples: Sequence[Sample], labels: np.ndarray | None) -> Deciding:
        """The samples, once the float network has run on them."""
        run = onnxruntime_reading(graph)
        return cls(graph, samples, labels, [run(sample) for sample in samples])

    def outputs(self, model: ModelProto) -> list[Outputs]:
        """The outputs of a model on each sample."""
        run = onnxruntime_reading(model)
        return [run(sample) for sample in self.samples]

    def losses(self, outputs: Sequence[Outputs], name: str) -> np.ndarray:
        """One of `jq.research.losses.losses` of each sample."""
        read, program = scores(self.graph), jax.jit(losses)
        pairs = zip(self.reference, outputs, strict=True)
        return np.array([program(read(a), read(b))[name] for a, b in pairs], np.float64)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric: its values, one for each deciding sample or one for all, and how they are read."""

    values: Callable[[Deciding, ModelProto, Sequence[Outputs]], np.ndarray]
    higher: bool = True  # whether more is better
    shares: bool = False  # values are 0 or 100, so that their mean is a share in percent
    classes: bool = False  # models are ranked by the KL divergence of the outputs' classes
    compares: bool = True  # with the float network, which has no value of its own
    ranks: bool = False  # models, by the mean of its values


def _sqnr(deciding: Deciding, _: ModelProto, outputs: Sequence[Outputs]) -> np.ndarray:
    """The SQNR in dB of the output that loses most."""

    def of(x: Outputs, y: Outputs) -> float:
        kept = [_LOUDEST]
        for name in (k for k, v in x.items() if _is_float(v)):
            a, b = (np.asarray(v[name], np.float64) for v in (x, y))
            noise = float(np.square(a - b).sum())
            kept.append(decibels(float(np.square(a).sum()), noise) if math.isfinite(noise) else -_LOUDEST)
        return max(-_LOUDEST, min(kept))

    return np.array([of(*pair) for pair in zip(deciding.reference, outputs, strict=True)])


def _kl(deciding: Deciding, _: ModelProto, outputs: Sequence[Outputs]) -> np.ndarray:
    """The KL divergence from the float network's classes; infinite where an output is NaN."""
    return np.nan_to_num(deciding.losses(outputs, "kl"), nan=np.inf)


def _agreement(deciding: Deciding, _: ModelProto, outputs: Sequence[Outputs]) -> np.ndarray:
    """100 for each sample in the class that the float network gives it, else 0."""
    return 100 * (1 - deciding.losses(outputs, "top1"))


def _top1(deciding: Deciding, _: ModelProto, outputs: Sequence[Outputs]) -> np.ndarray:
    """100 for each sample whose highest score is the label's, else 0."""
    labels = deciding.labels
    if labels is None:
        raise ConfigError("target top1 needs labels, one for each sample; use 'agreement 98', which needs none")
    rows = np.concatenate([_classes(o, deciding.graph) for o in outputs])
    if len(rows) != len(labels):
        raise DataError(f"there are {len(labels)} labels for {len(rows)} rows of scores")
    return 100.0 * (rows.argmax(1) == labels)


METRICS: Mapping[str, Metric] = {
    "top1": Metric(_top1, shares=True, classes=True, compares=False),
    "agreement": Metric(_agreement, shares=True, classes=True),
    "kl": Metric(_kl, higher=False, classes=True),
    "sqnr": Metric(_sqnr),
}


def own(evaluate: Evaluate) -> Metric:
    """Return the metric of a user's function, whose values are one number, or one for each sample.

    The name of its first parameter says what it takes: `outputs` are the stacked ones of the deciding samples, with
    `labels` behind them where it has a second; anything else is the model.
    """
    try:
        parameters = list(inspect.signature(evaluate).parameters)
    except (TypeError, ValueError):
        parameters = []

    def values(deciding: Deciding, model: ModelProto, outputs: Sequence[Outputs]) -> np.ndarray:
        given: list[Any] = [model]
        if parameters and parameters[0] == "outputs":
            given = [{k: np.concatenate([np.atleast_1d(o[k]) for o in outputs]) for k in outputs[0]}]
            given += [deciding.labels] if len(parameters) > 1 else []
        try:
            each = np.asarray(evaluate(*given), np.float64)
        except Error:
            raise
        except Exception as error:
            raise EvaluationError(f"evaluate raised {type(error).__name__}: {error}") from error
        if not each.size or not np.isfinite(each).all():
            raise EvaluationError(f"evaluate returned {each}; expected a finite number, or one for each sample")
        return each.reshape(-1)

    return Metric(values, compares=False, ranks=True)


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _classes(outputs: Outputs, graph: Graph) -> np.ndarray:
    """The scores [rows, classes] of a classifier's outputs."""
    values = next((v for v in outputs.values() if _is_float(v) and v.ndim > 1), None)
    if values is None:
        raise DataError(f"{graph.name}: top1 needs an output of scores [samples, classes]")
    return values.reshape(values.shape[0], -1)
