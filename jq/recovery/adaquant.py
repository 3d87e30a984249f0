"""AdaQuant: learn the weights themselves, through their rounding.

Hubara et al., Improving Post Training Neural Quantization: Layer-wise Calibration and Integer Programming,
arXiv:2006.10518. The straight-through estimator lets the gradient pass the rounding, so that a weight may go to any
code, not only to the two beside it. Steps are counted in codes, so that one learning rate serves all layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jq.plan import QParams
from jq.recovery.quadratic_form import Form
from jq.recovery.rounding import along_columns, nearest

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaQuant:
    """Weights learned from the quadratic form of a layer's error. A pytree of numbers, as AdaRound is."""

    steps: int = 75
    learning_rate: float = 0.02  # codes per step, at first

    def __call__(self, columns: Array, qparams: QParams, form: Form) -> Array:
        """The weights (groups, K, outputs) of least error among all steps, rounded."""
        scale = along_columns(qparams, columns)
        adam = optax.scale_by_adam()

        def rounded(w: Array) -> Array:
            return nearest(w, qparams)

        def step(i: Array, carry: Any) -> Any:
            w, state, best, least = carry
            weights, pull = jax.vjp(rounded, w)
            error = form(weights - columns)
            best, least = jnp.where(error < least, weights, best), jnp.minimum(error, least)
            (gradient,) = pull(form.gradient(weights - columns))
            update, state = adam.update(gradient * scale, state)
            return w - scale * falling(self.learning_rate, i, self.steps) * update, state, best, least

        start = (columns, adam.init(columns), rounded(columns), jnp.float32(jnp.inf))
        w, _, best, least = jax.lax.fori_loop(0, self.steps, step, start)
        return jnp.where(form(rounded(w) - columns) < least, rounded(w), best)


def falling(rate: Array, step: Array, steps: Array) -> Array:
    """A learning rate that falls to zero on half a cosine; optax's needs the number of steps at compilation."""
    return rate * 0.5 * (1 + jnp.cos(jnp.pi * step / steps))
