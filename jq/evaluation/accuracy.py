"""Accuracy of classifiers: labels, scores, and a test whether two models differ by more than chance."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jq.data import arrays
from jq.data.sources import open_source
from jq.errors import ConfigError, DataError, suggest
from jq.evaluation import metrics
from jq.evaluation.infer import samples
from jq.evaluation.results import SUFFIXES, entries
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.readings.named import AnyReading

_LABELS = (".csv", ".npy", ".npz", ".txt")


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """The right class of each sample."""

    values: np.ndarray  # int64 [samples]
    names: tuple[str, ...] | None = None  # of the samples; None: they are in order

    def of(self, scores: Scores) -> np.ndarray:
        """Return the label of each scored sample, matched by name if labels have names."""
        if self.names is None:
            if len(self.values) != len(scores.values):
                raise DataError(f"there are {len(self.values)} labels for {len(scores.values)} samples")
            return self.values
        if scores.names is None:
            raise DataError("labels have names, but samples have none: they come from one array, or share their names")
        known = dict(zip(self.names, self.values, strict=True))
        missing = [name for name in scores.names if name not in known]
        if missing:
            near = suggest(missing[0], known)
            raise DataError(f"{len(missing)} samples have no label, the first is {missing[0]!r}.{near}")
        return np.array([known[name] for name in scores.names])


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
    """Accuracy of classifiers on the same samples, and where the first two disagree."""

    models: Mapping[str, Accuracy]
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
        if self.p is not None:
            lines.append(
                f"another class for {self.other_class:,} samples; only the first is right on {self.only_first:,}, only the "
                f"second on {self.only_second:,}: p = {self.p:.3g}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts and numbers, for JSON."""
        return dataclasses.asdict(self)


def classify(scores: Mapping[str, Scores], labels: Labels) -> Classification:
    """Return the accuracy of each model and, for two, their disagreement and McNemar's p-value.

    >>> scores = {"float": Scores(np.eye(4)), "quantized": Scores(np.eye(4)[[0, 1, 2, 2]])}
    >>> found = classify(scores, Labels(np.arange(4)))
    >>> found.models["quantized"].top1, found.other_class, found.only_first, found.p
    (0.75, 1, 1, 1.0)
    """
    accuracies, right, guesses = {}, [], []
    for name, result in scores.items():
        wanted = labels.of(result)
        right.append(metrics.hits(result.values, wanted))
        guesses.append(result.values.argmax(axis=1))
        several = result.values.shape[1] > 5
        accuracies[name] = _accuracy(right[-1], metrics.hits(result.values, wanted, 5) if several else None)
    if len(scores) < 2:
        return Classification(accuracies)
    one, two = list(scores.values())[:2]
    if len(right[0]) != len(right[1]) or one.names != two.names:
        raise DataError(f"two models were run on different samples, {len(right[0])} and {len(right[1])}")
    first, second = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
    apart = int((guesses[0] != guesses[1]).sum())
    return Classification(accuracies, apart, first, second, metrics.sign_test(first, second))


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
    model: ModelLike, data: Any, output: str | None = None, *, reading: AnyReading = "onnxruntime"
) -> Scores:
    """Return the scores of a classifier on data, run as `jq.infer` runs it.

    >>> import jq
    >>> model_scores(jq.zoo.path("fashion_resnet"), jq.zoo.evaluation_set()[0][:4]).values.shape
    (4, 10)
    """
    graph = model if isinstance(model, Graph) else load(model)
    names = [value.name for value in graph.outputs]
    chosen = names[0] if output is None and len(names) == 1 else output
    if chosen not in names:
        raise ConfigError(f"output {output!r}: the model has the outputs {_shown(names)}; name the one with the scores")
    source = open_source(data, graph.inputs)
    results = samples(graph, source, reading=reading, original=model)
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
                f"{where}: {names[0]!r} has {rows[0].shape[1]} classes and {name!r} has {rows[-1].shape[1]}; of several "
                "outputs, name the one with the scores"
            )
    if not rows:
        raise DataError(f"{where}: there are no samples")
    return Scores(np.concatenate(rows), tuple(names) if all(len(r) == 1 for r in rows) else None)


# --- Labels ---


def read_labels(path: str | os.PathLike[str], offset: int = 0) -> Labels:
    """Return the labels in a file, plus `offset`: 1 where the model has a class for the background in front, say.

    An .npy file holds whole numbers [samples]; an .npz file such an array, called "labels" if there are several; a .txt
    file one number in each line; a .csv file that, or a sample's name and its label, below a heading or not. Labels
    without names are in the order of the samples.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "labels.csv").write_text("image,label\\ncat.png,3\\ndog.png,7\\n")
    ...     found = read_labels(f"{folder}/labels.csv")
    >>> found.names, found.values
    (('cat', 'dog'), array([3, 7]))
    """
    path = Path(path)
    if path.suffix.lower() not in _LABELS:
        raise DataError(f"{path}: expected labels in a file with one of {', '.join(_LABELS)}")
    if path.suffix.lower() in (".npy", ".npz"):
        return Labels(_from_array(path) + offset)
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"cannot read {path}: no regular file")
        text = path.read_text(encoding="utf-8-sig")
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline="")) if any(row)]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if rows and path.suffix.lower() == ".csv" and not _is_whole(rows[0][-1]):
        rows = rows[1:]
    widths = {len(row) for row in rows}
    most = 2 if path.suffix.lower() == ".csv" else 1
    bad = next((row for row in rows if not _is_whole(row[-1])), None)
    if not rows or len(widths) > 1 or max(widths) > most or bad:
        problem = f"the line {','.join(bad)!r}" if bad else f"{len(rows)} lines of {sorted(widths)} columns"
        raise DataError(f"{path} holds {problem}; expected a whole number in each line{', or name,label' * (most > 1)}")
    values = np.array([int(row[-1]) for row in rows], np.int64) + offset
    return Labels(values, _unique(path, [row[0] for row in rows]) if widths == {2} else None)


def _from_array(path: Path) -> np.ndarray:
    with arrays.opened(path) as file:
        if not isinstance(file, arrays.Archive):
            array = np.array(file)
        else:
            whole = [k for k, v in file.members.items() if v.dtype and v.dtype.kind in "iu" and len(v.shape or ()) == 1]
            chosen = "labels" if "labels" in whole or len(whole) != 1 else whole[0]
            if chosen not in whole:
                raise DataError(f"{path} holds {_shown(map(str, file.members.values()))}; expected an array 'labels'")
            array = file.read(chosen)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path} holds {array.dtype}{list(array.shape)}; expected whole numbers [samples]")
    return array.astype(np.int64)


def _unique(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return names as results have them: without the suffix of an image or array."""
    stems = [name[: -len(s)] if (s := Path(name).suffix).lower() in SUFFIXES else name for name in names]
    twice = next((name for name in stems if stems.count(name) > 1), None) if len(set(stems)) < len(stems) else None
    if twice is not None:
        raise DataError(f"{path} names {twice!r} more than once")
    return tuple(stems)


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 10


def _shown(names: Iterable[str]) -> str:
    items = list(names)
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "") or "nothing"
