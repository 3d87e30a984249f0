"""Networks in which values of the data decide shapes: all stages take them, and what lies behind stays in float."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.readings.data_shapes import traceable, untraceable
from tests.conftest import onnxruntime_outputs
from tests.flow import stages

WIDTH = 8


def network(
    *nodes: onnx.NodeProto, output: str, elem: int = TensorProto.FLOAT, **arrays: np.ndarray
) -> onnx.ModelProto:
    """Two convolutions, which make `maps`, and what follows."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(0, 0.3, (8, 3, 3, 3)), "b": rng.normal(0, 0.2, 8), "v": rng.normal(0, 0.3, (6, 8, 1, 1))}
    arrays = {k: a.astype(np.float32) for k, a in weights.items()} | arrays
    body = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["maps"]),
    ]
    graph = helper.make_graph(
        [*body, *nodes],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, WIDTH, WIDTH])],
        [helper.make_tensor_value_info(output, elem, None)],
        [numpy_helper.from_array(a, k) for k, a in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def suppressed() -> onnx.ModelProto:
    """Boxes and scores, of which the best are gathered."""
    nodes = [
        helper.make_node("Reshape", ["maps", "rows"], ["flat"]),
        helper.make_node("Split", ["flat", "parts"], ["boxes", "scores"], axis=1),
        helper.make_node("Transpose", ["boxes"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("Sigmoid", ["scores"], ["likely"]),
        helper.make_node("NonMaxSuppression", ["turned", "likely", "most"], ["chosen"]),
        helper.make_node("Gather", ["chosen", "last"], ["which"], axis=1),
        helper.make_node("Gather", ["turned", "which"], ["y"], axis=1),
    ]
    ints = {"rows": [1, 6, WIDTH * WIDTH], "parts": [4, 2], "most": [5], "last": 2}
    return network(*nodes, output="y", **{k: np.array(v, np.int64) for k, v in ints.items()})


def selected() -> onnx.ModelProto:
    """Positions above a threshold."""
    nodes = [helper.make_node("Greater", ["maps", "zero"], ["mask"]), helper.make_node("NonZero", ["mask"], ["y"])]
    return network(*nodes, output="y", elem=TensorProto.INT64, zero=np.float32(0))


def learned() -> onnx.ModelProto:
    """A layer behind positions."""
    nodes = [
        helper.make_node("NonZero", ["maps"], ["places"]),
        helper.make_node("Cast", ["places"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["floats"], ["rows"]),
        helper.make_node("MatMul", ["rows", "m"], ["y"]),
    ]
    return network(*nodes, output="y", m=np.float32(np.random.default_rng(1).normal(size=(4, 5))))


def images(count: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(2).normal(size=(count, 3, WIDTH, WIDTH)).astype(np.float32)}


@pytest.mark.parametrize(
    ("model", "ends", "behind"),
    [(suppressed, {"turned", "likely"}, 3), (selected, {"maps"}, 1), (learned, {"maps"}, 4)],
)
def test_the_graph_is_traced_up_to_the_floats_that_decide_shapes(model, ends, behind):
    graph = jq.load(model())
    assert len(untraceable(graph)) == behind
    assert {v.name for v in traceable(graph).outputs} == ends


def test_a_graph_that_can_be_traced_is_returned_itself():
    graph = jq.load(jq.zoo.path("fashion_resnet"))
    assert traceable(graph) is graph


def test_inputs_that_are_no_data_may_decide_shapes():
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    ends = [helper.make_tensor_value_info("x", 1, [2, 3]), helper.make_tensor_value_info("shape", 7, [2])]
    graph = helper.make_graph(nodes, "g", ends, [helper.make_tensor_value_info("y", 1, None)])
    assert not untraceable(jq.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])))


@pytest.mark.parametrize(("model", "preset"), [(suppressed, "XINT8"), (learned, "A8W8")])
def test_every_stage_takes_it(model, preset):
    for _ in stages(model(), images(), preset):
        pass


def test_what_lies_behind_is_left_in_float_and_the_simulated_chip_finishes_it():
    result = jq.quantize(learned(), images(), "XINT8")
    assert "m" not in result.plan
    assert "v" in result.plan
    sample = images(1)
    made, want = jq.integer.load(result.model, "ort")(sample), onnxruntime_outputs(result.model, sample)
    np.testing.assert_array_equal(made["y"], want[0])
    assert jq.integer.simulate(jq.integer.load(result.model), images()).agreements[0].output == "y"


def test_samples_that_decide_shapes_differently_are_refused_in_one_line():
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["z"]), helper.make_node("MatMul", ["z", "m"], ["y"])]
    ends = [helper.make_tensor_value_info("x", 1, [None, 6]), helper.make_tensor_value_info("shape", 7, [2])]
    weight = numpy_helper.from_array(np.ones((3, 3), np.float32), "m")
    graph = helper.make_graph(nodes, "g", ends, [helper.make_tensor_value_info("y", 1, None)], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data = [{"x": np.ones((1, 6), np.float32), "shape": np.array([n, 3], np.int64)} for n in (2, -1)]
    with pytest.raises(jq.DataError, match=r"the value of the first, \[2, 3\]; group") as error:
        jq.quantize(model, data, "A8W8")
    assert "\n" not in str(error.value)
