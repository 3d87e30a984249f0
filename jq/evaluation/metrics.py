"""Metrics: distances between arrays and accuracy of classifiers, as pure functions of numpy arrays.

Sums are taken in float64 and in blocks, so that a memory-mapped array is never in memory as a whole. NaN or Inf in the
data make the distances NaN or Inf; arrays that cannot be compared are a `DataError`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jq.arithmetic.losses import decibels
from jq.errors import ConfigError, DataError
from jq.evaluation.detection import Boxes, mean_average_precision

__all__ = [
    "Boxes", "cosine", "hits", "l2", "mean_average_precision", "psnr", "sign_test", "sqnr", "ssim", "standard_error",
    "topk",
]  # fmt: skip

_BLOCK = 1 << 20  # elements converted to float64 at once
_Parts: TypeAlias = Callable[[], Iterator[np.ndarray]]  # float64 blocks, from the beginning at each call


# --- Distances of arrays ---


def cosine(reference: ArrayLike, other: ArrayLike) -> float:
    """Return the cosine of the angle between two arrays seen as vectors, <x, y> / (|x| |y|).

    An array of zeros has no direction: the cosine is 1 if both are zero, and 0 if one is.

    >>> cosine([3.0, 4.0], [6.0, 8.0]), cosine([1, 0], [0, 1]), cosine([0, 0], [0, 1])
    (1.0, 0.0, 0.0)
    """
    x, y = _pair(reference, other)
    one, two = _peak(lambda: _blocks(x)), _peak(lambda: _blocks(y))
    if one == 0 or two == 0:
        return float(one == two)
    if not math.isfinite(one + two):
        return math.nan
    dot, xx, yy = 0.0, 0.0, 0.0
    for a, b in zip(_blocks(x), _blocks(y), strict=True):
        a, b = a / one, b / two  # squares of very large or small values stay in range
        dot, xx, yy = dot + float(a @ b), xx + float(a @ a), yy + float(b @ b)
    return float(np.clip(dot / math.sqrt(xx * yy), -1, 1))


def l2(reference: ArrayLike, other: ArrayLike) -> float:
    """Return the Euclidean distance, the square root of the sum of (x - y)^2.

    >>> l2([0, 0, 1], [3, 4, 1])
    5.0
    """
    x, y = _pair(reference, other)
    return _norm(lambda: _differences(x, y))


def psnr(reference: ArrayLike, other: ArrayLike, peak: float | None = None) -> float:
    """Return the peak signal-to-noise ratio in dB, 20 log10(peak / rms), rms being the root of the mean of (x - y)^2.

    The peak is the largest value of the reference unless it is given (255, say, of images): it is what AMD's tool takes.
    Equal arrays have inf, and there is no such ratio, so NaN, where the peak is not above zero.

    >>> round(psnr([10.0, 0.0], [9.0, 1.0]), 6), psnr([10.0, 0.0], [10.0, 0.0]), psnr([-1.0], [-2.0])
    (20.0, inf, nan)
    """
    x, y = _pair(reference, other)
    noise = _norm(lambda: _differences(x, y))
    if noise == 0:
        return math.inf
    peak_value = float(np.max(x)) if peak is None else peak
    return _decibels(peak_value, noise / math.sqrt(x.size)) if peak_value > 0 else math.nan


def sqnr(reference: ArrayLike, other: ArrayLike) -> float:
    """Return the ratio of signal to quantization noise in dB, 20 log10(|x| / |x - y|).

    Equal arrays have inf; a reference of zeros has -inf.

    >>> round(sqnr([3.0, 4.0], [3.0, 4.5]), 6), sqnr([0.0], [0.0]), sqnr([0.0], [1.0])
    (20.0, inf, -inf)
    """
    x, y = _pair(reference, other)
    noise = _norm(lambda: _differences(x, y))
    return math.inf if noise == 0 else _decibels(_norm(lambda: _blocks(x)), noise)


def _pair(reference: ArrayLike, other: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(reference), np.asarray(other)
    for array in (x, y):
        # numpy does not know bfloat16 for a float, but it knows that float64 holds it.
        if array.dtype.kind not in "biuf" and not np.can_cast(array.dtype, np.float64):
            raise DataError(f"an array of {array.dtype} cannot be measured; expected real numbers")
    if x.shape != y.shape:
        raise DataError(f"arrays of shapes {x.shape} and {y.shape} cannot be compared; expected the same shape")
    if not x.size:
        raise DataError(f"arrays of shape {x.shape} have no elements to compare")
    return x, y


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        yield flat[start : start + _BLOCK].astype(np.float64)


def _differences(x: np.ndarray, y: np.ndarray) -> Iterator[np.ndarray]:
    with np.errstate(invalid="ignore"):  # Inf less Inf is NaN, and says so
        for a, b in zip(_blocks(x), _blocks(y), strict=True):
            yield a - b


def _peak(parts: _Parts) -> float:
    return float(np.max([np.max(np.abs(block)) for block in parts()]))


def _norm(parts: _Parts) -> float:
    peak = _peak(parts)
    if peak == 0 or not math.isfinite(peak):
        return peak
    return peak * math.sqrt(sum(float(np.sum(np.square(block / peak))) for block in parts()))


def _decibels(signal: float, noise: float) -> float:
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    return 2 * decibels(signal, noise)  # of amplitudes, whose squares might not be in range


# --- Images ---

SSIM_WINDOW = 11  # pixels, as in the paper
_SIGMA, _K1, _K2 = 1.5, 0.01, 0.03


def ssim(
    reference: ArrayLike, other: ArrayLike, *, axes: tuple[int, int] = (-2, -1), data_range: float | None = None
) -> float:
    """Return the mean structural similarity of images, 1 if they are equal.

    That of Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to structural
    similarity" (2004): a Gaussian window of 11 x 11 pixels with sigma 1.5, K1 = 0.01, K2 = 0.03, wherever the window lies
    in the image. `axes` are those of height and width; over all others (channels, samples) the mean is taken.
    `data_range` is L of the paper: 255 for uint8, otherwise the reference's largest value minus its smallest.

    >>> image = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8)
    >>> ssim(image, image), round(ssim(image, 255 - image), 3)
    (1.0, 0.092)
    """
    x, y = (np.moveaxis(array, axes, (-2, -1)) for array in _pair(reference, other))
    if min(x.shape[-2:]) < SSIM_WINDOW:
        raise DataError(f"an image of {x.shape[-2:]} pixels is smaller than the window of {SSIM_WINDOW}")
    if data_range is None:
        data_range = 255.0 if x.dtype == np.uint8 else float(x.max()) - float(x.min())
    planes = zip(x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:]), strict=True)
    return float(np.mean([_ssim_of_plane(a, b, data_range or 1.0) for a, b in planes]))


def _ssim_of_plane(x: np.ndarray, y: np.ndarray, data_range: float) -> float:
    c1, c2 = (_K1 * data_range) ** 2, (_K2 * data_range) ** 2
    x, y = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        shift = x.mean()  # so that the variance of values far from zero is not lost in their squares
        x, y = x - shift, y - shift
        mean_x, mean_y = _blurred(x), _blurred(y)
        variances = _blurred(x * x) - mean_x**2 + _blurred(y * y) - mean_y**2
        covariance = _blurred(x * y) - mean_x * mean_y
        mean_x, mean_y = mean_x + shift, mean_y + shift
        above = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
        return float(np.mean(above / ((mean_x**2 + mean_y**2 + c1) * (variances + c2))))


def _blurred(plane: np.ndarray) -> np.ndarray:
    """Gaussian means where the whole window lies in the plane; the window is a product of two lines."""
    line = np.exp(-0.5 * ((np.arange(SSIM_WINDOW) - SSIM_WINDOW // 2) / _SIGMA) ** 2)
    line /= line.sum()
    for _ in range(2):
        inside = plane.shape[0] - SSIM_WINDOW + 1
        plane = functools.reduce(np.add, (w * plane[i : i + inside] for i, w in enumerate(line))).T
    return plane


# --- Classes ---


def hits(scores: ArrayLike, labels: ArrayLike, k: int = 1) -> np.ndarray:
    """Return for each sample whether its label is among the k greatest of its scores [samples, classes].

    Of equal scores the first is the greater, as for argmax. A sample with NaN among its scores is wrong.

    >>> hits([[0.1, 0.9], [0.5, 0.5], [0.5, 0.5]], [1, 0, 1])
    array([ True,  True, False])
    """
    s, wanted = np.asarray(scores), np.asarray(labels)
    if s.ndim != 2 or wanted.shape != s.shape[:1] or wanted.dtype.kind not in "iu":
        raise DataError(
            f"scores {s.dtype}{list(s.shape)} and labels {wanted.dtype}{list(wanted.shape)} do not fit; expected scores "
            "[samples, classes] and one whole number for each sample"
        )
    if k < 1:
        raise ConfigError(f"k={k}: expected at least 1")
    outside = np.flatnonzero((wanted < 0) | (wanted >= s.shape[1]))
    if outside.size:
        at = int(outside[0])
        raise DataError(
            f"{outside.size} labels are not a class; the first is {wanted[at]}, of sample {at}; there are {s.shape[1]} classes "
            "from 0. Do labels and classes start at different numbers?"
        )
    own = np.take_along_axis(s, wanted[:, None].astype(np.int64), axis=1)
    before = np.arange(s.shape[1]) < wanted[:, None]
    rank = ((s > own) | ((s == own) & before)).sum(axis=1)
    return (rank < k) & (s == s).all(axis=1)


def topk(scores: ArrayLike, labels: ArrayLike, k: int = 1) -> float:
    """Return the part of the samples whose label is among the k greatest scores, as `hits` counts.

    >>> topk([[0.1, 0.9, 0.0], [0.3, 0.2, 0.5]], [1, 0]), topk([[0.1, 0.9, 0.0], [0.3, 0.2, 0.5]], [1, 0], k=2)
    (0.5, 1.0)
    """
    correct = hits(scores, labels, k)
    if not correct.size:
        raise DataError("there are no samples")
    return float(correct.mean())


def standard_error(part: float, samples: int) -> float:
    """Return the standard error of a share of `samples` independent samples, sqrt(p (1 - p) / n).

    >>> standard_error(0.8, 400)
    0.02
    """
    return math.sqrt(part * (1 - part) / samples)


def sign_test(first: int, second: int) -> float:
    """Return the exact two-sided p of McNemar's test: a fair coin that falls on its rarer side so seldom, or less.

    `first` and `second` count the samples that only the first or only the second of two models has right.

    >>> sign_test(5, 5), sign_test(1, 9), sign_test(0, 0)
    (1.0, 0.021484375, 1.0)
    """
    total, rarer = first + second, min(first, second)
    if rarer < 0:
        raise ConfigError(f"sign_test({first}, {second}): expected two counts")
    if total <= 1000:  # exact in whole numbers
        return min(1.0, 2 * sum(math.comb(total, i) for i in range(rarer + 1)) / 2**total)
    whole = math.lgamma(total + 1) - total * math.log(2)
    terms = (math.exp(whole - math.lgamma(i + 1) - math.lgamma(total - i + 1)) for i in range(rarer + 1))
    return min(1.0, 2 * math.fsum(terms))
