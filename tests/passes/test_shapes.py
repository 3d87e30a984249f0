"""`jq.passes.shapes`."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.passes.models import build, node, normal, ops, prepared


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
