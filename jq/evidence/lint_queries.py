"""What the rules of `lint` ask of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jq.graph import Graph, Node, Value
from jq.graph.schemas import attributes
from jq.npu.rewrites.pools import reduced_axes

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def float_params(graph: Graph) -> Iterator[tuple[str, np.ndarray]]:
    """The float weights by name, as types that numpy computes with."""
    for name, array in graph.params.items():
        if array.dtype.kind == "f":
            yield name, array
        elif array.dtype.name == "bfloat16":
            yield name, array.astype(np.float32)


def shape_arithmetic(graph: Graph) -> set[Node]:
    """Nodes that compute on shapes alone: with a fixed batch they fold away, and `dynamic-batch` says so."""
    known = set(graph.arrays)
    found = set()
    for node in graph.nodes:
        if node.op_type in ("Shape", "Size") or all(r in known for r in node.reads()):
            found.add(node)
            known.update(node.outputs)
    return found


def gates_itself(graph: Graph, node: Node) -> bool:
    """Whether a sigmoid's input is multiplied by it, and by nothing else."""
    reader = graph.sole_reader(node.outputs[0])
    return reader is not None and reader.op_type == "Mul" and node.inputs[0] in reader.inputs


def _shape(graph: Graph, name: str) -> tuple[int | str | None, ...]:
    return graph.values.get(name, Value(name)).shape or ()


def limits(graph: Graph, node: Node) -> tuple[float, float] | None:
    """The bounds of a Clip; None if they are not constant."""
    bounds = [-math.inf, math.inf]
    for i, name in enumerate(("min", "max")):
        tensor = node.inputs[i + 1] if len(node.inputs) > i + 1 else ""
        if not tensor:
            bounds[i] = float(node.attrs.get(name, bounds[i]))
        elif tensor not in graph.arrays or graph.arrays[tensor].size != 1:
            return None
        else:
            bounds[i] = float(graph.arrays[tensor].item())
    return bounds[0], bounds[1]


def mean_window(graph: Graph, node: Node) -> tuple[int, ...]:
    """What an average is over; empty where that is not known."""
    if node.op_type == "AveragePool":
        window: Sequence[Any] = attributes(graph, node).get("kernel_shape", ())
    else:
        shape = _shape(graph, node.inputs[0])
        axes: Iterable[int] = range(2, len(shape))
        if node.op_type == "ReduceMean":
            given = reduced_axes(graph, node) or ()
            axes = sorted({a % len(shape) for a in given if -len(shape) <= a < len(shape)})
        window = [shape[a] for a in axes]
    return tuple(window) if all(isinstance(d, int) and d > 0 for d in window) else ()


def overhangs(graph: Graph, node: Node) -> bool:
    """Whether some windows of a pool reach over the border; of an image of unknown size, whether all of them fit."""
    attrs = attributes(graph, node)
    kernel = attrs.get("kernel_shape", ())
    strides, dilations, auto_pad = attrs.get("strides"), attrs.get("dilations"), attrs.get("auto_pad", "NOTSET")
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations or (1,) * len(kernel), strict=True)]
    known = _shape(graph, node.inputs[0])[2:] or reach
    if len(known) != len(reach):
        return False  # no valid pool: whoever evaluates it says what is wrong
    sizes = [size if isinstance(size, int) else least for size, least in zip(known, reach, strict=True)]
    from jq.ops.convolutions import windows  # the op table is not loaded with the package

    *_, pads = windows(sizes, kernel, strides, dilations, attrs.get("pads"), auto_pad, attrs.get("ceil_mode", 0))
    return any(high > 0 or low > 0 for low, high in pads)


def channel_ranges(graph: Graph) -> Iterator[tuple[Node, str, np.ndarray]]:
    """The largest magnitude in each output channel of each weight, weights that several nodes share once."""
    seen: set[str] = set()
    floats = dict(float_params(graph))
    for node in graph.nodes:
        if node.op_type not in LINEAR or node.domain or len(node.inputs) < 2 or node.inputs[1] in seen:
            continue
        weight = floats.get(node.inputs[1])
        if weight is None or weight.ndim < 2 or not weight.size:
            continue
        seen.add(node.inputs[1])
        ranges = _ranges(node, weight)
        if np.isfinite(ranges).all():  # else `non-finite` has said so
            yield node, node.inputs[1], ranges.astype(np.float64)


def _ranges(node: Node, weight: np.ndarray) -> np.ndarray:
    if node.op_type == "ConvTranspose":  # (in, out / group, ...), where the rows of a group stand together
        group = max(1, int(node.attrs.get("group", 1)))
        group = group if weight.shape[0] % group == 0 else 1
        weight = weight.reshape(group, weight.shape[0] // group, weight.shape[1], -1)
        kept: tuple[int, ...] = (0, 2)
    elif node.op_type == "Conv" or (node.op_type == "Gemm" and node.attrs.get("transB", 0)):
        kept = (0,)
    else:
        kept = (weight.ndim - 1,)
    axes = tuple(a for a in range(weight.ndim) if a not in kept)
    return np.maximum(weight.max(axes), -weight.min(axes)).reshape(-1)


def is_guarded(graph: Graph, node: Node) -> bool:
    """Whether an operator that zero would break reads the node's output: what was added is an epsilon."""
    return any(
        n.op_type in ("Sqrt", "Reciprocal", "Log", "Pow") or (n.op_type == "Div" and n.inputs[1] in node.outputs)
        for n in graph.consumers.get(node.outputs[0], ())
    )
