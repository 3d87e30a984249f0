"""FlexRound: learn how far each weight is divided before it is rounded.

Lee et al., FlexRound: Learnable Rounding based on Element-wise Division, arXiv:2306.00317. A weight becomes
s rint(w / (s exp(v) exp(u))), with v of each weight and u of each output channel, so that large weights move further than
small ones. The scale s of the codes stays: it is a power of two.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jq.plan import QParams
from jq.recovery.adaquant import falling
from jq.recovery.quadratic_form import Form
from jq.recovery.rounding import nearest

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlexRound:
    """Divisions of weights, learned from the quadratic form of a layer's error. A pytree of numbers, as AdaRound is."""

    steps: int = 75
    learning_rate: float = 0.01  # of the logarithms, at first

    def __call__(self, columns: Array, qparams: QParams, form: Form) -> Array:
        """The weights (groups, K, outputs) of least error among all steps, rounded."""
        adam = optax.scale_by_adam()
        least_error = jnp.maximum(form(nearest(columns, qparams) - columns), jnp.finfo(jnp.float32).tiny)

        def rounded(logs: tuple[Array, Array]) -> Array:
            return nearest(columns * jnp.exp(-logs[0] - logs[1]), qparams)

        def step(i: Array, carry: Any) -> Any:
            logs, state, best, least = carry
            weights, pull = jax.vjp(rounded, logs)
            error = form(weights - columns)
            best, least = jnp.where(error < least, weights, best), jnp.minimum(error, least)
            update, state = adam.update(*pull(form.gradient(weights - columns) / least_error), state)
            rate = falling(self.learning_rate, i, self.steps)
            return jax.tree.map(lambda v, u: v - rate * u, logs, update), state, best, least

        logs = jnp.zeros_like(columns), jnp.zeros_like(columns[:, :1])
        start = logs, adam.init(logs), nearest(columns, qparams), jnp.float32(jnp.inf)
        logs, _, best, least = jax.lax.fori_loop(0, self.steps, step, start)
        return jnp.where(form(rounded(logs) - columns) < least, rounded(logs), best)
