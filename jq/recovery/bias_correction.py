"""Bias correction: the mean shift of each output channel by rounding is taken back by its bias.

Rounding the weights changes the expected output by (Q(W) - W) E[x], as in Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction" (2019); E[x] of each input channel is what calibration measured of the float model.

Rounding the input changes it by Q(W) E[Q(x) - x]. That is little where codes are many on both sides of zero, but SiLU, GELU
and HardSwish have a short negative tail, in which many values lie: of at most a few codes, it is rounded to one side.
An offset would spend the codes that a symmetric grid wastes on them, but it would have to be added before the one
rounding of the product, which the chip cannot do; the mean of what is lost is exact in the bias all the same.
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
from jq.ops.linear import linear_layer
from jq.plan import Plan, QParams
from jq.readings.packing import pack
from jq.readings.tracing import trace

_TAIL = 4  # codes of a negative tail, at most, that rounding shifts
_SAMPLES = 64  # that its mean is taken of


def correct_biases(graph: Graph, plan: Plan, stats: Stats, shifts: Mapping[str, np.ndarray] | None = None) -> Graph:
    """Return the graph with the biases of Conv and Gemm corrected for the rounding of a plan's weights.

    `shifts` are what rounding adds to the means of inputs' channels, such as `shifts_of_tails` measures. Where zeros pad
    an image, its border sees less of the shift than is corrected. A bias that others read too stays.
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

    The data are read once more, as far as means need, where there is such an input.
    """
    tails = [t for t in linear_inputs(graph) if _has_tail(plan, stats, t)]
    if not tails:
        return {}
    fn = trace(graph, taps={t: functools.partial(_shift, plan.activations[t]) for t in tails})
    stream = Stream.of(open_source(data, graph.inputs, seed=config.seed), config.batch, fn)
    program = stream.folded(lambda params, sample: fn(params, sample)[1], _added)
    some = itertools.islice(stream.batches(), -(-_SAMPLES // stream.size))
    total = stream.total(program, pack(graph), _added, given=some)
    return {tensor: sums["shift"] / sums["pixels"] for tensor, sums in total.items()}


def _has_tail(plan: Plan, stats: Stats, tensor: str) -> bool:
    qparams = plan.activations.get(tensor)
    if qparams is None or tensor not in stats.tensors or qparams.dynamic or not isinstance(qparams.grid, Integer):
        return False
    low, high = stats.range(tensor)
    return 0 < -low <= min(high, _TAIL * float(np.max(qparams.scale)))


def _shift(qparams: QParams, value: Any) -> dict[str, jax.Array]:
    x = jnp.asarray(channels_last(value), jnp.float32)
    shift = (qparams.fake_quant(x, None) - x).reshape(-1, x.shape[-1])
    return {"shift": shift.sum(0), "pixels": jnp.float32(len(shift))}


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
        shift = shift + layer.of_means(rounded.astype(np.float64), shifts[x])
    return shift if graph.params[layer.bias].shape in (shift.shape, (1, *shift.shape)) else None
