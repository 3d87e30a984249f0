"""Roundings, wide products and requantizers against Python's own numbers."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jq.arithmetic.formats import INT8, UINT8
from jq.arithmetic.numerics import WIDEST, round_divide, round_product, round_shift
from jq.ops.integer.fixed import Grid
from jq.ops.integer.products import cascade, word_shift
from jq.ops.integer.rounding import by_significand, quantize_real, significand
from jq.readings.integer import Target
from tests.integer.oracle import power, rounded

MODES = ("half_up", "half_even", "half_away", "floor")
INT32 = (-(1 << 31), (1 << 31) - 1)
TINY = 2.0**-100  # XLA's CPU backend flushes what is smaller yet to zero
MANY = settings(max_examples=40, deadline=None, derandomize=True, phases=(Phase.generate,))

WIDE = (
    st.integers(-WIDEST + 1, WIDEST - 1) | st.sampled_from([-WIDEST + 1, -1, 0, 1, WIDEST - 1]) | st.integers(-99, 99)
)
CASES = [pytest.param(mode, span, id=f"{mode}-{span[0]}") for mode in MODES for span in [(0, 24), (25, 60)]]

MULTIPLIERS = st.integers(0, (1 << 24) - 1) | st.sampled_from([0, 1, 1 << 12, (1 << 12) - 1, 1 << 23, (1 << 24) - 1])


def int32(values: list[int], size: int = 64) -> jnp.ndarray:
    """Of one size, so that nothing is compiled again."""
    assert len(values) <= size
    return jnp.asarray(np.pad(np.array(values, np.int32), (0, size - len(values))))


def spread(v: list[int], columns: int) -> np.ndarray:
    """Integers as rows of so many channels."""
    return np.array(v[: len(v) // columns * columns], np.int32).reshape(-1, columns)


def around_ties(multiplier: int, shift: int) -> list[int]:
    """Integers whose product is, as nearly as there are any, a whole number and a half."""
    if not multiplier:
        return []
    halves = [Fraction(2 * k + 1, 2) * power(shift) / multiplier for k in (-65, -3, -2, -1, 0, 1, 2, 64)]
    return [n for h in halves for n in (int(h) - 1, int(h), int(h) + 1) if abs(n) < WIDEST]


@pytest.mark.parametrize("mode", MODES)
@given(v=st.lists(WIDE, min_size=1, max_size=20), shift=st.integers(-40, 60))
@MANY
def test_a_shift_rounds_as_a_fraction_does(mode, v, shift):
    """To the left it saturates where int32 would wrap."""
    v += [n for n in around_ties(1, min(shift, 31)) if shift > 0]
    found = np.asarray(round_shift(int32(v), shift, mode)).tolist()
    for number, got in zip(v, found, strict=False):
        exact = rounded(number * power(-shift), mode)
        if abs(exact) <= WIDEST // 2:
            assert got == exact, (number, shift)
        else:
            assert (got > 0) == (exact > 0) and abs(got) >= WIDEST // 2, (number, shift)


@pytest.mark.parametrize("mode", MODES)
@given(v=st.lists(WIDE, min_size=30, max_size=30), shifts=st.lists(st.integers(0, 40), min_size=3, max_size=3))
@MANY
def test_a_shift_per_channel_is_each_of_them(mode, v, shifts):
    v = spread(v, 3)
    found = np.asarray(round_shift(jnp.asarray(v), np.array(shifts), mode))
    expected = [[rounded(int(n) * power(-s), mode) for n, s in zip(row, shifts, strict=True)] for row in v]
    assert found.tolist() == expected


@pytest.mark.parametrize("mode", MODES)
@given(
    v=st.lists(WIDE, min_size=1, max_size=20),
    divisor=st.integers(1, WIDEST) | st.integers(1, 200) | st.sampled_from([WIDEST, WIDEST - 1]),
)
@MANY
def test_a_quotient_rounds_as_a_fraction_does(mode, v, divisor):
    v += [n for k in (-7, -1, 0, 1, 6) for n in ((2 * k + 1) * divisor // 2 + e for e in (-1, 0, 1)) if abs(n) < WIDEST]
    found = np.asarray(round_divide(int32(v), divisor, mode)).tolist()[: len(v)]
    assert found == [rounded(Fraction(n, divisor), mode) for n in v]


def product(v: int, multiplier: int, shift: int, mode: str, zero: int) -> int:
    """The zero point takes part in what is even."""
    exact = v * multiplier * power(-shift)
    return rounded(exact + zero, mode) if mode == "half_even" else rounded(exact, mode) + zero


def assert_product(found: int, expected: int, zero: int) -> None:
    if abs(expected - zero) < WIDEST // 2:
        assert found == expected
    else:  # beyond what saturates anyway
        assert (found > 0) == (expected > 0) and abs(found) > 1 << 20


@pytest.mark.parametrize(("mode", "span"), CASES)
@given(data=st.data(), v=st.lists(WIDE, min_size=1, max_size=20), multiplier=MULTIPLIERS, zero=st.integers(-128, 255))
@MANY
def test_a_product_is_rounded_once(mode, span, data, v, multiplier, zero):
    shift = data.draw(st.integers(*span))
    v = v + around_ties(multiplier, shift)
    found = np.asarray(round_product(int32(v), multiplier, shift, mode, zero)).tolist()
    for number, got in zip(v, found, strict=False):
        assert_product(got, product(number, multiplier, shift, mode, zero), zero)


@pytest.mark.parametrize(("mode", "span"), CASES)
@given(data=st.data(), v=st.lists(WIDE, min_size=3, max_size=9), zero=st.integers(-128, 255))
@MANY
def test_a_product_per_channel_is_each_of_them(mode, span, data, v, zero):
    factors = data.draw(st.lists(st.tuples(MULTIPLIERS, st.integers(*span)), min_size=3, max_size=3))
    v = np.asarray(int32([*v, *(n for factor in factors for n in around_ties(*factor))], 96))[:, None].repeat(3, 1)
    multipliers, shifts = (np.array(part) for part in zip(*factors, strict=True))
    found = np.asarray(round_product(jnp.asarray(v), multipliers, shifts, mode, zero))
    for row, got in zip(v, found.tolist(), strict=True):
        for n, g, (multiplier, shift) in zip(row, got, factors, strict=True):
            assert_product(g, product(int(n), multiplier, shift, mode, zero), zero)


@pytest.mark.parametrize("mode", MODES)
@given(v=st.lists(WIDE, min_size=9, max_size=9), factors=st.tuples(MULTIPLIERS, MULTIPLIERS), zero=st.integers(-9, 9))
@MANY
def test_channels_on_both_sides_of_a_limb_do_not_mix(mode, v, factors, zero):
    """Where the last bit lies decides which half of the product is rounded."""
    shifts = np.array([24, 58])  # beyond the second, nothing but a sign is left of the product
    found = np.asarray(round_product(jnp.asarray(np.array([v, v], np.int32).T), np.array(factors), shifts, mode, zero))
    for n, got in zip(v, found.tolist(), strict=True):
        for g, multiplier, shift in zip(got, factors, shifts.tolist(), strict=True):
            assert_product(g, product(n, multiplier, shift, mode, zero), zero)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "floor"])
@pytest.mark.parametrize("shift", [24, 25, 26, 29, 32])
def test_a_product_just_below_a_half_is_no_tie(mode, shift):
    """Its last bits lie below those that the rounding looks at first."""
    multiplier = 13 << 20
    v = np.arange(-3000, 3000)
    found = np.asarray(round_product(jnp.asarray(v, jnp.int32), multiplier, shift, mode)).tolist()
    assert found == [rounded(int(n) * multiplier * power(-shift), mode) for n in v]


@pytest.mark.parametrize("ends", [(2.0**-30, 0.49), (0.5, 32)], ids=["small", "large"])
@given(data=st.data(), v=st.lists(WIDE, min_size=1, max_size=20), zero=st.integers(-128, 255))
@MANY
def test_a_significand_requantizes_the_exact_product(ends, data, v, zero):
    """W1: half to even with the zero point added before."""
    factor = data.draw(st.floats(float(np.float32(ends[0])), float(np.float32(ends[1])), width=32))
    exact, (multiplier, shift) = Fraction(factor), significand(np.float32(factor))
    assert int(multiplier) * power(-int(shift)) == exact
    v = v + around_ties(int(multiplier), int(shift))
    found = np.asarray(by_significand(int32(v), np.float32(factor), zero)).tolist()
    for number, got in zip(v, found, strict=False):
        assert_product(got, rounded(number * exact + zero, "half_even"), zero)


@given(depth=st.integers(1, 1 << 24))
@MANY
def test_words_are_shifted_by_what_their_sum_has_too_much(depth):
    """W2: 24 bits of a product and as many as count the products, but not more than 7 beyond 32."""
    bits = 0
    while 2**bits < depth:
        bits += 1
    assert word_shift(depth) == min(max(24 + bits - 32, 0), 7)


@given(
    parts=st.lists(st.integers(-(1 << 22), 1 << 22), min_size=2, max_size=8).filter(lambda p: len(p) % 2 == 0),
    bias=st.integers(-(1 << 20), 1 << 20),
    shift=st.integers(0, 12),
)
@MANY
def test_partial_sums_are_held_in_sixteen_bits(parts, bias, shift):
    """C2: each half on its own, rounded after each chunk but the last."""
    half = len(parts) // 2
    first, second = parts[:half], parts[half:]

    def held(chunks: list[int], start: int) -> int:
        total = start
        for index, chunk in enumerate(chunks):
            total += chunk
            if index < half - 1:
                total = min(max(rounded(total * power(-shift), "half_even"), -(2**15)), 2**15 - 1) * 2**shift
        return total

    found = cascade([jnp.int32(p) for p in first], [jnp.int32(p) for p in second], jnp.int32(bias), shift)
    assert int(found) == held(first, bias) + held(second, 0)


@pytest.mark.parametrize("grid", [INT8, UINT8], ids=repr)
@pytest.mark.parametrize("mode", MODES)
@given(
    x=arrays(np.float32, 24, elements=st.floats(-(2.0**12), 2.0**12, width=32).filter(lambda v: not 0 < abs(v) < TINY)),
    position=st.integers(-8, 20),
    zero=st.sampled_from([0, 3, 127]),
)
@MANY
def test_floats_are_quantized_as_fractions(mode, grid, x, position, zero):
    """Ties, their float32 neighbours and what saturates, too."""
    ties = (np.arange(-132, 132, 7, dtype=np.float32) + np.float32(0.5)) * np.float32(2.0**-position)
    x = np.concatenate([x, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    target = Target(name="test", rounding=mode)
    codes = Grid(power(-position), zero, grid)
    found = np.asarray(quantize_real(jnp.asarray(x), codes, target).array).tolist()
    low, high = codes.ends
    exact = [rounded(Fraction(float(v)) * power(position), mode) for v in x]
    assert found == [min(max(n + codes.zero, low), high) for n in exact]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_next_to_a_half_is_no_tie(mode):
    """The fraction of -0.49999997 is no float32."""
    x = np.nextafter(np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]), np.float32(0))
    found = np.asarray(
        quantize_real(jnp.asarray(x), Grid(Fraction(1), 0, INT8), Target(name="test", rounding=mode)).array
    )
    assert found.tolist() == [rounded(Fraction(float(v)), mode) for v in x]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_number_becomes_the_lowest_code(mode):
    codes = Grid(Fraction(1), 0, INT8)
    x = jnp.asarray([np.nan, np.inf, -np.inf], jnp.float32)
    assert np.asarray(quantize_real(x, codes, Target(name="test", rounding=mode)).array).tolist() == [-128, 127, -128]
