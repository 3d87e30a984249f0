"""Losses of a quantized network's outputs against the float one's, and random roots of their Hessians."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jq.arithmetic.losses import BY_NAME, bernoulli_kl, classes_axis, kl, relative_mse
from jq.errors import ModelError
from jq.graph import Graph
from jq.ops.kinds import is_concat, is_sigmoid, is_softmax, is_transpose

Array = Any
Outputs = Mapping[str, Array]
Loss = Literal["kl", "mse", "cosine", "top1"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
Measure = Callable[[Outputs, Outputs], dict[str, Array]]  # errors by name, from reference outputs and outputs
CURVED: tuple[Loss, ...] = ("kl", "mse", "cosine")  # those with a second derivative

_LEAST = 1e-7  # probability that a logarithm is taken of


def scores(graph: Graph) -> Callable[[Outputs], dict[str, Array]]:
    """Return a function from outputs to the scores among them, those that are floats; logarithms of a Softmax's."""
    soft = {o for n in graph.nodes if is_softmax(n) for o in n.outputs}

    def of(outputs: Outputs) -> dict[str, Array]:
        floats = {k: v for k, v in outputs.items() if jnp.issubdtype(v.dtype, jnp.floating)}
        if not floats:
            raise ModelError("the model has no float output, so there is no loss")
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


def score_losses(graph: Graph) -> Measure:
    """Return the losses of a graph's scores as a function of a sample's reference outputs and outputs."""
    read = scores(graph)
    return lambda z, y: losses(read(z), read(y))


def divergences(graph: Graph, classes: bool = False) -> Measure:
    """Return a function from a sample's reference outputs and outputs to the error of each part of them, by name.

    A part is an operand of the Concat that makes an output, so that a detector's scores count apart from its boxes; what is
    made otherwise is one part. The error is the KL divergence of what a Softmax gives (with `classes`, of the softmax of
    all outputs), that of each element of what a Sigmoid gives, else the squared error relative to the power. What is joined to
    what a Sigmoid gives counts, place by place, by the largest probability there: of boxes, those where something is.
    """
    if classes:
        read = scores(graph)
        return lambda z, y: {"kl": losses(read(z), read(y))["kl"]}
    parts = {v.name: parts_of(graph, v.name) for v in graph.outputs}
    events = {o for node in graph.nodes if is_sigmoid(node) for o in node.outputs}  # probabilities of one event each

    def of(z: Outputs, y: Outputs) -> dict[str, Array]:
        errors: dict[str, Array] = {}
        for output in (k for k, v in z.items() if jnp.issubdtype(v.dtype, jnp.floating)):
            axis, cuts, names = parts[output]
            pieces = [jnp.split(v[output].astype(jnp.float32), cuts, axis) for v in (z, y)]
            likely = [jnp.max(a, axis, keepdims=True) for n, a in zip(names, pieces[0], strict=True) if n in events]
            weights = functools.reduce(jnp.maximum, likely) if likely else jnp.ones(())
            errors |= {n: _distance(graph, n)(a, b, weights) for n, a, b in zip(names, *pieces, strict=True)}
        return errors

    return of


def parts_of(graph: Graph, output: str) -> tuple[int, list[int], list[str]]:
    """Return where the Concat behind an output joins its operands: the axis, the places between them, and their names.

    Boxes and scores of a detector are such operands; what is made otherwise is one part. A Transpose may stand between.
    """
    node, rank = graph.producer.get(output), len(graph.values[output].shape or ())
    order = range(rank)
    if node is not None and is_transpose(node):
        order, node = node.attrs.get("perm") or order[::-1], graph.producer.get(node.inputs[0])
    whole: tuple[int, list[int], list[str]] = 0, [], [output]
    if node is None or not is_concat(node) or len(set(node.inputs)) < len(node.inputs):
        return whole
    axis = int(node.attrs["axis"])
    sizes = [(graph.values[k].shape or ())[axis:][:1] if k in graph.values else () for k in node.inputs]
    known = [size[0] for size in sizes if size and isinstance(size[0], int)]
    if len(known) < len(sizes):
        return whole
    return list(order).index(axis % rank), list(itertools.accumulate(known))[:-1], list(node.inputs)


def _distance(graph: Graph, name: str) -> Callable[[Array, Array, Array], Array]:
    """The natural distance of a tensor's values, by what makes it; squares count by their weights."""
    node = graph.producer.get(name)
    if node is not None and is_softmax(node):
        return lambda z, y, _: kl(*(jnp.log(jnp.maximum(v, _LEAST)) for v in (z, y)))
    return (lambda z, y, _: bernoulli_kl(z, y)) if node is not None and is_sigmoid(node) else relative_mse


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
