"""The ablation runner: the numbers of separate runs, each computed once, through kills and resumes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest

import jq
from jq.cli import main
from jq.recovery.held_back import HeldBack
from jq.research import Experiment, Results, Subject, ablate, grid, work_of
from jq.research.ablation import _digest
from tests.conftest import onnxruntime_outputs
from tests.recovery.test_finetuning import HELD_OUT, IMAGES, small

MODULE = sys.modules["jq.research.ablation"]  # jq.research.ablate is the function
BASE = jq.presets["XINT8"].replace(cle=False, finetune_batch=6)
LABELS = np.arange(len(HELD_OUT)) % 6


def subject(**changes) -> Subject:
    return dataclasses.replace(Subject(model=small(), data=IMAGES, evaluation=HELD_OUT, labels=LABELS), **changes)


def experiment(seeds=(0, 3), **options) -> Experiment:
    options = options or {"finetune": [None, "adaround", "adaround+block"], "finetune_rate": [0.03, 0.1]}
    return Experiment(subjects={"small": subject()}, configs=grid(BASE, finetune_steps=[8], **options), seeds=seeds)


@pytest.fixture(scope="module", autouse=True)
def blocks_are_kept() -> Iterator[None]:
    """What blocks learn, which depends on the seed: on this little data it would be undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldBack, "is_no_worse", lambda *_: True)
        yield


@pytest.fixture(scope="module")
def found() -> Results:
    return ablate(experiment())


class TestNumbers:
    def test_each_run_gives_the_bytes_of_a_separate_one(self, found):
        """Weights, plan and metrics, from a run of `jq.quantize` for itself and onnxruntime on what it exports."""
        configs = experiment().configs
        assert len(found.rows) == 12 and all(row.keys() == MODULE.COLUMNS.keys() for row in found.rows)
        (want,) = onnxruntime_outputs(onnx.load_from_string(small()), {"x": HELD_OUT})
        for row in found.rows:
            result = jq.quantize(small(), IMAGES, configs[row["config"]].replace(seed=row["seed"]))
            assert _digest(result.graph.params, result.plan) == row["digest"], row
            (have,) = onnxruntime_outputs(result.model, {"x": HELD_OUT})
            assert row["top1"] == jq.metrics.topk(have, LABELS)
            assert row["agreement"] == np.mean(want.argmax(-1) == have.argmax(-1))
            assert row["sqnr"] == pytest.approx(jq.metrics.sqnr(want, have), abs=1e-3)
            assert row["float_top1"] == jq.metrics.topk(want, LABELS)
            one, two = (np.exp(y - np.log(np.exp(y.astype(np.float64)).sum(-1, keepdims=True))) for y in (want, have))
            assert row["kl"] == pytest.approx(float(np.mean(np.sum(one * np.log(one / two), -1))), rel=1e-3)

    def test_what_a_seed_does_not_change_is_computed_once_and_shown_for_all(self, found):
        for row in found.rows:
            again = row["seed"] == 3 and "block" not in row["config"]
            assert row["same_as_seed"] == (0 if again else None)
            assert row["same_as_seed"] is None or row["added_seconds"] == 0
        digests = {(r["config"], r["seed"]): r["digest"] for r in found.rows}
        for config in experiment().configs:
            assert digests[config, 0] == digests[config, 3] or "block" in config
        assert any(digests[c, 0] != digests[c, 3] for c in experiment().configs)

    def test_random_data_hang_on_the_seed(self):
        wanted = dataclasses.replace(experiment(finetune=[None]), subjects={"small": subject(data=None)})
        with pytest.warns(UserWarning, match="random samples"):
            rows = ablate(wanted).rows
        assert rows[0]["digest"] != rows[1]["digest"] and rows[1]["same_as_seed"] is None

    def test_labels_are_not_needed(self):
        rows = ablate(
            dataclasses.replace(experiment((0,), finetune=[None]), subjects={"small": subject(labels=None)})
        ).rows
        assert rows[0]["top1"] is None and rows[0]["agreement"] > 0.5


class TestWork:
    def test_steps_are_done_once(self, monkeypatch):
        """One calibration; a stage once for each rate, and again for each seed where it draws samples."""
        calls = []
        for name in ("calibrated", "tune_stage"):
            real = getattr(MODULE, name)
            monkeypatch.setattr(MODULE, name, lambda *a, real=real, name=name: calls.append((name, a)) or real(*a))
        ablate(experiment())
        stages = [a[5].finetune.split("+")[a[6]] for name, a in calls if name == "tune_stage"]
        assert sum(name == "calibrated" for name, _ in calls) == 1
        assert stages.count("block") == 4
        assert stages.count("adaround") == 2

    def test_rates_seeds_and_steps_share_what_is_compiled(self):
        with jax.log_compiles(False):
            ablate(experiment((0, 1), finetune=["adaround+block"]))
            counted = _compilations(lambda: ablate(experiment((0,), finetune=["adaround+block"])))
            many = {"finetune": ["adaround+block"], "finetune_rate": [0.02, 0.05, 0.2], "finetune_drop": [0.2, 0.7]}
            assert _compilations(lambda: ablate(experiment((0, 1), **many))) <= counted + 2

    def test_the_plan_of_runs(self):
        (group,) = work_of(experiment()).groups
        assert (len(group.runs), group.results) == (12, 8)
        config = {"finetune": [None], "cle": [False, True]}
        assert [len(g.runs) for g in work_of(experiment(**config)).groups] == [2, 2]


def _compilations(run) -> int:
    """How many programs XLA is asked for."""
    count = 0

    def listen(name: str, *_, **__) -> None:
        nonlocal count
        count += name == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return count


class TestTable:
    @pytest.mark.parametrize("suffix", ["jsonl", "csv"])
    def test_a_killed_run_goes_on(self, tmp_path, suffix, monkeypatch):
        """Whatever the kill leaves of the last line: nothing is computed again, and nothing is there twice."""
        few = experiment((0,), finetune=[None, "adaround"])
        path = tmp_path / f"rows.{suffix}"
        rows = ablate(few, path).rows
        whole = path.read_bytes()
        path.write_bytes(whole[:-7])
        assert len(work_of(few, path).done) == 1
        again = ablate(few, path).rows
        keys = [k for k in rows[0] if "seconds" not in k and k != "megabytes"]
        assert [[r[k] for k in keys] for r in again] == [[r[k] for k in keys] for r in rows]
        assert len(path.read_bytes().splitlines()) == len(whole.splitlines())
        monkeypatch.setattr(MODULE, "calibrated", None)  # nothing is left to do
        assert [dict(r) for r in ablate(few, path).rows] == [dict(r) for r in again]

    def test_a_process_that_is_killed_leaves_whole_lines(self, tmp_path):
        """SIGKILL after the first line."""
        path = tmp_path / "rows.jsonl"
        script = (
            "import sys; from jq.research import *; import tests.research.test_ablate as t\n"
            "t.ablate(t.experiment((0,), finetune=[None, 'bias']), sys.argv[1])"
        )
        with subprocess.Popen([sys.executable, "-c", script, str(path)]) as process:
            while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n")):
                time.sleep(0.01)
            process.kill()
        kept = [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        assert kept and len(work_of(experiment((0,), finetune=[None, "bias"]), path).done) == len(kept)

    def test_other_data_or_configs_are_other_rows(self, tmp_path):
        path, few = tmp_path / "rows.jsonl", experiment((0,), finetune=[None])
        ablate(few, path)
        for other in (
            experiment((1,), finetune=[None]),
            experiment((0,), finetune=[None], batch=[4]),
            dataclasses.replace(few, subjects={"small": subject(data=IMAGES[::-1])}),
            dataclasses.replace(few, subjects={"small": subject(labels=LABELS[::-1])}),
        ):
            assert not work_of(other, path).done
        assert len(work_of(few, path).done) == 1

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("rows.txt", "", r"ends in \.jsonl or \.csv"),
            ("rows.jsonl", "no json\n", "not a table of these runs"),
            ("rows.jsonl", '{"a": 1}\n', "a row has no 'hash'"),
            ("rows.csv", "a,b\n", "its columns are a, b"),
        ],
    )
    def test_files_that_are_something_else(self, tmp_path, name, content, message):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(jq.Error, match=message):
            work_of(experiment(), path)
        assert path.read_text() == content


TOML = """
models = ["fashion_resnet"]
samples = 8
seeds = [0, 1]
[configs.plain]
cle = false
bias_correction = false
[configs.a8w8]
preset = "A8W8"
"""


class TestCommand:
    def test_rows_summaries_and_a_second_time(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("study.toml").write_text(TOML)
        arguments = ["ablate", "study.toml", "--summary", "s.md", "--summary", "s.tex", "--summary", "s.svg"]
        with pytest.raises(SystemExit, match="0"):
            main([*arguments, "--dry-run", "--json"])
        assert len(json.loads(capsys.readouterr().out)["runs"]) == 4
        for _ in range(2):
            with pytest.raises(SystemExit, match="0"):
                main([*arguments, "--json"])
            rows = json.loads(capsys.readouterr().out)
            assert [(r["config"], r["seed"]) for r in rows] == [("plain", 0), ("plain", 1), ("a8w8", 0), ("a8w8", 1)]
        assert len(Path("study.jsonl").read_text().splitlines()) == 4
        assert (
            "| fashion_resnet | " in Path("s.md").read_text() and " ± " in Path("s.md").read_text()
        )  # of seeds that draw
        assert r"fashion\_resnet & " in Path("s.tex").read_text() and r"\textbf{" in Path("s.tex").read_text()
        assert Path("s.svg").read_text().count("<circle") == 4

    def test_the_committed_experiments_are_read(self):
        folder = Path(__file__).parents[2] / "experiments" / "ablations"
        found = jq.research.read_experiment(folder / "bundled.toml")
        assert len(found.configs) * len(found.seeds) * len(found.subjects) == 48
        with pytest.raises(jq.ConfigError, match="Did you mean 'fashion_resnet'"):
            jq.research.read_experiment(folder / "bundled.toml", ["fashion_resnt"])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("seed = [1]", "no entry seed. Did you mean 'seeds'"),
            ("[grid]\nfinetun = ['block']", "Did you mean 'finetune'"),
            ("[grid]\nfinetune = 'block'", "needs a list"),
            ("[configs.a]\npreset = 'XINT9'", "Did you mean 'XINT8'"),
            ("[configs.a]\n[models.m]\npat = 'x'", "no entry models.m.pat"),
            ("[configs.a]\n[models.m]\npath = 'x.onnx'", "x.onnx does not exist"),
            ("[configs.a]\n[models.m]\npath = '$NOT_SET_ANYWHERE/x.onnx'", "NOT_SET_ANYWHERE"),
            ("[configs.a]\nmodels = 1", "no option 'models'"),
            ("models = ['fashion_resnt']\n[configs.a]", "Did you mean 'fashion_resnet'"),
            ("seeds = [1, 1]\n[configs.a]", "each seed once"),
            ("seeds = [-1]\n[configs.a]", "of 0 or more; got -1"),
            ("", "needs configs"),
            ("=", "not TOML"),
        ],
    )
    def test_mistakes_are_one_line(self, tmp_path, text, message):
        path = tmp_path / "study.toml"
        path.write_text(text)
        with pytest.raises(jq.Error, match=message):
            jq.research.read_experiment(path)

    def test_a_script_gives_an_experiment(self, tmp_path):
        path = tmp_path / "study.py"
        path.write_text("import tests.research.test_ablate as t\nexperiment = t.experiment()\n")
        assert len(jq.research.read_experiment(path).configs) == 6
        path.write_text("")
        with pytest.raises(jq.ConfigError, match="sets `experiment`"):
            jq.research.read_experiment(path)


def test_spread_over_seeds():
    row = {"model": "m", "config": "c_1", "digest": "", "float_top1": None, "agreement": 0.5, "kl": None}
    rows = [row | {"top1": t, "sqnr": s, "digest": str(s), "added_seconds": 1.0} for t, s in ((0.5, 1.0), (0.7, 3.0))]
    (line,) = Results(rows).summary()
    assert line.measures["sqnr"].mean == 2 and line.measures["sqnr"].deviation == pytest.approx(2**0.5)
    assert "| m | c_1 | 2 | 60.00 ± 14.14 | 50.00 | 2.00 ± 1.41 | 2.0 |" in Results(rows).to_markdown()
    assert r"m & c\_1 & 2 & 60.00 $\pm$ 14.14 & 50.00 & 2.00 $\pm$ 1.41 & 2.0 \\" in Results(rows).to_latex()
