"""Metrics against other computations of the same: plain numpy, whole numbers, scikit-image's figures."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jq.errors import ConfigError, DataError
from jq.evaluation import metrics
from jq.evaluation.metrics import cosine, hits, l2, psnr, sign_test, sqnr, ssim, topk

VALUES = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda v: 0.0 if abs(v) < 1e-6 else v)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    shape = draw(hnp.array_shapes(max_dims=3, max_side=6))
    return tuple(draw(hnp.arrays(np.float64, shape, elements=VALUES)) for _ in range(2))


@given(pairs())
def test_distances_are_those_of_their_equations(pair: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = (a.reshape(-1).tolist() for a in pair)
    distance = math.dist(x, y)
    assert l2(*pair) == pytest.approx(distance, rel=1e-12)
    norms = math.hypot(*x) * math.hypot(*y)
    if norms:
        assert cosine(*pair) == pytest.approx(math.fsum(a * b for a, b in zip(x, y, strict=True)) / norms, abs=1e-12)
    if distance and math.hypot(*x):
        assert sqnr(*pair) == pytest.approx(20 * math.log10(math.hypot(*x) / distance), abs=1e-9)
    if distance and max(x) > 0:
        error = distance**2 / len(x)
        assert psnr(*pair) == pytest.approx(10 * math.log10(max(x) ** 2 / error), abs=1e-9)


@given(pairs(), st.sampled_from([2.0**-400, 0.125, 3.0, 2.0**400]))
def test_scale_invariance_and_symmetry(pair: tuple[np.ndarray, np.ndarray], factor: float) -> None:
    x, y = pair
    assert cosine(x, y) == cosine(y, x) and l2(x, y) == l2(y, x)
    assert cosine(x * factor, y) == pytest.approx(cosine(x, y), abs=1e-12)
    assert l2(x * factor, y * factor) == pytest.approx(l2(x, y) * factor, rel=1e-12)
    assert sqnr(x * factor, y * factor) == pytest.approx(sqnr(x, y), abs=1e-9)
    assert -1 <= cosine(x, y) <= 1


@given(pairs())
def test_equal_arrays(pair: tuple[np.ndarray, np.ndarray]) -> None:
    x = pair[0]
    assert (cosine(x, x.copy()), l2(x, x.copy())) == (1.0, 0.0)
    assert psnr(x, x.copy()) == sqnr(x, x.copy()) == math.inf


def test_large_arrays_in_blocks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rng.normal(size=(2, 37, 29)).astype(np.float32)
    whole = [f(x, y) for f in (cosine, l2, psnr, sqnr)]
    monkeypatch.setattr(metrics, "_BLOCK", 7)
    np.testing.assert_allclose([f(x, y) for f in (cosine, l2, psnr, sqnr)], whole, rtol=1e-12)


def test_integers_do_not_wrap_and_small_floats_do_not_overflow() -> None:
    assert l2(np.uint8([0]), np.uint8([255])) == 255
    assert l2(np.float16([60000]), np.float16([-60000])) == np.float64(np.float16(60000)) * 2
    assert l2(np.array([1], ml_dtypes.bfloat16), np.array([3], ml_dtypes.bfloat16)) == 2


def test_nan_and_inf_are_not_hidden() -> None:
    for bad in (np.nan, np.inf):
        x, y = np.array([1.0, bad]), np.array([1.0, 2.0])
        assert all(not math.isfinite(f(*p)) for f in (cosine, l2, psnr, sqnr) for p in ((x, y), (y, x)))


@pytest.mark.parametrize("measure", [cosine, l2, psnr, sqnr, ssim])
def test_what_cannot_be_compared(measure) -> None:
    for x, y, match in (
        (np.zeros(3), np.zeros((3, 1)), "shapes"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "no elements"),
        (np.zeros(3, complex), np.zeros(3, complex), "complex128"),
        (np.array(["1"]), np.array(["1"]), "cannot be measured"),
    ):
        with pytest.raises(DataError, match=match):
            measure(x, y)


# ---------------------------------------------------------------------------------------------
# SSIM
# ---------------------------------------------------------------------------------------------


def test_ssim_is_scikit_images() -> None:
    # skimage 0.26: structural_similarity(..., gaussian_weights=True, sigma=1.5, use_sample_covariance=False)
    x = np.random.default_rng(0).integers(0, 256, (16, 20)).astype(np.uint8)
    assert ssim(x, x // 32 * 32) == pytest.approx(0.9852482640063628, abs=1e-12)


def test_ssim_of_one_window_by_hand(rng: np.random.Generator) -> None:
    x, y = rng.uniform(0, 4, (2, 11, 11))
    line = [math.exp(-((i - 5) ** 2) / (2 * 1.5**2)) for i in range(11)]
    weights = np.outer(line, line) / sum(line) ** 2
    mx, my = (weights * x).sum(), (weights * y).sum()
    vx, vy = (weights * (x - mx) ** 2).sum(), (weights * (y - my) ** 2).sum()
    c1, c2 = 0.04**2, 0.12**2
    covariance = (weights * (x - mx) * (y - my)).sum()
    expected = (2 * mx * my + c1) * (2 * covariance + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    assert ssim(x, y, data_range=4) == pytest.approx(expected, abs=1e-12)


def test_ssim_of_channels_is_their_mean(rng: np.random.Generator) -> None:
    x, y = rng.integers(0, 256, (2, 20, 15, 3)).astype(np.uint8)
    each = np.mean([ssim(x[..., c], y[..., c]) for c in range(3)])
    assert ssim(x, y, axes=(0, 1)) == pytest.approx(each, abs=1e-14)
    assert ssim(x.transpose(2, 0, 1), y.transpose(2, 0, 1)) == ssim(x, y, axes=(0, 1))


def test_ssim_far_from_zero(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(2, 16, 16))
    # So far off, the luminance is equal, and what is left are contrast and structure.
    near, far = ssim(x + 1e3, y + 1e3), ssim(x + 1e9, y + 1e9)
    assert far == pytest.approx(near, abs=1e-5) and ssim(x, x) == 1


def test_ssim_of_constants_and_of_small_images() -> None:
    assert ssim(np.full((12, 12), 3.0), np.full((12, 12), 3.0)) == 1
    with pytest.raises(DataError, match="smaller than the window"):
        ssim(np.zeros((10, 30)), np.zeros((10, 30)))


# ---------------------------------------------------------------------------------------------
# Classes
# ---------------------------------------------------------------------------------------------


@given(
    hnp.arrays(np.float64, (5, 4), elements=st.sampled_from([0.0, 1.0, 2.0, 3.0])),
    hnp.arrays(np.int64, 5, elements=st.integers(0, 3)),
)
def test_topk_is_a_stable_sort(scores: np.ndarray, labels: np.ndarray) -> None:
    for k in range(1, 6):
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        assert topk(scores, labels, k) == np.mean([label in row for label, row in zip(labels, best, strict=True)])
    assert topk(scores, labels) == np.mean(scores.argmax(1) == labels)


def test_nan_scores_are_wrong() -> None:
    assert hits([[np.nan, 1.0], [1.0, np.nan]], [0, 0], 2).tolist() == [False, False]


@pytest.mark.parametrize("labels", [[0, 2], [-1, 0], [0], [0.0, 1.0]])
def test_labels_that_are_no_classes(labels: list) -> None:
    with pytest.raises(DataError):
        topk(np.zeros((2, 2)), labels)


def test_odd_ks_and_no_samples() -> None:
    with pytest.raises(ConfigError):
        topk(np.zeros((2, 2)), [0, 0], 0)
    with pytest.raises(DataError):
        topk(np.zeros((0, 2)), np.zeros(0, int))


@given(st.integers(0, 40), st.integers(0, 40))
def test_sign_test_is_the_sum_of_both_tails(first: int, second: int) -> None:
    total, rarer = first + second, min(first, second)
    tails = [math.comb(total, i) for i in range(total + 1) if min(i, total - i) <= rarer]
    assert sign_test(first, second) == float(Fraction(sum(tails), 2**total))


def test_sign_test_of_many() -> None:
    exact = 2 * Fraction(sum(math.comb(1500, i) for i in range(701)), 2**1500)
    assert sign_test(700, 800) == sign_test(800, 700) == pytest.approx(float(exact), rel=1e-9)
    assert sign_test(500_000, 500_000) == 1.0
    with pytest.raises(ConfigError):
        sign_test(-1, 3)
