"""From statistics to a plan: placement, scales, constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jq.arithmetic.formats import INT32, Block, Format, Integer
from jq.calibration.stats import Stats
from jq.config import QuantConfig, resolve
from jq.errors import ConfigError, DataError, ModelError, suggest
from jq.graph import Graph, Node
from jq.npu.constraints import Move, constrain
from jq.ops.linear import is_linear
from jq.ops.table import lookup
from jq.plan import Plan, QParams
from jq.plan.forms import forms_of
from jq.plan.outputs import coarse_outputs
from jq.plan.placement import place, shared
from jq.plan.scales import activation_qparams, calibrated, weight_qparams
from jq.plan.selection import end_tensors, literal, selected
from jq.util.mapped import is_finite, release

_ONE, _ZERO = np.float32(1), np.int32(0)


def make_plan(
    graph: Graph,
    stats: Stats | None = None,
    config: QuantConfig | str = "XINT8",
    params: Mapping[str, Any] | None = None,
    scales: Mapping[str, QParams] | None = None,
) -> Plan:
    """Return the plan of a prepared graph by `config`, with scales from calibration's statistics.

    Weights are those of the graph, or `params`. Statistics are needed if activations become integers. `scales` are scales for
    some tensors, from a search of your own; they are used before tensors share scales and the NPU's constraints apply.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:16])
    >>> jq.make_plan(graph, stats)["stem.weight"]
    QParams(scale=0.03125, zero_point=0, int8)
    """
    return plan_and_moves(graph, stats, resolve(config), params, scales)[0]


def plan_and_moves(
    graph: Graph,
    stats: Stats | None,
    config: QuantConfig,
    params: Mapping[str, Any] | None = None,
    scales: Mapping[str, QParams] | None = None,
) -> tuple[Plan, tuple[Move, ...]]:
    """Return the plan, and the moves that the NPU's position constraints made in it."""
    arrays = {**graph.params, **(params or {})}
    for name in config.float_tensors:
        if name not in graph.tensors:
            near = suggest(name, graph.tensors)
            raise ConfigError(f"float_tensors: the prepared graph has no tensor {name!r}.{near}")
    placement = place(graph, config, _floats(graph, stats, config))
    qparams = _weights(graph, config, placement.weights, arrays)
    qparams |= _activations(graph, stats, config, placement.activations)
    for name in scales or {}:
        if name not in qparams:
            raise ConfigError(f"scales: tensor {name!r} has no scale of its own.{suggest(name, qparams)}")
    qparams |= scales or {}
    qparams |= {k: qparams[source] for k, source in shared(graph, placement.nodes, qparams).items()}
    plan = Plan(
        activations={k: qparams[k] for k in placement.activations if k in qparams},
        weights={k: qparams[k] for k in placement.weights if k in qparams},
        nodes=placement.nodes,
        forms=forms_of(graph, stats, config, placement.nodes),
    )
    plan, moves = constrain(graph, plan, stats, config, arrays)
    if coarse := coarse_outputs(graph, plan, stats, config, scales or ()):
        exclude = (*config.exclude, *(literal(node.label) for pooled in coarse for node in pooled.nodes))
        return plan_and_moves(graph, stats, config.replace(exclude=exclude), params, scales)
    return with_product_scales(plan, placement.products), moves


def with_product_scales(plan: Plan, biases: Mapping[str, Node]) -> Plan:
    """Return the plan with biases in 32 bits, at the scale of the products they are added to."""
    products: dict[str, QParams] = {}
    for name, node in biases.items():
        x, w = map(plan.get, node.inputs[:2])
        if x is None or w is None or x.dynamic or not isinstance(x.grid, Integer) or not isinstance(w.grid, Integer):
            continue  # products of floats
        scale = (np.asarray(x.scale) * np.asarray(w.scale)).astype(np.float32)
        products[name] = QParams(scale, np.zeros(scale.shape, np.int32), INT32, None if w.axis is None else -1)
    return dataclasses.replace(plan, weights={**plan.weights, **products})


def _floats(graph: Graph, stats: Stats | None, config: QuantConfig) -> frozenset[str]:
    """The activations that can be quantized."""
    if stats is not None and config.calibrates:
        known = {k for k, v in graph.values.items() if v.dtype not in (None, np.float32)}
        return calibrated(graph, stats) - known
    return frozenset(k for k, v in graph.values.items() if v.dtype == np.float32 and not v.containers)


def _activations(
    graph: Graph, stats: Stats | None, config: QuantConfig, nodes: Mapping[str, Node]
) -> dict[str, QParams]:
    qparams: dict[str, QParams] = {}
    for options, names in _by_options(graph, config, nodes).items():
        grid = options.activation
        if not isinstance(grid, Integer):
            qparams |= _casts(graph, grid, {k: _reader(graph, k) for k in names})
        elif options.dynamic:
            qparams |= {k: QParams(_ONE, _ZERO, grid, dynamic=True) for k in names}
        elif stats is None:
            raise DataError(f"quantizing activations to {grid} needs their statistics: see jq.calibrate")
        else:
            every = activation_qparams(graph, stats, options)
            qparams |= {k: every[k] for k in names}
    return qparams


def check_weights(graph: Graph, config: QuantConfig) -> None:
    """Raise a ModelError where an operator that is to be quantized has a weight that cannot be."""
    for name, node in weights_to_quantize(graph, config):
        check_weight(name, graph.params[name], node)
        release(graph.params[name])
        if not graph.params[name].size:
            shape = list(graph.params[name].shape)
            raise ModelError(f"{_where(name, node)} has no elements: its shape is {shape}; exclude the node")


def weights_to_quantize(graph: Graph, config: QuantConfig) -> Iterator[tuple[str, Node]]:
    """Yield weights and biases of the linear operators that are to be quantized, each with its node."""
    chosen = selected(graph, config)
    for node in graph.nodes:
        if is_linear(graph, node) and node.outputs[0] in chosen:
            yield from ((name, node) for name in node.inputs[1:] if name in graph.params)


def check_weight(name: str, array: Any, node: Node) -> None:
    """Raise a ModelError unless a weight of a node is of finite float32 numbers."""
    array, where = np.asarray(array), _where(name, node)
    if array.dtype != np.float32:
        raise ModelError(f"{where} is {array.dtype}; only float32 is quantized: convert the model, or exclude the node")
    if not is_finite(array):
        bad = np.argwhere(~np.isfinite(array)).tolist()
        invalid = f"{len(bad)} NaN or Inf among {array.size} values, the first {array[tuple(bad[0])]} at {bad[0]}"
        raise ModelError(f"{where} has {invalid}: is the file damaged, or did training diverge?")


def _where(weight: str, node: Node) -> str:
    return f"weight {weight!r} of node {node.label!r} ({node.qualified})"


def _weights(
    graph: Graph, config: QuantConfig, nodes: Mapping[str, Node], arrays: Mapping[str, Any]
) -> dict[str, QParams]:
    qparams: dict[str, QParams] = {}
    for options, names in _by_options(graph, config, nodes).items():
        if isinstance(options.weight, Integer):
            for name in names:
                check_weight(name, arrays[name], nodes[name])
                release(arrays[name])
            qparams |= weight_qparams(graph, options, {k: arrays[k] for k in names})
        else:
            qparams |= _casts(graph, options.weight, {k: nodes[k] for k in names})
    return qparams


def _reader(graph: Graph, tensor: str) -> Node:
    """The first node that reads a tensor, or that makes it if none does."""
    return next(iter(graph.consumers.get(tensor, ())), None) or graph.producer[tensor]


def _by_options(graph: Graph, config: QuantConfig, nodes: Mapping[str, Node]) -> dict[QuantConfig, list[str]]:
    """Tensors that have the same options, which those of their nodes are."""
    tensors: dict[QuantConfig, list[str]] = {}
    ends = end_tensors(graph, config)
    for tensor, node in nodes.items():
        options = config.of(node)
        tensors.setdefault(options.at_ends() if tensor in ends else options, []).append(tensor)
    return tensors


def _casts(graph: Graph, grid: Format, nodes: Mapping[str, Node]) -> dict[str, QParams]:
    """A float format of tensors, or a block format, whose blocks lie along the axis that products are summed over.

    A scalar has no axis and stays unchanged.
    """
    if not isinstance(grid, Block):
        return {k: QParams(_ONE, _ZERO, grid) for k in nodes}
    ranked = {k: n for k, n in nodes.items() if (value := graph.values.get(k)) is None or value.shape != ()}
    return {
        k: QParams(_ONE, _ZERO, grid, summed_axis(graph, n, n.inputs.index(k) if k in n.inputs else 0))
        for k, n in ranked.items()
    }


def summed_axis(graph: Graph, node: Node, index: int) -> int:
    """The axis of a node's input along which products are added up; the channels' where the op table names none."""
    entry = lookup(node, graph.opset(node.domain))
    summed = None if entry is None else entry.quant.summed
    return 1 if summed is None else summed(node.attrs, index)
