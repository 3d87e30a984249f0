"""Float tensors in another floating-point type, and operators that compute in it."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from onnx import helper

from jq.arithmetic.formats import BFLOAT16, FLOAT16, Float
from jq.errors import ConfigError, ModelError, UnsupportedOp, suggest
from jq.graph import Graph, Node, Value
from jq.graph.edit import bypass, fresh, reading, rename
from jq.graph.quantizers import quantizes
from jq.graph.schemas import schema
from jq.graph.unused import remove_unused
from jq.ops.kinds import controls, is_cast
from jq.passes.opset import with_opset

FLOAT32 = np.dtype(np.float32)
_LEAST = 13  # the first opset whose Cast knows bfloat16
_NARROW = frozenset({FLOAT16.dtype, BFLOAT16.dtype})


def to_narrow(
    graph: Graph, format: Float, *, exclude: Collection[str] = (), keep_io: bool = True, saturate: bool = False
) -> Graph:
    """Return the graph with float32 tensors and operators in float16 or bfloat16.

    Inputs and outputs stay float32 with `keep_io`. An operand that ONNX wants in float32 (the scales of a Resize), and
    nodes that ONNX allows the type for at a later opset only, quantizers, custom operators, those on sequences, and what
    `exclude` names, as patterns or operators, stay float32, with Casts before and behind. A weight beyond the type's
    largest number is an error, or becomes that number with `saturate`. Opsets below 13 become 13.

    >>> import jq
    >>> graph = to_narrow(jq.load(jq.zoo.path("fashion_resnet")), FLOAT16)
    >>> {str(a.dtype) for a in graph.params.values()}, str(graph.inputs[0])
    ({'float16'}, 'input: float32[N,1,28,28]')
    """
    check_patterns(graph, exclude)
    graph = with_casts_defined(graph)
    retyped = _retyped(graph, frozenset({FLOAT32}), format.dtype, exclude, saturate)
    return with_interface(retyped, inputs_and_outputs(graph, FLOAT32), FLOAT32) if keep_io else retyped


def to_float32(graph: Graph) -> Graph:
    """Return the graph with float16 and bfloat16 tensors, inputs and outputs too, in float32.

    Casts between these types go, so that what they round is not rounded any more.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> again = to_float32(to_narrow(graph, FLOAT16))
    >>> len(again.nodes) == len(graph.nodes), {str(a.dtype) for a in again.params.values()}
    (True, {'float32'})
    """
    return _retyped(graph, _NARROW, FLOAT32, (), saturate=False)


def with_interface(graph: Graph, names: Collection[str], dtype: np.dtype) -> Graph:
    """Return the graph with some of its inputs and outputs in another type, behind Casts.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> graph = with_interface(graph, inputs_and_outputs(graph, FLOAT32), FLOAT16.dtype)
    >>> [str(v) for v in (*graph.inputs, *graph.outputs)]
    ['input: float16[N,1,28,28]', 'logits: float16[N,10]']
    """
    taken, labels, types = set(graph.tensors), {n.name for n in graph.walk()}, graph.values
    inner: dict[str, str] = {}
    before: list[Node] = []
    behind: list[Node] = []
    for value in graph.inputs:
        if value.name in names and value.dtype is not None:
            inner[value.name] = fresh(f"{value.name}_{value.dtype}", taken)
            before.append(_cast(value.name, inner[value.name], value.dtype, labels))
    for value in graph.outputs:
        if value.name in names and value.name not in inner:  # an input that is an output has its type already
            inner[value.name] = fresh(f"{value.name}_{types[value.name].dtype}", taken)
            behind.append(_cast(inner[value.name], value.name, dtype, labels))

    def typed(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(dataclasses.replace(v, dtype=dtype) if v.name in inner else v for v in values)

    made = {n.outputs[0] for n in behind}
    arrays = {inner[k] if k in made else k: a for k, a in graph.arrays.items()}
    renamed = rename(graph.with_arrays(arrays), inner)
    nodes = (*before, *renamed.nodes, *behind)
    return renamed.replace(nodes=nodes, inputs=typed(graph.inputs), outputs=typed(graph.outputs), declared={})


def inputs_and_outputs(graph: Graph, dtype: np.dtype) -> set[str]:
    """Return the names of the inputs and outputs that are tensors of a type.

    >>> import jq
    >>> sorted(inputs_and_outputs(jq.load(jq.zoo.path("fashion_resnet")), FLOAT32))
    ['input', 'logits']
    """
    values = [graph.values.get(v.name, v) for v in (*graph.inputs, *graph.outputs)]
    return {v.name for v in values if v.dtype == dtype and not v.containers}


def narrowed(name: str, array: np.ndarray, format: Float, saturate: bool) -> np.ndarray:
    """Return a weight in a type with fewer bits; values beyond its largest number are an error, or saturate.

    >>> narrowed("w", np.float32([1, 1e6]), FLOAT16, saturate=True)
    array([1.00e+00, 6.55e+04], dtype=float16)
    >>> narrowed("w", np.float32([1, 1e6]), FLOAT16, saturate=False)
    Traceback (most recent call last):
    jq.errors.ModelError: 1 of 2 values of 'w' exceed the range of float16: ...
    """
    with np.errstate(over="ignore"):
        narrow = array.astype(format.dtype)
    beyond = np.isinf(narrow.astype(np.float32)) & np.isfinite(array)
    if beyond.any() and not saturate:
        largest = np.abs(array[beyond]).max()
        raise ModelError(
            f"{beyond.sum()} of {array.size} values of {name!r} exceed the range of {format.name}: the largest magnitude is "
            f"{largest:.6g}, but the range ends at {format.largest:.6g}. Exclude the nodes that read it, or saturate"
        )
    if array.size and array.all() and not narrow.any():
        most = np.abs(array).max()
        warnings.warn(
            f"all values of {name!r}, at most {most:.3g} in magnitude, become zero in {format.name}", stacklevel=2
        )
    return np.where(beyond, np.copysign(format.dtype.type(format.largest), narrow), narrow).astype(format.dtype)


def with_casts_defined(graph: Graph) -> Graph:
    """Return the graph at an opset whose Cast knows bfloat16.

    >>> import jq
    >>> with_casts_defined(jq.load(jq.zoo.path("fashion_resnet"))).opset()
    17
    """
    return with_opset(graph, _LEAST) if graph.opset() < _LEAST else graph


def check_patterns(graph: Graph, patterns: Iterable[str]) -> None:
    """Raise a ConfigError for a pattern that is the name or the operator of no node, in subgraphs or not."""
    nodes = list(graph.walk())
    for pattern in patterns:
        if not any(matches_any(n, [pattern]) for n in nodes):
            known = [*(n.label for n in nodes), *{n.op_type for n in nodes}]
            raise ConfigError(f"exclude: {pattern!r} matches no node, by name or operator.{suggest(pattern, known)}")


def matches_any(node: Node, patterns: Iterable[str]) -> bool:
    """Return whether patterns name a node, or its operator.

    >>> matches_any(Node("Conv", ("x", "w"), ("y",), name="conv_1"), ["conv_*"])
    True
    """
    return any(pattern == node.op_type or fnmatch.fnmatchcase(node.label, pattern) for pattern in patterns)


def _cast(source: str, result: str, dtype: np.dtype, labels: set[str]) -> Node:
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    return Node("Cast", (source,), (result,), {"to": kind}, fresh(f"{result}_Cast", labels))


# --- Types of tensors inside ---


def _retyped(
    graph: Graph, sources: frozenset[np.dtype], target: np.dtype, exclude: Collection[str], saturate: bool
) -> Graph:
    """The graph with all tensors of some types in another one.

    Every tensor is there twice at first, under its name in the new type, and under another as it was, and every node
    reads which of the two it can. What nobody reads then goes.
    """
    graph = remove_unused(graph)
    work = _Retyping(sources, target, tuple(exclude), set(graph.tensors), {n.name for n in graph.walk()})
    retyped = work.graph(graph, {})
    if work.unknown:
        raise UnsupportedOp(f"tensors of unknown type cannot be converted: {'; '.join(work.unknown)}")
    arrays = dict(graph.arrays)
    arrays |= {work.kept(k, a.dtype): a for k, a in graph.arrays.items() if a.dtype in sources}
    retyped = remove_unused(retyped.with_arrays(arrays))
    format = {f.dtype: f for f in (FLOAT16, BFLOAT16)}.get(target)
    changed = {k: a for k, a in retyped.arrays.items() if a.dtype in sources and k in graph.arrays}
    changed = {k: a.astype(target) if format is None else narrowed(k, a, format, saturate) for k, a in changed.items()}
    return _without_idle_casts(retyped.with_arrays({**retyped.arrays, **changed}, declared={}))


@dataclasses.dataclass(eq=False)
class _Retyping:
    """State of a conversion: which types change, and the names of the unchanged tensors."""

    sources: frozenset[np.dtype]
    target: np.dtype
    exclude: tuple[str, ...]
    taken: set[str]  # names of tensors
    labels: set[str]  # and of nodes
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)

    def kept(self, name: str, dtype: np.dtype | None) -> str:
        """The name of a tensor as it was."""
        if name not in self.names:
            self.names[name] = fresh(f"{name}_{dtype}", self.taken)
        return self.names[name]

    def graph(self, graph: Graph, outer: Mapping[str, Value]) -> Graph:
        """A graph, or a subgraph that reads tensors of the graphs around it, which have these types."""
        captured = tuple(outer[name] for name in sorted(graph.captured) if name in outer)
        types = {**outer, **graph.replace(inputs=(*graph.inputs, *captured)).values}
        nodes: list[Node] = []
        for value in graph.inputs:
            nodes += self.back(value.name, types)
        for node in graph.nodes:
            nodes += self.node(node, types, graph.opset(node.domain))

        def typed(values: tuple[Value, ...]) -> tuple[Value, ...]:
            return tuple(dataclasses.replace(v, dtype=self.target) if self.holds(v.name, types) else v for v in values)

        return graph.replace(nodes=tuple(nodes), inputs=typed(graph.inputs), outputs=typed(graph.outputs), declared={})

    def holds(self, name: str, types: Mapping[str, Value]) -> bool:
        """Whether a tensor has one of the types that change."""
        return _dtype(types, name) in self.sources and not types[name].containers

    def back(self, name: str, types: Mapping[str, Value]) -> list[Node]:
        """The tensor as it was, from the one in the new type."""
        dtype = _dtype(types, name) if self.holds(name, types) else None
        return [] if dtype is None else [_cast(name, self.kept(name, dtype), dtype, self.labels)]

    def node(self, node: Node, types: Mapping[str, Value], opset: int) -> list[Node]:
        """A node in the new type, where its operator allows it, and the Casts behind it."""
        for name in filter(None, node.outputs):
            if _dtype(types, name) is None:
                self.unknown.append(f"node {node.label!r} ({node.qualified}) writes {name!r}, whose type is not known")
        casts = [cast for o in node.outputs for cast in self.back(o, types)]
        if matches_any(node, self.exclude):
            return self.unchanged(node, types)
        if controls(node):
            inner = {k: self.graph(g, types) for k, g in node.subgraphs.items()}
            return [node.replace(attrs={**node.attrs, **inner}), *casts]
        if is_cast(node):
            if casts:
                node = node.replace(attrs={**node.attrs, "to": helper.np_dtype_to_tensor_dtype(self.target)})
            return [node, *casts]
        alone = self.refused(node, types, opset)
        if alone is None:
            return self.unchanged(node, types)
        inputs = tuple(self.kept(n, types[n].dtype) if i in alone else n for i, n in enumerate(node.inputs))
        return [node.replace(inputs=inputs), *casts]

    def unchanged(self, node: Node, types: Mapping[str, Value]) -> list[Node]:
        """A node, with all that is in it, on tensors as they were, and Casts of what it makes to the new type."""
        names = {n: self.kept(n, types[n].dtype) for n in (*node.reads(), *node.outputs) if self.holds(n, types)}
        casts = [_cast(names[o], o, self.target, self.labels) for o in node.outputs if o in names]
        outputs = tuple(names.get(o, o) for o in node.outputs)
        return [reading(node, names).replace(outputs=outputs), *casts]

    def refused(self, node: Node, types: Mapping[str, Value], opset: int) -> set[int] | None:
        """Return the indices of inputs that an operator takes in other types only; None if the node stays unchanged."""
        definition = schema(node.op_type, node.domain, opset)
        contained = any(n in types and types[n].containers for n in (*node.inputs, *node.outputs))
        if definition is None or quantizes(node) or node.subgraphs or contained:
            return None
        name = f"tensor({'float' if self.target == FLOAT32 else self.target})"
        allowed = {c.type_param_str: name in c.allowed_type_strs for c in definition.type_constraints}
        inputs, outputs = (
            # The last parameter may stand for many.
            {i: side[min(i, len(side) - 1)].type_str for i, n in enumerate(names) if self.holds(n, types)}
            for side, names in ((definition.inputs, node.inputs), (definition.outputs, node.outputs))
        )
        # Of a type that no input has, attributes say which it is.
        if not all(kind in inputs.values() and allowed.get(kind, False) for kind in outputs.values()):
            return None
        return {i for i, kind in inputs.items() if not allowed.get(kind, False)}


def _without_idle_casts(graph: Graph) -> Graph:
    """The graph without Casts of tensors to the type that they have."""
    types = graph.values
    casts = [n for n in graph.nodes if is_cast(n) and len(n.inputs) == 1]
    idle = [n for n in casts if (d := _dtype(types, n.inputs[0])) is not None and d == _dtype(types, n.outputs[0])]
    return bypass(graph, {n.outputs[0]: n.inputs[0] for n in idle})


def _dtype(types: Mapping[str, Value], name: str) -> np.dtype | None:
    return types[name].dtype if name in types else None
