import jax
import numpy as np
import pytest

from jq.arithmetic.exponents import MINMSE, descending, error_sums, least_squares, minmse_candidates, residual
from jq.arithmetic.formats import INT8, UINT8
from jq.arithmetic.numerics import FINEST, power_of_two


@pytest.mark.parametrize("size", [1, 100, 4096, 5000, 12289])
def test_sums_equal_numpys_in_float64(size):
    rng = np.random.default_rng(size)
    x, slopes = rng.laplace(0, 1, (2, size)).astype(np.float32)
    exponents = descending(np.int32(-4), 5)
    wide = np.ldexp(x.astype(np.float64), -exponents[:, None])
    lost = wide - np.clip(np.rint(wide), -128, 127)
    for given, weight in ((None, 1.0), (slopes, slopes.astype(np.float64))):
        sums = jax.jit(error_sums)(x, power_of_two(-exponents), -128, 127, slopes=given)
        np.testing.assert_allclose(sums.square, np.square(lost * weight).sum(1), rtol=1e-5)
        np.testing.assert_allclose(
            sums.total, (lost * weight).sum(1), rtol=1e-4, atol=1e-4 * np.abs(lost * weight).sum()
        )


def test_the_residual_is_the_same_in_numpy_and_on_the_device():
    x = np.float32([0.5, 1.5, 2.5, -0.5, -128.5, 127.5, 1e6, -1e6, 0.25])
    assert residual(x, -128, 127).tolist() == np.asarray(residual(jax.numpy.asarray(x), -128, 127)).tolist()
    assert residual(x, -128, 127)[:4].tolist() == [0.5, -0.5, 0.5, -0.5]  # half to even


def test_ties_go_to_the_coarser():
    exponents = np.array([[3, 2, 1], [3, 2, 1]])
    assert least_squares(exponents, np.array([[1.0, 4.0, 16.0], [2.0, 4.0, 16.0]])).tolist() == [3, 2]


@pytest.mark.parametrize("grid", [INT8.narrow, UINT8], ids=repr)
def test_minmse_compares_one_coarser_and_three_finer_exponents(grid):
    candidates = minmse_candidates(-1.0, 127 / 128, grid)  # the nearest scale is 2**-7
    assert candidates.tolist() == [-6, -7, -8, -9, -10]
    assert len(MINMSE) == 5 and minmse_candidates(-3e-36, 0.0, grid).tolist()[-3:] == [FINEST] * 3  # none is finer
