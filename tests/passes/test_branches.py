"""`jq.passes.branches`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.passes.models import build, node, normal, ops, prepared


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
        assert graph.nodes[1].attrs["then_branch"].captured == {"z", "w"}
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
