"""Operators of newer opsets in those that every opset from 13 on has, for export at an older one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.schemas import attributes


@dataclasses.dataclass(frozen=True, eq=False)
class _Speller:
    """Nodes by calls, in the place of one node; the last of them makes its output."""

    prefix: str
    shape: tuple[Any, ...]  # of the first input
    taken: set[str]
    nodes: list[Node] = dataclasses.field(default_factory=list)
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __call__(self, op_type: str, *inputs: str | float | np.ndarray, **attrs: Any) -> str:
        output = fresh(f"{self.prefix}_{op_type}", self.taken)
        names = tuple(i if isinstance(i, str) else self._constant(np.asarray(i)) for i in inputs)
        self.nodes.append(Node(op_type, names, (output,), attrs, output))
        return output

    def mean(self, x: str, axis: int) -> str:
        """The mean over the last axes, from a negative one on; ReduceMean has its axes elsewhere from opset 18 on."""
        total = self("ReduceSum", x, np.arange(axis, 0), keepdims=1)
        return self("Mul", total, 1 / math.prod(self.shape[axis:]))

    def _constant(self, array: np.ndarray) -> str:
        name = fresh(f"{self.prefix}_constant", self.taken)
        self.arrays[name] = array.astype(np.float32) if array.dtype.kind == "f" else array
        return name


def _layer_norm(w: _Speller, x: str, scale: str, bias: str = "", *, axis: int, epsilon: float, **_: Any) -> str:
    centred = w("Sub", x, w.mean(x, axis))
    normal = w("Div", centred, w("Sqrt", w("Add", w.mean(w("Mul", centred, centred), axis), epsilon)))
    scaled = w("Mul", normal, scale)
    return w("Add", scaled, bias) if bias else scaled


def _rms_norm(w: _Speller, x: str, scale: str, *, axis: int, epsilon: float, **_: Any) -> str:
    return w("Mul", w("Div", x, w("Sqrt", w("Add", w.mean(w("Mul", x, x), axis), epsilon))), scale)


def _gelu(w: _Speller, x: str, *, approximate: str) -> str:
    if approximate == "tanh":
        cubic = w("Add", x, w("Mul", w("Mul", x, w("Mul", x, x)), 0.044715))
        bent = w("Tanh", w("Mul", cubic, math.sqrt(2 / math.pi)))
    else:
        bent = w("Erf", w("Mul", x, math.sqrt(0.5)))
    return w("Mul", w("Mul", x, 0.5), w("Add", bent, 1.0))


def _group_norm(w: _Speller, x: str, scale: str, bias: str, *, num_groups: int, epsilon: float, **_: Any) -> str:
    one, zero = np.ones(num_groups), np.zeros(num_groups)
    groups = w("Reshape", x, np.array([0, num_groups, -1]))
    normal = w("Reshape", w("InstanceNormalization", groups, one, zero, epsilon=epsilon), w("Shape", x))
    axes = np.arange(1, len(w.shape) - 1)
    scale, bias = (w("Unsqueeze", vector, axes) for vector in (scale, bias))
    return w("Add", w("Mul", normal, scale), bias)


def _hard_swish(w: _Speller, x: str) -> str:
    return w("Mul", x, w("HardSigmoid", x, alpha=1 / 6, beta=0.5))


def _mish(w: _Speller, x: str) -> str:
    return w("Mul", x, w("Tanh", w("Softplus", x)))


SPELLED: Mapping[str, tuple[int, Callable[..., str]]] = MappingProxyType(  # with the opset of today's version
    {
        "LayerNormalization": (17, _layer_norm),
        "RMSNormalization": (23, _rms_norm),
        "GroupNormalization": (21, _group_norm),
        "Gelu": (20, _gelu),
        "HardSwish": (14, _hard_swish),
        "Mish": (18, _mish),
    }
)


def spelled_out(graph: Graph, version: int) -> Graph:
    """The graph with those float32 operators in simpler ones that an opset does not have."""
    taken, arrays, nodes = set(graph.tensors), dict(graph.arrays), list[Node]()
    for node in graph.nodes:
        since, spell = SPELLED.get(node.op_type, (0, None))
        absent = spell is not None and not node.domain and version < since <= graph.opset()
        value = graph.values.get(node.inputs[0]) if absent else None
        if spell is None or value is None or value.dtype != np.float32 or value.shape is None or any(node.outputs[1:]):
            nodes.append(node)
            continue
        w, attrs = _Speller(node.outputs[0], value.shape, taken), dict(attributes(graph, node))
        if "axis" in attrs:
            attrs["axis"] -= len(value.shape) if attrs["axis"] >= 0 else 0
            if not all(isinstance(d, int) for d in value.shape[attrs["axis"] :]):
                nodes.append(node)
                continue
        spell(w, *node.inputs, **attrs)
        last = w.nodes.pop()
        nodes += [*w.nodes, last.replace(outputs=node.outputs[:1], name=node.name)]
        arrays |= w.arrays
    return graph.with_arrays(arrays, nodes=tuple(nodes)) if len(nodes) > len(graph.nodes) else graph
