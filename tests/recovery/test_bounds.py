"""`jq.recovery.bounds`: Relu for bounded Clips, where rounding or the data cut there anyway."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import jq
from jq.exchange.export import export
from jq.graph.read import load
from jq.graph.write import to_model
from jq.pipeline import calibrated
from jq.recovery.bounds import bound_choice, fitted_bounds, without_clips
from tests.conftest import onnxruntime_outputs
from tests.npu import structures
from tests.passes.models import ops

XINT8 = jq.presets["XINT8"].replace(guard=None)
WHOLE = XINT8.replace(whole=0.0)


def data_of(scale: float = 3.0, count: int = 16, size: int = 8) -> np.ndarray:
    return (scale * np.random.default_rng(0).standard_normal((count, 3, size, size))).astype(np.float32)


def fixed_bound(reaches: float) -> onnx.ModelProto:
    """A Clip in front of a Sigmoid, which no factor passes, so that its bound stays 6."""
    net = structures.Net()
    x = net.op("Sigmoid", net.clip(net.conv("x", 3, structures.CHANNELS, 3)))
    net.arrays["w0"] *= reaches
    return net.classify(net.op("Relu", net.conv(x, structures.CHANNELS, 8)), 8)


@pytest.mark.parametrize("format", ["XINT8", "A8W8"])
@pytest.mark.parametrize("cle", [False, True])
def test_relu_has_every_code_of_the_clip_whatever_the_data(format, cle):
    config = jq.presets[format].replace(guard=None, cle=cle, whole=0.0)
    ready = calibrated(load(structures.inverted_bottleneck(2)), data_of(), config)
    graph, plan = ready.graph, ready.guarded.plan
    choice = bound_choice(graph, plan, config, ready.data)
    assert choice is not None and len(choice.exact) == 4 and not choice.losses  # the stem, two expansions, the last
    made = without_clips(graph, choice)
    assert ops(made).count("Relu") == 4 and ops(made).count("Clip") == 2
    clips, relus = export(graph, plan), export(made, plan)
    for sample in data_of(100.0):
        feeds = {"x": sample[None]}
        np.testing.assert_array_equal(*(onnxruntime_outputs(m, feeds)[0] for m in (clips, relus)))


def test_a_fitted_bound_is_the_largest_code_and_the_function_stays():
    config = WHOLE.replace(cle=False)
    model = structures.inverted_bottleneck(2)
    graph = jq.prepare(load(model), config)
    plan = jq.make_plan(graph, jq.calibrate(graph, data_of(10.0), config), config)
    made = fitted_bounds(graph, plan, config, data_of(10.0)).graph
    assert made is not graph
    bounds = {float(made.arrays[n.inputs[2]]) for n in made.nodes if n.op_type == "Clip"}
    assert bounds == {6.0, 127 / 16}  # the depthwise layers' stay
    for sample in data_of(10.0, 4):
        feeds = {"x": sample[None]}
        before, after = (onnxruntime_outputs(to_model(g), feeds)[0] for g in (graph, made))
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)
    again = jq.make_plan(made, jq.calibrate(made, data_of(10.0), config), config)
    assert fitted_bounds(made, again, config, data_of(10.0)).graph is made
    tied = {n.outputs[0] for n in made.nodes if n.op_type == "Clip"} & {*again}
    assert {float(again[name].scale) for name in tied} <= {2.0**-k for k in range(3, 9)}


def test_what_cannot_be_fitted_goes_by_what_it_loses():
    def made(reaches: float, whole: float) -> jq.Result:
        return jq.quantize(fixed_bound(reaches), data_of(), XINT8.replace(whole=whole, cle=False))

    some = made(1.5, 0.0)  # few values beyond the bound
    assert "Clip" in ops(some.graph) and some.report.facts["clips"].startswith("1 stay: removing them")
    taken = made(1.5, 0.5)
    assert "Clip" not in ops(taken.graph) and "which loses 0.0" in taken.report.facts["clips"]
    low = made(0.35, 0.0)  # none
    assert "Clip" not in ops(low.graph) and (
        "loses nothing on the data" in low.report.facts["clips"] or "exactly" in low.report.facts["clips"]
    )


def test_losses_are_those_of_the_data():
    config = XINT8.replace(whole=0.0, cle=False)
    ready = calibrated(load(fixed_bound(1.5)), data_of(), config)
    graph, plan = ready.graph, ready.guarded.plan
    choice = bound_choice(graph, plan, config, ready.data)
    clip = next(n for n in graph.nodes if n.op_type == "Clip")
    tapped = graph.replace(outputs=(graph.values[clip.inputs[0]],))
    x = np.concatenate([onnxruntime_outputs(to_model(tapped), {"x": s[None]})[0] for s in data_of()]).astype(np.float64)
    largest = 127 * float(plan[clip.outputs[0]].scale)
    assert largest > 6
    lost = np.square(np.clip(x, 6, largest) - 6).sum() / np.square(np.clip(x, 0, 6)).sum()
    assert choice is not None and choice.losses == {clip.outputs[0]: pytest.approx(lost, rel=1e-3)} and lost > 0


def test_the_least_losses_are_taken_first():
    choice = jq.recovery.bounds.BoundChoice(("e",), {"a": 0.3, "b": 0.1, "c": 0.0}, 0.2)
    assert choice.measured == ("c", "b") and choice.gone == ("e", "c", "b")
    assert "'a'" in str(choice) and "1 stay" in str(choice)


def test_by_default_and_under_strict_quark_clips_stay():
    model, data = structures.inverted_bottleneck(1), data_of(count=4)
    for config in (XINT8, XINT8.replace(strict_quark=True, whole=1.0)):
        result = jq.quantize(model, data, config)
        assert ops(result.graph).count("Clip") == 4 and "clips" not in result.report.facts
    with pytest.raises(jq.ConfigError, match="whole needs a number at least 0"):
        XINT8.replace(whole=-1.0)


def test_finetuning_aims_at_the_network_with_its_bounds():
    config = WHOLE.replace(finetune="bias", finetune_steps=2)
    result = jq.quantize(structures.inverted_bottleneck(1), data_of(count=8), config)
    assert ops(result.graph).count("Relu") == 3 - 0 and "exactly" in result.report.facts["clips"]
    onnx.checker.check_model(result.model, full_check=True)


def clipped(low: float, high: float, layers: int = 2) -> onnx.ModelProto:
    """Layers with a Clip to these bounds behind each."""
    net, x, reads = structures.Net(), "x", 3
    bounds = net.array("low", low), net.array("high", high)
    for _ in range(layers):
        x = net.op("Clip", net.conv(x, reads, structures.CHANNELS, 3), *bounds)
        reads = structures.CHANNELS
    return net.classify(net.op("Relu", net.conv(x, structures.CHANNELS, 8)), 8)


def sqnr(float_: onnx.ModelProto, made: onnx.ModelProto, data: np.ndarray) -> float:
    want, have = (np.concatenate([onnxruntime_outputs(m, {"x": s[None]})[0] for s in data]) for m in (float_, made))
    return float(10 * np.log10(np.square(want).sum() / np.square(want - have).sum()))


@pytest.mark.parametrize("format", ["XINT8", "A8W8"])
@pytest.mark.parametrize("high", [1.0, 3.0, 4.0, 5.0])
def test_clips_to_any_bound_are_relu_of_every_code(high, format):
    config = jq.presets[format].replace(guard=None, whole=0.0)
    ready = calibrated(load(clipped(0.0, high)), data_of(), config)
    choice = bound_choice(ready.graph, ready.guarded.plan, config, ready.data, ready.moved)
    made = without_clips(ready.graph, choice)
    assert choice is not None and len(choice.exact) == 2 and not choice.moved and "Clip" not in ops(made)
    clips, relus = (export(graph, ready.guarded.plan) for graph in (ready.graph, made))
    for sample in data_of(100.0):
        feeds = {"x": sample[None]}
        np.testing.assert_array_equal(*(onnxruntime_outputs(m, feeds)[0] for m in (clips, relus)))
    models = [jq.quantize(clipped(0.0, high), data_of(), config.replace(whole=w)).model for w in (None, 0.0)]
    kept, made = (sqnr(clipped(0.0, high), model, data_of()) for model in models)
    assert made > kept - 1


def test_a_clip_around_zero_goes_at_the_cost_of_its_last_step():
    model = clipped(-1.0, 1.0)
    results = {w: jq.quantize(model, data_of(), XINT8.replace(whole=w)) for w in (None, 0.0, 0.001)}
    assert "Clip" in ops(results[0.0].graph) and "Clip" not in ops(results[0.001].graph)
    assert "moved to the last codes, which loses" in results[0.001].report.facts["clips"]
    assert jq.npu.forecast(results[0.001].model).subgraphs == 1
    kept = {w: sqnr(model, result.model, data_of()) for w, result in results.items()}
    assert kept[0.001] > kept[None] - 1
    config = XINT8.replace(whole=0.001, cle=False)
    graph = jq.prepare(load(model), config)
    plan = jq.make_plan(graph, jq.calibrate(graph, data_of(), config), config)
    first = next(n for n in graph.nodes if n.op_type == "Clip")
    tapped = graph.replace(outputs=(graph.values[first.inputs[0]],))
    x = np.concatenate([onnxruntime_outputs(to_model(tapped), {"x": s[None]})[0] for s in data_of()]).astype(np.float64)
    lost = np.square(np.clip(x, -1, 127 / 128) - np.clip(x, -1, 1)).sum() / np.square(np.clip(x, -1, 1)).sum()
    moved = fitted_bounds(graph, plan, config, data_of()).moved
    assert moved[first.outputs[0]] == pytest.approx(lost, rel=1e-3) and lost > 0


@pytest.mark.parametrize("bounds", [(-2.0, 3.0), (1.0, 4.0), (-100.0, 100.0), (-1.0, np.inf)])
def test_clips_stay_where_codes_cannot_make_them(bounds):
    result = jq.quantize(clipped(*bounds), data_of(), WHOLE)
    assert ops(result.graph).count("Clip") == 2
    assert jq.npu.forecast(result.model).counts["cpu"] == 0  # an operator of its own, which the format lists
