"""The choice between Sigmoid and HardSigmoid, against the loss computed with numpy on what onnxruntime computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest

import jq
from jq.arithmetic.numerics import power_of_two
from jq.npu.constraints import violations
from jq.plan.forms import sigmoid_choice
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal, ops

XINT8 = jq.presets["XINT8"]
SIXTH = float(np.float32(1 / 6))
X = normal(8, 4, 6, 6, seed=3)


def network(spread: float = 1.0, *, seed: int = 0) -> onnx.ModelProto:
    """Conv, SiLU, and a gate of the means as in squeeze-and-excite; `spread` says how far Sigmoids are saturated."""
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="stem", pads=[1, 1, 1, 1]),
        node("Sigmoid", ["a"], ["s"], name="silu"),
        node("Mul", ["a", "s"], ["b"], name="product"),
        node("GlobalAveragePool", ["b"], ["m"], name="squeeze"),
        node("Conv", ["m", "v"], ["e"], name="excite"),
        node("Sigmoid", ["e"], ["g"], name="gate"),
        node("Mul", ["b", "g"], ["c"], name="gated"),
        node("Conv", ["c", "u"], ["y"], name="last"),
    ]
    w, v, u = normal(5, 4, 3, 3, seed=seed), normal(5, 5, 1, 1, seed=seed + 1), normal(3, 5, 1, 1, seed=seed + 2)
    return build(nodes, {"w": spread * w / 3, "v": spread * v, "u": u}, x=("N", 4, 6, 6))


def tensors(model: onnx.ModelProto, *names: str) -> list[np.ndarray]:
    model = onnx.ModelProto.FromString(model.SerializeToString())
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return [a.astype(np.float64) for a in onnxruntime_outputs(model, {"x": X})]


def choice_of(model: onnx.ModelProto, config: jq.QuantConfig) -> tuple[Any, jq.Plan]:
    graph = jq.prepare(jq.load(model), config)
    stats = jq.calibrate(graph, X, config)
    plan = jq.make_plan(graph, stats, config)
    return sigmoid_choice(graph, stats, config, plan.nodes), plan


def hard(x: np.ndarray) -> np.ndarray:
    return np.clip(x / 6 + 0.5, 0, 1)


@pytest.mark.parametrize("method", ["minmse", "nonoverflow"])
def test_losses_are_those_of_what_the_form_changes(method: str) -> None:
    model = network()
    choice, _ = choice_of(model, XINT8.replace(method=method))
    a, b, e, g = tensors(model, "a", "b", "e", "g")
    want = {
        "silu": np.square(a * hard(a) - b).sum() / np.square(b).sum(),
        "gate": np.square(hard(e) - g).sum() / np.square(g).sum(),
    }
    assert choice.losses == pytest.approx(want, rel=1e-4)
    assert choice.loss == pytest.approx(sum(want.values()), rel=1e-4)


def test_the_form_is_taken_up_to_the_bound() -> None:
    model, form = network(), "sigmoid_to_hard_sigmoid"
    loss = choice_of(model, XINT8)[0].loss
    for bound, taken in ((None, True), (loss * 1.01, True), (loss * 0.99, False), (0, False)):
        choice, plan = choice_of(model, XINT8.replace(form_loss=bound))
        assert choice.hard == (form in plan.forms) == taken
    choice, plan = choice_of(model, XINT8.replace(forms=tuple(f for f in XINT8.forms if f != form)))
    assert choice is None and form not in plan.forms


def test_a_form_that_costs_nothing_is_taken() -> None:
    """Where all Sigmoids are saturated, it is the same function."""
    assert choice_of(network(), XINT8)[0].hard is False
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="stem"),
        node("Mul", ["a", "far"], ["f"], name="far"),
        node("Sigmoid", ["f"], ["y"], name="gate"),
    ]
    far = build(nodes, {"w": normal(5, 4, 1, 1), "far": np.float32(1e5)}, x=("N", 4, 6, 6))
    choice, plan = choice_of(far, XINT8)
    assert choice.hard and choice.loss < 1e-4 and "sigmoid_to_hard_sigmoid" in plan.forms


def test_the_file_has_what_was_chosen_and_the_report_says_so() -> None:
    model = network()
    for config, op, words in (
        (XINT8, "Sigmoid", "2 stay: as HardSigmoid they would lose"),
        (XINT8.replace(form_loss=None), "HardSigmoid", "2 become HardSigmoid, which loses"),
        (XINT8.replace(strict_quark=True), "HardSigmoid", None),
    ):
        result = jq.quantize(model, X, config)
        made = [n.op_type for n in result.model.graph.node if n.op_type.endswith("Sigmoid")]
        assert made == [op] * 2
        assert result.report.facts.get("sigmoids", "").startswith(words or "")
        assert ("sigmoids" in result.report.facts) is (words is not None)
        onnx.checker.check_model(result.model, full_check=True)
        assert onnxruntime_outputs(result.model, {"x": X})[0].shape == (8, 3, 6, 6)


def test_excluded_sigmoids_do_not_count() -> None:
    model, bound = network(), XINT8
    whole = choice_of(model, bound)[0].losses
    assert choice_of(model, bound.replace(exclude=("gate",)))[0].losses == {"silu": whole["silu"]}
    assert choice_of(model, bound.replace(exclude=("gate", "silu")))[0] is None


def test_what_was_not_measured_stays() -> None:
    graph = jq.prepare(jq.load(network()), XINT8)
    stats = jq.calibrate(graph, X, XINT8.replace(forms=()))
    assert "sigmoid_to_hard_sigmoid" not in jq.make_plan(graph, stats, XINT8).forms
    assert "sigmoid_to_hard_sigmoid" in jq.make_plan(graph, stats, XINT8.replace(form_loss=None)).forms


def test_statistics_keep_their_losses(tmp_path: Any) -> None:
    graph = jq.prepare(jq.load(network()), XINT8)
    first = jq.calibrate(graph, X[:4], XINT8)
    both = first.merge(jq.calibrate(graph, X[4:], XINT8, like=first))
    both.save(tmp_path / "stats")
    want = jq.calibrate(graph, X, XINT8)
    found = jq.Stats.load(tmp_path / "stats")
    for name, sums in want.states["forms"].items():
        np.testing.assert_allclose(found.states["forms"][name], sums, rtol=1e-6)


def test_preparation_leaves_the_function() -> None:
    assert ops(jq.prepare(jq.load(network()), XINT8)).count("Sigmoid") == 2


def test_finetuning_aims_at_the_float_network_through_the_form() -> None:
    """Of a HardSigmoid that a plan puts in, the targets are those of the Sigmoid, and the last bias makes up for it."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"], name="stem"),
        node("Sigmoid", ["a"], ["s"], name="silu"),
        node("Mul", ["a", "s"], ["c"], name="product"),
        node("Conv", ["c", "u", "d"], ["y"], name="last"),
    ]
    arrays = {"w": normal(5, 4, 1, 1), "b": normal(5), "u": np.abs(normal(3, 5, 1, 1)), "d": normal(3)}
    model = build(nodes, arrays, x=("N", 4, 6, 6))
    config = XINT8.replace(form_loss=None, bias_correction=False)
    want = onnxruntime_outputs(model, {"x": X})[0].mean((0, 2, 3))
    off = [
        np.abs(onnxruntime_outputs(jq.quantize(model, X, c).model, {"x": X})[0].mean((0, 2, 3)) - want).max()
        for c in (config, config.replace(finetune="bias"))
    ]
    assert off[1] < 0.3 * off[0]


def test_constraints_are_those_of_the_form() -> None:
    """A search sees the gate's shift where the form is taken, and only there."""
    graph = jq.prepare(jq.load(network()), XINT8)
    for bound in (None, 0.0):
        config = XINT8.replace(form_loss=bound)
        plan = jq.make_plan(graph, jq.calibrate(graph, X, config), config)
        assert violations(graph, plan, config) == []
        moved = dataclasses.replace(plan["e"], scale=power_of_two(-16))
        beyond = [text for text in violations(graph, plan.replace({"e": moved}), config) if "hard_sigmoid" in text]
        assert bool(beyond) is (bound is None)
