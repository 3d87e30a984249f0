"""Bias correction: what rounded weights shift outputs by, against loops; and the channel means that it takes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from onnx import helper

import jq
from jq.arithmetic.formats import INT8
from jq.calibration.observed import linear_inputs, observers_of
from jq.calibration.observers import ChannelSums
from jq.calibration.stats import Stats
from jq.plan import Plan, QParams
from jq.recovery.bias_correction import correct_biases, output_shift, shifts_of_tails
from jq.recovery.equalization import equalize_as_quark
from tests.calibration.test_calibrate import built, tensors_of

XINT8 = jq.presets["XINT8"]
PLAIN = XINT8.replace(cle=False)
node = helper.make_node


def stats_of(means):
    """Statistics that say no more than these channels' means, each of three values."""
    rows = {k: {"means": len(v)} for k, v in means.items()}
    total = np.concatenate([np.float64(v) for v in means.values()]) * 3
    state = {"count": np.full(len(total), 3, np.int64), "total": total}
    return Stats(XINT8, rows, {"means": ChannelSums(only=tuple(means))}, {"means": {}}, {"means": state}, 1)


def plan_of(graph, *weights, exponent=-2):
    params = QParams(np.float32(2.0**exponent), np.int32(0), INT8.narrow)
    return Plan({}, dict.fromkeys(weights, params), nodes=frozenset(n.outputs[0] for n in graph.nodes))


def coded(w, exponent=-2):
    return np.clip(np.rint(w / 2.0**exponent), INT8.narrow.qmin, 127) * 2.0**exponent


def linear(op, shape, w, b, **attrs):
    arrays = {"w": w} | ({} if b is None else {"b": b})
    return jq.load(built([node(op, ["x", *arrays], ["y"], name="n", **attrs)], shape, ["y"], arrays))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---------------------------------------------------------------------------------------------
# (Q(W) - W) E[x]
# ---------------------------------------------------------------------------------------------

CONVS = {
    "dense": (6, 4, (3, 3), 1),
    "pointwise": (5, 4, (1, 1), 1),
    "grouped": (6, 4, (3, 2), 2),
    "depthwise": (4, 4, (3, 3), 4),
    "depthwise_twofold": (8, 4, (3, 3), 4),
    "1d": (3, 4, (5,), 1),
    "3d": (4, 4, (2, 1, 2), 2),
}


@pytest.mark.parametrize("name", CONVS)
def test_shift_of_a_conv(name):
    outputs, inputs, kernel, groups = CONVS[name]
    w, b, mean = normal(outputs, inputs // groups, *kernel), normal(outputs, seed=1), normal(inputs, seed=2)
    graph = linear("Conv", [1, inputs, *[7] * len(kernel)], w, b, group=groups)
    want = np.zeros(outputs)
    for o in range(outputs):
        for i in range(inputs // groups):
            channel = o // (outputs // groups) * (inputs // groups) + i
            for tap in np.ndindex(*kernel):
                want[o] += (float(coded(w)[(o, i, *tap)]) - float(w[(o, i, *tap)])) * float(mean[channel])
    stats, plan = stats_of({"x": mean}), plan_of(graph, "w")
    np.testing.assert_allclose(output_shift(graph, plan, stats, graph.nodes[0]), want, rtol=1e-6, atol=1e-7)
    corrected = correct_biases(graph, plan, stats)
    np.testing.assert_allclose(corrected.params["b"], b - want, rtol=1e-5, atol=1e-6)
    assert corrected.params["b"].dtype == np.float32 and corrected.params["w"] is graph.params["w"]


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("rank", [1, 2])
def test_shift_of_a_gemm(alpha, transposed, rank):
    w, mean = normal(3, 5) if transposed else normal(5, 3), normal(5, seed=2)
    b = normal(*[1] * (rank - 1), 3, seed=1)
    graph = linear("Gemm", [1, 5], w, b, transB=transposed, **({} if alpha is None else {"alpha": alpha}))
    want = np.zeros(3)
    for o in range(3):
        for i in range(5):
            at = (o, i) if transposed else (i, o)
            want[o] += (1 if alpha is None else alpha) * (float(coded(w)[at]) - float(w[at])) * float(mean[i])
    stats, plan = stats_of({"x": mean}), plan_of(graph, "w")
    np.testing.assert_allclose(output_shift(graph, plan, stats, graph.nodes[0]), want, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        correct_biases(graph, plan, stats).params["b"].reshape(-1), b.reshape(-1) - want, rtol=1e-5
    )


def test_the_shift_of_scales_per_channel_and_of_clipped_weights():
    w, mean = normal(4, 3, 1, 1) * 40, normal(3, seed=2)
    graph, scale = linear("Conv", [1, 3, 4, 4], w, normal(4)), np.float32([0.1, 0.2, 0.3, 1])
    per_channel = QParams(scale, np.zeros(4, np.int32), INT8.narrow, 0)
    plan = Plan({}, {"w": per_channel}, nodes=frozenset("y"))
    rows = scale.astype(np.float64)[:, None]
    rounding = np.clip(np.rint(w[:, :, 0, 0] / rows), -127, 127) * rows - w[:, :, 0, 0]
    shift = output_shift(graph, plan, stats_of({"x": mean}), graph.nodes[0])
    assert np.abs(rounding).max() > 1  # some are clipped
    np.testing.assert_allclose(shift, rounding @ mean, rtol=1e-4, atol=1e-4)


W, B = normal(4, 4, 1, 1), normal(4, seed=1)
LEFT = {
    "no_bias": ([node("Conv", ["x", "w"], ["y"])], ["y"]),
    "bias_read_twice": ([node("Conv", ["x", "w", "b"], ["y"]), node("Conv", ["x", "w", "b"], ["z"])], ["y", "z"]),
    "bias_read_otherwise": ([node("Conv", ["x", "w", "b"], ["y"]), node("Neg", ["b"], ["z"])], ["y", "z"]),
    "bias_computed": ([node("Neg", ["b"], ["c"]), node("Conv", ["x", "w", "c"], ["y"])], ["y"]),
    "transposed_conv": ([node("ConvTranspose", ["x", "w", "b"], ["y"])], ["y"]),
    "no_means": ([node("Neg", ["x"], ["a"]), node("Conv", ["a", "w", "b"], ["y"])], ["y"]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_taken_back_stays(name):
    nodes, outputs = LEFT[name]
    read = {i for n in nodes for i in n.input}
    graph = jq.load(built(nodes, [1, 4, 5, 5], outputs, {k: v for k, v in {"w": W, "b": B}.items() if k in read}))
    assert correct_biases(graph, plan_of(graph, "w"), stats_of({"x": normal(4)})) is graph


@pytest.mark.parametrize("attrs", [{"beta": 2.0}, {"transA": 1}, {"bias": (4, 1)}, {"bias": (1,)}, {"bias": (4, 3)}])
def test_a_gemm_that_does_more_than_add_its_bias_stays(attrs):
    bias = normal(*attrs.pop("bias", (3,)), seed=1)
    graph = linear("Gemm", [4, 4], normal(4, 3), bias, **attrs)
    assert correct_biases(graph, plan_of(graph, "w"), stats_of({"x": normal(4)})) is graph


def test_a_column_of_a_gemm_as_long_as_its_rows_is_no_bias_of_channels():
    graph = linear("Gemm", [3, 4], normal(4, 3), normal(3, 1))
    assert correct_biases(graph, plan_of(graph, "w"), stats_of({"x": normal(4)})) is graph


def test_a_weight_that_is_not_quantized_shifts_nothing():
    graph = linear("Conv", [1, 4, 5, 5], W, B)
    assert correct_biases(graph, plan_of(graph), stats_of({"x": normal(4)})) is graph


@pytest.mark.parametrize("preset", ["BF16", "BFP16", "MXFP8", "UINT8_DYNAMIC_QUANT"])
def test_formats_without_calibration_have_no_means(preset):
    config = jq.presets[preset]
    assert config.bias_correction and not config.corrects_bias
    assert "means" not in observers_of(config, ("x",)) and "means" in observers_of(XINT8, ("x",))


def test_what_is_cast_to_bfloat16_is_not_corrected():
    model = built([node("Conv", ["x", "w", "b"], ["y"])], [1, 4, 5, 5], ["y"], {"w": W, "b": B})
    np.testing.assert_array_equal(jq.quantize(model, normal(2, 4, 5, 5), "BF16").graph.params["b"], B)


# ---------------------------------------------------------------------------------------------
# What it is for
# ---------------------------------------------------------------------------------------------


def test_the_mean_output_is_the_float_one_up_to_the_rounding_of_the_bias():
    """Without padding, with channels that are constant: then the mean is all that there is."""
    levels = np.float32([0.5, 0.25, -1, 0.75])  # codes of 2^-7 that no rounding touches
    x = np.broadcast_to(levels[:, None, None], (3, 4, 6, 6)).copy()
    w, b = normal(5, 4, 3, 3) + 0.3, normal(5, seed=1)
    model = built([node("Conv", ["x", "w", "b"], ["y"])], ["N", 4, 6, 6], ["y"], {"w": w, "b": b})
    want = tensors_of(model, x)["y"][:, 0].mean((0, 2, 3))
    off = {}
    for corrected in (True, False):
        result = jq.quantize(model, x, PLAIN.replace(bias_correction=corrected))
        unrounded = result.plan.replace({"y": None})
        found = jq.fake_quant(result.graph)(result.graph.params, unrounded, {"x": x})["y"]
        off[corrected] = np.abs(np.asarray(found, np.float64).mean((0, 2, 3)) - want).max()
        step = float(result.plan["b"].scale)
    assert off[True] <= step / 2 + 1e-5 < off[False]


@pytest.fixture(scope="module", params=jq.zoo.models())
def accuracies(request):
    """Of a bundled net on its evaluation images, with and without."""
    images, labels = jq.zoo.evaluation_set()
    graph = equalize_as_quark(jq.prepare(jq.load(jq.zoo.path(request.param)), XINT8))
    stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:64])
    fn = jq.fake_quant(graph)

    @jax.jit
    def logits(params, plan, images):
        return jq.chunked(lambda p, inputs: fn(p, plan, inputs))(params, {"input": images})["logits"]

    plan = jq.make_plan(graph, stats)
    corrected = correct_biases(graph, plan, stats)
    found = [logits(g.params, jq.make_plan(g, stats), images) for g in (corrected, graph)]
    return [float((np.asarray(v).argmax(-1) == labels).mean()) for v in found]


def test_the_bundled_nets_are_no_worse_for_it(accuracies):
    corrected, plain = accuracies
    assert corrected >= plain > 0.5


def test_quantize_corrects_by_default_and_as_quark_does_not():
    w, b = normal(5, 4, 3, 3) + 0.3, normal(5, seed=1)
    model = built([node("Conv", ["x", "w", "b"], ["y"])], [1, 4, 6, 6], ["y"], {"w": w, "b": b})
    x = np.abs(normal(8, 4, 6, 6, seed=3))
    results = {
        (strict, on): jq.quantize(model, x, PLAIN.replace(strict_quark=strict, bias_correction=on))
        for strict in (False, True)
        for on in (False, True)
    }
    biases = {k: r.graph.params["b"] for k, r in results.items()}
    assert (biases[False, True] != b).all() and (biases[False, False] == b).all()
    assert (biases[True, True] == b).all() and (biases[True, False] == b).all()
    codes = [r.model.graph.SerializeToString() for k, r in results.items() if k[0]]
    assert codes[0] == codes[1]
    stats = results[False, True].stats
    assert stats is not None and "means" in stats.observers
    mean = x.mean((0, 2, 3), dtype=np.float64)
    plan = results[False, False].plan
    rounding = (np.rint(w / plan["w"].scale) * plan["w"].scale - w).astype(np.float64)
    np.testing.assert_allclose(biases[False, True], b - rounding.sum((2, 3)) @ mean, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# The channels' means
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net():
    """Conv, which hands on channels last; an elementwise branch; a Gemm, a MatMul and a ConvTranspose."""
    arrays = {
        "w1": normal(6, 3, 3, 3),
        "b1": normal(6, seed=1),
        "w2": normal(3, 6, 1, 1, seed=2),
        "b2": normal(3, seed=3),
        "wg": normal(75, 4, seed=4),
        "bg": normal(4, seed=5),
        "wm": normal(4, 2, seed=6),
        "wt": normal(3, 2, 2, 2, seed=7),
    }
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 4),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"]),
        node("Add", ["c2", "x"], ["sum"]),
        node("ConvTranspose", ["sum", "wt"], ["t"]),
        node("Flatten", ["sum"], ["flat"]),
        node("Gemm", ["flat", "wg", "bg"], ["g"]),
        node("MatMul", ["g", "wm"], ["m"]),
    ]
    return built(nodes, ["N", 3, 5, 5], ["t", "m"], arrays)


@pytest.fixture(scope="module")
def data():
    return normal(13, 3, 5, 5, seed=8) + np.float32([1, -2, 0])[:, None, None]


@pytest.fixture(scope="module")
def stats(net, data):
    return jq.calibrate(jq.load(net), data, PLAIN)


def test_means_are_those_of_numpy(net, data, stats):
    values = tensors_of(net, data)
    # What a ConvTranspose alone reads is not measured: its biases are not corrected.
    linear = {"x": 1, "r1": 2, "flat": 2}  # rank 1 of one sample: the axis of channels is 2 of the stack
    assert set(linear_inputs(jq.load(net))) == set(linear)
    for name, axis in linear.items():
        rows = stats.rows(name, "means")
        rest = tuple(i for i in range(values[name].ndim) if i != axis)
        channels = values[name].shape[axis]
        assert rows["count"].tolist() == [values[name].size // channels] * channels
        want = values[name].mean(rest, dtype=np.float64)
        np.testing.assert_allclose(rows["total"] / rows["count"], want, rtol=1e-4, atol=1e-5)
    for name in set(stats.tensors) - set(linear):
        assert stats.tensors[name]["means"] == 0
        assert all(v.size == 0 for v in stats.rows(name, "means").values())


def test_means_of_merged_runs_are_those_of_all(net, data, stats):
    graph = jq.load(net)
    first = jq.calibrate(graph, data[:6], PLAIN)
    merged = first.merge(jq.calibrate(graph, data[6:], PLAIN, like=first))
    for name in ("x", "r1", "sum", "flat"):
        have, want = merged.rows(name, "means"), stats.rows(name, "means")
        np.testing.assert_array_equal(have["count"], want["count"])
        np.testing.assert_allclose(have["total"], want["total"], rtol=1e-5, atol=1e-4)


def test_means_are_saved_and_loaded(stats, tmp_path):
    stats.save(tmp_path / "stats")
    loaded = Stats.load(tmp_path / "stats")
    assert loaded.observers["means"] == stats.observers["means"]
    for name in stats.tensors:
        for leaf, array in stats.rows(name, "means").items():
            np.testing.assert_array_equal(loaded.rows(name, "means")[leaf], array)


def test_means_of_either_order_of_axes_agree():
    """What a convolution hands on lies channels last; an observer is told so by its axis."""
    x, only = normal(2, 5, 4, 3), ChannelSums(only=("x",))
    plain = only.observe(x, {})
    last = dataclasses.replace(only, axis=3).observe(np.moveaxis(x, 1, -1), {})
    assert plain["count"].tolist() == last["count"].tolist() == [24] * 5
    np.testing.assert_allclose(plain["total"], last["total"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(plain["total"], x.sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    assert only.observes("x") and not only.observes("y")
    none = only.init(5, {})
    for leaf, array in only.merge(none, plain).items():
        np.testing.assert_array_equal(array, plain[leaf])


# ---------------------------------------------------------------------------------------------
# Negative tails
# ---------------------------------------------------------------------------------------------


def silu_network(scale=12.0):
    """Conv, SiLU, Conv without padding; SiLU's values reach far, so that its tail has a code or two."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"]),
        node("Sigmoid", ["a"], ["s"]),
        node("Mul", ["a", "s"], ["c"]),
        node("Conv", ["c", "v", "d"], ["y"]),
    ]
    arrays = {"w": scale * normal(6, 4, 1, 1), "b": normal(6, seed=1), "v": normal(5, 6, 1, 1) + 1, "d": normal(5)}
    return built(nodes, ["N", 4, 6, 6], ["y"], arrays)


def test_shifts_of_a_tail_are_the_means_of_what_is_rounded_since_the_layer_before():
    model, x = silu_network(), normal(10, 4, 6, 6, seed=3)
    graph = jq.load(model)
    stats = jq.calibrate(graph, x, PLAIN)
    plan = jq.make_plan(graph, stats, PLAIN.replace(forms=()))
    shifts = shifts_of_tails(graph, plan, stats, x, PLAIN)
    assert shifts.keys() == {"c"} and stats.range("c")[0] > -4 * float(plan["c"].scale)

    def rounded(values, tensor):
        step = float(plan[tensor].scale)
        return np.clip(np.rint(values / step), -128, 127) * step

    seen = tensors_of(model, x)
    a = rounded(seen["a"][:, 0].astype(np.float64), "a")
    made = rounded(a * rounded(1 / (1 + np.exp(-a)), "s"), "c")
    np.testing.assert_allclose(shifts["c"], made.mean((0, 2, 3)) - seen["c"][:, 0].mean((0, 2, 3)), atol=1e-4)
    weight = coded(graph.params["v"], int(plan["v"].exponent))
    both, alone = (output_shift(graph, plan, stats, graph.nodes[-1], s) for s in (shifts, None))
    np.testing.assert_allclose(both - alone, weight[:, :, 0, 0] @ shifts["c"], rtol=1e-5)


def test_twins_follow_sums_and_joins_and_leave_the_graph_as_it_is():
    """Through a Concat of an input and a residual sum of two layers, on a graph with names like those of the twins."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"]),
        node("Sigmoid", ["a"], ["s"]),
        node("Mul", ["a", "s"], ["c"]),
        node("Conv", ["c", "v"], ["a.1"]),
        node("Add", ["c", "a.1"], ["r"]),
        node("Concat", ["r", "c"], ["j"], axis=1),
        node("Conv", ["j", "u", "d"], ["y"]),
    ]
    arrays = {"w": 12 * normal(6, 4, 1, 1), "b": normal(6, seed=1), "v": 1e-3 * normal(6, 6, 1, 1), "d": normal(5)}
    model = built(nodes, ["N", 4, 6, 6], ["y"], arrays | {"u": normal(5, 12, 1, 1) + 1})
    x = normal(10, 4, 6, 6, seed=3)
    graph = jq.load(model)
    stats = jq.calibrate(graph, x, PLAIN)
    plan = jq.make_plan(graph, stats, PLAIN.replace(forms=(), constraints=()))
    shifts = shifts_of_tails(graph, plan, stats, x, PLAIN)
    assert shifts.keys() == {"j"} and np.all(np.abs(shifts["j"]) > 0)
    half = len(shifts["j"]) // 2
    np.testing.assert_allclose(shifts["j"][:half], shifts["j"][half:], atol=0.1)  # r is c and little more


def test_tails_of_many_codes_and_none_are_left():
    x = normal(10, 4, 6, 6, seed=3)
    for model in (silu_network(0.1), jq.zoo.path("fashion_resnet")):
        graph = jq.prepare(jq.load(model), PLAIN)
        data = (
            x if isinstance(graph.inputs[0].shape[1], int) and graph.inputs[0].shape[1] == 4 else normal(8, 1, 28, 28)
        )
        stats = jq.calibrate(graph, data, PLAIN)
        assert shifts_of_tails(graph, jq.make_plan(graph, stats, PLAIN), stats, data, PLAIN) == {}


def test_a_network_with_tails_has_the_mean_of_the_float_one():
    """Where no zeros are padded and only the tail and the weight behind it are rounded."""
    model, x = silu_network(), normal(64, 4, 6, 6, seed=3)
    graph = jq.load(model)
    stats = jq.calibrate(graph, x, PLAIN)
    plan = jq.make_plan(graph, stats, PLAIN.replace(forms=()))
    plan = plan.replace({t: None for t in plan if t not in ("c", "v")})
    want, off = tensors_of(model, x)["y"][:, 0].mean((0, 2, 3)), []
    for shifts in (shifts_of_tails(graph, plan, stats, x, PLAIN), None):
        corrected = correct_biases(graph, plan, stats, shifts)
        made = jq.fake_quant(corrected)(corrected.params, plan, {"x": x})["y"]
        off.append(np.abs(np.asarray(made).mean((0, 2, 3)) - want).max())
    assert off[0] < 1e-3 < 0.05 < off[1]


def test_data_that_can_be_read_once_are_enough():
    model, x = silu_network(), normal(8, 4, 6, 6, seed=3)
    once = jq.quantize(model, ({"x": image[None]} for image in x), PLAIN)
    assert once.model.graph == jq.quantize(model, x, PLAIN).model.graph
