"""`jq.passes.biases`: a bias of its own for each node that adds one."""

from __future__ import annotations

import numpy as np

import jq
from jq.passes.biases import own_biases
from tests.passes.models import build, node, normal

ARRAYS = {"w1": normal(4, 4, 1, 1), "w2": normal(4, 4, 1, 1, seed=1), "b": normal(4)}


def test_the_second_reader_gets_a_copy() -> None:
    nodes = [
        node("Conv", ["x", "w1", "b"], ["a"], name="first"),
        node("Conv", ["a", "w2", "b"], ["y"], name="second"),
    ]
    graph = own_biases(jq.load(build(nodes, ARRAYS)))
    assert [n.inputs[2] for n in graph.nodes] == ["b", "second.bias"]
    np.testing.assert_array_equal(graph.params["second.bias"], ARRAYS["b"])
    assert own_biases(graph) is graph


def test_what_nobody_shares_stays() -> None:
    nodes = [node("Conv", ["x", "w1", "b"], ["a"]), node("Conv", ["a", "w2"], ["y"])]
    graph = jq.load(build(nodes, ARRAYS))
    assert own_biases(graph) is graph
