"""Quantized models: other codes for the same values, and none."""

from __future__ import annotations

import warnings

import numpy as np

from jq.errors import ConfigError
from jq.exchange.quantized import split_quantizers
from jq.graph import Graph, Node
from jq.graph.domains import MICROSOFT
from jq.graph.edit import fresh
from jq.graph.quantizers import is_dequantize, is_quantize, quantizes
from jq.graph.unused import remove_unused

_DOMAINS = ("", MICROSOFT)
_SHIFT = 128


def unsigned_activations(graph: Graph) -> Graph:
    """Return a QDQ model with uint8 codes of activations in place of int8 ones: zero points and codes are 128 more.

    The values are the same. Weights keep their codes. So do activations whose codes something else than a
    DequantizeLinear reads, with a warning.

    >>> import jq
    >>> images, _ = jq.zoo.calibration_set()
    >>> model = jq.quantize(jq.zoo.path("fashion_resnet"), images[:16], "A8W8").model
    >>> found = unsigned_activations(jq.load(model))
    >>> found.arrays["input_zero_point_uint8"]
    array(128, dtype=uint8)
    """
    moves = _Shift(dict(graph.arrays), set(graph.tensors))
    nodes = moves.nodes(graph)
    if moves.left:
        names = ", ".join(moves.left[:5])
        text = f"{len(moves.left)} activations stay int8, because their codes are not only dequantized: {names}"
        warnings.warn(text, stacklevel=2)
    if not moves.count and not moves.left:
        raise ConfigError("no activation is quantized to int8 by a QuantizeLinear with a constant zero point")
    return remove_unused(graph.with_arrays(moves.arrays, nodes=nodes, declared={}))


class _Shift:
    """The zero points as they are made, and what was found on the way."""

    def __init__(self, arrays: dict[str, np.ndarray], taken: set[str]) -> None:
        self.arrays, self.taken = arrays, taken
        self.shifted: dict[str, str] = {}
        self.left: list[str] = []
        self.count = 0

    def nodes(self, graph: Graph) -> tuple[Node, ...]:
        """The nodes of a graph or subgraph."""
        changed: dict[Node, Node] = {}
        for node in graph.nodes:
            if not is_quantize(node) or node.domain not in _DOMAINS or not self.is_int8(node):
                continue
            if node.inputs[0] in self.arrays:
                continue  # a weight
            readers = graph.consumers.get(node.outputs[0], ())
            plain = all(is_dequantize(r) and r.domain in _DOMAINS for r in readers)
            if not plain or not all(map(self.is_int8, readers)) or node.outputs[0] in graph.output_names:
                self.left.append(node.inputs[0])
                continue
            self.count += 1
            changed |= {n: n.replace(inputs=(*n.inputs[:2], self.zero_point(n.inputs[2]))) for n in (node, *readers)}
        return tuple(self.inside(changed.get(n, n)) for n in graph.nodes)

    def inside(self, node: Node) -> Node:
        inner = {k: g.replace(nodes=self.nodes(g), declared={}) for k, g in node.subgraphs.items()}
        return node.replace(attrs={**node.attrs, **inner}) if inner else node

    def is_int8(self, node: Node) -> bool:
        """Whether a quantizer states its zero point as an int8 constant."""
        zero_point = self.arrays.get(node.inputs[2]) if len(node.inputs) > 2 else None
        return zero_point is not None and zero_point.dtype == np.int8 and not node.attrs.get("output_dtype")

    def zero_point(self, name: str) -> str:
        """The same zero point for unsigned codes; weights may share the signed one."""
        if name not in self.shifted:
            self.shifted[name] = fresh(f"{name}_uint8", self.taken)
            self.arrays[self.shifted[name]] = np.asarray(self.arrays[name].astype(np.int16) + _SHIFT, np.uint8)
        return self.shifted[name]


def without_quantizers(graph: Graph) -> Graph:
    """Return the float graph of a quantized one: no quantizers, and weights that are what their codes stand for.

    Quantizers that `jq.split_quantizers` cannot take out stay, with a warning.

    >>> import jq
    >>> images, _ = jq.zoo.calibration_set()
    >>> model = jq.quantize(jq.zoo.path("fashion_resnet"), images[:16], "XINT8").model
    >>> len(model.graph.node), len(without_quantizers(jq.load(model)).nodes)
    (123, 39)
    """
    without, plan = split_quantizers(graph)
    left = [n for n in without.walk() if quantizes(n)]
    if not len(plan) and not left:
        raise ConfigError("the model is not quantized: there is nothing to dequantize")
    if left:
        names = ", ".join(f"{n.label!r} ({n.qualified})" for n in left[:5])
        warnings.warn(f"{len(left)} quantizers stay, because a plan cannot describe them: {names}", stacklevel=2)
    return without
