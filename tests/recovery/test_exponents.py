"""The stage of finetuning that searches exponents of activations by the outputs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import jq

IMAGES = jq.zoo.calibration_set()[0][:24]


def test_a_step_that_is_too_coarse_is_found_and_nothing_else_changes() -> None:
    config = jq.presets["XINT8"].replace(finetune="exponents")
    graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES))
    coarse = plan.replace({"input": dataclasses.replace(plan["input"], scale=np.float32(4 * plan["input"].scale))})
    params, searched = jq.finetune(graph, coarse, IMAGES, config)
    assert float(searched["input"].scale) < float(coarse["input"].scale)
    assert all(np.array_equal(a, graph.params[k]) for k, a in params.items())
    assert all(float(q.scale) == float(plan[k].scale) for k, q in searched.weights.items())
    assert len(jq.npu.constraints.violations(graph, searched, config)) <= len(
        jq.npu.constraints.violations(graph, coarse, config)
    )


def test_too_few_samples_are_told() -> None:
    graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES[:3]))
    with pytest.warns(UserWarning, match="needs 4 samples or more; got 3"):
        _, same = jq.finetune(graph, plan, IMAGES[:3], jq.presets["XINT8"].replace(finetune="exponents"))
    assert {k: float(same[k].scale) for k in same.activations} == {k: float(plan[k].scale) for k in plan.activations}
