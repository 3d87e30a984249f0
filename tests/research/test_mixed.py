"""Mixed precision: choices against all there are, and what comes out against onnxruntime."""

from __future__ import annotations

import itertools
import json

import numpy as np
import onnx
import pytest
from scipy.special import log_softmax

import jq
from jq import research
from jq.research.mixed import greedy_choice, milp_choice, pareto_front
from tests.conftest import onnxruntime_outputs
from tests.research.conftest import CLASSES


def total(table, chosen):
    return float(table[np.arange(len(table)), chosen].sum())


def best(losses, costs, limit):
    every = itertools.product(range(losses.shape[1]), repeat=len(losses))
    return min(total(losses, np.array(c)) for c in every if total(costs, np.array(c)) <= limit * (1 + 1e-9))


@pytest.mark.parametrize("seed", range(8))
def test_milp_is_as_good_as_any_choice_and_no_worse_than_greedy(seed):
    rng = np.random.default_rng(seed)
    losses = rng.exponential(size=(6, 3)) * 10.0 ** rng.integers(-6, 0)
    costs = rng.integers(1, 20, (6, 3)).astype(float) * 10.0 ** rng.integers(0, 9)
    least = costs.min(axis=1).sum()
    for budget in (1.0, 1.2, 1.7, 4.0):
        chosen, greedy = (solve(losses, costs, budget * least) for solve in (milp_choice, greedy_choice))
        assert total(losses, chosen) == pytest.approx(best(losses, costs, budget * least))
        assert total(losses, chosen) <= total(losses, greedy) * (1 + 1e-9)
        for found in (chosen, greedy):
            assert total(costs, found) <= budget * least * (1 + 1e-8)


def test_the_front_falls_as_the_budget_rises():
    rng = np.random.default_rng(0)
    losses, costs = rng.exponential(size=(8, 3)), rng.uniform(1, 3, (8, 3))
    front = pareto_front(losses, costs)
    assert front[0][0] == pytest.approx(1)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(front))
    assert front[-1][1] == pytest.approx(losses.min(axis=1).sum())


def test_no_choice_within_the_limit_is_an_error():
    for solve in (milp_choice, greedy_choice):
        with pytest.raises(jq.ConfigError, match="cheapest costs 3"):
            solve(np.ones((2, 2)), np.array([[1.0, 2], [2, 4]]), 2)


@pytest.fixture(scope="module")
def case(small):
    graph, stats, images = small
    return graph, stats, images, research.mixed_precision(graph, images, budget=1.6, stats=stats)


def test_a_budget_is_kept_and_used(case):
    *_, found = case
    assert found.spent <= 1.6
    assert found.predicted < found.uniform["int8"][1]
    assert found.uniform["int8"][0] == 1
    assert found.uniform["int16"][0] == 4  # of bit operations
    assert {layer.format for layer in found.layers} > {"int8"}
    assert [layer.name for layer in found.layers] == ["stem", "deep", "point", "head"]
    products = [5 * 5 * 8 * 27, 5 * 5 * 8 * 9, 5 * 5 * 8 * 8, 8 * CLASSES]
    assert [layer.costs["int8"] for layer in found.layers] == [64 * n for n in products]
    assert [layer.costs["bf16"] for layer in found.layers] == [256 * n for n in products]


def test_the_plan_is_the_configs_and_runs_in_onnxruntime(case, tmp_path):
    graph, stats, images, found = case
    again = jq.make_plan(graph, stats, found.config)
    assert {t: repr(again[t]) for t in again} == {t: repr(found.plan[t]) for t in found.plan}
    model = jq.export(graph, found.plan, path=tmp_path / "mixed.onnx")
    onnx.checker.check_model(model, full_check=True)
    y = onnxruntime_outputs(model, {"x": images})[0]
    ours = jq.fake_quant(graph)(graph.params, found.plan, {"x": images})["logits"]
    np.testing.assert_allclose(y, ours, atol=1e-5)
    kinds = {str(found.plan[t].grid) for t in found.plan}
    assert {"int8", "uint8"} < kinds


def test_what_is_measured_is_the_exported_models_loss(case):
    graph, _, images, found = case
    models = [jq.export(graph, p) for p in (found.plan.replace(dict.fromkeys(found.plan)), found.plan)]
    p, q = (log_softmax(onnxruntime_outputs(m, {"x": images})[0].astype(np.float64), -1) for m in models)
    assert found.measured == pytest.approx(np.sum(np.exp(p) * (p - q), -1).mean(), rel=2e-3)
    assert found.measured < found.uniform["int8"][2]


def test_results_are_data(case, tmp_path):
    *_, found = case
    found.to_json(tmp_path / "mixed.json")
    read = json.loads((tmp_path / "mixed.json").read_text())
    assert jq.QuantConfig.from_dict(read["config"]) == found.config
    assert "chosen" in found.plot()
    assert found.layers[0].name in found._repr_html_()
    assert "all in int16" in found.summary()


def test_mistakes_are_named(case):
    graph, stats, images, _ = case
    for options, words in (
        ({"budget": 0.5}, "budget is 0.5"),
        ({"budget": 2, "cost": "bits"}, "cost needs one of .*got 'bits'"),
        ({"budget": 2, "solver": "gredy"}, "greedy"),
        ({"budget": 2, "formats": {"int8": {}}}, "at least two"),
        ({"budget": 2, "loss": "top1"}, "top1"),
    ):
        with pytest.raises(jq.ConfigError, match=words):
            research.mixed_precision(graph, images, stats=stats, **options)


def test_sixteen_bits_everywhere_are_better_than_eight():
    graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    images = jq.zoo.calibration_set()[0][:32]
    table = research.format_table(graph, images, formats={k: research.mixed.FORMATS[k] for k in ("int8", "int16")})
    narrow, wide = (table.choose(budget) for budget in (1, 4))
    assert wide.measured < narrow.measured / 5  # sums and pools stay in 8 bits
    assert wide.predicted < narrow.predicted / 100
