"""Rules of `lint` on the provider's known aborts: for each a small model that fires it, and a near miss that does not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq
from jq.errors import ConfigError
from jq.evidence.lint import lint
from tests.passes.models import build, node, normal

value = helper.make_tensor_value_info


def provider(model, config="XINT8", chip=None) -> list[str]:
    return [f.rule for f in lint(model, config, chip) if f.rule.startswith("provider-")]


def layers(*middle: onnx.NodeProto, arrays=None, x=(1, 4, 6, 6), **options) -> onnx.ModelProto:
    """Two convolutions, from `x` to `a` and from `b`, or `a` if nothing is between, to `y`."""
    weights = {"w1": normal(4, 4, 1, 1), "w2": normal(4, 4, 1, 1, seed=1), **(arrays or {})}
    first, last = node("Conv", ["x", "w1"], ["a"]), node("Conv", ["b" if middle else "a", "w2"], ["y"])
    return build([first, *middle, last], weights, x=x, **options)


def test_a_plain_model_has_no_such_finding() -> None:
    assert provider(layers()) == [] and provider(layers(), chip="phx") == []


def test_if() -> None:
    branch = helper.make_graph([node("Relu", ["a"], ["r"])], "g", [], [value("r", TensorProto.FLOAT, None)])
    chosen = node("If", ["c"], ["b"], then_branch=branch, else_branch=branch)
    model = layers(chosen, arrays={"c": np.array(True)})
    finding = next(f for f in lint(model) if f.rule == "provider-if")
    assert "onnxsim/onnxsim#1432" in finding.message and finding.severity == "warning"


def test_a_weight_that_is_an_input() -> None:
    inputs = [value("w", TensorProto.FLOAT, (4, 4, 1, 1))]
    nodes = [node("Conv", ["x", "w"], ["a"], name="c"), node("Conv", ["a", "w2"], ["y"])]
    model = build(nodes, {"w2": normal(4, 4, 1, 1)}, x=(1, 4, 6, 6), extra_inputs=inputs)
    assert provider(model) == ["provider-weight-input"]
    product = [node("MatMul", ["x", "k"], ["y"])]  # of two activations: no weight
    model = build(product, x=(1, 2, 4, 4), extra_inputs=[value("k", TensorProto.FLOAT, (1, 2, 4, 4))])
    assert "provider-weight-input" not in provider(model)


def test_lstm() -> None:
    nodes = [node("LSTM", ["x", "w", "r"], ["h"], hidden_size=2), node("Identity", ["h"], ["y"])]
    model = build(nodes, {"w": normal(1, 8, 3), "r": normal(1, 8, 2)}, x=(5, 1, 3))
    assert "provider-lstm" in provider(model)


def test_bfloat16() -> None:
    nodes = [node("Cast", ["x"], ["a"], to=TensorProto.BFLOAT16), node("Cast", ["a"], ["y"], to=TensorProto.FLOAT)]
    model = build(nodes)
    model.graph.value_info.append(value("a", TensorProto.BFLOAT16, (2, 4, 5, 6)))
    assert "provider-bfloat16" in provider(model)
    assert "provider-bfloat16" not in provider(layers())


@pytest.mark.parametrize(
    ("mode", "side", "expected"),
    [
        ("nearest", 6, []),
        ("nearest", 7, ["provider-resize"]),
        ("linear", 6, ["provider-resize"]),
        ("linear", 7, ["provider-resize"] * 2),
    ],
)
def test_resize(mode: str, side: int, expected: list[str]) -> None:
    resize = node("Resize", ["a", "", "s"], ["b"], mode=mode)
    model = layers(resize, arrays={"s": np.array([1, 1, 2, 2], np.float32)}, x=(1, 4, side, side))
    assert provider(model) == expected


def test_one_operator() -> None:
    assert provider(build([node("Softmax", ["x"], ["y"])])) == ["provider-small"]


def test_attributes_left_to_their_defaults_in_a_quantized_model() -> None:
    made = jq.quantize(layers(), np.ones((2, 4, 6, 6), np.float32), "XINT8").model
    assert "provider-attributes" not in provider(made)
    for conv in (n for n in made.graph.node if n.op_type == "Conv"):
        del conv.attribute[:]
    finding = next(f for f in lint(made) if f.rule == "provider-attributes")
    assert "2 Conv nodes without strides, pads, dilations, kernel_shape, group" in finding.message


def test_what_a_chip_does_not_take() -> None:
    assert provider(layers(), "A8W8", "phx") == ["provider-x1-scales"] and provider(layers(), "A8W8", "stx") == []
    made = jq.quantize(layers(), np.ones((2, 4, 6, 6), np.float32), "A16W8").model
    assert "provider-x1-scales" in provider(made, chip="hpt")
    assert provider(layers(x=(2, 4, 6, 6)), chip="stx") == ["provider-batch"]
    with pytest.raises(ConfigError, match="chip needs one of phx"):
        lint(layers(), chip="strix")


@pytest.mark.parametrize(
    ("mode", "amount", "count"), [("edge", 2, 1), ("edge", 1, 0), ("reflect", 2, 0), ("constant", 2, 0), ("wrap", 1, 1)]
)
def test_pads_that_x1_takes_for_others(mode, amount, count):
    arrays = {"pads": np.array([0, 0, amount, 0, 0, 0, 0, 0])}
    model = build([node("Pad", ["x", "pads"], ["p"], mode=mode), node("Relu", ["p"], ["y"])], arrays, opset=19)
    assert provider(model).count("provider-pad") == count
