"""`jq.passes.affine.fold_batchnorm`."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from jq.graph.read import load
from jq.passes.prepare import prepare
from tests.passes.models import batchnorm, build, node, normal, ops, prepared, statistics


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
