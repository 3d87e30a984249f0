"""Activations in any spelling, recognised by what they compute on a line of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jq.graph import Node
from jq.npu.facts import HARD_SIGMOID, is_hard_sigmoid
from jq.passes.canonical.forms import CanonicalForm, Names, Written
from jq.passes.canonical.regions import CLOSE, REDUCING, Region, gelu, gelu_tanh, hard_swish, is_close, once, sigmoid

# Dense where activations bend, and so far out that what does not saturate shows; 0 is in the middle.
_LINE = np.concatenate([[-60.0, -30.0, -15.0], np.linspace(-9, 9, 145), [15.0, 30.0, 60.0]])
_ZERO = _LINE.size // 2
_SILU = _LINE * sigmoid(_LINE)
_LARGEST = 14  # nodes: a Gelu by tanh has ten or so
_BENDS = frozenset(
    {"Clip", "Erf", "Exp", "HardSigmoid", "HardSwish", "Max", "Min", "Relu", "Sigmoid", "Softplus", "Swish", "Tanh"}
)
Write = Callable[[Names], Written]


@once
def _on_line(region: Region) -> np.ndarray | None:
    """The values of a region on the line; None unless it is elementwise, bends, and begins at 0 as all of these do."""
    if region.operators.isdisjoint(_BENDS) or not region.operators.isdisjoint(REDUCING):
        return None
    if len(region.nodes) > _LARGEST or not region.shape:
        return None
    rank = len(region.shape)
    if any(a.size != 1 or a.ndim > rank for a in region.constants.values()):
        return None
    y = region(_LINE.reshape((1,) * (rank - 1) + (-1,)))
    return None if y is None or not abs(y.flat[0]) < CLOSE else y.ravel()


def _as_node(region: Region, op_type: str, **attrs: Any) -> Write:
    node = Node(op_type, (region.source,), region.end.outputs, attrs, region.end.name)
    return lambda name: ([node], {})


def _operator(
    since: int, function: Callable[[np.ndarray], np.ndarray], op_type: str, *also: str, **attrs: Any
) -> CanonicalForm:
    """The form that is one operator; or some others, which are left where they are its spelling."""

    values = function(_LINE)

    def recognise(region: Region) -> Write | None:
        return _as_node(region, op_type, **attrs) if is_close(_on_line(region), values) else None

    return CanonicalForm(since, recognise, also=(also,) if also else ())


def _silu(region: Region) -> Write | None:
    """x * Sigmoid(x), of which the NPU has both."""
    if not is_close(_on_line(region), _SILU):
        return None

    def written(name: Names) -> Written:
        gate = name("Sigmoid")
        product = Node("Mul", (region.source, gate), region.end.outputs, {}, region.end.name)
        return [Node("Sigmoid", (region.source,), (gate,)), product], {}

    return written


def _hard_sigmoid(region: Region) -> Write | None:
    """Clip(alpha * x + beta, 0, 1), with the numbers around 0, where it does not cut."""
    line = _on_line(region)
    if line is None or not all(0 < y < 1 for y in line[_ZERO - 1 : _ZERO + 2]):
        return None
    slope = (line[_ZERO + 1] - line[_ZERO - 1]) / (_LINE[_ZERO + 1] - _LINE[_ZERO - 1])
    attrs = {"alpha": float(np.float32(slope)), "beta": float(np.float32(line[_ZERO]))}
    attrs = dict(HARD_SIGMOID) if is_hard_sigmoid(attrs) else attrs
    if attrs["alpha"] == 1:  # a sum and a Clip, which the NPU has
        return None
    same = is_close(line, np.clip(attrs["alpha"] * _LINE + attrs["beta"], 0, 1))
    return _as_node(region, "HardSigmoid", **attrs) if same else None


ACTIVATIONS: Mapping[str, CanonicalForm] = MappingProxyType(
    {
        "hard_swish": _operator(14, hard_swish, "HardSwish", "HardSigmoid", "Mul"),
        "gelu": _operator(20, gelu, "Gelu"),
        "gelu_tanh": _operator(20, gelu_tanh, "Gelu", approximate="tanh"),
        "silu": CanonicalForm(1, _silu),
        "mish": _operator(18, lambda x: x * np.tanh(np.logaddexp(0, x)), "Mish"),
        "sigmoid": _operator(1, sigmoid, "Sigmoid"),
        "hard_sigmoid": CanonicalForm(1, _hard_sigmoid),
    }
)
