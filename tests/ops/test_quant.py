"""Quantized operators: equal codes with onnxruntime, on every type it has a kernel for, and the fast path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.arithmetic.numerics import divide
from jq.graph.read import load
from jq.ops import qlinear, quant
from jq.readings.tracing import trace
from tests.conftest import one_node, onnxruntime_outputs

OPTIMIZED = True  # the compiled program is looked at

MS = "com.microsoft"
EIGHT = [np.uint8, np.int8]
PAIRS = [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)]  # what onnxruntime has kernels for

# Before 1.30 onnxruntime divides float16 in float16.
KINDS = (np.float32, np.float16) if tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 30) else (np.float32,)


def assert_equal_codes(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> None:
    graph = load(model)
    fn = trace(graph)
    have = fn(graph.params, inputs)
    for name, want in zip(fn.outputs, onnxruntime_outputs(model, inputs), strict=True):
        got = np.asarray(have[name])
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def codes(rng: np.random.Generator, dtype: Any, shape: Any = ()) -> np.ndarray:
    info = ml_dtypes.iinfo(dtype)
    return np.asarray(rng.integers(info.min, info.max + 1, shape)).astype(dtype)


def scale(rng: np.random.Generator, shape: Any = (), factor: float = 1.0) -> np.ndarray:
    """Powers of two (exact ties) or anything."""
    value = 2.0 ** rng.integers(-8, 0, shape) if rng.integers(2) else np.exp(rng.normal(size=shape) - 4)
    return np.asarray(value * factor, np.float32)


def quantized(rng: np.random.Generator, dtype: Any, *names: str) -> dict[str, np.ndarray]:
    """A scale and a zero point for each name."""
    return {k: v for n in names for k, v in ((f"s{n}", scale(rng)), (f"z{n}", codes(rng, dtype)))}


# ---------------------------------------------------------------------------------------------
# QuantizeLinear, DequantizeLinear
# ---------------------------------------------------------------------------------------------


LINEAR = [
    *((name, np.float32, "axis") for name in ("int8", "uint8", "int16", "uint16", "int4", "uint4", "int2", "uint2")),
    *((name, kind, granularity) for name in ("int8", "uint4") for kind in KINDS for granularity in ("tensor", "block")),
]


@pytest.mark.parametrize(("name", "float_type", "granularity"), LINEAR)
def test_linear_codes(rng, name, float_type, granularity):
    dtype = np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
    x = (rng.normal(size=(3, 5, 4, 6)) * 2).astype(float_type)
    axis = -2
    shape = {"tensor": (), "axis": (4,), "block": (3, 5, 2, 6)}[granularity]
    parameters = {"s": scale(rng, shape).astype(float_type), "z": codes(rng, dtype, shape)}
    x[0] = np.round(x[0] * 8) / 8  # ties, where the scale is a power of two
    attrs: dict[str, Any] = {"axis": axis, "opset": 25} | ({"block_size": 2} if granularity == "block" else {})
    model = one_node("QuantizeLinear", {"x": x}, ["mid"], initializers=parameters, **attrs)
    if dtype.name[-1] in "24":  # onnxruntime's Python cannot return these
        model.graph.node.append(
            helper.make_node("Cast", ["mid"], ["y"], to=TensorProto.INT8 if name[0] == "i" else TensorProto.UINT8)
        )
        model.graph.output[0].name = "y"
    assert_equal_codes(model, {"x": x})
    q = codes(rng, dtype, x.shape)
    model = one_node("DequantizeLinear", {}, initializers={"q": q, **parameters}, **attrs)
    assert_equal_codes(model, {})


@pytest.mark.parametrize("dtype", [np.int8, np.uint16])
def test_linear_saturates_and_takes_nan_like_onnxruntime(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.5, 1.5, 2.5, -0.5], np.float32)
    model = one_node("QuantizeLinear", {"x": x}, initializers={"s": np.float32(1), "z": np.asarray(3, dtype)})
    assert_equal_codes(model, {"x": x})


def test_quotient_is_correctly_rounded():
    """XLA's own x / scale is not: it multiplies with the reciprocal."""
    x = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    step = np.float32(0.1)
    have = jax.jit(divide)(x, step)
    np.testing.assert_array_equal(have, x / step)
    x, step = (np.arange(-99, 100) + np.float32(0.5)).astype(np.float32) * np.float32(0.7), np.float32(0.7)
    model = one_node("QuantizeLinear", {"x": x}, initializers={"s": step, "z": np.int8(0)})
    assert_equal_codes(model, {"x": x})


def test_fused_rounds_once(rng):
    code = rng.integers(-255, 256, 10_000).astype(np.float32)
    ratio, addend = np.exp(rng.normal(size=(2, 10_000))).astype(np.float32)
    have = jax.jit(qlinear._fused)(code, ratio, addend * 50)
    want = (code.astype(np.float64) * ratio + addend * np.float32(50)).astype(np.float32)
    np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn"]
)
@pytest.mark.parametrize("saturate", [0, 1])
def test_small_floats_saturate_or_overflow(name, saturate):
    dtype = getattr(ml_dtypes, name)
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.array([0, 1, -2, largest, largest * 2, -largest * 2, np.inf], np.float32)
    have = np.asarray(quant.quantize_linear(jnp.asarray(x), jnp.float32(1), jnp.zeros((), dtype), saturate=saturate))
    want = np.clip(x, -largest, largest) if saturate or name[:6] == "float4" else x
    np.testing.assert_array_equal(have.astype(np.float32), want.astype(dtype).astype(np.float32))


def test_linear_per_axis_between_convolutions_keeps_channels_last(rng):
    """Per-axis parameters follow the channels, and no transpose is left but those of graph input and output."""
    weights = {
        "w": rng.normal(size=(8, 4, 3, 3)).astype(np.float32),
        "v": rng.normal(size=(8, 8, 1, 1)).astype(np.float32),
    }
    parameters = {"s": scale(rng, (8,), 0.5), "z": codes(rng, np.int8, (8,))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "s", "z"], ["q"], axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], axis=-3),
        helper.make_node("Conv", ["d", "v"], ["y"]),
    ]
    x = rng.normal(size=(2, 4, 9, 7)).astype(np.float32)
    graph = load(model_of(nodes, {"x": x}, ["y", "q"], weights | parameters))
    want = dict(
        zip(
            "yq",
            onnxruntime_outputs(model_of(nodes, {"x": x}, ["y", "q"], weights | parameters), {"x": x}),
            strict=True,
        )
    )
    have = trace(graph)(graph.params, {"x": x})
    assert np.mean(np.asarray(have["q"]) != want["q"]) < 0.01  # the float sums before have another order
    np.testing.assert_allclose(have["y"], want["y"], rtol=1e-3, atol=0.1)
    fn = trace(graph, outputs=["y"])
    program = str(jax.make_jaxpr(lambda p, x: fn(p, {"x": x}))(jq.pack(graph), x))
    assert program.count("= transpose[") == 2


def model_of(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, np.ndarray], outputs: list[str], arrays: Mapping[str, np.ndarray]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "model",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in inputs.items()
        ],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in arrays.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)], ir_version=10
    )


def test_linear_under_vmap_and_grad(rng):
    q = codes(rng, np.int8, (3, 4))
    steps = jnp.asarray([0.1, 0.2, 0.3], jnp.float32)
    rows = jax.vmap(lambda q, s: quant.dequantize_linear(q, s))(jnp.asarray(q), steps)
    np.testing.assert_array_equal(rows, q.astype(np.float32) * np.asarray(steps)[:, None])
    slope = jax.grad(lambda s: quant.dequantize_linear(jnp.asarray(q), s).sum())(jnp.float32(0.1))
    assert slope == q.sum()


# ---------------------------------------------------------------------------------------------
# Convolutions and products
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x_type", "w_type"), PAIRS)
@pytest.mark.parametrize(("group", "zero"), [(1, "symmetric"), (2, "any"), (4, "symmetric"), (4, "any")])
def test_qlinear_conv_codes(rng, x_type, w_type, group, zero):
    x, w = codes(rng, x_type, (2, 4, 9, 10)), codes(rng, w_type, (8, 4 // group, 3, 2))
    per_channel = () if zero == "any" else (8,)
    w_zero = (
        np.full(per_channel, 128 if w_type is np.uint8 else 0, w_type) if zero == "symmetric" else codes(rng, w_type)
    )
    arrays = {
        "sx": scale(rng),
        "zx": codes(rng, x_type),
        "w": w,
        "sw": scale(rng, per_channel),
        "zw": w_zero,
        "sy": scale(rng),
        "zy": codes(rng, x_type),
        "b": rng.integers(-3000, 3000, 8).astype(np.int32),
    }
    arrays["sy"] = np.float32(arrays["sx"] * arrays["sw"].mean() * 300)
    attrs = {"group": group, "pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}
    assert_equal_codes(one_node("QLinearConv", {"x": x}, initializers=arrays, **attrs), {"x": x})
    arrays = {"w": w, "zx": arrays["zx"], "zw": w_zero.reshape(-1)[0]}
    assert_equal_codes(one_node("ConvInteger", {"x": x}, initializers=arrays, **attrs), {"x": x})


@pytest.mark.parametrize("packed", [False, True])
def test_integer_convolutions_reach_the_library(rng, packed):
    """Also from weights and images in ONNX's order, whose 8-bit transposes would keep XLA from it."""
    x = codes(rng, np.uint8, (2, 64, 28, 28))  # the library is not asked for small ones
    arrays = {
        "sx": scale(rng),
        "zx": np.uint8(3),
        "w": codes(rng, np.int8, (64, 64, 3, 3)),
        "sw": scale(rng),
        "zw": np.int8(0),
        "sy": scale(rng),
        "zy": np.uint8(5),
    }
    graph = load(one_node("QLinearConv", {"x": x}, initializers=arrays, pads=[1, 1, 1, 1]))
    params = jq.pack(graph) if packed else dict(graph.params)
    fn = trace(graph, lowering="cpu")
    text = jax.jit(lambda p, x: fn(p, {"x": x})).lower(params, x).compile().as_text()
    assert text.count("__ynn_fusion") == 1


def test_integer_convolution_is_exact_at_the_extremes():
    """All products of one sign, 1.5e8 in sum: int8 sums would overflow, float32 ones would round."""
    x, w = np.full((1, 1024, 6, 6), -128, np.int8), np.full((2, 1024, 3, 3), -128, np.int8)
    x[0, 0, 0, 0] = 127
    graph = load(one_node("ConvInteger", {"x": x}, initializers={"w": w}))
    y = np.asarray(trace(graph)(graph.params, {"x": x})["y"])
    want = np.full((1, 2, 4, 4), 1024 * 9 * 128 * 128)
    want[:, :, 0, 0] -= 255 * 128
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(("a_type", "b_type"), PAIRS)
@pytest.mark.parametrize("per_column", [False, True])
def test_integer_product_codes(rng, a_type, b_type, per_column):
    columns = (19,) if per_column else ()
    a, b = codes(rng, a_type, (3, 7, 33)), codes(rng, b_type, (33, 19))
    zeros = {"za": codes(rng, a_type), "zb": np.full(columns, codes(rng, b_type))}
    sa, sb = scale(rng), scale(rng, columns)
    out = {"sy": np.float32(sa * sb.mean() * 5000), "zy": codes(rng, a_type)}
    assert_equal_codes(one_node("MatMulInteger", {"a": a}, initializers={"b": b, **zeros}), {"a": a})
    arrays = {"b": b, "sa": sa, "sb": sb, **zeros, **out}
    order = ["a", "sa", "za", "b", "sb", "zb", "sy", "zy"]
    assert_equal_codes(one_node("QLinearMatMul", {"a": a}, initializers=arrays, order=order), {"a": a})
    bias = rng.normal(size=19).astype(np.float32)
    order = ["a", "b", "sa", "sb", "za", "zb", "bias"]
    arrays = {"b": b, "sa": sa, "sb": sb, **zeros, "bias": bias}
    assert_equal_codes(
        one_node("MatMulIntegerToFloat", {"a": a}, domain=MS, initializers=arrays, order=order), {"a": a}
    )
    arrays = {"b": b.T.copy(), "sa": sa, "sb": sb, **zeros, "c": rng.integers(-3000, 3000, 19).astype(np.int32), **out}
    order = ["a", "sa", "za", "b", "sb", "zb", "c", "sy", "zy"]
    for given in (order, order[:7]):
        model = one_node("QGemm", {"a": a[0]}, domain=MS, initializers=arrays, order=given, transB=1, alpha=0.7)
        assert_equal_codes(model, {"a": a[0]})


@pytest.mark.parametrize("offset", [0.0, 3.0, -3.0])
def test_dynamic_quantization(rng, offset):
    x = (rng.normal(size=(5, 33)) + offset).astype(np.float32)
    assert_equal_codes(one_node("DynamicQuantizeLinear", {"x": x}, ["y", "s", "z"]), {"x": x})
    arrays = {"b": codes(rng, np.int8, (33, 19)), "sb": scale(rng), "zb": codes(rng, np.int8)}
    assert_equal_codes(one_node("DynamicQuantizeMatMul", {"x": x}, domain=MS, initializers=arrays), {"x": x})
    assert_equal_codes(one_node("DynamicQuantizeLinear", {"x": x}, ["y", "s", "z"]), {"x": x * 0})


# ---------------------------------------------------------------------------------------------
# com.microsoft
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize("seed", range(3))
def test_elementwise_codes(dtype, seed):
    rng = np.random.default_rng(seed)
    a, b = codes(rng, dtype, (2, 3, 11, 13)), codes(rng, dtype, [(2, 3, 11, 13), (3, 1, 1), ()][seed])
    arrays = quantized(rng, dtype, "a", "b", "c")
    order = ["a", "sa", "za", "b", "sb", "zb", "sc", "zc"]
    assert_equal_codes(
        one_node("QLinearAdd", {"a": a, "b": b}, domain=MS, initializers=arrays, order=order), {"a": a, "b": b}
    )
    arrays["sc"] = arrays["sa"] * arrays["sb"] * np.float32(70)
    assert_equal_codes(
        one_node("QLinearMul", {"a": a, "b": b}, domain=MS, initializers=arrays, order=order), {"a": a, "b": b}
    )
    arrays = quantized(rng, dtype, "a", "c")
    order = ["a", "sa", "za", "sc", "zc"]
    model = one_node("QLinearLeakyRelu", {"a": a}, domain=MS, initializers=arrays, order=order, alpha=0.3)
    assert_equal_codes(model, {"a": a})
    arrays["sc"] = np.float32(1 / 256)
    assert_equal_codes(one_node("QLinearSigmoid", {"a": a}, domain=MS, initializers=arrays, order=order), {"a": a})


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize(("opset", "axis"), [(13, -1), (13, 1), (11, 2)])
def test_softmax_codes(rng, dtype, opset, axis):
    x = codes(rng, dtype, (2, 3, 11, 13))
    x[0, 0] = 7  # equal terms meet ties
    arrays = quantized(rng, dtype, "x", "y") | {"sy": np.float32(1 / 256), "zy": np.asarray(np.iinfo(dtype).min, dtype)}
    model = one_node(
        "QLinearSoftmax", {"x": x}, domain=MS, initializers=arrays, order=["x", "sx", "zx", "sy", "zy"], axis=axis
    )
    model.graph.node[0].attribute.append(helper.make_attribute("opset", opset))
    assert_equal_codes(model, {"x": x})


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize(("channels_last", "count_include_pad"), [(0, 0), (1, 1)])
def test_pool_codes(rng, dtype, channels_last, count_include_pad):
    x = codes(rng, dtype, (2, 6, 11, 13))
    options = {"domain": MS, "initializers": quantized(rng, dtype, "x", "y"), "channels_last": channels_last}
    assert_equal_codes(one_node("QLinearGlobalAveragePool", {"x": x}, **options), {"x": x})
    for attrs in (
        {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "strides": [2, 3]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
        {"kernel_shape": [2, 3], "auto_pad": "SAME_UPPER"},
        {"kernel_shape": [6, 11] if channels_last else [11, 13]},
    ):
        model = one_node("QLinearAveragePool", {"x": x}, count_include_pad=count_include_pad, **options, **attrs)
        assert_equal_codes(model, {"x": x})


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize("same", [False, True])
def test_concat_and_where_codes(rng, dtype, same):
    x, v = codes(rng, dtype, (2, 3, 4, 5)), codes(rng, dtype, (2, 3, 4, 5))
    arrays = quantized(rng, dtype, "x", "v", "y")
    if same:
        arrays |= {"sv": arrays["sy"], "zv": arrays["zy"]}
    order = ["sy", "zy", "x", "sx", "zx", "v", "sv", "zv"]
    model = one_node("QLinearConcat", {"x": x, "v": v}, domain=MS, initializers=arrays, order=order, axis=-3)
    assert_equal_codes(model, {"x": x, "v": v})
    inputs = {"c": rng.random(x.shape) > 0.5, "x": x, "v": v}
    order = ["c", "x", "sx", "zx", "v", "sv", "zv", "sy", "zy"]
    assert_equal_codes(one_node("QLinearWhere", inputs, domain=MS, initializers=arrays, order=order), inputs)


def test_reduce_mean_follows_its_documentation(rng):
    """onnxruntime documents it but has no CPU kernel."""
    x = codes(rng, np.uint8, (2, 3, 4))
    model = one_node(
        "QLinearReduceMean",
        {"x": x},
        domain=MS,
        axes=[1],
        keepdims=0,
        initializers={"sx": np.float32(0.5), "zx": np.uint8(9), "sy": np.float32(0.25), "zy": np.uint8(4)},
    )
    graph = load(model)
    want = np.clip(np.rint((x.astype(float) - 9).mean(1) * 0.5 / 0.25) + 4, 0, 255)
    np.testing.assert_array_equal(trace(graph)(graph.params, {"x": x})["y"], want)
