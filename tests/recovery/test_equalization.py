"""`jq.equalize`: the function stays, as onnxruntime computes it, and rounding costs less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jq
from jq.config import resolve
from jq.passes.prepare import prepare
from jq.recovery.equalization import equalize, equalize_as_quark
from jq.recovery.equalization.channels import Channels, measure
from jq.recovery.equalization.factors import choose, limits, optimize
from jq.recovery.equalization.groups import FIXED, find_groups, scaled
from jq.recovery.equalization.noise import StepGrid, Weight, predict
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal, ops

f32 = np.float32


def uneven(*shape, seed=0, spread=1.5):
    """Weights with channels of very different ranges."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.normal(0, spread, (shape[0], *(1,) * (len(shape) - 1))))
    return (rng.standard_normal(shape) * rows).astype(f32)


def conv(source, name, arrays, outputs, inputs, *, kernel=1, group=1, seed=0, **attrs):
    """A Conv whose arrays are put into `arrays`."""
    arrays[f"{name}.w"], arrays[f"{name}.b"] = (
        uneven(outputs, inputs // group, kernel, kernel, seed=seed),
        normal(outputs),
    )
    return node("Conv", [source, f"{name}.w", f"{name}.b"], [name], name, group=group, pads=[kernel // 2] * 4, **attrs)


def between(*middle, arrays=None, channels=5, **options):
    """Two Convs, and from "a" to "m" what stands between."""
    arrays = dict(arrays or {})
    nodes = [conv("x", "a", arrays, 5, 4), *middle, conv("m", "y", arrays, 3, channels, seed=7)]
    return build(nodes, arrays, **options)


def random_model(seed):
    """A few layers of many kinds, residual sums and a Concat among them."""
    rng = np.random.default_rng(seed)
    arrays, nodes, names = {}, [], iter(f"t{i}" for i in range(99))

    def put(op, inputs, **attrs):
        name = next(names)
        nodes.append(node(op, inputs, [name], name, **attrs))
        return name

    def layer(x, outputs, inputs, **options):
        name = next(names)
        nodes.append(conv(x, name, arrays, outputs, inputs, seed=int(rng.integers(1 << 30)), **options))
        return name

    arrays["slope"], arrays["pads"] = uneven(6, 1, 1), np.array([0, 0, 1, 0, 0, 0, 0, 1])
    x = layer("x", 6, 4)
    for _ in range(rng.integers(2, 5)):
        match rng.integers(9):
            case 0:
                x = put("Relu", [layer(x, 6, 6, kernel=3)])
            case 1:
                x = put("Add", [x, layer(put("Relu", [layer(x, 8, 6)]), 6, 8)])
            case 2:
                x = layer(put("LeakyRelu", [x], alpha=0.2), 6, 6, kernel=3, group=6)
            case 3:
                x = layer(put("Concat", [x, put("PRelu", [layer(x, 6, 6, group=2), "slope"])], axis=1), 6, 12)
            case 4:
                x = put("MaxPool", [x], kernel_shape=[2, 2], strides=[1, 1], pads=[0, 0, 1, 1])
            case 5:
                x = put("AveragePool", [x], kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1], count_include_pad=1)
            case 6:
                arrays["up"] = uneven(6, 3, 2, 2, seed=3)
                x = put("ConvTranspose", [x, "up"], group=2, strides=[1, 1], pads=[0, 1, 1, 0])
            case 7:
                x = put("Sub", [put("Pad", [x, "pads"]), put("Pad", [layer(x, 6, 6), "pads"])])
            case 8:
                x = put("Mul", [x, put("Sigmoid", [layer(x, 6, 6)])])
    x = put("Flatten", [put("GlobalAveragePool", [put("Relu", [x])])])
    arrays["fc"] = uneven(6, 3)
    nodes.append(node("Gemm", [x, "fc"], ["y"], "y"))
    return build(nodes, arrays)


def factors_of(groups, seed, *, powers):
    """Any factors; one for what is fixed."""
    z = np.random.default_rng(seed).normal(0, 2, groups.count)
    z[FIXED] = 0
    return np.exp2(np.rint(z) if powers else z)


def outputs(graph, feeds):
    return onnxruntime_outputs(jq.to_model(graph), feeds)


class TestFunction:
    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=20, deadline=None)
    def test_any_factors(self, seed):
        """No factor of any class changes the function, and powers of two no bit of it."""
        model = random_model(seed)
        graph = prepare(jq.load(model))
        groups = find_groups(graph)
        feeds = {"x": normal(2, 4, 5, 6)}
        want = outputs(graph, feeds)[0]
        found = outputs(scaled(graph, groups, factors_of(groups, seed, powers=False)), feeds)[0]
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=2e-5 * np.abs(want).max())
        exact = scaled(graph, groups, factors_of(groups, seed, powers=True))
        np.testing.assert_array_equal(outputs(exact, feeds)[0], want)
        traced = jq.trace(exact)(exact.params, feeds)["y"]
        np.testing.assert_allclose(traced, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())

    @given(st.integers(0, 2**32 - 1), st.booleans())
    @settings(max_examples=5, deadline=None)
    def test_chosen_factors(self, seed, with_data):
        """The function stays, and by the predicted noise nothing got worse."""
        graph, config = prepare(jq.load(random_model(seed))), resolve("XINT8")
        data = normal(6, 4, 5, 6, seed=1)
        if not with_data:
            result = equalize(graph)
        else:
            groups = find_groups(graph)
            noise = predict(graph, groups, measure(graph, groups, data, config), config)
            s = choose(noise, optimize(noise))
            assert noise.total(s) <= noise.total(np.ones(groups.count))
            result = scaled(graph, groups, s)
        feeds = {"x": normal(2, 4, 5, 6)}
        want = outputs(graph, feeds)[0]
        np.testing.assert_allclose(outputs(result, feeds)[0], want, rtol=1e-5, atol=2e-5 * np.abs(want).max())

    def test_same_twice(self):
        graph = prepare(jq.load(random_model(3)))
        data = {"x": normal(4, 4, 5, 6)}
        first, second = (equalize(graph, "XINT8", data) for _ in range(2))
        assert first is not graph
        assert all(a.tobytes() == second.params[k].tobytes() for k, a in first.params.items())

    def test_shared_arrays(self):
        """Readers of one array get their own."""
        arrays = {"w": uneven(4, 4, 1, 1)}
        nodes = [node("Conv", ["x", "w"], ["a"], "a"), node("Relu", ["a"], ["r"]), node("Conv", ["r", "w"], ["y"], "y")]
        graph = prepare(jq.load(build(nodes, arrays)))
        result = equalize(graph)
        assert result is not graph and len(result.params) == 2
        feeds = {"x": normal(2, 4, 5, 6)}
        np.testing.assert_allclose(outputs(result, feeds)[0], outputs(graph, feeds)[0], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("bias", [(1,), (5,), (1, 5), (1, 1)])
    def test_bias_of_a_gemm(self, bias):
        arrays = {"v": uneven(4, 5), "w": uneven(5, 6), "b": normal(*bias)}
        nodes = [node("Gemm", ["x", "v", "b"], ["g"], alpha=0.5, beta=3.0), node("MatMul", ["g", "w"], ["y"])]
        graph = jq.load(build(nodes, arrays, x=(3, 4)))
        groups = find_groups(graph)
        assert groups.count == 6
        result = scaled(graph, groups, factors_of(groups, 0, powers=True))
        feeds = {"x": normal(3, 4)}
        np.testing.assert_array_equal(outputs(result, feeds)[0], outputs(graph, feeds)[0])

    def test_overflow_is_left(self):
        graph = jq.load(between(node("Relu", ["a"], ["m"])))
        groups = find_groups(graph)
        factors = np.full(groups.count, 1e30)
        factors[FIXED] = 1
        graph = graph.with_arrays({**graph.arrays, "a.w": graph.params["a.w"] * f32(1e20)})
        assert scaled(graph, find_groups(graph), factors) is graph


SAME = {  # what stands between two Convs, and lets the factors through
    "Relu": node("Relu", ["a"], ["m"]),
    "LeakyRelu": node("LeakyRelu", ["a"], ["m"]),
    "PRelu": node("PRelu", ["a", "slope"], ["m"]),
    "MaxPool": node("MaxPool", ["a"], ["m"], kernel_shape=[2, 2]),
    "AveragePool": node("AveragePool", ["a"], ["m"], kernel_shape=[2, 2]),
    "GlobalAveragePool": node("GlobalAveragePool", ["a"], ["m"]),
    "Pad": node("Pad", ["a", "pads"], ["m"]),
    "reflecting Pad": node("Pad", ["a", "pads"], ["m"], mode="reflect"),
    "ReduceMean": node("ReduceMean", ["a"], ["m"], axes=[-1, 2]),
    "Add": node("Add", ["a", "a"], ["m"]),
    "Resize": node("Resize", ["a", "", "scales"], ["m"], mode="linear"),
    "Reshape": node("Reshape", ["a", "shape"], ["m"]),
}
OTHER = {  # or stops them
    "Sigmoid": node("Sigmoid", ["a"], ["m"]),
    "Mul": node("Mul", ["a", "a"], ["m"]),
    "Softmax": node("Softmax", ["a"], ["m"]),
    "Add of an array": node("Add", ["a", "slope"], ["m"]),
    "Clip not from zero": node("Clip", ["a", "low", "high"], ["m"]),
    "Pad of ones": node("Pad", ["a", "pads", "high"], ["m"]),
    "Pad of channels": node("Pad", ["a", "across"], ["m"]),
    "Transpose": node("Transpose", ["a"], ["m"], perm=[0, 1, 3, 2]),
    "PRelu of what is computed": node("PRelu", ["a", "a"], ["m"]),
}
ARRAYS = {
    "slope": normal(5, 1, 1),
    "pads": np.array([0, 0, 1, 2, 0, 0, 0, 1]),
    "across": np.array([0, 1, 0, 0, 0, -1, 0, 0]),
    "low": f32(-0.5),
    "high": f32(1),
    "scales": f32([1, 1, 2, 2]),
    "shape": np.array([2, 5, 6, 5]),
}


class TestGroups:
    @pytest.mark.parametrize("name", SAME)
    def test_passed(self, name):
        graph = jq.load(between(SAME[name], arrays=ARRAYS))
        groups = find_groups(graph)
        np.testing.assert_array_equal(groups.channels["a"], groups.channels["m"])
        assert len(set(groups.channels["a"])) == 5 and FIXED not in groups.channels["a"]
        feeds = {"x": normal(2, 4, 5, 6)}
        result = scaled(graph, groups, factors_of(groups, 0, powers=True))
        np.testing.assert_array_equal(outputs(result, feeds)[0], outputs(graph, feeds)[0])

    @pytest.mark.parametrize("name", OTHER)
    def test_stopped(self, name):
        graph = jq.load(between(OTHER[name], arrays=ARRAYS))
        assert not find_groups(graph).channels["a"].any()
        assert equalize(graph) is graph

    @pytest.mark.parametrize("op", ["Reshape", "Unsqueeze"])
    def test_a_tensor_of_one_dim_has_no_channels(self, op):
        arrays = {"rows": np.array([1, 5, 1, 1]) if op == "Reshape" else np.array([0, 2, 3])}
        nodes = [conv("x", "a", arrays, 5, 4), node("ReduceMean", ["a"], ["m"], axes=[0, 2, 3], keepdims=0)]
        nodes += [node(op, ["m", "rows"], ["u"]), node("Add", ["a", "u"], ["y"])]
        assert not find_groups(jq.load(build(nodes, arrays))).channels["a"].any()

    def test_inputs_and_outputs(self):
        graph = jq.load(between(node("Relu", ["a"], ["m"]), outputs=("y", "a")))
        groups = find_groups(graph)
        assert groups.count == 1 and not any(c.any() for c in groups.channels.values())

    def test_sum(self):
        """All members of a residual sum have the same factors."""
        arrays = {}
        nodes = [conv("x", "a", arrays, 6, 4), conv("a", "b", arrays, 6, 6), node("Add", ["a", "b"], ["c"])]
        nodes += [conv("c", "d", arrays, 6, 6), node("Add", ["c", "d"], ["e"]), conv("e", "y", arrays, 3, 6)]
        groups = find_groups(jq.load(build(nodes, arrays)))
        assert groups.count == 7
        assert all(np.array_equal(groups.channels["a"], groups.channels[k]) for k in "bcde")

    def test_concat_and_split(self):
        arrays = {"sizes": np.array([2, 4])}
        nodes = [conv("x", "a", arrays, 6, 4), node("Split", ["a", "sizes"], ["b", "c"], axis=1)]
        nodes += [node("Concat", ["c", "x", "b"], ["d"], axis=1), conv("d", "y", arrays, 3, 10)]
        graph = jq.load(build(nodes, arrays))
        found = find_groups(graph).channels
        np.testing.assert_array_equal(found["d"], [*found["a"][2:], 0, 0, 0, 0, *found["a"][:2]])

    def test_pixels_become_channels(self):
        arrays = {"w": uneven(5 * 30, 3)}
        nodes = [conv("x", "a", arrays, 5, 4), node("Flatten", ["a"], ["f"]), node("Gemm", ["f", "w"], ["y"])]
        graph = jq.load(build(nodes, arrays))
        groups = find_groups(graph)
        np.testing.assert_array_equal(groups.channels["f"], np.repeat(groups.channels["a"], 30))
        feeds = {"x": normal(2, 4, 5, 6)}
        result = scaled(graph, groups, factors_of(groups, 0, powers=True))
        np.testing.assert_array_equal(outputs(result, feeds)[0], outputs(graph, feeds)[0])


class TestClip:
    @staticmethod
    def model(rows, bound=6.0):
        """Channels that reach a multiple of the bound of a Clip, by their weights' sizes."""
        arrays = {
            "zero": f32(0),
            "bound": f32(bound),
            "a.w": f32(rows)[:, None, None, None] * normal(len(rows), 4, 1, 1),
        }
        arrays["y.w"] = uneven(3, len(rows), 1, 1)
        nodes = [node("Conv", ["x", "a.w"], ["a"], "a"), node("Clip", ["a", "zero", "bound"], ["m"])]
        return jq.load(build([*nodes, node("Conv", ["m", "y.w"], ["y"], "y")], arrays, x=("N", 4, 5, 6)))

    def test_stays_without_data(self):
        graph = self.model([0.01, 0.1, 1])
        assert equalize(graph) is graph

    def test_of_channels_below_the_bound(self):
        """They get factors that let none be cut, so that the function stays on the data."""
        graph, data = self.model([0.001, 0.01, 0.1, 0.3]), normal(16, 4, 5, 6)
        result = equalize(graph, "XINT8", data)
        assert result is not graph and ops(result) == ops(graph)
        want = outputs(graph, {"x": data})[0]
        np.testing.assert_allclose(outputs(result, {"x": data})[0], want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
        reach = np.abs(result.params["a.w"]).max((1, 2, 3))
        before = np.abs(graph.params["a.w"]).max((1, 2, 3))
        assert reach.max() / reach.min() < before.max() / before.min() / 5

    def test_of_channels_that_reach_it(self):
        """They keep their scale, nearly: otherwise they would be cut elsewhere."""
        graph, data = self.model([0.01, 5, 50, 50]), normal(16, 4, 5, 6)
        config, groups = resolve("XINT8"), find_groups(graph)
        noise = predict(graph, groups, measure(graph, groups, data, config), config)
        s = choose(noise, optimize(noise))[groups.channels["m"]]
        assert s[0] > 2 and (s[1:] <= 1).all() and (s[1:] > 0.8).all()
        assert limits(noise)[groups.channels["m"]].round(3)[1:].tolist() == [1, 1, 1]
        result = equalize(graph, "XINT8", data)
        want, found = (outputs(g, {"x": data})[0] for g in (graph, result))
        assert np.square(found - want).mean() < 0.01 * np.square(want).mean()

    def test_read_by_others(self):
        arrays = {"zero": f32(0), "six": f32(6)}
        middle = [node("Clip", ["a", "zero", "six"], ["c"]), node("Add", ["a", "c"], ["m"])]
        assert find_groups(jq.load(between(*middle, arrays=arrays))).count == 1


class TestNoise:
    def test_channels_are_measured(self):
        """As numpy finds them, of data that fill no whole number of batches."""
        graph = TestClip.model([0.1, 1, 10], bound=1.5)
        data = normal(11, 4, 5, 6)
        seen = measure(graph, find_groups(graph), data, resolve("XINT8"))
        relu = np.maximum(np.einsum("oi,nihw->nohw", graph.params["a.w"][:, :, 0, 0], data), 0)
        over, cut, found = np.maximum(relu - 1.5, 0), np.minimum(relu, 1.5), seen["m"]
        for have, want in (
            (found.reach, relu.max((0, 2, 3))),
            (found.mean, cut.mean((0, 2, 3))),
            (found.power, np.square(cut).mean((0, 2, 3))),
            (found.active, (relu > 0).mean((0, 2, 3))),
            (found.over, over.mean((0, 2, 3))),
            (found.beyond, np.square(over).mean((0, 2, 3))),
        ):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-7)
        assert found.pixels == 30 and set(seen) == {"x", "m", "y"}
        np.testing.assert_allclose(seen["x"].reach, np.abs(data).max((0, 2, 3)))

    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=20, deadline=None)
    def test_of_a_weight(self, seed):
        """The predicted power of what rounding a matrix adds to its outputs is about what it is, as it is of chance."""
        rng = np.random.default_rng(seed)
        w, power = uneven(24, 32, seed=seed, spread=0.3), rng.uniform(0.1, 2, 32)
        classes = np.zeros(24, np.int64), np.zeros((1, 32), np.int64)
        weight = Weight(*classes, power[None], np.abs(w)[:, :, None], np.ones(24), StepGrid(127.0, True))
        step = np.exp2(jq.plan.scales.minmse_exponents([w], jq.arithmetic.formats.INT8.narrow)[0])
        rounded = np.clip(np.rint(w / step), -127, 127) * step
        assert 0.4 < weight.noise(np.ones(1)) / (np.square(rounded - w) @ power).sum() < 2.5

    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=20, deadline=None)
    def test_of_a_weight_with_a_step_for_each_output(self, seed):
        """The same where each row has its own scale; a factor of an output changes no more than its importance says."""
        rng = np.random.default_rng(seed)
        w, power = uneven(24, 32, seed=seed, spread=0.3), rng.uniform(0.1, 2, 32)
        classes = np.ones(24, np.int64), np.zeros((1, 32), np.int64)
        weight = Weight(
            *classes, power[None], np.abs(w)[:, :, None], np.ones(24), StepGrid(127.0, False), per_channel=True
        )
        step = np.abs(w).max(1, keepdims=True) / 127
        predicted = weight.noise(np.ones(2))
        assert 0.6 < predicted / (np.square(np.rint(w / step) * step - w) @ power).sum() < 1.6
        assert weight.noise(np.array([1.0, 5.0])) == pytest.approx(predicted)

    def test_scales_of_channels_leave_factors_to_the_activations(self):
        """Where weights have a scale for each output, the factors found leave less noise than those for one scale."""
        graph = prepare(jq.load(jq.zoo.path("fashion_mobilenet")))
        images, groups = jq.zoo.calibration_set()[0][:16], find_groups(graph)
        one = resolve("A8W8")
        seen = measure(graph, groups, images, one)
        noises = [predict(graph, groups, seen, c) for c in (one, one.replace(per_channel=True))]
        factors = [choose(noise, optimize(noise)) for noise in noises]
        assert noises[1].total(factors[1]) < 0.98 * noises[1].total(factors[0])
        assert noises[1].total(factors[1]) < 0.9 * noises[1].total(np.ones(groups.count))

    def test_of_powers_of_two(self):
        """A factor of a whole power of two for all channels moves the noise nowhere."""
        graph = prepare(jq.load(random_model(5)))
        groups, config = find_groups(graph), resolve("XINT8")
        noise = predict(graph, groups, measure(graph, groups, {"x": normal(4, 4, 5, 6)}, config), config)
        ones = np.ones(groups.count)
        for g in range(1, groups.group.max() + 1):
            assert noise.total(np.where(groups.group == g, 8, ones)) == pytest.approx(noise.total(ones), rel=1e-6)

    def test_nothing_better(self):
        """Where the start is worse than no factors and nothing near it better, there are none."""
        graph = jq.load(between(node("Relu", ["a"], ["m"])))
        groups = find_groups(graph)
        unknown = {k: Channels.unknown(len(v)) for k, v in groups.channels.items()}
        noise = predict(graph, groups, unknown, resolve("XINT8"))
        bad = np.exp2(20.0 * np.arange(groups.count))
        assert noise.total(choose(noise, bad)) <= noise.total(np.ones(groups.count))

    def test_dead_channels(self):
        """Channels of zeros, and a bias of zeros, break nothing."""
        graph = jq.load(between(node("Relu", ["a"], ["m"])))
        w = graph.params["a.w"].copy()
        w[1:3] = 0
        graph = graph.with_arrays({**graph.arrays, "a.w": w, "a.b": np.zeros(5, f32)})
        result = equalize(graph, "XINT8", normal(4, 4, 5, 6))
        feeds = {"x": normal(2, 4, 5, 6)}
        np.testing.assert_allclose(outputs(result, feeds)[0], outputs(graph, feeds)[0], rtol=1e-4, atol=1e-5)


class TestModels:
    def test_depthwise_network_recovers(self):
        """Ranges that differ a hundredfold, which one scale cannot hold, cost a hundredth of the noise."""
        graph, config = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8"), resolve("XINT8")
        images, groups = jq.zoo.calibration_set()[0][:32], find_groups(graph)
        noise = predict(graph, groups, measure(graph, groups, images, config), config)
        s = choose(noise, optimize(noise))
        assert noise.total(s) < 0.02 * noise.total(np.ones(groups.count))
        result = equalize(graph, config, images)
        want, found = (jq.trace(g)(g.params, {"input": images})["logits"] for g in (graph, result))
        assert np.square(found - want).sum() < 1e-3 * np.square(want).sum()

    def test_as_quark(self):
        graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
        strict = equalize(graph, resolve("XINT8").replace(strict_quark=True), jq.zoo.calibration_set()[0][:8])
        for name, array in equalize_as_quark(graph).params.items():
            np.testing.assert_array_equal(strict.params[name], array)

    def test_values_that_are_not_finite(self):
        graph = jq.load(between(node("Relu", ["a"], ["m"])))
        graph = graph.with_arrays({**graph.arrays, "a.b": np.full(5, 3e38, f32)})
        assert equalize(graph, "XINT8", {"x": normal(2, 4, 5, 6)}) is graph


def test_attribute_form_of_bounds():
    """Early operator sets have the bounds of a Clip as attributes."""
    graph = jq.load(between(node("Clip", ["a"], ["m"], min=0.0, max=6.0), opset=10))
    assert [bound for _, bound in find_groups(graph).clips] == [6.0]
    assert find_groups(graph, clips=False).count == 1


class TestNagel:
    """`cle="nagel"`: s_i = sqrt(r1_i r2_i) / r2_i of arXiv:1906.04721, in pairs of layers, until nothing changes."""

    CONFIG = resolve("XINT8").replace(cle="nagel")

    @staticmethod
    def ranges(graph, first, second):
        """The ranges r1, r2 of the channels between two convolutions; a depthwise one's inputs are its rows."""
        head, tail = (graph.params[f"{name}.w"].astype(np.float64) for name in (first, second))
        return np.abs(head).max((1, 2, 3)), np.abs(tail if tail.shape[1] == 1 else tail.swapaxes(0, 1)).max((1, 2, 3))

    def test_one_pair_is_the_papers_equation(self):
        graph = prepare(jq.load(between(node("Relu", ["a"], ["m"]))), self.CONFIG)
        r1, r2 = self.ranges(graph, "a", "y")
        s = np.sqrt(r1 * r2) / r2
        found = equalize(graph, self.CONFIG)
        np.testing.assert_allclose(found.params["a.w"], graph.params["a.w"] / s[:, None, None, None], rtol=1e-5)
        np.testing.assert_allclose(found.params["a.b"], graph.params["a.b"] / s, rtol=1e-5)
        np.testing.assert_allclose(found.params["y.w"], graph.params["y.w"] * s[:, None, None], rtol=1e-5)

    def chain(self):
        arrays = {}
        nodes = [
            conv("x", "a", arrays, 6, 4, seed=1), node("Relu", ["a"], ["ar"]),
            conv("ar", "d", arrays, 6, 6, kernel=3, group=6, seed=2), node("Relu", ["d"], ["dr"]),
            conv("dr", "p", arrays, 5, 6, seed=3), node("Relu", ["p"], ["pr"]),
            conv("pr", "q", arrays, 5, 5, seed=4), node("Add", ["q", "pr"], ["s"]), conv("s", "y", arrays, 3, 5, seed=5),
        ]  # fmt: skip
        return build(nodes, arrays)

    def test_pairs_take_turns_until_all_ranges_are_even(self):
        """A layer and the depthwise one after it, and that one and the next: the paper's fixed point of both."""
        graph = prepare(jq.load(self.chain()), self.CONFIG)
        found = equalize(graph, self.CONFIG)
        for pair in (("a", "d"), ("d", "p")):
            r1, r2 = self.ranges(found, *pair)
            assert not np.allclose(*self.ranges(graph, *pair), rtol=0.1)
            np.testing.assert_allclose(r1, r2, rtol=1e-4)

    def test_channels_of_sums_stay(self):
        graph = prepare(jq.load(self.chain()), self.CONFIG)
        found = equalize(graph, self.CONFIG)
        for name in ("p.b", "q.w", "q.b", "y.w", "y.b"):
            np.testing.assert_array_equal(found.params[name], graph.params[name])

    def test_the_function_stays(self):
        model, x = self.chain(), normal(2, 4, 5, 6)
        graph = prepare(jq.load(model), self.CONFIG)
        (want,) = onnxruntime_outputs(model, {"x": x})
        have = jq.trace(found := equalize(graph, self.CONFIG))(found.params, {"x": x})["y"]
        np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())

    def test_channels_of_zeros_stay(self):
        model = between(node("Relu", ["a"], ["m"]))
        graph = prepare(jq.load(model), self.CONFIG)
        dead = graph.params["a.w"].copy()
        dead[2] = 0
        graph = graph.with_arrays({**graph.arrays, "a.w": dead})
        found = equalize(graph, self.CONFIG)
        np.testing.assert_array_equal(found.params["y.w"][:, 2], graph.params["y.w"][:, 2])
        assert all(np.isfinite(a).all() for a in found.params.values())

    def test_is_named_in_the_config(self):
        assert [resolve("XINT8").replace(cle=c).to_dict()["cle"] for c in (True, False, "nagel")] == [
            True,
            False,
            "nagel",
        ]
        with pytest.raises(jq.ConfigError, match=r"cle needs .*; got 'nagle'\. Did you mean 'nagel'"):
            resolve("XINT8").replace(cle="nagle")
        with pytest.raises(jq.ConfigError, match="cle='nagel' needs strict_quark=False"):
            resolve("XINT8").replace(cle="nagel", strict_quark=True)
