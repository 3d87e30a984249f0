"""The immutable graph.

A `Graph` is structure (nodes in topological order) and, apart from it, its arrays: every initializer
and `Constant` of the model and of its subgraphs stands in one of two flat dicts. `params` is the
pytree of weights that a traced function takes as its argument; `constants` are the int64, bool and
string tensors, which in ONNX describe shapes, axes and indices and are known while tracing. A graph is
never edited; a pass returns a new one through `Graph.replace`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jq.util import markup

Dim = int | str | None


@dataclasses.dataclass(frozen=True)
class Value:
    """The type of a tensor: a symbolic dim is its name, an unknown one is None."""

    name: str
    dtype: np.dtype | None = None
    shape: tuple[Dim, ...] | None = None
    containers: tuple[str, ...] = ()  # ("optional", "sequence"): an optional sequence of such tensors

    def __str__(self) -> str:
        dims = "?" if self.shape is None else ",".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name}: {' '.join([*self.containers, str(self.dtype or '?')])}[{dims}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operator. Omitted optional inputs and outputs are empty strings."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = dataclasses.field(default="", compare=False)  # no part of a digest: see `jq.util.digest`
    domain: str = ""

    def replace(self, **changes: Any) -> Node:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def subgraphs(self) -> dict[str, Graph]:
        """The graphs among the attributes, by attribute name."""
        return {k: v for k, v in self.attrs.items() if isinstance(v, Graph)}

    @property
    def label(self) -> str:
        """How messages call this node: its name, or its first output where it has none."""
        return self.name or next((o for o in self.outputs if o), "?")

    @property
    def qualified(self) -> str:
        """The operator with its domain, as in `com.microsoft::Gelu`."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    def reads(self) -> Iterator[str]:
        """The tensors that this node reads, those captured by its subgraphs included."""
        yield from (i for i in self.inputs if i)
        for graph in self.subgraphs.values():
            yield from graph.captured


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """An immutable ONNX graph; compared and hashed by identity, so `jit` may hold it static.

    Its digest covers what it computes; names of nodes, its own name and its metadata do not count.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    params: Mapping[str, np.ndarray]
    constants: Mapping[str, np.ndarray]
    opsets: Mapping[str, int]
    name: str = dataclasses.field(default="graph", compare=False)
    declared: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: what is derived from them is derived again, and programs stay in their process."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def _repr_html_(self) -> str:
        sides = (f"{side} {value}" for side, values in (("in", self.inputs), ("out", self.outputs)) for value in values)
        rows = [(n.qualified, n.name, ", ".join(n.inputs), ", ".join(n.outputs)) for n in self.nodes]
        title = f"Graph {self.name!r}: {len(self.nodes):,} nodes, {len(self.params):,} params; {'; '.join(sides)}"
        return markup.preview(title, ("operator", "name", "inputs", "outputs"), rows)

    def replace(self, **changes: Any) -> Graph:
        """Return a copy with some fields changed; nothing is pruned (see `graph.unused`)."""
        return dataclasses.replace(self, **changes)

    def opset(self, domain: str = "") -> int:
        """The version of a domain's operator set that this model was written for."""
        return self.opsets.get(domain, 1)

    @functools.cached_property
    def captured(self) -> frozenset[str]:
        """Names that a subgraph reads from the graphs around it."""
        own = {v.name for v in self.inputs} | {o for n in self.nodes for o in n.outputs}
        own |= self.arrays.keys()
        read = {r for n in self.nodes for r in n.reads()} | {v.name for v in self.outputs if v.name}
        return frozenset(read - own)

    @functools.cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """`params` and `constants` together, for look-ups by name."""
        return {**self.params, **self.constants}

    def with_arrays(self, arrays: Mapping[str, np.ndarray], **changes: Any) -> Graph:
        """Return a copy with other arrays, sorted into weights and constants by type."""
        constants = {k: a for k, a in arrays.items() if is_structural(a.dtype)}
        params = {k: a for k, a in arrays.items() if k not in constants}
        return self.replace(params=params, constants=constants, **changes)

    @functools.cached_property
    def producer(self) -> Mapping[str, Node]:
        """The node that makes each tensor."""
        return {o: n for n in self.nodes for o in n.outputs if o}

    @functools.cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each tensor; graph outputs do not count."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.reads()):
                readers.setdefault(name, []).append(node)
        return {k: tuple(v) for k, v in readers.items()}

    def sole_reader(self, name: str) -> Node | None:
        """The only node that reads a tensor, if it reads it once and the tensor is no graph output."""
        readers = self.consumers.get(name, ())
        alone = len(readers) == 1 and name not in self.output_names and tuple(readers[0].inputs).count(name) == 1
        return readers[0] if alone else None

    @functools.cached_property
    def tensors(self) -> frozenset[str]:
        """Every tensor name in use, those inside subgraphs included."""
        names = {v.name for v in self.inputs} | self.arrays.keys() | {o for n in self.nodes for o in n.outputs}
        return frozenset(names.union(*(g.tensors for n in self.nodes for g in n.subgraphs.values())))

    @functools.cached_property
    def programs(self) -> dict[Any, Any]:
        """Compiled programs that read this graph, by what else they depend on; freed with the graph."""
        return {}

    def edit(self, nodes: Mapping[Node, Node | None], arrays: Mapping[str, np.ndarray] | None = None) -> Graph:
        """A copy with some nodes replaced or (None) removed, and some arrays added or replaced."""
        kept = tuple(m for m in (nodes.get(n, n) for n in self.nodes) if m is not None)
        return self.with_arrays({**self.arrays, **(arrays or {})}, nodes=kept)

    @functools.cached_property
    def output_names(self) -> frozenset[str]:
        """The names of the graph's outputs."""
        return frozenset(v.name for v in self.outputs)

    @functools.cached_property
    def values(self) -> Mapping[str, Value]:
        """The type of every tensor, from ONNX shape inference; unknown types are absent."""
        from jq.graph.write import infer_types

        values = dict(self.declared)
        values |= {k: Value(k, a.dtype, a.shape) for k, a in self.arrays.items()}
        return values | infer_types(self) | {v.name: v for v in self.inputs}

    def walk(self) -> Iterator[Node]:
        """Every node, those of subgraphs included."""
        for node in self.nodes:
            yield node
            for graph in node.subgraphs.values():
                yield from graph.walk()


def is_structural(dtype: np.dtype) -> bool:
    """Whether tensors of this type hold structure (shapes, axes, indices, masks) rather than weights."""
    return dtype in (np.dtype(np.int64), np.dtype(np.bool_), np.dtype(object))
