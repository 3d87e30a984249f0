"""Operators on integers at the ends of their types, against onnxruntime."""

from __future__ import annotations

import jax
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq

TYPES = [f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)]
TWO = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Mod",
    "Min",
    "Max",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Equal",
    "Less",
    "GreaterOrEqual",
)
ONE = (
    "Abs",
    "Neg",
    "Sign",
    "BitwiseNot",
    "ReduceSum",
    "ReduceProd",
    "ReduceMin",
    "ReduceMax",
    "ReduceL1",
    "CumSum",
    "Identity",
)


def ends(dtype: str) -> np.ndarray:
    info = np.iinfo(dtype)
    near = [
        info.min,
        info.min + 1,
        info.max // 2,
        info.max - 1,
        info.max,
        0,
        1,
        7,
        46341,
        3_000_000_000,
        -1,
        -7,
        -70000,
    ]
    return np.array([v for v in near if info.min <= v <= info.max], dtype)


def run(nodes, arrays, x):
    """The outputs of jq, as loaded and after its passes, and of onnxruntime; None where that has no kernel."""
    inputs = [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)]
    outputs[0].type.Clear()
    held = [numpy_helper.from_array(a, k) for k, a in arrays.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, held), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    try:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:
        pytest.skip("onnxruntime has no kernel")
    (want,) = session.run(None, {"x": x})
    graph = jq.load(model)
    made = [np.asarray(jq.trace(g)(g.params, {"x": x})["y"]) for g in (graph, jq.prepare(graph))]
    for found in made:
        assert found.dtype in (want.dtype, jax.dtypes.canonicalize_dtype(want.dtype))  # the output is not declared
        np.testing.assert_array_equal(found, want)


# Of int64 onnxruntime's kernels of these look at 32 bits alone, or compute in floats: there numpy is the oracle.
NARROW = {"Min", "Max", "Sign", "Clip", "ReduceSum", "ReduceL1", "Relu"}


def small(values: np.ndarray) -> np.ndarray:
    """The values whose sum 32 bits hold too."""
    return values[np.abs(values.astype(object)) < 1 << 27]


def operands(op_type: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = (v.reshape(-1) for v in np.meshgrid(ends(dtype), ends(dtype)))
    if op_type in ("Div", "Mod"):
        kept = (y != 0) & ~((y.astype(object) == -1) & (x == np.iinfo(dtype).min))  # which C++ does not define
        x, y = x[kept], y[kept]
    if op_type in NARROW and dtype.endswith("int64"):
        x, y = (v.reshape(-1) for v in np.meshgrid(small(ends(dtype)), small(ends(dtype))))
    return x, y


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op_type", TWO)
def test_two_operands(op_type, dtype):
    x, y = operands(op_type, dtype)
    run([helper.make_node(op_type, ["x", "k"], ["y"])], {"k": y}, x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op_type", ONE)
def test_one_operand(op_type, dtype):
    axis, inputs = {}, ["x"]
    if op_type == "CumSum":
        axis, inputs = {"axis": np.array(0)}, ["x", "axis"]
    attrs = {"keepdims": 0} if op_type.startswith("Reduce") else {}
    x = ends(dtype)
    x = small(x) if op_type == "ReduceL1" or (op_type in NARROW and dtype.endswith("int64")) else x
    run([helper.make_node(op_type, inputs, ["y"], **attrs)], axis, x)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("op_type", ["Min", "Max", "Sign", "ReduceSum"])
def test_wide_values_against_numpy(op_type, dtype):
    x, y = (v.reshape(-1) for v in np.meshgrid(ends(dtype), ends(dtype)))
    inputs = ["x", "k"] if op_type in ("Min", "Max") else ["x"]
    node = helper.make_node(op_type, inputs, ["y"], **({"keepdims": 0} if op_type == "ReduceSum" else {}))
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    info = helper.make_tensor_value_info
    made = helper.make_graph(
        [node], "g", [info("x", kind, x.shape)], [info("y", kind, None)], [numpy_helper.from_array(y, "k")]
    )
    graph = jq.load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    found = np.asarray(jq.trace(graph)(graph.params, {"x": x})["y"])
    want = {"Min": np.minimum(x, y), "Max": np.maximum(x, y), "Sign": np.sign(x), "ReduceSum": np.sum(x)}[op_type]
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64", "int8"])
@pytest.mark.parametrize("bounds", [(0, None), (None, 1), (0, 1)])
def test_a_clip_to_an_end(bounds, dtype):
    info = np.iinfo(dtype)
    arrays = {
        k: np.array(v, dtype) for k, v in zip(("lo", "hi"), (0, info.max), strict=True) if bounds[k == "hi"] is not None
    }
    names = ["x", "lo" if "lo" in arrays else "", "hi" if "hi" in arrays else ""]
    x = small(ends(dtype)) if dtype.endswith("int64") else ends(dtype)
    run([helper.make_node("Clip", names, ["y"])], arrays, x)


@pytest.mark.parametrize("other", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_casts(dtype, other):
    to = helper.np_dtype_to_tensor_dtype(np.dtype(other))
    run([helper.make_node("Cast", ["x"], ["y"], to=to)], {}, ends(dtype))


FLOATS = np.float32([1, 5, 70000, -3, 16777216])


@pytest.mark.parametrize("number", [100000, 1 << 40, (1 << 63) - 1, -(1 << 63), 3_000_000_000])
@pytest.mark.parametrize("op_type", ["Mul", "Add", "Sub", "Less", "Where", "Equal"])
def test_int64_inside_a_graph_of_floats(op_type, number):
    """Neither inputs nor outputs say that there are 64 bits."""
    nodes = [helper.make_node("Cast", ["x"], ["a"], to=TensorProto.INT64)]
    inputs = ["c", "a", "k"] if op_type == "Where" else ["a", "k"]
    if op_type == "Where":
        nodes.append(helper.make_node("Greater", ["x", "z"], ["c"]))
    nodes += [helper.make_node(op_type, inputs, ["b"]), helper.make_node("Cast", ["b"], ["y"], to=TensorProto.FLOAT)]
    run(nodes, {"k": np.array(number), "z": np.float32(2)}, FLOATS)


def test_products_of_indices():
    nodes = [
        helper.make_node("ArgMax", ["x"], ["i"], axis=0), helper.make_node("Mul", ["i", "k"], ["j"]),
        helper.make_node("Mul", ["j", "k"], ["l"]), helper.make_node("Cast", ["l"], ["y"], to=TensorProto.FLOAT),
    ]  # fmt: skip
    run(nodes, {"k": np.array(70000)}, FLOATS)


@pytest.mark.parametrize("trips", [3, (1 << 31) - 1, 1 << 31, (1 << 32) + 3, 1 << 62, (1 << 63) - 1])
def test_trip_counts(trips):
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Add", ["s", "one"], ["so"]),
            helper.make_node("ReduceSum", ["so"], ["r"], keepdims=0),
            helper.make_node("Less", ["r", "limit"], ["co"]),
        ],
        "b",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("s", TensorProto.FLOAT, [1])],
        [info("co", TensorProto.BOOL, []), info("so", TensorProto.FLOAT, [1])],
    )
    arrays = {"n": np.array(trips), "t": np.array(True), "one": np.ones(1, np.float32), "limit": np.float32(7)}
    run([helper.make_node("Loop", ["n", "t", "x"], ["y"], body=body)], arrays, np.zeros(1, np.float32))


INDICES = np.array([3, 0, 3, 1])
# Operators that take integers beside others, or in another place: attributes, and constants behind `x`, of its type `t`.
MORE = {
    "Relu": (lambda t: {}, {}),
    "PRelu": (lambda t: {"k": np.array([3], t)}, {}),
    "Pow": (lambda t: {"k": np.array(3, t)}, {}),
    "Where": (lambda t: {"k": np.arange(ends(t).size) % 2 == 0, "l": np.array(7, t)}, {}),
    "MatMul": (lambda t: {"k": np.array([1, 2], t)[np.arange(ends(t).size) % 2]}, {}),
    "TopK": (lambda t: {"k": np.array([3])}, {}),
    "ArgMax": (lambda t: {}, {"axis": 0}),
    "ArgMin": (lambda t: {}, {"axis": 0, "select_last_index": 1}),
    "Gather": (lambda t: {"k": INDICES}, {}),
    "GatherElements": (lambda t: {"k": INDICES}, {}),
    "ScatterElements": (lambda t: {"k": INDICES, "l": ends(t)[-4:]}, {"reduction": "add"}),
    "ScatterND": (lambda t: {"k": INDICES[:, None], "l": ends(t)[-4:]}, {"reduction": "mul"}),
    "Pad": (lambda t: {"k": np.array([1, 2]), "l": np.array(ends(t)[0])}, {}),
    "Tile": (lambda t: {"k": np.array([2])}, {}),
    "Expand": (lambda t: {"k": np.array([2, 1])}, {}),
    "Concat": (lambda t: {"k": ends(t)}, {"axis": 0}),
    "Slice": (lambda t: dict(zip("klmn", ([-1], [np.iinfo(np.int64).min], [0], [-2]), strict=True)), {}),
    "Unique": (lambda t: {}, {}),
    "NonZero": (lambda t: {}, {}),
    "Sum": (lambda t: {"k": np.array(7, t)}, {}),
    "Mean": (lambda t: {"k": np.array(7, t)}, {}),
    "Equal": (lambda t: {"k": ends(t)[::-1].copy()}, {}),
    "LessOrEqual": (lambda t: {"k": ends(t)[::-1].copy()}, {}),
    "Greater": (lambda t: {"k": ends(t)[::-1].copy()}, {}),
    "OneHot": (lambda t: {"k": np.array(9), "l": np.array([ends(t)[0], ends(t)[-1]])}, {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op_type", MORE)
def test_operators_of_other_kinds(op_type, dtype):
    constants, attrs = MORE[op_type]
    arrays, x = {k: np.array(v) for k, v in constants(dtype).items()}, ends(dtype)
    x = small(x) if op_type in NARROW and dtype.endswith("int64") else x
    names = ["k", "x", "l"] if op_type == "Where" else ["x", *arrays]
    run([helper.make_node(op_type, names, ["y"], **attrs)], arrays, x)


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64"])
def test_shifts_of_bits(dtype, direction):
    x, y = (v.reshape(-1) for v in np.meshgrid(ends(dtype), np.arange(np.iinfo(dtype).bits, dtype=dtype)))
    run([helper.make_node("BitShift", ["x", "k"], ["y"], direction=direction)], {"k": y}, x)


@pytest.mark.parametrize("fmod", [0, 1])
@pytest.mark.parametrize("dtype", TYPES)
def test_remainders(dtype, fmod):
    x, y = operands("Mod", dtype)
    if fmod and dtype.endswith("int64"):  # onnxruntime computes that in doubles
        x, y = (v[(np.abs(x.astype(object)) < 1 << 50) & (np.abs(y.astype(object)) < 1 << 50)] for v in (x, y))
    run([helper.make_node("Mod", ["x", "k"], ["y"], fmod=fmod)], {"k": y}, x)


@pytest.mark.parametrize("first", [0, 1 << 31, -(1 << 40), 1 << 50])
def test_ranges(first):
    """As far as onnxruntime counts, which is in doubles."""
    arrays = {"a": np.array(first), "b": np.array(first + 7), "c": np.array(3)}
    nodes = [helper.make_node("Range", ["a", "b", "c"], ["r"]), helper.make_node("Add", ["r", "x"], ["y"])]
    run(nodes, arrays, np.array([0]))


@pytest.mark.parametrize("kinds", [("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8")])
def test_products_of_codes(kinds):
    x = np.stack([ends(kinds[0])[:6]] * 4)
    w = np.stack([ends(kinds[1])[:6]] * 3, axis=1)
    zeros = {"p": np.array(ends(kinds[0])[0]), "q": np.array(ends(kinds[1])[1])}
    run([helper.make_node("MatMulInteger", ["x", "w", "p", "q"], ["y"])], {"w": w, **zeros}, x)
