"""Means of what a layer gives after its activation, in both networks, and the bias that makes them alike.

Noise before a ReLU makes its mean larger, which a bias that only makes the mean before it right would leave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic.layout import channels_first, channels_last
from jq.graph import Graph, Node, Value
from jq.plan.placement import absorbed

Array = Any
Reading = Callable[[Graph], Callable[[Mapping[str, Array]], Mapping[str, Array]]]  # of a graph, as a function
_FLAT = 0.02  # share of a channel that passes its activation, below which its mean says little of the bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Means:
    """Sums by channel of a tensor, and of how they rise with the bias."""

    total: Array
    count: Array
    slope: Array | None


def means(reading: Reading, graph: Graph, layer: int, inputs: Mapping[str, Array], valid: Array) -> Means:
    """The means of what the node at an index gives after its activation, over samples."""
    node = graph.nodes[layer]
    (raw,), after = node.outputs, activation(graph, node)
    first, activated, (output,) = reading(graph.replace(outputs=(Value(raw),))), reading(after), after.output_names
    z = jax.vmap(lambda x: channels_last(first(x)[raw]))(dict(inputs))

    def shifted(off: Array) -> Array:
        y = jax.vmap(lambda z: activated({raw: channels_first(z + off)})[output])(z)
        return channels_last(y, 2)

    zero = jnp.zeros(z.shape[-1])
    y, slope = jax.jvp(shifted, (zero,), (jnp.ones_like(zero),))
    weights = jnp.repeat(valid.astype(y.dtype), y[0].size // y.shape[-1])
    # Products with ones take less than sums, into which XLA draws the activation.
    total, rise = (weights @ a.reshape(-1, a.shape[-1]) for a in (y, slope))
    return Means(total, jnp.sum(weights), rise)


def activation(graph: Graph, node: Node) -> Graph:
    """From the output of a node to that of the activation that takes it, if one does."""
    inner, nodes, name = absorbed(graph), [], node.outputs[0]
    while name in inner and inner[name].outputs:
        nodes.append(inner[name])
        name = inner[name].outputs[0]
    return graph.replace(nodes=tuple(nodes), inputs=(Value(node.outputs[0]),), outputs=(Value(name),))


def fitted(bias: Array, wanted: Means, quantized: Means) -> np.ndarray:
    """The bias after a step of Newton's method towards the wanted mean."""
    wanted, quantized, bias = jax.tree.map(np.asarray, (wanted, quantized, bias))
    count = np.maximum(quantized.count, 1)
    off, slope = (wanted.total - quantized.total) / count, quantized.slope / count
    change = np.where(slope > _FLAT, off / np.maximum(slope, _FLAT), 0)
    return bias + change.reshape(bias.shape).astype(np.float32)
