"""Bias correction: each bias takes back the mean shift that rounding gives its output channel.

Rounding the weights changes the expected output by (Q(W) - W) E[x], as in Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction" (2019); E[x] of each input channel is what calibration measured of the float model.

Rounding between two layers changes it by Q(W) E[x' - x], where x' is the float output of the layer before, passed through
everything that is rounded since. This is small where there are many codes on both sides of zero. But SiLU, GELU and
HardSwish have a short negative tail with many values in it, which spans a few codes at most and is rounded to one side.
An offset would use the codes that a symmetric grid wastes, but it would have to be added before the one rounding of the
product, which the chip cannot do. The bias can still take back the mean of the loss exactly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic.formats import Integer
from jq.arithmetic.layout import channels_last
from jq.calibration.observed import linear_inputs
from jq.calibration.stats import Stats
from jq.config import QuantConfig
from jq.data.sources import open_source
from jq.data.stream import Stream
from jq.graph import Graph, Node
from jq.graph.edit import fresh, reading
from jq.ops.linear import LinearLayer, is_linear, linear_layer
from jq.plan import Plan, QParams
from jq.readings.data_shapes import traceable
from jq.readings.fake import fake_quant
from jq.readings.packing import pack

_TAIL = 4  # codes of a negative tail, at most, that rounding shifts
_SAMPLES = 64  # that its mean is taken of


def correct_biases(graph: Graph, plan: Plan, stats: Stats, shifts: Mapping[str, np.ndarray] | None = None) -> Graph:
    """Return the graph with the biases of Conv and Gemm corrected for the rounding of a plan's weights.

    `shifts` are the amounts that rounding adds to the channel means of inputs, as `shifts_of_tails` measures them. If zeros
    pad an image, its border sees less of the shift than is corrected. A bias that other nodes read, too, is not changed.
    """
    biases = {}
    for node in graph.nodes:
        if (shift := output_shift(graph, plan, stats, node, shifts or {})) is not None:
            bias = graph.params[node.inputs[2]]
            corrected = (bias - shift.reshape(bias.shape)).astype(bias.dtype)
            if np.isfinite(corrected).all():  # means near the end of float32 overflow
                biases[node.inputs[2]] = corrected
    return graph.with_arrays({**graph.arrays, **biases}) if biases else graph


def shifts_of_tails(graph: Graph, plan: Plan, stats: Stats, data: Any, config: QuantConfig) -> dict[str, np.ndarray]:
    """Return the mean that rounding adds to each channel of linear inputs with a short negative tail.

    If there is such an input, the data are read once more, for as many samples as the means need.
    """
    graph = traceable(graph)
    both, rounded, twins = _between_layers(graph, plan)
    tails = [t for t in linear_inputs(graph) if t in twins and _has_tail(plan, stats, t)]
    if not tails:
        return {}
    fn = fake_quant(
        both, taps={name: functools.partial(_sums, rounded.get(name)) for t in tails for name in (t, twins[t])}
    )
    stream = Stream.of(open_source(data, graph.inputs, seed=config.seed), config.batch, fn.traced(rounded))
    program = stream.folded(lambda params, sample: fn(params, rounded, sample)[1], _added)
    some = itertools.islice(stream.batches(), -(-_SAMPLES // stream.size))
    total = stream.total(program, pack(graph), _added, given=some)
    return {t: (total[twins[t]]["sum"] - total[t]["sum"]) / total[t]["count"] for t in tails}


def _between_layers(graph: Graph, plan: Plan) -> tuple[Graph, Plan, dict[str, str]]:
    """The float graph with a twin of all that lies between its layers, the plan of the twins, and their tensors.

    A twin starts from the outputs of float layers, so the inputs of its layers differ only by the rounding since then.
    """
    taken, nodes = set(graph.tensors), list[Node]()
    twins = {v.name: fresh(v.name, taken) for v in graph.inputs if v.name in plan.activations}
    nodes += [Node("Identity", (name,), (twin,)) for name, twin in twins.items()]
    for node in graph.nodes:
        nodes.append(node)
        if is_linear(graph, node):
            copies = {o: fresh(o, taken) for o in node.outputs if o}
            nodes += [Node("Identity", (o,), (twin,)) for o, twin in copies.items()]
        elif twins.keys().isdisjoint(node.reads()):
            continue
        else:
            copies = {o: fresh(o, taken) for o in node.outputs if o}
            nodes.append(reading(node, twins).replace(name="", outputs=tuple(copies.get(o, o) for o in node.outputs)))
        twins |= copies
    rounded = {twins[t]: q for t, q in plan.activations.items() if t in twins}
    chosen = frozenset(twins[o] for o in plan.nodes if o in twins)
    return graph.replace(nodes=tuple(nodes)), Plan(rounded, {}, nodes=chosen, forms=plan.forms), twins


def _has_tail(plan: Plan, stats: Stats, tensor: str) -> bool:
    qparams = plan.activations.get(tensor)
    if qparams is None or tensor not in stats.tensors or qparams.dynamic or not isinstance(qparams.grid, Integer):
        return False
    low, high = stats.range(tensor)
    return 0 < -low <= min(high, _TAIL * float(np.max(qparams.scale)))


def _sums(qparams: QParams | None, value: Any) -> dict[str, jax.Array]:
    """The sum of each channel after rounding, and the number of values in a channel."""
    x = jnp.asarray(channels_last(value), jnp.float32)
    x = (x if qparams is None else qparams.fake_quant(x)).reshape(-1, x.shape[-1])
    return {"sum": x.sum(0), "count": jnp.float32(len(x))}


def _added(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y, a, b)


def output_shift(
    graph: Graph, plan: Plan, stats: Stats, node: Node, shifts: Mapping[str, np.ndarray] | None = None
) -> np.ndarray | None:
    """The mean that rounding its weight and its input adds to each output channel; None where no bias takes it back."""
    layer, x = linear_layer(graph, node), node.inputs[0]
    if layer is None or layer.product is None or layer.bias is None or layer.weight not in plan.weights:
        return None
    if x not in stats.tensors or not stats.tensors[x].get("means") or node.attrs.get("beta", 1.0) != 1:
        return None
    seen = stats.rows(x, "means")
    mean = seen["total"] / np.maximum(seen["count"], 1)
    array = graph.params[layer.weight]
    rounded = plan.weights[layer.weight].given_back(array)
    shift = layer.of_means(rounded - array.astype(np.float64), mean)
    if shifts and x in shifts:
        shift = shift + shift_through(layer, plan, array, shifts[x])
    return shift if graph.params[layer.bias].shape in (shift.shape, (1, *shift.shape)) else None


def shift_through(layer: LinearLayer, plan: Plan, weight: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """The mean that a shift of its input's channels adds to each output channel of a layer: Q(W) E[x' - x]."""
    return layer.of_means(plan.weights[layer.weight].given_back(weight), shift)
