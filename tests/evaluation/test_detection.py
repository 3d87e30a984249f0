"""Mean average precision on cases worked by hand; random ones were held against pycocotools 2.0.11."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jq.errors import DataError
from jq.evaluation.detection import matched_boxes
from jq.evaluation.metrics import Boxes, mean_average_precision


def boxes(*corners: tuple[float, ...], classes: list[int] | None = None, scores: list[float] | None = None) -> Boxes:
    found = None if scores is None else np.array(scores)
    return Boxes(np.array(corners, float).reshape(-1, 4), np.array(classes or [0] * len(corners), int), found)


ONE, FAR = (0, 0, 10, 10), (50, 50, 60, 60)


def test_all_found_and_none_found() -> None:
    assert mean_average_precision([boxes(ONE, FAR, scores=[0.5, 0.9])], [boxes(ONE, FAR)]) == 1
    assert mean_average_precision([boxes(scores=[])], [boxes(ONE)]) == 0
    assert math.isnan(mean_average_precision([boxes(ONE, scores=[1])], [boxes()]))


def test_a_better_false_one_halves_the_precision() -> None:
    assert mean_average_precision([boxes(FAR, ONE, scores=[0.9, 0.5])], [boxes(ONE)]) == pytest.approx(0.5)
    # Behind the right one it costs nothing: the recall is reached before.
    assert mean_average_precision([boxes(FAR, ONE, scores=[0.5, 0.9])], [boxes(ONE)]) == 1


def test_half_of_the_recall() -> None:
    # Recalls 0, 0.01 ... 0.5 are reached: 51 of 101.
    assert mean_average_precision([boxes(ONE, scores=[1])], [boxes(ONE, FAR)]) == pytest.approx(51 / 101)


def test_a_box_is_found_once() -> None:
    twice = boxes(ONE, ONE, FAR, scores=[0.9, 0.8, 0.7])
    # One, a false one, the other: up to a recall of 0.5 the precision is 1, after it 2/3.
    assert mean_average_precision([twice], [boxes(ONE, FAR)]) == pytest.approx((51 + 50 * 2 / 3) / 101)


def test_thresholds() -> None:
    shifted = boxes((0, 0, 10, 6.2), scores=[1])  # IoU 0.62: good for 0.5, 0.55 and 0.6
    assert mean_average_precision([shifted], [boxes(ONE)]) == pytest.approx(0.3)
    assert mean_average_precision([shifted], [boxes(ONE)], thresholds=[0.6]) == 1


def test_classes_and_images_are_apart() -> None:
    true = [boxes(ONE, FAR, classes=[0, 1]), boxes(ONE)]
    found = [boxes(ONE, FAR, classes=[0, 0], scores=[0.9, 0.8]), boxes(FAR, scores=[0.95])]
    # Class 0: false (0.95), right (0.9), false: half the recall with a precision of 1/2. Class 1: nothing.
    assert mean_average_precision(found, true) == pytest.approx((51 * 0.5 / 101 + 0) / 2)
    # A class that is nowhere true does not count.
    assert mean_average_precision([boxes(ONE, FAR, classes=[0, 7], scores=[1, 1])], [boxes(ONE)]) == 1


def test_only_the_best_hundred_of_an_image() -> None:
    many = boxes(*[FAR] * 100, ONE, scores=[*np.linspace(1, 0.5, 100), 0.1])
    assert mean_average_precision([many], [boxes(ONE)]) == 0


def test_boxes_that_do_not_fit() -> None:
    for corners, classes, scores in (
        (np.zeros((2, 3)), np.zeros(2), None),
        (np.zeros((2, 4)), np.zeros(3), None),
        (np.zeros((2, 4)), np.zeros(2), np.zeros(1)),
        (np.full((1, 4), np.nan), np.zeros(1), None),
        (np.float64(0), np.zeros(1), None),
    ):
        with pytest.raises(DataError):
            Boxes(corners, classes, scores)
    with pytest.raises(DataError, match="no scores"):
        mean_average_precision([boxes(ONE)], [boxes(ONE)])
    with pytest.raises(DataError, match="expected one for each"):
        mean_average_precision([], [boxes(ONE)])


def test_weights_count_images_as_copies_do(rng: np.random.Generator) -> None:
    def some(scored: bool) -> Boxes:
        count = int(rng.integers(0, 6))
        corners = rng.integers(0, 12, (count, 4)).astype(float)
        corners[:, 2:] += corners[:, :2] + 4
        return Boxes(corners, rng.integers(0, 3, count), np.round(rng.random(count), 6) if scored else None)

    found, true = [some(True) for _ in range(12)], [some(False) for _ in range(12)]
    weights = rng.integers(0, 3, 12)
    copies = [i for i, n in enumerate(weights) for _ in range(n)]
    whole = mean_average_precision([found[i] for i in copies], [true[i] for i in copies])
    matches = matched_boxes(found, true)
    assert matches.mean(weights) == pytest.approx(
        whole, abs=1e-3
    )  # copies have equal scores, of which one is before the other
    assert matches.mean() == mean_average_precision(found, true)
    same = matches.change(matches)
    assert (same.value, same.low, same.high) == (0, 0, 0)
