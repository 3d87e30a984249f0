"""`inspect`: counts against ONNX's own tools, numpy and hand-counted products."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq.zoo
from jq.errors import ConfigError, ModelError
from jq.evidence.inspection import inspect
from jq.graph.read import load
from tests.conftest import one_node, onnxruntime_outputs


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def free_conv() -> onnx.ModelProto:
    """y = Conv(x [N,3,H,W], w [8,3,3,3])."""
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, "H", "W"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 8, None, None])],
        [numpy_helper.from_array(zeros(8, 3, 3, 3), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_zoo_model_against_onnx() -> None:
    path = jq.zoo.path("fashion_resnet")
    proto = onnx.load(path)
    found = inspect(load(path))
    counts: dict[str, int] = {}
    for node in proto.graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    counts.pop("Constant", None)
    assert dict(found.ops) == counts
    floats = [numpy_helper.to_array(t) for t in proto.graph.initializer if t.data_type == TensorProto.FLOAT]
    assert (found.parameters, found.parameter_bytes) == (sum(a.size for a in floats), sum(a.nbytes for a in floats))
    assert [v.name for v in found.inputs] == ["input"]
    assert found.opsets == {"": proto.opset_import[0].version}
    assert found.unsupported == () and found.reason is None
    # onnx infers the output shapes on its own; a convolution does its filter's size at each element.
    del proto.graph.input[0].type.tensor_type.shape.dim[0]
    proto.graph.input[0].type.tensor_type.shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_value=1))
    typed = {v.name: v.type.tensor_type.shape.dim for v in onnx.shape_inference.infer_shapes(proto).graph.value_info}
    weights = {t.name: t.dims for t in proto.graph.initializer}
    expected = sum(
        math.prod(d.dim_value for d in typed[n.output[0]]) * math.prod(weights[n.input[1]][1:])
        for n in proto.graph.node
        if n.op_type == "Conv"
    )
    assert found.macs is not None and found.macs["Conv"] == expected


# operator, inputs, initializers, attributes, multiply-accumulates counted by hand
MACS: list[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any], int]] = [
    ("Conv", {"x": zeros(2, 4, 8, 8)}, {"w": zeros(6, 2, 3, 3)}, {"group": 2}, 2 * 6 * 6 * 6 * 2 * 9),
    ("Conv", {"x": zeros(1, 3, 9)}, {"w": zeros(5, 3, 3)}, {"strides": [2]}, 5 * 4 * 3 * 3),
    ("Conv", {"x": zeros(1, 8, 4, 4)}, {"w": zeros(8, 1, 3, 3)}, {"group": 8, "pads": [1, 1, 1, 1]}, 8 * 16 * 9),
    ("ConvTranspose", {"x": zeros(2, 4, 8, 8)}, {"w": zeros(4, 2, 3, 3)}, {"strides": [2, 2]}, 2 * 4 * 64 * 2 * 9),
    ("Gemm", {"a": zeros(5, 3), "b": zeros(5, 7)}, {}, {"transA": 1}, 3 * 5 * 7),
    ("Gemm", {"a": zeros(5, 3)}, {"b": zeros(7, 3)}, {"transB": 1}, 5 * 3 * 7),
    ("MatMul", {"a": zeros(2, 5, 3), "b": zeros(3, 4)}, {}, {}, 2 * 5 * 3 * 4),
    ("MatMul", {"a": zeros(5, 3), "b": zeros(3)}, {}, {}, 5 * 3),
    ("MatMulInteger", {"a": zeros(5, 3, dtype=np.uint8)}, {"b": zeros(3, 4, dtype=np.uint8)}, {}, 5 * 3 * 4),
    ("ConvInteger", {"x": zeros(1, 3, 5, 5, dtype=np.uint8)}, {"w": zeros(2, 3, 3, 3, dtype=np.uint8)}, {}, 2 * 9 * 27),
    ("Relu", {"x": zeros(5)}, {}, {}, 0),
]


@pytest.mark.parametrize(("op", "inputs", "initializers", "attrs", "macs"), MACS)
def test_macs(op: str, inputs: dict, initializers: dict, attrs: dict, macs: int) -> None:
    model = one_node(op, inputs, initializers=initializers, **attrs)
    onnxruntime_outputs(model, inputs)  # the model is a valid one
    assert inspect(load(model)).total_macs == macs


def test_quantized_macs() -> None:
    scale, zero = np.float32(0.5), np.uint8(0)
    x, w = zeros(1, 3, 5, 5, dtype=np.uint8), zeros(2, 3, 3, 3, dtype=np.uint8)
    parts = {"xs": np.asarray(scale), "xz": np.asarray(zero), "w": w, "ws": np.asarray(scale), "wz": np.asarray(zero)}
    parts |= {"ys": np.asarray(scale), "yz": np.asarray(zero)}
    assert inspect(load(one_node("QLinearConv", {"x": x}, initializers=parts))).macs == {"QLinearConv": 2 * 9 * 27}


def test_free_dims_are_bound_by_name_and_shared() -> None:
    graph = load(free_conv())
    found = inspect(graph, {"x": (2, 3, 10, 12)})
    assert found.shapes == {"x": (2, 3, 10, 12)}
    assert found.total_macs == 2 * 8 * 8 * 10 * 27


def test_free_dims_that_one_does_not_fit_are_a_reason_not_a_failure() -> None:
    found = inspect(load(free_conv()))  # a 3x3 filter on a 1x1 image
    assert found.shapes == {"x": (1, 3, 1, 1)}
    assert found.total_macs in (None, 0)


def test_symbol_means_one_number_everywhere() -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
            for name, dims in (("a", ["N", "K"]), ("b", ["K", 4]))
        ],
        [onnx.ValueInfoProto(name="y")],
    )
    graph_ = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert inspect(graph_, {"a": (2, 5)}).total_macs == 2 * 5 * 4
    assert inspect(graph_, {"b": (5, 4)}).shapes == {"a": (1, 5), "b": (5, 4)}
    with pytest.raises(ConfigError, match="cannot have the shape"):
        inspect(graph_, {"a": (2, 5), "b": (6, 4)})


@pytest.mark.parametrize(
    ("shapes", "line"),
    [
        ({"X": (1, 3, 8, 8)}, "no input 'X'"),
        ({"x": (1, 3, 8)}, "cannot have the shape"),
        ({"x": (1, 4, 8, 8)}, "cannot have the shape"),
        ({"x": (-1, 3, 8, 8)}, "cannot have the shape"),
    ],
)
def test_wrong_shapes(shapes: dict[str, tuple[int, ...]], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        inspect(load(free_conv()), shapes)


def test_shapes_that_do_not_fit_fail_when_all_are_known() -> None:
    with pytest.raises(ModelError, match="'node'"):
        inspect(load(one_node("MatMul", {"a": zeros(2, 3)}, initializers={"b": zeros(4, 5)})))


def test_unsupported_ops_are_listed() -> None:
    found = inspect(load(one_node("Magic", {"x": zeros(1)}, domain="com.acme")))
    assert found.macs is None and found.total_macs is None
    assert found.ops == {"com.acme::Magic": 1}
    assert (
        len(found.unsupported) == 1 and "com.acme::Magic" in found.unsupported[0] and "'node'" in found.unsupported[0]
    )


def test_subgraphs_are_counted() -> None:
    def branch(op: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node(op, ["x"], ["z"])], op, [], [onnx.ValueInfoProto(name="z")])

    model = one_node("If", {"c": np.array(True)}, then_branch=branch("Abs"), else_branch=branch("Neg"))
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]))
    assert inspect(load(model)).ops == {"If": 1, "Abs": 1, "Neg": 1}


def test_large_weights_are_not_copied_and_nothing_is_computed() -> None:
    # Would take minutes and 4 GB if it ran; a zero-stride view stands for the weight.
    graph = load(one_node("MatMul", {"a": zeros(1, 1)}, initializers={"b": zeros(1, 1)}))
    side = 1 << 15
    graph = graph.replace(
        params={"b": np.broadcast_to(np.float32(0), (side, side))},
        inputs=tuple(type(v)(v.name, v.dtype, (side, side)) for v in graph.inputs),
    )
    assert inspect(graph).total_macs == side**3


def test_to_dict_is_json() -> None:
    found = inspect(load(free_conv()), {"x": (1, 3, 8, 8)})
    document = json.loads(json.dumps(found.to_dict()))
    assert document["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["N", 3, "H", "W"], "containers": []}]
    assert document["total_macs"] == found.total_macs == 8 * 36 * 27
