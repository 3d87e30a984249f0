"""Convolutions, pools, matrix products, attention and signals where the ONNX suite does not look."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax.test_util import check_grads
from onnx import helper, numpy_helper

import jq.ops.families  # noqa: F401  fills the table
from jq.errors import Error, UnsupportedOp
from jq.graph.read import load
from jq.ops import products
from jq.ops.table import lookup
from jq.readings.tracing import trace
from tests.conftest import assert_like_onnxruntime, one_node, onnxruntime_outputs, outputs


def chain(nodes, x, arrays, names=("y",)):
    """A model of several nodes from x to `names`."""
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [onnx.ValueInfoProto(name=n) for n in names],
        [numpy_helper.from_array(v, k) for k, v in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# Pools

POOLS = [
    ((2, 3, 17), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    ((2, 3, 11, 14), {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 1, 1], "ceil_mode": 1}),
    ((2, 3, 11, 14), {"kernel_shape": [3, 3], "strides": [3, 2], "dilations": [2, 1], "pads": [0, 1, 1, 1]}),
    ((1, 2, 9, 10), {"kernel_shape": [3, 4], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 9, 10), {"kernel_shape": [3, 4], "strides": [2, 2], "auto_pad": "VALID"}),
    ((1, 2, 5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [2, 1, 2], "pads": [0, 1, 0, 0, 1, 1], "ceil_mode": 1}),
    ((1, 2, 13, 12), {"kernel_shape": [9, 9], "pads": [4, 4, 4, 4]}),
    ((2, 3, 6, 5), {"kernel_shape": [6, 5]}),
]


@pytest.mark.parametrize(("shape", "attrs"), POOLS)
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
def test_pools(rng, op_type, shape, attrs):
    x = rng.standard_normal(shape, dtype=np.float32)
    counts = [{"count_include_pad": 0}, {"count_include_pad": 1}]
    variants = {"MaxPool": [{}], "AveragePool": counts, "LpPool": [{"p": 1}, {"p": 2}, {"p": 3}]}
    for variant in variants[op_type]:
        assert_like_onnxruntime(one_node(op_type, {"x": x}, opset=21, **attrs, **variant), {"x": x})


@pytest.mark.parametrize(("shape", "attrs"), POOLS)
@pytest.mark.parametrize("storage_order", [0, 1])
def test_max_pool_indices(rng, shape, attrs, storage_order):
    x = rng.integers(-3, 3, shape).astype(np.float32)  # ties, so that the first one must win
    assert_like_onnxruntime(one_node("MaxPool", {"x": x}, ("y", "i"), storage_order=storage_order, **attrs), {"x": x})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_integer_max_pool_never_returns_a_pad(dtype):
    x = np.full((1, 1, 4, 4), np.iinfo(dtype).min, dtype)
    model = one_node("MaxPool", {"x": x}, ("y", "i"), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    y, indices = outputs(model, {"x": x})
    assert y.dtype == dtype
    assert (y == x.min()).all()
    assert (indices >= 0).all()
    assert indices[0, 0, 3, 3] == 10


def test_half_precision_average_is_summed_in_single():
    x = np.full((1, 1, 64, 64), 100, np.float16)  # 409,600 is out of the range of half precision
    (y,) = outputs(one_node("AveragePool", {"x": x}, kernel_shape=[64, 64], opset=22), {"x": x})
    assert y.dtype == np.float16
    assert y.item() == 100


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
def test_a_window_that_does_not_fit_is_named(op_type):
    x = np.zeros((1, 1, 3, 3), np.float32)
    with pytest.raises(Error, match=r"window \(5, 2\) does not fit into \(3, 3\)"):
        outputs(one_node(op_type, {"x": x}, kernel_shape=[5, 2]), {"x": x})


def test_max_unpool_undoes_max_pool(rng):
    x = rng.standard_normal((2, 3, 6, 6), dtype=np.float32)
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p", "i"], **window),
        helper.make_node("MaxUnpool", ["p", "i"], ["y"], **window),
        helper.make_node("MaxPool", ["y"], ["again"], **window),
    ]
    pooled, y, again = outputs(chain(nodes, x, {}, ("p", "y", "again")), {"x": x})
    assert ((y == x) | (y == 0)).all()
    np.testing.assert_array_equal(again, np.maximum(pooled, 0))


def test_channels_last_chain_agrees_with_plain(rng):
    """Indices, pools and transposed convolutions between convolutions, where no tensor is in ONNX's order."""
    x = rng.standard_normal((2, 3, 12, 10), dtype=np.float32)
    arrays = {
        "w": rng.standard_normal((4, 3, 3, 3), dtype=np.float32),
        "t": rng.standard_normal((4, 2, 3, 3), dtype=np.float32),
        "b": rng.standard_normal(2, dtype=np.float32),
    }
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["c"], ["m", "i"], **window),
        helper.make_node("AveragePool", ["m"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("ConvTranspose", ["a", "t", "b"], ["y"], strides=[2, 2]),
        helper.make_node("MaxUnpool", ["a", "i"], ["u"], **window),
    ]
    assert_like_onnxruntime(chain(nodes, x, arrays, ("y", "u", "i")), {"x": x})


# Convolutions


@pytest.mark.parametrize(
    ("shape", "weight", "attrs"),
    [
        ((2, 4, 7), (4, 3, 4), {"strides": [3], "pads": [1, 2], "output_padding": [1]}),
        ((1, 4, 5, 6), (4, 3, 3, 2), {"strides": [2, 3], "dilations": [2, 1], "pads": [1, 0, 2, 1]}),
        ((1, 4, 5, 6), (4, 3, 3, 2), {"strides": [2, 1], "group": 2}),
        ((1, 4, 5, 6), (4, 1, 4, 4), {"strides": [2, 2], "group": 4, "pads": [1, 1, 1, 1]}),
        ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "output_shape": [11, 12], "output_padding": [1, 1]}),
        ((1, 4, 5, 6), (4, 3, 4, 3), {"strides": [2, 2], "output_shape": [9, 11], "auto_pad": "SAME_UPPER"}),
        ((1, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
        ((1, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 2], "auto_pad": "VALID"}),
        ((1, 2, 3, 4, 3), (2, 2, 2, 3, 2), {"strides": [2, 1, 2], "pads": [0, 1, 1, 0, 0, 1]}),
    ],
)
def test_conv_transpose(rng, shape, weight, attrs):
    x = rng.standard_normal(shape, dtype=np.float32)
    arrays = {"w": rng.standard_normal(weight, dtype=np.float32)}
    arrays["b"] = rng.standard_normal(weight[1] * attrs.get("group", 1), dtype=np.float32)
    assert_like_onnxruntime(one_node("ConvTranspose", {"x": x}, initializers=arrays, **attrs), {"x": x})


@pytest.mark.parametrize("group", [1, 2])
def test_deform_conv_without_offsets_is_a_convolution(rng, group):
    x = rng.standard_normal((2, 4, 7, 8), dtype=np.float32)
    w = rng.standard_normal((6, 4 // group, 3, 2), dtype=np.float32)
    window = {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 1, 1], "group": group}
    (want,) = outputs(one_node("Conv", {"x": x}, initializers={"w": w}, **window), {"x": x})
    offset = np.zeros((2, 2 * 6 * 2, *want.shape[2:]), np.float32)
    model = one_node("DeformConv", {"x": x}, initializers={"w": w, "o": offset}, offset_group=2, **window)
    np.testing.assert_allclose(outputs(model, {"x": x})[0], want, rtol=1e-4, atol=1e-5)


def test_deform_conv_reads_between_pixels(rng):
    """A whole offset of one pixel is a shift; half of it is the mean of both."""
    x = rng.standard_normal((1, 1, 5, 6), dtype=np.float32)
    shift = np.zeros((1, 2, 5, 6), np.float32)
    for step in (1.0, 0.5):
        shift[:, 1] = step
        arrays = {"w": np.ones((1, 1, 1, 1), np.float32), "o": shift}
        (y,) = outputs(one_node("DeformConv", {"x": x}, initializers=arrays), {"x": x})
        right = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)))[..., 1:]
        np.testing.assert_allclose(y, step * right + (1 - step) * x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Relu", []), ("Clip", [-0.5, 0.5]), ("LeakyRelu", [0.2]), ("HardSigmoid", [0.3, 0.4]), ("Tanh", [])],
)
def test_fused_conv(rng, name, parameters):
    x = rng.standard_normal((1, 3, 6, 6), dtype=np.float32)
    arrays = {
        "w": rng.standard_normal((4, 3, 3, 3), dtype=np.float32),
        "b": rng.standard_normal(4, dtype=np.float32),
        "z": rng.standard_normal((1, 4, 4, 4), dtype=np.float32),
    }
    attrs = {"activation": name} | ({"activation_params": parameters} if parameters else {})
    arrays |= {} if name == "Relu" else {"z": np.zeros((1, 4, 4, 4), np.float32)}
    assert_like_onnxruntime(
        one_node("FusedConv", {"x": x}, domain="com.microsoft", initializers=arrays, **attrs), {"x": x}
    )


def test_unknown_activation_is_refused(rng):
    x = np.zeros((2, 2), np.float32)
    model = one_node("FusedGemm", {"x": x}, domain="com.microsoft", initializers={"b": x}, activation="Swirl")
    with pytest.raises(UnsupportedOp, match="Swirl"):
        outputs(model, {"x": x})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_nhwc_max_pool(rng, dtype):
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, (2, 7, 8, 3), dtype, endpoint=True)
    attrs = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    assert_like_onnxruntime(one_node("NhwcMaxPool", {"x": x}, domain="com.microsoft", **attrs), {"x": x})


@pytest.mark.parametrize(
    ("op_type", "attrs", "weight"),
    [
        ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}, None),
        ("AveragePool", {"kernel_shape": [9, 9], "pads": [4, 4, 4, 4]}, None),
        ("LpPool", {"kernel_shape": [2, 3], "p": 3, "dilations": [2, 1]}, None),
        ("GlobalLpPool", {"p": 2}, None),
        ("ConvTranspose", {"strides": [2, 3], "group": 2, "pads": [1, 0, 0, 1]}, (4, 1, 3, 3)),
        ("ConvTranspose", {"strides": [2, 1], "dilations": [2, 2]}, (4, 3, 2, 2)),
    ],
)
def test_gradients_and_batches(rng, op_type, attrs, weight):
    x = rng.standard_normal((3, 1, 4, 7, 6), dtype=np.float32)
    params = {} if weight is None else {"w": rng.standard_normal(weight, dtype=np.float32)}
    fn = trace(load(one_node(op_type, {"x": x[0]}, initializers=params, **attrs)))

    def run(params, x):
        return fn(params, {"x": x})["y"]

    check_grads(run, (params, x[0]), order=1, modes=["rev"], rtol=0.05, atol=0.05, eps=1e-2)
    together = jax.vmap(run, in_axes=(None, 0))(params, x)
    np.testing.assert_allclose(together[1], run(params, x[1]), rtol=1e-5, atol=1e-5)


# Matrix products


@pytest.mark.parametrize(("a", "b"), list(itertools.product([0, 1], repeat=2)))
def test_fused_matmul(rng, a, b):
    x = rng.standard_normal((2, 4, 3) if a else (2, 3, 4), dtype=np.float32)
    w = rng.standard_normal((2, 5, 4) if b else (2, 4, 5), dtype=np.float32)
    attrs = {"transA": a, "transB": b, "alpha": 0.5}
    assert_like_onnxruntime(
        one_node("FusedMatMul", {"x": x}, domain="com.microsoft", initializers={"w": w}, **attrs), {"x": x}
    )


@pytest.mark.parametrize("trans", [0, 1])
def test_fused_matmul_with_batches_behind(rng, trans):
    x = rng.standard_normal((3, 2, 4) if not trans else (4, 2, 3), dtype=np.float32)
    w = rng.standard_normal((2, 4, 5), dtype=np.float32)
    attrs = {"transBatchA": 1, "transA": trans}
    assert_like_onnxruntime(
        one_node("FusedMatMul", {"x": x}, domain="com.microsoft", initializers={"w": w}, **attrs), {"x": x}
    )


def test_fused_gemm(rng):
    x, b, c = (rng.standard_normal(s, dtype=np.float32) for s in ((3, 4), (5, 4), (5,)))
    attrs = {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": "LeakyRelu", "activation_alpha": 0.1}
    model = one_node("FusedGemm", {"x": x}, domain="com.microsoft", initializers={"b": b, "c": c}, **attrs)
    assert_like_onnxruntime(model, {"x": x})


def test_gemm_of_opset_6_broadcasts(rng):
    x, b, c = (rng.standard_normal(s, dtype=np.float32) for s in ((3, 4), (4, 5), (5,)))
    (y,) = outputs(one_node("Gemm", {"x": x}, opset=6, initializers={"b": b, "c": c}, broadcast=1), {"x": x})
    np.testing.assert_allclose(y, x @ b + c, rtol=1e-5, atol=1e-6)


def test_matmul_of_known_values_stays_in_numpy():
    y = products.matmul(np.arange(6).reshape(2, 3), np.ones(3, np.int64))
    assert type(y) is np.ndarray
    assert y.dtype == np.int64
    assert y.tolist() == [3, 12]


# Attention


def test_attention_gradient_of_blind_rows_is_zero(rng):
    """A query that may look nowhere gives zero, and no NaN flows back."""
    q, k, v = (jnp.asarray(rng.standard_normal((1, 2, 3, 4), dtype=np.float32)) for _ in range(3))
    mask = jnp.asarray([[True, True, True], [False, False, False], [True, False, True]])
    model = one_node("Attention", {n: np.asarray(x) for n, x in (("q", q), ("k", k), ("v", v), ("m", mask))}, opset=23)
    fn = trace(load(model))

    @jax.jit
    def loss(q, k, v):
        return jnp.sum(fn({}, {"q": q, "k": k, "v": v, "m": mask})["y"] ** 2)

    gradients = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)
    assert (gradients[0][:, :, 1] == 0).all()
    assert (gradients[0][:, :, 0] != 0).any()


def test_attention_under_vmap(rng):
    q, k, v = (rng.standard_normal((4, 1, 2, 3, 4), dtype=np.float32) for _ in range(3))
    model = one_node("Attention", {"q": q[0], "k": k[0], "v": v[0]}, opset=23, is_causal=1)
    fn = trace(load(model))
    together = jax.vmap(lambda q, k, v: fn({}, {"q": q, "k": k, "v": v})["y"])(q, k, v)
    one = fn({}, {"q": q[2], "k": k[2], "v": v[2]})["y"]
    np.testing.assert_allclose(together[2], one, rtol=1e-5, atol=1e-6)


def test_heads_that_do_not_divide_are_named(rng):
    x = np.zeros((1, 2, 10), np.float32)
    model = one_node("Attention", {"q": x, "k": x, "v": x}, opset=23, q_num_heads=4, kv_num_heads=4)
    with pytest.raises(Error, match="10 features do not divide into 4 heads"):
        outputs(model, {"q": x, "k": x, "v": x})


MASKS = {
    "none": None,
    "lengths": np.array([5, 3], np.int32),
    "ends": np.array([5, 4, 1, 0], np.int32),
    "keys": np.array([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]], np.int32),
    "queries": np.tri(5, dtype=np.int32)[None].repeat(2, 0),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_of_onnxruntime(rng, kind, causal):
    x = rng.standard_normal((2, 5, 6), dtype=np.float32)
    arrays = {"w": rng.standard_normal((6, 24), dtype=np.float32), "b": rng.standard_normal(24, dtype=np.float32)}
    arrays |= {} if MASKS[kind] is None else {"m": MASKS[kind]}
    attrs = {"num_heads": 2, "unidirectional": causal}
    model = one_node("Attention", {"x": x}, ("y", "present"), domain="com.microsoft", initializers=arrays, **attrs)
    assert_like_onnxruntime(model, {"x": x})


def test_attention_of_onnxruntime_with_past_and_own_sizes(rng):
    x = rng.standard_normal((2, 3, 6), dtype=np.float32)
    arrays = {
        "w": rng.standard_normal((6, 24), dtype=np.float32),
        "b": rng.standard_normal(24, dtype=np.float32),
        "past": rng.standard_normal((2, 2, 2, 4, 4), dtype=np.float32),
    }
    order = ["x", "w", "b", "", "past"]
    options = {"domain": "com.microsoft", "num_heads": 2, "scale": 0.3}
    model = one_node(
        "Attention", {"x": x}, ("y", "present"), initializers=arrays, order=order, unidirectional=1, **options
    )
    assert_like_onnxruntime(model, {"x": x})
    arrays = {"w": rng.standard_normal((6, 22), dtype=np.float32), "b": rng.standard_normal(22, dtype=np.float32)}
    model = one_node("Attention", {"x": x}, initializers=arrays, qkv_hidden_sizes=[8, 8, 6], **options)
    assert_like_onnxruntime(model, {"x": x})


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("kind", ["none", "lengths", "keys"])
def test_multi_head_attention(rng, kind, causal):
    queries = 5 if causal else 3  # onnxruntime leaves the last query unmasked, which tells where they are fewer
    inputs = {
        n: rng.standard_normal((2, length, 8), dtype=np.float32) for n, length in (("q", queries), ("k", 5), ("v", 5))
    }
    arrays = {
        "b": rng.standard_normal(24, dtype=np.float32),
        "bias": rng.standard_normal((1, 2, queries, 5), dtype=np.float32),
    }
    arrays |= {} if MASKS[kind] is None else {"m": MASKS[kind]}
    order = [n if n in inputs or n in arrays else "" for n in ("q", "k", "v", "b", "m", "bias")]
    options = {
        "domain": "com.microsoft",
        "initializers": arrays,
        "order": order,
        "num_heads": 2,
        "unidirectional": causal,
    }
    assert_like_onnxruntime(one_node("MultiHeadAttention", inputs, **options), inputs)


def test_multi_head_attention_unpacks(rng):
    q, k, v = (rng.standard_normal((2, 5, 2, 4), dtype=np.float32) for _ in range(3))
    forms = [
        {n: x.reshape(2, 5, 8) for n, x in (("q", q), ("k", k), ("v", v))},
        {"q": q.reshape(2, 5, 8), "k": np.stack([k, v], axis=3)},
        {"q": np.stack([q, k, v], axis=3)},
    ]
    options = {"domain": "com.microsoft", "num_heads": 2}
    want, *packed = (outputs(one_node("MultiHeadAttention", x, **options), x)[0] for x in forms)
    for y in packed:  # onnxruntime has these forms on GPUs only
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_multi_head_attention_with_past(rng):
    inputs = {n: rng.standard_normal((2, 3, 8), dtype=np.float32) for n in "qkv"}
    inputs |= {n: rng.standard_normal((2, 2, 4, 4), dtype=np.float32) for n in ("pk", "pv")}
    order = ["q", "k", "v", "", "", "", "pk", "pv"]
    attrs = {"num_heads": 2, "unidirectional": 1, "domain": "com.microsoft"}
    model = one_node("MultiHeadAttention", inputs, ("y", "key", "value"), order=order, **attrs)
    assert_like_onnxruntime(model, inputs)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("form", ["3D", "4D", "offset", "partial"])
def test_rotary_embedding_of_onnxruntime(rng, interleaved, form):
    x = rng.standard_normal((2, 2, 3, 8) if form == "4D" else (2, 3, 16), dtype=np.float32)
    angles = rng.uniform(-3, 3, (10, 2 if form == "partial" else 4)).astype(np.float32)
    ids = np.array([4]) if form == "offset" else rng.integers(0, 10, (2, 3))
    arrays = {"ids": ids.astype(np.int64), "cos": np.cos(angles), "sin": np.sin(angles)}
    attrs = {"num_heads": 2, "rotary_embedding_dim": 4} if form == "partial" else {}
    attrs |= {"interleaved": interleaved, "domain": "com.microsoft"}
    assert_like_onnxruntime(one_node("RotaryEmbedding", {"x": x}, initializers=arrays, **attrs), {"x": x})


# Signals


@pytest.mark.parametrize(("length", "onesided"), list(itertools.product([6, 7, 9, 12], [0, 1])))
def test_real_transform(rng, length, onesided):
    x = rng.standard_normal((2, 9, 3, 1), dtype=np.float32)
    arrays = {"n": np.asarray(length), "axis": np.asarray(1)}
    (y,) = outputs(one_node("DFT", {"x": x}, initializers=arrays, opset=20, onesided=onesided), {"x": x})
    want = np.fft.rfft(x[..., 0], length, 1) if onesided else np.fft.fft(x[..., 0], length, 1)
    np.testing.assert_allclose(y[..., 0] + 1j * y[..., 1], want, rtol=1e-4, atol=1e-5)


def test_transform_and_its_inverse(rng):
    x = rng.standard_normal((2, 5, 7, 2), dtype=np.float32)
    nodes = [
        helper.make_node("DFT", ["x", "", "axis"], ["spectrum"]),
        helper.make_node("DFT", ["spectrum", "", "axis"], ["y"], inverse=1),
    ]
    spectrum, y = outputs(chain(nodes, x, {"axis": np.asarray(-2)}, ("spectrum", "y")), {"x": x})
    want = np.fft.fft(x[..., 0] + 1j * x[..., 1], axis=2)
    np.testing.assert_allclose(spectrum[..., 0] + 1j * spectrum[..., 1], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-6)


def test_stft(rng):
    x = rng.standard_normal((2, 50, 1), dtype=np.float32)
    arrays = {"step": np.asarray(7), "window": np.hanning(16).astype(np.float32), "length": np.asarray(16)}
    assert_like_onnxruntime(one_node("STFT", {"x": x}, initializers=arrays, opset=17), {"x": x})


@pytest.mark.parametrize("name", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows_are_known_while_tracing(name, periodic):
    rule = lookup(load(one_node(name, {}, initializers={"n": np.asarray(10)}, opset=17)).nodes[0], 17).rule
    window = rule(np.asarray(10), output_datatype=1, periodic=periodic)
    assert type(window) is np.ndarray
    assert window.dtype == np.float32
    (want,) = onnxruntime_outputs(
        one_node(name, {}, initializers={"n": np.asarray(10)}, opset=17, periodic=periodic), {}
    )
    np.testing.assert_allclose(window, want, rtol=1e-5, atol=1e-6)


def test_mel_weights():
    values = {"n": 20, "length": 256, "rate": 16000, "low": 20.0, "high": 8000.0}
    arrays = {k: np.asarray(v, np.float32 if isinstance(v, float) else np.int64) for k, v in values.items()}
    assert_like_onnxruntime(one_node("MelWeightMatrix", {}, initializers=arrays, opset=17), {})
