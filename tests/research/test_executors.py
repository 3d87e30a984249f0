"""Work elsewhere: the numbers of one process, bit for bit, whatever dies on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jq
from jq import research
from jq.research import Processes, ablate, work_of
from jq.research.executors import Shipped, _read, performed, shipping
from jq.research.ledger import NUMBER, Ledger
from tests.recovery.test_finetuning import small
from tests.research.test_ablate import experiment, subject

COLUMNS = {"hash": str, "writer": NUMBER, "text": str}
LASTING = [c for c in jq.research.ablation.COLUMNS if "seconds" not in c and c != "megabytes"]


@pytest.fixture(scope="module")
def processes():
    with Processes(2) as executor:
        yield executor


def unlike(here: Sequence[Any], there: Sequence[Any]) -> list[Any]:
    """The numbers that rows do not share."""
    pairs = zip(here, there, strict=True)
    return [
        (one["config"], one["seed"], c, one[c], other[c]) for one, other in pairs for c in LASTING if one[c] != other[c]
    ]


def double(value: int) -> int:
    return 2 * value


def dies_once(path: str, value: int) -> int:
    """Kill the worker, the first time that this is called."""
    with contextlib.suppress(FileExistsError):
        Path(path).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def dying(path: str, function: Any, args: Any) -> Any:
    """Kill the worker of the first item that begins."""
    dies_once(path, 0)
    return function(*args)


def dies(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(kind: str) -> None:
    if kind == "local":

        class Local(Exception):
            pass

        raise Local("cannot be pickled")
    raise jq.DataError("sample 3 has NaN")


@dataclasses.dataclass
class Jobs:
    """Like submitit's executor: its jobs are no futures, and nothing can wait for them."""

    threads: ThreadPoolExecutor

    def submit(self, function: Any, *args: Any) -> Any:
        future: Future[Any] = self.threads.submit(function, *args)
        return type("Job", (), {"done": lambda _: future.done(), "result": lambda _: future.result()})()


class TestWork:
    def test_items_of_any_executor_come_with_their_numbers(self, processes):
        items = [(i,) for i in range(5)]
        with ThreadPoolExecutor(2) as threads:
            for executor in (threads, Jobs(threads), processes):
                assert dict(performed(executor, double, items)) == {i: 2 * i for i in range(5)}

    def test_an_item_whose_worker_dies_is_done_again(self, processes, tmp_path):
        items = [(str(tmp_path / f"{i}"), i) for i in range(3)]
        assert dict(performed(processes, dies_once, items)) == {0: 0, 1: 1, 2: 2}

    def test_an_item_that_always_kills_is_given_up(self, processes):
        with pytest.raises(jq.Error, match=r"item 1 of 1 lost its worker.*3 times"):
            list(performed(processes, dies, [(0,)]))
        assert processes.submit(double, 2).result() == 4  # and the others go on

    def test_a_pool_that_breaks_says_what_to_do(self):
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        with pool, pytest.raises(jq.Error, match=r"jq\.research\.Processes"):
            list(performed(pool, dies, [(0,)]))

    @pytest.mark.parametrize(("kind", "match"), [("jq", "sample 3 has NaN"), ("local", "a worker raised Local")])
    def test_what_work_raises_is_raised_at_once(self, processes, kind, match):
        with pytest.raises(jq.Error, match=match):
            list(performed(processes, raises, [(kind,)]))

    def test_counts_of_workers_are_checked(self):
        for workers in (0, True, 1.5):
            with pytest.raises(jq.ConfigError, match="at least 1"):
                Processes(workers)

    def test_only_what_was_shipped_is_read(self):
        with shipping() as ship:
            shipped = ship({"a": np.arange(3)})
            assert ship({"a": np.arange(3)}) == shipped and len(pickle.dumps(shipped)) < 500
            assert shipped.value["a"].tolist() == [0, 1, 2]
            _read.cache_clear()
            Path(shipped.path).write_bytes(pickle.dumps(1))
            with pytest.raises(jq.DataError, match="has changed since it was sent"):
                _ = shipped.value
        with pytest.raises(jq.DataError, match="set TMPDIR"):
            _ = Shipped(shipped.path, "0").value


class TestAblation:
    def test_rows_are_those_of_one_process(self, processes, tmp_path):
        """Several stages, seeds that draw samples, and a table that the first run leaves half done."""
        stages = experiment(finetune=[None, "adaround", "adaround+block"])
        drawing = dataclasses.replace(stages, subjects={"small": subject(samples=16)})
        here = ablate(drawing).rows
        path = tmp_path / "rows.jsonl"
        ablate(dataclasses.replace(drawing, seeds=(3,)), path, executor=processes)
        assert len(work_of(drawing, path).done) == 3
        there = ablate(drawing, path, executor=processes).rows
        assert len(here) == 6 and len({(r["config"], r["digest"]) for r in here}) == 6  # a seed draws other samples
        assert unlike(here, there) == []

    def test_runs_whose_worker_dies_are_done_again(self, processes, tmp_path):
        class Deadly:
            def submit(self, function, *args):
                return processes.submit(dying, str(tmp_path / "died"), function, args)

        few = experiment((0,), finetune=[None, "bias"])
        here, there = ablate(few).rows, ablate(few, tmp_path / "rows.csv", executor=Deadly()).rows
        assert (tmp_path / "died").exists() and unlike(here, there) == []

    def test_items_are_small_and_hold_no_data(self):
        sizes = []

        class Counting:
            def submit(self, function, *args):
                sizes.append(len(pickle.dumps((function, args))))
                future: Future[Any] = Future()
                future.set_result(function(*args))
                return future

        images = np.zeros((400, 4, 7, 7), np.float32) + np.arange(400, dtype=np.float32)[:, None, None, None] / 400
        many = dataclasses.replace(experiment((0,), finetune=[None, "bias"]), subjects={"m": subject(data=images)})
        assert len(ablate(many, executor=Counting()).rows) == 2
        assert len(sizes) == 2 and max(sizes) < 10_000 < images.nbytes

    def test_data_that_cannot_be_pickled_travel_as_samples(self, processes):
        class Reader:
            def __init__(self):
                self.rewind()

            def get_next(self):
                return next(self.left, None)

            def rewind(self):
                self.left = iter([{"x": x[None]} for x in subject().data])

        few = experiment((0,), finetune=[None])
        reading = dataclasses.replace(few, subjects={"small": subject(data=Reader())})
        (there,), (here,) = ablate(reading, executor=processes).rows, ablate(few).rows
        assert there["digest"] == here["digest"]

    def test_the_command_takes_workers(self, tmp_path, monkeypatch, capsys):
        from jq.cli import main

        monkeypatch.chdir(tmp_path)
        Path("study.toml").write_text('models = ["fashion_resnet"]\nsamples = 8\n[configs.a]\npreset = "A8W8"\n')
        with pytest.raises(SystemExit, match="0"):
            main(["ablate", "study.toml", "--workers", "1", "--json"])
        assert '"config": "a"' in capsys.readouterr().out


class TestSensitivity:
    @pytest.mark.parametrize("mode", ["alone", "all_but_one"])
    def test_losses_are_those_of_one_process(self, processes, mode):
        graph = jq.prepare(jq.load(small()), "XINT8")
        images = subject().data
        plan = jq.make_plan(graph, jq.calibrate(graph, images, "XINT8"), "XINT8")
        here = research.sensitivity(graph, plan, images, mode=mode)
        assert research.sensitivity(graph, plan, images, mode=mode, executor=processes) == here

    def test_formats_are_those_of_one_process(self, processes):
        graph = jq.prepare(jq.load(small()), "XINT8")
        tables = [
            research.format_table(graph, subject().data, limit=8, executor=executor) for executor in (None, processes)
        ]
        np.testing.assert_array_equal(tables[0].losses, tables[1].losses)


class TestSearch:
    def test_the_plan_is_that_of_one_process(self, processes):
        graph = jq.prepare(jq.load(small()), "XINT8")
        plan = jq.make_plan(graph, jq.calibrate(graph, subject().data, "XINT8"), "XINT8")
        found = [
            research.search_exponents(graph, plan, subject().data, method="beam", width=2, executor=executor)
            for executor in (None, processes)
        ]
        assert found[0].steps == found[1].steps and found[0].steps
        assert (found[0].before, found[0].after) == (found[1].before, found[1].after)
        assert {t: float(found[0].plan[t].scale) for t in plan} == {t: float(found[1].plan[t].scale) for t in plan}


def append_rows(path: str, writer: int, count: int) -> None:
    ledger = Ledger.open(path, COLUMNS)
    for i in range(count):
        ledger.append({"hash": f"{writer}-{i}", "writer": writer, "text": "x" * (1 + 997 * i % 9000)})


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_many_writers_of_one_table_lose_nothing(suffix, tmp_path):
    """Processes and threads, and a line that a killed writer left half done."""
    path, count = tmp_path / f"rows{suffix}", 40
    append_rows(str(path), 9, 1)
    with path.open("ab") as file:
        file.write(b'{"hash": "torn')
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=append_rows, args=(str(path), i, count)) for i in range(2)]
    writers += [threading.Thread(target=append_rows, args=(str(path), i, count)) for i in range(2, 4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = Ledger.open(path, COLUMNS).rows
    assert sorted(r["hash"] for r in rows) == sorted(["9-0", *(f"{w}-{i}" for w in range(4) for i in range(count))])
