"""Means, as a chip without division computes them and as a float reading does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jq.arithmetic.numerics import WIDEST
from jq.npu.facts import pool_multiplier, reciprocal
from jq.npu.targets import Target
from jq.ops.integer.fixed import LARGEST_TABLE, Fixed, Table, is_power_of_two


def average(x: Fixed, total: Any, window: Sequence[int], target: Target) -> Fixed | Table:
    """Return the mean over windows of which these are the sums: one multiplier for all of the window."""
    return _mean(x, total, math.prod(window), [pool_multiplier(window)], target)


def mean(x: Fixed, total: Any, sizes: Sequence[int], target: Target) -> Fixed | Table:
    """Return the mean over axes of these sizes of which these are the sums: one multiplier for each axis."""
    return _mean(x, total, math.prod(sizes), [reciprocal(n) for n in sizes], target)


def _mean(x: Fixed, total: Any, count: int, pairs: Sequence[tuple[int, int]], target: Target) -> Fixed | Table:
    if not x.is_codes or x.bound * count >= WIDEST or count == 0:
        return NotImplemented
    if x.floating and target.requantize == "float32":
        return NotImplemented  # where each term is rounded before it is added
    sums = Fixed(total, x.scale, x.bound * count, floating=x.floating)
    if target.reciprocals:
        factor = math.prod(Fraction(multiplier, 1 << shift) for multiplier, shift in pairs)
        causes = frozenset({"pool factor"} if factor != Fraction(1, count) else ())
        return sums.replace(scale=x.scale * factor, causes=causes, deviation=float(factor * count - 1))
    if is_power_of_two(Fraction(count)):
        return sums.replace(scale=x.scale / count)
    # Rounding a quotient in float32 may create a tie. There are few possible sums, so all of them are tried.
    if 2 * sums.bound >= LARGEST_TABLE:
        return NotImplemented
    table = sums.table()
    return NotImplemented if table is None else Table(table.source, table.values / np.float32(count))
