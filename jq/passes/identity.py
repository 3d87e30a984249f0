"""Nodes whose output always equals their input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import bypass, undeclared
from jq.graph.schemas import schema

_NOWHERE = np.iinfo(np.int32).max  # where exporters end a slice that has no end


def remove_identities(graph: Graph) -> Graph:
    """Return the graph without nodes that change nothing: Identity, Dropout, no-op Cast, Reshape, Pad, ..."""
    same = {}
    certain = undeclared(graph)
    for node in graph.nodes:
        rule = _RULES.get(node.op_type)
        if rule is None or node.domain or [bool(o) for o in node.outputs] != [True] or not all(node.inputs[:1]):
            continue
        try:
            source = rule(certain, node)
        except (IndexError, TypeError, ValueError):  # a broken node is reported where it is traced
            continue
        if source is not None:
            same[node.outputs[0]] = source
    return bypass(graph, same)


def _argument(graph: Graph, node: Node, name: str, absent: object = None) -> np.ndarray | None:
    """Return an argument given as attribute or input, by opset; None if it is not constant."""
    if name in node.attrs:
        return np.asarray(node.attrs[name])
    definition = schema(node.op_type, node.domain, graph.opset(node.domain))
    names = [i.name for i in definition.inputs] if definition else []
    given = dict(zip(names, node.inputs, strict=False)).get(name, "")
    if not given:
        return None if absent is None else np.asarray(absent)
    return graph.arrays.get(given)


def _shape(graph: Graph, name: str) -> tuple[int | str | None, ...] | None:
    value = graph.values.get(name)
    return None if value is None else value.shape


def _when(test: Callable[[Graph, Node], bool]) -> Callable[[Graph, Node], str | None]:
    return lambda graph, node: node.inputs[0] if test(graph, node) else None


def _dropout(graph: Graph, node: Node) -> bool:
    opset = graph.opset()
    if opset < 7:
        return bool(node.attrs.get("is_test", 0))
    if opset < 12:
        return True
    training = _argument(graph, node, "training_mode", False)
    return training is not None and not training.any()


def _cast(graph: Graph, node: Node) -> bool:
    source, target = (graph.values.get(n) for n in (node.inputs[0], node.outputs[0]))
    return bool(source and target and source.dtype is not None and source.dtype == target.dtype)


def _reshape(graph: Graph, node: Node) -> bool:
    target, shape = _argument(graph, node, "shape"), _shape(graph, node.inputs[0])
    if target is None or shape is None or target.shape != (len(shape),):
        return False
    copies = not node.attrs.get("allowzero", 0)
    moved = [t for t, d in zip(target.tolist(), shape, strict=True) if t != d and not (t == 0 and copies)]
    return moved in ([], [-1])


def _flatten(graph: Graph, node: Node) -> bool:
    shape = _shape(graph, node.inputs[0])
    return shape is not None and len(shape) == 2 and node.attrs.get("axis", 1) in (1, -1)


def _transpose(graph: Graph, node: Node) -> bool:
    perm = node.attrs.get("perm")
    return perm is not None and tuple(perm) == tuple(range(len(perm)))


def _pad(graph: Graph, node: Node) -> bool:
    pads = _argument(graph, node, "pads" if graph.opset() > 1 else "paddings")
    return pads is not None and not pads.any()


def _slice(graph: Graph, node: Node) -> bool:
    starts, ends, steps = (_argument(graph, node, k, a) for k, a in (("starts", None), ("ends", None), ("steps", 1)))
    if starts is None or ends is None or steps is None or starts.any() or (steps != 1).any():
        return False
    if (ends >= _NOWHERE).all():
        return True
    shape = _shape(graph, node.inputs[0])
    axes = _argument(graph, node, "axes", range(starts.size))
    if shape is None or axes is None:
        return False
    dims = [shape[a] for a in axes.tolist()]
    return all(e >= _NOWHERE or (isinstance(d, int) and e >= d) for e, d in zip(ends.tolist(), dims, strict=True))


def _expand(graph: Graph, node: Node) -> bool:
    target, shape = _argument(graph, node, "shape"), _shape(graph, node.inputs[0])
    if target is None or shape is None or target.size > len(shape):
        return False
    return all(t in (1, d) for t, d in zip(reversed(target.tolist()), reversed(shape), strict=False))


def _tile(graph: Graph, node: Node) -> bool:
    repeats = _argument(graph, node, "repeats" if graph.opset() >= 6 else "tiles")
    return repeats is not None and bool((repeats == 1).all())


def _resize(graph: Graph, node: Node) -> bool:
    scales = _argument(graph, node, "scales")
    cropped = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return scales is not None and scales.size > 0 and bool((scales == 1).all()) and not cropped


def _neutral(element: int, *, either: bool) -> Callable[[Graph, Node], str | None]:
    """Whether arithmetic with a constant changes neither the values nor, by broadcasting, the shape."""

    def rule(graph: Graph, node: Node) -> str | None:
        if graph.opset() < 7:  # broadcasting was one-sided and asked for
            return None
        for operand, other in [node.inputs, node.inputs[::-1]][: 1 + either]:
            array, shape = graph.arrays.get(other), _shape(graph, operand)
            if array is None or array.dtype == object or shape is None or operand in graph.arrays:
                continue
            fits = array.ndim <= len(shape) and all(
                a in (1, d) for a, d in zip(array.shape[::-1], shape[::-1], strict=False)
            )
            if fits and bool((array == element).all()):
                return operand
        return None

    return rule


_RULES: dict[str, Callable[[Graph, Node], str | None]] = {
    "Identity": _when(lambda graph, node: True),
    "Dropout": _when(_dropout),
    "Cast": _when(_cast),
    "CastLike": _when(_cast),
    "Reshape": _when(_reshape),
    "Flatten": _when(_flatten),
    "Transpose": _when(_transpose),
    "Pad": _when(_pad),
    "Slice": _when(_slice),
    "Expand": _when(_expand),
    "Tile": _when(_tile),
    "Resize": _when(_resize),
    "Upsample": _when(_resize),
    **dict.fromkeys(("Concat", "Sum", "Max", "Min", "Mean"), _when(lambda graph, node: len(node.inputs) == 1)),
    "Add": _neutral(0, either=True),
    "Sub": _neutral(0, either=False),
    "Mul": _neutral(1, either=True),
    "Div": _neutral(1, either=False),
}
