"""Transposes through more than four dims, which the NPU has not, and Gathers, which no format of integers lists.

Both only move elements, so what stands for them is exact. A Transpose needs as many dims as it tells apart: those of one element
need none, and neighbours that stay neighbours are one. Where that leaves more than four, it is made of swaps of two blocks that
are neighbours, each of which has four dims at most: those in front, the two, and those behind.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.unused import remove_unused
from jq.npu.facts import NPU_RANK
from jq.npu.rewrites.edits import Applies, candidates, everywhere, node_names, substitute
from jq.ops.kinds import is_gather, regroups

_MOST = 6  # dims that a Transpose may tell apart
_FREE = -1  # the one size that only the data tell, as Reshape writes it
_SLICE, _SQUEEZE = 10, 13  # the opsets from which theirs are inputs
_Shape = tuple[int, ...]
_Operands = Mapping[str, _Shape]  # of a node, constants by what they are


def transpose_in_four(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with Transposes of at most four dims for each one of more that stands between tensors of at most four."""
    writer, nodes = _MoveWriter(graph), dict[Node, Sequence[Node]]()
    for node in candidates(graph, applies, "Transpose"):
        move = _move(graph, node)
        if move is not None and all(map(applies, move.inside)):
            nodes |= dict.fromkeys(move.inside, ()) | {node: writer.moved(node, move)}
    return remove_unused(substitute(graph, nodes, writer.arrays)) if nodes else graph


def gather_to_slice(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with a Slice for each Gather of elements at constant, equal distances, and a Squeeze where it drops the axis."""
    writer, nodes = _MoveWriter(graph), dict[Node, Sequence[Node]]()
    for node in candidates(graph, applies, "Gather"):
        taken, value = graph.arrays.get(node.inputs[1]), graph.values.get(node.inputs[0])
        if taken is None or value is None or value.shape is None or value.dtype is None or value.dtype.kind != "f":
            continue
        axis, rank = node.attrs.get("axis", 0), len(value.shape)
        length, places = value.shape[axis] if -rank <= axis < rank else None, taken.ravel().tolist()
        if graph.opset() < _SLICE or taken.ndim > 1 or not isinstance(length, int) or not places:
            continue
        if not all(-length <= p < length for p in places):
            continue
        axis, places = axis % rank, [p % length for p in places]
        steps = set(np.diff(places).tolist()) or {1}
        if len(steps) == 1 and 0 not in steps:
            nodes[node] = writer.sliced(node, axis, places, steps.pop(), drops=not taken.ndim)
    return substitute(graph, nodes, writer.arrays)


# --- What a Transpose moves ---


@dataclasses.dataclass(frozen=True)
class _End:
    """A tensor that is made of a moved one: all of it, or what one index of its leading dim has."""

    output: str
    sizes: _Shape
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class _Move:
    """A Transpose with the nodes around it that only regroup dims: source, distinguished sizes, their order, and the result."""

    source: str
    sizes: _Shape
    order: _Shape
    ends: tuple[_End, ...]
    inside: tuple[Node, ...]  # the nodes behind it that go


def _move(graph: Graph, node: Node) -> _Move | None:
    """The move of a Transpose of more than four dims; None where it is no such, or where too many dims are left."""
    sizes, source = _sizes(graph, node.inputs[0]), _source(graph, node.inputs[0])
    if sizes is None or len(sizes) <= NPU_RANK or source is None:
        return None
    order = tuple(node.attrs.get("perm", reversed(range(len(sizes)))))
    if sorted(order) != list(range(len(sizes))):
        return None
    chain = _regrouped(graph, node.outputs[0])
    if chain:
        ends: tuple[_End, ...] = (_End(chain[-1].outputs[0], _sizes(graph, chain[-1].outputs[0]) or ()),)
    else:
        chain = [n for n in graph.consumers.get(node.outputs[0], ()) if is_gather(n)]
        ends = tuple(_taken(graph, node, chain)) if sizes[order[0]] > 1 else ()
    apart, told = _told_apart(sizes, order, None if not ends or ends[0].index is None else order[0])
    return _Move(source, apart, told, ends, tuple(chain)) if ends and len(apart) <= _MOST else None


def _source(graph: Graph, name: str) -> str | None:
    """The tensor of at most four dims that nodes in front of another one regroup the dims of."""
    while (shape := _sizes(graph, name)) is not None and len(shape) > NPU_RANK:
        made = graph.producer.get(name)
        if made is None or not regroups(made):
            return None
        name = made.inputs[0]
    return None if shape is None else name


def _regrouped(graph: Graph, name: str) -> list[Node]:
    """The nodes that alone read a tensor, one behind the other, and make one of at most four dims of it."""
    chain: list[Node] = []
    while (shape := _sizes(graph, name)) is not None and len(shape) > NPU_RANK:
        reader = graph.sole_reader(name)
        if reader is None or not regroups(reader) or reader.inputs[0] != name:
            return []
        chain.append(reader)
        name = reader.outputs[0]
    return chain if shape is not None else []


def _taken(graph: Graph, node: Node, readers: Sequence[Node]) -> Iterator[_End]:
    """The parts that readers take of a tensor's leading dim, if they all take one index each."""
    name, ends = node.outputs[0], list[_End]()
    length = (_sizes(graph, name) or (0,))[0]
    for reader in readers:
        index, sizes = graph.arrays.get(reader.inputs[1]), _sizes(graph, reader.outputs[0])
        if index is None or index.ndim or reader.attrs.get("axis", 0) or sizes is None or len(sizes) > NPU_RANK:
            return
        if not -length <= int(index) < length:
            return
        ends.append(_End(reader.outputs[0], sizes, int(index) % length))
    if len(ends) == len(graph.consumers.get(name, ())) and name not in graph.output_names:
        yield from ends


def _told_apart(sizes: _Shape, order: _Shape, alone: int | None) -> tuple[_Shape, _Shape]:
    """The sizes that an order of dims tells apart, neighbours joined where there are more than four, and their order.

    The dim `alone` is joined with no other.

    >>> _told_apart((1, 2, 3, 4, 5), (0, 2, 1, 3, 4), None)  # a channel shuffle
    ((2, 3, 4, 5), (1, 0, 2, 3))
    """
    kept = [a for a in range(len(sizes)) if sizes[a] != 1]
    groups: list[list[int]] = []
    for axis in (a for a in order if a in kept):
        follows = bool(groups) and kept.index(axis) == kept.index(groups[-1][-1]) + 1
        if len(kept) > NPU_RANK and follows and alone not in (axis, groups[-1][-1]):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    before = sorted(groups)
    return tuple(_product([sizes[a] for a in g]) for g in before), tuple(before.index(g) for g in groups)


def _swaps(order: _Shape) -> list[_Shape]:
    """The fewest swaps of neighbouring blocks that make an order, each as the ends of the two blocks: (first, second, end).

    >>> _swaps((0, 3, 1, 4, 2))  # as DepthToSpace has it
    [(1, 2, 4), (1, 2, 5)]
    """
    begin = tuple(range(len(order)))
    ways: dict[_Shape, list[_Shape]] = {begin: []}
    waiting = [begin]
    for here in waiting:
        if here == tuple(order):
            break
        for i, j, k in itertools.combinations(range(len(order) + 1), 3):
            there = here[:i] + here[j:k] + here[i:j] + here[k:]
            if there not in ways:
                ways[there] = [*ways[here], (i, j, k)]
                waiting.append(there)
    return ways[tuple(order)]


def _steps(sizes: _Shape, order: _Shape) -> Iterator[tuple[_Shape, _Shape]]:
    """The Transposes of at most four dims that make an order, each with the sizes that it moves."""
    if list(order) == sorted(order):
        return
    if len(order) <= NPU_RANK:
        yield sizes, order
        return
    here = list(sizes)
    for i, j, k in _swaps(order):
        front, first, second, behind = here[:i], here[i:j], here[j:k], here[k:]
        lead, blocks = int(bool(front)), [b for b in (front, first, second, behind) if b]
        yield tuple(map(_product, blocks)), (*range(lead), lead + 1, lead, *range(lead + 2, len(blocks)))
        here = [*front, *second, *first, *behind]


def _product(sizes: Sequence[int]) -> int:
    return _FREE if _FREE in sizes else math.prod(sizes)


def _sizes(graph: Graph, name: str) -> _Shape | None:
    """The sizes of a float tensor, one of which may depend on the data; None for other tensors."""
    value = graph.values.get(name)
    if value is None or value.shape is None or value.dtype is None or value.dtype.kind != "f":
        return None
    sizes = tuple(d if isinstance(d, int) and d > 0 else _FREE for d in value.shape)
    return sizes if sizes.count(_FREE) <= 1 and 0 not in value.shape else None


# --- What stands for it ---


class _MoveWriter:
    """Makes nodes one behind the other, with names and constants of their own."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.taken, self.named = set(graph.tensors), node_names(graph)
        self.arrays: dict[str, np.ndarray] = {}

    def moved(self, node: Node, move: _Move) -> list[Node]:
        """The nodes for a move: Transposes, with a Reshape in front where sizes are others, and then what is made of it."""
        made: list[Node] = []

        def add(x: str, op_type: str, operands: _Operands, attrs: Mapping[str, Any], output: str = "") -> str:
            output = output or fresh(f"{node.outputs[0]}_part", self.taken)
            made.append(self._node(node.label, op_type, x, operands, attrs, output))
            return output

        x, here = move.source, _sizes(self.graph, move.source) or ()
        for sizes, order in _steps(move.sizes, move.order):
            x = x if here == sizes else add(x, "Reshape", {"shape": sizes}, {})
            x, here = add(x, "Transpose", {}, {"perm": order}), tuple(sizes[a] for a in order)
        lead = move.sizes[move.order[0]] if move.order else 1
        if move.ends[0].index is not None and here[:1] != (lead,):
            x = add(x, "Reshape", {"shape": (lead, _FREE)}, {})
        for end in move.ends:
            part, i = x, end.index
            if i is not None:
                part = add(x, "Slice", {"starts": (i,), "ends": (i + 1,), "axes": (0,), "steps": (1,)}, {})
            if i is None and made and here == end.sizes:
                made[-1] = made[-1].replace(outputs=(end.output,))
            else:
                add(part, "Reshape", {"shape": end.sizes}, {}, end.output)
        return made

    def sliced(self, node: Node, axis: int, places: Sequence[int], step: int, drops: bool) -> list[Node]:
        """The nodes for a Gather: a Slice, and a Squeeze where the axis goes."""
        end = places[-1] + step
        last = end if end >= 0 else -(1 << 31)
        bounds = {"starts": (places[0],), "ends": (last,), "axes": (axis,), "steps": (step,)}
        output = fresh(f"{node.outputs[0]}_part", self.taken) if drops else node.outputs[0]
        made = [self._node(node.label, "Slice", node.inputs[0], bounds, {}, output)]
        if drops:
            by_input = self.graph.opset() >= _SQUEEZE
            axes: tuple[_Operands, Mapping[str, Any]] = ({"axes": (axis,)}, {}) if by_input else ({}, {"axes": (axis,)})
            made.append(self._node(node.label, "Squeeze", output, *axes, node.outputs[0]))
        return made

    def _node(
        self, label: str, op_type: str, x: str, operands: _Operands, attrs: Mapping[str, Any], output: str
    ) -> Node:
        names = [fresh(f"{label}_{k}", self.taken) for k in operands]
        self.arrays |= {n: np.array(v, np.int64) for n, v in zip(names, operands.values(), strict=True)}
        return Node(op_type, (x, *names), (output,), attrs, fresh(f"{label}_{op_type}", self.named))
