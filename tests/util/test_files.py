"""Files that come from outside, and files that are written."""

from __future__ import annotations

import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import jq
from jq.calibration.stats import Stats
from jq.cli import main
from jq.config_file import read_config
from jq.data.preprocessing import read_preprocessing
from jq.device.provider_report import read_report
from jq.device.report_file import read_device_report
from jq.evaluation.accuracy import read_labels
from jq.evaluation.tasks import read_truth
from jq.research.ablation import COLUMNS
from jq.research.experiment import read_experiment
from jq.research.ledger import Ledger
from jq.util import files

READERS: dict[str, Callable[[Path], object]] = {
    "model.onnx": jq.load,
    "config.toml": read_config,
    "config.json": read_config,
    "experiment.toml": read_experiment,
    "prep.toml": read_preprocessing,
    "stats.safetensors": Stats.load,
    "labels.txt": read_labels,
    "labels.npy": read_labels,
    "truth.json": read_truth,
    "truth.npz": read_truth,
    "report.json": read_device_report,
    "provider.json": read_report,
    "rows.csv": lambda path: Ledger.open(path, COLUMNS),
    "data.npy": lambda path: jq.calibrate(jq.load(jq.zoo.path("fashion_resnet")), path),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(name, kind, tmp_path):
    if (name, kind) == ("data.npy", "folder"):
        pytest.skip("data may be a folder")
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(jq.Error, match=r"not a regular file|irectory|is a folder"):
        READERS[name](path)


@pytest.mark.parametrize("name", [n for n in READERS if n.endswith((".toml", ".json"))])
@pytest.mark.parametrize("kind", ["nested", "dotted", "binary", "surrogate", "number"])
def test_documents_are_bounded(name, kind, tmp_path):
    path, is_json = tmp_path / name, name.endswith(".json")
    brackets = "[" * 3000 + "]" * 3000
    content = {
        "nested": brackets if is_json else f"a = {brackets}",
        "dotted": "{" * 3000 if is_json else "a." * 50_000 + "a = 1",
        "binary": "\xff\xfd\x00",
        "number": f'{{"a": 1{"0" * 400}}}' if is_json else f"a = 1{'0' * 400}",
        "surrogate": r'{"a": "\ud800"}' if is_json else r'a = "\ud800"',
    }[kind]
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(jq.Error, match=r"is not (JSON|TOML)|it is not text"):
        READERS[name](path)


def test_dots_in_strings_and_comments_are_no_keys():
    dots = "a." * 100
    text = f'a = "{dots}"  # {dots}\nb = """\n{dots}"""\nc = [{"1.5, " * 100}]\n[x."{dots}"]\n'
    assert files.parsed(text, "TOML")["b"] == dots


def test_a_link_to_nothing_is_not_there(tmp_path):
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(jq.DataError, match="cannot read"):
        files.content(tmp_path / "a")


def _write(path: str, letter: str) -> None:
    for _ in range(20):
        files.write(path, letter * (3_000_000 if letter == "a" else 2_000_000))


def test_two_writers_of_one_file_do_not_tear_it(tmp_path):
    path = tmp_path / "report.html"
    writers = [multiprocessing.get_context("spawn").Process(target=_write, args=(str(path), c)) for c in "ab"]
    for writer in writers:
        writer.start()
    seen = set()
    while any(w.is_alive() for w in writers):
        if path.exists():
            content = path.read_bytes()
            seen.add((len(content), content[:1], content[-1:]))
    assert [w.exitcode for w in writers] == [0, 0]
    assert seen <= {(3_000_000, b"a", b"a"), (2_000_000, b"b", b"b")}
    assert os.listdir(tmp_path) == ["report.html"]


def test_drafts_of_killed_runs_are_removed_later(tmp_path):
    killed, running = files.draft_of(tmp_path / "a.json"), files.draft_of(tmp_path / "a.json")
    for path in (killed, running):
        path.write_text("half")
    os.utime(killed, (time.time() - 86400,) * 2)
    files.write(tmp_path / "a.json", "{}")
    assert running.exists() and not killed.exists()


def test_a_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "plain").write_text("")
    files.write(tmp_path / "made", "")
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    with pytest.raises(jq.DataError, match="not a regular file"):
        files.write(pipe, "x")
    for output in (pipe, Path("/dev/null")):
        with pytest.raises(jq.ConfigError, match="not a regular file"):
            jq.save(jq.load(jq.zoo.path("fashion_resnet")), output)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    "words",
    [
        ["calibrate", "model.onnx", "-o", "model.onnx"],
        ["calibrate", "model.onnx", "--data", "d.npy", "-o", "d.npy"],
        ["quantize", "model.onnx", "-o", "a.onnx", "--report", "a.onnx"],
        ["convert", "model.onnx", "-o", "./model.onnx"],
    ],
)
def test_a_command_does_not_write_what_it_reads_or_one_file_twice(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = jq.zoo.path("fashion_resnet").read_bytes()
    (tmp_path / "model.onnx").write_bytes(model)
    np.save(tmp_path / "d.npy", np.zeros((2, 1, 28, 28), np.float32))
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and capfd.readouterr().err.count("\n") == 1
    assert (tmp_path / "model.onnx").read_bytes() == model
    assert sorted(os.listdir(tmp_path)) == ["d.npy", "model.onnx"]


def test_an_offset_of_labels_that_no_integer_holds(tmp_path):
    (tmp_path / "l.txt").write_text("1\n2\n")
    with pytest.raises(jq.ConfigError, match="offset of labels"):
        read_labels(tmp_path / "l.txt", 10**20)


def test_images_are_opened_in_the_format_of_their_name(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    calls, images = tmp_path / "calls", tmp_path / "images"
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho called >> {calls}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    images.mkdir()
    (images / "a.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(jq.DataError, match=r"cannot read the image .*a\.png"):
        jq.calibrate(jq.load(jq.zoo.path("fashion_resnet")), images, "XINT8")
    assert not calls.exists()
