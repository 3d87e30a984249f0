"""Roundings that go through the inputs of a layer in order, and let later weights make up for the errors of earlier ones.

GPTQ: Frantar et al., Accurate Post-Training Quantization for Generative Pre-trained Transformers, arXiv:2210.17323. GPFQ:
Lybrand and Saab, A Greedy Algorithm for Quantizing Neural Networks, arXiv:2010.15979. Both need only the quadratic form.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jq.plan import QParams
from jq.recovery.quadratic_form import Form
from jq.recovery.rounding import along_columns, codes_of, integer_grid, nearest

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GPTQ:
    """Rounding of one input's weights after another, each error spread over the inputs that are still to come.

    With U'U the inverse of the damped A, the error e of input k is taken back by the inputs after it as e U[k] / U[k, k].
    """

    damping: float = 0.01  # share of the mean of A's diagonal that is added to it

    def __call__(self, columns: Array, qparams: QParams, form: Form) -> Array:
        """The weights (groups, K, outputs), rounded."""
        grid, scale = integer_grid(qparams), along_columns(qparams, columns)
        diagonal = jnp.diagonal(form.a, axis1=1, axis2=2)
        damped = self.damping * jnp.mean(diagonal, 1)[:, None, None] + jnp.finfo(jnp.float32).tiny
        a = form.a + damped * jnp.eye(form.a.shape[1])
        target = columns + jnp.linalg.solve(a, form.r)  # the weights of least error
        upper = jnp.swapaxes(jnp.linalg.cholesky(jnp.linalg.inv(a)), 1, 2)

        def step(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            w, rounded = carry
            code = codes_of(w[:, k], scale, grid)
            rounded, spread = rounded.at[:, k].set(code), upper[:, k] / upper[:, k, k][:, None]
            return w - spread[..., None] * (w[:, k] - code)[:, None], rounded

        return jax.lax.fori_loop(0, columns.shape[1], step, (target, columns))[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GPFQ:
    """Greedy path following: each weight takes the code that makes the error of the inputs up to it least.

    Weights that are still to come count as kept, so that the least error is where its derivative is zero.
    """

    def __call__(self, columns: Array, qparams: QParams, form: Form) -> Array:
        """The weights (groups, K, outputs), rounded."""
        grid, scale = integer_grid(qparams), along_columns(qparams, columns)

        def step(k: Array, d: Array) -> Array:
            slope = jnp.einsum("gk,gko->go", form.a[:, k], d) - form.r[:, k]
            wanted = columns[:, k] - slope / jnp.maximum(form.a[:, k, k][:, None], jnp.finfo(jnp.float32).tiny)
            inside = jnp.abs(wanted - columns[:, k]) < grid.qmax * jnp.max(scale)  # not of an input that is never there
            return d.at[:, k].set(codes_of(jnp.where(inside, wanted, columns[:, k]), scale, grid) - columns[:, k])

        d = jax.lax.fori_loop(0, columns.shape[1], step, jnp.zeros_like(columns))
        return nearest(columns + d, qparams)
