"""Control flow and recurrences: known and traced conditions, captured values, and onnxruntime's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from jq.errors import UnsupportedOp
from jq.graph.read import load
from jq.readings.tracing import Traced, trace
from tests.conftest import one_node, onnxruntime_outputs

TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(bool): TensorProto.BOOL,
}


def body(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[tuple[str, Any, Any]], outputs: Sequence[tuple[str, Any, Any]]
) -> onnx.GraphProto:
    """A graph whose inputs and outputs are (name, dtype, shape)."""
    infos = [
        [helper.make_tensor_value_info(n, TYPES[np.dtype(d)], s) for n, d, s in group] for group in (inputs, outputs)
    ]
    return helper.make_graph(nodes, "body", *infos)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[tuple[str, Any, Any]],
    arrays: Mapping[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    graph = body(nodes, [(k, v.dtype, v.shape) for k, v in inputs.items()], outputs)
    graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in (arrays or {}).items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def traced(model: onnx.ModelProto) -> tuple[Traced, Mapping[str, np.ndarray]]:
    graph = load(model)
    return trace(graph), graph.params


def assert_like_onnxruntime(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], *, jit: bool = False) -> None:
    fn, params = traced(model)
    have = (jax.jit(fn) if jit else fn)(params, inputs)
    for name, want in zip(fn.outputs, onnxruntime_outputs(model, inputs), strict=True):
        np.testing.assert_allclose(have[name], want, rtol=1e-5, atol=1e-6)


def node(op_type: str, inputs: str, outputs: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), outputs.split(), **attrs)


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
F, SHAPE = np.float32, (3, 4)


# ---------------------------------------------------------------------------------------------
# If
# ---------------------------------------------------------------------------------------------


def choice(other: Sequence[onnx.NodeProto] | None = None, shape: Any = SHAPE) -> list[onnx.NodeProto]:
    """x doubled where c holds, else negated; the branches read x from around them."""
    then = body([node("Add", "x x", "t")], [], [("t", F, SHAPE)])
    other = body(other or [node("Neg", "x", "e")], [], [("e", F, shape)])
    return [node("If", "c", "y", then_branch=then, else_branch=other)]


@pytest.mark.parametrize("cond", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_if_on_a_known_and_on_a_traced_condition(cond, jit):
    inputs = {"x": X, "c": np.asarray(cond)}
    assert_like_onnxruntime(model_of(choice(), inputs, [("y", F, SHAPE)]), inputs, jit=jit)


def test_if_picks_its_branch_while_tracing():
    """A switch among the graph's inputs is known, so the other branch may have another shape."""
    nodes = choice([node("ReduceSum", "x", "e", keepdims=0)], ())
    for cond in (True, False):
        inputs = {"x": X, "c": np.asarray(cond)}
        model = model_of(nodes, inputs, [("y", F, None)])
        assert traced(model)[0].static_inputs == {"c"}
        assert_like_onnxruntime(model, inputs)


def test_if_on_data_needs_branches_of_one_type():
    nodes = [
        node("ReduceMax", "x", "m", keepdims=0),
        node("Greater", "m zero", "c"),
        *choice([node("ReduceSum", "x", "e", keepdims=0)], ()),
    ]
    fn, params = traced(model_of(nodes, {"x": X}, [("y", F, None)], {"zero": np.zeros((), F)}))
    with pytest.raises(UnsupportedOp, match=r"float32\[3, 4\].*float32\[\]"):
        fn(params, {"x": X})


def test_if_on_data_is_differentiable_and_maps():
    nodes = [node("ReduceSum", "x", "m", keepdims=0), node("Greater", "m zero", "c"), *choice()]
    fn, params = traced(model_of(nodes, {"x": X}, [("y", F, SHAPE)], {"zero": np.zeros((), F)}))
    slope = jax.grad(lambda x: fn(params, {"x": x})["y"].sum())
    np.testing.assert_array_equal(slope(X + 1), np.full(SHAPE, 2))
    np.testing.assert_array_equal(slope(X - 1), np.full(SHAPE, -1))
    both = jax.vmap(lambda x: fn(params, {"x": x})["y"])(np.stack([X + 1, X - 1]))
    np.testing.assert_array_equal(both, np.stack([2 * (X + 1), 1 - X]))


# ---------------------------------------------------------------------------------------------
# Loop
# ---------------------------------------------------------------------------------------------


def doubling(cond: str = "Identity go more") -> onnx.GraphProto:
    """v <- v + x, which is captured; scan output v * i."""
    op, *names = cond.split()
    nodes = [
        node("Add", "v x", "after"),
        node("Cast", "i", "fi", to=TensorProto.FLOAT),
        node("Mul", "after fi", "row"),
        *([node("ReduceSum", "after", "sum", keepdims=0)] if "sum" in names else []),
        node(op, " ".join(names[:-1]), names[-1]),
    ]
    return body(
        nodes,
        [("i", np.int64, ()), ("go", bool, ()), ("v", F, SHAPE)],
        [("more", bool, ()), ("after", F, SHAPE), ("row", F, SHAPE)],
    )


@pytest.mark.parametrize("count", [0, 3, 50])
def test_loop_of_a_known_count(count):
    nodes = [node("Loop", "n c x", "y rows", body=doubling())]
    arrays = {"n": np.asarray(count), "c": np.asarray(True)}
    assert_like_onnxruntime(model_of(nodes, {"x": X}, [("y", F, SHAPE), ("rows", F, None)], arrays), {"x": X}, jit=True)


def test_long_loops_stay_one_body():
    nodes = [node("Loop", "n c x", "y rows", body=doubling())]
    fn, params = traced(model_of(nodes, {"x": X}, [("y", F, SHAPE)], {"n": np.asarray(50), "c": np.asarray(True)}))
    program = str(jax.make_jaxpr(lambda x: fn(params, {"x": x}))(X))
    assert program.count("scan[") == 1
    assert program.count(" add ") < 5


@pytest.mark.parametrize("limit", ["n", ""])
def test_loop_until_the_data_say_so(limit):
    """The condition depends on the values, with and without a trip count that itself is data."""
    graph = doubling("Less sum bound more")
    del graph.output[2:]
    nodes = [helper.make_node("Loop", [limit, "c", "x"], ["y"], body=graph)]
    inputs = {"x": X + 2, "c": np.asarray(True)} | ({"n": np.asarray(7)} if limit else {})
    for bound in (200.0, 1000.0, 0.0):
        model = model_of(nodes, inputs, [("y", F, SHAPE)], {"bound": np.float32(bound)})
        if limit or bound < 1000:
            assert_like_onnxruntime(model, inputs)
            assert_like_onnxruntime(model, inputs, jit=True)


def test_loop_that_data_end_early_refuses_scan_outputs():
    """Their number of rows depends on the data, as no shape may."""
    nodes = [node("Loop", "n c x", "y rows", body=doubling("Less sum bound more"))]
    model = model_of(
        nodes,
        {"x": X + 2},
        [("y", F, SHAPE), ("rows", F, None)],
        {"n": np.asarray(9), "c": np.asarray(True), "bound": F(120)},
    )
    fn, params = traced(model)
    with pytest.raises(UnsupportedOp, match="number of its iterations decides shapes"):
        fn(params, {"x": X + 2})


def test_loop_whose_values_grow_is_unrolled():
    grow = body(
        [node("Concat", "v x", "after", axis=0), node("Identity", "go", "more")],
        [("i", np.int64, ()), ("go", bool, ()), ("v", F, None)],
        [("more", bool, ()), ("after", F, None)],
    )
    nodes = [node("Loop", "n c x", "y", body=grow)]
    assert_like_onnxruntime(
        model_of(nodes, {"x": X}, [("y", F, None)], {"n": np.asarray(6), "c": np.asarray(True)}), {"x": X}, jit=True
    )


def test_loop_over_an_index_that_decides_shapes():
    part = body(
        [
            node("Unsqueeze", "i zero", "at"),
            node("Slice", "x zero at", "s"),
            node("ReduceSum", "s", "sum", keepdims=0),
            node("Add", "v sum", "after"),
            node("Identity", "go", "more"),
        ],
        [("i", np.int64, ()), ("go", bool, ()), ("v", F, ())],
        [("more", bool, ()), ("after", F, ())],
    )
    nodes = [node("Loop", "n c v0", "y", body=part)]
    arrays = {"n": np.asarray(8), "c": np.asarray(True), "v0": F(0), "zero": np.asarray([0])}
    assert_like_onnxruntime(model_of(nodes, {"x": X}, [("y", F, ())], arrays), {"x": X}, jit=True)


def test_loop_refuses_scan_outputs_of_unknown_number():
    nodes = [node("Cast", "k", "n", to=TensorProto.INT64), node("Loop", "n c x", "y rows", body=doubling())]
    inputs = {"x": X, "k": np.asarray(3, F)}
    fn, params = traced(model_of(nodes, inputs, [("y", F, SHAPE), ("rows", F, None)], {"c": np.asarray(True)}))
    with pytest.raises(UnsupportedOp, match="number of its iterations decides shapes"):
        jax.jit(fn)(params, inputs)
    assert fn(params, inputs)["rows"].shape == (3, 3, 4)


def test_captured_channels_last_values_serve_inside_and_outside(rng):
    """The body transposes what it captures; the graph around it must not get the body's tracer back."""
    inside = body(
        [
            node("ReduceMean", "a", "m", axes=[1, 2, 3], keepdims=0),
            node("Reshape", "a flat", "r"),
            node("Add", "v m", "s"),
            node("ReduceMean", "r", "k", axes=[0], keepdims=0),
            node("Mul", "s k", "after"),
            node("Identity", "go", "more"),
        ],
        [("i", np.int64, ()), ("go", bool, ()), ("v", F, (2,))],
        [("more", bool, ()), ("after", F, (2,))],
    )
    nodes = [node("Conv", "x w", "a"), node("Loop", "n c v0", "y", body=inside), node("Reshape", "a flat", "b")]
    arrays = {
        "w": rng.normal(size=(4, 3, 3, 3)).astype(F),
        "flat": np.asarray([-1]),
        "n": np.asarray(20),
        "c": np.asarray(True),
        "v0": np.ones(2, F),
    }
    x = rng.normal(size=(2, 3, 8, 8)).astype(F)
    assert_like_onnxruntime(model_of(nodes, {"x": x}, [("y", F, (2,)), ("b", F, None)], arrays), {"x": x}, jit=True)


# ---------------------------------------------------------------------------------------------
# Scan
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_scan_axes_and_directions(backward, axis, rng):
    sums = body(
        [node("Add", "s row", "t"), node("Mul", "t factor", "out")],
        [("s", F, (4,)), ("row", F, (4,))],
        [("t", F, (4,)), ("out", F, (4,))],
    )
    x = rng.normal(size=(5, 4) if axis == 0 else (4, 5)).astype(F)
    scan = node(
        "Scan",
        "s0 x",
        "y rows",
        body=sums,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[backward],
        scan_output_axes=[-1],
        scan_output_directions=[1 - backward],
    )
    arrays = {"s0": np.ones(4, F), "factor": np.full(4, 3, F)}
    assert_like_onnxruntime(
        model_of([scan], {"x": x}, [("y", F, (4,)), ("rows", F, (4, 5))], arrays), {"x": x}, jit=True
    )


def test_scan_8_stops_at_each_sequence_end():
    sums = body(
        [node("Add", "s row", "t"), node("Identity", "t", "out")],
        [("s", F, (2,)), ("row", F, (2,))],
        [("t", F, (2,)), ("out", F, (2,))],
    )
    x = np.arange(12, dtype=F).reshape(2, 3, 2)
    inputs = {"n": np.asarray([2, 3]), "s0": np.zeros((2, 2), F), "x": x}
    scan = node("Scan", "n s0 x", "y rows", body=sums, num_scan_inputs=1)
    model = model_of([scan], inputs, [("y", F, None), ("rows", F, None)])
    model.opset_import[0].version = 8
    fn, params = traced(model)
    have = fn(params, inputs)
    np.testing.assert_array_equal(have["y"], [x[0, :2].sum(0), x[1].sum(0)])
    np.testing.assert_array_equal(have["rows"], [[*np.cumsum(x[0, :2], 0), [0, 0]], np.cumsum(x[1], 0)])


# ---------------------------------------------------------------------------------------------
# RNN, GRU, LSTM
# ---------------------------------------------------------------------------------------------

GATES, FUNCTIONS = {"RNN": 1, "GRU": 3, "LSTM": 4}, {"RNN": 1, "GRU": 2, "LSTM": 3}
NAMES = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Affine",
    "LeakyRelu",
    "ThresholdedRelu",
    "ScaledTanh",
    "HardSigmoid",
    "Elu",
    "Softsign",
    "Softplus",
)


@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.parametrize("seed", range(6))
def test_recurrences_of_any_attributes(op_type, seed):
    rng = np.random.default_rng(seed)
    time, batch, size, hidden = 5, 3, 4, 2 + seed % 3
    direction = ("forward", "reverse", "bidirectional")[seed % 3]
    count = 1 + (direction == "bidirectional")

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / 2).astype(F)

    optional = {
        "B": normal(count, 2 * GATES[op_type] * hidden),
        "lengths": rng.integers(1, time + 1, batch).astype(np.int32),
        "h": normal(count, batch, hidden),
    }
    if op_type == "LSTM":
        optional |= {"c": normal(count, batch, hidden), "P": normal(count, 3 * hidden)}
    optional = {k: v for k, v in optional.items() if seed < 2 or rng.integers(2)}
    arrays = {
        "W": normal(count, GATES[op_type] * hidden, size),
        "R": normal(count, GATES[op_type] * hidden, hidden),
        **optional,
    }
    order = [
        "x",
        "W",
        "R",
        *(k if k in optional else "" for k in ("B", "lengths", "h", *("cP" if op_type == "LSTM" else ""))),
    ]
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction} | ({"clip": 0.8} if seed % 2 else {})
    if seed > 2:
        attrs["activations"] = [str(n) for n in rng.choice(NAMES, FUNCTIONS[op_type] * count)]
        attrs |= {"activation_alpha": [0.3, 0.7, 0.2, 0.5, 0.4, 0.9], "activation_beta": [0.4, 0.1, 0.6, 0.3, 0.2, 0.7]}
    attrs |= {"GRU": {"linear_before_reset": seed % 2}, "LSTM": {"input_forget": int(seed > 3)}}.get(op_type, {})
    x = normal(time, batch, size)
    names = ["y", "last", *(["cell"] if op_type == "LSTM" else [])]
    model = one_node(op_type, {"x": x}, names, opset=14, initializers=arrays, order=order, **attrs)
    assert_like_onnxruntime(model, {"x": x})


@pytest.mark.parametrize("op_type", GATES)
def test_recurrences_are_one_scan_and_differentiable(op_type, rng):
    x = rng.normal(size=(7, 2, 3)).astype(F)
    arrays = {
        "W": rng.normal(size=(2, GATES[op_type] * 4, 3)).astype(F),
        "R": rng.normal(size=(2, GATES[op_type] * 4, 4)).astype(F),
    }
    model = one_node(op_type, {"x": x}, opset=14, initializers=arrays, hidden_size=4, direction="bidirectional")
    fn, params = traced(model)

    def total(x: Any) -> Any:
        return (fn(params, {"x": x})["y"] ** 2).sum()

    assert str(jax.make_jaxpr(total)(x)).count("scan[") == 1
    direction = jnp.asarray(rng.normal(size=x.shape), F)
    step = 1e-2
    numeric = (total(x + step * direction) - total(x - step * direction)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(jax.grad(total)(x), direction), numeric, rtol=2e-2)
