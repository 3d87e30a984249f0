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
from jq.recovery.adaquant import along_columns, fake_quant_columns, falling
from jq.recovery.quadratic_form import Form

Array = Any
ZETA, GAMMA = 1.1, -0.1  # how far the sigmoid is stretched, so that it reaches 0 and 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaRound:
    """How rounding is learned from the quadratic form of a layer's error, relative to that of nearest rounding.

    As the error counts relatively, the regularizer's weight means the same for all layers. A pytree of numbers: what
    is compiled for one serves all.
    """

    steps: int = 40
    learning_rate: float = 0.1
    weight: float = 1.0  # of the regularizer's mean
    warm: float = 0.2  # share of the steps without it
    beta: tuple[float, float] = (20.0, 2.0)

    def __call__(self, columns: Array, found: QParams, form: Form) -> Array:
        """The weights (groups, K, outputs), rounded."""
        grid, scale = found.grid, along_columns(found, columns)
        assert isinstance(grid, Integer)
        plain = fake_quant_columns(found, columns)
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
        return polished(columns, hard(columns, v, scale, grid), scale, grid, form)


def polished(columns: Array, rounded: Array, scale: Array, grid: Integer, form: Form) -> Array:
    """Turn roundings over, in each column the one that makes the error least, until none does.

    With the gradient g = 2 (A D - R), a weight that moves by t changes the error by t g + t^2 A_kk: all are known at
    once, so that this takes less than the learning did and ends lower than ten times as many of its steps.
    """
    diagonal = jnp.diagonal(form.a, axis1=1, axis2=2)[:, None]  # all is (groups, outputs, K) here

    def turned(d: Array) -> Array:
        """How far each weight would move to its other neighbour."""
        to = jnp.where(d > 0, -1.0, 1.0) * step
        codes = jnp.round((w + d + to) / step)
        return jnp.where((codes >= grid.qmin) & (codes <= grid.qmax), to, 0)

    def once(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        d, gradient, i, _ = carry
        to = turned(d)
        change = to * gradient + to**2 * diagonal
        best = jnp.argmin(change, axis=-1)
        gain = jnp.take_along_axis(change, best[..., None], -1)
        move = jnp.where(gain < 0, jnp.take_along_axis(to, best[..., None], -1), 0)
        d = d + move * (jnp.arange(d.shape[-1]) == best[..., None])
        gradient = gradient + 2 * move * jax.vmap(lambda a, k: a[k])(form.a, best)
        return d, gradient, i + 1, jnp.any(gain < 0)

    w = jnp.swapaxes(columns, 1, 2)
    step = jnp.broadcast_to(jnp.swapaxes(jnp.broadcast_to(scale, columns.shape), 1, 2), w.shape)
    start = jnp.swapaxes(rounded - columns, 1, 2), jnp.swapaxes(form.gradient(rounded - columns), 1, 2), 0, True
    most = 2 * columns.shape[1]
    d, *_ = jax.lax.while_loop(lambda carry: carry[3] & (carry[2] < most), once, start)
    return jnp.round((columns + jnp.swapaxes(d, 1, 2)) / scale) * scale


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
