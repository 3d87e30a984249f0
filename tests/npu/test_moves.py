"""Transposes of more than four dims, and Gathers, as what the NPU has: elements move alone, so all is exact."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import jq
from jq.graph.read import load
from jq.npu.rewrites.moves import _swaps
from tests.npu.test_structure import rewritten, untouched
from tests.passes.models import build, node, ops


def through(shape, perm, read, made, opset=17):
    """A Transpose of a shape between Reshapes from and to others."""
    arrays = {"apart": np.array(shape), "together": np.array(made)}
    nodes = [node("Reshape", ["x", "apart"], ["a"]), node("Transpose", ["a"], ["b"], perm=perm)]
    return build([*nodes, node("Reshape", ["b", "together"], ["y"])], arrays, x=read, opset=opset)


def ranks(graph) -> set[int]:
    return {len(graph.values[o].shape) for n in graph.nodes for o in n.outputs}


@pytest.mark.parametrize(
    ("shape", "perm", "expected"),
    [
        ((1, 2, 3, 4, 5), (0, 2, 1, 3, 4), 1),  # a channel shuffle
        ((1, 3, 2, 2, 4, 5), (0, 1, 4, 2, 5, 3), 2),  # depth to space, as exporters write it out
        ((1, 2, 4, 3, 4, 5), (0, 1, 3, 2, 4, 5), 1),  # windows
        ((7, 2, 3, 4, 5), (2, 0, 3, 1, 4), 2),  # queries, keys and values of windows
        ((2, 3, 2, 3, 2), (4, 3, 2, 1, 0), 3),
        ((1, 1, 2, 3, 1), (4, 1, 0, 2, 3), 0),
    ],
)
@pytest.mark.parametrize("opset", [5, 13, 21])
def test_transposes_have_four_dims(shape, perm, expected, opset):
    size = math.prod(shape)
    graph = rewritten("transpose_in_four", through(shape, perm, (size, 1), (1, size), opset))
    assert ops(graph).count("Transpose") == expected and max(ranks(graph)) <= 4


def test_one_size_may_be_free():
    graph = rewritten("transpose_in_four", through((-1, 2, 3, 4, 5), (0, 2, 1, 3, 4), ("N", 6, 4, 5), (-1, 6, 4, 5)))
    assert ops(graph) == ["Reshape", "Transpose", "Reshape"] and ranks(graph) == {4}


def test_squeezes_are_regroupings_too():
    arrays = {"first": np.array([0]), "last": np.array([-2])}
    nodes = [
        node("Unsqueeze", ["x", "first"], ["a"]),
        node("Transpose", ["a"], ["b"], perm=(3, 1, 2, 0, 4)),
        node("Squeeze", ["b", "last"], ["y"]),
    ]
    graph = rewritten("transpose_in_four", build(nodes, arrays, x=(4, 5, 3, 6)))
    assert ops(graph) == ["Transpose"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, -1)])
def test_queries_keys_and_values_are_slices(order):
    arrays = {"apart": np.array([1, 5, 3, 2, 4])} | {f"i{i}": np.array(i) for i in order}
    nodes = [node("Reshape", ["x", "apart"], ["a"]), node("Transpose", ["a"], ["b"], perm=(2, 0, 3, 1, 4))]
    taken = [node("Gather", ["b", f"i{i}"], [f"t{n}"], axis=0) for n, i in enumerate(order)]
    model = build([*nodes, *taken], arrays, x=(1, 5, 24), outputs=[f"t{n}" for n in range(len(order))])
    graph = rewritten("transpose_in_four", model)
    assert ops(graph) == ["Reshape", "Transpose", *["Slice", "Reshape"] * len(order)] and max(ranks(graph)) == 4


def test_what_stays():
    five = np.array([2, 2, 2, 5, 6])
    turned = node("Transpose", ["a"], ["b"], perm=(0, 2, 1, 3, 4))
    untouched("transpose_in_four", build([node("Transpose", ["x"], ["y"], perm=(0, 2, 1, 3))], x=(2, 3, 4, 5)))
    apart = node("Reshape", ["x", "five"], ["a"])
    untouched("transpose_in_four", build([apart, node("Transpose", ["a"], ["y"])], {"five": five}, x=(2, 4, 5, 6)))
    relu = [apart, turned, node("Relu", ["b"], ["y"])]  # computes in five dims
    untouched("transpose_in_four", build(relu, {"five": five}, x=(2, 4, 5, 6)))
    gathers = [apart, turned, *(node("Gather", ["b", "i"], [o], axis=a) for o, a in (("y", 0), ("z", 1)))]
    untouched("transpose_in_four", build(gathers, {"five": five, "i": np.array(1)}, x=(2, 4, 5, 6), outputs="yz"))


def test_swaps_make_every_order_of_five():
    for order in itertools.permutations(range(5)):
        here = tuple(range(5))
        swaps = _swaps(order)
        for i, j, k in swaps:
            here = here[:i] + here[j:k] + here[i:j] + here[k:]
        assert here == order and len(swaps) <= 3


@pytest.mark.parametrize(
    ("places", "axis", "expected"),
    [
        (1, 1, ["Slice", "Squeeze"]),
        (-1, -1, ["Slice", "Squeeze"]),
        ([2], 1, ["Slice"]),
        ([1, 3], 1, ["Slice"]),
        ([3, 2, 1, 0], 1, ["Slice"]),
        ([-1, 2], 1, ["Slice"]),
        ([0, 1, 3], 1, None),
        ([1, 1], 1, None),
        ([[0, 1]], 1, None),
    ],
)
@pytest.mark.parametrize("opset", [9, 11, 13, 17])
def test_gathers_at_equal_distances_are_slices(places, axis, expected, opset):
    if opset < 11 and (axis < 0 or np.min(places) < 0):
        pytest.skip("they are not negative there")
    model = build([node("Gather", ["x", "i"], ["y"], axis=axis)], {"i": np.array(places)}, x=(2, 4, 3), opset=opset)
    if expected is None or opset < 10:
        untouched("gather_to_slice", model)
    else:
        assert ops(rewritten("gather_to_slice", model)) == expected


def test_gathers_that_are_not_known_stay():
    index = node("ArgMax", ["x"], ["i"], axis=1, keepdims=0)
    untouched("gather_to_slice", build([index, node("Gather", ["x", "i"], ["y"], axis=0)], x=(2, 4)))
    graph = load(build([node("Gather", ["x", "i"], ["y"], axis=1)], {"i": np.array(1)}, x=(2, 4)))
    for attrs in ({"axis": 7}, {"axis": -3}):
        broken = graph.replace(nodes=(graph.nodes[0].replace(attrs=attrs),))
        assert jq.npu.rewrites.STRUCTURE["gather_to_slice"](broken) is broken
