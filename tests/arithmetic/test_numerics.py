"""Power-of-two arithmetic against Python's, numpy's and onnxruntime's."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jq.arithmetic.formats import INT8, INT16, UINT8, UINT16
from jq.arithmetic.numerics import codes, exponent_of, fake_quant, inverse_power, power_of_two
from tests.conftest import one_node, onnxruntime_outputs

pytestmark = pytest.mark.filterwarnings("error")

GRIDS = [INT8, INT8.narrow, UINT8, INT16, INT16.narrow, UINT16]
VALUES = arrays(np.float32, 64, elements=st.floats(-(2.0**20), 2.0**20, width=32))


def test_power_of_two_is_exact_to_the_least_subnormal():
    exponents = np.arange(-149, 128)
    found = power_of_two(exponents)
    assert found.dtype == np.float32
    assert found.astype(np.float64).tolist() == [2.0 ** int(e) for e in exponents]


def test_inverse_power_is_exact():
    exponents = np.arange(-126, 127)
    found = np.asarray(jax.jit(inverse_power)(exponents))
    assert found.dtype == np.float32
    assert found.astype(np.float64).tolist() == [2.0 ** -int(e) for e in exponents]


def test_exponent_of_inverts_power_of_two():
    exponents = np.arange(-127, 128)
    assert exponent_of(power_of_two(exponents)).tolist() == exponents.tolist()
    assert exponent_of([0.0, 2.0**-149, 3e38]).tolist() == [-127, -127, 127]


@given(st.floats(2.0**-126, 2.0**126, width=32))
@settings(max_examples=300, deadline=None)
def test_exponent_is_the_nearest_on_a_logarithmic_axis(scale):
    """Nearest, not below nor above: the boundary is the square root of two between them."""
    found = int(exponent_of(scale))
    exact = math.log2(scale)
    assert abs(found - exact) <= 0.5 + 1e-5
    # Quark's scale2pos
    clamped = np.clip(np.float32(scale), np.float32(2.0**-127), np.float32(2.0**127))
    assert -found == int(np.rint(-np.log2(clamped)))


@pytest.mark.parametrize("grid", [INT8, UINT8, INT16, UINT16], ids=repr)
@given(x=VALUES, exponent=st.integers(-12, 12), data=st.data())
@settings(max_examples=40, deadline=None)
def test_codes_and_fake_quant_equal_onnxruntime(grid, x, exponent, data):
    scale = np.float32(2.0**exponent)
    ties = (np.arange(-32, 32) + np.float32(0.5)) * scale
    bounds = np.array([grid.qmin, grid.qmax, grid.qmin - 0.5, grid.qmax + 0.5]) * scale
    x = np.concatenate([x, ties, bounds]).astype(np.float32)
    zero_point = np.array(data.draw(st.integers(grid.qmin, grid.qmax)), grid.dtype)
    model = one_node("QuantizeLinear", {"x": x}, initializers={"s": scale, "z": zero_point})
    (expected,) = onnxruntime_outputs(model, {"x": x})
    np.testing.assert_array_equal(codes(x, scale, np.int32(zero_point), grid), expected)
    back = (expected.astype(np.float64) - float(zero_point)) * float(scale)
    np.testing.assert_array_equal(fake_quant(x, scale, np.int32(zero_point), grid), back)


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
@given(x=VALUES, scale=st.floats(2.0**-10, 2.0**10, width=32))
@settings(max_examples=40, deadline=None)
def test_fake_quant_is_monotone_idempotent_and_saturates(grid, x, scale):
    scale, zero = np.float32(scale), np.int32(grid.middle)
    once = np.asarray(fake_quant(np.sort(x), scale, zero, grid))
    assert (np.diff(once) >= 0).all()
    np.testing.assert_array_equal(fake_quant(once, scale, zero, grid), once)
    low, high = (np.float32(q - grid.middle) * scale for q in (grid.qmin, grid.qmax))
    assert once.min() >= low and once.max() <= high
    assert fake_quant(np.float32(1e30), scale, zero, grid) == high
    assert fake_quant(np.float32(-1e30), scale, zero, grid) == low
    inside = (np.sort(x) >= low) & (np.sort(x) <= high)
    assert (np.abs(once - np.sort(x))[inside] <= 0.5001 * scale).all()
    assert fake_quant(np.float32(0), scale, zero, grid) == 0


def test_codes_per_channel_equal_each_channel(rng):
    x, scale = rng.standard_normal((4, 3), np.float32), np.float32([0.5, 0.01, 0.125])
    zero = np.int32([0, 3, -9])
    whole = np.asarray(codes(x, scale, zero, INT8))
    for i in range(3):
        np.testing.assert_array_equal(whole[:, i], codes(x[:, i], scale[i], zero[i], INT8))


@pytest.mark.parametrize("grid", [INT8, INT16, UINT8, UINT16], ids=repr)
def test_narrow_grids_are_symmetric(grid):
    narrow = grid.narrow
    assert narrow.qmax == grid.qmax and narrow.dtype == grid.dtype
    assert narrow.qmin == (-grid.qmax if grid.signed else 0)
    assert narrow.middle == (0 if grid.signed else (grid.qmax + 1) // 2) == grid.middle
    assert (np.iinfo(grid.dtype).min, np.iinfo(grid.dtype).max) == (grid.qmin, grid.qmax)
