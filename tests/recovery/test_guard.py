"""The guard: what rounding would ruin is mended or left in float, with a warning; what is sound stays as it is."""

from __future__ import annotations

import ast
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.pipeline import calibrated
from jq.plan.planning import plan_and_moves


def model_of(nodes, arrays, shapes, out, opset=17):
    """A model of these nodes; inputs by name with their shapes."""
    inputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, ("N", *s)) for k, s in shapes.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in out]
    initializers = [numpy_helper.from_array(np.asarray(a), k) for k, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run(model, feed):
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)


def sqnr(x, y):
    return 10 * np.log10(np.square(x).sum() / max(np.square(x - y).sum(), 1e-30))


def conv(rng, out, into, gain=1.0):
    return (rng.standard_normal((out, into, 3, 3)) * gain / np.sqrt(9 * into)).astype(np.float32)


def two_ranges(ratio, rng):
    """Two convolutions, the outputs of one `ratio` times the other's, joined and convolved again."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "small", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["x", "w2"], ["b"], "large", pads=[1, 1, 1, 1]),
        helper.make_node("Concat", ["a", "b"], ["joined"], "joins", axis=1),
    ]
    arrays = {"w1": conv(rng, 4, 3), "w2": conv(rng, 4, 3, ratio)}
    return model_of(nodes, arrays, {"x": (3, 8, 8)}, ["joined"])


@pytest.mark.parametrize("config", ["XINT8", "A8W8"])
@pytest.mark.parametrize("ratio", [200, 1000, 30000])
def test_a_concat_of_unlike_ranges_keeps_both(config, ratio):
    rng = np.random.default_rng(0)
    model, data = two_ranges(ratio, rng), rng.standard_normal((8, 3, 8, 8)).astype(np.float32)
    with pytest.warns(UserWarning, match="guard"):
        result = jq.quantize(model, data, config)
    mend = next(m for m in result.guard if m.tensor == "joined")
    assert "operand 'a'" in mend.part and mend.before < 10 and "float_tensors" in mend.override
    (x,), (y,) = run(model, {"x": data[:2]}), run(result.model, {"x": data[:2]})
    assert min(sqnr(x[:, :4], y[:, :4]), sqnr(x[:, 4:], y[:, 4:])) > 20


@pytest.mark.parametrize("config", ["XINT8", "A8W8"])
def test_operands_of_like_ranges_share_a_scale(config):
    rng = np.random.default_rng(0)
    model, data = two_ranges(2, rng), rng.standard_normal((8, 3, 8, 8)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = jq.quantize(model, data, config)
    assert not result.guard and "joined" in result.plan


def attention(mask, rng):
    """Scores of two projections, a mask of the last half, and what a Softmax makes of the values."""
    nodes = [
        *(helper.make_node("MatMul", ["x", f"w{k}"], [k], k) for k in "qkv"),
        helper.make_node("Transpose", ["k"], ["kt"], "turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"], "product"),
        helper.make_node("Add", ["scores", "mask"], ["masked"], "hide"),
        helper.make_node("Softmax", ["masked"], ["p"], "softmax", axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"], "mix"),
    ]
    arrays = {f"w{k}": (rng.standard_normal((8, 8)) / 2).astype(np.float32) for k in "qkv"}
    arrays["mask"] = np.where(np.arange(6) < 3, 0, mask).astype(np.float32).reshape(1, 1, 6)
    return model_of(nodes, arrays, {"x": (6, 8)}, ["y"])


@pytest.mark.parametrize("config", ["XINT8", "A8W8"])
@pytest.mark.parametrize("mask", [-1e4, -1e9, -3.4e38])
def test_a_mask_does_not_take_the_range_of_scores(config, mask):
    rng = np.random.default_rng(1)
    model, data = attention(mask, rng), rng.standard_normal((16, 6, 8)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = jq.quantize(model, data, config)
    (x,), (y,) = run(model, {"x": data[:4]}), run(result.model, {"x": data[:4]})
    assert sqnr(x, y) > 15


def test_without_the_guard_all_is_as_planned():
    rng = np.random.default_rng(0)
    model, data = two_ranges(1000, rng), rng.standard_normal((8, 3, 8, 8)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = jq.quantize(model, data, jq.presets["A8W8"].replace(guard=None))
    assert not result.guard and "joined" in result.plan


def test_the_override_gives_the_same_file_without_the_guard():
    rng = np.random.default_rng(0)
    model, data = two_ranges(1000, rng), rng.standard_normal((8, 3, 8, 8)).astype(np.float32)
    with pytest.warns(UserWarning, match="guard"):
        result = jq.quantize(model, data, "XINT8")
    tensors = tuple(t for m in result.guard for t in ast.literal_eval(m.override.removeprefix("float_tensors=")))
    again = jq.quantize(model, data, jq.presets["XINT8"].replace(guard=None, float_tensors=tensors))
    for made in (result.model, again.model):
        del made.metadata_props[:]
    assert result.model.SerializeToString() == again.model.SerializeToString()


def test_a_weight_that_one_value_ruins_gets_a_scale_for_each_channel():
    """It multiplies what is near zero, so that the other columns make the output."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 8)).astype(np.float32)
    weight[:, 0] = 3000 * np.eye(8, dtype=np.float32)[0]
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"], "product[0]")], {"w": weight}, {"x": (8,)}, ["y"])
    data = rng.standard_normal((32, 8)).astype(np.float32)
    data[:, 0] *= 1e-4
    with pytest.warns(UserWarning, match="a scale for each channel"):
        result = jq.quantize(model, data, jq.presets["A8W8"].replace(cle=False))
    assert result.plan["w"].axis == 1 and result.guard[0].before < 10 < 30 < result.guard[0].after
    (x,), (y,) = run(model, {"x": data}), run(result.model, {"x": data})
    assert sqnr(x[:, 1:], y[:, 1:]) > 25


def test_figures_are_those_of_the_data():
    """A tensor's SQNR as numpy finds it: rounding of a known array at the plan's scale."""
    rng = np.random.default_rng(0)
    model, data = two_ranges(1000, rng), rng.standard_normal((8, 3, 8, 8)).astype(np.float32)
    config = jq.presets["A8W8"].replace(guard=None)
    graph = jq.prepare(jq.load(model), config)
    plan, _ = plan_and_moves(graph, jq.calibrate(graph, data, config), config)
    with pytest.warns(UserWarning, match="guard"):
        result = jq.quantize(model, data, config.replace(guard=18.0, cle=False))
    (joined,) = run(model, {"x": data})
    expected = sqnr(joined[:, :4], plan["joined"].on_host(joined)[:, :4])
    scale = np.float32(plan["joined"].scale)
    assert np.array_equal(plan["joined"].on_host(joined), np.clip(np.rint(joined / scale), -128, 127) * scale)
    assert next(m for m in result.guard if m.tensor == "joined").before == pytest.approx(expected, abs=0.5)


def test_names_that_no_tensor_has_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(jq.ConfigError, match=r"no tensor 'joint'\. Did you mean 'joined'"):
        data = np.zeros((2, 3, 8, 8), np.float32)
        jq.quantize(two_ranges(2, rng), data, jq.presets["XINT8"].replace(float_tensors=("joint",)))


def test_a_checked_model_comes_out():
    rng = np.random.default_rng(0)
    model, data = two_ranges(1000, rng), rng.standard_normal((8, 3, 8, 8)).astype(np.float32)
    with pytest.warns(UserWarning, match="guard"):
        onnx.checker.check_model(jq.quantize(model, data, "XINT8").model, full_check=True)


def test_biases_are_fitted_unless_statistics_are_to_do() -> None:
    images = jq.zoo.calibration_set()[0][:8]
    config = jq.presets["XINT8"].replace(guard=30.0)  # a bound that means do not reach

    def proposed(config: jq.QuantConfig) -> object:
        graph = jq.load(jq.zoo.path("fashion_resnet"))
        return calibrated(graph, images, config).guarded.shift

    assert proposed(config) is not None
    assert proposed(config.replace(bias_correction="statistics")) is None
