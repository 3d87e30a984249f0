"""Is the accuracy of a float model plausible? If other preprocessing or labels do better, that is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jq.data.images import ImageFolder
from jq.data.preprocessing import PREPROCESSINGS, Pixels
from jq.data.sources import preprocessing_of
from jq.errors import Error
from jq.evaluation import metrics
from jq.evaluation.accuracy import Labels, Scores, model_scores
from jq.graph.read import ModelLike, load
from jq.readings.named import AnyReading

_PLAUSIBLE = 0.6  # of samples, what a trained classifier has right
_TRIED = 64  # samples
_CLEAR = 3.0  # standard errors by which another way is better
_OFFSETS = (-1, 1)  # a class for the background in front, or labels that count it


def implausible(
    model: ModelLike,
    data: Any,
    labels: Labels,
    scores: Scores,
    output: str | None = None,
    *,
    reading: AnyReading = "onnxruntime",
) -> Iterator[str]:
    """Yield a sentence for each other way to label or feed a float model by which it would be right far more often.

    Other preprocessings are tried on the first samples where the data are pixels, and nothing is said of how they are
    fed, or the accuracy is too low for a trained classifier. An accuracy that no other way betters is left alone.
    """
    wanted = labels.of(len(scores.values), scores.names)
    own = float(metrics.hits(scores.values, wanted).mean())
    for offset in _OFFSETS:
        moved = wanted + offset
        inside = (moved >= 0) & (moved < scores.values.shape[1])
        if not inside.all():
            continue
        share = float(metrics.hits(scores.values, moved).mean())
        if _clearly(share, own, len(moved)):
            yield f"top-1 of the float model is {own:.1%}; with --label-offset {offset} it would be {share:.1%}"
            return
    said = isinstance(data, (Pixels, ImageFolder))
    fed = preprocessing_of(data, load(model).inputs)
    if fed is None or (said and own >= _PLAUSIBLE):
        return
    count, bare = min(_TRIED, len(wanted)), _bare(data)
    tried = {}
    for name, how in PREPROCESSINGS.items():
        try:
            other = model_scores(model, Pixels(bare, how), output, reading=reading, limit=count)
        except Error:  # three means do not fit a model of gray images, for one
            continue
        tried[name] = float(metrics.hits(other.values, wanted[:count]).mean())
    here = float(metrics.hits(scores.values[:count], wanted[:count]).mean())
    best = max(tried, key=lambda name: tried[name], default=None)
    if best is not None and _clearly(tried[best], here, count):
        yield (
            f"top-1 of the float model is {here:.1%} on the first {count} samples, fed as {fed}; with --prep {best} it "
            f"would be {tried[best]:.1%}"
        )
    elif own < _PLAUSIBLE:
        yield (
            f"top-1 of the float model is {own:.1%}, which is low for a trained classifier, and no --prep of "
            f"{', '.join(PREPROCESSINGS)} improves it: do --mean, --std, --order and the labels match its training?"
        )


def _bare(data: Any) -> Any:
    """Data without what they say of their pixels."""
    if isinstance(data, ImageFolder):
        return data.path
    return data.data if isinstance(data, Pixels) else data


def _clearly(other: float, own: float, samples: int) -> bool:
    """Whether one share of the samples exceeds another by more than chance."""
    error = np.hypot(metrics.standard_error(other, samples), metrics.standard_error(own, samples))
    return other - own > _CLEAR * max(float(error), 1 / samples)
