"""Activations that saturate, and which tensors are read through them alone: there, clipping costs nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jq.graph import Graph, Node
from jq.npu.facts import HARD_SIGMOID, is_hard_sigmoid
from jq.ops.kinds import is_product
from jq.ops.table import lookup

Array = Any

SATURATING: Mapping[str, Callable[[Array], Array]] = {
    "Sigmoid": jax.nn.sigmoid,
    "HardSigmoid": lambda x: jnp.clip(x * HARD_SIGMOID["alpha"] + HARD_SIGMOID["beta"], 0, 1),
    "Tanh": jnp.tanh,
    "HardSwish": jax.nn.hard_swish,
    "Gelu": functools.partial(jax.nn.gelu, approximate=False),
    "Mish": jax.nn.mish,
}
# Of these, the ones around which the NPU's constraints tie positions to one another.
TIED = ("HardSigmoid", "HardSwish")


def saturating_reader(graph: Graph, tensor: str) -> tuple[str, bool] | None:
    """The function of `SATURATING` through which alone a tensor is read, and whether it multiplies the tensor itself."""
    readers = graph.consumers.get(tensor, ()) if tensor not in graph.output_names else ()
    functions = [n for n in readers if _saturates(n)]
    if len(functions) == len(readers) == 1:
        return functions[0].op_type, False
    if len(functions) == 1 and len(readers) == 2:
        product = graph.sole_reader(functions[0].outputs[0])
        gated = product in readers and is_product(product) and {*product.inputs} == {tensor, functions[0].outputs[0]}
        return (functions[0].op_type, True) if gated else None
    moved = graph.sole_reader(tensor)
    entry = None if moved is None or len(moved.outputs) > 1 else lookup(moved, graph.opset(moved.domain))
    return saturating_reader(graph, moved.outputs[0]) if moved and entry and entry.moves == "by place" else None


def _saturates(node: Node) -> bool:
    known = node.op_type in SATURATING and not node.domain
    return known and (node.op_type != "HardSigmoid" or is_hard_sigmoid(node.attrs))
