"""The goal of a search, and how near a model is to it, on samples that it was not made from.

A goal holds when the confidence interval says so, not the mean alone: of 20 samples that agree, all that is known is that
86 % do.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from onnx import ModelProto

from jq.arithmetic.losses import decibels
from jq.data.arrays import Sample
from jq.errors import ConfigError, DataError, Error
from jq.graph import Graph
from jq.graph.write import to_model
from jq.ops.kinds import is_concat
from jq.readings.runtime import onnxruntime_reading
from jq.research.losses import losses, scores

METRICS = ("top1", "agreement", "kl", "sqnr")
OWN = "evaluate"  # the metric of a function of the user's
_TRUST = 0.95  # of each end of an interval
_LOUDEST = 300.0  # dB in place of infinity, of outputs that are equal

Evaluate = Callable[..., Any]
Outputs = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Goal:
    """A metric and its bound: absolute, or relative to the float network; None for none."""

    metric: str  # of METRICS, or OWN
    bound: float | None = None
    relative: bool = False

    @property
    def higher(self) -> bool:
        """Whether more is better."""
        return self.metric != "kl"

    def __str__(self) -> str:
        """The goal in words."""
        if self.bound is None:
            return f"the best {self.metric}" if self.metric == OWN else f"the knee of {self.metric} against cost"
        return f"{self.metric} {self.bound:+g} of float" if self.relative else f"{self.metric} {self.bound:g}"


@dataclasses.dataclass(frozen=True)
class Score:
    """How near a model is to the goal on the deciding samples."""

    value: float
    low: float | None  # both ends with 95 % confidence each; None where a function gives one number
    high: float | None
    samples: int | None
    errors: tuple[float, ...]  # of each sample, by which models are ranked
    holds: bool  # the goal, with confidence where there is an interval

    @property
    def error(self) -> float:
        """The mean of the errors."""
        return float(np.mean(self.errors))


class EvaluationError(DataError):
    """A user's function that raised, or returned no number."""


def goal_of(target: str | float | None, evaluate: Evaluate | None) -> tuple[Goal, Evaluate | None]:
    """Return the goal that a text such as "top1 -0.5" states, and the function that measures it, if it is the user's own.

    A number with a sign is relative to the float network. `file.py:function 0.98` names a function in a file; with
    `evaluate`, the number alone, or behind any word, is its bound.

    >>> str(goal_of("agreement 98", None)[0]), str(goal_of("top1 -0.5", None)[0])
    ('agreement 98', 'top1 -0.5 of float')
    """
    if target is None:
        return Goal(OWN if evaluate else "sqnr"), evaluate
    words = str(target).split()
    number = words[-1] if words else ""
    name = " ".join(words[:-1])
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise ConfigError(
            f"target {target!r} needs a metric and a number, such as 'top1 -0.5', 'agreement 98', 'kl 0.02', 'sqnr 25' or "
            "'metric.py:function 0.98'"
        )
    relative = isinstance(target, str) and number[0] in "+-"
    if ":" in name and evaluate is None:
        evaluate = _function_of(name)
    if evaluate is not None:
        return Goal(OWN, bound, relative), evaluate
    if name not in METRICS:
        known = f"one of {', '.join(METRICS)}, a function as file.py:name, or evaluate="
        raise ConfigError(f"target {target!r} needs {known}; got {name or 'a number alone'!r}")
    if name == "kl" and (bound < 0 or relative):
        raise ConfigError(f"target {target!r}: a KL divergence is from the float network, and needs a bound above 0")
    return Goal(name, bound, relative and name == "top1"), None


def _function_of(text: str) -> Evaluate:
    """The function that `file.py:name` names."""
    file, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", Path(file).stem), file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ConfigError(f"target {text!r}: there is no Python file {file!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"target {text!r}: {file} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"target {text!r}: {file} has no function {name!r}")
    return function


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """The measure of models: the goal, the deciding samples, and the float network on them."""

    goal: Goal
    graph: Graph
    samples: Sequence[Sample]
    labels: np.ndarray | None
    evaluate: Evaluate | None
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
        judge = cls(goal, graph, samples, labels, evaluate, [run(s) for s in samples], math.nan)
        if goal.metric == OWN:
            return dataclasses.replace(judge, whole=judge.own(to_model(graph), judge.reference)[0])
        if goal.metric == "top1":
            return dataclasses.replace(judge, whole=float(judge.hits(judge.reference).mean()))
        return judge

    def score(self, model: ModelProto) -> Score:
        """The score of a quantized model, which runs in onnxruntime."""
        run = onnxruntime_reading(model)
        outputs = [run(sample) for sample in self.samples]
        goal, count = self.goal, len(self.samples)
        if goal.metric == OWN:
            value, each = self.own(model, outputs)
            low, high = (None, None) if each is None else interval(each)
            bound = -math.inf if goal.bound is None else goal.bound + (self.whole if goal.relative else 0)
            return Score(
                value,
                low,
                high,
                None if each is None else len(each),
                (-value,),
                (value if low is None else low) >= bound,
            )
        if goal.metric == "sqnr":
            each = np.array([self._decibels(*pair) for pair in zip(self.reference, outputs, strict=True)])
            low, high = interval(each)
            errors = [self.relative_error(*pair) for pair in zip(self.reference, outputs, strict=True)]
            return Score(float(each.mean()), low, high, count, tuple(errors), goal.bound is None or low >= goal.bound)
        kl, other = self._compared(outputs)
        if goal.metric == "kl":
            low, high = interval(kl)
            return Score(
                float(kl.mean()), low, high, count, tuple(kl.tolist()), goal.bound is None or high <= goal.bound
            )
        each = 100 * (1 - other) if goal.metric == "agreement" else self.hits(outputs)
        low, high = share_interval(each)
        lowest = low
        if goal.relative:
            lowest = difference_low(each - self.hits(self.reference))
        holds = goal.bound is None or lowest >= goal.bound
        return Score(float(each.mean()), low, high, count, tuple(kl.tolist()), holds)

    def own(self, model: ModelProto, outputs: Sequence[Outputs]) -> tuple[float, np.ndarray | None]:
        """The value of the user's function, and of each sample, where it gives an array.

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
        return float(each.mean()), each.reshape(-1) if each.size > 1 else None

    def hits(self, outputs: Sequence[Outputs]) -> np.ndarray:
        """100 for each sample whose highest score is the label's, else 0."""
        assert self.labels is not None
        rows = np.concatenate([_classes(o, self.graph) for o in outputs])
        if len(rows) != len(self.labels):
            raise DataError(f"there are {len(self.labels)} labels for {len(rows)} rows of scores")
        return 100.0 * (rows.argmax(1) == self.labels)

    def _compared(self, outputs: Sequence[Outputs]) -> tuple[np.ndarray, np.ndarray]:
        """KL divergence, and the share of rows of another class, of each sample."""
        read, program = scores(self.graph), jax.jit(losses)
        pairs = [program(read(a), read(b)) for a, b in zip(self.reference, outputs, strict=True)]
        kl, other = (np.array([p[k] for p in pairs], np.float64) for k in ("kl", "top1"))
        return np.nan_to_num(kl, nan=np.inf), other

    def _decibels(self, x: Outputs, y: Outputs) -> float:
        """The SQNR of the output that loses most."""
        kept = [_LOUDEST]
        for name in _floats(x):
            a, b = (np.asarray(v[name], np.float64) for v in (x, y))
            noise = float(np.square(a - b).sum())
            kept.append(decibels(float(np.square(a).sum()), noise) if math.isfinite(noise) else -_LOUDEST)
        return max(-_LOUDEST, min(kept))

    def relative_error(self, x: Outputs, y: Outputs) -> float:
        """The relative error of the outputs' parts, so that scores count beside boxes."""
        errors = []
        for name in _floats(x):
            axis, cuts = parts_of(self.graph, name)
            for a, b in zip(*(np.split(v[name].astype(np.float64), cuts, axis) for v in (x, y)), strict=True):
                noise, power = float(np.square(a - b).sum()), float(np.square(a).sum())
                errors.append(min(1.0, noise / power) if power and math.isfinite(noise) else float(noise != 0))
        return float(np.mean(errors)) if errors else 0.0


def parts_of(graph: Graph, output: str) -> tuple[int, list[int]]:
    """Return where the Concat that makes an output joins its operands, as an axis and the places between them.

    Boxes and scores of a detector are such operands; what is made otherwise is one part.
    """
    node, values = graph.producer.get(output), graph.values
    if node is None or not is_concat(node):
        return 0, []
    axis = int(node.attrs["axis"])
    sizes = [(values[name].shape or ())[axis:][:1] for name in node.inputs if name in values]
    known = [size[0] for size in sizes if size and isinstance(size[0], int)]
    return (axis, np.cumsum(known)[:-1].tolist()) if len(known) == len(node.inputs) else (0, [])


def _floats(outputs: Outputs) -> list[str]:
    return [k for k, v in outputs.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"]


def _classes(outputs: Outputs, graph: Graph) -> np.ndarray:
    """The scores [rows, classes] of a classifier's outputs."""
    name = next((k for k in _floats(outputs) if outputs[k].ndim > 1), None)
    if name is None:
        raise DataError(f"{graph.name}: top1 needs an output of scores [samples, classes]")
    values = outputs[name]
    return values.reshape(values.shape[0], -1)


def interval(each: np.ndarray) -> tuple[float, float]:
    """Return both ends of a mean, each with 95 % confidence, by Student's t.

    >>> low, high = interval(np.array([1.0, 2.0, 3.0]))
    >>> round(low, 2), round(high, 2)
    (0.31, 3.69)
    """
    from scipy import stats

    if len(each) < 2:
        return -math.inf, math.inf
    reach = stats.t.ppf(_TRUST, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each))
    return float(each.mean() - reach), float(each.mean() + reach)


def share_interval(each: np.ndarray) -> tuple[float, float]:
    """Return both ends of a share in percent: exact (Clopper and Pearson) where each sample has 0 or 100.

    >>> [round(end, 1) for end in share_interval(np.full(20, 100.0))]
    [86.1, 100.0]
    """
    if np.isin(each, (0, 100)).all():
        low, high = exact_share(int((each == 100).sum()), len(each))
        return 100 * low, 100 * high
    low, high = interval(each)
    # Samples whose values are all alike do not say that the next one is.
    least = 100 * exact_share(int((each >= each.mean()).sum()), len(each))[0]
    return max(0.0, low if each.std() else min(low, least)), min(100.0, high)


def difference_low(each: np.ndarray) -> float:
    """Return the least mean of paired differences of -100, 0 and 100, with confidence: the most losses, the fewest gains."""
    lost = exact_share(int((each < 0).sum()), len(each))[1]
    gained = exact_share(int((each > 0).sum()), len(each))[0]
    return 100 * (gained - lost)


def exact_share(hits: int, count: int) -> tuple[float, float]:
    """Return both ends of a share, each with 95 % confidence."""
    from scipy import stats

    low = stats.beta.ppf(1 - _TRUST, hits, count - hits + 1) if hits else 0.0
    high = stats.beta.ppf(_TRUST, hits + 1, count - hits) if hits < count else 1.0
    return float(low), float(high)


def samples_needed(goal: Goal) -> int | None:
    """Return how many samples could show a bound in percent, if all of them agree; None of other metrics.

    >>> samples_needed(Goal("agreement", 98.0)), samples_needed(Goal("top1", -0.5, True))
    (149, 598)
    """
    if goal.bound is None or goal.metric not in ("agreement", "top1"):
        return None
    share = 1 + goal.bound / 100 if goal.relative else goal.bound / 100
    return math.ceil(math.log(1 - _TRUST) / math.log(share)) if 0 < share < 1 else None
