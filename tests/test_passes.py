"""The passes: what they leave, and that the float output stays what onnxruntime says of the original."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq.zoo
from jq.graph import Graph, Node, Value
from jq.onnx_read import load
from jq.onnx_write import to_model
from jq.passes import CLEANING, prepare
from jq.passes.edit import bypass, rename
from jq.trace import trace
from tests.conftest import onnxruntime_outputs

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
node = helper.make_node


def build(
    nodes: Sequence[onnx.NodeProto],
    arrays: Mapping[str, np.ndarray] = {},
    *,
    x: Sequence[int | str | None] = (2, 4, 5, 6),
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
    dtype: int = TensorProto.FLOAT,
    extra_inputs: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", dtype, x), *extra_inputs],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(np.asarray(a), k) for k, a in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    # onnxruntime wants the outputs' types, and infers them itself only if they are not there at all.
    inferred = onnx.shape_inference.infer_shapes(model)
    for output in model.graph.output:
        found = next((v for v in inferred.graph.output if v.name == output.name), None)
        output.CopyFrom(found)
    return model


def prepared(model: onnx.ModelProto, *, x: np.ndarray | None = None, **inputs: np.ndarray) -> Graph:
    """The prepared graph, after its outputs were compared with the original's: exported, and traced."""
    graph = load(model)
    result = prepare(graph)
    if x is None:
        x = (
            np.random.default_rng(1)
            .standard_normal([d if isinstance(d, int) else 3 for d in graph.inputs[0].shape])
            .astype(np.float32)
        )
    feeds = {"x": x, **inputs}
    exported = to_model(result)
    onnx.checker.check_model(exported)
    expected, found = onnxruntime_outputs(model, feeds), onnxruntime_outputs(exported, feeds)
    traced = trace(result)(result.params, feeds)
    assert [v.name for v in result.outputs] == [v.name for v in graph.outputs]
    for value, want, have in zip(graph.outputs, expected, found, strict=True):
        assert want.dtype == have.dtype
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * max(1e-30, np.abs(want).max(initial=0)))
        np.testing.assert_allclose(
            traced[value.name], want, rtol=1e-4, atol=1e-5 * max(1e-30, np.abs(want).max(initial=0))
        )
    assert prepare(result) is result  # nothing is left to do
    return result


def ops(graph: Graph) -> list[str]:
    return [n.op_type for n in graph.nodes]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def statistics(prefix: str, channels: int, seed: int = 0) -> dict[str, np.ndarray]:
    gamma, beta, mean = normal(3, channels, seed=seed)
    # small variances: where the epsilon decides
    return {
        f"{prefix}.g": gamma,
        f"{prefix}.b": beta,
        f"{prefix}.m": mean,
        f"{prefix}.v": normal(channels, seed=seed + 1) ** 2 * 1e-4,
    }


def batchnorm(source: str, target: str, prefix: str, **attrs: Any) -> onnx.NodeProto:
    return node("BatchNormalization", [source, *(f"{prefix}.{p}" for p in "gbmv")], [target], name=prefix, **attrs)


class TestBatchNorm:
    @pytest.mark.parametrize("opset", [7, 9, 14, 15, 21])
    @pytest.mark.parametrize("epsilon", [None, 1e-3, 0.0])
    def test_conv(self, opset: int, epsilon: float | None) -> None:
        attrs = {} if epsilon is None else {"epsilon": epsilon}
        arrays = {"w": normal(6, 4, 3, 3), "bias": normal(6), **statistics("bn", 6)}
        for inputs in (["x", "w"], ["x", "w", "bias"]):
            model = build(
                [node("Conv", inputs, ["c"], name="conv"), batchnorm("c", "y", "bn", **attrs)], arrays, opset=opset
            )
            graph = prepared(model)
            assert ops(graph) == ["Conv"]
            assert graph.nodes[0].name == "conv"

    def test_every_output_channel_of_grouped_convolutions(self) -> None:
        conv = build(
            [node("Conv", ["x", "w"], ["c"], group=2), batchnorm("c", "y", "bn")],
            {"w": normal(6, 2, 3, 3), **statistics("bn", 6)},
        )
        assert ops(prepared(conv)) == ["Conv"]
        for group, out in ((1, 3), (2, 3), (4, 1)):
            arrays = {"w": normal(4, out, 3, 3), **statistics("bn", out * group)}
            model = build(
                [node("ConvTranspose", ["x", "w"], ["c"], group=group, strides=[2, 2]), batchnorm("c", "y", "bn")],
                arrays,
            )
            assert ops(prepared(model)) == ["ConvTranspose"]

    @pytest.mark.parametrize("transposed", [0, 1])
    @pytest.mark.parametrize("bias", [None, (), (1,), (5,), (1, 5), (3, 1), (3, 5)])
    def test_gemm(self, transposed: int, bias: tuple[int, ...] | None) -> None:
        arrays = {"w": normal(5, 4) if transposed else normal(4, 5), **statistics("bn", 5)}
        if bias is not None:
            arrays["c"] = np.asarray(normal(*bias), np.float32)
        gemm = node(
            "Gemm", ["x", "w", *(["c"] if bias is not None else [])], ["g"], alpha=0.5, beta=3.0, transB=transposed
        )
        assert ops(prepared(build([gemm, batchnorm("g", "y", "bn")], arrays, x=(3, 4)))) == ["Gemm"]

    def test_two_readers_of_the_convolution(self) -> None:
        arrays = {"w": normal(4, 4, 1, 1), **statistics("bn", 4)}
        model = build(
            [node("Conv", ["x", "w"], ["c"]), batchnorm("c", "b", "bn"), node("Add", ["b", "c"], ["y"])], arrays
        )
        assert ops(prepared(model)) == ["Conv", "BatchNormalization", "Add"]

    def test_convolution_is_an_output(self) -> None:
        arrays = {"w": normal(4, 4, 1, 1), **statistics("bn", 4)}
        model = build([node("Conv", ["x", "w"], ["c"]), batchnorm("c", "y", "bn")], arrays, outputs=["y", "c"])
        assert ops(prepared(model)) == ["Conv", "BatchNormalization"]

    def test_shared_weight(self) -> None:
        arrays = {"w": normal(4, 4, 1, 1), "bias": normal(4), **statistics("p", 4), **statistics("q", 4, seed=5)}
        convs = [node("Conv", [s, "w", "bias"], [t]) for s, t in (("x", "c"), ("r", "d"))]
        nodes = [convs[0], batchnorm("c", "r", "p"), convs[1], batchnorm("d", "y", "q")]
        graph = prepared(build(nodes, arrays))
        assert ops(graph) == ["Conv", "Conv"]
        assert len(graph.params) == 4

    def test_unfit_is_left(self) -> None:
        arrays = {"w": normal(4, 4, 1, 1), **statistics("bn", 4)}
        training = node("BatchNormalization", ["c", *(f"bn.{p}" for p in "gbmv")], ["y", "m", "v"], training_mode=1)
        graph = prepare(load(build([node("Conv", ["x", "w"], ["c"]), training], arrays, outputs=["y"])))
        assert ops(graph) == ["Conv", "BatchNormalization"]
        arrays["bn.v"] = np.full(4, -1.0, np.float32)  # the root of it is no number
        graph = prepare(load(build([node("Conv", ["x", "w"], ["c"]), batchnorm("c", "y", "bn")], arrays)))
        assert ops(graph) == ["Conv", "BatchNormalization"]

    def test_half_precision(self) -> None:
        """The sum is done in float64, the type stays; a scale that half floats cannot hold is not folded."""
        for variance, expected in ((1.0, ["Conv"]), (1e-12, ["Conv", "BatchNormalization"])):
            arrays = {
                "w": normal(4, 4, 1, 1),
                **statistics("bn", 4),
                "bn.v": np.full(4, variance),
                "bn.g": np.full(4, 3.0),
            }
            arrays = {k: a.astype(np.float16) for k, a in arrays.items()}
            nodes = [node("Conv", ["x", "w"], ["c"]), batchnorm("c", "y", "bn", epsilon=1e-10)]
            graph = prepare(load(build(nodes, arrays, dtype=TensorProto.FLOAT16)))
            assert ops(graph) == expected
            assert {a.dtype for a in graph.params.values()} == {np.dtype(np.float16)}

    def test_chain_of_scales(self) -> None:
        """What caffe's converters leave: BatchNorm, then Scale as Mul and Add."""
        arrays = {"w": normal(4, 4, 1, 1), "s": normal(4, 1, 1), "t": normal(1, 4, 1, 1), **statistics("bn", 4)}
        nodes = [
            node("Conv", ["x", "w"], ["c"]),
            batchnorm("c", "b", "bn"),
            node("Mul", ["b", "s"], ["m"]),
            node("Add", ["t", "m"], ["y"]),
        ]
        assert ops(prepared(build(nodes, arrays))) == ["Conv"]


class TestAffine:
    @pytest.mark.parametrize("shape", [(1, 4, 1, 1), (4, 1, 1), (1, 1, 1), (1,), ()])
    @pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
    def test_per_channel(self, shape: tuple[int, ...], op: str) -> None:
        arrays = {"w": normal(4, 4, 3, 3), "k": np.asarray(normal(*shape) + 3, np.float32)}
        for inputs, bias in ((["c", "k"], []), (["c", "k"], ["bias"]), (["k", "c"], [])):
            model = build(
                [node("Conv", ["x", "w", *bias], ["c"]), node(op, inputs, ["y"])], arrays | {b: normal(4) for b in bias}
            )
            swapped_division = op == "Div" and inputs[0] == "k"
            assert ops(prepared(model)) == (["Conv", "Div"] if swapped_division else ["Conv"])

    @pytest.mark.parametrize(
        "shape", [(4,), (1, 4), (1, 4, 4), (2, 1, 1, 1), (1, 4, 4, 1), (1, 2, 4, 1, 1), (1, 1, 1, 4)]
    )
    def test_not_per_channel(self, shape: tuple[int, ...]) -> None:
        """A vector broadcasts along the width, even where it is as long as the channels are many."""
        arrays = {"w": normal(4, 4, 1, 1), "k": normal(*shape)}
        x = (2, 4, 4, 4)
        assert ops(prepared(build([node("Conv", ["x", "w"], ["c"]), node("Add", ["c", "k"], ["y"])], arrays, x=x))) == [
            "Conv",
            "Add",
        ]

    def test_one_channel_is_not_widened(self) -> None:
        arrays = {"w": normal(1, 4, 1, 1), "k": normal(3, 1, 1)}
        assert ops(prepared(build([node("Conv", ["x", "w"], ["c"]), node("Add", ["c", "k"], ["y"])], arrays))) == [
            "Conv",
            "Add",
        ]

    def test_gemm(self) -> None:
        arrays = {"w": normal(4, 5), "k": normal(5), "rows": normal(3, 1)}
        model = build(
            [node("Gemm", ["x", "w"], ["g"], alpha=2.0, beta=0.0), node("Add", ["g", "k"], ["y"])], arrays, x=(3, 4)
        )
        assert ops(prepared(model)) == ["Gemm"]
        model = build([node("Gemm", ["x", "w"], ["g"]), node("Add", ["g", "rows"], ["y"])], arrays, x=(3, 4))
        assert ops(prepared(model)) == ["Gemm", "Add"]

    def test_residual_is_left(self) -> None:
        model = build([node("Conv", ["x", "w"], ["c"]), node("Add", ["c", "x"], ["y"])], {"w": normal(4, 4, 1, 1)})
        assert ops(prepared(model)) == ["Conv", "Add"]

    def test_broadcasting_before_opset_7(self) -> None:
        arrays = {"w": normal(4, 4, 1, 1), "k": normal(4)}
        add = node("Add", ["c", "k"], ["y"], broadcast=1, axis=1)
        graph = prepare(load(build([node("Conv", ["x", "w"], ["c"]), add], arrays, opset=6)))
        assert ops(graph) == ["Conv"]
        x = normal(2, 4, 5, 6)
        expected = np.einsum("oi,nihw->nohw", arrays["w"][:, :, 0, 0], x) + arrays["k"].reshape(4, 1, 1)
        np.testing.assert_allclose(trace(graph)(graph.params, {"x": x})["y"], expected, rtol=1e-5, atol=1e-5)


class TestIdentity:
    NOTHING = {  # noqa: RUF012  never written
        "identity": (node("Identity", ["r"], ["i"]), {}),
        "dropout": (node("Dropout", ["r"], ["i", "mask"]), {}),
        "dropout, told": (
            node("Dropout", ["r", "ratio", "no"], ["i"]),
            {"ratio": np.float32(0.3), "no": np.array(False)},
        ),
        "cast": (node("Cast", ["r"], ["i"], to=TensorProto.FLOAT), {}),
        "reshape": (node("Reshape", ["r", "s"], ["i"]), {"s": np.array([2, 4, 5, 6])}),
        "reshape, copied": (node("Reshape", ["r", "s"], ["i"]), {"s": np.array([0, 4, -1, 6])}),
        "transpose": (node("Transpose", ["r"], ["i"], perm=[0, 1, 2, 3]), {}),
        "pad": (node("Pad", ["r", "p"], ["i"], mode="reflect"), {"p": np.zeros(8, np.int64)}),
        "slice": (node("Slice", ["r", "a", "e"], ["i"]), {"a": np.zeros(2, np.int64), "e": np.array([2, 1 << 62])}),
        "slice, one axis": (
            node("Slice", ["r", "a", "e", "ax"], ["i"]),
            {"a": np.array([0]), "e": np.array([6]), "ax": np.array([-1])},
        ),
        "expand": (node("Expand", ["r", "s"], ["i"]), {"s": np.array([1, 5, 1])}),
        "tile": (node("Tile", ["r", "s"], ["i"]), {"s": np.ones(4, np.int64)}),
        "resize": (node("Resize", ["r", "", "s"], ["i"], mode="linear"), {"s": np.ones(4, np.float32)}),
        "concat": (node("Concat", ["r"], ["i"], axis=1), {}),
        "sum": (node("Sum", ["r"], ["i"]), {}),
        "plus zero": (node("Add", ["z", "r"], ["i"]), {"z": np.zeros((4, 1, 1), np.float32)}),
        "by one": (node("Div", ["r", "o"], ["i"]), {"o": np.float32(1)}),
    }
    SOMETHING = {  # noqa: RUF012
        "dropout, training": (
            node("Dropout", ["r", "ratio", "yes"], ["i"]),
            {"ratio": np.float32(0), "yes": np.array(True)},
        ),
        "cast": (node("Cast", ["r"], ["i"], to=TensorProto.DOUBLE), {}),
        "reshape": (node("Reshape", ["r", "s"], ["i"]), {"s": np.array([0, -1, 6, 5])}),
        "reshape, rank": (node("Reshape", ["r", "s"], ["i"]), {"s": np.array([0, 0, -1])}),
        "transpose": (node("Transpose", ["r"], ["i"]), {}),
        "pad": (node("Pad", ["r", "p"], ["i"]), {"p": np.array([0, 0, 0, 0, 0, 0, 0, 1])}),
        "slice": (node("Slice", ["r", "a", "e"], ["i"]), {"a": np.array([0]), "e": np.array([1])}),
        "slice, reversed": (
            node("Slice", ["r", "a", "e", "", "st"], ["i"]),
            {"a": np.array([0]), "e": np.array([9]), "st": np.array([2])},
        ),
        "expand": (node("Expand", ["r", "s"], ["i"]), {"s": np.array([1, 1, 1, 1, 1])}),
        "widened by zero": (node("Add", ["r", "z"], ["i"]), {"z": np.zeros((1, 1, 1, 1, 1), np.float32)}),
        "zero minus": (node("Sub", ["z", "r"], ["i"]), {"z": np.zeros((), np.float32)}),
        "one by": (node("Div", ["o", "r"], ["i"]), {"o": np.float32(1)}),
    }

    @pytest.mark.parametrize("name", NOTHING)
    def test_removed(self, name: str) -> None:
        between, arrays = self.NOTHING[name]
        model = build([node("Relu", ["x"], ["r"]), between, node("Neg", ["i"], ["y"])], arrays)
        graph = prepared(model)
        assert ops(graph) == ["Relu", "Neg"]
        assert not graph.arrays
        model = build([node("Relu", ["x"], ["r"]), between], arrays, outputs=["i"])
        assert ops(prepared(model)) == ["Relu"]

    @pytest.mark.parametrize("name", SOMETHING)
    def test_kept(self, name: str) -> None:
        between, arrays = self.SOMETHING[name]
        model = build([node("Relu", ["x"], ["r"]), between, node("Identity", ["i"], ["y"])], arrays)
        assert len(prepared(model, x=np.abs(normal(2, 4, 5, 6)) + 1).nodes) == 2

    def test_mask_in_use(self) -> None:
        model = build([node("Dropout", ["x"], ["d", "mask"]), node("Neg", ["d"], ["y"])], outputs=["y", "mask"])
        assert ops(prepared(model)) == ["Dropout", "Neg"]

    def test_input_to_output(self) -> None:
        model = build([node("Identity", ["x"], ["i"]), node("Identity", ["i"], ["y"])])
        assert ops(prepared(model)) == ["Identity"]

    def test_two_outputs_of_one_tensor(self) -> None:
        nodes = [
            node("Relu", ["x"], ["r"]),
            node("Identity", ["r"], ["y"]),
            node("Identity", ["r"], ["z"]),
            node("Neg", ["r"], ["n"]),
        ]
        graph = prepared(build(nodes, outputs=["y", "z", "n", "r"]))
        assert Counter(ops(graph)) == {"Relu": 1, "Identity": 2, "Neg": 1}
        assert Counter(ops(prepared(build(nodes, outputs=["y", "z", "n"])))) == {"Relu": 1, "Identity": 1, "Neg": 1}

    def test_weight_to_output(self) -> None:
        graph = prepared(
            build([node("Identity", ["w"], ["y"]), node("Relu", ["x"], ["z"])], {"w": normal(3)}, outputs=["y", "z"])
        )
        assert ops(graph) == ["Relu"]

    def test_stale_declarations_prove_nothing(self) -> None:
        model = build(
            [node("Relu", ["x"], ["r"]), node("Reshape", ["r", "s"], ["y"])], {"s": np.array([1, 4])}, x=("N", 2, 2)
        )
        model.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, (1, 4)))
        assert ops(prepare(load(model))) == ["Relu", "Reshape"]


class TestBranches:
    @staticmethod
    def branch(name: str, nodes: Sequence[onnx.NodeProto], output: str) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)])

    def model(self, condition: str, arrays: Mapping[str, np.ndarray] = {}) -> onnx.ModelProto:
        inner = [node("Identity", ["i"], ["t"]), node("Mul", ["t", "w2"], ["o"])]
        then = self.branch("then", inner, "o")
        other = self.branch("else", [node("Sub", ["i", "w"], ["p"])], "p")
        nodes = [
            node("Relu", ["x"], ["r"]),
            node("Identity", ["r"], ["i"]),
            node("If", [condition], ["y"], then_branch=then, else_branch=other, name="if"),
            node("Identity", ["r"], ["z"]),
        ]
        extra = [] if condition in arrays else [helper.make_tensor_value_info(condition, TensorProto.BOOL, ())]
        weights = {"w": normal(4, 5, 6).reshape(1, 4, 5, 6), "w2": normal(4, 5, 6).reshape(1, 4, 5, 6)}
        return build(nodes, {**weights, **arrays}, outputs=["y", "z"], extra_inputs=extra)

    @pytest.mark.parametrize("value", [True, False])
    def test_captured_names_follow(self, value: bool) -> None:
        """The branches read a removed tensor, a renamed one (an output's name moves) and merged weights."""
        graph = prepared(self.model("c"), c=np.array(value))
        assert ops(graph) == ["Relu", "If"]
        assert graph.nodes[1].attrs["then_branch"].captured() == {"z", "w"}
        assert graph.params.keys() == {"w"}

    @pytest.mark.parametrize("value", [True, False])
    def test_known_condition(self, value: bool) -> None:
        assert ops(prepared(self.model("c", {"c": np.array(value)}))) == ["Relu", "Mul" if value else "Sub"]

    def test_two_branches_with_the_same_names(self) -> None:
        arrays = {"c": np.array([True])}
        nodes = []
        for op, o in (("Relu", "y"), ("Neg", "z")):
            then = self.branch("then", [node(op, ["x"], ["t"], name="same")], "t")
            other = self.branch("else", [node("Abs", ["x"], ["u"], name="same too")], "u")
            nodes.append(node("If", ["c"], [o], name=f"if {op}", then_branch=then, else_branch=other))
        assert ops(prepared(build(nodes, arrays, outputs=["y", "z"]))) == ["Relu", "Neg"]


class TestConstants:
    def test_chain(self) -> None:
        nodes = [
            node("Transpose", ["w"], ["t"], perm=[1, 0]),
            node("Sqrt", ["q"], ["s"]),
            node("Mul", ["t", "s"], ["m"]),
            node("Gemm", ["x", "m"], ["y"]),
        ]
        graph = prepared(build(nodes, {"w": normal(5, 4), "q": np.float32(2)}, x=(3, 4)))
        assert ops(graph) == ["Gemm"]
        assert graph.params["m"].dtype == np.float32

    def test_output_is_constant(self) -> None:
        graph = prepared(
            build([node("Neg", ["w"], ["y"]), node("Relu", ["x"], ["z"])], {"w": normal(3)}, outputs=["y", "z"])
        )
        assert ops(graph) == ["Relu"]

    def test_wide_types_stay(self) -> None:
        nodes = [
            node("Cast", ["w"], ["d"], to=TensorProto.DOUBLE),
            node("Mul", ["d", "d"], ["m"]),
            node("Cast", ["x"], ["c"], to=TensorProto.DOUBLE),
            node("Add", ["c", "m"], ["y"]),
        ]
        graph = prepared(build(nodes, {"w": np.float32(1 / 3)}))
        assert graph.params["m"].dtype == np.float64
        assert graph.params["m"] == np.float64(np.float32(1 / 3)) ** 2

    def test_quantizers_stay(self) -> None:
        nodes = [
            node("DequantizeLinear", ["w", "s", "z"], ["d"]),
            node("DequantizeLinear", ["w", "s", "z"], ["e"]),
            node("Add", ["x", "d"], ["a"]),
            node("Mul", ["a", "e"], ["y"]),
        ]
        model = build(nodes, {"w": np.arange(6, dtype=np.int8), "s": np.float32(0.5), "z": np.int8(1)})
        assert Counter(ops(prepared(model)))["DequantizeLinear"] == 2

    def test_random_numbers_are_no_constants(self) -> None:
        nodes = [node("RandomNormal", [], [f"r{i}"], shape=[6], seed=1.0) for i in range(2)]
        model = build([*nodes, node("Add", ["x", "r0"], ["a"]), node("Add", ["a", "r1"], ["y"])])
        assert len(prepare(load(model)).nodes) == 4

    @pytest.mark.parametrize("op", ["ConstantOfShape", "Expand", "Tile", "Range"])
    def test_the_model_is_not_inflated(self, op: str) -> None:
        """Shapes that would need terabytes, too: nothing of that size may be made on the way."""
        for size, folds in ((100, True), (1 << 25, False), (1 << 40, False)):
            inputs, arrays = {
                "ConstantOfShape": (["n"], {"n": np.array([size])}),
                "Expand": (["one", "n"], {"one": np.ones(1, np.float32), "n": np.array([size])}),
                "Tile": (["one", "n"], {"one": np.ones(1, np.int64), "n": np.array([size])}),
                "Range": (["a", "n", "d"], {"a": np.array(0), "n": np.array(size), "d": np.array(1)}),
            }[op]
            nodes = [
                node(op, inputs, ["big"]),
                node("ReduceMax", ["big"], ["y"], keepdims=0),
                node("Shape", ["x"], ["z"]),
            ]
            graph = prepare(load(build(nodes, arrays, outputs=["y", "z"])))
            assert (op not in ops(graph)) == folds


class TestDuplicates:
    def test_towers(self) -> None:
        """Two equal towers, of equal weights, are one."""
        nodes = []
        for i in "ab":
            nodes += [node("Conv", ["x", f"w{i}", f"b{i}"], [f"c{i}"]), node("Relu", [f"c{i}"], [f"r{i}"])]
        arrays = {f"w{i}": normal(4, 4, 1, 1) for i in "ab"} | {f"b{i}": normal(4) for i in "ab"}
        graph = prepared(build([*nodes, node("Add", ["ra", "rb"], ["y"])], arrays))
        assert ops(graph) == ["Conv", "Relu", "Add"]
        assert len(graph.params) == 2

    def test_what_differs_stays(self) -> None:
        arrays = {
            "w": normal(4, 4, 1, 1),
            "b": np.zeros(4, np.float32),
            "zero": np.float32(0),
            "minus": np.float32(-0.0),
        }
        nodes = [
            node("Conv", ["x", "w", "b"], ["c0"]),
            node("Conv", ["c0", "w", "b"], ["c1"], strides=[1, 1]),
            node("LeakyRelu", ["c1"], ["l0"], alpha=0.1),
            node("LeakyRelu", ["c1"], ["l1"], alpha=0.2),
            node("Div", ["l0", "zero"], ["d0"]),
            node("Div", ["l0", "minus"], ["d1"]),
            node("Sum", ["l1", "d0"], ["y"]),
        ]
        graph = prepared(build(nodes, arrays, outputs=["y", "d1"]), x=np.abs(normal(2, 4, 5, 6)))
        assert len(graph.nodes) == 7

    def test_biases_stay_apart(self) -> None:
        arrays = {"w": normal(4, 4, 1, 1), "b": np.zeros(4, np.float32), "c": np.zeros(4, np.float32)}
        graph = prepared(build([node("Conv", ["x", "w", "b"], ["h"]), node("Conv", ["h", "w", "c"], ["y"])], arrays))
        assert graph.params.keys() == {"w", "b", "c"}

    def test_both_are_outputs(self) -> None:
        graph = prepared(build([node("Relu", ["x"], ["y"]), node("Relu", ["x"], ["z"])], outputs=["y", "z"]))
        assert len(graph.nodes) == 2
        nodes = [node("Relu", ["x"], ["h"]), node("Relu", ["x"], ["y"]), node("Neg", ["h"], ["z"])]
        assert ops(prepared(build(nodes, outputs=["y", "z"]))) == ["Relu", "Neg"]


class TestShapes:
    FLATTEN = (
        node("Relu", ["x"], ["r"]),
        node("Shape", ["r"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axis"], ["u"]),
        node("Concat", ["u", "rest"], ["t"], axis=0),
        node("Reshape", ["r", "t"], ["y"]),
    )
    ARRAYS = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1])}  # noqa: RUF012

    @pytest.mark.parametrize("batch", [2, "N", None, "?"])
    def test_flatten(self, batch: int | str | None) -> None:
        graph = prepared(build(self.FLATTEN, self.ARRAYS, x=(batch, 4, 5, 6)))
        assert ops(graph) == ["Relu", "Reshape"]
        assert graph.constants[graph.nodes[1].inputs[1]].tolist() == ([2, -1] if batch == 2 else [0, -1])

    def test_swapped_dims(self) -> None:
        """0 copies the dim at its own place only, and there is but one -1."""
        nodes = [node("Shape", ["x"], ["s"]), node("Gather", ["s", "order"], ["t"]), node("Reshape", ["x", "t"], ["y"])]
        for x, order, expected in (
            (("N", "M", 5), [1, 0, 2], None),
            (("N", "N", 5), [1, 0, 2], [0, 0, 5]),
            (("?", "?", 5), [1, 0, 2], None),
            (("N", 4, 5), [1, 0, 2], [4, -1, 5]),
        ):
            graph = prepared(
                build(nodes, {"order": np.array(order)}, x=x),
                x=normal(3, 3, 5) if x[0] == x[1] else normal(3, 4, 5) if 4 in x else normal(3, 2, 5),
            )
            if expected is None:
                assert ops(graph) == ["Shape", "Gather", "Reshape"]
            else:
                assert ops(graph) == ["Reshape"]
                assert graph.constants[graph.nodes[0].inputs[1]].tolist() == expected

    def test_arithmetic(self) -> None:
        """A product with an unknown dim is unknown, its neighbours are not; int32 as Paddle writes it."""
        nodes = [
            node("Shape", ["x"], ["s64"]),
            node("Cast", ["s64"], ["s"], to=TensorProto.INT32),
            node("Slice", ["s", "a", "b"], ["head"]),
            node("Slice", ["s", "b", "c"], ["tail"]),
            node("ReduceProd", ["tail"], ["area"]),
            node("Mul", ["head", "two"], ["twice"]),
            node("Div", ["area", "two"], ["half"]),
            node("Concat", ["twice", "half"], ["t"], axis=0),
            node("Cast", ["t"], ["target"], to=TensorProto.INT64),
            node("Reshape", ["x", "target"], ["y"]),
        ]
        arrays = {"a": np.array([0]), "b": np.array([1]), "c": np.array([9]), "two": np.array([2], np.int32)}
        nodes[4].attribute.append(helper.make_attribute("keepdims", 1))
        graph = prepared(build(nodes, arrays, x=("N", 4, 6)))
        assert ops(graph) == ["Reshape"]
        assert graph.constants[graph.nodes[0].inputs[1]].tolist() == [-1, 12]

    def test_static_part_of_a_dynamic_shape(self) -> None:
        nodes = [
            node("Shape", ["x"], ["s"]),
            node("Slice", ["s", "two", "four"], ["hw"]),
            node("Cast", ["hw"], ["f"], to=TensorProto.FLOAT),
            node("ReduceProd", ["f"], ["p"], keepdims=0),
            node("Sqrt", ["p"], ["q"]),
            node("Pow", ["x", "q"], ["y"]),
        ]
        arrays = {"two": np.array([2]), "four": np.array([4])}
        assert ops(prepared(build(nodes, arrays, x=("N", 4, 1, 9)), x=np.abs(normal(3, 4, 1, 9)))) == ["Pow"]

    def test_stale_declarations_prove_nothing(self) -> None:
        """The batch was made dynamic afterwards: what the file says inside is still of batch 1."""
        model = build(self.FLATTEN, self.ARRAYS, x=("N", 4, 5, 6))
        model.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, (1, 4, 5, 6)))
        assert ops(prepared(model)) == ["Relu", "Reshape"]


class TestClean:
    def test_dead_nodes_and_weights(self) -> None:
        nodes = [node("Relu", ["x"], ["y"]), node("Mul", ["x", "w"], ["dead"]), node("Neg", ["dead"], ["deader"])]
        graph = prepared(build(nodes, {"w": normal(6), "never": normal(2)}))
        assert ops(graph) == ["Relu"]
        assert not graph.params

    def test_optional_outputs(self) -> None:
        graph = prepared(build([node("MaxPool", ["x"], ["y", "indices"], kernel_shape=[2, 2])]))
        assert graph.nodes[0].outputs == ("y",)
        split = node("Split", ["x"], ["a", "y", "b"], axis=3)
        split.input.append("sizes")
        graph = prepared(build([split], {"sizes": np.array([1, 2, 3])}))
        assert graph.nodes[0].outputs == ("a", "y", "b")

    def test_initializers_listed_as_inputs(self) -> None:
        arrays = {"w": normal(4, 4, 1, 1), **statistics("bn", 4)}
        listed = [helper.make_tensor_value_info(k, TensorProto.FLOAT, a.shape) for k, a in arrays.items()]
        model = build([node("Conv", ["x", "w"], ["c"]), batchnorm("c", "y", "bn")], arrays, extra_inputs=listed)
        graph = prepared(model)
        assert ops(graph) == ["Conv"]
        assert [v.name for v in to_model(graph).graph.input] == ["x"]


def test_renaming_stops_where_a_subgraph_has_its_own() -> None:
    body = Graph(
        (Node("Neg", ("a",), ("b",)), Node("Add", ("b", "c"), ("o",))), (Value("a"),), (Value("o"),), {}, {}, {}
    )
    graph = Graph((Node("Loop", ("n", "", "a"), ("y",), {"body": body}),), (), (Value("y"),), {}, {}, {})
    (loop,) = rename(graph, {"a": "A", "b": "B", "c": "C", "y": "Y"}).nodes
    assert (loop.inputs, loop.outputs) == (("n", "", "A"), ("Y",))
    assert [n.inputs for n in loop.attrs["body"].nodes] == [("a",), ("b", "C")]


def test_nothing_to_do_gives_the_same_graph() -> None:
    graph = load(build([node("Relu", ["x"], ["y"])]))
    for apply in CLEANING:
        assert apply(graph) is graph
    assert bypass(graph, {}) is graph


def test_a_broken_node_is_left_for_tracing_to_report() -> None:
    nodes = [
        node("Slice", ["x", "a", "e", "ax"], ["s"]),
        node("Add", ["k", "a3"], ["bad"]),
        node("Reshape", ["s", "bad"], ["y"]),
    ]
    arrays = {
        "a": np.array([0]),
        "e": np.array([6]),
        "ax": np.array([9]),
        "k": np.array([1, 2]),
        "a3": np.array([1, 2, 3]),
    }
    graph = load(
        helper.make_model(
            helper.make_graph(
                nodes,
                "broken",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3))],
                [onnx.ValueInfoProto(name="y")],
                [numpy_helper.from_array(a, k) for k, a in arrays.items()],
            ),
            opset_imports=[helper.make_opsetid("", 17)],
        )
    )
    assert ops(prepare(graph)) == ["Slice", "Add", "Reshape"]


@pytest.mark.parametrize(
    ("name", "nodes"),
    # onnxruntime's ORT_ENABLE_BASIC leaves as many
    [("resnet50", 123), ("densenet121", 491), ("inception_v2", 168), ("shufflenet", 154), ("squeezenet", 65)],
)
def test_real_networks(name: str, nodes: int) -> None:
    graph = prepare(load(LIGHT / f"light_{name}.onnx"))
    assert len(graph.nodes) == nodes
    assert prepare(graph) is graph


def test_zoo() -> None:
    model = onnx.load(jq.zoo.path("fashion_resnet"))
    graph = prepare(load(model))
    assert Counter(ops(graph))["BatchNormalization"] == 0
    feeds = {"input": normal(4, 1, 28, 28)}
    np.testing.assert_allclose(
        onnxruntime_outputs(to_model(graph), feeds)[0], onnxruntime_outputs(model, feeds)[0], rtol=1e-5, atol=1e-5
    )
