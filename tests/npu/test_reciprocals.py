"""`jq.npu.reciprocals` against the chip's table, and against a search in fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jq.npu.reciprocals import mean_factor, pool_factor, reciprocal

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
