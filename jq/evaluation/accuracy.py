"""Accuracy of classifiers: labels, scores, and whether models differ by more than chance."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jq.data.labels import Labels, read_labels
from jq.data.sources import as_trained, open_source
from jq.errors import ConfigError, DataError
from jq.evaluation import metrics
from jq.evaluation.infer import samples
from jq.evaluation.paired import Paired, paired
from jq.evaluation.results import entries
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.readings.named import AnyReading

__all__ = ["Accuracy", "Classification", "Labels", "Scores", "classify", "folder_scores", "model_scores", "read_labels",
           "stacked_scores"]  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """A classifier's scores of each sample."""

    values: np.ndarray  # [samples, classes]
    names: tuple[str, ...] | None = None  # of the samples


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Accuracy of one classifier."""

    samples: int
    top1: float
    top1_error: float  # standard error, of independent samples
    top5: float | None  # None if there are no more than five classes
    top5_error: float | None


@dataclasses.dataclass(frozen=True)
class Classification:
    """Accuracy of classifiers on the same samples, how far the others are from the first, and where the second disagrees."""

    models: Mapping[str, Accuracy]
    paired: Mapping[str, Paired] = dataclasses.field(default_factory=dict)  # each after the first, beside the first
    other_class: int | None = None  # samples that the second puts into another class than the first
    only_first: int | None = None  # samples that only the first has right
    only_second: int | None = None
    p: float | None = None  # of such counts or more uneven ones, were both models as good: McNemar's test, exact

    def summary(self) -> str:
        """The accuracies with their standard errors, and the difference, as lines of text."""
        lines = []
        for name, a in self.models.items():
            top5 = "" if a.top5 is None else f", top-5 {a.top5:.2%} +- {a.top5_error:.2%}"
            lines.append(f"{name}: top-1 {a.top1:.2%} +- {a.top1_error:.2%}{top5}, {a.samples:,} samples")
        first = next(iter(self.models))
        lines += [f"{name} compared with {first}: {difference}" for name, difference in self.paired.items()]
        if len(self.models) == 2:
            lines.append(
                f"another class for {self.other_class:,} samples; only the first is right on {self.only_first:,}, only the "
                f"second on {self.only_second:,}: p = {self.p:.3g}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts and numbers, for JSON."""
        return dataclasses.asdict(self)


def classify(scores: Mapping[str, Scores], labels: Labels, *, seed: int = 0) -> Classification:
    """Return the accuracy of each model, and how each after the first differs from it: agreement, KL, SQNR, McNemar's p.

    Intervals are those of a bootstrap, whose generator has the seed `seed`.

    >>> scores = {"float": Scores(np.eye(4)), "quantized": Scores(np.eye(4)[[0, 1, 2, 2]])}
    >>> found = classify(scores, Labels(np.arange(4)))
    >>> found.models["quantized"].top1, found.other_class, found.only_first, found.p
    (0.75, 1, 1, 1.0)
    """
    accuracies, right, guesses = {}, [], []
    for name, result in scores.items():
        wanted = labels.of(len(result.values), result.names)
        right.append(metrics.hits(result.values, wanted))
        guesses.append(result.values.argmax(axis=1))
        several = result.values.shape[1] > 5
        accuracies[name] = _accuracy(right[-1], metrics.hits(result.values, wanted, 5) if several else None)
    if len(scores) < 2:
        return Classification(accuracies)
    one, *others = scores.values()
    beside = {}
    for name, other in zip(list(scores)[1:], others, strict=True):
        if len(one.values) != len(other.values) or one.names != other.names:
            pairs = zip(one.names or (), other.names or (), strict=False)
            unlike = next((f"{mine!r} and {theirs!r}" for mine, theirs in pairs if mine != theirs), None)
            where = unlike or f"{len(one.values)} and {len(other.values)} of them"
            raise DataError(f"the two models were run on different samples, {where}; use the same data for both")
        if one.values.shape == other.values.shape:
            wanted = labels.of(len(one.values), one.names)
            beside[name] = paired([one.values], [other.values], wanted, seed=seed)
    first, second = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
    apart = int((guesses[0] != guesses[1]).sum())
    return Classification(accuracies, beside, apart, first, second, metrics.sign_test(first, second))


def _accuracy(top1: np.ndarray, top5: np.ndarray | None) -> Accuracy:
    one, five = float(top1.mean()), None if top5 is None else float(top5.mean())
    error = None if five is None else metrics.standard_error(five, len(top1))
    return Accuracy(len(top1), one, metrics.standard_error(one, len(top1)), five, error)


# --- Scores ---


def folder_scores(folder: str | os.PathLike[str], output: str | None = None) -> Scores:
    """Return the scores in a folder of results, in their order: a file is one sample, or several in [samples, classes].

    Where a model has several outputs, `output` is the folder of one of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.array([0.1, 0.9]))
    ...     np.save(f"{folder}/b.npy", np.array([[0.8, 0.2]]))
    ...     folder_scores(folder).values.argmax(axis=1)
    array([1, 0])
    """
    files, prefix = entries(Path(folder)), "" if output is None else f"{output}/"
    inside = [e for e in files if e.key.startswith(prefix)]
    if not inside:
        raise DataError(f"{folder} holds no output {output!r}; it holds {_shown([e.key for e in files])}")
    return stacked_scores(((e.key.removeprefix(prefix), e.read()) for e in inside), str(folder))


def model_scores(
    model: ModelLike,
    data: Any,
    output: str | None = None,
    *,
    reading: AnyReading = "onnxruntime",
    limit: int | None = None,
) -> Scores:
    """Return the scores of a classifier on data, or on their first `limit` samples, run as `jq.infer` runs it.

    >>> import jq
    >>> model_scores(jq.zoo.path("fashion_resnet"), jq.zoo.evaluation_set()[0][:4]).values.shape
    (4, 10)
    """
    graph = model if isinstance(model, Graph) else load(model)
    names = [value.name for value in graph.outputs]
    chosen = names[0] if output is None and len(names) == 1 else output
    if chosen not in names:
        raise ConfigError(f"output {output!r}: the model has the outputs {_shown(names)}; name the one with the scores")
    source = open_source(as_trained(data, graph.metadata), graph.inputs)
    results = samples(graph, source, reading=reading, limit=limit, original=model)
    return stacked_scores(((name, outputs[chosen]) for name, outputs in results), f"output {chosen!r}")


def stacked_scores(pairs: Iterable[tuple[str, np.ndarray]], where: str) -> Scores:
    """Return the scores of named samples; an error says where they come from.

    >>> stacked_scores([("a", np.array([0.1, 0.9]))], "here").values.shape
    (1, 2)
    """
    names, rows = [], list[np.ndarray]()
    for name, array in pairs:
        shape = array.shape
        while len(shape) > 2 and shape[-1] == 1:  # [samples, classes, 1, 1], of convolutional heads
            shape = shape[:-1]
        if len(shape) not in (1, 2) or shape[-1] < 2 or not array.size:
            given = f"{name!r} has the shape {list(array.shape)}"
            raise DataError(f"{where}: {given}; scores are [classes] or [samples, classes]")
        rows.append(np.array(array, copy=None).reshape(-1, shape[-1]))
        names.append(name)
        if rows[-1].shape[1] != rows[0].shape[1]:
            raise DataError(
                f"{where}: {names[0]!r} has {rows[0].shape[1]} classes and {name!r} has {rows[-1].shape[1]}; if the model "
                "has several outputs, name the one with the scores"
            )
    if not rows:
        raise DataError(f"{where}: there are no samples")
    return Scores(np.concatenate(rows), tuple(names) if all(len(r) == 1 for r in rows) else None)


def _shown(names: Iterable[str]) -> str:
    items = list(names)
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "") or "nothing"
