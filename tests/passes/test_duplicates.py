"""`jq.passes.duplicates`."""

from __future__ import annotations

import numpy as np

from tests.passes.models import build, node, normal, ops, prepared


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
