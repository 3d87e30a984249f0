"""Rewrites may be applied twice: the second application returns the graph itself."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import jq
from jq.graph import Graph
from jq.graph.read import load
from jq.npu.rewrites import FORMS, STRUCTURE
from tests.passes.models import batchnorm, build, node, statistics

REWRITES = {**STRUCTURE, **FORMS}


def shuffle(x: str, y: str) -> list[onnx.NodeProto]:
    parted = node("Transpose", [f"{y}5"], [f"{y}t"], perm=(0, 2, 1, 3, 4))
    return [node("Reshape", [x, "five"], [f"{y}5"]), parted, node("Reshape", [f"{y}t", "four"], [y])]


SMALL = {
    "activations": [
        node("LeakyRelu", ["x"], ["a"], alpha=0.1),
        node("Sigmoid", ["a"], ["b"]),
        node("HardSwish", ["b"], ["c"]),
        node("HardSigmoid", ["c"], ["d"], alpha=1 / 6),
        node("HardSigmoid", ["d"], ["y"], alpha=0.2),
    ],
    "pools": [
        node("AveragePool", ["x"], ["a"], kernel_shape=(3, 3), pads=(1, 1, 1, 1)),
        node("AveragePool", ["a"], ["b"], kernel_shape=(2, 3)),
        node("AveragePool", ["b"], ["c"], kernel_shape=(2, 2)),
        node("ReduceMean", ["c"], ["d"], axes=(2, 3)),
        node("ReduceMean", ["d"], ["e"], axes=(1,)),
        node("GlobalAveragePool", ["c"], ["f"]),
        node("Mul", ["e", "f"], ["y"]),
    ],
    "large pool": [node("GlobalAveragePool", ["x"], ["a"]), node("Identity", ["a"], ["y"])],
    "products": [
        node("Split", ["x"], ["l", "r"], axis=1),
        node("MatMul", ["l", "w"], ["p"]),
        node("Add", ["p", "bias"], ["y"]),
    ],
    "rows": [node("MatMul", ["x", "w"], ["p"]), node("Add", ["p", "bias"], ["y"])],
    "batchnorm": [batchnorm("x", "y", "n")],
    "flat mean": [node("ReduceMean", ["x"], ["y"], axes=(2, 3), keepdims=0)],
    "depthwise": [node("Conv", ["x", "deep"], ["y"], group=4)],
    "shuffle": [node("Conv", ["x", "deep"], ["c"], group=4), *shuffle("c", "y")],
    "clips": [node("Clip", ["x", "zero"], ["a"]), node("Conv", ["a", "o"], ["b"]), node("HardSigmoid", ["b"], ["y"])],
    "resizes": [
        node("Resize", ["x", "", "sides"], ["a"], mode="linear"),
        node("Resize", ["a", "", "sides"], ["b"], mode="nearest"),
        node("Conv", ["b", "o"], ["y"]),
    ],
    "pads": [
        node("Relu", ["x"], ["a"]),
        node("Pad", ["a", "ends", "zero"], ["b"]),
        node("MaxPool", ["b"], ["c"], kernel_shape=(3, 3)),
        node("Pad", ["c", "ends"], ["y"], mode="edge"),
    ],
    "concats": [
        node("Concat", ["x", "x"], ["a"], axis=1),
        node("Concat", ["x", "a"], ["b"], axis=-3),
        node("Concat", ["b", "x"], ["y"], axis=1),
    ],
    "gathers": [node("Gather", ["x", "two"], ["a"], axis=1), node("Relu", ["a"], ["y"])],
    "ordered shuffle": [node("Conv", ["x", "o"], ["c"]), *shuffle("c", "y")],
}


def graph_of(name: str) -> Graph:
    if name in jq.zoo.models():
        return load(jq.zoo.path(name))
    arrays = {"w": np.ones((18, 3), np.float32), "bias": np.ones(3, np.float32)} | statistics("n", 4)
    arrays |= {"deep": np.ones((4, 1, 1, 1), np.float32), "o": np.ones((4, 4, 1, 1), np.float32)}
    arrays |= {"five": np.array([2, 2, 2, 16, 18]), "four": np.array([2, 4, 16, 18])}
    arrays |= {"zero": np.float32(0), "sides": np.float32([1, 1, 2, 2]), "ends": np.array([0, 0, 1, 2, 0, 0, 2, 1])}
    arrays |= {"two": np.array([1, 3])}
    shapes = {"large pool": (2, 4, 40, 50), "rows": ("n", 18)}
    return load(build(SMALL[name], arrays, x=shapes.get(name, (2, 4, 16, 18))))


@pytest.mark.parametrize("name", [*SMALL, *jq.zoo.models()])
@pytest.mark.parametrize("rewrite", REWRITES)
def test_a_second_application_is_the_identity(name: str, rewrite: str) -> None:
    once = REWRITES[rewrite](graph_of(name))
    assert REWRITES[rewrite](once) is once


@pytest.mark.parametrize("name", [*SMALL, *jq.zoo.models()])
def test_all_in_their_order_and_then_all_again(name: str) -> None:
    graph = graph_of(name)
    for rewrite in (*STRUCTURE.values(), *FORMS.values()):
        graph = rewrite(graph)
    again = graph
    for rewrite in (*STRUCTURE.values(), *FORMS.values()):
        again = rewrite(again)
    assert again is graph


def test_each_rewrite_has_a_graph_that_it_changes() -> None:
    graphs = [graph_of(name) for name in SMALL]
    assert {r for r, rewrite in REWRITES.items() if any(rewrite(g) is not g for g in graphs)} == set(REWRITES)
