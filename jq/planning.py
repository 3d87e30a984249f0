"""From statistics to a plan: placement, scales, constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jq.config import QuantConfig, resolve
from jq.constraints import Move, constrain
from jq.errors import DataError
from jq.fake import as_planned
from jq.formats import INT32, Block, Format, Integer
from jq.graph import Graph, Node
from jq.passes.npu import FORMS, FUNCTIONS
from jq.placement import place, shared
from jq.plan import Plan, QParams
from jq.search import activation_qparams, weight_qparams
from jq.stats import Stats

_ONE, _ZERO = np.float32(1), np.int32(0)


def make_plan(
    graph: Graph,
    stats: Stats | None = None,
    config: QuantConfig | str = "XINT8",
    params: Mapping[str, Any] | None = None,
) -> Plan:
    """Return how `config` quantizes a prepared graph, with the scales that calibration's statistics give.

    Weights are those of the graph, or `params`. Statistics are needed where activations become integers.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:16])
    >>> jq.make_plan(graph, stats)["stem.weight"]
    QParams(scale=0.03125, zero_point=0, int8)
    """
    return plan_and_moves(graph, stats, resolve(config), params)[0]


def plan_and_moves(
    graph: Graph, stats: Stats | None, config: QuantConfig, params: Mapping[str, Any] | None = None
) -> tuple[Plan, tuple[Move, ...]]:
    """Return the plan, and what the NPU's position constraints moved in it."""
    arrays = {**graph.params, **(params or {})}
    placement = place(graph, config, _floats(graph, stats, config))
    found = _weights(graph, config, placement.weights, arrays)
    found |= _activations(graph, stats, config, placement.activations)
    found |= {k: found[source] for k, source in shared(graph, placement.nodes, found).items()}
    plan = Plan(
        activations={k: found[k] for k in placement.activations},
        weights={k: found[k] for k in placement.weights},
        nodes=placement.nodes,
        forms=tuple(name for name in FORMS if name in config.forms),
    )
    # A Sigmoid that becomes a HardSigmoid is one for the constraints.
    plan, moves = constrain(as_planned(graph, plan, FUNCTIONS), plan, stats, config, arrays)
    return with_product_scales(plan, placement.products), moves


def with_product_scales(plan: Plan, biases: Mapping[str, Node]) -> Plan:
    """Return the plan with biases in 32 bits, at the scale of the products that they are added to."""
    found: dict[str, QParams] = {}
    for name, node in biases.items():
        x, w = map(plan.get, node.inputs[:2])
        if x is None or w is None or x.dynamic or not isinstance(x.grid, Integer) or not isinstance(w.grid, Integer):
            continue  # products of floats
        scale = (np.asarray(x.scale) * np.asarray(w.scale)).astype(np.float32)
        found[name] = QParams(scale, np.zeros(scale.shape, np.int32), INT32, None if w.axis is None else -1)
    return dataclasses.replace(plan, weights={**plan.weights, **found})


def _floats(graph: Graph, stats: Stats | None, config: QuantConfig) -> frozenset[str]:
    """The activations that can be quantized."""
    if stats is not None and config.calibrates:
        return frozenset(activation_qparams(graph, stats, config))
    return frozenset(k for k, v in graph.values.items() if v.dtype == np.float32 and not v.containers)


def _activations(
    graph: Graph, stats: Stats | None, config: QuantConfig, nodes: Mapping[str, Node]
) -> dict[str, QParams]:
    found: dict[str, QParams] = {}
    for options, names in _by_options(config, nodes).items():
        if not isinstance(options.activation, Integer):
            found |= {k: _cast(options.activation, _reader(graph, k), k) for k in names}
        elif options.dynamic:
            found |= {k: QParams(_ONE, _ZERO, options.activation, dynamic=True) for k in names}
        elif stats is None:
            raise DataError(
                f"activations become {options.activation}, so their statistics are needed: see jq.calibrate"
            )
        else:
            every = activation_qparams(graph, stats, options)
            found |= {k: every[k] for k in names}
    return found


def _weights(
    graph: Graph, config: QuantConfig, nodes: Mapping[str, Node], arrays: Mapping[str, Any]
) -> dict[str, QParams]:
    found: dict[str, QParams] = {}
    for options, names in _by_options(config, nodes).items():
        if isinstance(options.weight, Integer):
            found |= weight_qparams(graph, options, {k: arrays[k] for k in names})
        else:
            found |= {k: _cast(options.weight, nodes[k], k) for k in names}
    return found


def _reader(graph: Graph, tensor: str) -> Node:
    """The first node that reads a tensor, or that makes it if none does."""
    return next(iter(graph.consumers.get(tensor, ())), None) or graph.producer[tensor]


def _by_options(config: QuantConfig, nodes: Mapping[str, Node]) -> dict[QuantConfig, list[str]]:
    """Tensors that have the same options, which those of their nodes are."""
    found: dict[QuantConfig, list[str]] = {}
    for tensor, node in nodes.items():
        found.setdefault(config.of(node), []).append(tensor)
    return found


def _cast(grid: Format, node: Node, tensor: str) -> QParams:
    """A float or block format, of which the blocks lie along the axis that the products are summed over."""
    index = node.inputs.index(tensor) if tensor in node.inputs else 0
    return QParams(_ONE, _ZERO, grid, summed_axis(node, index) if isinstance(grid, Block) else None)


def summed_axis(node: Node, index: int) -> int:
    """The axis of a node's input along which products are added up; the channels' where there are none.

    >>> summed_axis(Node("MatMul", ("a", "b"), ("y",)), 1)
    -2
    """
    match node.op_type:
        case "MatMul":
            return -1 if index == 0 else -2
        case "Gemm" if index < 2:
            transposed = node.attrs.get("transB" if index else "transA", 0)
            return int(bool(transposed) == bool(index))
        case "Softmax":
            return int(node.attrs.get("axis", -1))
    return 1
