"""Quantized models with other codes, or without: bit for bit what onnxruntime makes of the original."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node

IMAGES = jq.zoo.calibration_set()[0]
RNG = np.random.default_rng(2)


@pytest.fixture(scope="module")
def int8() -> onnx.ModelProto:
    return jq.quantize(jq.zoo.path("fashion_mobilenet"), IMAGES[:16], "A8W8").model


def kinds(model: onnx.ModelProto) -> Counter[tuple[str, int]]:
    """How many quantizers have a zero point of which type."""
    types = {t.name: t.data_type for t in model.graph.initializer}
    return Counter((n.op_type, types[n.input[2]]) for n in model.graph.node if "uantizeLinear" in n.op_type)


def every_tensor(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    names = [o for n in model.graph.node if n.op_type == "DequantizeLinear" for o in n.output]
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    return dict(zip(names, onnxruntime_outputs(shown, feeds), strict=True))


def test_uint8_activations_are_the_same_values(int8: onnx.ModelProto) -> None:
    found = jq.convert(int8, uint8_activations=True)
    before, after = kinds(int8), kinds(found)
    assert before["QuantizeLinear", TensorProto.INT8] == after["QuantizeLinear", TensorProto.UINT8] > 0
    assert after["QuantizeLinear", TensorProto.INT8] == 0
    weights = before["DequantizeLinear", TensorProto.INT8] - before["QuantizeLinear", TensorProto.INT8]
    assert after["DequantizeLinear", TensorProto.INT8] == weights > 0
    feeds = {"input": IMAGES[:8] * 3}  # beyond the calibrated range, so that codes saturate
    want, have = every_tensor(int8, feeds), every_tensor(found, feeds)
    assert want.keys() == have.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(have[name], array, err_msg=name)


def quantized(
    nodes: list[onnx.NodeProto], arrays: dict[str, Any], outputs: tuple[str, ...] = ("y",), **options: Any
) -> onnx.ModelProto:
    arrays = {"s": np.float32(0.05), "z": np.int8(-3), "zw": np.int8(0)} | arrays
    return build(nodes, arrays, x=(2, 8), outputs=outputs, **options)


def test_a_zero_point_that_weights_share_stays_theirs() -> None:
    w = RNG.integers(-128, 128, (8, 5)).astype(np.int8)
    nodes = [
        node("QuantizeLinear", ["x", "s", "zw"], ["q"]),
        node("DequantizeLinear", ["q", "s", "zw"], ["d"]),
        node("DequantizeLinear", ["w", "s", "zw"], ["dw"]),
        node("MatMul", ["d", "dw"], ["y"]),
    ]
    model = quantized(nodes, {"w": w})
    found = jq.convert(model, uint8_activations=True)
    x = (RNG.standard_normal((2, 8)) * 9).astype(np.float32)
    np.testing.assert_array_equal(onnxruntime_outputs(found, {"x": x})[0], onnxruntime_outputs(model, {"x": x})[0])
    assert kinds(found) == {
        ("QuantizeLinear", TensorProto.UINT8): 1,
        ("DequantizeLinear", TensorProto.UINT8): 1,
        ("DequantizeLinear", TensorProto.INT8): 1,
    }


def test_zero_points_per_channel_and_branches() -> None:
    inner = [
        node("QuantizeLinear", ["x", "s8", "z8"], ["q"], axis=1),
        node("DequantizeLinear", ["q", "s8", "z8"], ["d"], axis=1),
    ]
    made = [helper.make_tensor_value_info("d", TensorProto.FLOAT, [2, 8])]
    then = helper.make_graph(inner, "then", [], made)
    other = helper.make_graph([node("Neg", ["x"], ["n"])], "else", [], [helper.make_tensor_value_info("n", 1, [2, 8])])
    arrays = {
        "yes": np.array(True),
        "s8": RNG.uniform(0.01, 0.1, 8).astype(np.float32),
        "z8": RNG.integers(-128, 128, 8).astype(np.int8),
    }
    model = quantized([node("If", ["yes"], ["y"], then_branch=then, else_branch=other)], arrays)
    found = jq.convert(model, uint8_activations=True)
    assert not any(t.data_type == TensorProto.INT8 for t in found.graph.initializer)
    x = (RNG.standard_normal((2, 8)) * 9).astype(np.float32)
    np.testing.assert_array_equal(onnxruntime_outputs(found, {"x": x})[0], onnxruntime_outputs(model, {"x": x})[0])


def test_codes_that_others_read_stay_with_a_warning() -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("Transpose", ["q"], ["t"], perm=[1, 0]),
        node("DequantizeLinear", ["t", "s", "z"], ["y"]),
    ]
    model = quantized(nodes, {})
    with pytest.warns(UserWarning, match="1 activations stay int8, because their codes are not only dequantized: x"):
        found = jq.convert(model, uint8_activations=True)
    x = RNG.standard_normal((2, 8)).astype(np.float32)
    np.testing.assert_array_equal(onnxruntime_outputs(found, {"x": x})[0], onnxruntime_outputs(model, {"x": x})[0])


def test_a_model_without_int8_activations_is_refused() -> None:
    for model in (
        onnx.load(jq.zoo.path("fashion_resnet")),
        jq.quantize(jq.zoo.path("fashion_resnet"), IMAGES[:8], "XINT8").model,
    ):
        with pytest.raises(jq.ConfigError, match="no activation is quantized to int8"):
            jq.convert(model, uint8_activations=True)


@pytest.mark.parametrize("preset", ["XINT8", "A8W8"])
def test_dequantized_is_the_float_model_with_the_codes_weights(preset: str) -> None:
    result = jq.quantize(jq.zoo.path("fashion_resnet"), IMAGES[:16], preset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = jq.convert(result.model, dequantize=True)
    assert not any("uantize" in n.op_type for n in found.graph.node)
    # By hand, from the file: every dequantized constant as a float initializer, every quantizer of an activation an Identity.
    graph = jq.load(result.model)
    nodes, arrays = [], dict(graph.arrays)
    for n in graph.nodes:
        if n.op_type == "QuantizeLinear":
            n = n.replace(op_type="Identity", inputs=n.inputs[:1], attrs={})
        elif n.op_type == "DequantizeLinear" and n.inputs[0] in graph.arrays:
            codes, scale, zero = (graph.arrays[i].astype(np.float64) for i in n.inputs)
            arrays[n.outputs[0]] = ((codes - zero) * scale).astype(np.float32)
            continue
        elif n.op_type == "DequantizeLinear":
            n = n.replace(op_type="Identity", inputs=n.inputs[:1], attrs={})
        nodes.append(n)
    byhand = jq.to_model(graph.with_arrays(arrays, nodes=tuple(nodes), declared={}))
    feeds = {"input": IMAGES[:8]}
    np.testing.assert_allclose(
        onnxruntime_outputs(found, feeds)[0], onnxruntime_outputs(byhand, feeds)[0], rtol=1e-6, atol=1e-6
    )


def test_quantizers_that_stay_are_reported() -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], name="first"),
        node("Transpose", ["q"], ["t"], perm=[1, 0]),
        node("DequantizeLinear", ["t", "s", "z"], ["y"], name="second"),
    ]
    with pytest.warns(UserWarning, match="2 quantizers stay, because a plan cannot describe them: 'first'"):
        jq.convert(quantized(nodes, {}), dequantize=True)
    with pytest.raises(jq.ConfigError, match="the model is not quantized"):
        jq.convert(jq.zoo.path("fashion_resnet"), dequantize=True)
