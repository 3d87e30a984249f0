"""`jq.passes.constants`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import TensorProto

from jq.graph.read import load
from jq.passes.prepare import prepare
from tests.passes.models import build, node, normal, ops, prepared


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
