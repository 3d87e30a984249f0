"""AdaRound: learn whether each weight is rounded up or down.

Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization, arXiv:2004.10568. A weight becomes
floor(w / s) + h(v), with the rectified sigmoid h, which a regularizer drives to 0 or 1 as its exponent falls.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jq.arithmetic.formats import Integer
from jq.arithmetic.numerics import divide
from jq.plan import QParams
from jq.recovery.adaquant import falling
from jq.recovery.quadratic_form import Form
from jq.recovery.rounding import along_columns, integer_grid, nearest

Array = Any
ZETA, GAMMA = 1.1, -0.1  # the ends of the stretched sigmoid, which is clipped to [0, 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaRound:
    """Learned rounding, from the quadratic form of a layer's error relative to that of nearest rounding.

    With a relative error, the regularizer's weight means the same for all layers. A pytree of numbers: one compiled
    program serves all values.
    """

    steps: int = 40
    learning_rate: float = 0.1
    weight: float = 1.0  # of the regularizer's mean
    warm: float = 0.2  # share of the steps without it
    beta: tuple[float, float] = (20.0, 2.0)

    def __call__(self, columns: Array, qparams: QParams, form: Form) -> Array:
        """The weights (groups, K, outputs), rounded up or down."""
        grid, scale = integer_grid(qparams), along_columns(qparams, columns)
        plain = nearest(columns, qparams)
        least = jnp.maximum(form(plain - columns), jnp.finfo(jnp.float32).tiny)
        adam = optax.scale_by_adam()

        def step(i: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
            v, state = carry
            weights, pull = jax.vjp(lambda v: soft(columns, v, scale, grid), v)
            (gradient,) = pull(form.gradient(weights - columns) / least)
            t = (i / self.steps - self.warm) / (1 - self.warm)
            pressure = jax.grad(regularizer)(v, annealed(t, *self.beta))
            gradient += jnp.where(t > 0, self.weight / v.size, 0) * pressure
            update, state = adam.update(gradient, state)
            return v - falling(self.learning_rate, i, self.steps) * update, state

        v = initial(columns, scale)
        v, _ = jax.lax.fori_loop(0, self.steps, step, (v, adam.init(v)))
        return hard(columns, v, scale, grid)


def annealed(t: Array, start: float, end: float) -> Array:
    """The regularizer's exponent at a time from 0 to 1, on half a cosine."""
    return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(t, 0, 1)))


def rectified(v: Array) -> Array:
    """Return h(v) = clip(sigmoid(v) (zeta - gamma) + gamma, 0, 1)."""
    return jnp.clip(jax.nn.sigmoid(v) * (ZETA - GAMMA) + GAMMA, 0, 1)


def initial(w: Array, scale: Array) -> Array:
    """Return v with floor(w / s) + h(v) = w / s."""
    fraction = divide(w, scale) - jnp.floor(divide(w, scale))
    return -jnp.log((ZETA - GAMMA) / (fraction - GAMMA) - 1)


def soft(w: Array, v: Array, scale: Array, grid: Integer) -> Array:
    """Return the weights while they are learned."""
    return scale * jnp.clip(jnp.floor(divide(w, scale)) + rectified(v), grid.qmin, grid.qmax)


def hard(w: Array, v: Array, scale: Array, grid: Integer) -> Array:
    """Return the weights at the end: up where h is at least a half."""
    return scale * jnp.clip(jnp.floor(divide(w, scale)) + (v >= 0), grid.qmin, grid.qmax)


def regularizer(v: Array, beta: Array) -> Array:
    """Return the sum of 1 - |2 h - 1|^beta, which is 0 where all h are 0 or 1."""
    return jnp.sum(1 - jnp.abs(2 * rectified(v) - 1) ** beta)
