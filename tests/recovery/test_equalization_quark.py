"""`jq.equalize` against Quark's own result, its equations by hand, and onnxruntime: the function stays."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.passes.prepare import prepare
from jq.recovery.equalization import equalize_as_quark as equalize
from jq.recovery.equalization.quark import (
    bias_column,
    equalize_stem,
    find_chains,
    pair_factors,
    stem_factors,
    triple_factors,
)
from tests.conftest import SHARED, onnxruntime_outputs
from tests.passes.models import batchnorm, build, node, normal, ops, statistics

f32 = np.float32


def uneven(*shape, seed=0):
    """Weights with channels of very different ranges."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.normal(0, 1.5, (shape[0], *(1,) * (len(shape) - 1))))
    return (rng.standard_normal(shape) * rows).astype(f32)


def equalized(model, **options):
    """The equalized graph, after its outputs were compared with the original's: in onnxruntime, and traced."""
    graph = prepare(jq.load(model))
    result = equalize(graph, **options)
    feeds = {
        v.name: np.random.default_rng(1)
        .standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim])
        .astype(f32)
        for v in model.graph.input
    }
    exported = jq.to_model(result)
    onnx.checker.check_model(exported)
    traced = jq.trace(result)(result.params, feeds)
    found = onnxruntime_outputs(exported, feeds)
    for value, want, have in zip(graph.outputs, onnxruntime_outputs(model, feeds), found, strict=True):
        for array in (have, traced[value.name]):
            np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    return result


def chains(graph):
    return [[layer.node.name for layer in chain] for chain in find_chains(graph)]


def conv(source, name, arrays, outputs, inputs, *, kernel=3, group=1, bias=True, seed=0):
    """A Conv whose arrays are put into `arrays`."""
    arrays[f"{name}.w"] = uneven(outputs, inputs // group, kernel, kernel, seed=seed)
    if bias:
        arrays[f"{name}.b"] = normal(outputs, seed=seed + 1)
    names = [source, f"{name}.w", *([f"{name}.b"] if bias else [])]
    return node("Conv", names, [name], name, group=group, pads=[kernel // 2] * 4)


def between(*middle, bias=True):
    """Two Convs, and from "a" to "m" what stands between."""
    arrays = {}
    return build([conv("x", "a", arrays, 5, 4, bias=bias), *middle, conv("m", "y", arrays, 3, 5, seed=7)], arrays)


@pytest.mark.skipif(SHARED is None, reason="shared/spec with Quark's reference models is not here")
def test_codes_are_quarks():
    folder = SHARED / "quark_reference"
    weights = json.loads((folder / "cle.XINT8_cle.json").read_text())["weights"]
    model = onnx.load(folder / "cle.XINT8_cle.onnx")
    theirs = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    graph = prepare(jq.load(folder / "cle.onnx"))
    ours = equalize(graph)
    assert {f"{k}_quantized" for k in ours.params} == weights.keys()
    others = 0
    for name in ours.params:
        codes, scale = theirs[f"{name}_quantized"], f32(weights[f"{name}_quantized"]["scale"])
        np.testing.assert_array_equal(np.clip(np.rint(ours.params[name] / scale), -128, 127), codes, err_msg=name)
        others += not np.array_equal(np.clip(np.rint(graph.params[name] / scale), -128, 127), codes)
    assert others == 14  # the codes would tell: without equalization all but the last two biases have others


class TestFunction:
    def test_conv_relu_conv(self):
        for bias in (True, False):
            model = between(node("Relu", ["a"], ["m"]), bias=bias)
            graph = equalized(model)
            assert ops(graph) == ["Conv", "Relu", "Conv"]
            assert [np.array_equal(graph.params[k], jq.load(model).params[k]) for k in ("a.w", "y.w")] == [False, False]

    @pytest.mark.parametrize(
        "middle",
        [
            [node("LeakyRelu", ["a"], ["m"], alpha=0.3)],
            [node("Pad", ["a", "pads"], ["m"])],
            [node("Pad", ["a", "pads"], ["m"], mode="reflect")],
            [node("Pad", ["a", "pads"], ["r"]), node("Relu", ["r"], ["m"])],
            [node("ReduceMean", ["a"], ["m"], axes=[-1, 2])],
        ],
        ids=["LeakyRelu", "Pad", "reflect", "Pad-Relu", "ReduceMean"],
    )
    def test_passed_through(self, middle):
        model = between(*middle)
        model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 1, 2, 0, 0, 0, 1]), "pads"))
        graph = equalized(model)
        assert chains(graph) == [["a", "y"]]
        assert not np.array_equal(graph.params["a.w"], jq.load(model).params["a.w"])

    @pytest.mark.parametrize(
        "middle",
        [
            [node("Clip", ["a", "low", "high"], ["m"])],
            [node("PRelu", ["a", "low"], ["m"])],
            [node("Add", ["a", "a"], ["m"])],
            [node("Relu", ["a"], ["r"]), node("Add", ["a", "r"], ["m"])],
            [node("MaxPool", ["a"], ["m"], kernel_shape=[2, 2])],
            [node("AveragePool", ["a"], ["m"], kernel_shape=[2, 2])],
            [node("GlobalAveragePool", ["a"], ["m"])],
            [node("Sigmoid", ["a"], ["m"])],
            [node("Pad", ["a", "pads", "high"], ["m"])],  # not of zeros
            [node("Pad", ["a", "across"], ["p"]), node("Slice", ["p", "one", "six", "one"], ["m"])],
            [node("ReduceMean", ["a"], ["r"], axes=[1]), node("Concat", ["r"] * 5, ["m"], axis=1)],
        ],
    )
    def test_chain_ends(self, middle):
        model = between(*middle)
        extra = {
            "low": f32(-0.5),
            "high": f32(1.5),
            "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
            "across": np.array([0, 1, 0, 0, 0, 0, 0, 0]),
            "one": np.array([1]),
            "six": np.array([6]),
        }
        model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), k) for k, a in extra.items())
        graph = prepare(jq.load(model))
        assert equalize(graph) is graph

    def test_pad_of_channels(self):
        arrays = {"pads": np.array([0, 1, 0, 0, 0, 0, 0, 0])}
        nodes = [conv("x", "a", arrays, 4, 4), node("Pad", ["a", "pads"], ["m"]), conv("m", "y", arrays, 3, 5)]
        graph = jq.load(build(nodes, arrays))
        assert equalize(graph) is graph

    @pytest.mark.parametrize("relu", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    def test_depthwise(self, relu, bias):
        arrays = {}
        nodes = [conv("x", "a", arrays, 6, 4, kernel=1, bias=bias)]
        nodes += [node("Relu", ["a"], ["ra"])] if relu else []
        nodes += [
            conv("ra" if relu else "a", "d", arrays, 6, 6, group=6, bias=bias, seed=3),
            node("Relu", ["d"], ["rd"]),
        ]
        model = build([*nodes, conv("rd", "y", arrays, 3, 6, kernel=1, seed=7)], arrays)
        graph = equalized(model)
        assert chains(graph) == [["a", "d"], ["a", "d", "y"], ["d", "y"]]
        assert all(not np.array_equal(graph.params[k], arrays[k]) for k in ("a.w", "d.w", "y.w"))
        np.testing.assert_array_equal(graph.params["y.b"], arrays["y.b"])

    def test_other_groups(self):
        """Two channels per group: one factor for each output channel is none for each input channel."""
        arrays = {}
        nodes = [conv("x", "a", arrays, 4, 4), conv("a", "g", arrays, 4, 4, group=2), conv("g", "y", arrays, 4, 4)]
        graph = jq.load(build(nodes, arrays))
        assert equalize(graph) is graph

    def test_triples_need_plain_relu(self):
        arrays = {}
        nodes = [conv("x", "a", arrays, 6, 4), node("LeakyRelu", ["a"], ["r"]), conv("r", "d", arrays, 6, 6, group=6)]
        graph = equalized(build([*nodes, conv("d", "y", arrays, 3, 6)], arrays))
        assert chains(graph) == [["a", "d"], ["d", "y"]]

    @pytest.mark.parametrize("first", [0, 1])
    @pytest.mark.parametrize("second", [0, 1])
    @pytest.mark.parametrize("bias", [None, (), (1,), (5,), (1, 5)])
    def test_gemm(self, first, second, bias):
        arrays = {"v": uneven(5, 4), "w": uneven(6, 5, seed=1), "c": normal(6)}
        arrays = {"v": arrays["v"] if first else arrays["v"].T, "w": arrays["w"] if second else arrays["w"].T}
        if bias is not None:
            arrays["b"] = np.asarray(normal(*bias), f32)
        names = ["x", "v", *(["b"] if bias is not None else [])]
        nodes = [node("Gemm", names, ["g"], transB=first, alpha=0.5, beta=3.0), node("Relu", ["g"], ["r"])]
        model = build([*nodes, node("Gemm", ["r", "w"], ["y"], transB=second)], arrays, x=(3, 4))
        graph = equalized(model)
        assert not np.array_equal(graph.params["v"], arrays["v"])

    def test_gemms_that_are_left(self):
        square = {"v": uneven(4, 4), "w": uneven(4, 4, seed=1), "b": normal(4, 1), "c": normal(4, 4)}
        for first, second in (({}, {"transA": 1}), (["b"], {}), (["c"], {})):
            names = ["x", "v", *(first if isinstance(first, list) else [])]
            nodes = [node("Gemm", names, ["g"]), node("Gemm", ["g", "w"], ["y"], **second)]
            graph = jq.load(build(nodes, square, x=(4, 4)))
            assert equalize(graph) is graph

    def test_mean_of_convolution_into_gemm(self):
        arrays = {"w": uneven(3, 5)}
        for opset, mean in (
            (17, node("ReduceMean", ["a"], ["m"], axes=[2, 3], keepdims=0)),
            (18, node("ReduceMean", ["a", "axes"], ["m"], keepdims=0)),
        ):
            arrays["axes"] = np.array([-1, -2])
            nodes = [conv("x", "a", arrays, 5, 4), mean, node("Gemm", ["m", "w"], ["y"], "y", transB=1)]
            assert chains(equalized(build(nodes, arrays, opset=opset))) == [["a", "y"]]

    def test_volumes_and_no_lines(self):
        for rank, expected in ((1, []), (3, [["a", "d"], ["a", "d", "y"], ["d", "y"]])):
            ones = (1,) * rank
            arrays = {"a": uneven(6, 4, *ones), "d": uneven(6, 1, *ones), "y.w": uneven(3, 6, *ones)}
            nodes = [node("Conv", ["x", "a"], ["p"], "a"), node("Conv", ["p", "d"], ["q"], "d", group=6)]
            model = build([*nodes, node("Conv", ["q", "y.w"], ["y"], "y")], arrays, x=(2, 4, 5, 4, 3)[: 2 + rank])
            assert chains(equalized(model)) == expected

    @given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([0.0, 0.5, 100.0]))
    @settings(max_examples=25, deadline=None)
    def test_any_weights(self, seed, append_bias, threshold):
        """Zeros, tiny and huge channels, and biases of any size."""
        rng = np.random.default_rng(seed)
        arrays = {}
        nodes = [conv("x", "a", arrays, 6, 4, seed=seed), node("Relu", ["a"], ["r"])]
        nodes += [conv("r", "d", arrays, 6, 6, group=6, seed=seed + 2), node("Relu", ["d"], ["s"])]
        nodes += [conv("s", "y", arrays, 3, 6, seed=seed + 4)]
        for array in arrays.values():
            array *= f32(10.0 ** rng.uniform(-3, 3))
            if array.ndim > 1:
                array[rng.random(array.shape) < rng.choice([0, 0.5])] = 0
                array[rng.integers(len(array))] *= rng.choice([0, 1e-20, 1])
        equalized(build(nodes, arrays), append_bias=append_bias, threshold=threshold)

    def test_bundled(self):
        for name in ("fashion_resnet", "fashion_mobilenet"):
            graph = prepare(jq.load(jq.zoo.path(name)))
            images = np.asarray(jq.zoo.calibration_set()[0][:16], f32)
            result = equalize(graph)
            assert result is not graph
            want, have = (jq.trace(g)(g.params, {g.inputs[0].name: images}) for g in (graph, result))
            for value in graph.outputs:
                scale = float(np.abs(want[value.name]).max())
                np.testing.assert_allclose(have[value.name], want[value.name], rtol=1e-5, atol=1e-5 * scale)


class TestNothingToDo:
    def test_same_graph(self):
        lone = {}
        for model, options in (
            (build([conv("x", "y", lone, 4, 4)], lone), {}),
            (between(node("Relu", ["a"], ["m"])), {"steps": 0}),
            (between(node("Relu", ["a"], ["m"])), {"threshold": 1e9}),
        ):
            graph = prepare(jq.load(model))
            assert equalize(graph, **options) is graph

    def test_convolution_with_computed_weights(self):
        x = helper.make_tensor_value_info("k", TensorProto.FLOAT, [5, 4, 1, 1])
        arrays = {"w": uneven(3, 5, 1, 1)}
        nodes = [node("Conv", ["x", "k"], ["a"]), node("Conv", ["a", "w"], ["y"])]
        graph = jq.load(build(nodes, arrays, extra_inputs=[x]))
        assert equalize(graph) is graph

    def test_output_within(self):
        for outputs in (["y", "a"], ["y", "m"]):
            arrays = {}
            nodes = [conv("x", "a", arrays, 5, 4), node("Relu", ["a"], ["m"]), conv("m", "y", arrays, 3, 5)]
            graph = jq.load(build(nodes, arrays, outputs=outputs))
            assert equalize(graph) is graph

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("where", ["a.w", "a.b", "b.w", "b.b", "y.w"])
    def test_not_finite(self, bad, where):
        """The chains of that layer are left; the others are as they would be without."""
        arrays, sound = {}, {}
        for target in (arrays, sound):
            nodes = [conv("x", "a", target, 5, 4), conv("a", "b", target, 4, 5, seed=2)]
            nodes += [
                node("Clip", ["b", "low"], ["m"]),
                conv("m", "c", target, 5, 4, seed=4),
                conv("c", "y", target, 3, 5, seed=6),
            ]
            target["low"] = f32(-1)
        arrays[where].flat[3] = bad
        result, expected = (equalize(prepare(jq.load(build(nodes, a)))) for a in (arrays, sound))
        rest = {"a.w", "b.w"} if where == "y.w" else {"c.w", "y.w"}
        for name in rest:
            np.testing.assert_array_equal(result.params[name], expected.params[name])
        for name in arrays.keys() - {where}:
            assert np.isfinite(result.params[name]).all()

    def test_overflow(self):
        """Ranges whose product is no float32 leave the chain alone, instead of zeros and infinities."""
        arrays = {}
        nodes = [conv("x", "a", arrays, 5, 4), conv("a", "y", arrays, 3, 5)]
        for name in ("a.w", "y.w"):
            arrays[name] *= f32(1e30)
        graph = jq.load(build(nodes, arrays))
        assert equalize(graph) is graph

    def test_zero_channels(self):
        """A dead channel stays, and does not change the others' factors."""
        results = []
        for dead in (False, True):
            arrays = {}
            nodes = [conv("x", "a", arrays, 5, 4, bias=False), conv("a", "y", arrays, 3, 5)]
            if dead:
                arrays["a.w"][2] = 0
                arrays["y.w"][:, 4] = 0
            results.append(equalized(build(nodes, arrays)).params)
        plain, partly = results
        np.testing.assert_array_equal(partly["a.w"][[0, 1, 3]], plain["a.w"][[0, 1, 3]])
        np.testing.assert_array_equal(partly["a.w"][4], arrays["a.w"][4])
        np.testing.assert_array_equal(partly["y.w"][:, 2], arrays["y.w"][:, 2])


class TestShared:
    def test_weight_of_two_layers(self):
        """Both layers of a chain read one weight: each gets its own."""
        arrays = {"w": uneven(4, 4, 1, 1), "b": normal(4)}
        nodes = [node("Conv", ["x", "w", "b"], ["a"], "a"), node("Relu", ["a"], ["m"])]
        graph = equalized(build([*nodes, node("Conv", ["m", "w", "b"], ["y"], "y")], arrays))
        assert graph.nodes[0].inputs[1] != graph.nodes[2].inputs[1]
        assert len(graph.params) == 4 and "w" not in graph.params  # what nobody reads any more is gone

    def test_other_reader(self):
        arrays = {"w": uneven(5, 4, 1, 1), "v": uneven(3, 5, 1, 1)}
        nodes = [node("Conv", ["x", "w"], ["a"], "a"), node("Conv", ["a", "v"], ["y"], "y")]
        nodes += [node("Neg", ["x"], ["n"]), node("Conv", ["n", "w"], ["z"], "z"), node("Conv", ["z", "v"], ["u"], "u")]
        graph = equalized(build(nodes, arrays, outputs=["y", "z", "u"]))
        np.testing.assert_array_equal(graph.params["w"], arrays["w"])
        np.testing.assert_array_equal(graph.params["v"], arrays["v"])
        own = [graph.producer[o].inputs[1] for o in ("a", "y")]
        assert not {"w", "v"}.intersection(own)
        assert not np.array_equal(graph.params[own[1]], arrays["v"])

    def test_shared_zeros_stay_shared(self):
        """Equal biases are merged by `prepare`; zeros times a factor are zeros."""
        arrays = {"v": uneven(4, 4, 1, 1), "w": uneven(4, 4, 1, 1, seed=1), "b": np.zeros(4, f32)}
        nodes = [node("Conv", ["x", "v", "b"], ["a"]), node("Conv", ["a", "w", "b"], ["y"])]
        assert len(equalized(build(nodes, arrays)).params) == 3

    def test_half_precision(self):
        for dtype, kind, close in (
            (np.float16, TensorProto.FLOAT16, 2e-3),
            (ml_dtypes.bfloat16, TensorProto.BFLOAT16, 2e-2),
        ):
            arrays = {"v": uneven(5, 4, 1, 1).astype(dtype), "w": uneven(3, 5, 1, 1).astype(dtype)}
            nodes = [node("Conv", ["x", "v"], ["a"]), node("Conv", ["a", "w"], ["y"])]
            graph = jq.load(build(nodes, arrays, dtype=kind, opset=22))
            result = equalize(graph)
            assert result.params["v"].dtype == dtype and not np.array_equal(result.params["v"], arrays["v"])
            products = [
                np.einsum("om,mi->oi", *(g.params[k].astype(f32)[..., 0, 0] for k in "wv")) for g in (graph, result)
            ]
            np.testing.assert_allclose(*products, rtol=0, atol=close * np.abs(products[0]).max())


class TestEquations:
    def test_pair(self):
        """Ranges 8 and 2 meet at 4, 1 and 4 at 2; 3 and 0 stay."""
        head, tail = f32([[8, -1], [0.5, 1], [3, 0]]), f32([[1, -2, 0], [4, 0, 1], [0, 0, 0]])
        s = pair_factors(head, tail)
        assert s.dtype == f32
        np.testing.assert_array_equal(s, [0.5, 2, 1])

    def test_threshold(self):
        head, tail = f32([[0.125], [0.125]]), f32([[0.25], [0.375]])
        np.testing.assert_allclose(pair_factors(head, tail, threshold=0.5), [1, math.sqrt(3)], rtol=1e-7)
        np.testing.assert_allclose(pair_factors(head, tail, threshold=0), [math.sqrt(2), math.sqrt(3)], rtol=1e-7)

    def test_bias_counts(self):
        """A bias of 8, made 2 times smaller, is the range 4 of a row; that of the next row is 4 already."""
        head, tail = f32([[2, 1], [4, 1]]), f32([[1], [1]])
        np.testing.assert_array_equal(bias_column(head, f32([8, 0])), [4, 0])
        np.testing.assert_array_equal(pair_factors(head, tail, f32([8, 0])), [0.5, 0.5])

    @pytest.mark.parametrize(
        ("weight", "bias", "shrink"),
        [
            # small biases (|b| < 10, less than 20 times the weights): by the ratios' median > 100 or mean > 1000
            ([[1, 0.1], [1, 0.1]], [9, 9], 2),  # ratios 9, 90
            ([[1, 0.01], [0.01, 0.01]], [9, 9], 5),  # median 900
            ([[1, 1], [1, 0.001]], [9, 9], 5),  # median 9, mean 2257
            # large: median > 30 or mean > 500; median > 15 or mean > 100; the rest
            ([[1, 1], [1, 1]], [31, 31], 20),
            ([[100, 1], [100, 0.004]], [10, 10], 20),  # median 5, mean 628
            ([[1, 1], [1, 1]], [16, 16], 10),
            ([[100, 1], [100, 0.02]], [12, 12], 10),  # median 6, mean 153
            ([[1, 1], [1, 1]], [10, 10], 5),
            ([[0.4, 0.4], [0.4, 0.4]], [9, 9], 10),  # below 10, but 22 times the weights
        ],
    )
    def test_shrink(self, weight, bias, shrink):
        weight, bias = f32(weight), f32(bias)
        ratio = np.abs(bias[:, None] / weight)
        median, mean, largest = np.median(ratio), ratio.mean(), np.abs(bias).max()
        np.testing.assert_array_equal(
            bias_column(weight, bias), bias / f32(shrink), err_msg=f"{median} {mean} {largest}"
        )

    def test_zeros_count_as_the_least_weight(self):
        """Ratios 9 / 0.05 = 180 at three of four: the median is above 100. As tiny weights the mean would be, too."""
        np.testing.assert_array_equal(bias_column(f32([[1, 0.05, 0, 0]]), f32([9])), f32([9]) / f32(5))
        np.testing.assert_array_equal(bias_column(f32([[1, 0.5, 0, 0]]), f32([9])), f32([4.5]))

    def test_rows_of_zeros_have_no_bias(self):
        """And no part in the ratios, but their bias in the largest."""
        np.testing.assert_array_equal(bias_column(f32([[1, 1], [0, 0]]), f32([4, 8])), [2, 0])
        np.testing.assert_array_equal(bias_column(f32([[1, 1], [0, 0]]), f32([4, 80])), f32([4, 0]) / f32(5))

    def test_triple(self):
        """Ranges 8, 2, 4 meet at 4: / 2, * 2 / 1, * 1. 1, 8, 1 at 2; where one is zero, nothing."""
        ranges = f32([[8, 2, 4], [1, 8, 1], [3, 0, 3], [0, 2, 2], [2, 2, 0]])
        s, t = triple_factors(*(ranges[:, i, None] for i in range(3)))
        assert s.dtype == t.dtype == f32
        np.testing.assert_allclose(s, [2, 0.5, 1, 1, 1], rtol=1e-6)
        np.testing.assert_allclose(t, [1, 2, 1, 1, 1], rtol=1e-6)
        np.testing.assert_allclose((ranges * np.stack([1 / s, s / t, t], 1))[:2], [[4, 4, 4], [2, 2, 2]], rtol=1e-6)

    def test_ranges_are_even(self):
        """Without biases and thresholds, one pair ends with equal ranges."""
        graph = equalized(between(node("Relu", ["a"], ["m"]), bias=False), threshold=0)
        made, read = np.abs(graph.params["a.w"]).max((1, 2, 3)), np.abs(graph.params["y.w"]).max((0, 2, 3))
        np.testing.assert_allclose(made, read, rtol=1e-6)

    def test_order(self):
        """Chains one after another, then the first again; by hand, on 1 x 1 weights."""
        weights = [64.0, 1.0, 16.0]
        arrays = {f"w{i}": np.full((1, 1, 1, 1), w, f32) for i, w in enumerate(weights)}
        nodes = [node("Conv", [t, f"w{i}"], [u]) for i, (t, u) in enumerate((("x", "a"), ("a", "b"), ("b", "y")))]
        graph = equalized(build(nodes, arrays, x=(1, 1, 2, 2)))
        # (64, 1) -> 8, 8; (8, 16) -> sqrt(128) twice; (8, sqrt(128)) -> (8 sqrt(128))^(1/2) twice
        last = math.sqrt(8 * math.sqrt(128))
        found = [graph.params[f"w{i}"].item() for i in range(3)]
        np.testing.assert_allclose(found, [last, last, math.sqrt(128)], rtol=1e-6)

    def test_until_it_converges(self):
        """All ranges of a chain become their geometric mean; more steps than are needed change nothing."""
        arrays = {f"w{i}": np.full((1, 1, 1, 1), w, f32) for i, w in enumerate([64.0, 1.0, 8.0])}
        nodes = [node("Conv", [t, f"w{i}"], [u]) for i, (t, u) in enumerate((("x", "a"), ("a", "b"), ("b", "y")))]
        model = build(nodes, arrays, x=(1, 1, 2, 2))
        for steps in (-1, 200):
            np.testing.assert_allclose([a.item() for a in equalized(model, steps=steps).params.values()], 8, rtol=1e-5)
        graph = prepare(jq.load(model))
        twice, by_steps = equalize(equalize(graph)), equalize(graph, steps=2)
        for name in arrays:
            np.testing.assert_array_equal(twice.params[name], by_steps.params[name])


class TestStem:
    def arrays(self):
        arrays = {**statistics("p", 6), **statistics("q", 10, seed=2), **statistics("r", 10, seed=3)}
        arrays = {k: a + 1 if k.endswith("v") else a for k, a in arrays.items()}
        return arrays

    def model(self, *extra, outputs=("y0", "y1", "y2")):
        """A stem read by one BatchNormalization behind a pool, and by others behind a Concat after four channels."""
        arrays = self.arrays()
        nodes = [
            conv("x", "stem", arrays, 6, 4),
            conv("x", "other", arrays, 4, 4, seed=5),
            node("Relu", ["stem"], ["relu"]),
            node("MaxPool", ["relu"], ["pool"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            batchnorm("pool", "y0", "p"),
            node("Concat", ["other", "pool"], ["concat"], axis=1),
            batchnorm("concat", "y1", "q"),
            node("AveragePool", ["concat"], ["average"], kernel_shape=[2, 2]),
            batchnorm("average", "y2", "r"),
        ]
        arrays["stem.w"][3] = 0
        return build([*nodes, *extra], arrays, outputs=outputs), arrays

    def test_weak_channels(self):
        model, arrays = self.model()
        graph = equalized(model)
        before, after = (np.abs(a).max((1, 2, 3)) for a in (arrays["stem.w"], graph.params["stem.w"]))
        s = np.clip(before.max() / np.where(before, before, before.max()), 1, 16)
        np.testing.assert_allclose(after, before * s, rtol=1e-6)
        np.testing.assert_array_equal(graph.params["other.w"], arrays["other.w"])
        np.testing.assert_array_equal(graph.params["q.m"][:4], arrays["q.m"][:4])
        np.testing.assert_allclose(graph.params["q.m"][4:], arrays["q.m"][4:] * s, rtol=1e-6)
        np.testing.assert_allclose(graph.params["p.g"], arrays["p.g"] / s, rtol=1e-6)
        plain = prepare(jq.load(model))
        assert equalize(plain, stem=False) is plain

    def test_other_readers_and_outputs(self):
        for extra, output in (([node("Sigmoid", ["pool"], ["z"])], "z"), ([], "relu")):
            model, _ = self.model(*extra, outputs=["y0", "y1", "y2", output])
            graph = prepare(jq.load(model))
            assert equalize(graph) is graph

    def test_norms_of_single_pixels(self):
        """Early operator sets had statistics for each pixel, too."""
        graph = prepare(jq.load(self.model()[0]))
        assert equalize_stem(graph) is not graph
        norm = graph.producer["y0"]
        pixels = {i: np.ones((6, 5, 6), f32) for i in norm.inputs[1:]}
        early = norm.replace(attrs={**norm.attrs, "spatial": 0})
        graph = graph.edit({norm: early}, pixels).replace(opsets={"": 8})
        assert equalize_stem(graph) is graph

    def test_concat_of_itself_and_shared_arrays(self):
        """Both places of the channels are divided, and two readers of the same statistics get their own."""
        arrays = {**statistics("p", 12), **statistics("q", 6)}
        arrays = {k: a + 1 if k.endswith("v") else a for k, a in arrays.items()}
        nodes = [
            conv("x", "stem", arrays, 6, 4),
            node("Relu", ["stem"], ["relu"]),
            node("Concat", ["relu", "relu"], ["concat"], axis=1),
            batchnorm("concat", "y0", "p"),
            batchnorm("relu", "y1", "q"),
            node("MaxPool", ["relu"], ["pool"], kernel_shape=[2, 2]),
            node("BatchNormalization", ["pool", *(f"q.{p}" for p in "gbmv")], ["y2"], "again"),
        ]
        graph = equalized(build(nodes, arrays, outputs=["y0", "y1", "y2"]))
        assert not np.array_equal(graph.params["stem.w"], arrays["stem.w"])

    def test_no_norms(self):
        graph = prepare(jq.load(between(node("Relu", ["a"], ["m"]))))
        assert equalize_stem(graph) is graph

    def test_factors(self):
        s = stem_factors(f32([[1, -4], [2, 0], [0, 0], [0.01, 0]]))
        assert s.dtype == f32
        np.testing.assert_array_equal(s, [1, 2, 1, 16])
        np.testing.assert_array_equal(stem_factors(np.zeros((3, 2), f32)), [1, 1, 1])
