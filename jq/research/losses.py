"""Losses of a quantized network's outputs against the float one's, and random roots of their Hessians."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jq.arithmetic.losses import BY_NAME, classes_axis
from jq.errors import ModelError
from jq.graph import Graph
from jq.ops.kinds import is_softmax

Array = Any
Outputs = Mapping[str, Array]
Loss = Literal["kl", "mse", "cosine", "top1"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
CURVED: tuple[Loss, ...] = ("kl", "mse", "cosine")  # those with a second derivative

_LEAST = 1e-7  # probability that a logarithm is taken of


def scores(graph: Graph) -> Callable[[Outputs], dict[str, Array]]:
    """Return a function from outputs to the scores among them, those that are floats; logarithms of a Softmax's."""
    soft = {o for n in graph.nodes if is_softmax(n) for o in n.outputs}

    def of(outputs: Outputs) -> dict[str, Array]:
        floats = {k: v for k, v in outputs.items() if jnp.issubdtype(v.dtype, jnp.floating)}
        if not floats:
            raise ModelError("the model has no output of floats, so there is no loss")
        return {k: jnp.log(jnp.maximum(v, _LEAST)) if k in soft else v for k, v in floats.items()}

    return of


def losses(reference: Outputs, outputs: Outputs) -> dict[str, Array]:
    """Return the losses (see `jq.arithmetic.losses`) of one sample's scores against the float network's, means over outputs.

    >>> z = {"y": jnp.array([[0.0, 1.0]])}
    >>> {k: round(float(v), 4) for k, v in losses(z, {"y": jnp.array([[1.0, 0.0]])}).items()}
    {'kl': 0.4621, 'mse': 1.0, 'cosine': 1.0, 'top1': 1.0}
    """
    pairs = [(reference[k].astype(jnp.float32), outputs[k].astype(jnp.float32)) for k in reference]
    return {name: jnp.mean(jnp.stack([loss(z, y) for z, y in pairs])) for name, loss in BY_NAME.items()}


def probe(loss: Loss, z: Outputs, key: Array) -> dict[str, Array]:
    """Return a random v with E[(v'd)^2] = d'Hd, where H is the loss's Hessian at the scores z of one sample.

    The loss of scores z + d is d'Hd / 2 to second order. v is a root of H times random signs. H is 2 / n for mse, the
    projection off z over |z|^2 for cosine, and diag(p) - pp' for kl: with s = sqrt(p), diag(s) (1 - ss') diag(s). Of the
    roots of the projection the one that reflects s to the most likely class has as columns, nearly, what each other class
    takes from that, and random signs add the less noise the more one of them outweighs the others.
    """

    def of(i: int, x: Array) -> Array:
        r = jax.random.rademacher(jax.random.fold_in(key, i), x.shape, jnp.float32)
        if loss == "mse":
            return r * math.sqrt(2 / x.size)
        if loss == "cosine":
            square = jnp.sum(x * x)
            return jnp.where(square > 0, (r - x * (jnp.sum(x * r) / square)) / jnp.sqrt(square), 0)
        axis = classes_axis(x)
        s = jnp.sqrt(jax.nn.softmax(x, axis))
        likely = jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], axis=axis)
        r, w = jnp.where(likely, 0, r), s - likely
        square = jnp.sum(w * w, axis, keepdims=True)
        v = s * (r - jnp.where(square > 0, 2 * w * (jnp.sum(w * r, axis, keepdims=True) / square), 0))
        return v * math.sqrt(x.shape[axis] / x.size)

    return {k: of(i, v.astype(jnp.float32)).astype(v.dtype) / math.sqrt(len(z)) for i, (k, v) in enumerate(z.items())}
