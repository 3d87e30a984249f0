"""Paired measures: against scipy's own, and intervals that hold as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
from scipy import stats
from scipy.special import log_softmax, rel_entr

import jq
from jq.evaluation.accuracy import Labels, Scores, classify
from jq.evaluation.estimates import bootstrap
from jq.evaluation.paired import measures, paired, summarized

RNG = np.random.default_rng(3)
ONE = RNG.standard_normal((400, 7)) * 3
TWO = ONE + RNG.standard_normal((400, 7))
LABELS = RNG.integers(0, 7, 400)


def test_measures_are_those_of_scipy() -> None:
    found = paired([ONE], [TWO], LABELS)
    p, q = (np.exp(log_softmax(v, -1)) for v in (ONE, TWO))
    assert found.kl is not None and found.sqnr is not None and found.agreement is not None and found.top1 is not None
    assert found.kl.value == pytest.approx(rel_entr(p, q).sum(-1).mean())
    assert found.sqnr.value == pytest.approx(jq.metrics.sqnr(ONE, TWO))
    assert found.agreement.value == np.mean(ONE.argmax(1) == TWO.argmax(1))
    right = [v.argmax(1) == LABELS for v in (ONE, TWO)]
    assert found.top1.value == pytest.approx(right[1].mean() - right[0].mean())
    first, second = int((right[0] > right[1]).sum()), int((right[1] > right[0]).sum())
    assert (found.only_first, found.only_second) == (first, second)
    assert found.p == pytest.approx(stats.binomtest(first, first + second).pvalue)


def test_probabilities_that_rounding_left_with_another_sum_are_probabilities_still() -> None:
    """A recognizer's softmax in steps of 1/256 adds up to 0.99: one softmax more made all models equally wrong."""
    p, q = (np.exp(log_softmax(v, -1)) for v in (ONE, TWO))
    rounded = np.floor(q * 256) / 256
    assert abs(rounded.sum(-1) - 1).max() > 1e-3
    found, floor = paired([p], [rounded]), np.maximum(rounded, 1e-12)
    wanted = rel_entr(p, floor / floor.sum(-1, keepdims=True)).sum(-1).mean()
    assert found.kl is not None and found.kl.value == pytest.approx(wanted, rel=1e-6)


def test_intervals_are_scipys_percentile_bootstrap() -> None:
    each = measures([ONE], [TWO])["kl"]
    seed = {"rng" if np.lib.NumpyVersion(scipy.__version__) >= "1.15.0" else "random_state": 1}
    want = stats.bootstrap((each,), np.mean, method="percentile", n_resamples=9999, **seed).confidence_interval
    low, high = bootstrap(each[:, None], resamples=9999)[:, 0]
    assert (low, high) == pytest.approx((want.low, want.high), rel=0.01)


def test_intervals_hold_nineteen_times_of_twenty() -> None:
    hits = 0
    for seed in range(300):
        low, high = bootstrap(np.random.default_rng(seed).exponential(size=(60, 1)), seed=seed, resamples=400)[:, 0]
        hits += low <= 1 <= high
    assert 0.89 <= hits / 300 <= 0.98  # of a skewed distribution a percentile bootstrap holds a little less


def test_equal_seeds_give_equal_intervals() -> None:
    assert paired([ONE], [TWO], LABELS, seed=4) == paired([ONE], [TWO], LABELS, seed=4)
    assert paired([ONE], [TWO], LABELS, seed=4) != paired([ONE], [TWO], LABELS, seed=5)


def test_parts_say_what_the_whole_says() -> None:
    parts = [measures([ONE[i : i + 50]], [TWO[i : i + 50]], LABELS[i : i + 50]) for i in range(0, 400, 50)]
    whole = summarized({k: np.concatenate([part[k] for part in parts]) for k in parts[0]})
    assert whole == paired([ONE], [TWO], LABELS)


def test_what_cannot_be_said_is_none() -> None:
    same = paired([ONE], [ONE], LABELS)
    assert same.sqnr is None and same.p == 1 and same.agreement is not None and same.agreement.low == 1
    images = paired([ONE.reshape(4, 10, 10, 7)], [TWO.reshape(4, 10, 10, 7)])
    assert images.kl is None and images.agreement is None and images.sqnr is not None
    assert paired([LABELS], [LABELS]).sqnr is None
    steps = paired([ONE.reshape(40, 10, 7)], [TWO.reshape(40, 10, 7)])  # ten rows of classes for each sample
    assert steps.samples == 40 and steps.kl is not None and paired([ONE], [TWO]).kl is not None
    assert steps.kl.value == pytest.approx(paired([ONE], [TWO]).kl.value)  # type: ignore[union-attr]


def test_each_model_is_held_against_the_first() -> None:
    scores = {"float": Scores(ONE), "a": Scores(TWO), "b": Scores(ONE * 2), "wider": Scores(np.hstack([TWO, TWO]))}
    found = classify(scores, Labels(LABELS), seed=1)
    assert found.paired == {k: paired([ONE], [scores[k].values], LABELS, seed=1) for k in ("a", "b")}
    assert (
        "a compared with float: agreement" in found.summary()
        and "b compared with float: agreement 100.0 [100.0" in found.summary()
    )
