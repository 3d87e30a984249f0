"""Sensitivities: the oracle is onnxruntime on the plan of each row by itself."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import onnx
import pytest
from scipy.special import log_softmax, rel_entr
from scipy.stats import spearmanr

import jq
from jq import research
from jq.graph.shapes import of_data
from jq.research.lanes import Lanes
from jq.research.streaming import sample_bytes
from tests.conftest import onnxruntime_outputs


@pytest.fixture(scope="module")
def case(small):
    graph, stats, images = small
    return graph, jq.make_plan(graph, stats), images


@pytest.fixture(scope="module")
def alone(case):
    return research.sensitivity(*case)


def by_onnxruntime(case, kept) -> np.ndarray:
    graph, plan, images = case
    model = jq.export(graph, plan.replace({k: None for k in plan if k not in kept}))
    return onnxruntime_outputs(model, {"x": images})[0]


def distances(z: np.ndarray, y: np.ndarray) -> dict[str, float]:
    z, y = z.astype(np.float64), y.astype(np.float64)
    p, q = np.exp(log_softmax(z, -1)), np.exp(log_softmax(y, -1))
    cosine = (z * y).sum(-1) / np.linalg.norm(z, axis=-1) / np.linalg.norm(y, axis=-1)
    return {
        "kl": rel_entr(p, q).sum(-1).mean(),
        "mse": np.square(z - y).mean(),
        "cosine": 1 - cosine.mean(),
        "top1": (z.argmax(-1) != y.argmax(-1)).mean(),
    }


def test_a_tensor_alone_costs_what_its_own_model_does_in_onnxruntime(case, alone):
    _, plan, _ = case
    assert sorted(r.name for r in alone.rows) == sorted(plan)
    reference = by_onnxruntime(case, ())
    for name in plan:
        expected = distances(reference, by_onnxruntime(case, (name,)))
        for loss, value in alone[name].losses.items():
            assert value == pytest.approx(expected[loss], rel=2e-3, abs=1e-10), (name, loss)


def test_all_together_cost_what_the_quantized_model_does(case, alone):
    expected = distances(by_onnxruntime(case, ()), by_onnxruntime(case, tuple(case[1])))
    assert alone.whole == {k: pytest.approx(v, rel=2e-3) for k, v in expected.items()}


def test_all_but_one(case):
    _, plan, _ = case
    found = research.sensitivity(*case, mode="all_but_one", kind="activations")
    assert [r.loss for r in found.rows] == sorted(r.loss for r in found.rows)
    reference = by_onnxruntime(case, ())
    for name in (found.rows[0].name, found.rows[-1].name):
        kept = set(plan.activations) - {name}
        assert found[name].loss == pytest.approx(distances(reference, by_onnxruntime(case, kept))["kl"], rel=2e-3)
    assert found.whole["kl"] == pytest.approx(
        distances(reference, by_onnxruntime(case, set(plan.activations)))["kl"], rel=2e-3
    )


def test_layers_hold_their_weights_and_what_they_make(case):
    _, plan, _ = case
    found = research.sensitivity(*case, by="layer", loss="mse")
    assert sorted(t for r in found.rows for t in r.tensors) == sorted(plan)
    row = next(r for r in found.rows if "stem.w" in r.tensors)
    assert row.tensors == ("stem.relu", "stem.w", "stem.b")
    expected = distances(by_onnxruntime(case, ()), by_onnxruntime(case, row.tensors))
    assert row.loss == pytest.approx(expected["mse"], rel=2e-3)


def test_groups_of_ones_own_may_overlap(case):
    names = list(case[1].activations)[:3]
    found = research.sensitivity(*case, by={"first": names[:2], "both": names})
    expected = distances(by_onnxruntime(case, ()), by_onnxruntime(case, names))
    assert found["both"].loss == pytest.approx(expected["kl"], rel=2e-3)


def test_estimates_rank_as_what_is_measured(case, alone):
    about = research.sensitivity(*case, screen=0, probes=8)
    assert not any(r.exact for r in about.rows)
    names = [r.name for r in alone.rows]
    assert spearmanr([alone[n].loss for n in names], [about[n].loss for n in names]).statistic > 0.9
    for loss in ("kl", "mse", "cosine"):
        about = research.sensitivity(*case, loss=loss, kind="weights", screen=0, probes=64)
        ratios = [r.loss / alone[r.name].losses[loss] for r in about.rows]
        assert np.median(ratios) == pytest.approx(1, abs=0.2), loss


def test_screening_measures_only_the_first(case, alone):
    found = research.sensitivity(*case, screen=5)
    exact = [r for r in found.rows if r.exact]
    assert len(exact) == 5
    for row in exact:
        assert row.loss == pytest.approx(alone[row.name].loss, rel=1e-3, abs=1e-12)
        assert row.estimate is not None
    assert "second-order" in found.summary()


def test_many_groups_take_several_walks(case, alone, monkeypatch):
    monkeypatch.setattr(sys.modules["jq.research.sensitivities"], "_LANES_BYTES", 0)
    found = research.sensitivity(*case, kind="activations")
    for row in found.rows:
        assert row.loss == pytest.approx(alone[row.name].loss, rel=1e-3, abs=1e-12)


def test_results_are_data(alone, tmp_path):
    alone.to_json(tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [r["name"] for r in found["rows"]] == [r.name for r in alone.rows]
    assert alone.rows[0].name in alone._repr_html_()
    assert alone.summary(3).count("\n") == 5


def test_mistakes_are_named(case):
    graph, plan, images = case
    for options, words in (
        ({"loss": "kll"}, "loss needs one of .*got 'kll'"),
        ({"by": "block"}, "by is 'block'"),
        ({"mode": "none"}, "mode needs one of .*got 'none'"),
        ({"kind": "all"}, "kind needs one of .*got 'all'"),
        ({"by": {"a": ["stem.v"]}}, "stem.w"),
        ({"screen": -1}, "screen is -1"),
        ({"screen": 3, "loss": "top1"}, "top1"),
        ({"screen": 3, "mode": "all_but_one"}, "mode='alone'"),
        ({"screen": 3, "probes": 0}, "probes is 0"),
    ):
        with pytest.raises(jq.ConfigError, match=words):
            research.sensitivity(graph, plan, images, **options)
    with pytest.raises(jq.ConfigError, match="no row 'stem'"):
        research.sensitivity(graph, plan, images, by={"all": list(plan)})["stem"]
    bad = images.copy()
    bad[3, 0, 0, 0] = np.nan
    with pytest.raises(jq.DataError, match="sample 3"):
        research.sensitivity(graph, plan, bad, by={"all": list(plan)})


def test_a_weight_that_a_node_turns_has_its_lane():
    helper, rng = onnx.helper, np.random.default_rng(0)
    w = rng.standard_normal((5, 4)).astype(np.float32)
    value = helper.make_tensor_value_info
    graph = jq.load(
        helper.make_model(
            helper.make_graph(
                [helper.make_node("Transpose", ["w"], ["t"]), helper.make_node("MatMul", ["x", "t"], ["y"])],
                "turned",
                [value("x", onnx.TensorProto.FLOAT, ["N", 4])],
                [value("y", onnx.TensorProto.FLOAT, ["N", 5])],
                [onnx.numpy_helper.from_array(w, "w")],
            ),
            opset_imports=[helper.make_opsetid("", 17)],
        )
    )
    found = jq.QParams(np.float32(0.5), np.int32(0), jq.arithmetic.formats.INT8)
    plan = jq.Plan({}, {"w": found}, frozenset())
    x = rng.standard_normal((3, 1, 4)).astype(np.float32)
    y = Lanes(graph, (frozenset({"w"}),))(graph.params, plan, {"x": x}, {})["y"]
    expected = np.stack([x @ w.T, x @ (np.round(w / 0.5) * 0.5).T])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_free_dims_have_the_sizes_of_the_data():
    """Else a walk of a detector with free height and width takes all groups at once, and the memory with them."""
    value, helper = onnx.helper.make_tensor_value_info, onnx.helper
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    w = onnx.numpy_helper.from_array(np.ones((8, 3, 1, 1), np.float32), "w")
    sizes = []
    for dims in (["N", 3, "H", "W"], ["N", 3, 20, 30]):
        ends = [value("x", onnx.TensorProto.FLOAT, dims)], [value("y", onnx.TensorProto.FLOAT, None)]
        graph = jq.load(
            helper.make_model(helper.make_graph(nodes, "conv", *ends, [w]), opset_imports=[helper.make_opsetid("", 17)])
        )
        sizes.append(sample_bytes(of_data(graph, {"x": np.zeros((1, 3, 20, 30), np.float32)})))
    assert sizes == [4 * 8 * 20 * 30] * 2


@pytest.mark.parametrize("depth", [12, 40])
def test_a_walk_holds_the_lanes_of_few_tensors_at_once(depth: int) -> None:
    """Whatever the depth: with `lax.map` the results of all segments lived from the start of the program."""
    value, rng = onnx.helper.make_tensor_value_info, np.random.default_rng(0)
    names = [f"t{i}" for i in range(depth + 1)]
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((8, 8, 3, 3)).astype(np.float32) / 9, f"w{i}")
        for i in range(depth)
    ]
    nodes = [
        onnx.helper.make_node("Conv", [names[i], f"w{i}"], [names[i + 1]], pads=[1, 1, 1, 1]) for i in range(depth)
    ]
    ends = [value(names[0], 1, ["N", 8, 16, 16])], [value(names[-1], 1, None)]
    graph = jq.load(
        onnx.helper.make_model(
            onnx.helper.make_graph(nodes, "chain", *ends, weights), opset_imports=[onnx.helper.make_opsetid("", 17)]
        )
    )
    grid = jq.QParams(np.float32(0.1), np.int32(0), jq.arithmetic.formats.INT8)
    plan = jq.Plan(dict.fromkeys(names[1:], grid), {}, frozenset())
    lanes, x = Lanes(graph, tuple(frozenset({k}) for k in plan)), np.zeros((1, 1, 8, 16, 16), np.float32)
    walk = jax.jit(lambda params, plan, inputs: lanes(params, plan, inputs, {}))
    taken = walk.lower(graph.params, plan, {names[0]: x}).compile().memory_analysis().temp_size_in_bytes
    assert taken < 3 * depth * x.nbytes
