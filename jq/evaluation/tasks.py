"""Metrics of tasks other than classification, of a model's outputs on whole data: masks, words, embeddings, or your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jq.data import arrays
from jq.data.sources import as_trained, open_source
from jq.errors import DataError, check_choice
from jq.evaluation.estimates import TAIL, Estimate
from jq.evaluation.infer import samples
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.readings.named import AnyReading
from jq.util import files

Outputs = Mapping[str, Sequence[np.ndarray]]  # of each sample, by output
Metric = Callable[[Outputs, Any], float]


def model_outputs(model: ModelLike, data: Any, *, reading: AnyReading = "onnxruntime") -> Outputs:
    """Return all outputs of a model on data, an array for each sample, run as `jq.infer` runs it."""
    graph = model if isinstance(model, Graph) else load(model)
    source = open_source(as_trained(data, graph.metadata), graph.inputs)
    rows = [outputs for _, outputs in samples(graph, source, reading=reading, original=model)]
    return {value.name: [row[value.name] for row in rows] for value in graph.outputs}


def read_truth(path: Path) -> Any:
    """Return the truth in a file: an array of .npy, the only one of .npz, a value of .json, or the lines of another.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "truth.json").write_text("[1, 2]")
    ...     read_truth(Path(folder, "truth.json"))
    [1, 2]
    """
    if path.suffix in (".npy", ".npz"):
        with arrays.opened(path) as content:
            if not isinstance(content, arrays.Archive):
                return np.array(content)
            if len(content.members) != 1:
                raise DataError(
                    f"{path} holds {', '.join(content.members) or 'no arrays'}; expected one array, the truth"
                )
            return content.read(next(iter(content.members)))
    return files.document(path) if path.suffix == ".json" else files.text(path).splitlines()


@dataclasses.dataclass(frozen=True)
class SampleMetric:
    """A metric of rows, one for each sample, so that models can be held side by side on samples that are drawn again."""

    each: Callable[[Outputs, Any], np.ndarray]  # [samples, columns]
    of: Callable[[np.ndarray], float]  # of the rows of some samples

    def __call__(self, outputs: Outputs, truth: Any) -> float:
        """The metric of all samples."""
        return self.of(self.each(outputs, truth))

    def change(self, reference: np.ndarray, rows: np.ndarray, *, seed: int = 0, resamples: int = 1000) -> Estimate:
        """The metric of some rows less that of a reference's, with its interval over the samples."""
        rng, changes = np.random.default_rng(seed), []
        for _ in range(resamples):
            drawn = rng.integers(0, len(rows), len(rows))
            changes.append(self.of(rows[drawn]) - self.of(reference[drawn]))
        low, high = np.percentile(changes, [TAIL, 100 - TAIL])
        return Estimate(self.of(rows) - self.of(reference), float(low), float(high))


def mean_iou(outputs: Outputs, truth: Any) -> float:
    """Return the mean over classes of intersection over union, of scores [1, classes, height, width] and masks of classes.

    Classes that neither has count for nothing; pixels of the truth below 0 or of 255 are left out.

    >>> scores = np.eye(2, dtype=np.float32)[[[0, 1], [1, 1]]].transpose(2, 0, 1)[None]
    >>> mean_iou({"y": [scores]}, np.array([[[0, 1], [0, 1]]])).__round__(3)
    0.583
    """
    return METRICS["masks"](outputs, truth)


def words(outputs: Outputs, truth: Any) -> float:
    """Return the share of words read without a mistake; scores are [1, steps, symbols], and symbol 0 is CTC's blank.

    The truth holds the symbols of each word, filled up with 0.

    >>> steps = np.eye(3, dtype=np.float32)[[1, 1, 0, 1, 2]][None]
    >>> words({"y": [steps]}, np.array([[1, 1, 2, 0]]))
    1.0
    """
    return METRICS["words"](outputs, truth)


def spearman(outputs: Outputs, truth: Any) -> float:
    """Return the rank correlation of the cosines of neighbouring samples' embeddings with their scores in the truth.

    >>> pairs = [np.float32([[1, 0]]), np.float32([[1, 0]]), np.float32([[1, 0]]), np.float32([[0, 1]])]
    >>> round(spearman({"y": pairs}, np.array([5.0, 1.0])), 6)
    1.0
    """
    return METRICS["spearman"](outputs, truth)


def cosine(outputs: Outputs, truth: Any) -> float:
    """Return the mean cosine of each sample's embedding and the truth's, another model's, say.

    >>> cosine({"y": [np.float32([[3, 4]])]}, np.array([[3.0, 4.0]])).__round__(6)
    1.0
    """
    return METRICS["cosine"](outputs, truth)


def _areas(outputs: Outputs, truth: Any) -> np.ndarray:
    """The intersections of each class, then the unions."""
    rows = []
    for scores, mask in _with_truth(outputs, truth):
        if scores.ndim != 4 or scores.shape[2:] != mask.shape:
            raise DataError(
                f"masks need scores [1, classes, height, width] and truth [height, width]; got {scores.shape}, {mask.shape}"
            )
        classes = scores.shape[1]
        guess, kept = scores[0].argmax(0), (mask >= 0) & (mask != 255)
        table = np.bincount(classes * mask[kept].astype(int) + guess[kept], minlength=classes**2).astype(float)
        table = table[: classes**2].reshape(classes, classes)
        both = np.diag(table)
        rows.append(np.concatenate([both, table.sum(0) + table.sum(1) - both]))
    return np.stack(rows)


def _iou(areas: np.ndarray) -> float:
    shared, either = np.split(areas.sum(0), 2)
    return float((shared[either > 0] / either[either > 0]).mean())


def _words_read(outputs: Outputs, truth: Any) -> np.ndarray:
    right = []
    for scores, word in _with_truth(outputs, truth):
        best = scores.reshape(-1, scores.shape[-1]).argmax(-1)
        read = best[np.flatnonzero(np.diff(best, prepend=-1) != 0)]
        right.append([float(np.array_equal(read[read != 0], word[word != 0]))])
    return np.array(right)


def _pairs(outputs: Outputs, truth: Any) -> np.ndarray:
    """The cosine of each pair and its score."""
    rows = np.stack([np.ravel(v).astype(np.float64) for v in next(iter(outputs.values()))])
    if len(rows) != 2 * len(truth):
        raise DataError(
            f"spearman needs two samples for each score of the truth; got {len(rows)} and {len(truth)} scores"
        )
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return np.stack([(rows[::2] * rows[1::2]).sum(1), np.asarray(truth, np.float64)], axis=1)


def _rank_correlation(pairs: np.ndarray) -> float:
    one, other = (_ranks(v) for v in pairs.T)
    return float(np.corrcoef(one, other)[0, 1])


def _cosines(outputs: Outputs, truth: Any) -> np.ndarray:
    cosines = []
    for value, row in _with_truth(outputs, truth):
        x, y = (np.ravel(v).astype(np.float64) for v in (value, row))
        cosines.append([x @ y / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-30)])
    return np.array(cosines)


def _mean(rows: np.ndarray) -> float:
    return float(rows.mean())


METRICS: Mapping[str, SampleMetric] = {
    "masks": SampleMetric(_areas, _iou), "words": SampleMetric(_words_read, _mean),
    "spearman": SampleMetric(_pairs, _rank_correlation), "cosine": SampleMetric(_cosines, _mean),
}  # fmt: skip


def metric_named(name: str) -> SampleMetric:
    """Return one of the metrics here by its name."""
    check_choice("--metric", name, ("boxes", *METRICS))  # of which `boxes.py` has the first
    return METRICS[name]


def _with_truth(outputs: Outputs, truth: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first output of each sample with its part of the truth."""
    values = next(iter(outputs.values()))
    if truth is None or len(truth) != len(values):
        count = "none" if truth is None else str(len(truth))
        raise DataError(f"the metric needs a truth for each of {len(values)} samples; got {count}; give --labels")
    return [(value, np.asarray(part)) for value, part in zip(values, truth, strict=True)]


def _ranks(values: np.ndarray) -> np.ndarray:
    """The ranks of some numbers, the mean of them where several are equal."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
