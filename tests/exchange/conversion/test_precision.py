"""Other floating-point types: what computes in them, what cannot, and what is beyond them. onnxruntime is the oracle."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.arithmetic.formats import BFLOAT16, FLOAT16
from jq.exchange.conversion import to_float32, to_narrow
from jq.passes.opset import with_opset
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node

RNG = np.random.default_rng(5)
X = RNG.standard_normal((2, 4, 5, 6)).astype(np.float32)
W = RNG.standard_normal((4, 4, 3, 3)).astype(np.float32) / 6
I64 = np.int64


def conv(source: str = "x", target: str = "a") -> onnx.NodeProto:
    return node("Conv", [source, "w"], [target], name=f"conv_{target}", pads=[1, 1, 1, 1])


def traced(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    graph = jq.load(model)
    found = jq.trace(graph)(graph.params, feeds)
    return [np.asarray(found[v.name]) for v in graph.outputs]


def branch(nodes: list[onnx.NodeProto], output: str, k: np.ndarray) -> onnx.GraphProto:
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    return helper.make_graph(nodes, "branch", [], made, [numpy_helper.from_array(k, "k")])


def looped() -> list[onnx.NodeProto]:
    """A sum that a Loop carries, scaled by a constant inside it."""
    body = helper.make_graph(
        [
            node("Constant", [], ["half"], value=numpy_helper.from_array(np.float32(0.5))),
            node("Mul", ["a", "half"], ["part"]),
            node("Add", ["carried", "part"], ["sum"]),
            node("Identity", ["cond"], ["go"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("cond", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, [2, 4, 5, 6]),
        ],
        [
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, [2, 4, 5, 6]),
        ],
    )
    return [conv(), node("Loop", ["three", "", "a"], ["y"], body=body)]


def branches() -> list[onnx.NodeProto]:
    """An If whose branches name their constants alike; one has an operator that wants float32."""
    then = branch(
        [node("Resize", ["a", "", "k"], ["r"], mode="nearest"), node("ReduceMean", ["r"], ["m"], axes=[2, 3])],
        "m",
        np.float32([1, 1, 2, 2]),
    )
    other = branch(
        [node("Mul", ["a", "k"], ["s"]), node("ReduceMean", ["s"], ["n"], axes=[2, 3])], "n", np.float32([3])
    )
    return [conv(), node("If", ["yes"], ["y"], then_branch=then, else_branch=other)]


def mapped() -> onnx.GraphProto:
    """A body that a SequenceMap calls on its elements and on a tensor."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("element", "whole", "summed")]
    return helper.make_graph([node("Add", ["element", "whole"], ["summed"])], "body", values[:2], values[2:])


CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
    "weights": ([conv(target="y")], {}),
    "resize": (
        [conv(), node("Resize", ["a", "", "s"], ["y"], mode="linear")],
        {"s": np.float32([1, 1, 2, 2])},
    ),
    "the same constant as weight and as scales": (
        [conv(), node("Mul", ["a", "s4"], ["b"]), node("Resize", ["b", "", "s"], ["y"], mode="nearest"),
         ],
        {"s": np.float32([1, 1, 2, 2]), "s4": np.float32([[[[2.0]]]])},
    ),
    "scales that are computed": (
        [conv(), node("Mul", ["s", "two"], ["s2"]), node("Resize", ["a", "", "s2"], ["y"], mode="nearest")],
        {"s": np.float32([1, 1, 1, 1]), "two": np.float32([1, 1, 2, 2])},
    ),
    "shapes and indices": (
        [conv(), node("Shape", ["a"], ["shape"]), node("Gather", ["shape", "which"], ["some"]),
         node("Concat", ["some", "rest"], ["to"], axis=0), node("Reshape", ["a", "to"], ["y"])],
        {"which": np.array([0, 1], I64), "rest": np.array([-1], I64)},
    ),
    "cast to float and back": (
        [conv(), node("Cast", ["a"], ["i"], to=TensorProto.INT32), node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
         node("Add", ["a", "f"], ["y"])],
        {},
    ),
    "constant of shape": (
        [conv(), node("Shape", ["a"], ["shape"]), node("ConstantOfShape", ["shape"], ["c"],
         value=numpy_helper.from_array(np.float32([0.25]))), node("Add", ["a", "c"], ["y"])],
        {},
    ),
    "eye like": (
        [node("Reshape", ["x", "to"], ["m"]), node("EyeLike", ["m"], ["e"]), node("Add", ["m", "e"], ["y"])],
        {"to": np.array([8, 30], I64)},
    ),
    "range, which has no float16": (
        [node("ReduceMax", ["x"], ["top"], keepdims=0), node("Abs", ["top"], ["t"]), node("Range", ["zero", "t", "step"], ["r"]),
         node("Mul", ["r", "step"], ["y"])],
        {"zero": np.float32(0), "step": np.float32(0.5)},
    ),
    "norm with a mean": (
        [node("LayerNormalization", ["x", "g"], ["n", "mean"], axis=-1), node("Add", ["n", "mean"], ["y"])],
        {"g": np.ones(6, np.float32)},
    ),
    "clip and softmax": (
        [conv(), node("Clip", ["a", "lo", "hi"], ["c"]), node("Softmax", ["c"], ["y"], axis=1)],
        {"lo": np.float32(0), "hi": np.float32(6)},
    ),
    "cumulative sum in double": (
        [conv(), node("Cast", ["a"], ["d"], to=TensorProto.DOUBLE), node("Mul", ["d", "k"], ["e"]),
         node("Cast", ["e"], ["y"], to=TensorProto.FLOAT)],
        {"k": np.float64(1.5)},
    ),
    "an output inside": ([conv(), node("Relu", ["a"], ["y"]), node("Neg", ["y"], ["z"])], {}),
    "sequence": (
        [conv(), node("SplitToSequence", ["a"], ["s"]), node("SequenceAt", ["s", "one"], ["e"]),
         node("SequenceInsert", ["s", "e"], ["t"]), node("ConcatFromSequence", ["t"], ["c"], axis=0), node("Relu", ["c"], ["y"])],
        {"one": np.array(1, I64)},
    ),
    "map over a sequence": (
        [conv(), node("SplitToSequence", ["a"], ["s"]), node("SequenceMap", ["s", "a"], ["m"], body=mapped()),
         node("ConcatFromSequence", ["m"], ["y"], axis=0)],
        {},
    ),
    "loop": (looped(), {"three": np.array(3, I64)}),
    "if": (branches(), {"yes": np.array(True)}),
    "else": (branches(), {"yes": np.array(False)}),
}  # fmt: skip


def case(name: str) -> onnx.ModelProto:
    nodes, arrays = CASES[name]
    outputs = ("y", "z") if name == "an output inside" else ("y",)
    arrays = {"w": W, **arrays} if any("w" in n.input for n in nodes) else arrays
    return build(nodes, arrays, outputs=outputs)


@pytest.mark.parametrize("keep_io", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_native_float16_runs_in_onnxruntime(name: str, keep_io: bool) -> None:
    model = case(name)
    found = jq.convert(model, to="fp16", form="native", keep_io=keep_io)
    x = X if keep_io else X.astype(np.float16)
    dtypes = {t.data_type for t in found.graph.initializer}
    if "w" in {t.name for t in found.graph.initializer}:
        assert TensorProto.FLOAT16 in dtypes
    for have, mine, want in zip(
        onnxruntime_outputs(found, {"x": x}), traced(found, {"x": x}), onnxruntime_outputs(model, {"x": X}), strict=True
    ):
        assert have.dtype == mine.dtype == (np.float32 if keep_io else np.float16)
        # Truncation to integers may fall on either side.
        tolerance = 1.01 if name == "cast to float and back" else 2e-2
        np.testing.assert_allclose(have.astype(np.float32), want, atol=tolerance, rtol=1e-2)
        np.testing.assert_allclose(mine.astype(np.float32), want, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("opset", [17, 22])
@pytest.mark.parametrize("name", CASES)
def test_native_bfloat16_is_valid_and_traces(name: str, opset: int) -> None:
    model = case(name)
    found = jq.convert(model, to="bf16", form="native", opset=opset)  # checked by onnx with full inference
    for mine, want in zip(traced(found, {"x": X}), onnxruntime_outputs(model, {"x": X}), strict=True):
        tolerance = 1.01 if name == "cast to float and back" else 0.1
        np.testing.assert_allclose(mine.astype(np.float32), want, atol=tolerance, rtol=5e-2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_the_cast_form_runs_in_onnxruntime(name: str, to: Any) -> None:
    model = case(name)
    found = jq.convert(model, to=to)
    for have, want in zip(onnxruntime_outputs(found, {"x": X}), onnxruntime_outputs(model, {"x": X}), strict=True):
        tolerance = 1.01 if name == "cast to float and back" else 0.1 if to == "bf16" else 2e-2
        np.testing.assert_allclose(have, want, atol=tolerance, rtol=5e-2)


@pytest.mark.parametrize(("to", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_the_cast_form_rounds_what_numpy_rounds(to: Any, dtype: Any) -> None:
    # Small integers times powers of two: sums are exact in float32, whatever their order.
    x = (RNG.integers(-5000, 5000, (3, 8)) / 16).astype(np.float32)
    w = (RNG.integers(-5000, 5000, (8, 5)) / 1024).astype(np.float32)
    model = build([node("MatMul", ["x", "w"], ["y"])], {"w": w}, x=(3, 8))
    a, b = (v.astype(dtype).astype(np.float32) for v in (x, w))
    assert (a != x).any() and (b != w).any()
    (found,) = onnxruntime_outputs(jq.convert(model, to=to), {"x": x})
    np.testing.assert_array_equal(found, (a.astype(np.float64) @ b).astype(np.float32).astype(dtype).astype(np.float32))
    (quantized,) = traced(jq.convert(model, to=to, form="qdq"), {"x": x})
    np.testing.assert_array_equal(quantized, found)


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("form", ["cast", "qdq", "native"])
def test_interfaces_in_the_type(form: Any, to: Any) -> None:
    model = build([conv(target="input"), node("Relu", ["input"], ["y"], name="x_Cast")], {"w": W})
    found = jq.convert(model, to=to, form=form, keep_io=False)
    kind = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[to]
    assert [v.type.tensor_type.elem_type for v in (*found.graph.input, *found.graph.output)] == [kind, kind]
    x = X.astype(helper.tensor_dtype_to_np_dtype(kind))
    (want,) = onnxruntime_outputs(model, {"x": x.astype(np.float32)})
    (have,) = traced(found, {"x": x})
    np.testing.assert_allclose(have.astype(np.float32), want, atol=0.05, rtol=2e-2)
    if to == "fp16" and form != "qdq":
        (theirs,) = onnxruntime_outputs(found, {"x": x})
        np.testing.assert_allclose(theirs.astype(np.float32), want, atol=0.05, rtol=2e-2)


def test_scales_and_roi_keep_their_type_and_values() -> None:
    graph = jq.load(jq.convert(case("resize"), to="fp16", form="native"))
    (resize,) = (n for n in graph.nodes if n.op_type == "Resize")
    scales = graph.arrays[resize.inputs[2]]
    assert scales.dtype == np.float32 and scales.tolist() == [1, 1, 2, 2]
    assert graph.arrays["w"].dtype == np.float16


@pytest.mark.parametrize("form", ["cast", "qdq", "native"])
def test_a_weight_beyond_the_type_is_named(form: Any) -> None:
    w = W.copy()
    w[1, 2, 0, 0] = -1e6
    model = build([conv(target="y")], {"w": w})
    with pytest.raises(jq.ModelError, match=r"1 of 144 values of 'w' exceed the range of float16.* 1e\+06.* 65504"):
        jq.convert(model, to="fp16", form=form)
    found = jq.load(jq.convert(model, to="fp16", form=form, saturate=True))
    (stored,) = (a for k, a in found.arrays.items() if k.startswith("w") and a.ndim == 4)
    assert stored.dtype == np.float16 and stored[1, 2, 0, 0] == -65504
    jq.convert(model, to="bf16", form=form)  # bfloat16 holds it
    kept = jq.load(jq.convert(model, to="fp16", form=form, exclude=["conv_*"]))
    assert kept.arrays[next(k for k in kept.arrays if k.startswith("w"))].dtype == np.float32


def test_the_largest_float32_is_beyond_bfloat16_and_infinity_is_not() -> None:
    top = np.finfo(np.float32).max
    for value, beyond in ((top, True), (-top, True), (3.38e38, False), (-np.inf, False)):
        model = build([node("Max", ["x", "m"], ["y"])], {"m": np.float32([value])})
        if beyond:
            with pytest.raises(jq.ModelError, match="range of bfloat16"):
                jq.convert(model, to="bf16", form="native")
        else:
            (y,) = traced(jq.convert(model, to="bf16", form="native"), {"x": X})
            if np.isinf(value):
                with pytest.raises(
                    jq.ModelError, match="'m' holds infinite values, which this form would clip to 65504"
                ):
                    jq.convert(model, to="fp16")
                jq.convert(model, to="fp16", saturate=True)
            assert np.isfinite(value) or np.array_equal(y, X.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("form", ["cast", "native"])
@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_older_opsets_become_one_whose_cast_knows_the_types(to: Any, form: Any) -> None:
    nodes = [conv(), node("Upsample", ["a", "s"], ["y"], mode="linear")]
    model = build(nodes, {"w": W, "s": np.float32([1, 1, 2, 2])}, opset=9)
    found = jq.convert(model, to=to, form=form)
    assert found.opset_import[0].version == 13
    np.testing.assert_allclose(traced(found, {"x": X})[0], onnxruntime_outputs(model, {"x": X})[0], atol=0.05)


def test_an_epsilon_that_becomes_zero_is_reported() -> None:
    model = build([node("Add", ["x", "eps"], ["y"])], {"eps": np.float32(1e-12)})
    with pytest.warns(UserWarning, match="all values of 'eps', at most 1e-12 in magnitude, become zero in float16"):
        jq.convert(model, to="fp16", form="native")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jq.convert(model, to="bf16", form="native")


def test_excluded_operators_stay_float32() -> None:
    model = build([conv(), node("Softmax", ["a"], ["y"], name="soft", axis=1)], {"w": W})
    graph = jq.load(jq.convert(model, to="fp16", form="native", exclude=["Softmax"]))
    (soft,) = (n for n in graph.nodes if n.op_type == "Softmax")
    assert graph.values[soft.inputs[0]].dtype == graph.values[soft.outputs[0]].dtype == np.float32
    with pytest.raises(jq.ConfigError, match=r"'Softmaxx' matches no node, by name or operator\. Did you mean"):
        jq.convert(model, to="fp16", form="native", exclude=["Softmaxx"])
    with pytest.raises(jq.ConfigError, match="'nothing'"):
        jq.convert(model, to="bf16", exclude=["nothing"])


def test_custom_operators_stay_and_their_types_must_be_known() -> None:
    custom = build([conv(target="y")], {"w": W})
    custom.graph.node.insert(0, node("Odd", ["x"], ["h"], name="odd", domain="com.acme"))
    custom.graph.node[1].input[0] = "h"
    custom.opset_import.append(helper.make_opsetid("com.acme", 1))
    with pytest.raises(jq.UnsupportedOp, match=r"'odd' \(com.acme::Odd\) writes 'h', whose type is not known"):
        jq.convert(custom, to="fp16", form="native")
    custom.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [2, 4, 5, 6]))
    graph = jq.load(jq.convert(custom, to="fp16", form="native", keep_io=False))
    odd, found = (next(n for n in graph.nodes if n.op_type == op) for op in ("Odd", "Conv"))
    casts = [graph.producer[name] for name in (odd.inputs[0], found.inputs[0])]
    assert [(n.op_type, n.attrs["to"]) for n in casts] == [("Cast", TensorProto.FLOAT), ("Cast", TensorProto.FLOAT16)]


@pytest.mark.parametrize("name", ["fashion_resnet", "fashion_mobilenet"])
@pytest.mark.parametrize("format", [FLOAT16, BFLOAT16])
def test_float32_again_is_the_model_with_rounded_weights(name: str, format: Any) -> None:
    graph = with_opset(jq.load(jq.zoo.path(name)), 22)  # of which all operators of the models have bfloat16
    images = jq.zoo.calibration_set()[0][:4]
    rounded = {k: a.astype(format.dtype).astype(np.float32) for k, a in graph.params.items()}
    assert any((rounded[k] != a).any() for k, a in graph.params.items())
    again = to_float32(jq.load(jq.to_model(to_narrow(graph, format))))
    assert {str(n.op_type) for n in again.nodes} == {n.op_type for n in graph.nodes}
    want = onnxruntime_outputs(jq.to_model(graph, rounded), {"input": images})
    have = onnxruntime_outputs(jq.convert(again), {"input": images})
    np.testing.assert_array_equal(have[0], want[0])


def test_a_float16_model_of_its_own_becomes_float32() -> None:
    half = build([conv(target="y")], {"w": W.astype(np.float16)}, dtype=TensorProto.FLOAT16)
    found = jq.convert(half, to="fp32")
    assert [v.type.tensor_type.elem_type for v in (*found.graph.input, *found.graph.output)] == [TensorProto.FLOAT] * 2
    full = build([conv(target="y")], {"w": W.astype(np.float16).astype(np.float32)})
    x = X.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(onnxruntime_outputs(found, {"x": x})[0], onnxruntime_outputs(full, {"x": x})[0])
    same = jq.convert(full, to="fp32")
    np.testing.assert_array_equal(onnxruntime_outputs(same, {"x": x})[0], onnxruntime_outputs(full, {"x": x})[0])


def test_an_if_may_be_excluded_with_all_that_is_in_it() -> None:
    model = case("if")
    found = jq.convert(model, to="fp16", form="native", exclude=["If"])
    graph = jq.load(found)
    (chosen,) = (n for n in graph.nodes if n.op_type == "If")
    assert {graph.values[n].dtype for n in chosen.reads()} == {np.dtype(np.float32), np.dtype(bool)}
    assert not any(n.op_type == "Cast" for g in chosen.subgraphs.values() for n in g.nodes)
    (have,), (want,) = (onnxruntime_outputs(m, {"x": X}) for m in (found, model))
    np.testing.assert_allclose(have, want, atol=2e-2, rtol=1e-2)


def test_inputs_that_are_float16_already_stay_so() -> None:
    half = helper.make_tensor_value_info("h", TensorProto.FLOAT16, [6])
    nodes = [node("Cast", ["h"], ["f"], to=TensorProto.FLOAT), node("Add", ["x", "f"], ["y"])]
    found = jq.convert(build(nodes, extra_inputs=[half]), to="fp16", form="native")
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*found.graph.input, *found.graph.output)}
    assert kinds == {"x": TensorProto.FLOAT, "h": TensorProto.FLOAT16, "y": TensorProto.FLOAT}


def test_a_quantized_model_is_refused_or_keeps_its_quantizers() -> None:
    images = jq.zoo.calibration_set()[0]
    model = jq.quantize(jq.zoo.path("fashion_resnet"), images[:16], "XINT8").model
    with pytest.raises(jq.ModelError, match=r"is quantized: .* Dequantize it first"):
        jq.convert(model, to="bf16")
    found = jq.convert(model, to="fp16", form="native")
    (have,), (want,) = (onnxruntime_outputs(m, {"input": images[:4]}) for m in (found, model))
    np.testing.assert_allclose(have, want, atol=1.0)
    assert sum(n.op_type == "QuantizeLinear" for n in found.graph.node) == sum(
        n.op_type == "QuantizeLinear" for n in model.graph.node
    )
