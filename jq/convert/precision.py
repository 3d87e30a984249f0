"""Float tensors in another floating-point type, and operators that compute in it."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from onnx import helper

from jq.errors import ConfigError, ModelError, UnsupportedOp, suggest
from jq.formats import BFLOAT16, FLOAT16, Float
from jq.graph import Graph, Node, Value
from jq.passes.clean import remove_unused
from jq.passes.constants import quantizes
from jq.passes.edit import bypass, fresh, rename
from jq.registry import schema

FLOAT32 = np.dtype(np.float32)
_NARROW = frozenset({FLOAT16.dtype, BFLOAT16.dtype})


def to_narrow(
    graph: Graph, format: Float, *, exclude: Collection[str] = (), keep_io: bool = True, saturate: bool = False
) -> Graph:
    """Return the graph with float32 tensors and operators in float16 or bfloat16.

    Inputs and outputs stay float32 with `keep_io`. An operand that ONNX wants in float32 (the scales of a Resize), a
    node whose operator the type is not allowed for at the model's opset, quantizers, custom operators, and nodes that
    `exclude` names, as patterns or operators, stay float32, with a Cast before and behind. A weight beyond the type's
    largest number is an error, or becomes that number with `saturate`.

    >>> import jq
    >>> graph = to_narrow(jq.load(jq.zoo.path("fashion_resnet")), FLOAT16)
    >>> {str(a.dtype) for a in graph.params.values()}, str(graph.inputs[0])
    ({'float16'}, 'input: float32[N,1,28,28]')
    """
    check_patterns(graph, exclude)
    found = _retyped(graph, frozenset({FLOAT32}), format.dtype, exclude, saturate)
    return with_interface(found, {format.dtype}, FLOAT32) if keep_io else found


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


def with_interface(graph: Graph, sources: Collection[np.dtype], target: np.dtype) -> Graph:
    """Return the graph with those of its inputs and outputs that have one of some types in another, behind Casts.

    >>> import jq
    >>> graph = with_interface(jq.load(jq.zoo.path("fashion_resnet")), {FLOAT32}, FLOAT16.dtype)
    >>> [str(v) for v in (*graph.inputs, *graph.outputs)]
    ['input: float16[N,1,28,28]', 'logits: float16[N,10]']
    """
    taken, labels, types = set(graph.tensors), {n.name for n in graph.walk()}, graph.values
    behind: list[Node] = []
    before = [
        _cast(v.name, fresh(f"{v.name}_{v.dtype}", taken), v.dtype, labels)
        for v in graph.inputs
        if v.dtype is not None and v.dtype in sources
    ]
    ins = {n.inputs[0]: n.outputs[0] for n in before}
    for value in graph.outputs:
        dtype = value.dtype or types[value.name].dtype
        if dtype in sources and value.name not in ins:  # an input that is an output has its type already
            behind.append(_cast(fresh(f"{value.name}_{dtype}", taken), value.name, target, labels))
    outs = {n.outputs[0]: n.inputs[0] for n in behind}

    def typed(values: Iterable[Value], names: Collection[str]) -> tuple[Value, ...]:
        return tuple(dataclasses.replace(v, dtype=target) if v.name in names else v for v in values)

    arrays = {outs.get(k, k): a for k, a in graph.arrays.items()}
    inner = rename(graph.with_arrays(arrays), ins | outs)
    return inner.replace(
        nodes=(*before, *inner.nodes, *behind),
        inputs=typed(graph.inputs, ins),
        outputs=typed(graph.outputs, {*ins, *outs}),
        declared={},
    )


def narrowed(name: str, array: np.ndarray, format: Float, saturate: bool) -> np.ndarray:
    """Return a weight in a type with fewer bits; what is beyond its largest number is an error, or saturates.

    >>> narrowed("w", np.float32([1, 1e6]), FLOAT16, saturate=True)
    array([1.00e+00, 6.55e+04], dtype=float16)
    >>> narrowed("w", np.float32([1, 1e6]), FLOAT16, saturate=False)
    Traceback (most recent call last):
    jq.errors.ModelError: 1 of 2 values of 'w' are beyond float16: ...
    """
    with np.errstate(over="ignore"):
        found = array.astype(format.dtype)
    beyond = np.isinf(found.astype(np.float32)) & np.isfinite(array)
    if beyond.any() and not saturate:
        largest = np.abs(array[beyond]).max()
        raise ModelError(
            f"{beyond.sum()} of {array.size} values of {name!r} are beyond {format.name}: the largest magnitude is "
            f"{largest:.6g}, the type ends at {format.largest:.6g}. Exclude the nodes that read it, or saturate"
        )
    if array.size and array.all() and not found.any():
        warnings.warn(
            f"{name!r}, of magnitude {np.abs(array).max():.3g} and less, is zero in {format.name}", stacklevel=2
        )
    return np.where(beyond, np.copysign(format.dtype.type(format.largest), found), found).astype(format.dtype)


def check_patterns(graph: Graph, patterns: Iterable[str]) -> None:
    """Raise a ConfigError for a pattern that is the name or the operator of no node, in subgraphs or not."""
    nodes = list(graph.walk())
    for pattern in patterns:
        if not any(matches_any(n, [pattern]) for n in nodes):
            known = [*(n.label for n in nodes), *{n.op_type for n in nodes}]
            raise ConfigError(f"exclude: {pattern!r} is the name or the operator of no node.{suggest(pattern, known)}")


def matches_any(node: Node, patterns: Iterable[str]) -> bool:
    """Return whether patterns name a node, or its operator.

    >>> matches_any(Node("Conv", ("x", "w"), ("y",), name="conv_1"), ["conv_*"])
    True
    """
    return any(pattern == node.op_type or fnmatch.fnmatchcase(node.label, pattern) for pattern in patterns)


def _cast(source: str, result: str, dtype: np.dtype, labels: set[str]) -> Node:
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    return Node("Cast", (source,), (result,), {"to": kind}, fresh(f"{result}_Cast", labels))


# ---------------------------------------------------------------------------------------------
# Types of tensors inside
# ---------------------------------------------------------------------------------------------


def _retyped(
    graph: Graph, sources: frozenset[np.dtype], target: np.dtype, exclude: Collection[str], saturate: bool
) -> Graph:
    """The graph with all tensors of some types in another one.

    Every tensor is there twice at first, under its name in the new type, and under another as it was, and every node
    reads which of the two it can. What nobody reads then goes.
    """
    graph = remove_unused(graph)
    work = _Retyping(sources, target, tuple(exclude), set(graph.tensors), {n.name for n in graph.walk()})
    found = work.graph(graph, {})
    if work.unknown:
        raise UnsupportedOp(f"types of tensors must be known to change them: {'; '.join(work.unknown)}")
    arrays = dict(graph.arrays)
    arrays |= {work.kept(k, a.dtype): a for k, a in graph.arrays.items() if a.dtype in sources}
    found = remove_unused(found.with_arrays(arrays))
    format = {f.dtype: f for f in (FLOAT16, BFLOAT16)}.get(target)
    changed = {k: a for k, a in found.arrays.items() if a.dtype in sources and k in graph.arrays}
    changed = {k: a.astype(target) if format is None else narrowed(k, a, format, saturate) for k, a in changed.items()}
    return _without_idle_casts(found.with_arrays({**found.arrays, **changed}, declared={}))


@dataclasses.dataclass(frozen=True)
class _Retyping:
    """What is changed to what, and the names that tensors have as they were."""

    sources: frozenset[np.dtype]
    target: np.dtype
    exclude: tuple[str, ...]
    taken: set[str]  # names of tensors
    labels: set[str]  # and of nodes
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)

    def kept(self, name: str, dtype: np.dtype) -> str:
        """The name of a tensor as it was."""
        if name not in self.names:
            self.names[name] = fresh(f"{name}_{dtype}", self.taken)
        return self.names[name]

    def graph(self, graph: Graph, outer: Mapping[str, Value]) -> Graph:
        """A graph, or a subgraph that reads tensors of the graphs around it, which have these types."""
        captured = tuple(outer[name] for name in sorted(graph.captured()) if name in outer)
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
        return bool(name) and name in types and types[name].dtype in self.sources

    def back(self, name: str, types: Mapping[str, Value]) -> list[Node]:
        """The tensor as it was, from the one in the new type."""
        dtype = types[name].dtype if self.holds(name, types) else None
        return [] if dtype is None else [_cast(name, self.kept(name, dtype), dtype, self.labels)]

    def node(self, node: Node, types: Mapping[str, Value], opset: int) -> list[Node]:
        """A node in the new type as far as its operator has it, and Casts behind it."""
        self.check(node, types)
        if node.subgraphs:
            inner = {k: self.graph(g, types) for k, g in node.subgraphs.items()}
            node = node.replace(attrs={**node.attrs, **inner})
            return [node, *(cast for o in node.outputs for cast in self.back(o, types))]
        if node.op_type == "Cast" and not node.domain and not matches_any(node, self.exclude):
            to = helper.tensor_dtype_to_np_dtype(node.attrs["to"])
            if to in self.sources:
                node = node.replace(attrs={**node.attrs, "to": helper.np_dtype_to_tensor_dtype(self.target)})
            return [node, *self.back(node.outputs[0], types)]
        ins, outs = self.held(node, types, opset)
        inputs = tuple(self.kept(n, d) if (d := ins.get(i)) is not None else n for i, n in enumerate(node.inputs))
        outputs = tuple(self.kept(n, d) if (d := outs.get(i)) is not None else n for i, n in enumerate(node.outputs))
        after: list[Node] = []
        for place, name in enumerate(node.outputs):
            after += (
                [_cast(outputs[place], name, self.target, self.labels)] if place in outs else self.back(name, types)
            )
        return [node.replace(inputs=inputs, outputs=outputs), *after]

    def check(self, node: Node, types: Mapping[str, Value]) -> None:
        """Note tensors whose types are not known, or are not of tensors."""
        for name in filter(None, node.outputs):
            value = types.get(name)
            if value is None or value.dtype is None or value.containers:
                kind = "of unknown type" if value is None or not value.containers else f"a {value.containers[0]}"
                self.unknown.append(f"node {node.label!r} ({node.qualified}) makes {name!r}, which is {kind}")

    def held(
        self, node: Node, types: Mapping[str, Value], opset: int
    ) -> tuple[dict[int, np.dtype], dict[int, np.dtype]]:
        """The places of the inputs and outputs that stay as they are, with their types."""
        ins, outs = (
            {i: d for i, n in enumerate(names) if self.holds(n, types) and (d := types[n].dtype) is not None}
            for names in (node.inputs, node.outputs)
        )
        found = schema(node.op_type, node.domain, opset)
        if found is None or quantizes(node) or matches_any(node, self.exclude):
            return ins, outs
        allowed = {c.type_param_str: c.allowed_type_strs for c in found.type_constraints}
        kinds = [[p.type_str for p in side] for side in (found.inputs, found.outputs)]
        # The last parameter may stand for many.
        inputs, outputs = ({i: k[min(i, len(k) - 1)] for i in side} for k, side in zip(kinds, (ins, outs), strict=True))
        if not set(outputs.values()) <= set(inputs.values()):  # attributes say of which type an output is
            return ins, outs
        name = f"tensor({'float' if self.target == FLOAT32 else self.target})"
        refused = {k for k in (*inputs.values(), *outputs.values()) if name not in allowed.get(k, (k,))}
        return (
            {i: d for i, d in ins.items() if inputs[i] in refused},
            {i: d for i, d in outs.items() if outputs[i] in refused},
        )


def _without_idle_casts(graph: Graph) -> Graph:
    """The graph without Casts of tensors to the type that they have."""
    types = graph.values
    casts = [n for n in graph.nodes if n.op_type == "Cast" and not n.domain and len(n.inputs) == 1]
    idle = [n for n in casts if (d := _dtype(types, n.inputs[0])) is not None and d == _dtype(types, n.outputs[0])]
    return bypass(graph, {n.outputs[0]: n.inputs[0] for n in idle})


def _dtype(types: Mapping[str, Value], name: str) -> np.dtype | None:
    return types[name].dtype if name in types else None
