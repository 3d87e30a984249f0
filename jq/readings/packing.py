"""Weights on the device, in the order in which XLA reads them."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jq.arithmetic import layout
from jq.arithmetic.layout import packed, weight_order
from jq.data.stream import replicated
from jq.graph import Graph, Node
from jq.ops.table import lookup
from jq.util.mapped import one_by_one

Array = Any


def read_order(graph: Graph, node: Node, tensor: str, rank: int) -> tuple[int, ...] | None:
    """The order in which a node multiplies its weight; None if this tensor is not that, or lies in it already."""
    entry = lookup(node, graph.opset(node.domain))
    if entry is None:
        return None
    parameter = entry.weight if entry.linear is None else entry.linear.weight
    if parameter is None or entry.operands(node, (parameter,)) != [tensor]:
        return None
    if parameter == entry.weight:
        return weight_order(rank)
    return (1, 0) if rank == 2 and entry.linear is not None and entry.linear.axis(node.attrs) == 0 else None


def pack(graph: Graph, params: Mapping[str, Array] | None = None, mesh: Mesh | None = None) -> dict[str, Any]:
    """Return params on the device, or on all of a mesh, with weights in the order that XLA reads.

    The traced function takes packed and plain params alike. Plain ones stay in ONNX's order, which is
    what gradients and exports want; packed ones save transposing every weight at every call.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> fn, params = jq.trace(graph), jq.pack(graph)
    """
    params = graph.params if params is None else params
    where, orders = None if mesh is None else replicated(mesh), _orders(graph, params)

    def place(name: str, array: Array) -> Any:
        order = orders[name]
        return jax.device_put(array, where) if order is None else packed(array, order, where)

    return {name: place(name, array) for name, array in one_by_one(params)}


def like_packed(graph: Graph, mesh: Mesh) -> dict[str, Any]:
    """Return the shapes and types of a graph's packed params on a mesh."""
    where, orders = replicated(mesh), _orders(graph, graph.params)

    def like(name: str, array: Array) -> Any:
        order = orders[name]
        if order is not None:
            return layout.like_packed(array, order, where)
        return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype), sharding=where)

    return {name: like(name, array) for name, array in graph.params.items()}


def _orders(graph: Graph, params: Mapping[str, Array]) -> dict[str, tuple[int, ...] | None]:
    """The order in which each of the params is packed; None for one that stays unchanged."""
    orders: dict[str, set[tuple[int, ...] | None]] = {name: {None} for name in graph.output_names}
    for node in graph.walk():
        for name, reads in collections.Counter(node.reads()).items():
            if name in params:
                order = read_order(graph, node, name, np.ndim(params[name])) if reads == 1 else None
                orders.setdefault(name, set()).add(order)
    alone = {name: next(iter(own)) for name, own in orders.items() if len(own) == 1}
    return {name: alone.get(name) for name in params}
