"""Outputs that an average pool makes, and ties of their two largest values, counted by numpy."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest

import jq
from jq.plan.outputs import coarse_outputs, pooled_outputs
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal

XINT8 = jq.presets["XINT8"].replace(guard=None)
CLASSES = 12
MOVES = ([], [node("Flatten", ["p"], ["y"], name="flat")], [node("Reshape", ["p", "shape"], ["y"], name="flat")])


def classifier(moves: int = 1, *, last: list[onnx.NodeProto] | None = None, spread: float = 1.0) -> onnx.ModelProto:
    """Features with a few bright pixels, so that maps reach further than their means, as in SqueezeNet."""
    tail = MOVES[moves] if last is None else last
    pooled = "p" if tail else "y"
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="classes"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("GlobalAveragePool", ["r"], [pooled], name="pool"),
        *tail,
    ]
    arrays = {"w": spread * normal(CLASSES, 4, 1, 1), "b": spread * np.full(CLASSES, 2, np.float32)}
    arrays |= {"shape": np.int64([0, -1]), "v": normal(5, CLASSES), "d": normal(5)}
    used = {name for n in nodes for name in n.input}
    return build(nodes, {k: a for k, a in arrays.items() if k in used}, x=("N", 4, 8, 8))


def images(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    bright = 40 * (rng.random((count, 1, 8, 8)) < 0.05)
    return (rng.standard_normal((count, 4, 8, 8)) * (1 + bright)).astype(np.float32)


def tied(y: np.ndarray) -> float:
    top = np.sort(y.reshape(len(y), -1), 1)
    return float(np.mean(top[:, -1] == top[:, -2]))


@pytest.mark.parametrize("moves", [0, 2])
def test_a_pool_at_the_end_stays_in_float_where_its_step_makes_ties(moves: int, caplog: Any) -> None:
    model, x, fresh = classifier(moves), images(128), images(256, seed=1)
    with caplog.at_level(logging.WARNING, "jq"):
        kept = jq.quantize(model, x, XINT8)
    aligned = jq.quantize(model, x, XINT8.replace(output_ties=None))
    labels = [n.label for n in pooled_outputs(kept.graph)[0].nodes]
    assert "averaged in float" in caplog.text and all(f'"{label}"' in caplog.text for label in labels)
    want, have, before = (onnxruntime_outputs(m, {"x": fresh})[0] for m in (model, kept.model, aligned.model))
    assert "r" in kept.plan and "y" not in kept.plan and "p" not in kept.plan
    assert aligned.plan["r"].exponent == aligned.plan["p" if moves else "y"].exponent
    assert tied(before) > 0.1 and tied(have) < tied(before) / 4
    agree = [np.mean(y.reshape(256, -1).argmax(1) == want.reshape(256, -1).argmax(1)) for y in (have, before)]
    assert agree[0] > agree[1]
    assert np.square(have - want).sum() < np.square(before - want).sum()
    # The override that is named says the same.
    excluded = jq.quantize(model, x, XINT8.replace(output_ties=None, exclude=tuple(labels))).model
    assert excluded.graph.SerializeToString() == kept.model.graph.SerializeToString()


def test_the_report_counts_ties_at_the_outputs() -> None:
    model, x = classifier(), images(512)
    result = jq.quantize(model, x, XINT8.replace(output_ties=None))
    named, share, *_ = result.report.facts["ties"].split()
    assert named == "y"
    counted = tied(onnxruntime_outputs(result.model, {"x": x})[0])
    assert float(share.rstrip("%")) / 100 == pytest.approx(counted, abs=0.05) and counted > 0.1


@pytest.mark.parametrize(("step", "last"), [(0.5, 127), (0.015625, 127), (0.3, None)])
def test_ties_of_a_step_are_those_of_random_values(step: float, last: int | None) -> None:
    config = XINT8 if last else jq.presets["A8W8"].replace(symmetric=False)
    y = (3 * normal(20000, 10) + 1).astype(np.float32)
    model = build([node("Identity", ["x"], ["y"])], x=("N", 10))
    stats = jq.calibrate(jq.load(model), y[:4000], config.replace(batch=500))
    codes = np.rint(y / np.float32(step))
    want = tied(codes if last is None else np.minimum(codes, last))
    found = stats.ties("y", step, last)
    assert found == pytest.approx(want, abs=0.02)
    assert stats.ties("y", step, 7) is None


def test_equal_values_and_maps_are_no_ties() -> None:
    """Of samples that tie in float, rounding loses nothing; and a map has no largest class."""
    nodes = [node("Mul", ["x", "one"], ["y"]), node("GlobalAveragePool", ["x"], ["z"])]
    model = build(nodes, {"one": np.ones((), np.float32)}, x=("N", 4, 2, 2), outputs=("y", "z"))
    stats = jq.calibrate(jq.load(model), np.ones((8, 4, 2, 2), np.float32), XINT8)
    assert stats.ties("y", 1.0, 127) is None and stats.ties("z", 1.0, 127) == 0


def test_which_outputs_are_pooled() -> None:
    def outputs(*last: onnx.NodeProto) -> list[str]:
        return [p.output for p in pooled_outputs(jq.prepare(jq.load(classifier(last=list(last)))))]

    assert outputs(*MOVES[1]) == ["y"]
    assert outputs(node("Flatten", ["p"], ["f"]), node("Gemm", ["f", "v", "d"], ["y"], transB=1)) == []
    assert outputs(node("Sigmoid", ["p"], ["y"])) == []


@pytest.mark.parametrize("config", ["A8W8", XINT8.replace(strict_quark=True), XINT8.replace(constraints=())])
def test_only_an_aligned_pool_is_left(config: Any) -> None:
    config = jq.presets[config] if isinstance(config, str) else config
    graph = jq.prepare(jq.load(classifier()), config)
    stats = jq.calibrate(graph, images(64), config)
    plan = jq.make_plan(graph, stats, config)
    assert "p" in plan and coarse_outputs(graph, plan, stats, config) == ()


def test_a_scale_of_your_own_is_kept() -> None:
    graph = jq.prepare(jq.load(classifier()), XINT8)
    stats = jq.calibrate(graph, images(64), XINT8)
    own = jq.make_plan(graph, stats, XINT8.replace(output_ties=None))["p"]
    assert "p" not in jq.make_plan(graph, stats, XINT8)
    assert "p" in jq.make_plan(graph, stats, XINT8, scales={"p": own})


def test_lint_names_the_structure() -> None:
    def found(config: jq.QuantConfig) -> list[Any]:
        return [f for f in jq.lint(classifier(), config) if f.rule == "pooled-output"]

    (note,) = found(XINT8)
    assert note.severity == "note" and 'exclude=["pool", "flat"]' in note.message and "2.0%" in note.message
    assert [f.severity for f in found(XINT8.replace(output_ties=None))] == ["warning"]
    assert found(XINT8.replace(exclude=("pool",))) == found(jq.presets["A8W8"]) == []
