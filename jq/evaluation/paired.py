"""Models beside a reference on the same samples: how far apart they are, with intervals.

Top-1 on 500 images moves by a point with the last bits of a sum. Agreement with the reference, KL divergence and SQNR
compare each sample with itself, and so say more with as many samples. Intervals are percentiles of a bootstrap: the
measure on samples drawn again, with replacement, by a generator with an explicit seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jq.evaluation import metrics
from jq.evaluation.estimates import RESAMPLES, Estimate, bootstrap

_QUIETEST = 1e-30  # the least noise, relative to the signal, so that exact samples have a finite ratio


@dataclasses.dataclass(frozen=True)
class Paired:
    """A model beside a reference on the same samples. Shares lie in [0, 1]; None where these outputs do not define a figure."""

    samples: int
    agreement: Estimate | None  # share of samples that get the reference's class
    kl: Estimate | None  # of the classes' distributions, from the reference's
    sqnr: Estimate | None  # dB, of the outputs
    top1: Estimate | None = None  # its top-1 less that of the reference
    only_first: int | None = None  # samples that only the reference has right
    only_second: int | None = None
    p: float | None = None  # of McNemar's exact test: are both as often right?

    def __str__(self) -> str:
        parts = [] if self.agreement is None else [f"agreement {self.agreement.scaled(100):.1f} %"]
        parts += [] if self.kl is None else [f"KL {self.kl:.3g}"]
        parts += [] if self.sqnr is None else [f"SQNR {self.sqnr:.1f} dB"]
        if self.top1 is not None:
            parts.append(f"top-1 {self.top1.scaled(100):+.1f} points, p = {self.p:.3g}")
        return ", ".join(parts)


def paired(
    reference: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    labels: np.ndarray | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Paired:
    """Return how far outputs, each [samples, ...], are from those of a reference, with intervals.

    Classes are the last axis of the first output that has one of at most three axes; `labels` are those of its rows.

    >>> one = np.eye(4)[[0, 1, 2, 3]] * 9
    >>> found = paired([one], [one[[0, 1, 2, 2]]], np.arange(4))
    >>> found.agreement.value, found.top1.value, found.only_first, found.p
    (0.75, -0.25, 1, 1.0)
    """
    return summarized(measures(reference, outputs, labels), seed=seed, resamples=resamples)


def summarized(columns: Mapping[str, np.ndarray], *, seed: int = 0, resamples: int = RESAMPLES) -> Paired:
    """Return what columns of `measures`, of samples that were measured in parts, say of all of them.

    >>> summarized({"agreement": np.array([1.0, 0.0])}).agreement.value
    0.5
    """
    known: dict[str, Any] = {}
    if {"signal", "noise"} <= columns.keys() and columns["signal"].sum() > 0 and columns["noise"].sum() > 0:
        powers = np.stack([columns["signal"], columns["noise"]], 1)
        known["sqnr"] = _estimate(powers, lambda means: _decibels(*means.T), seed, resamples)
    for name in {"agreement", "kl", "top1"} & columns.keys():
        known[name] = _estimate(columns[name][:, None], lambda means: means[:, 0], seed, resamples)
    if "top1" in columns:
        first, second = (int(np.sum(sign * columns["top1"] > 0)) for sign in (-1, 1))
        known |= {"only_first": first, "only_second": second, "p": metrics.sign_test(first, second)}
    count = len(next(iter(columns.values()), ()))
    return Paired(count, **{"agreement": None, "kl": None, "sqnr": None, **known})


def _estimate(each: np.ndarray, of: Callable[[np.ndarray], np.ndarray], seed: int, resamples: int) -> Estimate | None:
    value = float(of(each.mean(0)[None])[0])
    if not np.isfinite(value):
        return None
    low, high = bootstrap(each, of, seed=seed, resamples=resamples)
    return Estimate(value, float(low), float(high))


def _decibels(signal: np.ndarray, noise: np.ndarray) -> np.ndarray:
    return 10 * np.log10(signal / np.maximum(noise, _QUIETEST * signal))


def measures(
    reference: Sequence[np.ndarray], outputs: Sequence[np.ndarray], labels: np.ndarray | None = None
) -> Mapping[str, np.ndarray]:
    """Return what each sample has: signal and noise, and of classes agreement, KL and, with labels, the change of top-1.

    >>> {k: v.tolist() for k, v in measures([np.float32([[3, 4]])], [np.float32([[3, 2]])]).items() if k != "kl"}
    {'signal': [25.0], 'noise': [4.0], 'agreement': [0.0]}
    """
    floats = [(a, b) for a, b in zip(reference, outputs, strict=True) if a.dtype.kind == "f"]
    made: dict[str, np.ndarray] = {}
    if floats:
        made["signal"] = sum((_squares(a) for a, _ in floats), np.zeros(len(floats[0][0])))
        made["noise"] = sum((_squares(a.astype(np.float64) - b) for a, b in floats), np.zeros(len(floats[0][0])))
    if (place := classes_of(reference)) is not None:
        one, two = (rows_of(v[place]).astype(np.float64) for v in (reference, outputs))
        count = len(reference[place])
        made["agreement"] = (one.argmax(-1) == two.argmax(-1)).reshape(count, -1).mean(1)
        with np.errstate(invalid="ignore"):
            first, second = log_probabilities(one), log_probabilities(two, like=one)
            made["kl"] = np.sum(np.exp(first) * (first - second), -1).reshape(count, -1).mean(1)
        if labels is not None:
            hits = (metrics.hits(v, labels).astype(np.float64).reshape(count, -1).mean(1) for v in (two, one))
            made["top1"] = np.subtract(*hits)
    return made


def classes_of(outputs: Sequence[np.ndarray]) -> int | None:
    """Return the place of the output that holds scores of classes, if there is one."""
    places = (i for i, a in enumerate(outputs) if a.dtype.kind == "f" and a.ndim <= 3 and a.shape[-1] > 1)
    return next(places, None)


def rows_of(scores: np.ndarray) -> np.ndarray:
    """Scores as [rows, classes]."""
    return scores.reshape(-1, scores.shape[-1])


def _squares(values: np.ndarray) -> np.ndarray:
    return np.square(values.reshape(len(values), -1), dtype=np.float64).sum(1)


def log_probabilities(scores: np.ndarray, like: np.ndarray | None = None) -> np.ndarray:
    """Return logarithms of probabilities, which scores are or become by softmax.

    They are probabilities if those of a reference are, `like`, by default themselves: rounded ones add up to one no longer.

    >>> log_probabilities(np.array([[0.25, 0.75]])).round(3).tolist(), log_probabilities(np.array([[3.0, 3.0]])).round(3).tolist()
    ([[-1.386, -0.288]], [[-0.693, -0.693]])
    >>> log_probabilities(np.array([[0.25, 0.5]]), like=np.array([[0.25, 0.75]])).round(3).tolist()
    [[-1.099, -0.405]]
    """
    like = scores if like is None else like
    if like.min() >= 0 and np.allclose(like.sum(-1), 1, atol=1e-3):
        positive = np.maximum(scores, 1e-12)
        return np.log(positive / positive.sum(-1, keepdims=True))
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
