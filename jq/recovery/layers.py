"""Layer by layer: rounding that makes the squared error of a layer's output least, and the bias that fits it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic.formats import Integer
from jq.data.stream import concurrently
from jq.errors import Error
from jq.graph import Graph
from jq.ops.linear import LinearLayer, linear_layer
from jq.ops.table import Product
from jq.plan import Plan, QParams
from jq.readings.patterns import Pattern
from jq.recovery.parts import Unit, program
from jq.recovery.quadratic_form import Form, Means, Sums, means, sums
from jq.recovery.rounding import Rounding, compiled, nearest
from jq.recovery.walk import Site, Tensors, added

Array = Any


EXPONENTS = (0, 1, -1)  # of a weight, from the one that it has


def tune_layer(
    site: Site,
    rounding: Rounding,
    exponents: Sequence[int] = (0,),
    allowed: Callable[[Site], bool] = lambda site: True,
) -> tuple[Site, float, float]:
    """Return the site with its one layer rounded, and its bias what makes the mean of the output right.

    The layer's inputs are those of the quantized network, so that weights and bias make up for what they lost, as far as
    all of the data agree on that. A rounding that is no better than the nearest is not taken. Of several `exponents`,
    relative to the weight's own, the one of least error wins whose plan is `allowed`, for each channel with a scale.
    """
    pattern, index = site.unit.pattern, site.unit.layer
    layer, product = _product(pattern.graph, index)
    node, weight, bias = layer.node, layer.weight, layer.bias
    step = functools.partial(_sums, pattern, index, site.samples, site.given)
    total = added(concurrently(step, site.floats, site.codes, site.valid))
    w, qparams = np.asarray(site.given[weight]), site.plan.weights[weight]
    factors = np.exp2(np.asarray(exponents, np.float32))
    tried = _solved(compiled(rounding), product.columns(w, node.attrs), qparams, total, factors)
    site, best = _planned(site, weight, factors, np.asarray(tried.by_output), allowed)
    rounded, shift = (_selected(np.asarray(a), best) for a in (tried.columns, tried.shift))
    site = site.replace(params=site.params | {weight: product.weights(rounded, w.shape, node.attrs)})
    if bias is not None and (given := np.asarray(site.given[bias])).size == shift.size:
        site = site.replace(params=site.params | {bias: given + shift.reshape(given.shape)})
    return site, float(tried.before), float(_selected(np.asarray(tried.by_output), best).sum() + tried.constant)


def _planned(
    site: Site, weight: str, factors: np.ndarray, errors: np.ndarray, allowed: Callable[[Site], bool]
) -> tuple[Site, np.ndarray]:
    """The site with the factor of the weight's scale that loses least, and its index, or one for each channel."""
    qparams = site.plan.weights[weight]

    def scaled(factor: np.ndarray) -> Site:
        scale = np.float32(np.asarray(qparams.scale) * factor)
        return site.replace(plan=site.plan.replace({weight: dataclasses.replace(qparams, scale=scale)}))

    if qparams.axis is not None:
        best = errors.argmin(0)
        return (scaled(factors[best].reshape(np.shape(qparams.scale))) if len(factors) > 1 else site), best
    for index in errors.sum((1, 2)).argsort(kind="stable"):
        if index == 0 or allowed(scaled(factors[index])):
            return (scaled(factors[index]) if index else site), index
    raise AssertionError("the exponent that a weight has is always allowed")


def _selected(values: np.ndarray, best: np.ndarray) -> np.ndarray:
    """The values [groups, ..., outputs] of one candidate among several, or of one for each output."""
    if not np.ndim(best):
        return values[best]
    index = best.reshape(1, best.shape[0], *(1,) * (values.ndim - 3), best.shape[1])
    return np.take_along_axis(values, index, 0)[0]


def fit_bias(site: Site) -> tuple[Site, float, float]:
    """Return the site with its one layer's weight rounded to nearest, and its bias what makes the mean of the output right."""
    pattern, index = site.unit.pattern, site.unit.layer
    layer, product = _product(pattern.graph, index)
    node, weight, bias = layer.node, layer.weight, layer.bias
    step = functools.partial(_means, pattern, index, site.samples, site.given)
    total = added(concurrently(step, site.floats, site.codes, site.valid))
    w, scale = np.asarray(site.given[weight]), site.plan.weights[weight]
    rounded, shift, before = _shifted(product.columns(w, node.attrs), scale, total)
    site = site.replace(params=site.params | {weight: product.weights(np.asarray(rounded), w.shape, node.attrs)})
    if bias is None or (given := np.asarray(site.given[bias])).size != shift.size:
        return site, float(before), float(before)
    return site.replace(params=site.params | {bias: given + np.asarray(shift).reshape(given.shape)}), float(before), 0.0


def can_round(unit: Unit, plan: Plan) -> bool:
    """Whether a unit is one layer that is a sum of products, with symmetric integers for weights in its plan."""
    graph = unit.pattern.graph
    layer = None if unit.layer is None else linear_layer(graph, graph.nodes[unit.layer])
    if layer is None or layer.product is None:
        return False
    qparams = plan.weights[layer.weight]
    codes = qparams.coded is None and isinstance(qparams.grid, Integer) and not np.any(qparams.zero_point)
    return codes and layer.node.inputs[0] in {v.name for v in graph.inputs}


def _product(graph: Graph, index: int | None) -> tuple[LinearLayer, Product]:
    """A node's view as a linear layer and as a matrix product."""
    layer = None if index is None else linear_layer(graph, graph.nodes[index])
    if layer is None or layer.product is None:
        raise Error(f"a rounding needs a unit with exactly one linear layer; got {[n.label for n in graph.nodes]}")
    return layer, layer.product


@program(3)
def _sums(
    pattern: Pattern, index: int, samples: int, params: Mapping[str, Array], floats: Tensors, codes: Tensors,
    valid: Array,
) -> Sums:  # fmt: skip
    """The sums of one chunk for the form of a layer that reads an input of the unit."""
    return sums(*_seen(pattern, index, samples, params, floats, codes, valid))


@program(3)
def _means(
    pattern: Pattern, index: int, samples: int, params: Mapping[str, Array], floats: Tensors, codes: Tensors,
    valid: Array,
) -> Means:  # fmt: skip
    """The means of one chunk for the bias of a layer that reads an input of the unit."""
    return means(*_seen(pattern, index, samples, params, floats, codes, valid))


def _seen(
    pattern: Pattern, index: int, samples: int, params: Mapping[str, Array], floats: Tensors, codes: Tensors,
    valid: Array,
) -> tuple[Product, Mapping[str, Any], Array, Array, Array, Array, int]:  # fmt: skip
    """A layer with one batch of the images that it reads, and the errors of these.

    A layer is linear: its outputs are off by what it makes of its inputs' difference.
    """
    layer, product = _product(pattern.graph, index)
    x = layer.node.inputs[0]
    seen, wanted = (jax.lax.collapse(tensors[x].value, 0, 2) for tensors in (codes, floats))  # one batch of images
    copies = len(seen) // len(valid)
    of_images = jnp.repeat(valid, copies)
    return product, layer.node.attrs, seen, wanted - seen, params[layer.weight], of_images, samples * copies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RoundedWays:
    """A layer rounded with each of several scales, which come first; by group and output."""

    columns: Array  # (scales, groups, K, outputs)
    shift: Array  # (scales, groups, 1, outputs): what the best bias is off
    by_output: Array  # (scales, groups, outputs): the errors, each less a part of the constant
    before: Array  # the error of the nearest rounding with the first scale
    constant: Array


@program(0)
def _solved(rounding: Rounding, columns: Array, qparams: QParams, total: Sums, factors: Array) -> RoundedWays:
    """Columns rounded with scales times factors.

    Compiled for shapes, not for patterns or numbers: this takes longer to compile than all else of a unit.
    """
    form = Form.of(total)

    def tried(factor: Array) -> tuple[Array, Array, Array, Array]:
        scaled = dataclasses.replace(qparams, scale=jnp.asarray(qparams.scale) * factor)
        plain, rounded = nearest(columns, scaled, form), rounding(columns, scaled, form)
        before = form(plain - columns)
        rounded = jnp.where(form(rounded - columns) < before, rounded, plain)
        return rounded, form.shift(rounded - columns), form.by_output(rounded - columns), before

    rounded, shift, errors, before = jax.lax.map(tried, factors)
    return RoundedWays(rounded, shift, errors, before[0], form.c)


@program(0)
def _shifted(columns: Array, qparams: QParams, total: Means) -> tuple[Array, Array, Array]:
    """Columns rounded to nearest, what the best bias for them is off, and the mean square of that."""
    rounded = nearest(columns, qparams)
    shift = total.shift(rounded - columns)
    return rounded, shift, jnp.mean(shift**2)
