"""Graphs written down as expressions, to spell one operator in many ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

import jq
from jq.config import presets
from jq.graph import Graph
from jq.graph.read import load
from jq.graph.write import to_model
from jq.passes.prepare import prepare
from jq.readings.runtime import onnxruntime_reading
from tests.passes.models import build, node

AS_IT_IS = presets["XINT8"].replace(rewrites=(), forms=())  # canonical forms, and nothing of the NPU's


class Writer:
    """Nodes by calls: `w("Add", "x", 3.0)` is the name of a tensor; numbers and arrays are constants."""

    def __init__(self, opset: int = 17) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: dict[str, np.ndarray] = {}

    def __call__(self, op_type: str, *inputs: Any, **attrs: Any) -> str:
        names = [i if isinstance(i, str) else self._constant(i) for i in inputs]
        output = f"t{len(self.nodes)}"
        self.nodes.append(node(op_type, names, [output], name=f"{op_type}_{len(self.nodes)}", **attrs))
        return output

    def reduce(self, op_type: str, x: str, *axes: int, keepdims: int = 1) -> str:
        """A reduction, with its axes where this opset has them."""
        since = 13 if op_type == "ReduceSum" else 18
        if self.opset >= since:
            return self(op_type, x, np.array(axes, np.int64), keepdims=keepdims)
        return self(op_type, x, axes=list(axes), keepdims=keepdims)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.arrays)}"
        array = np.asarray(value)
        self.arrays[name] = array.astype(np.float32) if array.dtype.kind == "f" else array
        return name


Spelling = Callable[[Writer], str]


def model_of(spelling: Spelling, shape: Sequence[int | str], opset: int = 17) -> onnx.ModelProto:
    """The model whose output is what a spelling makes of x."""
    w = Writer(opset)
    w.nodes.append(node("Identity", [spelling(w)], ["y"]))
    return build(w.nodes, w.arrays, x=shape, opset=opset)


def canonical(
    model: onnx.ModelProto, config: jq.QuantConfig = AS_IT_IS, *, tolerance: float = 2e-5, size: float = 3.0
) -> Graph:
    """The prepared graph, after onnxruntime gave for it what it gives for the model, relative to the largest value."""
    graph = prepare(load(model), config)
    x = graph.inputs[0]
    shape = [d if isinstance(d, int) else 3 for d in x.shape or ()]
    feed = {x.name: (size * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)}
    exported = to_model(graph)
    onnx.checker.check_model(exported)
    want, have = onnxruntime_reading(model)(feed), onnxruntime_reading(exported)(feed)
    for name, values in want.items():
        np.testing.assert_allclose(have[name], values, rtol=0, atol=tolerance * max(1, np.abs(values).max()))
    return graph


def ops(graph: Graph) -> list[str]:
    """The operators that are left, in order."""
    return [n.op_type for n in graph.nodes]
