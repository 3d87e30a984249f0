"""Graph -> integer program: the third reading.

Integers pass from node to node as `Fixed`, exactly, and are rounded where a QuantizeLinear stands. Each operator's
integer rule stands beside its float rule in the op table. Where it has none for the operands at hand, the node is
computed in float32, as the model says, and listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.formats import INTEGERS
from jq.errors import Error, ModelError
from jq.graph import Graph, Node
from jq.graph.quantizers import is_pair, rounds
from jq.graph.schemas import defaults
from jq.npu.targets import Target
from jq.ops.integer.fixed import Fixed, Grid, Table, exact, wrapped
from jq.ops.kinds import is_split
from jq.ops.table import IntegerContext, Op, demanded, lookup
from jq.readings.integer.recognition import rounded_grid
from jq.readings.walk import Reader, Scope, evaluate, locating, walk

_LARGE = 1 << 33  # bytes of a tensor that is believed


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding:
    """A place where integers of the file are made: the value that is rounded, and its grid."""

    node: Node
    source: Any  # a Fixed, a Table or floats; None inside an integer operator
    result: Fixed
    causes: frozenset[str]  # why the source may not be what exact arithmetic on the model gives

    @property
    def grid(self) -> Grid:
        """The integers that the result consists of."""
        return grid_of(self.result)

    @property
    def factor_error(self) -> float:
        """The relative error of a mean by the chip's reciprocal."""
        return self.source.deviation if isinstance(self.source, Fixed) else 0.0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Learned:
    """Facts that are known once a program is traced: a static part of its outputs, so `jit` returns them every time."""

    floats: Mapping[str, str]  # nodes computed in float32, and why
    places: Mapping[str, tuple[Node, Grid, float]]  # by tensor of integers: node, grid, and how far a mean is off


@dataclasses.dataclass(frozen=True, eq=False)
class Computed:
    """The results of a reading: outputs, roundings on the way, and the nodes that had no integer form."""

    outputs: dict[str, Any]
    roundings: dict[str, Rounding]  # by the tensor of integers
    floats: dict[str, str]  # nodes computed in float32, and why

    @property
    def learned(self) -> Learned:
        """The part without arrays."""
        return Learned(self.floats, {name: (r.node, r.grid, r.factor_error) for name, r in self.roundings.items()})

    @property
    def codes(self) -> dict[str, Any]:
        """The integers of each tensor as the file has them."""
        return {name: codes(rounding.result) for name, rounding in self.roundings.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """A quantized graph as a chip computes it."""

    graph: Graph
    target: Target
    lowering: str

    def run(
        self, params: Mapping[str, Any], inputs: Mapping[str, Any], given: Mapping[str, Any] | None = None
    ) -> Computed:
        """The outputs, each rounding, and the nodes in floats; readers of a `given` tensor get those integers."""
        graph, given = self.graph, given or {}
        scope: dict[str, Any] = {**graph.constants, **graph.params, **params, **inputs}
        scope |= {name: self._constant(name, value) for name, value in params.items() if _is_codes(graph.params[name])}
        needed = demanded(graph, steering=True)
        scope |= {name: array for name, array in graph.params.items() if name in needed}  # known while tracing
        reader = Reader(self.lowering, needed, _LARGE)
        causes: dict[str, frozenset[str]] = {}  # of floats that were computed of integers
        roundings: dict[str, Rounding] = {}
        floats: dict[Node, str] = {}

        def step(node: Node, scope: Scope) -> Scope:
            made = self._in_integers(node, scope, reader)
            if made is not None:
                return made
            if (rounds(node) or not is_pair(node)) and any(_is_integer(scope.get(name)) for name in node.inputs):
                floats[node] = self._reason(node)
            causes.update(dict.fromkeys(node.outputs, _causes_of(node, scope, causes)))
            return self._in_floats(node, scope, reader)

        def rounded(node: Node, scope: Scope) -> Scope:
            name = next(iter(node.outputs), "")
            result = scope[name] if name else None
            if not isinstance(result, Fixed) or not rounds(node):
                return {}
            known = is_pair(node) and node not in floats
            source = scope[node.inputs[0]] if known else None
            roundings[name] = Rounding(node, source, result, _causes_of(node, scope, causes))
            return {name: _held(given[name], result)} if name in given else {}

        scope = walk(graph.nodes, scope, step, rounded)
        outputs = {v.name: layout.plain(self._outside(v.name, scope[v.name])) for v in graph.outputs}
        return Computed(outputs, roundings, {node.label: why for node, why in floats.items()})

    def _constant(self, name: str, array: Any) -> Fixed:
        host = centred(self.graph.params[name])
        grid = Grid(exact(np.float32(1)), 0, INTEGERS[str(self.graph.params[name].dtype)])
        bound = int(np.abs(host.astype(np.int64)).max(initial=0))
        return Fixed(array, grid.scale, bound, 0, grid, host=host, coded=True)

    def _in_integers(self, node: Node, scope: Scope, reader: Reader) -> Scope | None:
        """A node's outputs by its integer rule; None if it has none for these operands."""
        opset = self.graph.opset(node.domain)
        entry = lookup(node, opset)
        values = [scope.get(name) if name else None for name in node.inputs]
        if entry is None or not (is_pair(node) or any(map(_is_integer, values))):
            return None
        with locating(node, opset, values):
            result = self._integers(entry, node, opset, values, reader)
        if result is NotImplemented:
            return None
        results = result if isinstance(result, tuple) else (result,)
        return {name: r for name, r in zip(node.outputs, results, strict=False) if name}

    def _in_floats(self, node: Node, scope: Scope, reader: Reader) -> Scope:
        """A node's outputs by its float rule, and integers where onnxruntime's own operator rounds."""
        outside = {name: self._outside(name, scope[name]) for name in node.reads() if name in scope}
        made = reader.step(node, self.graph.opset(node.domain), {**scope, **outside})
        made = {name: made[name] for name in node.outputs if name}
        grid = rounded_grid(self.graph, node)
        return made if grid is None else {**made, node.outputs[0]: wrapped(made[node.outputs[0]], grid)}

    def _reason(self, node: Node) -> str:
        entry = lookup(node, self.graph.opset(node.domain))
        ruled = entry is not None and (entry.integer is not None or entry.moves is not None or entry.layout == "same")
        return "no exact integer form" if ruled else "no integer rule"

    def _outside(self, name: str, value: Any) -> Any:
        """A value as the float rules read it."""
        if not _is_integer(value):
            return value
        if name in self.graph.arrays:
            return self.graph.arrays[name]

        def seen(array: Any) -> Any:
            inside = value.replace(array=array)
            return _in_file(inside, array) if isinstance(inside, Fixed) and inside.coded else inside.real()

        return layout.mapped(seen, layout.unpacked(value.array))

    def _integers(self, entry: Op, node: Node, opset: int, values: list[Any], reader: Reader) -> Any:
        """The rule on integers, one that moves them, or a table; NotImplemented if there is none."""
        result: Any = NotImplemented
        if entry.moves and _is_integer(values[0]):
            result = self._moved(entry, node, opset, values, reader)
        elif entry.integer is not None:
            result = self._ruled(entry.integer, node, opset, values)
        if result is NotImplemented and entry.layout == "same" and len(node.outputs) == 1:
            result = self._tabulated(node, opset, values)
        return result

    def _ruled(self, rule: Op, node: Node, opset: int, values: list[Any]) -> Any:
        """The integer rule, on arrays in the order that it wants."""
        operands = self._operands(rule, node, values)
        if operands is None:
            return NotImplemented
        context = IntegerContext(node, opset, self.lowering, _no_subgraph, self.target)
        arguments, keywords = rule.bind(node, operands, defaults(node.op_type, node.domain, opset), context)
        if not any(map(_is_integer, operands)):  # values that come in
            return rule.rule(*arguments, **keywords)
        result = _in_order(rule, arguments, keywords)
        waiting = [v for v in operands if isinstance(v, Fixed) and v.waits]
        if result is not NotImplemented or not waiting or is_pair(node):
            return result
        done = {id(v): v.cut_now() for v in waiting}
        if None in done.values():
            return NotImplemented
        return _in_order(rule, [done.get(id(a), a) for a in arguments], keywords)

    def _operands(self, rule: Op, node: Node, values: list[Any]) -> list[Any] | None:
        """The rule's operands among these values; None if it has no form for them."""
        static, operands = set(rule.static_positions(len(values))), list[Any]()
        for index, (name, value) in enumerate(zip(node.inputs, values, strict=True)):
            known = self.graph.arrays.get(name)
            settled = not set(rule.settled).isdisjoint(rule.inputs[index : index + 1])
            # A weight's channels lie where ONNX has them, which only products know.
            weight = isinstance(value, Fixed) and value.axis is not None and value.host is not None
            integers = isinstance(value, Fixed) and not value.coded
            if index in static and value is not None:
                value = _number(value) if known is None else known
                if value is None:
                    return None
            elif settled and known is not None and not _is_codes(known):
                value = known
            elif (weight and rule.linear is None) or not (value is None or integers or is_pair(node)):
                return None
            operands.append(value)
        return operands

    def _moved(self, entry: Op, node: Node, opset: int, values: list[Any], reader: Reader) -> Any:
        """The float rule on the integers themselves."""
        first: Fixed | Table = values[0]
        by_order = entry.moves == "by order"
        if any(map(_is_integer, values[1:])) or (by_order and not first.is_increasing):
            return NotImplemented
        if isinstance(first, Fixed):
            pooled = by_order and entry.layout == "last" and first.host is None
            if first.fraction is not None or (first.per_channel and not pooled):
                return NotImplemented
        scope = {n: v for n, v in zip(node.inputs, values, strict=True) if n}
        scope |= {n: a for n in node.inputs if (a := self.graph.arrays.get(n)) is not None}
        scope[node.inputs[0]] = first.array
        made = reader.step(node, opset, scope)
        results = [made[name] if name else None for name in node.outputs]
        if len(results) > 1 and not is_split(node):  # where an element was, say: no integer of the tensor's
            return (first.holding(results[0]), *results[1:])
        return tuple(map(first.holding, results))

    def _tabulated(self, node: Node, opset: int, values: list[Any]) -> Any:
        """An elementwise function of one tensor's integers, as the float rule computes it for each of them."""
        arrays: dict[str, np.ndarray] = {}
        tables: list[Table] = []
        for name, value in zip(node.inputs, values, strict=True):
            if _is_integer(value):
                table = value if isinstance(value, Table) else value.table() if value.grid is not None else None
                if table is None or (tables and table.array is not tables[0].array):
                    return NotImplemented
                arrays[name] = table.values
                tables.append(table)
            elif name:
                number = self.graph.arrays.get(name)
                if number is None or number.size != 1:
                    return NotImplemented
                arrays[name] = number.reshape(())
        result = np.asarray(evaluate(node, opset, arrays)[0])
        if result.shape != tables[0].values.shape or result.dtype != np.float32:
            return NotImplemented
        causes: frozenset[str] = frozenset().union(*(t.source.causes for t in tables))
        return dataclasses.replace(tables[0], values=result, source=tables[0].source.replace(causes=causes))


def _causes_of(node: Node, scope: Scope, causes: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Why the operands of a node may not be what exact arithmetic on the model gives, since they were rounded."""
    operands = [(name, scope.get(name)) for name in node.reads()]
    fixed = [(name, v.source if isinstance(v, Table) else v) for name, v in operands]
    return frozenset().union(*(v.causes if isinstance(v, Fixed) else causes.get(n, ()) for n, v in fixed))


def _is_integer(value: Any) -> bool:
    return isinstance(value, (Fixed, Table))


def _number(value: Any) -> np.ndarray | None:
    """The numbers that known integers stand for; None if they are not known."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, Fixed) or value.host is None or value.per_channel or value.coded:
        return None
    return (value.host.astype(np.int32) - value.zero).astype(np.float32) * np.float32(value.scale)


def _no_subgraph(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    raise ModelError("an integer rule cannot evaluate a subgraph")


def _in_order(rule: Op, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Call a rule with the arrays of its operands as `layout` orders them."""
    results: list[Any] = []

    def call(*arrays: Any, **options: Any) -> Any:
        operands = (a.replace(array=x) if _is_integer(a) else x for a, x in zip(arguments, arrays, strict=True))
        results.append(rule.rule(*operands, **options))
        return None if results[0] is NotImplemented else results[0].array

    arrays = [a.array if _is_integer(a) else a for a in arguments]
    array = layout.apply(rule.layout, rule.inputs, call, arrays, keywords)
    return NotImplemented if results[0] is NotImplemented else results[0].replace(array=array)


# --- The integers as a file has them ---


def _is_codes(array: np.ndarray) -> bool:
    return str(array.dtype) in INTEGERS


def centred(codes: np.ndarray) -> np.ndarray:
    """Integers of a file as a signed type of the same width.

    >>> centred(np.array([0, 128, 255], np.uint8))
    array([-128,    0,  127], dtype=int8)
    """
    grid = Grid(exact(np.float32(1)), 0, INTEGERS[str(codes.dtype)])
    return (codes.astype(np.int64) - grid.middle).astype(grid.dtype)


def _held(codes: Any, like: Fixed) -> Fixed:
    """Integers of a file in place of others of the same tensor."""
    plain = jnp.asarray(codes)
    return wrapped(layout.moved(plain) if layout.is_last(like.array) else plain, grid_of(like))


def grid_of(x: Fixed) -> Grid:
    """The grid of a tensor of the file."""
    if x.grid is None:
        raise Error("integers of a file need a grid; these belong to a sum that has not been rounded yet")
    return x.grid


def codes(x: Fixed) -> Any:
    """The integers of a tensor as the file has them."""
    return _in_file(x, layout.plain(x.array))


def _in_file(x: Fixed, array: Any) -> Any:
    grid = grid_of(x)
    return array if grid.grid.signed else (array.astype(np.int32) + grid.middle).astype(grid.grid.dtype)
