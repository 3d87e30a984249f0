"""Confidence intervals of means, shares and paired differences: both ends with 95 % confidence each."""

from __future__ import annotations

import math

import numpy as np

TRUST = 0.95  # of each end of an interval


def interval(each: np.ndarray) -> tuple[float, float]:
    """Return both ends of a mean, each with 95 % confidence, by Student's t.

    >>> low, high = interval(np.array([1.0, 2.0, 3.0]))
    >>> round(low, 2), round(high, 2)
    (0.31, 3.69)
    """
    from scipy import stats

    if len(each) < 2:
        return -math.inf, math.inf
    reach = stats.t.ppf(TRUST, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each))
    return float(each.mean() - reach), float(each.mean() + reach)


def share_interval(each: np.ndarray) -> tuple[float, float]:
    """Return both ends of a share in percent: exact (Clopper and Pearson) where each sample has 0 or 100.

    >>> [round(end, 1) for end in share_interval(np.full(20, 100.0))]
    [86.1, 100.0]
    """
    if np.isin(each, (0, 100)).all():
        low, high = exact_share(int((each == 100).sum()), len(each))
        return 100 * low, 100 * high
    low, high = interval(each)
    # Samples whose values are all alike do not say that the next one is.
    least = 100 * exact_share(int((each >= each.mean()).sum()), len(each))[0]
    return max(0.0, low if each.std() else min(low, least)), min(100.0, high)


def difference_low(each: np.ndarray) -> float:
    """Return the least mean of paired differences of -100, 0 and 100, with confidence: the most losses, the fewest gains."""
    lost = exact_share(int((each < 0).sum()), len(each))[1]
    gained = exact_share(int((each > 0).sum()), len(each))[0]
    return 100 * (gained - lost)


def exact_share(hits: int, count: int) -> tuple[float, float]:
    """Return both ends of a share, each with 95 % confidence."""
    from scipy import stats

    low = stats.beta.ppf(1 - TRUST, hits, count - hits + 1) if hits else 0.0
    high = stats.beta.ppf(TRUST, hits + 1, count - hits) if hits < count else 1.0
    return float(low), float(high)
