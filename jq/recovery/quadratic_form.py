"""The squared error of a layer's output over all data, as a quadratic form of the error of its weights.

With rows x that the quantized network gives the layer, and outputs of the float layer that are off by e where the
weights W are kept, weights W + D with the bias b + d are off by e - x D - d, in the mean square

    tr(D' A D) - 2 tr(D' R) + c + |m_e - m_x D - d|^2,    A = cov(x),  R = cov(x, e),  c = var(e),

so one pass over the data serves any number of steps. The best bias makes the last term zero. Not all positions are
needed, as neighbours in an image are much alike.

R and m_e say what the weights could make up for of what activations lost. That is small, and from a hundred images much
of it is chance, which weights would learn by heart: both are shrunk by how far parts of the data agree on them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.ops.table import Product

Array = Any
_SAMPLES, _LEAST = 64, 1 << 11  # positions: per row of A, and at least
_AT_ONCE = 8  # positions of thin groups
_FEW = 32  # rows of a group, up to which sums of products cost less than small matrix products


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """Sums over data, at some positions of each image."""

    xx: Array  # (groups, K, K)
    xe: Array  # (groups, K, outputs)
    ee: Array
    x: Array  # (groups, K)
    e: Array  # (groups, outputs)
    count: Array
    parts: Array  # of the data
    covariance2: Array  # sum over parts of the squares of cov(x, e) in each alone
    mean2: Array  # and of those of the means of e


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Means:
    """Those of `Sums` that biases need."""

    x: Array  # (groups, K)
    e: Array  # (groups, outputs)
    count: Array
    parts: Array
    mean2: Array

    def shift(self, d: Array) -> Array:
        """The change of the bias that is best for weights that are off by d (groups, K, outputs)."""
        e = self.e / self.count
        mean_e = e * shrinkage(jnp.sum(e**2), self.mean2, self.parts)
        return mean_e[:, None] - (self.x / self.count)[:, None] @ d


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
        """The form with sums over all data."""
        x, e, r = sums.x / sums.count, sums.e / sums.count, _covariance(sums)
        return cls(
            sums.xx / sums.count - x[:, :, None] * x[:, None, :],
            r * shrinkage(jnp.sum(r**2), sums.covariance2, sums.parts),
            sums.ee / sums.count - jnp.sum(e**2),
            x[:, None],
            e[:, None] * shrinkage(jnp.sum(e**2), sums.mean2, sums.parts),
        )

    def __call__(self, d: Array) -> Array:
        """The mean squared error of weights that are off by d (groups, K, outputs), with the best bias."""
        return jnp.sum(self._terms(d)) + self.c

    def by_output(self, d: Array) -> Array:
        """The errors of the outputs (groups, outputs), each less the same number whatever the weights are."""
        return jnp.sum(self._terms(d), 1)

    def _terms(self, d: Array) -> Array:
        return d * (_products(self.a, d) - 2 * self.r)

    def gradient(self, d: Array) -> Array:
        """The gradient of the error."""
        return 2 * (_products(self.a, d) - self.r)

    def shift(self, d: Array) -> Array:
        """The change of the bias that is best for such weights."""
        return self.mean_e - self.mean_x @ d


def shrinkage(square: Array, squares: Array, parts: Array) -> Array:
    """Return the factor from 0 to 1 by which a mean over parts of the data comes nearest to that over all data there are.

    `square` is the mean's own, `squares` the sum of those of its parts. The spread of the parts says how much of the
    square is chance: James and Stein, Estimation with Quadratic Loss, 1961. One part alone says nothing: 1.

    >>> float(shrinkage(4.0, 2 * 4.0, 2)), float(shrinkage(1.0, 2 * 2.0, 2))  # parts 2 and 2; parts 0 and 2
    (1.0, 0.0)
    """
    chance = (squares / parts - square) / jnp.maximum(parts - 1, 1)
    return jnp.clip(1 - chance / jnp.maximum(square, jnp.finfo(jnp.float32).tiny), 0, 1)


def _covariance(sums: Sums) -> Array:
    return sums.xe / sums.count - sums.x[:, :, None] * sums.e[:, None, :] / sums.count**2


def _products(a: Array, d: Array) -> Array:
    """A D by group: one group as a plain product, as XLA's library has none of many; small ones as sums."""
    if a.shape[0] == 1:
        return (a[0] @ d[0])[None]
    return jnp.sum(a[..., None] * d[:, None], axis=2) if a.shape[1] <= _FEW else a @ d


def sums(linear: Product, attrs: Mapping[str, Any], x: Array, off: Array, w: Array, valid: Array, samples: int) -> Sums:
    """The sums of images x, which differ by `off` from the float network's, whose weights are w.

    The error of the outputs is the layer applied to `off`. `samples` is the number of images in all.
    """
    columns = linear.columns(w, attrs)
    places = _places(linear, attrs, x, w, samples)
    rows = linear.rows(x, w, attrs, places)
    e = _outputs(linear.rows(off, w, attrs, places), columns)
    seen = jnp.repeat(valid.astype(x.dtype), rows.shape[0] // valid.shape[0])[:, None, None]
    if rows.shape[2] == 1:
        xx, xe = ((seen * rows)[..., 0].T @ rows[..., 0])[None], ((seen * rows)[..., 0].T @ e[..., 0])[None]
    elif rows.shape[1] <= _FEW:
        xx, xe = _thin(seen * rows, rows, e)
    else:
        xx, xe = jnp.einsum("pkg,plg->gkl", rows * seen, rows), jnp.einsum("pkg,pog->gko", rows * seen, e)
    total = functools.partial(jnp.sum, axis=0)
    part = Sums(
        xx, xe, jnp.sum(seen * e * e), total(seen * rows).T, total(seen * e).T, jnp.sum(seen), jnp.ones(()),
        jnp.zeros(()), jnp.zeros(()),
    )  # fmt: skip
    return dataclasses.replace(
        part, covariance2=jnp.sum(_covariance(part) ** 2), mean2=jnp.sum((part.e / part.count) ** 2)
    )


def means(
    linear: Product, attrs: Mapping[str, Any], x: Array, off: Array, w: Array, valid: Array, samples: int
) -> Means:
    """The means of what `sums` adds up, at the same positions: all that biases need, without a product for each of them."""
    columns, places = linear.columns(w, attrs), _places(linear, attrs, x, w, samples)

    def mean(images: Array) -> tuple[Array, Array]:
        rows = linear.rows(images, w, attrs, places)
        seen = jnp.repeat(valid.astype(rows.dtype), rows.shape[0] // valid.shape[0])[:, None, None]
        return jnp.sum(seen * rows, axis=0).T, jnp.sum(seen)

    (rows, count), (errors, _) = mean(x), mean(off)
    e = jnp.einsum("gk,gko->go", errors, columns)
    return Means(rows, e, count, jnp.ones(()), jnp.sum((e / count) ** 2))


def _places(linear: Product, attrs: Mapping[str, Any], x: Array, w: Array, samples: int) -> np.ndarray | None:
    """The positions of each image that count, None for all."""
    positions, count, _ = jax.eval_shape(lambda x: linear.rows(x, w, attrs, None), x[:1]).shape
    wanted = -(-max(_SAMPLES * count, _LEAST) // samples)
    return None if positions <= wanted else np.sort(np.random.default_rng(0).permutation(positions)[:wanted])


def _thin(counted: Array, *others: Array) -> list[Array]:
    """Sums of products of thin groups, all groups at once and some positions at a time, which stay in the caches."""
    pads = [((0, -len(a) % _AT_ONCE), *((0, 0),) * (a.ndim - 1)) for a in (counted, *others)]  # zeros at the end
    padded = [jnp.pad(a, pad) for a, pad in zip((counted, *others), pads, strict=True)]
    blocks = [a.reshape(-1, _AT_ONCE, *a.shape[1:]) for a in padded]

    def step(total: list[Array], block: list[Array]) -> tuple[list[Array], None]:
        x, *ys = block
        return [f + sum(x[i][:, None] * y[i] for i in range(_AT_ONCE)) for f, y in zip(total, ys, strict=True)], None

    start = [jnp.zeros((counted.shape[1], *y.shape[1:]), y.dtype) for y in others]
    total, _ = jax.lax.scan(step, start, blocks)
    return [jnp.moveaxis(f, -1, 0) for f in total]


def _outputs(rows: Array, columns: Array) -> Array:
    """The product of rows (positions, K, groups) and columns (groups, K, outputs): (positions, outputs, groups)."""
    if rows.shape[2] == 1:
        return (rows[..., 0] @ columns[0])[..., None]
    if rows.shape[1] <= _FEW:
        by_row = jnp.moveaxis(columns, 0, -1)
        return sum(rows[:, k, None] * by_row[k] for k in range(rows.shape[1]))
    return jnp.einsum("pkg,gko->pog", rows, columns)
