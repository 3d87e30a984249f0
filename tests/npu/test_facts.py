"""`jq.npu.facts` against the chip's table, a search in fractions, and the chip's formula in Python's integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jq
from jq.npu.facts import HARD_SIGMOID, is_hard_sigmoid, mean_factor, pool_factor, reciprocal
from tests.passes.models import build, node

# The chip's constants, by side of the square: multiplier and shift.
SQUARES = {
    **{k: (1, 2 * (k - 1).bit_length()) for k in (1, 2, 4, 8, 16, 32)},
    3: (7, 6),
    5: (10, 8),
    6: (7, 8),
    7: (21, 10),
    9: (101, 13),
    10: (41, 12),
    11: (17, 11),
    12: (57, 13),
    13: (97, 14),
    14: (21, 12),
    15: (73, 14),
    28: (21, 14),
    56: (21, 16),
}


@pytest.mark.parametrize("side", SQUARES)
def test_squares(side: int) -> None:
    multiplier, shift = SQUARES[side]
    assert pool_factor(side, side) == multiplier * side * side / 2**shift


def test_published_factors() -> None:
    assert pool_factor(3, 3) == 63 / 64 == 0.984375
    assert pool_factor(5, 5) == 250 / 256
    assert pool_factor(6, 6) == 252 / 256
    assert pool_factor(7, 7) == 1029 / 1024
    assert pool_factor(14, 14) == 4116 / 4096
    assert pool_factor(2, 3) == pool_factor(3, 2) == 85 * 6 / 2**9
    assert pool_factor(256, 256) == pool_factor(300, 300) == 1.0
    assert pool_factor(1, 300) != 1.0  # the chip's own search knows no largest rectangle
    assert mean_factor(49) == pool_factor(7, 7)
    assert mean_factor(9) != pool_factor(3, 3)  # no table for ReduceMean


@given(st.integers(1, 1 << 20))
def test_nearest(count: int) -> None:
    """No multiplier and shift come nearer; among the shifts that come as near, it is the first."""
    true = Fraction(1, count)
    shifts = range(math.ceil(math.log2(128 * count)))
    multiplier, shift = reciprocal(count)
    errors = [abs(Fraction(round(Fraction(2**s, count)), 2**s) - true) for s in shifts]
    assert shift == errors.index(min(errors))
    assert abs(Fraction(multiplier, 2**shift) - true) == min(errors)


@given(st.integers(1, 4096))
def test_seven_bits(count: int) -> None:
    assert 1 <= reciprocal(count)[0] <= 127
    assert abs(mean_factor(count) - 1) < 1 / 128


@given(st.integers(1, 4096), st.integers(0, 10))
def test_powers_of_two_only_shift(count: int, power: int) -> None:
    assert mean_factor(2**power) == 1.0
    assert reciprocal(count)[0] == 1 or reciprocal(count)[0] % 2 == 1  # an even one would have a smaller shift


@pytest.mark.parametrize("alpha", [1 / 6, 0.166667, 0.1667, 0.16663])
def test_a_hard_sigmoid_of_few_digits_is_the_chips_in_every_reading(alpha: float) -> None:
    """Quantized, multiplied by the chip's factor, and computed in integers."""
    model = build([node("HardSigmoid", ["x"], ["y"], alpha=alpha, beta=0.5)], x=(1, 256))
    x = np.linspace(-4, 3.9, 256, dtype=np.float32)[None]
    result = jq.quantize(model, {"x": x}, "XINT8")
    assert {"x", "y"} <= set(result.plan)
    assert [n.op_type for n in result.model.graph.node if n.op_type in ("HardSigmoid", "Mul")] == ["HardSigmoid", "Mul"]
    chip = jq.integer.load(result.model, "aie2_x1")
    position, out = (-int(result.plan[name].exponent) for name in ("x", "y"))
    wanted = []
    for value in x[0].tolist():
        code = min(127, max(-128, math.floor(value * 2**position + 0.5)))
        gate = Fraction(max(0, 2731 * code + 3 * 2731 * 2**position), 2 ** (14 + position))
        wanted.append(min(127, math.floor(gate * 2**out + Fraction(1, 2))) / 2**out)
    np.testing.assert_array_equal(chip({"x": x})["y"][0], wanted)
    np.testing.assert_allclose(
        jq.fake_quant(result.graph)(result.graph.params, result.plan, {"x": x})["y"][0], wanted, atol=2**-out
    )


@pytest.mark.parametrize("attrs", [{}, {"alpha": 0.1669}, {"alpha": 0.1664}, {"alpha": 1 / 6, "beta": 0.501}])
def test_other_hard_sigmoids_are_not_the_chips(attrs: dict[str, float]) -> None:
    assert not is_hard_sigmoid(attrs) and is_hard_sigmoid(HARD_SIGMOID)
