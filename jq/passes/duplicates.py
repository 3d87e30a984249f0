"""Duplicate arrays and computations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from jq.graph import Graph, is_structural
from jq.graph.edit import bypass, rename
from jq.graph.quantizers import quantizes
from jq.passes.constants import RANDOM
from jq.util.digest import digest
from jq.util.mapped import release

_SAMPLE = 256  # elements


def merge_duplicates(graph: Graph) -> Graph:
    """Return the graph with equal arrays stored once and equal computations done once.

    Vectors stay apart: they are the biases of layers that later passes adjust one by one. So do
    Quantize- and DequantizeLinear, of which backends want one per reader.
    """
    first = _first_of_equals(graph.arrays)
    apart = {k for k, a in graph.arrays.items() if a.ndim == 1 and not is_structural(a.dtype)} | set(graph.output_names)
    shared = {k: v for k, v in first.items() if k != v and k not in apart}
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


def _first_of_equals(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """For each array the first that equals it."""
    kinds = {name: (array.dtype, array.shape, _sampled(array)) for name, array in arrays.items()}
    alike, seen = Counter(kinds.values()), dict[Any, str]()
    first = {}
    for name, array in arrays.items():
        kind = kinds[name]
        first[name] = seen.setdefault((kind, digest(array)), name) if alike[kind] > 1 else name
        release(array)
    return first


def _sampled(array: np.ndarray) -> str:
    """The digest of a small part of an array: few that differ have it in common."""
    flat = array.reshape(-1)
    parts = [flat[start : start + _SAMPLE] for start in (0, flat.size // 2, max(0, flat.size - _SAMPLE))]
    return digest(flat if flat.size <= len(parts) * _SAMPLE else parts)
