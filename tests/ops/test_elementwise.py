"""Elementwise operators, normalization, reductions, losses and random numbers where the ONNX suite does not look."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq.ops.families  # fills the table
from jq.errors import Error, UnsupportedOp
from jq.graph import Node
from jq.graph.read import load
from jq.graph.schemas import defaults
from jq.ops import elementwise
from jq.ops.table import Context, lookup
from jq.readings.tracing import trace
from tests.conftest import assert_like_onnxruntime, one_node, outputs


@np.errstate(all="ignore")  # as trace does
def apply(op_type, *arrays, opset=21, domain="", names=("y",), **attrs):
    """An operator's rule on arrays as they are: numpy stays numpy where the rule is for the host."""
    node = Node(op_type, tuple(f"x{i}" for i in range(len(arrays))), names, attrs, domain=domain)
    entry = lookup(node, opset)
    context = Context(node, opset, "cpu", lambda graph, inputs: [])
    arguments, keywords = entry.bind(node, arrays, defaults(op_type, domain, opset), context)
    return entry.rule(*arguments, **keywords)


# ---------------------------------------------------------------------------------------------
# Arithmetic
# ---------------------------------------------------------------------------------------------

WIDE = np.random.default_rng(1).integers(-9, 9, (4, 5))
HOST = [
    *(
        (name, [WIDE, np.where(WIDE == 0, 2, WIDE)[:, ::-1]])
        for name in ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Sum")
    ),
    *((name, [WIDE, WIDE[:1]]) for name in ("Equal", "Greater", "LessOrEqual", "BitwiseAnd", "BitwiseXor")),
    *((name, [WIDE]) for name in ("Abs", "Neg", "Sign", "BitwiseNot")),
    *(
        (name, [WIDE.astype(np.float32) / 4])
        for name in ("Floor", "Ceil", "Round", "Exp", "Sin", "Reciprocal", "IsNaN", "IsInf")
    ),
    ("Pow", [WIDE, np.int64(3) * np.ones((), np.int64)]),
    ("Pow", [np.float32([1, 2, 3]), np.int64([1, 2, 3])]),
    ("Pow", [np.int32([1, 2, 3]), np.float32([0.5, 2, 3])]),
    ("Mean", [np.float32([1, 2]), np.float32([[4], [5]])]),
    ("Where", [WIDE > 0, WIDE, -WIDE[0]]),
    ("Clip", [WIDE, np.int64(-2), np.int64(3)]),
    *((name, [WIDE > 0, WIDE[0] < 2]) for name in ("And", "Or", "Xor")),
    *((f"Reduce{name}", [WIDE, np.int64([-1])]) for name in ("Sum", "Max", "Min", "Prod", "Mean", "L1", "SumSquare")),
    ("ReduceSum", [WIDE.astype(np.int32)]),
    ("ReduceProd", [np.int64([2, 3, 4])]),
    ("ReduceMean", [np.float32([[1, 2], [3, 5]])]),
    ("ReduceL2", [np.float32([[1, 2], [3, 5]])]),
    ("ArgMax", [WIDE]),
    ("CumSum", [WIDE.astype(np.int32), np.int64(1)]),
]


@pytest.mark.parametrize(("name", "arrays"), HOST, ids=lambda v: v if isinstance(v, str) else "")
def test_host_rules_stay_in_numpy_and_agree_with_jax(name, arrays):
    on_host = apply(name, *arrays)
    assert isinstance(on_host, (np.ndarray, np.generic))
    with jax.enable_x64(True):
        static = lookup(Node(name, ("x",) * len(arrays), ("y",)), 21).static_positions(len(arrays))
        on_device = apply(name, *(a if i in static else jnp.asarray(a) for i, a in enumerate(arrays)))
        assert isinstance(on_device, jax.Array)
        assert on_host.dtype == on_device.dtype
        np.testing.assert_allclose(on_host, np.asarray(on_device), rtol=1e-6)


@pytest.mark.parametrize("opset", [11, 13])
def test_softmax_of_nothing_but_minus_infinity_is_nan(opset):
    low = np.finfo(np.float32).min
    x = np.float32([[-np.inf, -np.inf], [-np.inf, 1], [low, low]])
    (y,) = outputs(one_node("Softmax", {"x": x}, opset=opset, axis=1), {"x": x})
    np.testing.assert_array_equal(y, np.float32([[np.nan, np.nan], [0, 1], [0.5, 0.5]]))


@pytest.mark.parametrize("name", ["Equal", "Add", "Mod", "Max"])
@pytest.mark.parametrize("constant", [np.array(2), np.array([2])])
def test_jit_after_a_call_in_64_bits_takes_the_same_constant(name, constant):
    x = np.array([1, 2, 3])
    graph = load(one_node(name, {"x": x}, initializers={"c": constant}))
    traced = trace(graph)
    wide = traced(graph.params, {"x": x})["y"]
    narrow = jax.jit(traced)(graph.params, {"x": x})["y"]
    np.testing.assert_array_equal(wide, narrow)
    assert (wide.dtype, narrow.dtype) == ((np.bool_,) * 2 if name == "Equal" else (np.int64, np.int32))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_integer_division_truncates_and_remainders_take_their_sign(dtype):
    a, b = np.meshgrid(np.arange(-20, 21), [v for v in range(-7, 8) if v])
    if np.issubdtype(dtype, np.unsignedinteger):
        a, b = abs(a), abs(b)
    a, b = a.astype(dtype), b.astype(dtype)
    quotient = np.vectorize(lambda p, q: int(p / q))(a.astype(int), b.astype(int))
    remainder = np.vectorize(lambda p, q: int(p) % int(q))(a, b)
    for convert in (np.asarray, jnp.asarray):
        with jax.enable_x64(True):
            np.testing.assert_array_equal(apply("Div", convert(a), convert(b)), quotient)
            np.testing.assert_array_equal(apply("Mod", convert(a), convert(b), fmod=0), remainder)
            np.testing.assert_array_equal(apply("Mod", convert(a), convert(b), fmod=1), a - quotient * b)


def test_float_remainder_has_the_divisors_sign_even_as_zero():
    a, b = np.meshgrid(
        np.float32([-np.inf, -5.5, -3, -0.0, 0, 2, 5.5, np.inf, np.nan]), np.float32([-np.inf, -3, 0, 3, np.inf])
    )
    have = np.asarray(apply("Mod", jnp.asarray(a), jnp.asarray(b), opset=28))
    with np.errstate(invalid="ignore"):
        want = np.mod(a, b)
    np.testing.assert_array_equal(have, want)
    kept = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(have)[kept], np.signbit(want)[kept])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_shifts_match_python_at_every_amount(dtype, direction):
    width = 8 * np.dtype(dtype).itemsize
    info = np.iinfo(dtype)
    values, amounts = np.meshgrid(
        np.array([info.min, -5, 0, 1, 77, info.max]).clip(info.min), np.arange(-2, width + 3).clip(info.min)
    )

    def shifted(x, y):
        y = int(y) if 0 <= y < width else width
        bits = int(x) << y if direction == "LEFT" else int(x) >> y
        return (bits - info.min) % 2**width + info.min

    want = np.vectorize(shifted)(values, amounts)
    for convert in (np.asarray, jnp.asarray):
        have = apply(
            "BitShift", convert(values.astype(dtype)), convert(amounts.astype(dtype)), direction=direction, opset=28
        )
        np.testing.assert_array_equal(have, want)


def test_before_opset_7_axis_aligns_the_second_operand():
    a, b = np.zeros((2, 3, 4, 5), np.float32), np.float32([1, 2, 3])
    model = one_node("Add", {"a": a}, initializers={"b": b}, opset=6, axis=1, broadcast=1)
    (y,) = outputs(model, {"a": a})
    np.testing.assert_array_equal(y, np.broadcast_to(b[:, None, None], a.shape))


def test_before_opset_7_slopes_are_per_channel():
    x = -np.ones((2, 3, 4, 4), np.float32)
    (y,) = outputs(one_node("PRelu", {"x": x}, initializers={"slope": np.float32([1, 2, 3])}, opset=6), {"x": x})
    np.testing.assert_array_equal(y[0, :, 0, 0], [-1, -2, -3])


@pytest.mark.parametrize("opset", [6, 10, 11, 13])
def test_clip_bounds_at_every_opset(opset):
    x = np.float32([-3, 0, 3])
    if opset < 11:
        model = one_node("Clip", {"x": x}, opset=opset, min=0.0, max=2.0)
    else:
        model = one_node("Clip", {"x": x}, initializers={"lo": np.float32(0), "hi": np.float32(2)}, opset=opset)
    np.testing.assert_array_equal(outputs(model, {"x": x})[0], [0, 0, 2])


def test_einsum_takes_spaces_and_an_ellipsis(rng):
    a, b = rng.normal(size=(2, 3, 4)).astype(np.float32), rng.normal(size=(2, 4, 5)).astype(np.float32)
    y = apply("Einsum", jnp.asarray(a), jnp.asarray(b), equation="...ij, ...jk -> ...ik")
    np.testing.assert_allclose(y, a @ b, rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# Casts
# ---------------------------------------------------------------------------------------------

FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("name", [*FLOAT8, "float4_e2m1fn"])
def test_narrow_float_casts_round_ties_as_ml_dtypes_does(name, saturate):
    """Every value of the type, every midpoint and its two neighbours: a double rounding would show."""
    dtype = np.dtype(name)
    values = np.arange(16 if "float4" in name else 256, dtype=np.uint8).view(dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    above, below = np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))
    x = np.concatenate([values.astype(np.float32), ties, above, below, np.float32([1e30, -1e30, np.inf, -np.inf])])
    largest = values.max()
    want = (x.clip(-largest, largest) if saturate else x).astype(dtype)
    to = helper.np_dtype_to_tensor_dtype(dtype)
    for convert in (np.asarray, jnp.asarray):
        have = np.asarray(apply("Cast", convert(x), to=to, saturate=saturate, opset=28))
        assert have.dtype == dtype
        np.testing.assert_array_equal(have.astype(np.float32), want.astype(np.float32))


def test_infinity_saturates_in_every_float8_from_opset_24_on():
    x = np.float32([np.inf, -np.inf, 1e9])
    old = apply("Cast", x, to=TensorProto.FLOAT8E4M3FNUZ, opset=23).astype(np.float32)
    new = apply("Cast", x, to=TensorProto.FLOAT8E4M3FNUZ, opset=24).astype(np.float32)
    np.testing.assert_array_equal(old, [np.nan, np.nan, 240])
    np.testing.assert_array_equal(new, [240, -240, 240])


@pytest.mark.parametrize(
    ("mode", "saturate", "codes"),
    [
        ("up", 1, [0, 0, 0, 1, 127, 128, 128, 254, 254, 255]),
        ("down", 1, [0, 0, 0, 0, 127, 127, 127, 254, 254, 255]),
        ("nearest", 1, [0, 0, 0, 1, 127, 127, 128, 254, 254, 255]),
        ("nearest", 0, [255, 255, 0, 1, 127, 127, 128, 255, 255, 255]),
    ],
)
def test_e8m0_holds_an_exponent(mode, saturate, codes):
    x = np.float32([0, 1e-40, 2**-127, 2**-126 * 0.75, 1, 1.25, 1.5, 2**127 * 1.5, np.inf, np.nan])
    for convert in (np.asarray, jnp.asarray):
        y = np.asarray(
            apply("Cast", convert(x), to=TensorProto.FLOAT8E8M0, round_mode=mode, saturate=saturate, opset=24)
        )
        assert y.dtype == ml_dtypes.float8_e8m0fnu
        np.testing.assert_array_equal(y.view(np.uint8), codes)


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2"])
def test_narrow_integer_casts_drop_higher_bits(name):
    x = np.arange(-300, 300)
    want = x.astype(np.dtype(name)).astype(int)
    bits, signed = int(name[-1]), not name.startswith("u")
    low = -(2 ** (bits - 1)) if signed else 0
    np.testing.assert_array_equal(want, (x - low) % 2**bits + low)
    for convert in (np.asarray, jnp.asarray):
        for source in (np.float32, np.int32, np.int16):
            have = apply("Cast", convert(x.astype(source)), to=helper.np_dtype_to_tensor_dtype(np.dtype(name)))
            np.testing.assert_array_equal(np.asarray(have).astype(int), want)


def test_bits_of_64_are_right_or_refused():
    """In a program, numbers of 64 bits have 32, and other bits: reading them as another type would be garbage."""
    array = np.array([1.0, -2.0, np.pi]).view(np.int64)
    y = helper.make_tensor_value_info("y", TensorProto.DOUBLE, [3])
    for inputs in ([], [helper.make_tensor_value_info("x", TensorProto.INT64, [3])]):
        constants = [] if inputs else [numpy_helper.from_array(array, "x")]
        graph = helper.make_graph([helper.make_node("BitCast", ["x"], ["y"], to=11)], "g", inputs, [y], constants)
        fn = trace(load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 26)])))
        given = {"x": array} if inputs else {}
        np.testing.assert_allclose(fn({}, given)["y"], array.view(np.float64), rtol=1e-6)
    with pytest.raises(UnsupportedOp, match="BitCast to float64"):
        jax.jit(fn)({}, {"x": np.array([1, 2, 3])})


def test_casts_read_and_write_text():
    text = np.array(["1.5", "-INF", "+inf", "NaN", "1e-5"], object)
    np.testing.assert_array_equal(
        apply("Cast", text, to=TensorProto.FLOAT), np.float32([1.5, -np.inf, np.inf, np.nan, 1e-5])
    )
    large = apply("Cast", np.array(["9007199254740993", "-7"], object), to=TensorProto.INT64)
    np.testing.assert_array_equal(large, [9007199254740993, -7])
    assert apply("Cast", np.float32([0.5, -2.25]), to=TensorProto.STRING).tolist() == ["0.5", "-2.25"]
    with pytest.raises(UnsupportedOp, match="known while tracing"):
        apply("Cast", jnp.ones(2), to=TensorProto.STRING)


# ---------------------------------------------------------------------------------------------
# Activations and onnxruntime's own operators
# ---------------------------------------------------------------------------------------------

FLAT = [
    "Relu",
    "LeakyRelu",
    "Elu",
    "Celu",
    "Selu",
    "Sigmoid",
    "HardSigmoid",
    "HardSwish",
    "Softplus",
    "Softsign",
    "Mish",
    "Gelu",
]
FLAT += [
    "ThresholdedRelu",
    "Shrink",
    "Swish",
    "Tanh",
    "Erf",
    "Sqrt",
    "Reciprocal",
    "Softmax",
    "LogSoftmax",
    "Hardmax",
    "LpNormalization",
]


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_types_stay_under_64_bit_mode_and_vmap_maps(name, dtype):
    with jax.enable_x64(True):
        x = jnp.linspace(-3, 3, 12).reshape(3, 4).astype(dtype)
        whole = jax.jit(lambda v: apply(name, v, opset=24))(x)
        assert whole.dtype == dtype
        mapped = jax.vmap(lambda v: apply(name, v, opset=24))(x)
        np.testing.assert_allclose(np.float32(mapped), np.float32(whole), rtol=2e-2 if dtype != jnp.float32 else 1e-6)


@pytest.mark.parametrize(
    "name", [n for n in FLAT if n not in ("Sqrt", "Reciprocal", "Hardmax", "ThresholdedRelu", "Shrink")]
)
def test_gradients_match_differences(name):
    with jax.enable_x64(True):
        x, direction = jnp.asarray([-40.0, -2.7, -0.4, 0.3, 1.9, 40.0]), jnp.asarray([0.3, -1, 2, 1, -0.7, 0.9])
        weight = jnp.arange(1.0, 7)

        def total(v):
            return jnp.sum(weight * apply(name, v, opset=24))

        slope = (total(x + 1e-6 * direction) - total(x - 1e-6 * direction)) / 2e-6
        np.testing.assert_allclose(jnp.vdot(jax.grad(total)(x), direction), slope, rtol=1e-5, atol=1e-6)


def test_gradients_at_the_edges():
    assert jax.grad(lambda v: apply("Relu", v))(0.0) == 0
    zero = jax.grad(lambda v: apply("LpNormalization", v, axis=-1, p=2).sum())(jnp.zeros(3))
    assert np.isfinite(zero).all()


MICROSOFT = [
    ("Gelu", {"x": (2, 3, 4)}, 1, {}),
    ("QuickGelu", {"x": (2, 3, 4)}, 1, {}),
    ("QuickGelu", {"x": (2, 3, 4)}, 1, {"alpha": 0.7}),
    ("FastGelu", {"x": (2, 3, 4)}, 1, {}),
    ("FastGelu", {"x": (2, 3, 4), "bias": (4,)}, 1, {}),
    ("BiasGelu", {"x": (2, 3, 4), "bias": (4,)}, 1, {}),
    ("SkipLayerNormalization", {"x": (2, 3, 4), "skip": (2, 3, 4), "gamma": (4,), "beta": (4,)}, 1, {"epsilon": 1e-3}),
    ("SkipLayerNormalization", {"x": (2, 3, 4), "skip": (2, 3, 4), "gamma": (4,), "beta": (4,), "bias": (4,)}, 4, {}),
    ("SkipSimplifiedLayerNormalization", {"x": (2, 3, 4), "skip": (2, 3, 4), "gamma": (4,), "bias": (4,)}, 4, {}),
]


@pytest.mark.parametrize(("name", "shapes", "results", "attrs"), MICROSOFT)
def test_microsoft_operators_match_onnxruntime(rng, name, shapes, results, attrs):
    inputs = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    # Of the four results onnxruntime fills the first and the last on the CPU.
    names = ("y",) if results == 1 else ("y", "", "", "total")
    assert_like_onnxruntime(one_node(name, inputs, names, domain="com.microsoft", **attrs), inputs)


def test_simplified_layer_normalization_matches_onnxruntime(rng):
    inputs = {"x": rng.normal(size=(2, 3, 4)).astype(np.float32), "scale": rng.normal(size=4).astype(np.float32)}
    assert_like_onnxruntime(one_node("SimplifiedLayerNormalization", inputs, epsilon=1e-2), inputs)


@pytest.mark.parametrize("masked", [False, True])
def test_embed_layer_normalization_matches_onnxruntime(rng, masked):
    inputs = {
        "ids": rng.integers(0, 9, (2, 5)).astype(np.int32),
        "segments": rng.integers(0, 2, (2, 5)).astype(np.int32),
    }
    shapes = {"words": (9, 4), "positions": (5, 4), "types": (2, 4), "gamma": (4,), "beta": (4,)}
    tables = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    order = [*inputs, *tables]
    if masked:
        inputs["mask"] = np.int32([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        order.append("mask")
    model = one_node(
        "EmbedLayerNormalization", inputs, ("y", "count"), domain="com.microsoft", initializers=tables, order=order
    )
    assert_like_onnxruntime(model, inputs)


# ---------------------------------------------------------------------------------------------
# Normalization and reductions
# ---------------------------------------------------------------------------------------------


def convolved(node, arrays, rng, opset=21):
    """A model of a convolution followed by a node, so that the node reads channels-last operands."""
    kernel = rng.normal(size=(6, 3, 3, 3)).astype(np.float32)
    initializers = {"kernel": kernel, **arrays}
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "kernel"], ["c"]), node],
        "convolved",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 6, 7])],
        [onnx.ValueInfoProto(name=o) for o in node.output],
        [numpy_helper.from_array(v, k) for k, v in initializers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


C = np.linspace(0.5, 2, 6, dtype=np.float32)
LAYOUTS = [
    ("BatchNormalization", [C, C, C, C], 21, {}),
    ("BatchNormalization", [C, C, C, C], 9, {"epsilon": 0.1}),
    ("InstanceNormalization", [C, C], 21, {}),
    ("GroupNormalization", [C[:3], C[:3]], 18, {"num_groups": 3}),
    ("GroupNormalization", [C, C], 21, {"num_groups": 2}),
    ("LayerNormalization", [C[:5], C[:5]], 17, {}),
    ("LRN", [], 21, {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 2.0}),
    ("LpNormalization", [], 21, {"axis": 1, "p": 1}),
    ("MeanVarianceNormalization", [], 13, {}),
    *(
        (name, [], opset, {"axis": axis})
        for name in ("Softmax", "LogSoftmax", "Hardmax")
        for opset in (11, 13)
        for axis in (1, 2, -1)
    ),
    ("PRelu", [C[:, None, None]], 21, {}),
    ("Add", [C[:5]], 21, {}),
    ("Mul", [np.float32(3)], 21, {}),
    ("Where", None, 21, {}),
    ("Max", [C[None, :, None, None], C[:5]], 21, {}),
    ("Add", [np.ones((1, 1, 1, 1, 1), np.float32)], 21, {}),
    ("ReduceMean", [np.int64([2, 3])], 18, {}),
    ("ReduceMean", [], 13, {"axes": [2, 3], "keepdims": 0}),
    ("ReduceMax", [np.int64([1])], 18, {"keepdims": 1}),
    ("ReduceSum", [np.int64([-3])], 18, {"keepdims": 0}),
    ("ReduceSum", [], 18, {}),
    ("ReduceSum", [np.int64([])], 18, {"noop_with_empty_axes": 1}),
    ("ReduceLogSumExp", [np.int64([1, -1])], 18, {}),
    ("ArgMax", [], 13, {"axis": 1}),
    ("ArgMax", [], 13, {"axis": -1, "keepdims": 0, "select_last_index": 1}),
    ("ArgMin", [], 13, {"axis": 1}),
    ("CumSum", [np.int64(1)], 14, {"exclusive": 1, "reverse": 1}),
    ("Clip", [np.float32(-1), np.float32(1)], 21, {}),
    ("Dropout", [], 21, {}),
]


@pytest.mark.parametrize(("name", "arrays", "opset", "attrs"), LAYOUTS)
def test_channels_last_operands_give_what_onnxruntime_gives(rng, name, arrays, opset, attrs):
    if arrays is None:
        names, arrays = ["condition", "c", "other"], {"condition": C[:, None, None] > 1, "other": C[:5]}
    else:
        arrays = {f"a{i}": a for i, a in enumerate(arrays)}
        names = ["c", *arrays]
    model = convolved(helper.make_node(name, names, ["y"], **attrs), arrays, rng, opset)
    assert_like_onnxruntime(model, {"x": rng.normal(size=(2, 3, 6, 7)).astype(np.float32)})


def test_no_transpose_between_channels_last_operators(rng):
    model = convolved(helper.make_node("Softmax", ["m"], ["y"], axis=1), {"scale": C, "axes": np.int64([1])}, rng)
    between = [
        helper.make_node("BatchNormalization", ["c", "scale", "scale", "scale", "scale"], ["b"]),
        helper.make_node("HardSwish", ["b"], ["h"]),
        helper.make_node("ReduceMax", ["h", "axes"], ["r"]),
        helper.make_node("Sub", ["h", "r"], ["s"]),
        helper.make_node("GroupNormalization", ["s", "scale", "scale"], ["m"], num_groups=2),
    ]
    nodes = [model.graph.node[0], *between, model.graph.node[1]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    graph = load(model)
    params = jq.pack(graph)
    jaxpr = jax.make_jaxpr(lambda x: trace(graph)(params, {"x": x})["y"])(jnp.zeros((2, 3, 6, 7)))
    used = [line for line in str(jaxpr).splitlines() if "transpose[" in line and not line.strip().startswith("_:")]
    assert len(used) == 2  # the input and the output


@pytest.mark.parametrize("opset", [9, 14])
def test_batch_normalization_trains(rng, opset):
    x = rng.normal(size=(4, 3, 5, 5)).astype(np.float32)
    scale, b, mean, var = (rng.uniform(0.5, 2, 3).astype(np.float32) for _ in range(4))
    names = ("y", "m", "v") if opset >= 14 else ("y", "m", "v", "saved_m", "saved_v")
    attrs = {"training_mode": 1} if opset >= 14 else {}
    statistics = {"scale": scale, "b": b, "mean": mean, "var": var}
    model = one_node(
        "BatchNormalization", {"x": x}, names, opset=opset, initializers=statistics, momentum=0.75, **attrs
    )
    y, m, v, *saved = outputs(model, {"x": x})
    axes = (0, 2, 3)
    np.testing.assert_allclose(m, 0.75 * mean + 0.25 * x.mean(axes), rtol=1e-5)
    np.testing.assert_allclose(v, 0.75 * var + 0.25 * x.var(axes), rtol=1e-5)
    np.testing.assert_allclose(y.mean(axes), b, rtol=1e-4)
    np.testing.assert_allclose(y.std(axes), scale, rtol=1e-3)
    for have, want in zip(saved, (x.mean(axes), x.var(axes)), strict=False):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_batch_normalization_with_statistics_of_every_position(rng):
    x = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    scale, b, mean, var = (rng.uniform(0.5, 2, (3, 4, 5)).astype(np.float32) for _ in range(4))
    statistics = {"scale": scale, "b": b, "mean": mean, "var": var}
    (y,) = outputs(one_node("BatchNormalization", {"x": x}, opset=7, initializers=statistics, spatial=0), {"x": x})
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5) * scale + b, rtol=1e-4, atol=1e-5)


def test_an_even_lrn_window_reaches_further_up(rng):
    """onnxruntime refuses even sizes; ONNX defines them."""
    x = rng.normal(size=(1, 5, 2)).astype(np.float32)
    (y,) = outputs(one_node("LRN", {"x": x}, size=4, alpha=0.8, beta=0.5, bias=1.0), {"x": x})
    total = np.stack([(x[:, max(0, c - 1) : c + 3] ** 2).sum(1) for c in range(5)], 1)
    np.testing.assert_allclose(y, x / np.sqrt(1 + 0.2 * total), rtol=1e-5)


@pytest.mark.parametrize("name", ["LayerNormalization", "RMSNormalization"])
def test_halves_are_normalized_in_float32(name):
    x = np.full((1, 256), 300, np.float16)  # its squares overflow
    x[0, ::2] = -300
    y = apply(name, jnp.asarray(x), jnp.ones(256, jnp.float16), opset=23)
    y = y[0] if isinstance(y, tuple) else y
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(np.abs(y), 1)


def test_statistics_have_the_stash_type():
    with jax.enable_x64(True):
        y, mean, inverse = apply("LayerNormalization", jnp.ones((2, 3)), jnp.ones(3))
    assert (y.dtype, mean.dtype, inverse.dtype) == (np.float64, np.float32, np.float32)


def test_groups_that_do_not_divide_are_named():
    x = np.zeros((1, 4, 2), np.float32)
    one = np.ones(4, np.float32)
    with pytest.raises(Error, match=r"num_groups is 3.*4 channels"):
        outputs(one_node("GroupNormalization", {"x": x}, initializers={"s": one, "b": one}, num_groups=3), {"x": x})


@pytest.mark.parametrize(
    ("name", "want"), [("ReduceMax", np.iinfo(np.int32).min), ("ReduceMin", np.iinfo(np.int32).max), ("ReduceProd", 1)]
)
def test_reductions_of_nothing(name, want):
    for convert in (np.asarray, jnp.asarray):
        y = apply(name, convert(np.zeros((2, 0), np.int32)), np.int64([1]), keepdims=0)
        np.testing.assert_array_equal(y, [want, want])


def test_small_integers_sum_in_their_own_type():
    x = np.full((3,), 100, np.int32)
    assert apply("ReduceSum", x).dtype == np.int32
    assert apply("CumSum", x, np.int64(0)).dtype == np.int32
    assert apply("CumSum", jnp.zeros((2, 0)), np.int64(1), exclusive=1).shape == (2, 0)


# ---------------------------------------------------------------------------------------------
# Losses and random numbers
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_matches_its_definition(rng, reduction):
    scores, labels = rng.normal(size=(4, 5, 3)).astype(np.float32), rng.integers(0, 5, (4, 3))
    labels[0, 0] = -7  # ignored, and no class
    weights = rng.uniform(0.5, 2, 5).astype(np.float32)
    loss, _ = apply(
        "SoftmaxCrossEntropyLoss", *map(jnp.asarray, (scores, labels, weights)), reduction=reduction, ignore_index=-7
    )
    log_prob = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    want, factor = np.zeros((4, 3)), np.zeros((4, 3))
    for n, d in np.ndindex(4, 3):
        if labels[n, d] != -7:
            factor[n, d] = weights[labels[n, d]]
            want[n, d] = -factor[n, d] * log_prob[n, labels[n, d], d]
    want = {"none": want, "sum": want.sum(), "mean": want.sum() / factor.sum()}[reduction]
    np.testing.assert_allclose(loss, want, rtol=1e-4, atol=1e-6)


def test_random_tensors_follow_their_seed_and_distribution():
    def draw(name, seed=None, output="y", **attrs):
        attrs |= {} if seed is None else {"seed": seed}
        return np.asarray(apply(name, names=(output,), shape=(40000,), dtype=1, **attrs))

    normal = draw("RandomNormal", 3.0, mean=2.0, scale=0.5)
    np.testing.assert_allclose([normal.mean(), normal.std()], [2, 0.5], atol=0.02)
    uniform = draw("RandomUniform", 3.0, low=-1.0, high=3.0)
    assert uniform.min() >= -1
    assert uniform.max() < 3
    np.testing.assert_allclose([uniform.mean(), uniform.std()], [1, 4 / np.sqrt(12)], atol=0.03)
    np.testing.assert_array_equal(normal, draw("RandomNormal", 3.0, mean=2.0, scale=0.5))
    assert not np.array_equal(normal, draw("RandomNormal", 3.5, mean=2.0, scale=0.5))
    np.testing.assert_array_equal(draw("RandomNormal", output="a"), draw("RandomNormal", output="a"))
    assert not np.array_equal(draw("RandomNormal", output="a"), draw("RandomNormal", output="b"))


def test_bernoulli_and_multinomial_draw_by_probability():
    p = jnp.tile(jnp.float32([0.1, 0.5, 0.9]), (20000, 1))
    np.testing.assert_allclose(apply("Bernoulli", p, seed=1.0).mean(0), [0.1, 0.5, 0.9], atol=0.02)
    drawn = apply("Multinomial", jnp.log(jnp.float32([[0.2, 0.8], [0.7, 0.3]])), sample_size=20000, seed=1.0)
    assert drawn.shape == (2, 20000)
    assert drawn.dtype == np.int32
    np.testing.assert_allclose(drawn.mean(1), [0.8, 0.3], atol=0.02)


def test_dropout_scales_what_it_keeps():
    x = jnp.ones((200, 200))
    y, mask = apply("Dropout", x, jnp.float32(0.25), np.bool_(True), names=("y", "mask"), seed=5)
    np.testing.assert_allclose(np.asarray(y)[np.asarray(mask)], 1 / 0.75, rtol=1e-6)
    assert not np.asarray(y)[~np.asarray(mask)].any()
    np.testing.assert_allclose(mask.mean(), 0.75, atol=0.01)
    np.testing.assert_array_equal(apply("Dropout", x, jnp.float32(0.25), np.bool_(False)), x)


def test_pow_of_integers_by_floats_truncates_like_c():
    base, exponent = np.meshgrid(np.arange(31, dtype=np.int32), np.arange(6, dtype=np.float32))
    have = jax.jit(elementwise._power)(jnp.asarray(base), jnp.asarray(exponent))
    want = base.astype(np.int64) ** exponent.astype(np.int64)
    exact = want < 2**24
    np.testing.assert_array_equal(np.asarray(have)[exact], want[exact])
