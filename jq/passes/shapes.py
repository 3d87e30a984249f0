"""Folding of everything that is computed from static shapes.

Small integer tensors are followed element by element through the operators that move elements about.
An element is a number, or a *code* that stands for a dim known by its name only. An operator that
copies elements copies codes too, so its own rule shows where each dim ends up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jq.errors import Error
from jq.graph import Graph, Node, Value
from jq.graph.edit import fresh, undeclared
from jq.readings.walk import evaluate

# Expand and Tile move elements too, but make more of them than memory may hold: see `constants`.
_MOVES = frozenset({"Concat", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
_ARITHMETIC = frozenset({"Add", "Div", "Max", "Min", "Mod", "Mul", "Sub"})
_INTEGERS: dict[int, np.dtype] = {6: np.dtype(np.int32), 7: np.dtype(np.int64)}  # what Cast calls them
_SIZE = 1024  # elements: no shape is as long
_CODES = -(1 << 62)  # far below every number that a shape computation meets


@dataclasses.dataclass(frozen=True)
class _Ints:
    """An integer tensor, some elements of which may be codes."""

    elements: np.ndarray  # int64
    dtype: np.dtype

    @property
    def coded(self) -> np.ndarray:
        return self.elements < _CODES // 2

    @property
    def known(self) -> bool:
        return not self.coded.any()


class _Codes:
    """Codes: one for each named dim, and one for each unknown element."""

    def __init__(self) -> None:
        self.given: dict[object, int] = {}

    def of(self, dim: object) -> int:
        return self.given.setdefault(dim, _CODES + len(self.given))

    def new(self) -> int:
        return self.of(object())

    def dims(self, value: Value | None) -> list[int] | None:
        """The dims of a tensor: numbers where they are static."""
        if value is None or value.shape is None:
            return None
        dims = ((value.name, i) if d is None else d for i, d in enumerate(value.shape))
        return [d if isinstance(d, int) else self.of(d) for d in dims]


def fold_shapes(graph: Graph) -> Graph:
    """The graph with static shapes, and everything computed from them, as constants.

    Where the batch is dynamic, the target of a Reshape becomes a constant with 0 (this dim as before)
    and -1 (what remains), if that is certain.
    """
    if not any(n.op_type in ("Shape", "Size") for n in graph.nodes):
        return graph
    types = undeclared(graph).values
    codes, taken = _Codes(), set(graph.tensors)
    small = {k: a for k, a in graph.arrays.items() if a.dtype in _INTEGERS.values() and a.size <= _SIZE}
    integers = {k: _Ints(a.astype(np.int64), a.dtype) for k, a in small.items()}
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        results = dict(_follow(node, graph.opset(node.domain), integers, types, codes))
        integers |= results
        if results and all(r.known for r in results.values()):
            nodes[node] = None
            arrays |= {k: r.elements.astype(r.dtype) for k, r in results.items()}
        elif (target := _target(graph, node, integers, types, codes)) is not None:
            name = fresh(f"{node.label}.shape", taken)
            nodes[node] = node.replace(inputs=(node.inputs[0], name))
            arrays[name] = target
    return graph.edit(nodes, arrays) if nodes else graph


def _follow(
    node: Node, opset: int, integers: Mapping[str, _Ints], types: Mapping[str, Value], codes: _Codes
) -> Iterator[tuple[str, _Ints]]:
    """Yield the known outputs of a node."""
    if node.domain or not node.inputs or not node.inputs[0]:
        return
    if node.op_type in ("Shape", "Size"):
        dims = codes.dims(types.get(node.inputs[0]))
        if dims is not None and node.op_type == "Shape":
            part = dims[node.attrs.get("start", 0) : node.attrs.get("end")]
            yield node.outputs[0], _Ints(np.array(part, np.int64), np.dtype(np.int64))
        elif dims is not None and all(d >= 0 for d in dims):
            yield node.outputs[0], _Ints(np.array(np.prod(dims, dtype=np.int64)), np.dtype(np.int64))
        return
    if not all(i in integers for i in node.inputs if i):
        return
    given = {i: integers[i] for i in node.inputs if i}
    dtype, placed = integers[node.inputs[0]].dtype, all(integers[i].known for i in node.inputs[1:] if i)
    try:
        if node.op_type == "Cast":
            to = _INTEGERS.get(node.attrs.get("to", 0))
            if to is not None:
                yield node.outputs[0], _Ints(integers[node.inputs[0]].elements, to)
        elif node.op_type in _MOVES and (node.op_type == "Concat" or placed):
            results = zip(node.outputs, evaluate(node, opset, {i: g.elements for i, g in given.items()}), strict=False)
            yield from ((o, _Ints(r, dtype)) for o, r in results if o and r.size <= _SIZE)
        elif node.op_type in _ARITHMETIC:
            yield node.outputs[0], _Ints(_arithmetic(node, opset, given, codes), dtype)
    except Error:  # a broken node is reported where it is traced
        return


def _arithmetic(node: Node, opset: int, given: Mapping[str, _Ints], codes: _Codes) -> np.ndarray:
    """An elementwise node's output; results that involve a code are unknown."""
    (result,) = evaluate(node, opset, {i: np.where(g.coded, 1, g.elements) for i, g in given.items()})
    touched = np.logical_or.reduce(np.broadcast_arrays(result, *(g.coded for g in given.values()))[1:])
    unknown = np.array([codes.new() for _ in range(result.size)], np.int64).reshape(result.shape)
    return np.where(touched, unknown, result)


def _target(
    graph: Graph, node: Node, integers: Mapping[str, _Ints], types: Mapping[str, Value], codes: _Codes
) -> np.ndarray | None:
    """A constant Reshape target equivalent to the computed one, or None."""
    if node.op_type != "Reshape" or node.domain or len(node.inputs) < 2 or node.attrs.get("allowzero", 0):
        return None
    target = integers.get(node.inputs[1])
    if target is None or node.inputs[1] in graph.arrays:
        return None
    wanted = target.elements.copy()
    dims = codes.dims(types.get(node.inputs[0])) or []
    for i in np.flatnonzero(target.coded):
        if i < len(dims) and dims[i] == wanted[i]:
            wanted[i] = 0
    unknown = wanted < _CODES // 2
    if unknown.sum() + (wanted == -1).sum() > 1:
        return None
    return np.where(unknown, -1, wanted)
