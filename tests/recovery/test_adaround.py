"""Learned rounding: the functions of AdaRound by their equations, and both methods against all roundings there are."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jq
from jq.arithmetic.formats import BFLOAT16, INT8
from jq.plan import QParams
from jq.recovery import adaround
from jq.recovery.adaquant import AdaQuant
from jq.recovery.adaround import AdaRound
from jq.recovery.descent import CoordinateDescent
from jq.recovery.quadratic_form import Form
from jq.recovery.rounding import Then, compiled, nearest

GRID = INT8.narrow
ONE = QParams(np.float32(0.25), np.int32(0), GRID)


@st.composite
def weights(draw):
    """Weights inside the grid of some scale, and the scale."""
    scale = np.float32(2.0 ** draw(st.integers(-20, 10)) * draw(st.sampled_from([1.0, 1.3, 1.9])))
    codes = draw(st.lists(st.floats(-126, 126, width=32), min_size=6, max_size=6))
    return (np.float32(codes) * scale).reshape(1, 6, 1), scale


@settings(max_examples=40, deadline=None)
@given(weights())
def test_learning_starts_at_the_weights(found):
    w, scale = found
    v = adaround.initial(w, scale)
    assert np.isfinite(v).all()
    np.testing.assert_allclose(adaround.soft(w, v, scale, GRID), w, rtol=1e-5, atol=float(scale) * 2e-5)


@settings(max_examples=40, deadline=None)
@given(weights(), st.lists(st.floats(-20, 20, width=32), min_size=6, max_size=6))
def test_hard_codes_are_the_floor_or_one_more(found, logits):
    w, scale = found
    v = np.float32(logits).reshape(w.shape)
    codes = np.rint(np.asarray(adaround.hard(w, v, scale, GRID), np.float64) / scale)
    off = codes - w.astype(np.float64) / scale
    assert np.all(np.abs(off) <= 1 + 1e-4) and np.all(np.where(v >= 0, off, -off) >= -1e-4)


def test_learning_starts_at_nearest_rounding():
    w = (np.random.default_rng(0).uniform(-100, 100, (1, 50, 4)) * 0.25).astype(np.float32)
    np.testing.assert_array_equal(adaround.hard(w, adaround.initial(w, 0.25), 0.25, GRID), ONE.fake_quant(w))


@pytest.mark.parametrize("w", [-31.9, 31.9, 40.0, -40.0])
def test_codes_stay_in_the_grid(w):
    for v in (-9.0, 0.0, 9.0):
        for of in (adaround.soft, adaround.hard):
            assert abs(float(of(jnp.float32(w), jnp.float32(v), 0.25, GRID))) <= 127 * 0.25


@pytest.mark.parametrize("beta", [20.0, 5.0, 2.0])
def test_the_regularizer_is_zero_where_all_is_up_or_down(beta):
    far = np.float32([-30.0, -5.0, 5.0, 30.0])
    assert set(np.asarray(adaround.rectified(far))) == {0.0, 1.0}
    assert float(adaround.regularizer(far, beta)) == 0
    assert float(adaround.regularizer(np.zeros(3, np.float32), beta)) == pytest.approx(3)
    for v in (-2.0, -0.3, 0.5, 2.0):
        assert float(adaround.regularizer(np.append(far, np.float32(v)), beta)) > 0


def test_the_exponent_falls_from_start_to_end():
    t = np.linspace(-0.5, 1, 31).astype(np.float32)
    found = np.asarray(adaround.annealed(t, 20.0, 2.0))
    assert found[0] == found[10] == 20 and found[-1] == pytest.approx(2) and np.all(np.diff(found) <= 0)


def random_form(seed: int, rows: int, outputs: int, groups: int = 1, *, off: float = 0.0) -> Form:
    """Of inputs that hang together, and outputs that are off by something."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((groups, 400, rows)) @ (np.eye(rows) + 0.2 * rng.standard_normal((groups, rows, rows))) + 1
    x += rng.standard_normal((groups, 400, 1))
    e = off * (x @ rng.standard_normal((groups, rows, outputs)) + rng.standard_normal((groups, 400, outputs)))
    xm, em = x - x.mean(1, keepdims=True), e - e.mean(1, keepdims=True)
    arrays = (
        np.einsum("gpk,gpl->gkl", xm, xm) / 400, np.einsum("gpk,gpo->gko", xm, em) / 400, np.sum(em**2) / 400,
        x.mean(1, keepdims=True), e.mean(1, keepdims=True),
    )  # fmt: skip
    return Form(*(jnp.asarray(a, jnp.float32) for a in arrays))


@functools.partial(jax.jit, static_argnums=0)
def rounded(method, columns, found, form):
    result = method(columns, found, form)
    return result, form(result - columns), form(nearest(columns, found, form) - columns)


CASES = {
    "one": (ONE, (1, 24, 6)),
    "by_channel": (QParams(np.float32([0.2, 0.3, 0.25, 0.1, 0.4, 0.15]), np.zeros(6, np.int32), GRID, 0), (1, 24, 6)),
    "groups": (ONE, (6, 9, 1)),
    "depthwises_by_channel": (QParams(np.float32([0.2, 0.3]), np.zeros(2, np.int32), GRID, 0), (2, 9, 1)),
    "groups_by_channel": (QParams(np.float32([0.2, 0.3, 0.25, 0.1]), np.zeros(4, np.int32), GRID, 0), (2, 9, 2)),
}


BOTH = Then(AdaRound(), CoordinateDescent())
METHODS = {"adaround": AdaRound(), "adaquant": AdaQuant(), "descent": CoordinateDescent(), "both": BOTH}


@pytest.mark.parametrize(
    ("method", "case"),
    [(m, c) for m in METHODS for c in CASES],
)
def test_error_is_well_below_that_of_nearest_rounding(method, case):
    method, (found, shape) = METHODS[method], CASES[case]
    form = random_form(2, shape[1], shape[2], shape[0], off=0.1)
    columns = np.random.default_rng(3).uniform(-3, 3, shape).astype(np.float32)
    result, error, plain = rounded(method, columns, found, form)
    assert result.shape == shape and error < (0.8 if method == AdaRound() else 0.6) * plain
    scale = np.broadcast_to(np.asarray(found.scale).reshape((shape[0], 1, shape[2]) if found.axis == 0 else ()), shape)
    codes = np.asarray(result, np.float64) / scale
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
    if not isinstance(method, AdaQuant):
        ups = np.rint(codes) - np.floor(columns / scale)
        assert set(np.unique(ups)) == {0, 1}


@functools.cache
def brute(seed: int) -> tuple[np.ndarray, Form, float]:
    """A column of eight weights, and the least error of all 256 roundings up or down."""
    form = random_form(seed, 8, 1, off=0.02)
    w = np.random.default_rng(seed + 100).uniform(-3, 3, (1, 8, 1)).astype(np.float32)
    a, r, c = (np.asarray(v, np.float64) for v in (form.a, form.r, form.c))
    ways = np.array(list(itertools.product((0, 1), repeat=8)))
    d = (np.floor(w[0, :, 0] / 0.25) + ways) * 0.25 - w[0, :, 0]
    return w, form, float(np.min(np.einsum("nk,kl,nl->n", d, a[0], d) - 2 * d @ r[0, :, 0] + c))


def test_the_best_of_all_roundings_is_found_or_nearly():
    """No worse than nearest rounding, as layers are tuned; half of what there is to win, and often all of it."""
    won, left = 0, []
    for seed in range(12):
        w, form, least = brute(seed)
        _, error, plain = rounded(BOTH, w, ONE, form)
        assert float(error) >= least * (1 - 1e-3) - 1e-6
        taken = min(float(error), float(plain))
        won += taken <= least * 1.01
        left.append(taken / least)
    assert won >= 4 and np.mean(left) < 1.5, left


def test_descent_ends_where_no_single_rounding_is_worth_turning():
    """Each of the eight weights turned over costs something, counted in float64 from the form itself."""
    for seed in range(12):
        w, form, least = brute(seed)
        a, r, c = (np.asarray(v, np.float64) for v in (form.a, form.r, form.c))
        for method in (CoordinateDescent(), BOTH):
            result, error, plain = rounded(method, w, ONE, form)
            d = (np.asarray(result, np.float64) - w)[0, :, 0]
            turned = np.where(d > 0, d - 0.25, d + 0.25)
            ways = np.where(np.eye(8, dtype=bool), turned, d)
            errors = np.einsum("nk,kl,nl->n", ways, a[0], ways) - 2 * ways @ r[0, :, 0] + c
            assert errors.min() >= float(error) - 1e-4 * plain and least * (1 - 1e-3) - 1e-6 <= error
            assert method is BOTH or error <= plain * (1 + 1e-6)


def test_descent_after_adaround_is_no_worse_and_mostly_better():
    errors = []
    for seed in range(12):
        w, form, _ = brute(seed)
        errors.append([float(rounded(m, w, ONE, form)[1]) for m in (AdaRound(), BOTH)])
    alone, both = np.transpose(errors)
    assert (both <= alone * (1 + 1e-4)).all() and both.sum() < alone.sum()


def test_a_function_may_come_first():
    w, form, _ = brute(0)
    _, error, plain = jax.jit(lambda method, w: (0, form(method(w, ONE, form) - w), form(nearest(w, ONE) - w)))(
        compiled(Then(lambda columns, qparams, form: nearest(columns, qparams), CoordinateDescent())), w
    )
    assert error == rounded(CoordinateDescent(), w, ONE, form)[1] <= plain


def test_learned_rounding_needs_integer_codes():
    w, form, _ = brute(0)
    for method in (AdaRound(), CoordinateDescent()):
        with pytest.raises(jq.ConfigError, match="needs integer codes; got bfloat16"):
            method(w, QParams(np.float32(1), np.int32(0), BFLOAT16), form)


def test_adaquant_is_never_worse_than_nearest_and_mostly_the_best():
    won = 0
    for seed in range(12):
        w, form, least = brute(seed)
        for method in (AdaQuant(steps=3, learning_rate=5.0), AdaQuant()):
            _, error, plain = rounded(method, w, ONE, form)
            assert error <= plain
        won += float(error) <= least * 1.01
    assert won >= 9


def test_adaquant_may_go_to_codes_that_are_not_beside():
    """What the inputs are off asks for weights that are further away."""
    form = random_form(4, 8, 1, off=1.0)
    w = np.full((1, 8, 1), 0.1, np.float32)
    result, error, plain = rounded(AdaQuant(steps=150, learning_rate=0.05), w, ONE, form)
    assert not set(np.rint(np.asarray(result).ravel() * 4)) <= {0, 1} and error < 0.5 * plain


def test_weights_beyond_the_grid_stay_cut():
    w = np.float32([40.0, -40.0, 0.1, 0.2, 31.7, -31.7, 5.0, 1.0]).reshape(1, 8, 1)
    for method in METHODS.values():
        result = np.asarray(rounded(method, w, ONE, brute(0)[1])[0])
        assert np.isfinite(result).all() and np.abs(result).max() <= 127 * 0.25


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_inputs_that_are_all_zero_leave_nearest_rounding_or_as_good(method):
    form = Form(*(jnp.zeros(s) for s in ((1, 8, 8), (1, 8, 1), (), (1, 1, 8), (1, 1, 1))))
    result, error, plain = rounded(method, brute(0)[0], ONE, form)
    assert np.isfinite(np.asarray(result)).all() and error == plain == 0
