"""`jq.passes.affine`."""

from __future__ import annotations

import numpy as np
import pytest

from jq.errors import ModelError
from jq.graph.read import load
from jq.passes.prepare import prepare
from jq.readings.tracing import trace
from tests.passes.models import build, node, normal, ops, prepared


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

    @pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
    def test_a_weight_without_channels_is_left_for_the_operator_to_refuse(self, op: str) -> None:
        graph = load(
            build([node("Conv", ["x", "w"], ["c"]), node(op, ["c", "k"], ["y"])], {"w": normal(4), "k": normal(4)})
        )
        with pytest.raises(ModelError, match="Conv"):
            trace(prepare(graph))(graph.params, {"x": normal(2, 4, 5, 6)})

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
