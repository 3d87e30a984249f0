"""All passes together, on real topologies and on odd graphs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq.zoo
from jq.graph import Graph, Node, Value
from jq.graph.edit import bypass, rename
from jq.graph.read import load
from jq.graph.write import to_model
from jq.passes import CLEANING
from jq.passes.prepare import prepare
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal, ops

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


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
