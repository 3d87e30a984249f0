"""Searches from plans that are spoiled on purpose, so that there is something to find."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from onnx import TensorProto, helper

import jq
from jq.npu.constraints import moving_together, violations
from jq.recovery.exponents.descent import Moves, Way
from jq.recovery.exponents.segments import SampleBlock, blocks_of
from jq.recovery.exponents.weighted import weighted_errors
from jq.research import fisher, search_exponents, sensitivity
from tests.calibration.test_calibrate import built
from tests.research.networks import images, planned, residual

CONFIG = jq.presets["XINT8"]
METHODS = ("joint", "coordinate", "beam", "weighted", "sequential")


def moved(plan, octaves):
    return plan.replace(
        {t: dataclasses.replace(plan[t], scale=plan[t].scale * np.float32(2.0**n)) for t, n in octaves.items()}
    )


def loss(plan):
    """On all of the images, by other means than the search's."""
    graph = residual()
    want = np.asarray(jq.trace(graph)(graph.params, {"x": images()})["y"])
    have = np.asarray(jq.fake_quant(graph)(graph.params, plan, {"x": images()})["y"])
    return float((np.square(have - want).sum(1) / np.square(want).sum(1)).mean())


@functools.cache
def spoiled():
    return moved(planned(), {"r1": 1, "r2": 1, "y": 1})


@functools.cache
def searched(method):
    return search_exponents(residual(), spoiled(), images(), method=method, width=2)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_spoiled_is_mended(method):
    found = searched(method)
    assert found.steps
    assert found.after < 0.9 * found.before
    assert loss(found.plan) < 0.9 * loss(spoiled())


@pytest.mark.parametrize("method", METHODS)
def test_only_exponents_change_and_no_rule_is_broken(method):
    graph, before, after = residual(), spoiled(), searched(method).plan
    assert violations(graph, before, CONFIG) == violations(graph, after, CONFIG) == []
    changed = {t for t in before if before[t].scale != after[t].scale}
    assert changed == {t for step in searched(method).steps for t in step.tensors}
    for t in before:
        assert dataclasses.replace(after[t], scale=before[t].scale).codes(np.ones(3)) is not None
        assert (after[t].grid, after[t].axis, int(after[t].zero_point)) == (
            before[t].grid, before[t].axis, int(before[t].zero_point)
        )  # fmt: skip
        assert after[t].is_power_of_two
    for group in moving_together(graph, before, CONFIG):
        assert len({float(after[t].scale) for t in group}) == 1
    if method in ("weighted", "sequential"):
        assert not changed & before.weights.keys()


def test_joint_is_at_least_as_good_as_the_method_it_begins_with():
    assert searched("joint").after <= searched("weighted").after


def test_where_there_are_no_gradients_the_other_methods_search():
    """A loop whose turns hang on data has none."""
    rng = np.random.default_rng(0)
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c_"]), helper.make_node("Mul", ["v", "half"], ["v_"])], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("c", TensorProto.BOOL, []),
         helper.make_tensor_value_info("v", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("c_", TensorProto.BOOL, []), helper.make_tensor_value_info("v_", TensorProto.FLOAT, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"]),
        helper.make_node("ReduceMax", ["y"], ["m"], keepdims=0),
        helper.make_node("Cast", ["m"], ["n"], to=TensorProto.INT64),
        helper.make_node("Loop", ["n", "yes", "y"], ["z"], body=body),
        helper.make_node("Conv", ["z", "u"], ["o"]),
    ]
    arrays = {
        "w": rng.standard_normal((4, 3, 3, 3), np.float32), "u": rng.standard_normal((4, 4, 1, 1), np.float32),
        "half": np.float32(0.5), "yes": np.array(True),
    }  # fmt: skip
    graph = jq.prepare(jq.load(built(nodes, [1, 3, 8, 8], ["o"], arrays)), CONFIG)
    data = rng.standard_normal((16, 3, 8, 8), np.float32)
    plan = jq.make_plan(graph, jq.calibrate(graph, data, CONFIG), CONFIG)
    with pytest.raises(jq.ModelError, match="no gradients"):
        search_exponents(graph, plan, data, method="weighted")
    with pytest.raises(jq.ModelError, match="no gradients"):
        fisher(graph, data)
    with pytest.raises(jq.ModelError, match="no gradients"):
        sensitivity(graph, plan, data, screen=0)
    found = search_exponents(graph, plan, data)
    assert found.after <= found.before


def test_the_same_data_give_the_same_plan():
    one, other = searched("coordinate"), search_exponents(residual(), spoiled(), images(), method="coordinate")
    assert one.steps == other.steps
    assert (one.before, one.after) == (other.before, other.after)


def test_what_the_samples_held_back_do_not_confirm_is_not_kept():
    x = images().copy()
    x[3::4] *= 40  # those held back clip at the finer exponents that the others want
    graph = residual()
    plan = jq.make_plan(graph, jq.calibrate(graph, x))
    found = search_exponents(graph, plan, x, weights=False)
    assert found.after <= found.before


def test_params_are_what_is_rounded_and_the_graph_what_is_aimed_at():
    graph, x = residual(), images()[3::4]
    off = {**graph.params, "b4": graph.params["b4"] + np.float32(5)}
    found = search_exponents(graph, planned(), images(), method="weighted", params={"b4": off["b4"]})
    want = np.asarray(jq.trace(graph)(graph.params, {"x": x})["y"])
    have = np.asarray(jq.fake_quant(graph)(off, planned(), {"x": x})["y"])
    lost = (np.square(have - want).sum(1) / np.square(want).sum(1)).mean()
    assert found.before == pytest.approx(lost, rel=1e-3)


def test_moves_that_break_a_rule_are_not_made():
    graph, plan = residual(), planned()
    moves = Moves.of(graph, plan, CONFIG, weights=True)
    (group,) = [g for g in moves.groups if "y" in g]
    coarse = [n for n in range(40) if moves.to(plan, group, int(plan["y"].exponent) + n) is None]
    assert coarse
    broken = moved(plan, dict.fromkeys(group, coarse[0]))
    assert violations(graph, broken, CONFIG)
    assert all("w1" not in g for g in Moves.of(graph, plan, CONFIG, weights=False).groups)


def test_weighted_errors_are_what_a_linear_network_adds_to_its_loss():
    """Of the last layer's input everything is linear, so that the projected error is the loss on average."""
    graph, plan = residual(), planned()
    block, _ = blocks_of(graph, images(), CONFIG, apart=4)
    many = [SampleBlock(b.inputs, b.targets, b.valid) for b in block] * 40  # each time another projection
    exponent = int(plan["s"].exponent)
    table = weighted_errors(graph, plan, many, {"s": [exponent, exponent + 3]}, "mse", jax.random.key(0))["s"]
    seen = jq.trace(graph, taps=["s"])
    x = images()[np.arange(24) % 4 != 3]
    y, tapped = seen(graph.params, {"x": x})
    for k, e in enumerate((exponent, exponent + 3)):
        s = np.asarray(tapped["s"], np.float64)
        rounded = np.clip(np.rint(s / 2.0**e), -128, 127) * 2.0**e
        lost = (rounded - s).mean((2, 3)) @ graph.params["w4"].T.astype(np.float64)
        want = (np.square(lost).sum(1) / np.square(np.asarray(y["y"], np.float64)).sum(1)).sum()
        assert table[1, k] / 40 == pytest.approx(want, rel=0.25)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"method": "coordinates"}, "coordinate"),
        ({"loss": "l2"}, "mse"),
        ({"width": 0}, "1 or more"),
    ],
)
def test_wrong_arguments_are_named(given, what):
    with pytest.raises(jq.ConfigError, match=what):
        search_exponents(residual(), planned(), images(), **given)


def test_too_few_samples_and_nothing_to_search_are_named():
    with pytest.raises(jq.DataError, match="held back"):
        search_exponents(residual(), planned(), images()[:3])
    config = jq.presets["A8W8"]
    plan = jq.make_plan(residual(), jq.calibrate(residual(), images(), config), config)
    with pytest.raises(jq.ConfigError, match="powers of two"):
        search_exponents(residual(), plan, images(), config)


def test_a_result_prints_its_moves():
    found = searched("coordinate")
    assert len(str(found).splitlines()) == len(found.steps) + 1
    assert found.steps[0].tensors[0] in found._repr_html_()
    assert Way(planned()).steps == ()
