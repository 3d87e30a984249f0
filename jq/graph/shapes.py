"""Graphs whose inputs have fixed shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jq.errors import ConfigError, suggest
from jq.graph import Dim, Graph, Node, Value

_LARGEST = 1 << 31


def fix_shapes(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """Return the graph with inputs of fixed shapes; a named dim is fixed wherever its name is.

    >>> import jq
    >>> graph = fix_shapes(jq.load(jq.zoo.path("fashion_resnet")), {"input": (4, 1, 28, 28)})
    >>> [str(v) for v in (*graph.inputs, *graph.outputs)]
    ['input: float32[4,1,28,28]', 'logits: float32[4,10]']
    """
    inputs = {v.name: v for v in graph.inputs}
    known: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise ConfigError(f"no input {name!r}.{suggest(name, inputs)} Available: {', '.join(inputs)}")
        given = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if not all(isinstance(d, int) and not isinstance(d, bool) and 0 < d < _LARGEST for d in given):
            raise ConfigError(f"the shape of {name!r} is {given}; expected whole numbers above 0")
        declared = inputs[name].shape
        declared = (None,) * len(given) if declared is None else declared
        shown, rank = _shown(declared), len(declared)
        if rank != len(given):
            raise ConfigError(f"input {name!r} has {rank} dims, {shown}; {_shown(given)} does not fit")
        for dim, size in zip(declared, given, strict=True):
            bound = known.setdefault(dim, size) if isinstance(dim, str) else dim
            if bound not in (None, size):
                why = f": {dim} is {bound} already" if isinstance(dim, str) else ""
                raise ConfigError(f"{_shown(given)} does not fit input {name!r}, {shown}{why}")
    return _with_inputs(graph, {k: tuple(shape) for k, shape in shapes.items()}, known)


def of_data(graph: Graph, sample: Mapping[str, np.ndarray]) -> Graph:
    """Return the graph with the shapes that its inputs have in a sample, so that the size of each tensor is known.

    The graph itself where only first dims are free: they are the batch, and small.
    """
    if all(v.shape is not None and all(isinstance(d, int) for d in v.shape[1:]) for v in graph.inputs):
        return graph
    return _with_inputs(graph, {k: np.shape(value) for k, value in sample.items()}, {})


def _with_inputs(graph: Graph, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, int]) -> Graph:
    """The graph with inputs of these shapes; `known` are sizes of named dims."""
    fixed = (
        dataclasses.replace(v, shape=shapes[v.name]) if v.name in shapes else _bound(v, known) for v in graph.inputs
    )
    # What the file says of the shapes inside is of other inputs, and so may be what it says of the outputs.
    nodes = tuple(_undeclared(n) for n in graph.nodes)
    fixed_graph = graph.replace(inputs=tuple(fixed), nodes=nodes, declared={})
    inferred = fixed_graph.replace(outputs=tuple(dataclasses.replace(v, shape=None) for v in graph.outputs)).values
    outputs = [(inferred.get(v.name, v), v) for v in graph.outputs]
    typed = (o if o.shape is not None and o.dtype is not None else _bound(v, known) for o, v in outputs)
    return fixed_graph.replace(outputs=tuple(typed))


def _bound(value: Value, known: Mapping[str, int]) -> Value:
    if value.shape is None:
        return value
    dims: list[Dim] = [known.get(d, d) if isinstance(d, str) else d for d in value.shape]
    return dataclasses.replace(value, shape=tuple(dims))


def _undeclared(node: Node) -> Node:
    """The node, its subgraphs without what they say of the types inside."""
    inner = {k: g.replace(nodes=tuple(_undeclared(n) for n in g.nodes), declared={}) for k, g in node.subgraphs.items()}
    return node.replace(attrs={**node.attrs, **inner}) if inner else node


def _shown(shape: Sequence[Dim]) -> str:
    return "[" + ",".join("?" if d is None else str(d) for d in shape) + "]"
