"""Folders of results: what is compared is what numpy computes, and what cannot be is named."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import jq
from jq.errors import DataError
from jq.evaluation.evaluate import compare_folders
from tests.cli.test_commands import run
from tests.data.test_sources import header

GOOD = np.arange(6, dtype=np.float32)
Folders = tuple[Path, Path]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Two folders that share one good result."""
    found = tmp_path / "float", tmp_path / "quantized"
    for folder in found:
        folder.mkdir()
        np.save(folder / "good.npy", GOOD)
    return found


def picture(path: Path, pixels: np.ndarray, **options: object) -> None:
    pytest.importorskip("PIL.Image").fromarray(pixels).save(path, **options)


# ---------------------------------------------------------------------------------------------
# What is computed
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", jq.zoo.models())
def test_bundled_models_float_and_quantized(name: str, tmp_path: Path) -> None:
    calibration, images = jq.zoo.calibration_set()[0][:32], jq.zoo.evaluation_set()[0][:12]
    model = jq.quantize(jq.zoo.path(name), calibration, "XINT8").model
    jq.infer(jq.zoo.path(name), images, tmp_path / "float")
    jq.infer(model, images, tmp_path / "quantized")
    found = compare_folders(tmp_path / "float", tmp_path / "quantized")
    assert found.complete and [row.key for row in found.rows] == [f"{i:08}" for i in range(12)]
    import onnxruntime

    original = jq.zoo.path(name).read_bytes()
    one, two = (
        np.concatenate([session.run(None, {"input": image[None]})[0] for image in images]).astype(np.float64)
        for session in (onnxruntime.InferenceSession(m) for m in (original, model.SerializeToString()))
    )
    distance = np.linalg.norm(one - two, axis=1)
    cosine = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
    psnr = 10 * np.log10(one.max(1) ** 2 / np.mean((one - two) ** 2, axis=1))
    assert distance.min() > 0
    np.testing.assert_allclose([r.l2 for r in found.rows], distance, rtol=1e-9)
    np.testing.assert_allclose([r.cosine for r in found.rows], cosine, rtol=1e-9)
    np.testing.assert_allclose([r.psnr for r in found.rows], psnr, rtol=1e-9)
    assert found.totals["cosine"].mean == pytest.approx(cosine.mean())
    assert found.totals["cosine"].worst == pytest.approx(cosine.min())
    assert found.totals["l2"].worst == pytest.approx(distance.max())
    assert found.totals["psnr"].worst == pytest.approx(psnr.min())


def test_images_and_arrays_of_them(folders: Folders, rng: np.random.Generator) -> None:
    one, two = folders
    x, y = rng.integers(0, 256, (2, 20, 24, 3)).astype(np.uint8)
    gray = x[..., 0]
    picture(one / "a.png", x)
    np.save(two / "a.npy", y)  # a picture held against an array
    picture(one / "gray.png", gray)
    picture(two / "gray.bmp", gray)
    picture(one / "photo.jpg", x, quality=90)
    picture(two / "photo.jpeg", x, quality=90)
    found = compare_folders(one, two)
    rows = {row.key: row for row in found.rows}
    assert found.complete and not found.findings
    assert rows["a"].ssim == jq.metrics.ssim(x, y, axes=(0, 1)) and rows["a"].shape == (20, 24, 3)
    assert rows["a"].l2 == pytest.approx(math.sqrt(np.square(x.astype(int) - y).sum()))
    assert rows["gray"].shape == (20, 24) and rows["gray"].psnr == math.inf and rows["gray"].ssim == 1
    assert rows["photo"].l2 == 0 and rows["good"].ssim is None
    assert found.identical == 3 and found.totals["psnr"].mean == rows["a"].psnr


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((1, 3, 12, 14), (2, 3)), ((1, 12, 14, 3), (1, 2)), ((12, 14), (0, 1)), ((1, 1000), None), ((1, 64, 7, 7), None)],
)
def test_where_ssim_sees_images(
    shape: tuple[int, ...], axes: tuple[int, int] | None, folders: Folders, rng: np.random.Generator
) -> None:
    x, y = rng.normal(size=(2, *shape))
    for folder, array in zip(folders, (x, y), strict=True):
        np.save(folder / "a.npy", array)
    row = compare_folders(*folders).rows[0]
    assert row.ssim == (axes and jq.metrics.ssim(x, y, axes=axes))


def test_members_of_archives_are_results(folders: Folders) -> None:
    one, two = folders
    np.savez(one / "outputs.npz", logits=GOOD, boxes=GOOD + 1)
    (two / "outputs").mkdir()
    np.save(two / "outputs/logits.npy", GOOD)
    np.savez_compressed(two / "outputs.npz", boxes=GOOD)
    found = compare_folders(one, two)
    assert [row.key for row in found.rows] == ["good", "outputs/boxes", "outputs/logits"] and found.complete
    assert found.rows[1].l2 == pytest.approx(math.sqrt(6))


def test_the_same_stem_twice_in_both_folders(folders: Folders) -> None:
    one, two = folders
    for folder in folders:
        picture(folder / "a.png", np.zeros((12, 12), np.uint8))
        np.save(folder / "a.npy", GOOD)
    found = compare_folders(one, two)
    assert [(row.baseline, row.quantized) for row in found.rows] == [("a.npy",) * 2, ("a.png",) * 2, ("good.npy",) * 2]


def test_what_is_written(folders: Folders, tmp_path: Path) -> None:
    one, two = folders
    np.save(two / "good.npy", GOOD + 1)
    np.save(one / "negative, too.npy", -GOOD)
    np.save(two / "negative, too.npy", -GOOD * 2)
    np.save(one / "same.npy", GOOD)
    np.save(two / "same.npy", GOOD)
    found = compare_folders(one, two)
    found.to_csv(tmp_path / "found.csv")
    found.to_json(tmp_path / "found.json")
    lines = list(csv.reader((tmp_path / "found.csv").open(newline="")))
    assert lines[0] == ["key", "baseline", "quantized", "shape", "cosine", "l2", "psnr", "ssim"]
    assert lines[1][:4] == ["good", "good.npy", "good.npy", "6"]
    assert float(lines[1][5]) == found.rows[0].l2 and lines[2][6] == "" and lines[3][6] == "inf"

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads((tmp_path / "found.json").read_text(), parse_constant=refuse)
    assert document["identical"] == 1 and [r["psnr"] for r in document["results"]][1:] == [None, None]
    assert "3 results compared, 1 of them identical" in found.summary()


# ---------------------------------------------------------------------------------------------
# Bad folders
# ---------------------------------------------------------------------------------------------


def bomb(path: Path) -> None:
    """A few bytes that would unpack to gigabytes, as they say themselves."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header((1 << 33,), "|u1"))


def save(array: np.ndarray, name: str = "bad.npy") -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, array, allow_pickle=True)


def content(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data)


def truncated(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        if name.endswith(".png"):
            picture(folder / name, np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8))
        elif name.endswith(".npz"):
            np.savez(folder / name, x=np.arange(1000))
        else:
            np.save(folder / name, np.arange(1000))
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return make


def frames(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    first, second = (image.new("L", (16, 16), value) for value in (0, 255))
    first.save(folder / "bad.gif", save_all=True, append_images=[second])


GOOD_BAD = save(GOOD)  # a good result of the name that the bad one has


@pytest.mark.parametrize(
    ("one", "two", "rule", "match"),
    [
        (GOOD_BAD, lambda f: None, "missing", "bad.npy is among the baseline results only"),
        (lambda f: None, GOOD_BAD, "missing", "bad.npy is among the quantized results only"),
        (GOOD_BAD, save(GOOD[:5]), "other-shape", r"\[6\].*\[5\]"),
        (GOOD_BAD, save(GOOD.astype(np.float16)), "other-type", "float32.*float16"),
        (save(GOOD[:0]), save(GOOD[:0]), "no-elements", "empty"),
        (GOOD_BAD, save(np.where(GOOD == 2, np.nan, GOOD)), "not-finite", "1 of 6 values of the quantized"),
        (save(np.where(GOOD > 2, np.inf, GOOD)), GOOD_BAD, "not-finite", "3 of 6 values of the baseline"),
        (GOOD_BAD, truncated("bad.npy"), "unreadable", "cannot read"),
        (truncated("bad.npz"), truncated("bad.npz"), "unreadable", "cannot read"),
        (truncated("bad.png"), truncated("bad.png"), "unreadable", "truncated"),
        (GOOD_BAD, content("bad.npy", b""), "unreadable", "cannot read"),
        (GOOD_BAD, content("bad.npy", b"words, and no array"), "unreadable", "cannot read"),
        (GOOD_BAD, content("bad.png", b"no image"), "unreadable", "cannot identify"),
        (GOOD_BAD, content("bad.npz", b"PK\x03\x04 no archive"), "unreadable", "cannot read"),
        (GOOD_BAD, save(np.array([{"a": 1}], object)), "unreadable", "pickled objects are refused"),
        (GOOD_BAD, save(np.array(["text"])), "unreadable", "expected real numbers"),
        (GOOD_BAD, save(GOOD.astype(complex)), "unreadable", "expected real numbers"),
        (GOOD_BAD, content("bad.npy", header((1 << 50,)) + bytes(64)), "unreadable", "cannot read"),
        (GOOD_BAD, content("bad.npy", header((-5,)) + bytes(64)), "unreadable", "cannot read"),
        (GOOD_BAD, lambda f: bomb(f / "bad.npz"), "unreadable", "declares more than the file holds"),
        (GOOD_BAD, lambda f: np.savez(f / "bad.npz"), "unreadable", "holds no arrays"),
        (frames, frames, "unreadable", "2 frames"),
        (GOOD_BAD, lambda f: (f / "bad.npy").symlink_to("bad.npy"), "unreadable", "cannot read"),
        (GOOD_BAD, lambda f: (f / "bad.npy").symlink_to("nowhere"), "unreadable", "cannot read"),
        (GOOD_BAD, lambda f: os.mkfifo(f / "bad.npy"), "unreadable", "not a regular file"),
        (GOOD_BAD, lambda f: os.mkfifo(f / "bad.jpg"), "unreadable", "not a regular file"),
        (GOOD_BAD, lambda f: (GOOD_BAD(f), picture(f / "bad.png", np.eye(12) > 0)), "ambiguous", "bad.npy, bad.png"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bad_results_are_findings(
    one: Callable, two: Callable, rule: str, match: str, folders: Folders, capfd: pytest.CaptureFixture[str]
) -> None:
    one(folders[0])
    two(folders[1])
    found = compare_folders(*folders)
    assert "good" in [row.key for row in found.rows]
    assert rule in [f.rule for f in found.findings]
    first = next(f for f in found.findings if f.rule == rule)
    assert re.search(match, first.message), first.message
    fatal = rule not in ("other-type", "no-elements")
    assert found.complete is not fatal
    assert ("bad" in [row.key for row in found.rows]) is (rule == "other-type")
    code, out, err = run(capfd, "evaluate", *map(str, folders))
    assert code == (1 if fatal else 0) and f"[{rule}]" in out and "Traceback" not in out + err


def test_an_array_that_unpacks_to_much_is_not_unpacked(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jq.evaluation.results._MOST_UNPACKED", 1000)
    for folder in folders:
        np.savez_compressed(folder / "bad.npz", x=np.zeros(10_000))
    found = compare_folders(*folders).findings
    assert [f.rule for f in found] == ["unreadable"] * 2 and "80,000 bytes" in found[0].message


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_large_picture_is_not_unpacked(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in folders:
        picture(folder / "bad.png", np.zeros((30, 30), np.uint8))
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 899)
    found = compare_folders(*folders)
    assert {f.rule for f in found.findings} == {"unreadable"} and "too large" in found.findings[0].message


def test_loops_of_folders_end(folders: Folders) -> None:
    for folder in folders:
        (folder / "again").symlink_to(folder)
    found = compare_folders(*folders)
    assert found.complete and len(found.rows) == 1


def test_files_that_may_not_be_read(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    load = np.load

    def denied(path: Path, **options: object) -> np.ndarray:
        if Path(path).parent.name == "quantized":
            raise PermissionError(13, "Permission denied")
        return load(path, **options)

    monkeypatch.setattr(np, "load", denied)  # the superuser may read all
    (found,) = compare_folders(*folders).findings
    assert found.rule == "unreadable" and "Permission denied" in found.message


def test_folders_that_may_not_be_listed(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders[0] / "inside").mkdir()
    scan = os.scandir

    def denied(path: str) -> object:
        if str(path).endswith("inside"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match=r"cannot read the folder .*inside"):
        compare_folders(*folders)


def nothing(folder: Path) -> Path:
    folder.mkdir()
    (folder / "notes.txt").write_text("no results")
    return folder


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda f: f[0], "same folder"),
        (lambda f: (f[0].parent / "link").symlink_to(f[0]) or f[0].parent / "link", "same folder"),
        (lambda f: f[0] / "nowhere", "missing"),
        (lambda f: f[0] / "good.npy", "not a folder"),
        (lambda f: nothing(f[0].parent / "empty"), "no results"),
        (lambda f: Path("a\0b"), "expected a folder|cannot read"),
        (lambda f: Path("a" * 300), "expected a folder|cannot read"),
    ],
)
def test_bad_folders_are_errors(make: Callable[[Folders], Path], match: str, folders: Folders) -> None:
    other = make(folders)
    for pair in ((folders[0], other), (other, folders[0])):
        with pytest.raises(DataError, match=match):
            compare_folders(*pair)


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def test_the_vendors_spelling_and_ours(folders: Folders, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, two = map(str, folders)
    np.save(folders[1] / "good.npy", GOOD * 2)
    code, out, err = run(capfd, "evaluate", one, two)
    assert (code, err) == (0, "") and "good" in out and "1 results compared" in out
    for options in (
        ("--baseline_results_folder", one, "--quantized_results_folder", two),
        ("--baseline-results-folder", one, "--quantized-results-folder", two),
    ):
        assert run(capfd, "evaluate", *options) == (code, out, err)
    code, out, _ = run(capfd, "evaluate", one, two, "--json", "--csv", str(tmp_path / "found.csv"))
    assert code == 0 and json.loads(out) == compare_folders(one, two).to_dict()
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "argv", [(), ("one",), ("one", "two", "three"), ("--model", "m.onnx"), ("one", "two", "--csv", ".")]
)
def test_options_that_do_not_fit(argv: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "evaluate", *argv)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
