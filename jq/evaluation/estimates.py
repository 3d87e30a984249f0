"""Measures with intervals over samples: percentiles of a bootstrap, whose generator has an explicit seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

RESAMPLES = 2000
TAIL = 2.5  # percent that lie beyond each end of an interval
_DRAWN = 1 << 20  # samples that are drawn at once


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A measure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit."""
        return Estimate(factor * self.value, factor * self.low, factor * self.high)


def bootstrap(
    each: np.ndarray,
    of: Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> np.ndarray:
    """Return both ends [2, ...] of the 95 % interval of a measure of samples `each` [samples, columns].

    The measure is a function of the columns' means [resamples, columns], by default these. Equal seeds draw equal samples.

    >>> low, high = bootstrap(np.array([[0.0], [1.0]] * 50))
    >>> bool(0.38 < low[0] < 0.42), bool(0.58 < high[0] < 0.62)
    (True, True)
    """
    rng, count = np.random.default_rng(seed), len(each)
    means, at_once = [], max(1, _DRAWN // count)
    for start in range(0, resamples, at_once):
        drawn = rng.integers(0, count, (min(at_once, resamples - start), count), dtype=np.uint32)
        means.append(np.stack([column[drawn].mean(1) for column in each.T], 1))
    values = np.concatenate(means)
    return np.percentile(values if of is None else of(values), [TAIL, 100 - TAIL], axis=0)
