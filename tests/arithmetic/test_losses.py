import jax
import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from jq.arithmetic.losses import BY_NAME, decibels, kl, mse, relative_mse


@pytest.mark.parametrize("shape", [(1, 10), (2, 5, 7), (1, 6, 3, 4)])
def test_losses_equal_scipys_in_float64(shape):
    rng = np.random.default_rng(0)
    z, y = rng.standard_normal((2, 3, *shape)).astype(np.float32)  # of three samples
    wide, axis = (z.astype(np.float64), y.astype(np.float64)), 2 if len(shape) == 4 else -1
    p, q = (softmax(v, axis) for v in wide)
    rows = [v.reshape(3, -1) for v in wide]
    error, size = (np.square(v).mean(1) for v in (rows[0] - rows[1], rows[0]))
    angle = (rows[0] * rows[1]).sum(1) / np.sqrt((rows[0] ** 2).sum(1) * (rows[1] ** 2).sum(1))
    other = z.argmax(axis) != y.argmax(axis)
    want = {
        "kl": rel_entr(p, q).sum(axis).reshape(3, -1).mean(1),
        "mse": error,
        "cosine": 1 - angle,
        "top1": other.reshape(3, -1).mean(1),
    }
    for name, loss in BY_NAME.items():
        np.testing.assert_allclose(jax.vmap(loss)(z, y), want[name], rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(jax.vmap(relative_mse)(z, y), error / size, rtol=1e-5)


def test_a_small_divergence_is_exact():
    z = np.array([[1.0, 2.0, 3.0]])
    y = z + np.array([1e-4, 0, 0])
    want = rel_entr(softmax(z), softmax(y)).sum()
    assert kl(np.float32(z), np.float32(y)) == pytest.approx(want, rel=1e-2) and want < 1e-9


def test_weights_count_and_a_reference_of_zeros_is_no_division_by_zero():
    z, y = np.zeros((1, 2), np.float32), np.float32([[1, 2]])
    assert mse(z, y, np.float32([3, 1])) == (3 + 4) / 2
    assert np.isfinite(relative_mse(z, y)) and relative_mse(z, z) == 0


def test_decibels_are_of_powers():
    assert decibels(1.0, 0.01) == pytest.approx(20) and decibels(1.0, 0.0) == np.inf
