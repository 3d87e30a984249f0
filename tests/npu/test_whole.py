"""Rewrites that keep a network in one piece on the NPU (`KEEPS_WHOLE`, `QuantConfig.whole`): exact, and whole."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import jq
from jq.graph.read import load
from jq.npu.rewrites import KEEPS_WHOLE, STRUCTURE
from tests.conftest import onnxruntime_outputs
from tests.npu import structures
from tests.npu.test_structure import rewritten
from tests.passes.models import build, node, normal, ops

XINT8 = jq.presets["XINT8"]


def shuffle(x: str, y: str, arrays: dict[str, np.ndarray], groups: int, channels: int = 6) -> list[onnx.NodeProto]:
    arrays |= {f"{y}_five": np.array([2, groups, channels // groups, 5, 6]), f"{y}_four": np.array([2, channels, 5, 6])}
    return [
        node("Reshape", [x, f"{y}_five"], [f"{y}_apart"], f"{y}_first"),
        node("Transpose", [f"{y}_apart"], [f"{y}_turned"], f"{y}_second", perm=(0, 2, 1, 3, 4)),
        node("Reshape", [f"{y}_turned", f"{y}_four"], [y], f"{y}_third"),
    ]


def conv(x: str, y: str, arrays: dict[str, np.ndarray], reads: int, writes: int, kernel: int = 1, group: int = 1):
    arrays |= {f"{y}_w": normal(writes, reads // group, kernel, kernel), f"{y}_b": normal(writes)}
    return node("Conv", [x, f"{y}_w", f"{y}_b"], [y], y, group=group, pads=[kernel // 2] * 4)


def test_the_layer_in_front_makes_channels_in_order_with_every_bit_kept():
    arrays: dict[str, np.ndarray] = {}
    layers = [conv("x", "a", arrays, 4, 6), node("Relu", ["a"], ["r"]), conv("r", "d", arrays, 6, 6, 3, group=6)]
    model = build([*layers, *shuffle("d", "s", arrays, 2), node("Sigmoid", ["s"], ["y"])], arrays)
    assert ops(rewritten("shuffle_to_weights", model)) == ["Conv", "Relu", "Conv", "Sigmoid"]


def test_the_layers_behind_read_channels_in_order():
    arrays: dict[str, np.ndarray] = {}
    front = [conv("x", "a", arrays, 4, 6, group=2), *shuffle("a", "s", arrays, 3)]  # groups make channels of their own
    behind = [conv("s", "d", arrays, 6, 6, 3, group=6), conv("d", "e", arrays, 6, 3), conv("s", "f", arrays, 6, 3)]
    model = build([*front, *behind, node("Add", ["e", "f"], ["y"])], arrays)
    assert ops(rewritten("shuffle_to_weights", model, rtol=1e-5)) == ["Conv"] * 4 + ["Add"]


@pytest.mark.parametrize("last", ["group", "output", "sum"])
def test_else_a_shuffle_is_a_convolution_of_every_bit(last):
    arrays: dict[str, np.ndarray] = {}
    nodes = [conv("x", "a", arrays, 4, 6, group=2), *shuffle("a", "s" if last != "output" else "y", arrays, 2)]
    if last == "group":
        nodes.append(conv("s", "y", arrays, 6, 4, group=2))
    if last == "sum":
        nodes.append(node("Add", ["s", "a"], ["y"]))
    model = build(nodes, arrays)
    graph = load(model)
    assert STRUCTURE["shuffle_to_weights"](graph) is graph
    assert ops(rewritten("shuffle_to_conv", model))[:2] == ["Conv", "Conv"]


def test_weights_that_others_read_stay_for_them():
    arrays: dict[str, np.ndarray] = {}
    nodes = [conv("x", "a", arrays, 4, 6), *shuffle("a", "s", arrays, 2)]
    twin = node("Conv", ["x", "a_w", "a_b"], ["t"])
    made = rewritten("shuffle_to_weights", build([*nodes, twin, node("Add", ["s", "t"], ["y"])], arrays))
    assert ops(made) == ["Conv", "Conv", "Add"] and len(made.params) == 4


def test_other_transposes_stay():
    arrays = {"five": np.array([2, 2, 2, 5, 6]), "four": np.array([2, 4, 5, 6])}
    for perm, last in (((0, 1, 2, 4, 3), "four"), ((0, 2, 1, 3, 4), "other")):
        arrays["other"] = np.array([2, 4, 6, 5])
        nodes = [node("Reshape", ["x", "five"], ["a"]), node("Transpose", ["a"], ["b"], perm=perm)]
        graph = load(build([*nodes, node("Reshape", ["b", last], ["y"])], arrays))
        assert all(STRUCTURE[name](graph) is graph for name in KEEPS_WHOLE)


def test_a_depthwise_1x1_layer_as_an_ordinary_one_of_every_bit():
    arrays = {"w": normal(4, 1, 1, 1), "b": normal(4)}
    made = rewritten("depthwise_to_dense", build([node("Conv", ["x", "w", "b"], ["y"], group=4)], arrays))
    assert made.nodes[0].attrs.get("group", 1) == 1 and made.params[made.nodes[0].inputs[1]].shape == (4, 4, 1, 1)


def test_a_mean_that_drops_dims_as_a_pool():
    model = build([node("ReduceMean", ["x"], ["y"], axes=(-1, 2), keepdims=0)])
    assert ops(rewritten("reduce_mean_to_flat_pool", model, rtol=1e-6)) == ["GlobalAveragePool", "Flatten"]


@pytest.mark.parametrize("name", ["inverted_bottleneck", "shuffled", "dense", "residual"])
@pytest.mark.parametrize("format", ["XINT8", "A8W8"])
def test_structures_that_break_are_whole(name, format):
    model = getattr(structures, name)()
    forecast = jq.npu.forecast(model, config=jq.presets[format].replace(whole=0.0))
    assert forecast.counts["cpu"] == 0 and (forecast.subgraphs, forecast.subgraphs_run) == (1, 1)


def test_a_permutation_keeps_every_code():
    net = structures.Net()
    x = net.op("Relu", net.conv(net.op("Relu", net.conv("x", 3, 8, 3)), 8, 8, group=2))
    five, four = net.array("five", [1, 2, 4, 8, 8], np.int64), net.array("four", [1, 8, 8, 8], np.int64)
    x = net.op("Reshape", net.op("Transpose", net.op("Reshape", x, five), perm=[0, 2, 1, 3, 4]), four)
    model = net.classify(net.op("Relu", net.conv(x, 8, 8, group=2)), 8)
    data = np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)
    bare = XINT8.replace(guard=None, cle=False, bias_correction=False)  # equalization stops at five dims
    plain, whole = (jq.quantize(model, data, bare.replace(whole=w)).model for w in (None, 0.0))
    assert "Transpose" in ops(load(plain)) and "Transpose" not in ops(load(whole))
    for sample in 3 * data:
        feeds = {"x": sample[None]}
        np.testing.assert_array_equal(*(onnxruntime_outputs(m, feeds)[0] for m in (plain, whole)))


def test_nothing_of_it_by_default_and_under_strict_quark():
    model, data = structures.shuffled(1), np.ones((2, 3, 8, 8), np.float32)
    assert not {*KEEPS_WHOLE} & {*XINT8.rewrites}
    strict = XINT8.replace(strict_quark=True)
    for config in (XINT8, strict.replace(whole=1.0, rewrites=tuple(STRUCTURE))):
        assert "Transpose" in ops(load(jq.quantize(model, data, config).model))


def test_one_rewrite_by_its_name():
    graph = jq.prepare(jq.load(structures.shuffled(1)), XINT8.replace(rewrites=("shuffle_to_conv",)))
    assert "Transpose" not in ops(graph) and "ReduceMean" in ops(graph)


def test_advice_names_the_option():
    forecast = jq.npu.forecast(structures.inverted_bottleneck(1), config="XINT8")
    assert "whole=0 " in next(a.what for a in forecast.advice if a.change == "relu6_to_relu")


def test_lint_names_what_is_done():
    model = structures.shuffled(2)
    rules = [(f.severity, f.message) for f in jq.lint(model, XINT8.replace(whole=0.0)) if f.rule == "keeps-whole"]
    assert [severity for severity, _ in rules] == ["note"] * len(rules)
    names = [message.split()[0] for _, message in rules]
    assert names == ["reduce_mean_to_flat_pool", "shuffle_to_weights", "shuffle_to_conv"]
    assert not [f for f in jq.lint(model, XINT8) if f.rule == "keeps-whole"]
