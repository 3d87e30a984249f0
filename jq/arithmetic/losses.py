"""Distances of outputs from a reference: what searches minimize, sensitivities rank and reports show.

Each loss takes one sample; map it over many with `jax.vmap(mse)(reference, outputs)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Array = Any

_LEAST = 1e-30  # in place of the power of a reference of zeros
_IMPOSSIBLE = 1e-6  # the least probability, and one less the largest
_IMAGE = 4  # dims from which on classes are the second axis


def mse(z: Array, y: Array, weights: Array | float = 1.0) -> Array:
    """Return the mean square of y - z, with each element weighted."""
    return jnp.mean((jnp.square(y - z) * weights).reshape(-1))


def power(z: Array, weights: Array | float = 1.0) -> Array:
    """Return the mean square of a reference, the denominator of a relative error; never zero."""
    return jnp.maximum(jnp.mean(jnp.square(z) * weights), _LEAST)


def relative_mse(z: Array, y: Array, weights: Array | float = 1.0) -> Array:
    """Return the weighted mean square of y - z relative to that of z."""
    return mse(z, y, weights) / power(z, weights)


def kl(z: Array, y: Array) -> Array:
    """Return KL(softmax(z) || softmax(y)) of scores, the mean over all but the classes' axis.

    Summed as p log(p / q) - p + q, whose terms are never negative, so that small divergences stay exact.
    """
    axis = classes_axis(z)
    p, q = (jax.nn.log_softmax(v, axis) for v in (z, y))
    return jnp.mean(jnp.sum(jnp.exp(p) * (jnp.expm1(q - p) - (q - p)), axis))


def bernoulli_kl(z: Array, y: Array) -> Array:
    """Return the mean KL divergence of probabilities, each of its own event, as a Sigmoid gives them.

    >>> round(float(bernoulli_kl(jnp.array([0.5]), jnp.array([0.25]))), 4)  # log(2) / 2 + log(2 / 3) / 2
    0.1438
    """
    p, q = (jnp.clip(v, _IMPOSSIBLE, 1 - _IMPOSSIBLE) for v in (z, y))
    return jnp.mean(p * jnp.log(p / q) + (1 - p) * jnp.log((1 - p) / (1 - q)))


def cosine(z: Array, y: Array) -> Array:
    """Return one less the cosine of the angle between z and y as vectors; 0 or 1 where one of them is zero.

    It is the squared difference of their directions, halved: one less a cosine near one would be rounding alone.
    """
    length = jnp.sqrt(jnp.sum(z * z) * jnp.sum(y * y))
    apart = jnp.square(z / jnp.sqrt(jnp.sum(z * z)) - y / jnp.sqrt(jnp.sum(y * y)))
    return jnp.where(length > 0, jnp.sum(apart) / 2, jnp.any(z != y))


def top1(z: Array, y: Array) -> Array:
    """Return the share of rows whose highest score belongs to another class."""
    axis = classes_axis(z)
    return jnp.mean(jnp.argmax(z, axis) != jnp.argmax(y, axis), dtype=jnp.float32)


BY_NAME: Mapping[str, Callable[[Array, Array], Array]] = {"kl": kl, "mse": mse, "cosine": cosine, "top1": top1}


def classes_axis(z: Array) -> int:
    """Return the axis of an output [batch, ...] that holds its classes: the second for images, otherwise the last."""
    return 1 if z.ndim >= _IMAGE else -1


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) of two powers: inf without noise, else -inf without signal.

    >>> decibels(100.0, 1.0), decibels(0.0, 0.0), decibels(0.0, 1.0)
    (20.0, inf, -inf)
    """
    if noise <= 0:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf
