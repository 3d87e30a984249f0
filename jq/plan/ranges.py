"""Float ranges from statistics or weights, and scale and zero point from a range.

A range (low, high) is what a quantized tensor can hold; what lies outside saturates. For activations it
comes from a `Histogram` and the exact extremes, for weights from the values themselves. Three families:

| | range | cost |
|---|---|---|
| `percentile`, `layerwise_percentile` | cut a share of the values | fake-quant error, if several shares compete |
| `entropy` | the cut whose quantized histogram resembles the histogram most | Kullback-Leibler divergence |
| `mse` | the observed range times 1, ..., 2/K, 1/K | squared fake-quant error |

`percentile`, `entropy` and `scale_zero_point` equal onnxruntime 1.31 bit for bit, given its histogram;
exceptions are written where they are made. No function returns NaN: a histogram of nothing has the range
(0, 0), and a range of no width has scale 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike

from jq.arithmetic import layout
from jq.arithmetic.exponents import residual
from jq.arithmetic.formats import Integer
from jq.calibration.observers import Histogram
from jq.config import LAYERWISE_PERCENTS, PercentileMetric, WeightMethod
from jq.errors import ConfigError, ModelError, check_choice

Number = float | np.floating
Range = tuple[np.floating, np.floating]
Arrays = tuple[np.ndarray, np.ndarray]  # scales and zero points, or both ends of ranges

# Quark's candidates for weights.
WEIGHT_PERCENTS = (99.9, 99.99, 99.999, 99.9999)

_SMOOTHING = 1e-4  # what an empty bin gets, in counts
_ENTROPY_BLOCK = 1 << 20  # elements: all candidates of 8192 bins have 17 million, in several arrays
_WEIGHT_BLOCK = 1 << 15  # elements: a block and its temporaries stay in the second-level cache


def scale_zero_point(low: ArrayLike, high: ArrayLike, grid: Integer, *, symmetric: bool) -> Arrays:
    """Return scale (float32) and zero point (the grid's type) of ranges, elementwise.

    The range is widened to hold 0, and if symmetric to [-a, a] with a = max(|low|, |high|). Then

        scale = (high - low) / (qmax - qmin),    zero_point = rint(qmin - low / scale),

    or the middle of the grid if symmetric; `grid.narrow` makes a signed symmetric grid. A scale below the
    least normal float32 becomes 1, with zero point 0 on every grid, as in onnxruntime.

    >>> from jq.arithmetic.formats import INT8, UINT8
    >>> scale_zero_point([-1, -0.5, 0], [3, 0.25, 0], UINT8, symmetric=False)[1]
    array([ 64, 170,   0], dtype=uint8)
    >>> scale_zero_point(-0.5, 2.54, INT8.narrow, symmetric=True)
    (array(0.02, dtype=float32), array(0, dtype=int8))
    """
    low, high = np.minimum(np.asarray(low, np.float64), 0), np.maximum(np.asarray(high, np.float64), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    scale = np.asarray((high - low) / (grid.qmax - grid.qmin))
    degenerate = scale < np.finfo(np.float32).tiny
    scale = np.where(degenerate, 1, scale)
    zero_point = grid.middle if symmetric else np.rint(grid.qmin - low / scale)
    return scale.astype(np.float32), np.where(degenerate, 0, zero_point).astype(grid.dtype)


def percentile(
    histogram: Histogram, minimum: Number, maximum: Number, percent: float = 99.999, *, symmetric: bool
) -> Range:
    """Return the range that holds `percent` of the values, within the observed [minimum, maximum].

    Symmetric: of a histogram of magnitudes, (-t, t) with t the left edge of the first bin at which the
    cumulative share reaches percent. Asymmetric: of a signed histogram, with half of the rest cut on each side;
    both limits are left edges.

    >>> magnitudes = Histogram(np.array([60, 30, 9, 1]), np.array([0, 1, 2, 3, 4], np.float32))
    >>> low, high = percentile(magnitudes, -1.5, 3.9, 95, symmetric=True)
    >>> float(low), float(high)
    (-1.5, 2.0)
    """
    _check_percents([percent])
    counts, edges = histogram.counts, histogram.edges
    if not counts.any():
        return _nothing(edges)
    share = np.cumsum(counts / counts.sum())
    # Rounding may leave the last share below 1; the index is then that of the last edge, which exists.
    if symmetric:
        threshold = edges[np.searchsorted(share, percent / 100.0)]
        return _within(-threshold, threshold, minimum, maximum)
    cut = (100.0 - percent) / 200.0
    return _within(edges[np.searchsorted(share, cut)], edges[np.searchsorted(share, 1.0 - cut)], minimum, maximum)


def layerwise_percentile(
    histogram: Histogram,
    minimum: Number,
    maximum: Number,
    grid: Integer,
    *,
    symmetric: bool,
    percents: Sequence[float] = LAYERWISE_PERCENTS,
    metric: PercentileMetric = "mae",
) -> Range:
    """Return the `percentile` range with the least fake-quant error among several; ties go to the first.

    The error is the mean of |x - fq(x)| ("mae") or of its square ("mse") over the bin centres. As in Quark's
    LayerWisePercentile its scale is the asymmetric one for symmetric ranges too.
    """
    check_choice("metric", metric, get_args(PercentileMetric))
    _check_percents(percents)
    ranges = [percentile(histogram, minimum, maximum, p, symmetric=symmetric) for p in percents]
    low, high = np.array(ranges).T
    errors = _histogram_error(histogram, low, high, grid, symmetric=False, power=1 if metric == "mae" else 2)
    return ranges[int(np.argmin(errors))]


def mse(
    histogram: Histogram, minimum: Number, maximum: Number, grid: Integer, *, symmetric: bool, steps: int = 128
) -> Range:
    """Return the range with the least squared fake-quant error over the histogram; ties go to the widest.

        error(low, high) = sum_i counts_i (c_i - fq(c_i))^2,
        fq(x) = scale (clip(rint(x / scale) + zero_point, qmin, qmax) - zero_point)

    with c_i the bin centres and scale, zero_point those of the range. The candidates are the observed range,
    first widened to hold 0, times f = 1, (K-1)/K, ..., 1/K for K steps; symmetric: (-f a, f a) with
    a = max(|minimum|, |maximum|), each side cut where nothing was observed, which leaves its scale as it is.
    """
    if not histogram.counts.any():
        return _nothing(histogram.edges)
    dtype = histogram.edges.dtype
    low, high = _shrunk(np.asarray(minimum, dtype), np.asarray(maximum, dtype), steps, symmetric)
    best = np.argmin(_histogram_error(histogram, low, high, grid, symmetric=symmetric, power=2))
    return low[best], high[best]


def entropy(histogram: Histogram, minimum: Number, maximum: Number, quantized_bins: int = 128) -> Range:
    """Return the cut of a signed histogram that loses least information when quantized, by TensorRT's rule.

    The histogram spans [-a, a]. A candidate keeps its i bins on both sides of the middle one; p is what it keeps
    with all that it cuts added to its outermost bins, q what it keeps merged into `quantized_bins` and spread
    again over the bins that p occupies. The candidate with the least KL(p || q) wins, ties go to the narrowest,
    and it is cut to the observed [minimum, maximum]; if all of what was observed lies outside, that leaves
    low > high, which only says that the range ends at 0 (`scale_zero_point` widens it).

    Candidates reach from quantized_bins to all bins, so there must be many more bins: 2048 or 8001, say.
    onnxruntime's default of 128 of each leaves one candidate, and its entropy calibration is minmax.
    Where no candidate has a finite divergence, as for a positive constant if quantized_bins does not divide the
    bins, onnxruntime returns the narrowest; here the observed range is returned.
    """
    if quantized_bins < 1:
        raise ConfigError(f"quantized_bins must be positive; got {quantized_bins}")
    counts, edges = histogram.counts, histogram.edges
    if not counts.any():
        return _nothing(edges)
    middle = counts.size // 2
    half = np.arange(quantized_bins // 2, middle + 1)
    start, stop = middle - half, np.minimum(middle + half + 1, counts.size)
    divergence = np.full(half.size, np.inf, edges.dtype)
    count = max(1, _ENTROPY_BLOCK // counts.size)
    for block in (slice(i, i + count) for i in range(0, half.size, count)):
        divergence[block] = _divergence(counts, start[block], stop[block], quantized_bins)
    if not np.isfinite(divergence).any():
        return edges.dtype.type(minimum), edges.dtype.type(maximum)
    best = np.argmin(divergence)
    return _within(edges[start[best]], edges[stop[best]], minimum, maximum)


def weight_range(
    array: np.ndarray,
    axis: int | None,
    method: WeightMethod = "minmax",
    *,
    grid: Integer,
    symmetric: bool,
    percents: Sequence[float] = WEIGHT_PERCENTS,
    steps: int = 128,
) -> Arrays:
    """Return the range of a weight, or of each of its channels along `axis`.

    "minmax" is exact. "percentile" is the pair (100 - p, p) with the least squared fake-quant error among
    `percents`, as Quark's WeightCalibrateMethod MinMSE. "mse" has the candidates of `mse`, on the values.

    >>> from jq.arithmetic.formats import INT8
    >>> w = np.array([[1, -2, 0.5], [0, 0, 0]], np.float32)
    >>> low, high = weight_range(w, 0, grid=INT8, symmetric=True)
    >>> low, high
    (array([-2.,  0.], dtype=float32), array([1., 0.], dtype=float32))
    """
    check_choice("weight_method", method, get_args(WeightMethod))
    array = array.astype(np.result_type(array, np.float32), copy=False)  # float16 is too narrow for sums
    rows = layout.rows(array, axis)
    rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))  # [channels, values]
    if not rows.size:
        low = high = np.zeros(len(rows), rows.dtype)
    else:
        low, high = rows.min(1), rows.max(1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ModelError("a weight holds NaN or Inf, so it has no range; export the model again")
        if method == "percentile":
            low, high = _least_squares(rows, *_percentiles(rows, percents), grid, symmetric)
        elif method == "mse":
            low, high = _least_squares(rows, *_shrunk(low, high, steps, symmetric), grid, symmetric)
    return (low.reshape(()), high.reshape(())) if axis is None else (low, high)


def _check_percents(percents: Sequence[float]) -> None:
    if not percents or not all(0 <= p <= 100 for p in percents):
        raise ConfigError(f"percents must be one or more numbers from 0 to 100; got {list(percents)}")


def _nothing(edges: np.ndarray) -> Range:
    return edges.dtype.type(0), edges.dtype.type(0)


def _within(low: np.floating, high: np.floating, minimum: Number, maximum: Number) -> Range:
    return np.maximum(low, minimum), np.minimum(high, maximum)


def _shrunk(minimum: np.ndarray, maximum: np.ndarray, steps: int, symmetric: bool) -> Arrays:
    """Return the candidates of `mse`, [steps, *shape], the widest first."""
    if steps < 1:
        raise ConfigError(f"steps must be positive; got {steps}")
    factor = np.arange(steps, 0, -1).reshape(-1, *[1] * minimum.ndim) / steps
    low, high = np.minimum(minimum, 0), np.maximum(maximum, 0)
    if symmetric:
        limit = (factor * np.maximum(-low, high)).astype(minimum.dtype)
        return np.maximum(-limit, low), np.minimum(limit, high)
    return (factor * low).astype(minimum.dtype), (factor * high).astype(minimum.dtype)


def _residual(x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, grid: Integer) -> np.ndarray:
    """Return (x - fq(x)) / scale."""
    zero_point = zero_point.astype(x.dtype)
    return residual(x / scale.astype(x.dtype), grid.qmin - zero_point, grid.qmax - zero_point)


def _histogram_error(
    histogram: Histogram, low: np.ndarray, high: np.ndarray, grid: Integer, *, symmetric: bool, power: int
) -> np.ndarray:
    """Return the sum of |x - fq(x)|^power over the histogram for each candidate range."""
    scale, zero_point = scale_zero_point(low, high, grid, symmetric=symmetric)
    seen = histogram.counts > 0
    edges = histogram.edges.astype(np.float64)
    centres = ((edges[:-1] + edges[1:]) / 2)[seen]
    residual = _residual(centres, scale[:, None], zero_point[:, None], grid)
    return scale.astype(np.float64) ** power * (np.abs(residual) ** power @ histogram.counts[seen].astype(np.float64))


def _percentiles(rows: np.ndarray, percents: Sequence[float]) -> Arrays:
    """Return the values below which 100 - p and p percent of each row lie, [percents, channels]."""
    _check_percents(percents)
    shares = [[100 - p for p in percents], percents]
    # float64: interpolation between the extremes of float32 would overflow in it
    low, high = np.percentile(rows.astype(np.float64), shares, axis=1, overwrite_input=True).astype(rows.dtype)
    return low, high


def _least_squares(rows: np.ndarray, low: np.ndarray, high: np.ndarray, grid: Integer, symmetric: bool) -> Arrays:
    """Return the range of least squared error of each row among its [candidates, channels]; ties go to the first."""
    scale, zero_point = scale_zero_point(low, high, grid, symmetric=symmetric)
    squares = np.zeros(scale.shape)
    for channels, x in _blocks(rows):
        for i, (s, z) in enumerate(zip(scale[:, channels, None], zero_point[:, channels, None], strict=True)):
            squares[i, channels] += np.square(_residual(x, s, z, grid)).sum(axis=1)
    best = np.argmin(squares * scale.astype(np.float64) ** 2, axis=0)
    each = np.arange(len(rows))
    return low[best, each], high[best, each]


def _blocks(rows: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield whole rows, or parts of long ones, of some _WEIGHT_BLOCK elements, and which rows they are."""
    height = max(1, _WEIGHT_BLOCK // rows.shape[1])
    for i in range(0, len(rows), height):
        for j in range(0, rows.shape[1], _WEIGHT_BLOCK):
            yield slice(i, i + height), rows[i : i + height, j : j + _WEIGHT_BLOCK]


def _divergence(counts: np.ndarray, start: np.ndarray, stop: np.ndarray, quantized_bins: int) -> np.ndarray:
    """Return KL(p || q) of the candidates that keep counts[start:stop], inf where it is undefined.

    Candidates differ in length, so their p lie one after the other in one array, and so do their q. float32
    sums depend on their order, and the least of close divergences on the last bit, so the order is np.sum's:
    reduceat adds the first element to the pairwise sum of the others, np.sum takes the pairwise sum of all.
    Hence a neutral element before each candidate.
    """
    size = stop - start
    length = size + 1
    first = np.cumsum(length) - length
    below = np.concatenate([[0], np.cumsum(counts)])  # counts in all bins below an edge

    p = counts[np.arange(length.sum()) + np.repeat(start - 1 - first, length)]
    p[first] = 0
    p[first + 1] += below[start]
    p[first + size] += below[-1] - below[stop]

    # Equally many bins are merged into each quantized one. The last also gets the counts of the bins that remain,
    # but does not give them back: there q is 0.
    merged = size // quantized_bins
    bounds = merged[:, None] * np.arange(quantized_bins + 1)
    mass = np.diff(below[start[:, None] + bounds])
    mass[:, -1] += below[stop] - below[start + bounds[:, -1]]
    occupied = np.diff(np.cumsum(p != 0)[first[:, None] + bounds])
    level = mass // np.maximum(occupied, 1) * (occupied > 0)
    widths = np.column_stack([np.ones_like(size), np.diff(bounds), size - bounds[:, -1]])
    q = np.repeat(np.pad(level, ((0, 0), (1, 1))).ravel(), widths.ravel())

    p, p_defined = _smoothed(p, first, length)
    q, q_defined = _smoothed(q, first, length)
    return np.where(p_defined & q_defined, np.add.reduceat(p * np.log(p / q), first), np.inf)


def _smoothed(counts: np.ndarray, first: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each candidate as float32 probabilities without zeros, and whether that can be.

    Empty bins get _SMOOTHING, taken in equal parts from the others; none of those has less than 1 to give.
    """
    occupied = np.add.reduceat(counts != 0, first, dtype=np.int64)
    taken = _SMOOTHING * (length - 1 - occupied) / np.maximum(occupied, 1)
    defined = (occupied > 0) & (taken < 1)
    taken = np.where(defined, taken, 0).astype(np.float32)
    smooth = np.where(counts == 0, np.float32(_SMOOTHING), counts.astype(np.float32) - np.repeat(taken, length))
    smooth[first] = 0  # neutral in the sum
    smooth /= np.repeat(np.add.reduceat(smooth, first), length)
    smooth[first] = 1  # neutral in the divergence: 1 log(1 / 1)
    return smooth, defined
