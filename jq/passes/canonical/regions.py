"""Regions of a graph with one source and one end, and what they compute.

An operator that an exporter decomposed is a region: from one source tensor, through elementwise and reducing nodes and
constants, to one tensor; nothing outside reads the tensors in between. Regions are found by structure, in one walk back
from each end, and identified by numbers: a region is evaluated in float64 and compared with the forms, so that every spelling
of a form is recognised, whatever the order of its operands.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from onnx import TensorProto

from jq.graph import Graph, Node
from jq.graph.schemas import attributes

LARGEST = 24  # nodes of a region: a LayerNormalization has ten or so
_CONSTANT = 1 << 16  # elements of the largest constant inside
CLOSE = 2e-6  # relative: constants are float32, and a form has a few of them


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: np.ndarray, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        if axes is None or np.size(axes) == 0:
            return x if noop_with_empty_axes else function(x, axis=None, keepdims=bool(keepdims))
        return function(x, axis=tuple(np.ravel(axes).tolist()), keepdims=bool(keepdims))

    return reduce


def _root_sum_square(x: np.ndarray, **over: Any) -> Any:
    return np.sqrt(np.sum(x * x, **over))


def _clip(x: np.ndarray, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    ends = (low, min, -np.inf), (high, max, np.inf)
    lowest, highest = (next(e for e in end if e is not None) for end in ends)
    return np.minimum(np.maximum(x, lowest), highest)


def _hard_sigmoid(x: np.ndarray, *, alpha: float, beta: float) -> Any:
    return np.clip(np.float32(alpha).astype(np.float64) * x + beta, 0, 1)


REDUCING: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "ReduceMean": _reduction(np.mean),
        "ReduceSum": _reduction(np.sum),
        "ReduceMax": _reduction(np.max),
        "ReduceSumSquare": _reduction(lambda x, **over: np.sum(x * x, **over)),
        "ReduceL2": _reduction(_root_sum_square),
    }
)
ELEMENTWISE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "Abs": np.abs,
        "Add": np.add,
        "Cast": lambda x, *, to, **_: x,  # to the types of `_is_inside`
        "Clip": _clip,
        "Div": np.divide,
        "Elu": lambda x, *, alpha: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x),
        "Erf": np.vectorize(math.erf, otypes=[np.float64]),
        "Exp": np.exp,
        "Gelu": lambda x, *, approximate: (gelu_tanh if approximate == "tanh" else gelu)(x),
        "HardSigmoid": _hard_sigmoid,
        "HardSwish": lambda x: hard_swish(x),
        "Log": np.log,
        "Max": lambda *xs: functools.reduce(np.maximum, xs),
        "Min": lambda *xs: functools.reduce(np.minimum, xs),
        "Mul": np.multiply,
        "Neg": np.negative,
        "Pow": np.power,
        "Reciprocal": np.reciprocal,
        "Relu": lambda x: np.maximum(x, 0),
        "Sigmoid": lambda x: sigmoid(x),
        "Softplus": lambda x: np.logaddexp(0, x),
        "Sqrt": np.sqrt,
        "Sub": np.subtract,
        "Sum": lambda *xs: functools.reduce(np.add, xs),
        "Swish": lambda x, *, alpha: x * sigmoid(alpha * x),
        "Tanh": np.tanh,
    }
)
_PLACING: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(np.ravel(axes).tolist()))}
)
MEANING: Mapping[str, Callable[..., Any]] = MappingProxyType({**REDUCING, **ELEMENTWISE, **_PLACING})


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-x)))


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution's integral up to x."""
    return np.asarray(0.5 * x * (1 + ELEMENTWISE["Erf"](x / math.sqrt(2))))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The same by a tanh, which differs by up to 5e-4."""
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def hard_swish(x: np.ndarray) -> np.ndarray:
    """x * max(0, min(1, x / 6 + 1 / 2))."""
    return np.asarray(x * np.clip(x / 6 + 0.5, 0, 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Nodes, in order, between a source tensor and the output of the last of them."""

    graph: Graph
    source: str
    nodes: tuple[Node, ...]
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def end(self) -> Node:
        """The node whose result is read outside."""
        return self.nodes[-1]

    @functools.cached_property
    def operators(self) -> frozenset[str]:
        """The operators inside."""
        return frozenset(n.op_type for n in self.nodes)

    @functools.cached_property
    def constants(self) -> dict[str, np.ndarray]:
        """The arrays that nodes inside read."""
        return {i: self.graph.arrays[i] for n in self.nodes for i in n.inputs if i in self.graph.arrays}

    def __call__(self, x: np.ndarray) -> np.ndarray | None:
        """The end's value at a value of the source, in float64; None where it cannot be computed or has another shape."""
        scope = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in self.constants.items()}
        scope[self.source] = x.astype(np.float64)
        try:
            with np.errstate(all="ignore"):
                for node in self.nodes:
                    given = [scope[i] if i else None for i in node.inputs]
                    scope[node.outputs[0]] = MEANING[node.op_type](*given, **attributes(self.graph, node))
        except Exception:  # numpy raises several kinds where shapes do not fit: who traces the graph is told
            return None
        y = np.asarray(scope[self.end.outputs[0]])
        return y if y.shape == x.shape else None

    @functools.cached_property
    def shape(self) -> tuple[int | None, ...] | None:
        """The source's dims, None for those that only the data tell; None if its rank is not known or it is not float32."""
        types = [self.graph.values.get(name) for name in (self.source, self.end.outputs[0])]
        if any(t is None or t.dtype != np.float32 for t in types) or (dims := types[0].shape) is None:  # type: ignore[union-attr]
            return None
        return tuple(d if isinstance(d, int) else None for d in dims)


def regions(graph: Graph, end: Node, order: Mapping[str, int]) -> Iterator[Region]:
    """The regions that end in a node, the smallest first; `order` numbers the tensors that nodes make.

    The frontier holds the tensors that are read inside and not yet made there. Its last one moves inside if nothing else
    reads it.
    Where one is left, it is the source of a region.
    """
    frontier, inside = set(end.outputs), dict[Node, None]()
    while len(inside) < LARGEST:
        name = max(frontier, key=lambda t: order.get(t, -1))
        node = graph.producer.get(name)
        read_outside = inside and (name in graph.output_names or not inside.keys() >= set(graph.consumers[name]))
        if node is None or read_outside or not _is_inside(graph, node):
            return
        inside[node] = None
        frontier = (frontier - {name}) | {i for i in node.inputs if i and i not in graph.arrays}
        if len(frontier) == 1:
            yield Region(graph, next(iter(frontier)), tuple(reversed(inside)))
        elif not frontier:
            return


def _is_inside(graph: Graph, node: Node) -> bool:
    """Whether a node may be part of a region."""
    held = [graph.arrays[i] for i in node.inputs if i in graph.arrays]
    return (
        node.op_type in MEANING
        and not node.domain
        and len(node.outputs) == 1
        and bool(node.inputs)
        and bool(node.inputs[0])
        and all(a.dtype.kind in "fi" and a.size <= _CONSTANT for a in held)
        and (node.op_type != "Cast" or node.attrs.get("to") in (TensorProto.FLOAT, TensorProto.DOUBLE))
    )


def is_close(a: np.ndarray | None, b: np.ndarray) -> bool:
    """Whether what a region computes is a form, within the rounding of the constants of both."""
    return a is not None and bool((np.abs(a - b) <= CLOSE * (1 + np.abs(b))).all())


T = TypeVar("T")


def once(function: Callable[[Region], T]) -> Callable[[Region], T]:
    """A function of a region that several forms ask for, computed once for each region."""

    @functools.wraps(function)
    def known(region: Region) -> T:
        if function not in region.known:
            region.known[function] = function(region)
        result: T = region.known[function]
        return result

    return known
