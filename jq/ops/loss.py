"""Losses, and the training steps of the preview domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jq.errors import ModelError
from jq.ops.table import Array, op


@op("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    input: Array, target: Array, weight: Array | None = None, *, ignore_index: int | None = None, reduction: str
) -> Array:
    """-weight[target] * input[n, target, ...]; the mean divides by the sum of the weights."""
    if reduction not in ("none", "sum", "mean"):
        raise ModelError(f"reduction is {reduction!r}; it must be 'none', 'sum' or 'mean'")
    ignored = jnp.zeros(target.shape, bool) if ignore_index is None else target == ignore_index
    index = jnp.where(ignored, 0, target)  # an ignored index may lie outside of the classes
    factor = jnp.where(ignored, 0, jnp.ones((), input.dtype) if weight is None else weight[index])
    loss = -factor * jnp.take_along_axis(input, index[:, None], axis=1)[:, 0]
    if reduction == "none":
        return loss
    return jnp.sum(loss) if reduction == "sum" else jnp.sum(loss) / jnp.sum(factor)


@op("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    scores: Array, labels: Array, weights: Array | None = None, *, ignore_index: int | None = None, reduction: str
) -> tuple[Array, Array]:
    log_prob = jax.nn.log_softmax(scores, axis=1)
    loss = negative_log_likelihood_loss(log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return loss, log_prob


_TRAINING = "ai.onnx.preview.training"


def _each(step: Callable[..., tuple[Array, ...]], kinds: int, tensors: Sequence[Array]) -> tuple[Array, ...]:
    """Apply a step to every tensor. Operands and results lie grouped by kind: all values, all gradients, ..."""
    count = len(tensors) // kinds
    results = [step(*tensors[i::count]) for i in range(count)]
    return tuple(r.astype(tensors[0].dtype) for kind in zip(*results, strict=True) for r in kind)


@op("Adagrad", domain=_TRAINING)
def adagrad(r: Array, t: Array, *inputs: Array, decay_factor: float, epsilon: float, norm_coefficient: float) -> Any:
    rate = r / (1 + t.astype(r.dtype) * decay_factor)

    def step(x: Array, g: Array, h: Array) -> tuple[Array, ...]:
        g = norm_coefficient * x + g
        h = h + g * g
        return x - rate * g / (jnp.sqrt(h) + epsilon), h

    return _each(step, 3, inputs)


@op("Adam", domain=_TRAINING)
def adam(
    r: Array, t: Array, *inputs: Array,
    alpha: float, beta: float, epsilon: float, norm_coefficient: float, norm_coefficient_post: float,
) -> Any:  # fmt: skip
    t = t.astype(r.dtype)
    rate = jnp.where(t > 0, r * jnp.sqrt(1 - beta**t) / (1 - alpha**t), r)

    def step(x: Array, g: Array, v: Array, h: Array) -> tuple[Array, ...]:
        g = norm_coefficient * x + g
        v = alpha * v + (1 - alpha) * g
        h = beta * h + (1 - beta) * g * g
        return (1 - norm_coefficient_post) * (x - rate * v / (jnp.sqrt(h) + epsilon)), v, h

    return _each(step, 4, inputs)


@op("Momentum", domain=_TRAINING)
def momentum(r: Array, t: Array, *inputs: Array, alpha: float, beta: float, mode: str, norm_coefficient: float) -> Any:
    def step(x: Array, g: Array, v: Array) -> tuple[Array, ...]:
        g = norm_coefficient * x + g
        v = alpha * v + jnp.where(t > 0, beta, 1.0) * g
        return x - r * (g + alpha * v if mode == "nesterov" else v), v

    return _each(step, 3, inputs)
