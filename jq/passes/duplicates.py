"""Duplicate arrays and computations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jq.graph import Graph, is_structural
from jq.graph.edit import bypass, rename
from jq.graph.quantizers import quantizes
from jq.passes.constants import RANDOM
from jq.util.digest import digest


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
        key = (node.domain, node.op_type, inputs, digest(node.attrs), tuple(map(bool, node.outputs)))
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
            first[name] = seen.setdefault(digest(arrays[name]), name) if len(names) > 1 else name
    return first
