"""The squared error of a layer's output over all data, as a quadratic form of what its weights are off.

With rows x that the quantized network gives the layer, and outputs of the float layer that are off by e where the
weights W are kept, weights W + D with the bias b + d are off by e - x D - d, in the mean square

    tr(D' A D) - 2 tr(D' R) + c + |m_e - m_x D - d|^2,    A = cov(x),  R = cov(x, e),  c = var(e),

so one pass over the data is all that the error needs, for as many steps as one likes. The best bias makes the last
term zero. Means are those of all positions; covariances need not be, as neighbours in an image are much alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.registry import Linear

Array = Any
_SAMPLES, _LEAST = 64, 1 << 13  # positions: per row of A, and at least
_FEW = 32  # rows of a group, up to which sums of products cost less than small matrix products


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """What is added up over data: products at some positions, and sums there and at all."""

    xx: Array  # (groups, K, K)
    xe: Array  # (groups, K, outputs)
    ee: Array
    x: Array  # (groups, K)
    e: Array  # (groups, outputs)
    count: Array
    every_x: Array
    every_e: Array
    every: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The quadratic form of a layer, group by group."""

    a: Array  # (groups, K, K)
    r: Array  # (groups, K, outputs)
    c: Array
    mean_x: Array  # (groups, 1, K)
    mean_e: Array  # (groups, 1, outputs)

    @classmethod
    def of(cls, sums: Sums) -> Form:
        """The form that sums over all data give."""
        x, e = sums.x / sums.count, sums.e / sums.count
        return cls(
            sums.xx / sums.count - x[:, :, None] * x[:, None, :],
            sums.xe / sums.count - x[:, :, None] * e[:, None, :],
            sums.ee / sums.count - jnp.sum(e**2),
            (sums.every_x / sums.every)[:, None],
            (sums.every_e / sums.every)[:, None],
        )

    def __call__(self, d: Array) -> Array:
        """The mean squared error of weights that are off by d (groups, K, outputs), with the best bias."""
        return jnp.sum(d * (_products(self.a, d) - 2 * self.r)) + self.c

    def gradient(self, d: Array) -> Array:
        """The gradient of the error."""
        return 2 * (_products(self.a, d) - self.r)

    def shift(self, d: Array) -> Array:
        """What the best bias for such weights is off."""
        return self.mean_e - self.mean_x @ d


def _products(a: Array, d: Array) -> Array:
    """A D by group: one group as a plain product, as XLA's library has none of many; small ones as sums."""
    if a.shape[0] == 1:
        return (a[0] @ d[0])[None]
    return jnp.sum(a[..., None] * d[:, None], axis=2) if a.shape[1] <= _FEW else a @ d


def sums(linear: Linear, attrs: Mapping[str, Any], x: Array, w: Array, e: Array, valid: Array, samples: int) -> Sums:
    """What images x add, whose outputs with weights w are off by e; samples is how many there are in all."""
    columns = linear.columns(w, attrs)
    positions = jax.eval_shape(lambda e: linear.results(e, attrs, None), e[:1]).shape[0]
    wanted = -(-max(_SAMPLES * columns.shape[1], _LEAST) // samples)
    places = None if positions <= wanted else np.sort(np.random.default_rng(0).permutation(positions)[:wanted])
    rows, off = linear.rows(x, w, attrs, places), linear.results(e, attrs, places)
    total = jnp.sum(valid[:, None] * x.reshape(len(x), -1), 0).reshape(1, *x.shape[1:])
    every_x = jnp.sum(linear.rows(total, w, attrs, None), 0)
    total = jnp.sum(valid[:, None] * e.reshape(len(e), -1), 0).reshape(1, *e.shape[1:])
    every_e = jnp.sum(linear.results(total, attrs, None), 0)
    seen = jnp.repeat(valid.astype(x.dtype), rows.shape[0] // valid.shape[0])[:, None, None]
    if rows.shape[2] == 1:
        xx, xe = ((seen * rows)[..., 0].T @ rows[..., 0])[None], ((seen * rows)[..., 0].T @ off[..., 0])[None]
    elif rows.shape[1] <= _FEW:
        counted = (rows * seen)[:, :, None]
        xx, xe = jnp.sum(counted * rows[:, None], 0), jnp.sum(counted * off[:, None], 0)
        xx, xe = jnp.moveaxis(xx, -1, 0), jnp.moveaxis(xe, -1, 0)
    else:
        xx, xe = jnp.einsum("pkg,plg->gkl", rows * seen, rows), jnp.einsum("pkg,pog->gko", rows * seen, off)
    return Sums(
        xx,
        xe,
        jnp.sum(seen * off * off),
        jnp.sum(seen * rows, 0).T,
        jnp.sum(seen * off, 0).T,
        jnp.sum(seen),
        every_x.T,
        every_e.T,
        jnp.sum(valid) * float(positions),
    )
