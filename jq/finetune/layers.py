"""Layer by layer: rounding that makes the squared error of a layer's output least, and the bias that fits it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.fake import fake_quant
from jq.finetune.adaquant import fake_quant_columns
from jq.finetune.gram import Form, Sums, sums
from jq.finetune.units import Pattern, bias_of, linear_of, program, weight_of
from jq.finetune.walk import Site, Tensors, added, over_chunks, values
from jq.formats import Integer
from jq.graph import Graph, Node, Value
from jq.placement import absorbed
from jq.plan import Plan, QParams
from jq.trace import AnyOrder, trace

Array = Any
Rounding = Callable[[Array, QParams, Form], Array]  # of columns of weights, as they are quantized, and their error
_BIAS_STEPS = 2  # of Newton's method, for the bias with which an activation's mean is right
_FEEDS, _PIXELS = 32, 1 << 17  # at least so many, of what an image's mean is taken
_FLAT = 0.02  # share of a channel that passes its activation, below which its mean says little of the bias


def nearest(columns: Array, found: QParams, form: Form) -> Array:
    """Round each weight to the nearest code."""
    return fake_quant_columns(found, columns)


def tune_layer(site: Site, rounding: Rounding) -> tuple[Site, float, float]:
    """Return the site with its one layer rounded, and its bias what makes the mean of the output right.

    A rounding that is no better than the nearest is not taken.
    """
    pattern, graph = site.unit.pattern, site.unit.pattern.graph
    (layer,) = site.unit.layers
    index = site.unit.nodes.index(layer)
    node = graph.nodes[index]
    weight, bias = weight_of(graph, node), bias_of(graph, node)
    assert weight is not None
    step = functools.partial(_sums, pattern, index, sum(map(len, site.valid)), site.given)
    total = added(over_chunks(step, site.floats, site.codes, site.valid))
    linear, w, found = linear_of(graph, node), site.given[weight], site.plan.weights[weight]
    assert linear is not None
    columns = linear.columns(w, node.attrs)
    rounded, shift, before, after = _solved(rounding, columns, found, Form.of(total))
    changed = {weight: linear.weights(rounded, w.shape, node.attrs)}
    fits = bias is not None and site.given[bias].size == shift.size
    if bias is not None and fits:
        changed[bias] = site.given[bias] + shift.reshape(site.given[bias].shape)
    site = site.replace(params=site.params | changed)
    if bias is not None and fits:
        some = slice(_enough(site, node))
        step = functools.partial(_float_means, pattern, index, site.given)
        wanted = _mean(over_chunks(step, site.floats[some], site.valid[some]))
        for _ in range(_BIAS_STEPS):
            step = functools.partial(_means, pattern, index, site.params, site.plan)
            mean, slope = _mean(over_chunks(step, site.codes[some], site.valid[some]))
            fitted = _newton(site.params[bias], wanted[0] - mean, slope)
            site = site.replace(params=site.params | {bias: fitted})
    return site, float(before), float(after)


def _enough(site: Site, node: Node) -> int:
    """How many chunks are enough for means: both networks' are of the same data, so their difference needs few."""
    feed = site.codes[0][node.inputs[0]].array[0]
    pixels = feed.size // max(1, feed.shape[1] if feed.ndim > 2 else feed.shape[-1])
    feeds = max(_FEEDS, -(-_PIXELS // pixels))
    return -(-feeds // len(site.valid[0]))


def can_round(site: Site) -> bool:
    """Whether a unit is one layer that is a sum of products, with symmetric integers for weights."""
    if len(site.unit.layers) != 1:
        return False
    graph = site.unit.pattern.graph
    node = graph.nodes[site.unit.nodes.index(site.unit.layers[0])]
    found = site.plan.weights[str(weight_of(graph, node))]
    codes = found.coded is None and isinstance(found.grid, Integer) and not np.any(found.zero_point)
    reads = node.inputs[0] in {v.name for v in graph.inputs}
    return linear_of(graph, node) is not None and codes and reads


@program(3)
def _sums(
    pattern: Pattern, index: int, feeds: int, params: Mapping[str, Array], floats: Tensors, codes: Tensors, valid: Array
) -> Sums:
    """What a chunk adds to the form of a layer that reads an input of the unit.

    A layer is linear: its outputs are off by what it makes of its inputs' difference.
    """
    node, graph = pattern.graph.nodes[index], pattern.graph
    linear, weight, bias = linear_of(graph, node), weight_of(graph, node), bias_of(graph, node)
    assert linear is not None and weight is not None
    x = node.inputs[0]
    read, wanted = codes[x].value, floats[x].value
    seen = _images(read)
    alone = graph.replace(nodes=(node,), inputs=(Value(x),), outputs=(Value(node.outputs[0]),))
    zero = {} if bias is None else {bias: jnp.zeros_like(params[bias])}
    e = _images(jax.vmap(lambda off: trace(alone)({**params, **zero}, {x: off})[node.outputs[0]])(wanted - read))
    copies = len(seen) // len(valid)
    return sums(linear, node.attrs, seen, params[weight], e, jnp.repeat(valid.astype(e.dtype), copies), feeds * copies)


def _images(chunk: Array) -> Array:
    """(feeds, batch, ...) as one batch."""
    return chunk.reshape(chunk.shape[0] * chunk.shape[1], *chunk.shape[2:])


@functools.partial(jax.jit, static_argnums=0)
def _solved(rounding: Rounding, columns: Array, found: QParams, form: Form) -> tuple[Array, Array, Array, Array]:
    """Columns rounded, what the best bias for them is off, and the error of the nearest rounding and of this.

    Compiled for shapes, not for patterns: this takes longer to compile than all else of a unit.
    """
    plain, rounded = nearest(columns, found, form), rounding(columns, found, form)
    before, after = form(plain - columns), form(rounded - columns)
    rounded = jnp.where(after < before, rounded, plain)
    return rounded, form.shift(rounded - columns), before, jnp.minimum(before, after)


@jax.jit
def _newton(bias: Array, off: Array, slope: Array) -> Array:
    change = jnp.where(slope > _FLAT, off / jnp.maximum(slope, _FLAT), 0)
    return bias + change.reshape(bias.shape)


def activated(graph: Graph, node: Node) -> str:
    """The output of a node, or of the activation that takes it."""
    inner, name = absorbed(graph), node.outputs[0]
    while name in inner and inner[name].outputs:
        name = inner[name].outputs[0]
    return name


def _mean(parts: Iterable[tuple[Array, ...]]) -> list[Array]:
    *found, count = added(parts)
    return [f / count for f in found]


@program(2)
def _float_means(
    pattern: Pattern, index: int, params: Mapping[str, Array], inputs: Tensors, valid: Array
) -> tuple[Array, Array]:
    """Sums by channel of what the float network's layer gives, after its activation."""
    output = activated(pattern.graph, pattern.graph.nodes[index])
    fn = trace(pattern.graph, outputs=(), taps={output: AnyOrder(_channel_sums)})
    return _weighted(jax.vmap(lambda x: fn(params, x)[1][output])(values(inputs)), valid)


@program(2)
def _means(
    pattern: Pattern, index: int, params: Mapping[str, Array], plan: Plan, inputs: Tensors, valid: Array
) -> tuple[Array, Array, Array]:
    """Sums by channel of what the quantized layer gives after its activation, and how they rise with the bias.

    Noise before a ReLU makes its mean larger, which a bias that only makes the mean before it right would leave.
    """
    node = pattern.graph.nodes[index]
    output, bias = activated(pattern.graph, node), bias_of(pattern.graph, node)
    assert bias is not None
    quantized = fake_quant(pattern.graph, taps={output: AnyOrder(_channel_sums)})
    plain = plan.replace({output: None}) if output in plan else plan

    def made(b: Array) -> tuple[Array, Array]:
        found = jax.vmap(lambda x: quantized({**params, bias: b}, plain, x)[1][output])(values(inputs))
        return _weighted(found, valid)

    (total, count), (slope, _) = jax.jvp(made, (params[bias],), (jnp.ones_like(params[bias]),))
    return total, slope, count


def _channel_sums(x: Array, last: bool) -> tuple[Array, Array]:
    """Sums of a tensor by channel, and of how many numbers each."""
    axis = x.ndim - 1 if last or x.ndim < 3 else 1
    return jnp.sum(x, tuple(i for i in range(x.ndim) if i != axis)), jnp.float32(x.size / x.shape[axis])


def _weighted(sums: tuple[Array, Array], valid: Array) -> tuple[Array, Array]:
    return valid.astype(jnp.float32) @ sums[0], valid.astype(jnp.float32) @ sums[1]
