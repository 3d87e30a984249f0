"""Rewrites that keep a network in one piece on the NPU (`KEEPS_WHOLE`, `QuantConfig.whole`): exact, and whole."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import jq
from jq.graph.read import load
from jq.graph.write import to_model
from jq.npu.rewrites import KEEPS_WHOLE, STRUCTURE
from tests.conftest import onnxruntime_outputs
from tests.npu import structures
from tests.npu.test_structure import rewritten, untouched
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
        assert all(STRUCTURE[name](graph) is graph for name in KEEPS_WHOLE if name != "transpose_in_four")


def test_a_depthwise_1x1_layer_as_an_ordinary_one_of_every_bit():
    arrays = {"w": normal(4, 1, 1, 1), "b": normal(4)}
    made = rewritten("depthwise_to_dense", build([node("Conv", ["x", "w", "b"], ["y"], group=4)], arrays))
    assert made.nodes[0].attrs.get("group", 1) == 1 and made.params[made.nodes[0].inputs[1]].shape == (4, 4, 1, 1)


def test_a_mean_that_drops_dims_as_a_pool():
    model = build([node("ReduceMean", ["x"], ["y"], axes=(-1, 2), keepdims=0)])
    assert ops(rewritten("reduce_mean_to_flat_pool", model, rtol=1e-6)) == ["GlobalAveragePool", "Flatten"]


def test_a_clip_that_nothing_exceeds_is_a_relu():
    arrays = {"zero": np.float32(0), "most": np.finfo(np.float32).max, "six": np.float32(6)}
    for high in ([], ["most"]):
        assert ops(rewritten("clip_to_relu", build([node("Clip", ["x", "zero", *high], ["y"])], arrays))) == ["Relu"]
    old = build([node("Clip", ["x"], ["y"], min=0.0)], opset=10)
    assert ops(rewritten("clip_to_relu", old)) == ["Relu"]
    for ends in (["zero", "six"], ["", "six"], ["six"]):
        untouched("clip_to_relu", build([node("Clip", ["x", *ends], ["y"])], arrays))


@pytest.mark.parametrize("layer", ["Conv", "Gemm"])
def test_a_hard_sigmoid_in_the_weights_of_its_layer(layer):
    arrays = {"w": normal(3, 4, 1, 1) if layer == "Conv" else normal(4, 3), "b": normal(3)}
    x = (2, 4, 5, 6) if layer == "Conv" else (7, 4)
    gate = node("HardSigmoid", ["c"], ["y"], alpha=0.25, beta=0.5)
    for inputs in (["x", "w", "b"], ["x", "w"]):
        model = build([node(layer, inputs, ["c"]), gate], arrays, x=x)
        if layer == "Gemm" and len(inputs) < 3:
            untouched("hard_sigmoid_to_clip", model)
            continue
        made = STRUCTURE["hard_sigmoid_to_clip"](load(model))
        assert ops(made) == [layer, "Clip"]
        feeds = {"x": np.random.default_rng(1).standard_normal(x).astype(np.float32)}
        want, have = (onnxruntime_outputs(m, feeds)[0] for m in (model, to_model(made)))
        np.testing.assert_allclose(have, np.minimum(want, 127 / 128), rtol=1e-5, atol=1e-6)  # what the chip has
    twice = build([node(layer, ["x", "w", "b"], ["c"]), node("HardSigmoid", ["c"], ["g"]), node("Mul", ["c", "g"], ["y"])],
                  arrays, x=x)  # fmt: skip
    untouched("hard_sigmoid_to_clip", twice)


def test_hard_gates_are_whole_in_the_format_that_lists_hard_swish_alone():
    data = np.random.default_rng(0).standard_normal((16, 3, 8, 8)).astype(np.float32)
    outputs = [onnxruntime_outputs(structures.hard_gates(), {"x": s[None]})[0] for s in data]
    kept = {}
    for whole in (None, 0.0):
        result = jq.quantize(structures.hard_gates(), data, XINT8.replace(whole=whole, guard=None))
        forecast = jq.npu.forecast(result.model)
        assert (forecast.subgraphs == 1 and forecast.counts["cpu"] == 0) == (whole == 0.0)
        made = [onnxruntime_outputs(result.model, {"x": s[None]})[0] for s in data]
        kept[whole] = 10 * np.log10(np.square(outputs).sum() / np.square(np.subtract(made, outputs)).sum())
    assert kept[0.0] > kept[None] - 1
    for format in ("A8W8", "A16W8"):
        graph = jq.prepare(load(structures.hard_gates()), jq.presets[format].replace(whole=0.0))
        assert ops(graph).count("HardSigmoid") == 3


_SIDES = {"sizes": [2, 4, 13, 7], "scales": [1.0, 1.0, 2.0, 3.0], "less": [2, 4, 3, 2], "height": [2, 4, 10, 6]}


@pytest.mark.parametrize("sides", sorted(_SIDES))
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
def test_a_resize_that_interpolates_as_matrix_products(sides, mode, coordinates):
    arrays = {"sides": np.array(_SIDES[sides], np.float32 if sides == "scales" else np.int64), "w": normal(3, 4, 1, 1)}
    given = ["", "sides"] if sides == "scales" else ["", "", "sides"]
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    layer = node("Conv", ["r", "w"], ["y"])
    made = rewritten(
        "resize_to_matmul", build([node("Resize", ["x", *given], ["r"], **attrs), layer], arrays), rtol=1e-5
    )
    along_height = ["Transpose", "MatMul", "Transpose"]
    assert ops(made) == [*(["MatMul"] if sides != "height" else []), *along_height, "Conv"]


def test_a_resize_of_opset_10_and_one_against_aliasing():
    arrays = {"scales": np.array([1, 1, 2, 2], np.float32), "w": normal(3, 4, 1, 1)}
    layer = node("Conv", ["r", "w"], ["y"])
    old = build([node("Resize", ["x", "scales"], ["r"], mode="linear"), layer], arrays, opset=10)
    assert "MatMul" in ops(rewritten("resize_to_matmul", old, rtol=1e-5))
    arrays["half"] = np.array([1, 1, 0.5, 0.5], np.float32)
    smooth = build([node("Resize", ["x", "", "half"], ["r"], mode="linear", antialias=1), layer], arrays, opset=18)
    assert "MatMul" in ops(rewritten("resize_to_matmul", smooth, rtol=1e-5))


def test_other_resizes_stay():
    arrays = {"scales": np.array([1, 1, 2, 2], np.float32), "w": normal(3, 4, 1, 1), "roi": np.zeros(8, np.float32)}
    layer = node("Conv", ["r", "w"], ["y"])
    untouched("resize_to_matmul", build([node("Resize", ["x", "", "scales"], ["r"], mode="nearest"), layer], arrays))
    last = [node("Conv", ["x", "w"], ["c"]), node("Resize", ["c", "", "scales"], ["y"], mode="linear")]
    untouched("resize_to_matmul", build(last, arrays))  # nothing for the NPU follows it
    attrs = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    untouched("resize_to_matmul", build([node("Resize", ["x", "roi", "scales"], ["r"], **attrs), layer], arrays))


def pyramid(mode: str) -> onnx.ModelProto:
    """Two scales of an image, the coarser enlarged and joined to the finer."""
    net = structures.Net()
    fine = net.op("Relu", net.conv("x", 3, 8, 3))
    coarse = net.op("Relu", net.conv(net.op("MaxPool", fine, kernel_shape=[2, 2], strides=[2, 2]), 8, 8, 3))
    coarse = net.op("Resize", coarse, "", net.array("scales", [1, 1, 2, 2]), mode=mode)
    x = net.op("Concat", fine, coarse, axis=1)
    return net.classify(net.op("Relu", net.conv(x, 16, 8, 3)), 8)


def test_a_pyramid_that_interpolates_is_whole_and_loses_no_more():
    data = np.random.default_rng(0).standard_normal((16, 3, 8, 8)).astype(np.float32)
    kept = {}
    for whole in (None, 0.0):
        result = jq.quantize(pyramid("linear"), data, XINT8.replace(whole=whole))
        forecast = jq.npu.forecast(result.model)
        assert (forecast.counts["cpu"] == 0) == (whole == 0) and forecast.subgraphs == (2 if whole is None else 1)
        float_, made = (
            np.concatenate([onnxruntime_outputs(m, {"x": s[None]})[0] for s in data])
            for m in (pyramid("linear"), result.model)
        )
        kept[whole] = 10 * np.log10(np.square(float_).sum() / np.square(float_ - made).sum())
    assert kept[0.0] > kept[None] - 1.5
    change = next(a for a in jq.npu.forecast(pyramid("linear")).advice if a.change == "resize_to_matmul")
    assert change.counts["cpu"] == 0 and change.subgraphs == 1


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric"])
def test_a_resize_that_repeats_pixels_as_depth_to_space(times, coordinates):
    arrays = {"scales": np.array([1, 1, times, times], np.float32), "w": normal(3, 4, 1, 1)}
    attrs = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": "floor"}
    if coordinates == "half_pixel":
        attrs["nearest_mode"] = "round_prefer_floor"
    layer = node("Conv", ["r", "w"], ["y"])
    made = rewritten(
        "resize_to_depth_to_space", build([node("Resize", ["x", "", "scales"], ["r"], **attrs), layer], arrays)
    )
    assert ops(made) == ["Concat", "DepthToSpace", "Conv"]
    attrs["nearest_mode"] = "ceil"  # takes the next pixel
    untouched("resize_to_depth_to_space", build([node("Resize", ["x", "", "scales"], ["r"], **attrs), layer], arrays))


def test_resizes_of_16_bits_are_whole_and_keep_every_code():
    data = np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)
    bare = jq.presets["A16W8"].replace(guard=None, cle=False, bias_correction=False)
    plain, whole = (jq.quantize(pyramid("nearest"), data, bare.replace(whole=w)).model for w in (None, 0.0))
    assert jq.npu.forecast(plain).counts["cpu"] > 0
    assert (jq.npu.forecast(whole).counts["cpu"], jq.npu.forecast(whole).subgraphs) == (0, 1)
    advice = {a.change: a for a in jq.npu.forecast(plain).advice}
    assert advice["resize_to_depth_to_space"].counts["cpu"] == 0
    for sample in data:
        feeds = {"x": sample[None]}
        np.testing.assert_array_equal(*(onnxruntime_outputs(m, feeds)[0] for m in (plain, whole)))
    assert "Resize" in ops(jq.prepare(load(pyramid("nearest")), XINT8.replace(whole=0.0)))  # which lists it


def test_zeros_around_what_is_never_negative_are_the_pools():
    arrays = {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 0]), "zero": np.float32(0), "one": np.float32(1)}

    def net(first: str, value: str = "zero", **attrs: object) -> onnx.ModelProto:
        front = node(first, ["x"], ["r"])
        pool = node("MaxPool", ["p"], ["y"], kernel_shape=(3, 3), strides=(2, 2), **attrs)
        return build([front, node("Pad", ["r", "pads", value], ["p"]), pool], arrays)

    made = rewritten("pad_to_pool", net("Relu"))
    assert ops(made) == ["Relu", "MaxPool"] and made.nodes[-1].attrs["pads"] == (1, 1, 1, 0)
    for other in (net("Tanh"), net("Relu", "one"), net("Relu", ceil_mode=1)):
        untouched("pad_to_pool", other)


@pytest.mark.parametrize("opset", [10, 17])
def test_an_edge_of_a_few_pixels_in_steps_of_one(opset):
    ends = [0, 0, 2, 1, 0, 0, 0, 3]
    given = {"pads": ends} if opset < 11 else {}
    model = build([node("Pad", ["x", *([] if given else ["pads"])], ["y"], mode="edge", **given)],
                  {} if given else {"pads": np.array(ends)}, opset=opset)  # fmt: skip
    assert ops(rewritten("pad_by_ones", model)) == ["Pad"] * 3
    for mode, amount in (("edge", 1), ("reflect", 2), ("edge", 9)):
        arrays = {"pads": np.array([0, 0, amount, 0, 0, 0, 0, 0])}
        if mode == "edge" or amount < 5:
            untouched("pad_by_ones", build([node("Pad", ["x", "pads"], ["y"], mode=mode)], arrays))


def test_concats_of_concats_are_one():
    inner = [node("Relu", ["x"], ["r"]), node("Concat", ["x", "r"], ["a"], axis=1)]
    made = rewritten("flat_concat", build([*inner, node("Concat", ["r", "a", "x"], ["y"], axis=-3)]))
    assert ops(made) == ["Relu", "Concat"] and made.nodes[-1].inputs == ("r", "x", "r", "x")
    twice = [*inner, node("Concat", ["a", "x"], ["b"], axis=1), node("Concat", ["b", "r"], ["y"], axis=1)]
    assert ops(rewritten("flat_concat", build(twice))) == ["Relu", "Concat"]
    untouched("flat_concat", build([*inner, node("Concat", ["a", "a"], ["y"], axis=1)]))
    untouched("flat_concat", build([*inner, node("Concat", ["a", "a"], ["y"], axis=2)]))
    shared = [*inner, node("Concat", ["a", "x"], ["b"], axis=1), node("ReduceMax", ["a"], ["m"])]
    untouched("flat_concat", build([*shared, node("Add", ["b", "m"], ["y"])]))


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
