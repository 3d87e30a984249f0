"""`jq.passes.identity`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import TensorProto, helper

from jq.graph.read import load
from jq.passes.prepare import prepare
from tests.passes.models import build, node, normal, ops, prepared


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
