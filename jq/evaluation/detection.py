"""Mean average precision of boxes, as the COCO benchmark counts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jq.errors import DataError
from jq.evaluation.estimates import TAIL, Estimate

COCO_THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))
COCO_BOXES = 100  # of one image and class, those with the best scores
_RECALLS = np.linspace(0, 1, 101)


@dataclasses.dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of one image.

    >>> Boxes(np.array([[0, 0, 10, 10]]), np.array([3]), np.array([0.9])).classes
    array([3])
    """

    corners: np.ndarray  # [boxes, 4]: left, top, right, bottom
    classes: np.ndarray  # [boxes]: whole numbers
    scores: np.ndarray | None = None  # [boxes]; None of the truth

    def __post_init__(self) -> None:
        """Raise a DataError for arrays whose shapes do not match."""
        count = len(self.corners) if np.ndim(self.corners) else -1
        others = [np.shape(a) for a in (self.classes, self.scores) if a is not None]
        if np.shape(self.corners) != (count, 4) or any(s != (count,) for s in others):
            shapes = [np.shape(self.corners), *others]
            raise DataError(f"boxes of shapes {shapes}: expected corners [boxes, 4], classes and scores [boxes]")
        if not all(np.isfinite(a).all() for a in (self.corners, self.scores) if a is not None):
            raise DataError("boxes or their scores hold NaN or Inf")


def mean_average_precision(
    detections: Sequence[Boxes], truth: Sequence[Boxes], thresholds: Sequence[float] = COCO_THRESHOLDS
) -> float:
    """Return the mean over classes and IoU thresholds of the average precision at 101 recalls; NaN without a true box.

    `detections` and `truth` hold one `Boxes` for each image. In the order of their scores, the 100 best of an image and class
    take the true box that they overlap most and that none took before, if the overlap reaches the threshold. There are
    no crowds and no areas. See Lin et al., "Microsoft COCO: Common Objects in Context" (2014).

    >>> true = Boxes(np.array([[0, 0, 10, 10]]), np.array([0]))
    >>> shifted = Boxes(np.array([[0, 0, 10, 8]]), np.array([0]), np.array([0.9]))  # IoU 0.8: good for 7 of 10
    >>> round(mean_average_precision([shifted], [true]), 6)
    0.7
    """
    return matched_boxes(detections, truth, thresholds).mean()


@dataclasses.dataclass(frozen=True, eq=False)
class ClassMatches:
    """The boxes of one class that were found in all images, the best first."""

    images: np.ndarray  # in which image each was found
    right: np.ndarray  # bool [thresholds, found]
    true: np.ndarray  # true boxes of each image


@dataclasses.dataclass(frozen=True, eq=False)
class Matches:
    """The boxes that are right, so that images can count several times, or not at all."""

    images: int
    classes: tuple[ClassMatches, ...]  # those with a true box

    def mean(self, weights: np.ndarray | None = None) -> float:
        """The mean average precision, where each image counts `weights` times; NaN without a true box."""
        weights = np.ones(self.images) if weights is None else weights
        parts = [part for own in self.classes for part in _average_precisions(own, weights)]
        return float(np.mean(parts)) if parts else float("nan")

    def change(self, other: Matches, *, seed: int = 0, resamples: int = 500) -> Estimate:
        """The other's mean less this one's, with its interval over images that are drawn again, with replacement."""
        rng, changes = np.random.default_rng(seed), []
        for _ in range(resamples):
            weights = np.bincount(rng.integers(0, self.images, self.images), minlength=self.images)
            changes.append(other.mean(weights) - self.mean(weights))
        low, high = np.nanpercentile(changes, [TAIL, 100 - TAIL])
        return Estimate(other.mean() - self.mean(), float(low), float(high))


def matched_boxes(
    detections: Sequence[Boxes], truth: Sequence[Boxes], thresholds: Sequence[float] = COCO_THRESHOLDS
) -> Matches:
    """Return which boxes of each class are right at each threshold."""
    here, there = len(detections), len(truth)
    if here != there:
        raise DataError(f"there are predictions for {here} images and truths for {there}; expected one for each")
    if any(image.scores is None for image in detections):
        raise DataError("the predicted boxes have no scores")
    classes = sorted({int(c) for image in truth for c in image.classes})
    return Matches(here, tuple(_matches(detections, truth, c, thresholds) for c in classes))


def _matches(
    detections: Sequence[Boxes], truth: Sequence[Boxes], which: int, thresholds: Sequence[float]
) -> ClassMatches:
    scores, right, images, true = [], [], [], []
    for i, (have, want) in enumerate(zip(detections, truth, strict=True)):
        assert have.scores is not None
        mine = np.flatnonzero(have.classes == which)
        mine = mine[np.argsort(-have.scores[mine], kind="stable")][:COCO_BOXES]
        wanted = want.corners[want.classes == which]
        overlaps = _overlaps(have.corners[mine], wanted)
        scores.append(have.scores[mine])
        right.append(np.stack([_matched(overlaps, t) for t in thresholds]))
        images.append(np.full(len(mine), i))
        true.append(len(wanted))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return ClassMatches(np.concatenate(images)[order], np.concatenate(right, 1)[:, order], np.array(true))


def _average_precisions(own: ClassMatches, weights: np.ndarray) -> list[float]:
    """The average precision at each threshold; none where no image that counts has a true box."""
    true, each = float((own.true * weights).sum()), weights[own.images]
    if not true:
        return []
    counted, seen = np.cumsum(own.right * each, axis=1), np.maximum(np.cumsum(each), 1)
    precision = np.maximum.accumulate((counted / seen)[:, ::-1], axis=1)[
        :, ::-1
    ]  # at a recall: the best at this or higher
    precision = np.concatenate(
        [precision, np.zeros((len(precision), 1))], axis=1
    )  # recalls that are not reached have 0
    at = [np.searchsorted(recalls, _RECALLS, side="left") for recalls in counted / true]
    return [float(line[places].mean()) for line, places in zip(precision, at, strict=True)]


def _overlaps(detected: np.ndarray, truth: np.ndarray) -> np.ndarray:  # IoU [found, truth]
    one, two = np.asarray(detected, np.float64)[:, None], np.asarray(truth, np.float64)[None]
    sides = np.minimum(one[..., 2:], two[..., 2:]) - np.maximum(one[..., :2], two[..., :2])
    both = np.prod(np.maximum(sides, 0), axis=-1)
    areas = (np.prod(boxes[..., 2:] - boxes[..., :2], axis=-1) for boxes in (one, two))
    return both / np.maximum(sum(areas) - both, np.finfo(np.float64).tiny)


def _matched(overlaps: np.ndarray, threshold: float) -> np.ndarray:  # bool [found], in the order of their scores
    free, right = np.ones(overlaps.shape[1], bool), np.zeros(overlaps.shape[0], bool)
    for i, row in enumerate(overlaps):
        open_ = np.where(free, row, -1)
        best = int(np.argmax(open_)) if open_.size else -1
        if best >= 0 and open_[best] >= threshold:
            free[best], right[i] = False, True
    return right
