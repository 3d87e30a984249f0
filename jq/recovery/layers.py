"""Layer by layer: rounding that makes the squared error of a layer's output least, and the bias that fits it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jq.arithmetic.formats import Integer
from jq.data.stream import concurrently
from jq.graph import Node
from jq.ops.linear import linear_layer
from jq.plan import Plan, QParams
from jq.recovery.means import fitted
from jq.recovery.parts import Pattern, Unit, program
from jq.recovery.quadratic_form import Form, Sums, sums
from jq.recovery.rounding import Rounding, compiled, nearest
from jq.recovery.walk import Site, Tensors, added

Array = Any
_FEEDS, _PIXELS = 32, 1 << 16  # at least so many, of what an image's mean is taken


def tune_layer(site: Site, rounding: Rounding) -> tuple[Site, float, float]:
    """Return the site with its one layer rounded, and its bias what makes the mean of the output right.

    A rounding that is no better than the nearest is not taken.
    """
    pattern, graph = site.unit.pattern, site.unit.pattern.graph
    index = site.unit.layer
    assert index is not None
    node = graph.nodes[index]
    layer = linear_layer(graph, node)
    assert layer is not None and layer.product is not None
    weight, bias, product = layer.weight, layer.bias, layer.product
    step = functools.partial(_sums, pattern, index, site.samples, site.given)
    total = added(concurrently(step, site.floats, site.codes, site.valid))
    w, scale = np.asarray(site.given[weight]), site.plan.weights[weight]
    rounded, shift, before, after = _solved(compiled(rounding), product.columns(w, node.attrs), scale, total)
    site = site.replace(params=site.params | {weight: product.weights(np.asarray(rounded), w.shape, node.attrs)})
    if bias is not None and site.given[bias].size == shift.size:
        site = site.replace(
            params=site.params
            | {bias: np.asarray(site.given[bias]) + np.asarray(shift).reshape(site.given[bias].shape)}
        )
        if site.unit.watched is not None:
            some = slice(_enough(site, node))
            fit = fitted(site.params[bias], added(site.means[some]), site.quantized_means(some))
            site = site.replace(params=site.params | {bias: fit})
    return site, float(before), float(after)


def _enough(site: Site, node: Node) -> int:
    """How many chunks are enough for means: both networks' are of the same data, so their difference needs few."""
    _, *feed = site.codes[0][node.inputs[0]].array.shape
    pixels = math.prod(feed) // max(1, feed[1] if len(feed) == 3 else feed[-1])
    feeds = max(_FEEDS, -(-_PIXELS // pixels))
    return -(-feeds // len(site.valid[0]))


def can_round(unit: Unit, plan: Plan) -> bool:
    """Whether a unit is one layer that is a sum of products, with symmetric integers for weights in its plan."""
    if unit.layer is None:
        return False
    graph = unit.pattern.graph
    node = graph.nodes[unit.layer]
    layer = linear_layer(graph, node)
    if layer is None or layer.product is None:
        return False
    qparams = plan.weights[layer.weight]
    codes = qparams.coded is None and isinstance(qparams.grid, Integer) and not np.any(qparams.zero_point)
    return codes and node.inputs[0] in {v.name for v in graph.inputs}


@program(3)
def _sums(
    pattern: Pattern, index: int, feeds: int, params: Mapping[str, Array], floats: Tensors, codes: Tensors, valid: Array
) -> Sums:
    """The sums of one chunk for the form of a layer that reads an input of the unit.

    A layer is linear: its outputs are off by what it makes of its inputs' difference.
    """
    node, graph = pattern.graph.nodes[index], pattern.graph
    layer = linear_layer(graph, node)
    assert layer is not None and layer.product is not None
    seen, wanted = _images(codes[node.inputs[0]].value), _images(floats[node.inputs[0]].value)
    copies = len(seen) // len(valid)
    of_images = jnp.repeat(valid, copies)
    return sums(layer.product, node.attrs, seen, wanted - seen, params[layer.weight], of_images, feeds * copies)


def _images(chunk: Array) -> Array:
    """(feeds, batch, ...) as one batch."""
    return chunk.reshape(chunk.shape[0] * chunk.shape[1], *chunk.shape[2:])


@program(0)
def _solved(rounding: Rounding, columns: Array, qparams: QParams, total: Sums) -> tuple[Array, Array, Array, Array]:
    """Columns rounded, what the best bias for them is off, and the error of the nearest rounding and of this.

    Compiled for shapes, not for patterns or numbers: this takes longer to compile than all else of a unit.
    """
    form = Form.of(total)
    plain, rounded = nearest(columns, qparams, form), rounding(columns, qparams, form)
    before, after = form(plain - columns), form(rounded - columns)
    rounded = jnp.where(after < before, rounded, plain)
    return rounded, form.shift(rounded - columns), before, jnp.minimum(before, after)
