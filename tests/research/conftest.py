"""A small network with a skip, a depthwise convolution, a pool and a product, whose walks compile in a second."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import jq

CLASSES = 6


def small_model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {
        "stem.w": rng.standard_normal((8, 3, 3, 3)) / 3,
        "stem.b": rng.standard_normal(8),
        "deep.w": rng.standard_normal((8, 1, 3, 3)) / 2,
        "deep.b": rng.standard_normal(8),
        "point.w": rng.standard_normal((8, 8, 1, 1)) / 2,
        "point.b": rng.standard_normal(8),
        "head.w": rng.standard_normal((8, CLASSES)),
        "head.b": rng.standard_normal(CLASSES),
    }
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "stem.w", "stem.b"], ["stem.y"], "stem", strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["stem.y"], ["stem.relu"], "stem.act"),
        node("Conv", ["stem.relu", "deep.w", "deep.b"], ["deep.y"], "deep", group=8, pads=[1, 1, 1, 1]),
        node("Relu", ["deep.y"], ["deep.relu"], "deep.act"),
        node("Conv", ["deep.relu", "point.w", "point.b"], ["point.y"], "point"),
        node("Add", ["point.y", "stem.relu"], ["sum"], "add"),
        node("GlobalAveragePool", ["sum"], ["mean"], "pool"),
        node("Flatten", ["mean"], ["flat"], "flatten"),
        node("Gemm", ["flat", "head.w", "head.b"], ["logits"], "head"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "small",
        [value("x", onnx.TensorProto.FLOAT, ["N", 3, 9, 9])],
        [value("logits", onnx.TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.fixture(scope="session")
def small():
    """Its prepared graph, statistics and images."""
    images = np.random.default_rng(1).standard_normal((10, 3, 9, 9)).astype(np.float32)
    graph = jq.prepare(jq.load(small_model()), "XINT8")
    return graph, jq.calibrate(graph, images), images
