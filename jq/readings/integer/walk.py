"""Graph -> integer program: the third reading.

A walk over a quantized graph in which integers pass from node to node as `Fixed`, exactly, and are rounded where a
QuantizeLinear stands. Each operator's integer rule stands beside its float rule in the op table. Where it has none
for the operands at hand, the node is computed in float32, as the model says, and listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from jq.ops.table import IntegerContext, Op, demanded, lookup
from jq.readings.integer.recognition import rounded_grid
from jq.readings.tracing import Reader, evaluate

Scope = dict[str, Any]
# What rounds, what it rounds if that is known, what that becomes, and why it may not be what the model says.
Watch = Callable[[Node, Any, Fixed, frozenset[str]], None]

_LARGE = 1 << 33  # bytes of a tensor that is believed


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """A quantized graph as a chip computes it."""

    graph: Graph
    target: Target
    lowering: str
    # Of when it was last traced: what was computed in float32 and why, and the grids of the tensors of integers.
    floats: dict[Node, str] = dataclasses.field(default_factory=dict)
    grids: dict[str, Grid] = dataclasses.field(default_factory=dict)

    def run(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, Any],
        *,
        given: Mapping[str, Any] | None = None,
        watch: Watch | None = None,
    ) -> tuple[dict[str, Any], dict[str, Fixed]]:
        """The outputs, and the integers of each tensor of the file.

        What is `given` replaces the integers that were computed for those who read them. `watch` sees each rounding.
        """
        graph = self.graph
        scope: Scope = {**graph.constants, **graph.params, **params, **inputs}
        scope |= {name: self._constant(name, value) for name, value in params.items() if _is_codes(graph.params[name])}
        needed = demanded(graph, steering=True)
        scope |= {name: array for name, array in graph.params.items() if name in needed}  # known while tracing
        reader = Reader(self.lowering, needed, _LARGE)
        self.floats.clear()
        causes: dict[str, frozenset[str]] = {}  # of floats that were computed of integers
        found: dict[str, Fixed] = {}
        for node in graph.nodes:
            self._step(reader, node, scope, causes)
            result = scope[node.outputs[0]] if node.outputs and node.outputs[0] else None
            if isinstance(result, Fixed) and rounds(node):
                name = node.outputs[0]
                found[name] = result
                assert result.grid is not None
                self.grids[name] = result.grid
                if watch is not None:
                    known = node.op_type == "QuantizeLinear" and node not in self.floats
                    watch(node, scope[node.inputs[0]] if known else None, result, _causes_of(node, scope, causes))
                if given is not None and name in given:
                    scope[name] = held(given[name], result)
        return {v.name: layout.plain(self._outside(v.name, scope[v.name])) for v in graph.outputs}, found

    def _constant(self, name: str, array: Any) -> Fixed:
        host = centred(self.graph.params[name])
        grid = Grid(exact(np.float32(1)), 0, INTEGERS[str(self.graph.params[name].dtype)])
        bound = int(np.abs(host.astype(np.int64)).max(initial=0))
        return Fixed(array, grid.scale, bound, 0, grid, host=host, coded=True)

    def _step(self, reader: Reader, node: Node, scope: Scope, causes: dict[str, frozenset[str]]) -> None:
        opset = self.graph.opset(node.domain)
        entry = lookup(node, opset)
        values = [scope.get(name) if name else None for name in node.inputs]
        integers = [v for v in values if isinstance(v, (Fixed, Table))]
        if entry is not None and (integers or is_pair(node)):
            try:
                result = self._integers(entry, node, opset, values, reader)
            except Error as error:
                raise type(error)(f"node {node.label!r} ({node.qualified}, opset {opset}): {error}") from error
            if result is not NotImplemented:
                results = result if isinstance(result, tuple) else (result,)
                scope.update({name: r for name, r in zip(node.outputs, results, strict=False) if name})
                return
        if integers and node.op_type != "DequantizeLinear":
            self.floats[node] = "no integer rule" if entry is None or not _has_rule(entry) else "no exact integer form"
        inner = {**scope, **{name: self._outside(name, scope[name]) for name in node.reads() if name in scope}}
        reader.step(node, opset, inner)
        found = _causes_of(node, scope, causes)
        scope.update({name: inner[name] for name in node.outputs if name})
        causes |= dict.fromkeys(node.outputs, found)
        grid = rounded_grid(self.graph, node)
        if grid is not None:  # in float32, as an integer operator of onnxruntime's is in part
            scope[node.outputs[0]] = wrapped(scope[node.outputs[0]], grid)

    def _outside(self, name: str, value: Any) -> Any:
        """What those see of integers who know of floats only."""
        if not isinstance(value, (Fixed, Table)):
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
        if entry.moves and isinstance(values[0], (Fixed, Table)):
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
        if not any(isinstance(v, (Fixed, Table)) for v in operands):  # values that come in
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
        """What the rule takes of these values; None if that is not what they are."""
        static, found = set(rule.static_positions(len(values))), list[Any]()
        for index, (name, value) in enumerate(zip(node.inputs, values, strict=True)):
            settled = index < len(rule.inputs) and rule.inputs[index] in rule.settled
            known = self.graph.arrays.get(name)
            if index in static and value is not None:
                number = known if known is not None else _number(value)
                if number is None:
                    return None
                found.append(number)
            elif settled and known is not None and not _is_codes(known):
                found.append(known)
            else:
                found.append(value)
                integers = isinstance(value, Fixed) and not value.coded
                # A weight's channels lie where ONNX has them, which only products know.
                weight = isinstance(value, Fixed) and value.axis is not None and value.host is not None
                if not is_pair(node) and value is not None and not integers:
                    return None
                if weight and rule.channels is None:
                    return None
        return found

    def _moved(self, entry: Op, node: Node, opset: int, values: list[Any], reader: Reader) -> Any:
        """The float rule on the integers themselves."""
        first: Fixed | Table = values[0]
        others = [v for v in values[1:] if isinstance(v, (Fixed, Table))]
        pools = entry.moves == "by order" and entry.layout == "last"
        if others or (isinstance(first, Fixed) and first.per_channel and not (pools and first.host is None)):
            return NotImplemented
        if isinstance(first, Fixed) and first.fraction is not None:
            return NotImplemented
        if entry.moves == "by order" and not first.is_increasing:
            return NotImplemented
        scope = {n: v for n, v in zip(node.inputs, values, strict=True) if n}
        scope |= {n: a for n in node.inputs if (a := self.graph.arrays.get(n)) is not None}
        scope[node.inputs[0]] = first.array
        reader.step(node, opset, scope)
        results = [scope[name] if name else None for name in node.outputs]
        if len(results) > 1 and node.op_type != "Split":  # where an element was, say: no integer of the tensor's
            return (first.holding(results[0]), *results[1:])
        return tuple(map(first.holding, results))

    def _tabulated(self, node: Node, opset: int, values: list[Any]) -> Any:
        """An elementwise function of one tensor's integers, as the float rule computes it for each of them."""
        arrays: dict[str, np.ndarray] = {}
        tables: list[Table] = []
        for name, value in zip(node.inputs, values, strict=True):
            if isinstance(value, (Fixed, Table)):
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
    found: frozenset[str] = frozenset()
    for name in node.reads():
        value = scope.get(name)
        if isinstance(value, Table):
            found |= value.source.causes
        elif isinstance(value, Fixed):
            found |= value.causes
        else:
            found |= causes.get(name, frozenset())
    return found


def _number(value: Any) -> np.ndarray | None:
    """What known integers stand for; None of what is not known."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, Fixed) or value.host is None or value.per_channel or value.coded:
        return None
    return (value.host.astype(np.int32) - value.zero).astype(np.float32) * np.float32(value.scale)


def _has_rule(entry: Op) -> bool:
    return entry.integer is not None or entry.moves is not None or entry.layout == "same"


def _no_subgraph(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    raise ModelError("an integer rule evaluates no subgraph")


def _in_order(rule: Op, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Call a rule with the arrays of its operands as `layout` orders them."""
    numbers: list[Fixed | Table] = []

    def call(*arrays: Any, **options: Any) -> Any:
        operands = [
            a.replace(array=moved) if isinstance(a, (Fixed, Table)) else moved
            for a, moved in zip(arguments, arrays, strict=True)
        ]
        found = rule.rule(*operands, **options)
        if found is not NotImplemented:
            numbers.append(found)
        return None if found is NotImplemented else found.array

    arrays = [a.array if isinstance(a, (Fixed, Table)) else a for a in arguments]
    array = layout.apply(rule.layout, rule.inputs, call, arrays, keywords)
    return numbers[0].replace(array=array) if numbers else NotImplemented


# ---------------------------------------------------------------------------------------------
# The integers as a file has them
# ---------------------------------------------------------------------------------------------


def _is_codes(array: np.ndarray) -> bool:
    return str(array.dtype) in INTEGERS


def centred(codes: np.ndarray) -> np.ndarray:
    """Integers of a file as a signed type of the same width.

    >>> centred(np.array([0, 128, 255], np.uint8))
    array([-128,    0,  127], dtype=int8)
    """
    grid = Grid(exact(np.float32(1)), 0, INTEGERS[str(codes.dtype)])
    return (codes.astype(np.int64) - grid.middle).astype(grid.dtype)


def held(codes: Any, like: Fixed) -> Fixed:
    """Integers of a file in place of others of the same tensor."""
    assert like.grid is not None
    plain = jnp.asarray(codes)
    return wrapped(layout.moved(plain) if layout.is_last(like.array) else plain, like.grid)


def codes(x: Fixed) -> Any:
    """The integers of a tensor as the file has them."""
    return _in_file(x, layout.plain(x.array))


def _in_file(x: Fixed, array: Any) -> Any:
    assert x.grid is not None
    return array if x.grid.codes.signed else (array.astype(np.int32) + x.grid.middle).astype(x.grid.codes.dtype)
