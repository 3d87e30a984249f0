"""Small networks, and data for them."""

from __future__ import annotations

import functools

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import jq


@functools.cache
def images(count: int = 24) -> np.ndarray:
    """Smooth ones of three channels."""
    x = np.random.default_rng(7).standard_normal((count, 3, 8, 8)).astype(np.float32)
    return (x + np.roll(x, 1, 2) + np.roll(x, 1, 3)) / 2


@functools.cache
def residual() -> jq.Graph:
    """Two convolutions, a third around which the sum goes, an average and a classifier, prepared for XINT8."""
    rng = np.random.default_rng(3)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.4 / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    arrays = {"w1": weight(8, 3, 3, 3), "w2": weight(8, 1, 3, 3), "w3": weight(8, 8, 1, 1), "w4": weight(10, 8)}
    arrays |= {f"b{i}": 0.1 * weight(a.shape[0], 1)[:, 0] for i, a in enumerate(list(arrays.values()), 1)}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], "c1", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"], "r1"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], "c2", pads=[1] * 4, group=8),
        helper.make_node("Relu", ["c2"], ["r2"], "r2"),
        helper.make_node("Conv", ["r2", "w3", "b3"], ["c3"], "c3"),
        helper.make_node("Add", ["c3", "r1"], ["s"], "s"),
        helper.make_node("GlobalAveragePool", ["s"], ["g"], "g"),
        helper.make_node("Flatten", ["g"], ["f"], "f"),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["y"], "y", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(a, k) for k, a in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return jq.prepare(jq.load(model), "XINT8")


@functools.cache
def planned() -> jq.Plan:
    """Its plan of least squared error."""
    return jq.make_plan(residual(), jq.calibrate(residual(), images()))
