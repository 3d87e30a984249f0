"""The same thing computed or stored twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jq.graph import Graph, is_structural
from jq.passes.constants import RANDOM, quantizes
from jq.passes.edit import bypass, rename


def merge_duplicates(graph: Graph) -> Graph:
    """Return the graph with equal arrays stored once and equal computations done once.

    Vectors stay apart: they are the biases of layers that later passes adjust one by one. So do
    Quantize- and DequantizeLinear, of which backends want one per reader.
    """
    first = _first_of_equals(graph.arrays)
    shared = {k: v for k, v in first.items() if k != v and k not in graph.output_names and _shareable(graph.arrays[k])}
    if shared:
        arrays = {k: a for k, a in graph.arrays.items() if k not in shared}
        graph = rename(graph, shared).with_arrays(arrays)
    seen: dict[Any, tuple[str, ...]] = {}
    same: dict[str, str] = {}
    for node in graph.nodes:
        if node.op_type in RANDOM or quantizes(node) or node.subgraphs:
            continue
        inputs = tuple(first.get(i, i) for i in (same.get(i, i) for i in node.inputs))
        attrs = tuple(sorted((k, _key(v)) for k, v in node.attrs.items()))
        key = (node.domain, node.op_type, inputs, attrs, tuple(map(bool, node.outputs)))
        outputs = seen.setdefault(key, node.outputs)
        if outputs is not node.outputs:
            same |= {b: a for a, b in zip(outputs, node.outputs, strict=True) if b}
    return bypass(graph, same)


def _shareable(array: np.ndarray) -> bool:
    return array.ndim != 1 or is_structural(array.dtype)


def _first_of_equals(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """For each array the first that equals it."""
    groups: dict[Any, list[str]] = {}
    for name, array in arrays.items():
        groups.setdefault((array.dtype, array.shape), []).append(name)
    first = {}
    for names in groups.values():
        seen: dict[Any, str] = {}
        for name in names:
            first[name] = seen.setdefault(_key(arrays[name]), name) if len(names) > 1 else name
    return first


def _key(value: Any) -> Any:
    """What stands for an attribute or array in a comparison: its type too, for 1 == 1.0 == True."""
    if isinstance(value, np.ndarray):
        content: Any = repr(value.tolist()) if value.dtype == object else _digest(value)
        return "array", str(value.dtype), value.shape, content
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return tuple(map(_key, value))
    return type(value).__name__, repr(value)


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"").hexdigest()
