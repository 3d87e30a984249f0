"""`jq.auto`: goals, islands, the climb, and what it leaves; searches that are cut short, damaged or impossible."""

from __future__ import annotations

import itertools
import json
import math
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

import jq
from jq.cli import main
from jq.config_file import read_config
from jq.readings.runtime import onnxruntime_reading
from jq.research.climbing import _time_of, knee
from jq.research.goals import Goal, goal_of, samples_needed
from jq.research.intervals import difference_low, interval, share_interval
from jq.research.islands import apart, choose, islands, work
from jq.research.judging import Judge, Score
from jq.research.losses import divergences, parts_of
from jq.research.outcomes import Tried
from jq.research.recorded import read_row
from jq.research.rungs import RUNGS, Candidate, Climb, Limits, Rung
from tests.short import short_resnet

MODEL = short_resnet()
CHEAP = [r for r in RUNGS if r.name in ("XINT8", "A8W8 per channel")]


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    images, labels = jq.zoo.calibration_set()
    return images[:24], labels[:24]


# --- Goals ---


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("top1 -0.5", Goal("top1", -0.5, True)),
        ("agreement 98", Goal("agreement", 98.0)),
        ("kl 0.02", Goal("kl", 0.02)),
        ("sqnr 25", Goal("sqnr", 25.0)),
        (None, Goal("sqnr")),
    ],
)
def test_a_text_states_a_goal(text: str | None, goal: Goal) -> None:
    assert goal_of(text, None) == (goal, None)


def test_a_function_has_a_bound_of_its_own() -> None:
    assert goal_of("mAP -0.7", len)[0] == Goal("evaluate", -0.7, True)
    assert goal_of(0.98, len)[0] == Goal("evaluate", 0.98)
    assert goal_of(None, len)[0] == Goal("evaluate")


@pytest.mark.parametrize("text", ["", "98", "agreement", "top5 -1", "kl -0.1", "sqnr nan", "no_such_file.py:f 0.9"])
def test_a_text_that_states_none(text: str) -> None:
    with pytest.raises(jq.ConfigError, match="target"):
        goal_of(text, None)


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "metric.py"
    file.write_text("def points(model):\n    return 1.0\n")
    goal, function = goal_of(f"{file}:points 0.5", None)
    assert goal == Goal("evaluate", 0.5) and function is not None and function(None) == 1.0
    with pytest.raises(jq.ConfigError, match="no function 'other'"):
        goal_of(f"{file}:other 0.5", None)
    file.write_text("1 / 0")
    with pytest.raises(jq.ConfigError, match="ZeroDivisionError"):
        goal_of(f"{file}:points 0.5", None)


def test_intervals_hold_what_they_promise() -> None:
    rng = np.random.default_rng(0)
    truths = 0.9, 0.97
    for truth in truths:
        draws = 100.0 * (rng.random((2000, 40)) < truth)
        missed = np.mean([share_interval(row)[0] > 100 * truth for row in draws])
        assert missed <= 0.05 + 0.015
    normal = rng.normal(3.0, 1.0, (2000, 10))
    assert abs(np.mean([interval(row)[0] > 3 for row in normal]) - 0.05) < 0.015


def test_few_samples_show_little() -> None:
    low, high = share_interval(np.full(20, 100.0))
    assert 86 < low < 87 and high == 100  # 0.05 ** (1 / 20)
    assert difference_low(np.zeros(20)) < -13
    assert interval(np.ones(1)) == (-math.inf, math.inf)
    assert samples_needed(Goal("agreement", 98.0)) == 149 and samples_needed(Goal("sqnr", 10.0)) is None
    assert difference_low(np.zeros(598)) > -0.5 > difference_low(np.zeros(590))


# --- Islands ---


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    rng, count = np.random.default_rng(seed), 7
    gains, costs = rng.random(count), rng.random(count)
    sources = [sorted(set(rng.integers(0, i, 2).tolist())) if i else [] for i in range(count)]
    limit, most = float(costs.sum() * 0.4), int(rng.integers(1, 3))

    def gain(taken: tuple[bool, ...], regions: int) -> float:
        inside = sum(c for c, t in zip(costs, taken, strict=True) if t) <= limit and regions <= most
        return sum(g for g, t in zip(gains, taken, strict=True) if t) if inside else -1.0

    def beginnings(taken: tuple[bool, ...]) -> int:
        return sum(t and not any(taken[j] for j in sources[i]) for i, t in enumerate(taken))

    def regions(taken: tuple[bool, ...]) -> int:
        edges = [(i, j) for i, before in enumerate(sources) for j in before if taken[i] and taken[j]]
        ties = csr_array((np.ones(len(edges)), ([i for i, _ in edges], [j for _, j in edges])) if edges else (count, count),
                         shape=(count, count))  # fmt: skip
        return connected_components(ties, directed=False)[0] - sum(not t for t in taken)

    every = list(itertools.product([False, True], repeat=count))
    chosen = tuple(choose(gains.tolist(), costs.tolist(), sources, limit, most).tolist())
    reached = gain(chosen, regions(chosen))
    assert reached >= max(gain(t, beginnings(t)) for t in every) - 1e-4  # and where regions begin twice, it is near to
    assert reached <= max(gain(t, regions(t)) for t in every) + 1e-9  # the best


@pytest.mark.parametrize("seed", range(20))
def test_a_result_is_whole_only_where_its_readers_are_taken(seed: int) -> None:
    rng, count = np.random.default_rng(seed), 6
    gains, own, costs = rng.random(count), rng.random(count) / 2, rng.random(count)
    sources = [sorted(set(rng.integers(0, i, 2).tolist())) if i else [] for i in range(count)]
    limit, shut = float(costs.sum() * 0.6), int(rng.integers(count))

    def gain(taken: tuple[bool, ...]) -> float:
        begins = sum(t and not any(taken[j] for j in sources[i]) for i, t in enumerate(taken))
        spent = sum(c for c, t in zip(costs, taken, strict=True) if t)
        if spent > limit or begins > 2 or taken[shut]:
            return -1.0
        whole = [t and all(taken[i] for i in range(count) if j in sources[i]) for j, t in enumerate(taken)]
        return float(own @ np.array(taken) + gains @ np.array(whole))

    best = max(map(gain, itertools.product([False, True], repeat=count)))
    chosen = choose(gains.tolist(), costs.tolist(), sources, limit, 2, own.tolist(), {shut: False})
    assert gain(tuple(chosen.tolist())) == pytest.approx(best, abs=1e-4)


def test_regions_that_are_there_grow_for_nothing() -> None:
    chain: list[list[int]] = [[], [0], [1], [2], [3]]
    taken = choose([1.0, 0, 3, 0, 2], [0, 0, 1, 1, 1], chain, limit=2, most=0, held={1: True, 3: False})
    assert taken.tolist() == [True, True, True, False, False]


def test_what_is_left_in_float_is_an_island(data: tuple[np.ndarray, np.ndarray]) -> None:
    plain = jq.quantize(MODEL, data[0][:4], "XINT8")
    names = [n.label for n in plain.graph.nodes if n.op_type == "Conv"]
    config = jq.presets["XINT8"].replace(exclude=(names[0], names[-1]))
    made = jq.quantize(MODEL, data[0][:4], config)
    assert islands(plain.graph, apart(plain.graph, plain.plan, jq.presets["XINT8"])) == []
    assert len(islands(made.graph, apart(made.graph, made.plan, config))) == 2
    cost, narrow = work(made.graph, made.plan)
    assert work(plain.graph, plain.plan) == (1, 1) and cost == pytest.approx(narrow + 4 * (1 - narrow)) and narrow < 1
    assert work(*_graph_and_plan(data[0][:4], "A16W8")) == (2.0, 0.0)


def _graph_and_plan(images: np.ndarray, preset: str) -> tuple[Any, Any]:
    made = jq.quantize(MODEL, images, preset)
    return made.graph, made.plan


# --- The climb ---


def test_it_stops_at_the_first_rung_that_holds(data: tuple[np.ndarray, np.ndarray]) -> None:
    result = jq.auto(MODEL, data[0], target="sqnr 5", rungs=CHEAP)
    assert result.reached and [t.rung for t in result.rungs] == ["XINT8"] and result.rungs[0].outcome == "chosen"
    score = result.rungs[0].score
    assert score is not None and score.samples == 6 and score.low is not None and 5 <= score.low <= score.value
    assert result.config.held_out == 4


def test_the_figure_is_that_of_the_deciding_samples(data: tuple[np.ndarray, np.ndarray]) -> None:
    result = jq.auto(MODEL, data[0], target="agreement 50", rungs=CHEAP)
    deciding = data[0][3::4]
    one, two = (onnxruntime_reading(m)({"input": deciding})["logits"] for m in (MODEL, result.model))
    score = result.rungs[0].score
    assert score is not None and score.value == pytest.approx(100 * np.mean(one.argmax(1) == two.argmax(1)))


def test_its_config_makes_the_same_bytes(data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    ladder = [*CHEAP, *(r for r in RUNGS if r.name == "islands")]
    result = jq.auto(MODEL, data[0], target="sqnr 200", rungs=ladder, max_cost=2)  # a layer is a large part of so few
    assert not result.reached and any(t.rung == "islands" and t.score for t in result.rungs)
    model, config, page, *more = result.save(tmp_path / "best.onnx")
    islands_kept = any(t.islands for t in result.rungs if t.outcome == "chosen")
    assert [p.name for p in more] == ["vitisai_config.json"] * islands_kept
    again = jq.quantize(MODEL, data[0], read_config(config))
    assert again.model.SerializeToString() == model.read_bytes()
    text = page.read_text()
    assert "Rungs" in text and "<svg" in text and "best found" in text
    assert json.dumps(result.to_dict(), allow_nan=False)


def test_no_claim_that_the_data_cannot_carry(data: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.warns(UserWarning, match="6 samples decide: they cannot show agreement 98"):
        result = jq.auto(MODEL, data[0], target="agreement 98", rungs=CHEAP[:1])
    assert not result.reached and "takes 149" in result.why
    with pytest.warns(UserWarning, match="takes at least 598"):
        result = jq.auto(MODEL, data[0], target="top1 -0.5", labels=data[1], rungs=CHEAP[:1])
    assert not result.reached


def test_the_labels_are_those_of_the_deciding_samples(data: tuple[np.ndarray, np.ndarray]) -> None:
    logits = onnxruntime_reading(MODEL)({"input": data[0]})["logits"]
    labels = logits.argmax(1)
    labels[np.arange(len(labels)) % 4 != 3] += 1
    with pytest.warns(UserWarning, match="cannot show"):
        result = jq.auto(MODEL, data[0], target="top1 -0.5", labels=labels, rungs=CHEAP[:1])
    assert result.whole == 100
    with pytest.raises(jq.DataError, match="one whole number for each of 24 samples"):
        jq.auto(MODEL, data[0], target="top1 -0.5", labels=labels[:5])
    with pytest.raises(jq.ConfigError, match="needs labels"):
        jq.auto(MODEL, data[0], target="top1 -0.5")


def test_labels_with_names_are_matched_by_name(
    data: tuple[np.ndarray, np.ndarray], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    folder, rows = tmp_path / "calib", ["name,label"]
    folder.mkdir()
    for i, best in enumerate(onnxruntime_reading(MODEL)({"input": data[0]})["logits"].argmax(1)):
        np.save(folder / f"{i:02}.npy", data[0][i])
        rows.insert(1, f"{i:02},{best}")  # the file lists them the other way round
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    labels = jq.evaluate.read_labels(tmp_path / "labels.csv")
    assert jq.auto(MODEL, folder, target="top1 -0.5", labels=labels, rungs=CHEAP[:1]).whole == 100
    with pytest.raises(jq.DataError, match="samples have none"):
        jq.auto(MODEL, data[0], target="top1 -0.5", labels=labels, rungs=CHEAP[:1])
    subject = jq.research.Subject(model=MODEL, data=folder, labels=labels)
    experiment = jq.research.Experiment(subjects={"resnet": subject}, configs={"XINT8": jq.presets["XINT8"]}, seeds=[0])
    assert jq.research.ablate(experiment).rows[0]["float_top1"] == 1


def test_limits_on_cost_and_islands(data: tuple[np.ndarray, np.ndarray]) -> None:
    rungs = [r for r in RUNGS if r.name in ("XINT8", "islands", "A16W8")]
    result = jq.auto(MODEL, data[0], target="sqnr 200", rungs=rungs, float_islands=1, max_cost=1.5)
    by_name = {t.rung: t for t in result.rungs}
    assert by_name["A16W8"].outcome == "too costly: 2.00, the limit is 1.5" and by_name["A16W8"].score is None
    wide = by_name["islands"]
    assert wide.islands == 1 and wide.cost is not None and 1 < wide.cost <= 1.5
    none = jq.auto(MODEL, data[0], target="sqnr 200", rungs=rungs, float_islands=0)
    assert [t.rung for t in none.rungs] == ["XINT8", "A16W8"]
    older = jq.auto(MODEL, data[0], target="sqnr 200", rungs=rungs, float_islands=0, chip="phx")
    assert [t.rung for t in older.rungs] == ["XINT8"]


def test_a_rung_of_ones_own(data: tuple[np.ndarray, np.ndarray]) -> None:
    mine = Rung("coarse", lambda climb: climb.best is not None, lambda climb: climb.best.config.replace(cle=False))
    result = jq.auto(MODEL, data[0], target="sqnr 200", rungs=[*CHEAP[:1], mine])
    assert [t.rung for t in result.rungs] == ["XINT8", "coarse"]


def candidate(
    name: str, cost: float, error: float, config: jq.QuantConfig | str = "XINT8", count: int = 0
) -> Candidate:
    score = Score(0.0, None, None, None, error, False)
    config = jq.presets[config] if isinstance(config, str) else config
    return Candidate(name, config, score, cost, 1.0, count, 1, "", None)


def climb_of(*tried: Candidate) -> Climb:
    def none(*_: Any) -> Any:
        raise AssertionError("nothing has to be calibrated")

    best = min(tried, key=lambda c: c.score.error, default=None)
    return Climb(Limits("stx", 1.15, 1, None), none, none, best=best, tried=tried)


def test_limits_are_beside_what_heads_and_the_guard_leave() -> None:
    wide = jq.presets["XINT8"].replace(exclude=("a",))
    assert climb_of().most == (1.15, 1) and climb_of(candidate("plain", 1.0, 0.1)).most == (1.15, 1)
    climb = climb_of(candidate("guarded", 1.2, 0.1, count=2), candidate("wide", 1.3, 0.05, wide, 5))
    assert climb_of(candidate("16 bits", 2.0, 0.1, "A16W8")).most == (1.15, 1)
    assert climb_of(candidate("little", 1.1, 0.1)).most == (1.15, 1)
    assert climb.most == (pytest.approx(1.38), 3) and [c.rung for c in climb.plain] == ["guarded"]


def test_exponents_are_searched_behind_what_is_tuned() -> None:
    rung = next(r for r in RUNGS if r.name == "exponents")

    def stages(config: jq.QuantConfig | str) -> str | None:
        climb = climb_of(candidate("best", 1.0, 0.1, config))
        made = rung.config(climb) if rung.applies(climb) else None
        return None if made is None else made.finetune

    assert stages("XINT8_ADAROUND") == "adaround+exponents" and stages("XINT8") == "bias+exponents"
    assert stages("A8W8_ADAROUND") is None  # whose scales are no powers of two
    assert not rung.applies(climb_of(candidate("exact", 1.0, 0.0)))


@pytest.mark.parametrize(
    ("chip", "wide", "widened"), [("stx", None, "A8W8"), ("stx", "float", "XINT8"), ("phx", None, "XINT8")]
)
def test_islands_are_put_where_they_cost_least(chip: str, wide: Any, widened: str) -> None:
    class BaseError(Exception):
        pass

    def calibrated(config: jq.QuantConfig) -> Any:
        raise BaseError(next(name for name in ("XINT8", "A8W8") if jq.presets[name] == config))

    tried = candidate("best", 1.0, 0.1), candidate("second", 1.0, 0.2, "A8W8"), candidate("third", 1.0, 0.3, "A8W8")
    climb = Climb(Limits(chip, 1.15, 1, wide), calibrated, calibrated, best=tried[0], tried=tried)
    with pytest.raises(BaseError, match=widened):
        next(r for r in RUNGS if r.name == "islands").config(climb)


@pytest.mark.parametrize(
    ("regions", "mends", "config", "guard"),
    [(1, 1, "A8W8", 24.0), (3, 1, "A8W8", None), (1, 0, "A8W8", None), (1, 1, "XINT8", None)],
)
def test_a_guard_as_strict_as_the_limits_allow(
    regions: int, mends: int, config: str, guard: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it mended something, and scales are floats: each 3 dB cost a tenth here, and the limit is 1.2 times."""

    def calibrated(config: jq.QuantConfig) -> Any:
        assert config.guard is not None
        made = SimpleNamespace(plan=config.guard, mends=range(mends * int(config.guard)))
        return SimpleNamespace(graph=None, guarded=made)

    module = sys.modules["jq.research.rungs"]
    monkeypatch.setattr(module, "work", lambda _, guard: (1 + (guard - 18) / 30, 1.0))
    monkeypatch.setattr(module, "apart", lambda *_: frozenset())
    monkeypatch.setattr(module, "islands", lambda *_: [frozenset()] * regions)
    tried = (candidate("plain", 1.0, 0.1, config, count=1),)
    climb = Climb(Limits("stx", 1.2, 1, None), calibrated, calibrated, best=tried[0], tried=tried)
    made = next(r for r in RUNGS if r.name == "stricter guard").config(climb)
    assert (made and made.guard) == guard
    assert made is None or not candidate("strict", 1.2, 0.05, made).is_plain


def test_what_equalization_does_to_one_format_is_known_of_the_next() -> None:
    rung = next(r for r in RUNGS if r.name == "A8W8 per channel")
    one, other = (jq.presets["A8W8"].replace(cle=cle) for cle in (True, False))
    for first, second in ((0.1, 0.2), (0.2, 0.1)):
        climb = climb_of(candidate("equalized", 1.0, first, one), candidate("not", 1.0, second, other))
        made = rung.config(climb)
        assert made is not None and made.cle is (first < second) and made.per_channel


def test_the_knee() -> None:
    line = [candidate("cheap", 1.0, 0.1), candidate("bend", 1.1, 0.05), candidate("costly", 2.0, 0.04)]
    assert [knee(part).rung for part in (line, line[:1], [line[0], line[2]])] == ["bend", "cheap", "cheap"]  # type: ignore[union-attr]
    assert knee([]) is None


def detector(transposed: bool = False) -> onnx.ModelProto:
    """Boxes of four numbers and scores of three classes at nine places, joined as detectors do."""
    nodes = [onnx.helper.make_node("Relu", ["boxes"], ["b"]), onnx.helper.make_node("Sigmoid", ["scores"], ["s"])]
    nodes.append(onnx.helper.make_node("Concat", ["b", "s"], ["joined" if transposed else "y"], axis=1))
    if transposed:
        nodes.append(onnx.helper.make_node("Transpose", ["joined"], ["y"], perm=[0, 2, 1]))
    shapes = {"boxes": [1, 4, 9], "scores": [1, 3, 9], "y": [1, 9, 7] if transposed else [1, 7, 9]}
    inputs, outputs = (
        [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shapes[n]) for n in part]
        for part in (["boxes", "scores"], ["y"])
    )
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs)
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 17)])


@pytest.mark.parametrize("transposed", [False, True])
def test_boxes_and_scores_are_judged_apart(transposed: bool) -> None:
    graph = jq.load(detector(transposed))
    assert parts_of(graph, "y") == (2 if transposed else 1, [4], ["b", "s"])
    rng = np.random.default_rng(0)
    sample = {
        "boxes": 100 * rng.random((1, 4, 9), np.float32),
        "scores": rng.normal(0, 3, (1, 3, 9)).astype(np.float32),
    }
    judge = Judge.of(Goal("sqnr"), graph, [sample], None, None)
    y = judge.deciding.reference[0]["y"]
    scores, boxes = np.zeros_like(y), np.full_like(y, 1.1)  # an eighth for each score, then boxes a tenth too large
    index = (slice(None), slice(None), slice(4, None)) if transposed else (slice(None), slice(4, None))
    scores[index], boxes[index] = 0.125, 1.0
    changed = np.where(scores > 0, scores, y * boxes)
    p = y[index].astype(np.float64)
    apart = np.mean(p * np.log(p / 0.125) + (1 - p) * np.log((1 - p) / 0.875))
    errors = divergences(graph)({"y": y}, {"y": changed})
    assert float(errors["b"]) == pytest.approx(0.01, rel=1e-4) and float(errors["s"]) == pytest.approx(apart, rel=1e-4)
    assert judge.error([{"y": changed}]) == pytest.approx(math.sqrt(0.01 * apart), rel=1e-4)
    assert judge.error([{"y": y}]) == 0 and judge.error([{"y": np.full_like(y, np.nan)}]) == math.inf


def test_boxes_count_where_something_is() -> None:
    graph = jq.load(detector())
    sample = {"boxes": np.full((1, 4, 9), 10, np.float32), "scores": np.full((1, 3, 9), -30, np.float32)}
    sample["scores"][0, 1, 5] = 3
    judge = Judge.of(Goal("sqnr"), graph, [sample], None, None)
    y = judge.deciding.reference[0]["y"]
    there, elsewhere = y.copy(), y.copy()
    there[:, :4, 5], elsewhere[:, :4, 3] = 11, 11
    errors = [float(divergences(graph)({"y": y}, {"y": v})["b"]) for v in (there, elsewhere)]
    assert errors == [pytest.approx(0.01, rel=1e-4), pytest.approx(0, abs=1e-6)]


# --- Functions of the user's ---


def test_functions_of_outputs_and_of_the_model(data: tuple[np.ndarray, np.ndarray]) -> None:
    seen: list[Any] = []

    def spread(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
        seen.append((outputs["logits"].shape, labels.tolist()))
        return outputs["logits"].std(axis=1)

    result = jq.auto(MODEL, data[0], target=-0.5, evaluate=spread, labels=data[1], rungs=CHEAP[:1])
    assert seen[0] == ((6, 10), data[1][3::4].tolist()) and result.rungs[0].score is not None
    assert result.rungs[0].score.low is not None  # an array has an interval

    def nodes(model: onnx.ModelProto) -> float:
        return -len(model.graph.node)

    result = jq.auto(MODEL, data[0], evaluate=nodes, target="-1000", rungs=CHEAP[:1])
    assert result.reached and result.rungs[0].score.value == -len(result.model.graph.node)  # type: ignore[union-attr]


def test_a_drop_is_judged_sample_by_sample(data: tuple[np.ndarray, np.ndarray]) -> None:
    drops = iter([0.0, 0.1])  # of the float network, and of XINT8

    def evaluate(outputs: dict[str, np.ndarray]) -> np.ndarray:
        return 10.0 * np.arange(len(outputs["logits"])) - next(drops)

    result = jq.auto(MODEL, data[0], target="-0.5", evaluate=evaluate, rungs=CHEAP[:1])
    score = result.rungs[0].score
    assert result.reached and result.whole == 25 and score is not None
    assert score.low is not None and score.low < 15  # samples differ by more than what is asked
    drops = iter([0.0, 0.9])
    assert not jq.auto(MODEL, data[0], target="-0.5", evaluate=evaluate, rungs=CHEAP[:1]).reached


@pytest.mark.parametrize("bad", [math.nan, math.inf, "raise", []])
def test_a_function_that_fails_keeps_the_best_model(bad: Any, data: tuple[np.ndarray, np.ndarray]) -> None:
    calls: list[int] = []

    def evaluate(model: onnx.ModelProto) -> Any:
        calls.append(1)
        if len(calls) < 3:
            return 1.0
        if bad == "raise":
            raise RuntimeError("no device")
        return bad

    result = jq.auto(MODEL, data[0], evaluate=evaluate, target=2.0, rungs=CHEAP)
    assert not result.reached and [t.rung for t in result.rungs] == ["XINT8", "A8W8 per channel"]
    assert result.rungs[1].outcome.startswith("failed: evaluate") and result.rungs[0].outcome == "chosen"
    assert "evaluate" in result.why


def test_a_function_that_fails_on_the_float_model(data: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises(jq.DataError, match="evaluate raised ZeroDivisionError"):
        jq.auto(MODEL, data[0], evaluate=lambda model: 1 / 0, target=1.0)


def test_warnings_of_the_chosen_model_are_told(data: tuple[np.ndarray, np.ndarray]) -> None:
    def loud(climb: Any) -> Any:
        return jq.presets["XINT8"].replace(op_types=("Softmax",))

    with pytest.warns(UserWarning, match="nothing is quantized"):
        jq.auto(MODEL, data[0], target="sqnr 5", rungs=[Rung("nothing", lambda climb: True, loud)])


# --- Cut short ---


def test_what_stops_by_itself_begins_in_less_time_than_others() -> None:
    """On a slow network, finetuning is worth more than a step that no longer fits."""
    score = Score(20.0, None, None, None, 0.01, False)
    tried = [Tried(name, "kept", took, score) for name, took in (("first", 30.0), ("second", 15.0), ("third", 80.0))]
    fits = {rung.name: _time_of(rung, tried) for rung in RUNGS}
    assert (fits["stricter guard"], fits["adaround"]) == (80.0, 30.0)


def test_a_killed_search_goes_on(data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    book, whole = tmp_path / "book.jsonl", jq.auto(MODEL, data[0], target="sqnr 200", rungs=RUNGS[:3])

    def stops(after: int) -> list[Rung]:
        def raising(climb: Any) -> Any:
            raise KeyboardInterrupt

        return [*RUNGS[:after], Rung("stop", lambda climb: True, raising)]

    for after in (0, 1, 1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            jq.auto(MODEL, data[0], target="sqnr 200", rungs=stops(after), ledger=book)
        book.write_bytes(book.read_bytes() + b'{"hash": "torn' if book.exists() else b"")
    result = jq.auto(MODEL, data[0], target="sqnr 200", rungs=RUNGS[:3], ledger=book)
    assert result.model.SerializeToString() == whole.model.SerializeToString()
    assert [(t.rung, t.outcome, t.score) for t in result.rungs] == [(t.rung, t.outcome, t.score) for t in whole.rungs]
    assert len(book.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("place", "value"),
    [("value", 10**400), ("low", []), ("high", "x"), ("samples", float("inf")), (2, float("nan")), (3, "x")],
)
def test_odd_numbers_in_a_ledger(place: str | int, value: Any) -> None:
    score = {"value": 1.0, "low": None, "high": 2, "samples": 3, "error": 0.1, "holds": True}
    row: dict[str, Any] = {"score": score, "facts": [1, 2, 3, 4, "x"]}
    read = read_row(row, "XINT8", jq.presets["XINT8"])
    assert read is not None and read.score.high == 2.0
    (score if isinstance(place, str) else row["facts"])[place] = value
    with pytest.raises(jq.DataError, match="damaged"):
        read_row(row, "XINT8", jq.presets["XINT8"])


@pytest.mark.parametrize(
    "change", [{"seconds": "x"}, {"score": 3}, {"facts": [1]}, {"score": {"value": "x"}}, {"outcome": 1}]
)
def test_a_damaged_ledger(change: dict[str, Any], data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    book = tmp_path / "book.jsonl"
    jq.auto(MODEL, data[0][:4], target="sqnr 200", rungs=CHEAP[:1], ledger=book)
    book.write_text('{"hash": 5}\n' + json.dumps(json.loads(book.read_text()) | change) + "\n")
    with pytest.raises(jq.DataError, match="damaged"):
        jq.auto(MODEL, data[0][:4], target="sqnr 200", rungs=CHEAP[:1], ledger=book)


def test_what_holds_is_kept_though_its_error_is_larger(data: tuple[np.ndarray, np.ndarray]) -> None:
    values = iter([0.0, 1.0, 3.0])

    def evaluate(outputs: dict[str, np.ndarray]) -> np.ndarray:
        value = next(values)  # of the float model; with a wide interval; of a lower mean with none
        return np.array([value + 5, value - 5] if value == 1 else [value] * 2) * (0.1 if value == 3 else 1)

    result = jq.auto(MODEL, data[0], evaluate=evaluate, target=0.2, rungs=CHEAP)
    assert result.reached and [t.outcome for t in result.rungs] == ["kept", "chosen"]


def test_time_that_is_up(data: tuple[np.ndarray, np.ndarray]) -> None:
    result = jq.auto(MODEL, data[0], target="sqnr 200", rungs=CHEAP, budget="0.2s")
    assert [t.rung for t in result.rungs] == [
        "XINT8"
    ] and "the time limit of 0.2 s was reached before A8W8 per channel" in result.why


def test_a_finished_search_is_told_again_whatever_the_time(data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    given: dict[str, Any] = {"target": "sqnr 200", "rungs": CHEAP, "ledger": tmp_path / "book.jsonl"}
    first = jq.auto(MODEL, data[0], **given)
    again = jq.auto(MODEL, data[0], **given, budget="0.1s")
    assert [t.rung for t in again.rungs] == [t.rung for t in first.rungs]
    assert again.model.SerializeToString() == first.model.SerializeToString()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chip": "tpu"}, "no chip 'tpu'"),
        ({"wide": "int4"}, "wide"),
        ({"float_islands": -1}, "float_islands"),
        ({"max_cost": 0.5}, "max_cost"),
        ({"budget": "soon"}, "a time such as"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], text: str, data: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises(jq.ConfigError, match=text):
        jq.auto(MODEL, data[0], target="sqnr 5", **options)


def test_data_that_are_too_few(data: tuple[np.ndarray, np.ndarray]) -> None:
    assert jq.auto(MODEL, data[0][:3], target="sqnr 200", rungs=CHEAP[:1]).config.held_out == 3
    with pytest.raises(jq.DataError, match="got 1"):
        jq.auto(MODEL, data[0][:1], target="sqnr 5")
    with pytest.raises(jq.ConfigError, match="auto needs data"):
        jq.auto(MODEL, None, target="sqnr 5")


# --- The command ---


def test_the_command(tmp_path: Path, data: tuple[np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "data.npz", input=data[0])
    given = ["auto", str(MODEL), "--data", str(tmp_path / "data.npz"), "-o", str(tmp_path / "best.onnx")]
    main_of([*given, "--target", "sqnr 5"], 0)
    out = capsys.readouterr().out
    assert "sqnr 5: reached; XINT8 meets it" in out and "chosen" in out[: out.index("reached")]
    assert {p.name for p in tmp_path.iterdir()} == {"data.npz", "best.onnx", "best.toml", "best.html", "best.jsonl"}
    assert tomllib.loads((tmp_path / "best.toml").read_text())["held_out"] == 4
    main_of(["quantize", str(MODEL), "--data", str(tmp_path / "data.npz"), "--config", str(tmp_path / "best.toml"), "-o",
             str(tmp_path / "again.onnx")], 0)  # fmt: skip
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "best.onnx").read_bytes()
    main_of([*given, "--target", "sqnr 200", "--time-budget", "1s", "--json"], 1)
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["reached"] is False
    main_of([*given, "--target", "fast"], 2)


def main_of(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code
