"""Shapes and layouts of inputs: the same values, which onnxruntime computes on both models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.exchange.conversion import fix_shapes, nhwc_inputs
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node

IMAGES = jq.zoo.calibration_set()[0][:4]


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("name", ["fashion_resnet", "fashion_mobilenet"])
def test_a_fixed_shape_computes_the_same_and_nothing_is_dynamic(name: str) -> None:
    model = onnx.load(jq.zoo.path(name))
    found = jq.convert(model, shapes={"input": (4, 1, 28, 28)})
    for value in (*found.graph.input, *found.graph.output, *found.graph.value_info):
        assert all(isinstance(d, int) and d > 0 for d in dims(value)), value.name
    np.testing.assert_array_equal(
        onnxruntime_outputs(found, {"input": IMAGES})[0], onnxruntime_outputs(model, {"input": IMAGES})[0]
    )


def two_inputs() -> onnx.ModelProto:
    second = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", 5])
    model = build([node("Add", ["x", "z"], ["y"])], x=("N", 5), extra_inputs=[second])
    model.graph.value_info.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [7, 5]))  # of an old batch
    return model


def test_a_named_dim_is_fixed_everywhere() -> None:
    found = jq.convert(two_inputs(), shapes={"x": [3, 5]})
    assert [dims(v) for v in (*found.graph.input, *found.graph.output)] == [[3, 5]] * 3


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ({"xx": (1, 5)}, "no input 'xx'. Did you mean 'x'"),
        ({"x": (1, 5, 1)}, r"input 'x' has 2 dims, \[N,5\]; \[1,5,1\] does not fit"),
        ({"x": (1, 6)}, r"\[1,6\] does not fit input 'x', \[N,5\]$"),
        ({"x": (1, 5), "z": (2, 5)}, r"\[2,5\] does not fit input 'z', \[N,5\]: N is 1 already"),
        ({"x": (0, 5)}, "whole numbers above 0"),
        ({"x": (1.0, 5)}, "whole numbers above 0"),
        ({"x": ("N", 5)}, "whole numbers above 0"),
        ({"x": 5}, r"\[5\] does not fit"),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], match: str) -> None:
    with pytest.raises(jq.ConfigError, match=match):
        jq.convert(two_inputs(), shapes=shapes)


def test_a_batch_that_a_reshape_forbids_is_an_error() -> None:
    arrays = {"to": np.array([2, -1]), "k": np.ones((2, 7), np.float32)}
    model = build([node("Reshape", ["x", "to"], ["r"]), node("Add", ["r", "k"], ["y"])], arrays, x=("N", 7))
    jq.convert(model, shapes={"x": (2, 7)})
    with pytest.raises(jq.ModelError, match="checker refuses"):
        jq.convert(model, shapes={"x": (6, 7)})


def test_shapes_inside_subgraphs_follow() -> None:
    branches = []
    for op in ("Relu", "Neg"):
        made = [helper.make_tensor_value_info(f"out_{op}", TensorProto.FLOAT, ["N", 3])]
        nodes = [node(op, ["x"], [f"in_{op}"]), node("Abs", [f"in_{op}"], [f"out_{op}"])]
        branches.append(helper.make_graph(nodes, "branch", [], made))
        # Of a file whose batch was made dynamic afterwards.
        branches[-1].value_info.append(helper.make_tensor_value_info(f"in_{op}", TensorProto.FLOAT, [8, 3]))
    model = build(
        [node("If", ["yes"], ["y"], then_branch=branches[0], else_branch=branches[1])],
        {"yes": np.array(False)},
        x=("N", 3),
    )
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    found = jq.convert(model, shapes={"x": (5, 3)})
    np.testing.assert_array_equal(onnxruntime_outputs(found, {"x": x})[0], np.abs(x))


@pytest.mark.parametrize("name", ["fashion_resnet", "fashion_mobilenet"])
def test_channels_last_inputs_compute_the_same(name: str) -> None:
    model = onnx.load(jq.zoo.path(name))
    found = jq.convert(model, nhwc=True)
    assert dims(found.graph.input[0]) == ["N", 28, 28, 1]
    np.testing.assert_array_equal(
        onnxruntime_outputs(found, {"input": IMAGES.transpose(0, 2, 3, 1)})[0],
        onnxruntime_outputs(model, {"input": IMAGES})[0],
    )


def test_only_images_or_what_is_named_is_moved() -> None:
    other = helper.make_tensor_value_info("z", TensorProto.FLOAT, [6])
    nodes = [node("Add", ["x", "z"], ["x_nchw"]), node("Relu", ["x_nchw"], ["y"])]  # a name that the pass would take
    model = build(nodes, x=(2, 3, 5, 6), extra_inputs=[other])
    rng = np.random.default_rng(0)
    x, z = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 5, 6), (6,)))
    found = jq.convert(model, nhwc=True)
    assert [dims(v) for v in found.graph.input] == [[2, 5, 6, 3], [6]]
    want = onnxruntime_outputs(model, {"x": x, "z": z})[0]
    have = onnxruntime_outputs(found, {"x": x.transpose(0, 2, 3, 1), "z": z})[0]
    np.testing.assert_array_equal(have, want)
    with pytest.raises(jq.ConfigError, match="has no channels to move"):
        nhwc_inputs(jq.load(model), ["z"])
    with pytest.raises(jq.ConfigError, match="no input 'q'"):
        nhwc_inputs(jq.load(model), ["q"])


def test_nothing_to_move() -> None:
    with pytest.raises(jq.ConfigError, match="needs an input of 4 dims"):
        jq.convert(build([node("Relu", ["x"], ["y"])], x=(2, 3)), nhwc=True)
    same = build([node("Relu", ["x"], ["y"])])
    same.graph.output.append(same.graph.input[0])
    with pytest.raises(jq.ModelError, match="'x' is both an input and an output"):
        jq.convert(same, nhwc=True)


def test_an_input_that_a_branch_captures_is_moved() -> None:
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4, 5, 6]) for n in ("p", "q")]
    then = helper.make_graph([node("Relu", ["x"], ["p"])], "then", [], made[:1])
    other = helper.make_graph(
        [node("Mul", ["x", "k"], ["q"])], "else", [], made[1:], [numpy_helper.from_array(np.float32(2), "k")]
    )
    model = build([node("If", ["yes"], ["y"], then_branch=then, else_branch=other)], {"yes": np.array(False)})
    x = np.random.default_rng(0).standard_normal((2, 4, 5, 6)).astype(np.float32)
    found = jq.to_model(fix_shapes(nhwc_inputs(jq.load(model)), {"x": (2, 5, 6, 4)}))
    np.testing.assert_array_equal(onnxruntime_outputs(found, {"x": x.transpose(0, 2, 3, 1)})[0], 2 * x)
