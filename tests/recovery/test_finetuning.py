"""Finetuning from end to end: nearer to the float network, repeatable, resumable, and the file computes what it says."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy

import jq
from jq.config import QuantConfig
from jq.errors import ConfigError, DataError
from jq.recovery.adaround import AdaRound
from jq.recovery.checkpoint import Progress
from jq.recovery.descent import CoordinateDescent
from jq.recovery.layers import tune_layer
from jq.recovery.reconstruction import _off
from jq.recovery.rounding import Then, nearest
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal

MODULE = sys.modules["jq.recovery.finetuning"]
XINT8 = jq.presets["XINT8"].replace(cle=False, finetune_batch=6)


@functools.cache
def small() -> bytes:
    """A residual block, a depthwise layer and a classifier."""
    arrays = {
        "v": normal(8, 4, 3, 3, seed=1) / 4, "vb": normal(8, seed=2) / 4,
        "w1": normal(8, 8, 3, 3, seed=3) / 6, "b1": normal(8, seed=4) / 4,
        "w2": normal(8, 8, 3, 3, seed=5) / 6, "b2": normal(8, seed=6) / 4,
        "d": normal(8, 1, 3, 3, seed=7) / 2, "db": normal(8, seed=8) / 4,
        "g": normal(8, 6, seed=9), "gb": normal(6, seed=10),
    }  # fmt: skip
    pads = {"pads": [1] * 4}
    nodes = [
        node("Conv", ["x", "v", "vb"], ["a"], **pads), node("Relu", ["a"], ["ar"]),
        node("Conv", ["ar", "w1", "b1"], ["c"], **pads), node("Relu", ["c"], ["cr"]),
        node("Conv", ["cr", "w2", "b2"], ["e"], **pads), node("Add", ["e", "ar"], ["s"]), node("Relu", ["s"], ["sr"]),
        node("Conv", ["sr", "d", "db"], ["f"], group=8, **pads), node("Relu", ["f"], ["fr"]),
        node("GlobalAveragePool", ["fr"], ["p"]), node("Flatten", ["p"], ["q"]), node("Gemm", ["q", "g", "gb"], ["y"]),
    ]  # fmt: skip
    return build(nodes, arrays, x=("N", 4, 7, 7)).SerializeToString()


def data(seed: int, count: int = 24) -> np.ndarray:
    """Images whose neighbours and channels are alike, unlike noise."""
    x = normal(count, 4, 9, 9, seed=seed)
    x = (x[..., 1:-1, 1:-1] + x[..., :-2, 1:-1] + x[..., 2:, 1:-1] + x[..., 1:-1, :-2] + x[..., 1:-1, 2:]) / 2
    return (x + x.mean(1, keepdims=True) + normal(count, 4, 1, 1, seed=seed + 1) / 2).astype(np.float32)


IMAGES, HELD_OUT = data(11), data(51, 1024)


def decibels(want: np.ndarray, have: np.ndarray) -> float:
    """Of signal to noise."""
    want, have = np.asarray(want, np.float64), np.asarray(have, np.float64)
    return float(10 * np.log10(np.square(want).sum() / np.square(want - have).sum()))


def sqnr(model: Any, feeds: dict[str, np.ndarray], original: Any = None) -> float:
    (want,) = onnxruntime_outputs(onnx.load_from_string(small()) if original is None else original, feeds)
    return decibels(want, onnxruntime_outputs(model, feeds)[0])


@functools.cache
def quantized(stages: str | None, **options: Any) -> jq.Result:
    return jq.quantize(small(), IMAGES, XINT8.replace(finetune=stages, finetune_steps=60, **options))


BOTH = "adaround+block"


def written(result: jq.Result) -> bytes:
    return result.model.SerializeToString(deterministic=True)


class TestErrors:
    @pytest.mark.parametrize(
        "stages",
        [
            *("bias", "adaround", "adaround_only", "descent", "adaquant", "block", "brecq", "network"),
            *(BOTH, "bias+network"),
        ],
    )
    def test_held_out_images_are_nearer_to_the_float_network(self, stages):
        """All at once on two dozen images learns them by heart: no more than a little is lost."""
        plain, tuned = (sqnr(quantized(s).model, {"x": HELD_OUT}) for s in (None, stages))
        makes_up = stages.startswith(("ada", "descent"))  # for lost activations
        assert tuned > plain + (0.2 if makes_up else -0.5 if "network" in stages else 0), (plain, tuned)

    def test_blocks_after_layers_are_no_worse(self):
        layers, blocks = (sqnr(quantized(s).model, {"x": HELD_OUT}) for s in ("adaround", BOTH))
        assert blocks > layers - 1, (layers, blocks)

    def test_only_biases_change_with_bias(self):
        plain, tuned = (quantized(s, bias_correction=False) for s in (None, "bias"))
        weights = {t.name: t.raw_data for t in plain.model.graph.initializer}
        changed = {t.name for t in tuned.model.graph.initializer if weights.get(t.name) != t.raw_data}
        assert changed and all(name.startswith(("vb", "b1", "b2", "db", "gb")) for name in changed), changed
        for name, found in plain.plan.activations.items():
            assert float(found.scale) == float(tuned.plan[name].scale)

    def test_biases_are_those_of_a_form_with_all_its_sums(self):
        """Means alone give them, as the whole quadratic form does with weights rounded to nearest."""
        graph = jq.prepare(jq.load(small()), XINT8)
        plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
        (means, _), (whole, _) = (
            jq.finetune(graph, plan, IMAGES, XINT8.replace(finetune=stage), roundings=roundings)
            for stage, roundings in (("bias", None), ("own:plain", {"plain": nearest}))
        )
        assert any(not np.array_equal(means[k], graph.params[k]) for k in means)
        for name, array in means.items():
            np.testing.assert_allclose(array, whole[name], rtol=1e-4, atol=1e-5)

    def test_a_stage_that_was_done_is_gone_on_from(self):
        """With what an earlier call measured and tuned, the same bytes as without, and its stages are not run again."""
        measured: dict[str, Any] = {}
        config = XINT8.replace(finetune="adaround", finetune_steps=60)
        jq.quantize(small(), IMAGES, config, measured=measured)
        before = len(measured)
        again = jq.quantize(small(), IMAGES, config.replace(finetune=BOTH), measured=measured)
        added = len(measured) - before  # the second stage
        assert written(again) == written(quantized(BOTH)) and added == 1

    def test_brecq_leaves_each_weight_on_one_of_the_two_codes_beside_it(self):
        """And not all of them on the nearer one. Of a block that it does not help, the weights stay as they are."""
        config = jq.presets["W4A4"].replace(cle=False, finetune="brecq", finetune_steps=200, finetune_batch=6)
        found, plain = jq.quantize(small(), IMAGES, config), jq.prepare(jq.load(small()), config)
        changed = [k for k in ("w1", "w2", "d") if not np.array_equal(found.graph.params[k], plain.params[k])]
        assert changed
        away = 0
        for name in changed:
            step = np.reshape(found.plan[name].scale, (-1, 1, 1, 1))
            codes, moved = found.graph.params[name] / step, found.graph.params[name] - plain.params[name]
            np.testing.assert_array_equal(codes, np.rint(codes))
            inside = np.abs(plain.params[name]) < 7 * step
            assert np.all((np.abs(moved) < step * (1 + 1e-5))[inside])
            away += np.sum((np.abs(moved) > 0.51 * step)[inside])
        assert away > 10

    @pytest.mark.parametrize("norm", [2.0, 2.4, 4.0])
    def test_errors_of_blocks_count_by_a_power_of_theirs(self, norm):
        y, z = normal(3, 1, 5, 4, 4), normal(3, 1, 5, 4, 4, seed=1)
        weights = np.array([0.5, 1, 2, 0, 3], np.float32)
        found = _off({"y": y}, {"y": z}, {"y": weights}, norm)
        wanted = (weights[:, None, None].astype(np.float64) * (y - z) ** 2) ** (norm / 2)
        np.testing.assert_allclose(found, wanted.mean((1, 2, 3, 4)), rtol=1e-5)

    @pytest.mark.parametrize("stages", ["adaround", "adaquant"])
    def test_layers_keep_the_scales(self, stages):
        plain, tuned = quantized(None), quantized(stages)
        assert {k: float(plain.plan[k].scale) for k in plain.plan.activations} == {
            k: float(tuned.plan[k].scale) for k in tuned.plan.activations
        }

    @pytest.mark.parametrize("stages", ["adaround", "adaquant", "block", "brecq", "network", BOTH])
    def test_constraints_hold(self, stages):
        found = quantized(stages)
        assert jq.npu.constraints.violations(found.graph, found.plan, XINT8) == []
        assert all(found.plan[k].is_power_of_two for k in found.plan.activations)


class TestFile:
    @pytest.mark.parametrize("stages", ["adaround", "adaquant", BOTH, "network"])
    def test_computes_what_is_simulated(self, stages):
        found = quantized(stages)
        simulated = np.asarray(jq.fake_quant(found.graph)(found.graph.params, found.plan, {"x": HELD_OUT})["y"])
        (run,) = onnxruntime_outputs(found.model, {"x": HELD_OUT})
        step = float(found.plan["y"].scale)
        off = np.abs(simulated - run) / step
        assert off.max() <= 1.01 and np.mean(off > 0.5) < 0.01

    def test_runs_in_integers(self, tmp_path):
        path = tmp_path / "model.onnx"
        path.write_bytes(written(quantized(BOTH)))
        model = jq.integer.load(path, target="ort")
        (run,) = onnxruntime_outputs(quantized(BOTH).model, {"x": HELD_OUT})
        np.testing.assert_array_equal(np.asarray(model({"x": HELD_OUT})["y"]), run)


def _again(**options: Any) -> bytes:
    config = XINT8.replace(finetune=BOTH, finetune_steps=60)
    return written(jq.quantize(small(), IMAGES, config, **options))


class TestRepetition:
    def test_a_seed_gives_the_same_bytes(self):
        assert _again() == written(quantized(BOTH))

    def test_a_folder_for_activations_changes_nothing(self, tmp_path):
        assert _again(spill=tmp_path / "deep" / "spill") == written(quantized(BOTH))
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == []

    def test_a_model_is_not_changed(self):
        graph = jq.prepare(jq.load(small()), XINT8)
        before = {k: a.tobytes() for k, a in graph.arrays.items()}
        plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
        scales = {k: float(plan[k].scale) for k in plan}
        params, moved = jq.finetune(graph, plan, IMAGES, XINT8.replace(finetune="network", finetune_steps=3))
        assert {k: a.tobytes() for k, a in graph.arrays.items()} == before
        assert {k: float(plan[k].scale) for k in plan} == scales
        assert params.keys() == graph.params.keys() and list(moved) == list(plan)
        assert all(isinstance(a, np.ndarray) and a.dtype == np.float32 for a in params.values())

    def test_data_are_read_once(self):
        reads = []

        def feeds():
            for x in IMAGES:
                reads.append(1)
                yield {"x": x[None]}

        found = jq.quantize(small(), feeds(), XINT8.replace(finetune=BOTH, finetune_steps=60))
        assert len(reads) == len(IMAGES) and written(found) == written(quantized(BOTH))


class Stopped(KeyboardInterrupt):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Break off when the given unit has been tuned and kept."""

    @contextlib.contextmanager
    def bar(title: str, total: int) -> Iterator[Any]:
        seen = []

        def report(*_: Any) -> None:
            seen.append(1)
            if len(seen) == count:
                raise Stopped

        yield report

    monkeypatch.setattr(MODULE, "unit_bar", bar)


class TestCheckpoint:
    @pytest.mark.parametrize("count", [1, 3, 6])
    def test_a_stopped_run_goes_on_to_the_same_bytes(self, count, tmp_path, monkeypatch):
        path = tmp_path / "tuning.safetensors"
        with monkeypatch.context() as patch:
            stop_after(patch, count)
            with pytest.raises(Stopped):
                _again(checkpoint=path)
        assert path.exists() and [p.name for p in tmp_path.iterdir()] == [path.name]
        assert _again(checkpoint=path) == written(quantized(BOTH))
        assert list(tmp_path.iterdir()) == []

    def test_a_run_stopped_twice(self, tmp_path, monkeypatch):
        path = tmp_path / "tuning"
        for count in (2, 2):
            with monkeypatch.context() as patch:
                stop_after(patch, count)
                with pytest.raises(Stopped):
                    _again(checkpoint=path)
        assert _again(checkpoint=path) == written(quantized(BOTH)) and not path.exists()

    @pytest.fixture
    def left(self, tmp_path, monkeypatch) -> Path:
        path = tmp_path / "tuning"
        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            with pytest.raises(Stopped):
                _again(checkpoint=path)
        return path

    @pytest.mark.parametrize("change", [{"seed": 3}, {"finetune_steps": 61}, {"finetune": "adaround"}])
    def test_of_another_config(self, left, change):
        before = left.read_bytes()
        with pytest.raises(DataError, match="another model, data, config"):
            jq.quantize(
                small(), IMAGES, XINT8.replace(**({"finetune": BOTH, "finetune_steps": 60} | change)), checkpoint=left
            )
        assert left.read_bytes() == before

    def test_of_other_data(self, left):
        with pytest.raises(DataError, match="another model, data, config"):
            jq.quantize(small(), data(12), XINT8.replace(finetune=BOTH, finetune_steps=60), checkpoint=left)

    def test_of_another_stride(self, tmp_path):
        model = onnx.load_from_string(small())
        model.graph.node[7].attribute.append(onnx.helper.make_attribute("strides", [2, 2]))
        del model.graph.value_info[:]
        graph, start = (jq.prepare(jq.load(m), XINT8) for m in (model, small()))
        plan = jq.make_plan(start, jq.calibrate(start, IMAGES, XINT8), XINT8)
        Progress.open(tmp_path / "c", start, plan, start.params, IMAGES, XINT8).keep(0, 0, {}, {})
        with pytest.raises(DataError, match="another model"):
            Progress.open(tmp_path / "c", graph, plan, start.params, IMAGES, XINT8)

    def test_of_another_constant(self, tmp_path):
        """That differs in the middle of 2,000 elements."""
        graph = jq.prepare(jq.load(small()), XINT8)
        plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
        one, other = (graph.replace(constants={"i": np.arange(2000) % modulus}) for modulus in (1001, 1002))
        Progress.open(tmp_path / "c", one, plan, graph.params, IMAGES, XINT8).keep(0, 0, {}, {})
        assert Progress.open(tmp_path / "c", one, plan, graph.params, IMAGES, XINT8).done(0)
        with pytest.raises(DataError, match="another model"):
            Progress.open(tmp_path / "c", other, plan, graph.params, IMAGES, XINT8)

    def test_of_another_rounding(self, tmp_path, monkeypatch):
        graph = jq.prepare(jq.load(small()), XINT8)
        plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
        tuned = functools.partial(
            jq.finetune, graph, plan, IMAGES, XINT8.replace(finetune="own:mine"), checkpoint=tmp_path / "c"
        )

        def smaller(by: float) -> Any:
            return lambda columns, found, form: nearest(columns * by, found, form)

        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            with pytest.raises(Stopped):
                tuned(roundings={"mine": smaller(0.9)})
        for other in (smaller(0.8), nearest):
            with pytest.raises(DataError, match="config or rounding"):
                tuned(roundings={"mine": other})
        tuned(roundings={"mine": smaller(0.9)})
        assert not (tmp_path / "c").exists()

    @pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "other", "folder"])
    def test_that_is_damaged(self, left, damage):
        content = left.read_bytes()
        left.unlink()
        if damage == "folder":
            left.mkdir()
        else:
            other = safetensors.numpy.save({"a": np.zeros(3, np.float32)})
            found = {"truncated": content[: len(content) // 2], "garbage": b"\xff" * 100, "empty": b"", "other": other}
            left.write_bytes(found[damage])
        with pytest.raises(DataError):
            _again(checkpoint=left)


def same_as_adaround() -> Any:
    return Then(AdaRound(steps=60), CoordinateDescent())


class TestOwn:
    def test_a_rounding_is_a_stage_under_its_own_name(self):
        config = XINT8.replace(finetune="own:mine", finetune_steps=60)
        mine = jq.quantize(small(), IMAGES, config, roundings={"mine": same_as_adaround()})
        theirs = quantized("adaround")
        described = json.loads(next(p.value for p in mine.model.metadata_props if p.key == "jq.config"))
        assert described["finetune"] == "own:mine" and jq.QuantConfig.from_dict(described) == config
        assert mine.model.graph == theirs.model.graph

    def test_goes_with_other_stages(self):
        graph = jq.prepare(jq.load(small()), XINT8)
        plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
        calls: list[tuple[int, ...]] = []

        def watched(columns: Any, qparams: Any, form: Any) -> Any:
            calls.append(columns.shape)
            return nearest(columns, qparams)

        jq.finetune(graph, plan, IMAGES, XINT8.replace(finetune="own:watched+bias"), roundings={"watched": watched})
        assert set(calls) == {(1, 36, 8), (1, 72, 8), (8, 9, 1), (1, 8, 6)}  # each shape is compiled once

    @pytest.mark.parametrize(("both", "last"), [("adaround+bias", "bias"), ("bias+adaround", "adaround")])
    def test_a_later_stage_of_layers_loses_the_first_and_says_so(self, both: str, last: str) -> None:
        with pytest.warns(UserWarning, match=f"'{last}' rounds the float weights again"):
            made = jq.quantize(small(), IMAGES, XINT8.replace(finetune=both, finetune_steps=60))
        alone = jq.quantize(small(), IMAGES, XINT8.replace(finetune=last, finetune_steps=60))
        codes = [{i.name: i.raw_data for i in m.model.graph.initializer if len(i.dims) > 1} for m in (made, alone)]
        assert codes[0] and codes[0] == codes[1]

    @pytest.mark.parametrize(
        ("stages", "names", "match"),
        [
            ("own:a", [], r"needs roundings for \['a'\]; got none"),
            ("own:a", ["b"], r"needs roundings for \['a'\]; got \['b'\]"),
            ("adaround", ["a"], r"needs roundings for no stage; got \['a'\]"),
            (None, ["a"], r"needs roundings for no stage; got \['a'\]"),
        ],
    )
    def test_stages_without_roundings_and_roundings_without_stages(self, stages, names, match):
        with pytest.raises(jq.ConfigError, match=match):
            jq.quantize(small(), IMAGES, XINT8.replace(finetune=stages), roundings=dict.fromkeys(names, nearest))

    @pytest.mark.parametrize("stage", ["own:", "own:a b", "own:1", "mine:a"])
    def test_names_that_are_none(self, stage):
        with pytest.raises(jq.ConfigError, match=r"finetune needs .*own:name; got"):
            XINT8.replace(finetune=stage)


class TestReport:
    """Rows describe the weights of the file, and their loss against the float network."""

    @pytest.mark.parametrize("stages", ["adaround", BOTH])
    def test_describes_the_tuned_weights(self, stages):
        result, before = quantized(stages), quantized(None, bias_correction=False).graph.params
        arrays = {t.name: onnx.numpy_helper.to_array(t) for t in result.model.graph.initializer}
        rows = [r for r in result.report.rows if r.kind == "weight"]
        assert len(rows) == 10
        for row in rows:
            tuned, scale = result.graph.params[row.tensor], float(result.plan[row.tensor].scale)
            codes = next(a for k, a in arrays.items() if k.startswith(f"{row.tensor}_") and a.shape == tuned.shape)
            shipped, float_weight = codes.astype(np.float64) * scale, before[row.tensor].astype(np.float64)
            assert (row.low, row.high) == (tuned.min(), tuned.max())
            lost = np.square(shipped - float_weight).sum() / np.square(float_weight).sum()
            assert row.sqnr == pytest.approx(-10 * np.log10(lost), abs=1e-3)
            assert row.reason == ("" if np.array_equal(tuned, before[row.tensor]) else "changed")


def test_a_failure_of_the_thread_that_compiles_ahead_is_told(monkeypatch):
    def failing(*given: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no room for programs")
        return tune_layer(*given, **options)

    monkeypatch.setattr(MODULE, "tune_layer", failing)
    graph = jq.prepare(jq.load(small()), XINT8)
    plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
    with pytest.warns(UserWarning, match="compiling ahead .* failed.*no room for programs"):
        jq.finetune(graph, plan, IMAGES, XINT8.replace(finetune="descent"))


class TestTime:
    @pytest.mark.parametrize("budget", [0, 1e-9])
    def test_none_leaves_all_as_it_is(self, budget):
        graph = jq.prepare(jq.load(small()), XINT8)
        plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
        config = XINT8.replace(finetune=BOTH)
        params, moved = jq.finetune(graph, plan, IMAGES, config, time_budget=budget)
        assert all(params[k] is a or np.array_equal(params[k], a) for k, a in graph.params.items())
        assert {k: float(moved[k].scale) for k in moved} == {k: float(plan[k].scale) for k in plan}

    def test_a_little_is_a_model_that_runs(self, monkeypatch):
        ticks = iter(range(10000))
        monkeypatch.setattr(MODULE, "time", types.SimpleNamespace(perf_counter=lambda: float(next(ticks))))
        found = jq.quantize(small(), IMAGES, XINT8.replace(finetune="adaround", finetune_steps=60), time_budget=9)
        assert np.isfinite(sqnr(found.model, {"x": HELD_OUT}))


class TestRefused:
    def test_no_stage(self):
        graph = jq.prepare(jq.load(small()), XINT8)
        plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
        with pytest.raises(ConfigError, match="needs a stage; got finetune=None"):
            jq.finetune(graph, plan, IMAGES, "XINT8")

    @pytest.mark.parametrize(
        "empty", [[], np.zeros((0, 4, 7, 7), np.float32), iter([])], ids=["list", "array", "generator"]
    )
    def test_no_data(self, empty):
        graph = jq.prepare(jq.load(small()), XINT8)
        plan = jq.make_plan(graph, jq.calibrate(graph, IMAGES, XINT8), XINT8)
        with pytest.raises(DataError):
            jq.finetune(graph, plan, empty, XINT8.replace(finetune="adaround"))

    def test_samples_of_several_shapes(self):
        model = build([node("Conv", ["x", "w"], ["y"])], {"w": normal(4, 4, 3, 3)}, x=("N", 4, None, None))
        feeds = [{"x": normal(1, 4, size, 6)} for size in (6, 6, 7)]
        with pytest.raises(DataError, match="samples of one shape"):
            jq.quantize(model, feeds, XINT8.replace(finetune="adaround"))

    def test_values_that_are_not_finite(self):
        x = IMAGES.copy()
        x[3, 0, 0, 0] = np.nan
        with pytest.raises(DataError):
            jq.quantize(small(), x, XINT8.replace(finetune="adaround", finetune_steps=60))


def test_config_of_stages_goes_through_json() -> None:
    config = XINT8.replace(
        finetune="bias+adaround+block+network", finetune_steps=7, finetune_rate=0.25, finetune_drop=0.25
    )
    assert QuantConfig.from_dict(config.to_dict()) == config
