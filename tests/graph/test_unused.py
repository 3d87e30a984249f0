"""`jq.graph.unused`."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from jq.graph.write import to_model
from tests.passes.models import batchnorm, build, node, normal, ops, prepared, statistics


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
