"""Roundings: functions of a layer's weights, their quantization and the quadratic form of the layer's error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jq.arithmetic.formats import Integer
from jq.arithmetic.numerics import divide
from jq.errors import ConfigError
from jq.plan import QParams
from jq.recovery.quadratic_form import Form

Array = Any
# Columns of weights (groups, K, outputs), how they are quantized, and the form of their error, to rounded columns. A
# function, or a registered dataclass that is called, whose fields are then arguments of what is compiled.
Rounding = Callable[[Array, QParams, Form], Array]
Refinement = Callable[[Array, QParams, Form, Array], Array]  # the same, from columns that are rounded already


def nearest(columns: Array, qparams: QParams, form: Form | None = None) -> Array:
    """Round each weight to the nearest code; codes are symmetric."""
    scale = along_columns(qparams, columns)
    return dataclasses.replace(qparams, scale=scale, zero_point=jnp.int32(0), axis=None).fake_quant(columns)


def codes_of(weights: Array, scale: Array, grid: Integer) -> Array:
    """The values of the nearest codes of weights (groups, outputs) of one input, by a scale along columns."""
    scale = jnp.broadcast_to(scale, (weights.shape[0], 1, weights.shape[1]))[:, 0]
    return jnp.clip(jnp.round(divide(weights, scale)), grid.qmin, grid.qmax) * scale


def along_columns(qparams: QParams, columns: Array) -> Array:
    """A weight's scale, one or one per output channel, in a shape that broadcasts against columns."""
    scale = jnp.asarray(qparams.scale)
    return scale if qparams.axis is None else scale.reshape(columns.shape[0], 1, columns.shape[2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Then:
    """A rounding, and another one that starts from its result.

    >>> from jq.recovery.adaround import AdaRound
    >>> from jq.recovery.descent import CoordinateDescent
    >>> Then(AdaRound(steps=20), CoordinateDescent()).first.steps
    20
    """

    first: Rounding
    second: Refinement

    def __call__(self, columns: Array, qparams: QParams, form: Form) -> Array:
        """The columns rounded by the first, then refined by the second."""
        return self.second(columns, qparams, form, self.first(columns, qparams, form))


def integer_grid(qparams: QParams) -> Integer:
    """The codes of a weight, between two of which a rounding decides; a ConfigError where it has none."""
    if not isinstance(qparams.grid, Integer):
        raise ConfigError(f"learned rounding needs integer codes; got {qparams.grid}; use finetune='adaquant'")
    return qparams.grid


def compiled(rounding: Rounding) -> Rounding:
    """A rounding as a pytree of numbers: functions in it become static, so that it can be an argument of `jit`."""
    return jax.tree.map(lambda leaf: jax.tree_util.Partial(leaf) if callable(leaf) else leaf, rounding)
