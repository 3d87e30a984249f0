"""Weights in files: their memory comes back, and large ones are worked on in parts, with the results of the whole."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import jq
from jq.arithmetic.formats import INT8
from jq.evidence import report
from jq.npu.constraints import squares_of
from jq.plan import QParams, scales
from jq.readings.runtime import onnxruntime_reading
from jq.recovery.equalization.noise import LargeWeight, StepGrid, Weight
from jq.util import mapped
from tests.passes.models import build, node

STATUS = Path("/proc/self/status")
ROWS = np.random.default_rng(0).standard_normal((1024, 2048)).astype(np.float32)


def in_file(path: Path, array: np.ndarray, mode: str = "r") -> np.memmap:
    array.tofile(path)
    return np.memmap(path, array.dtype, mode, 0, array.shape)


def resident() -> int:
    """Bytes of files that are mapped in memory."""
    return 1024 * int(re.search(r"RssFile:\s*(\d+)", STATUS.read_text())[1])  # type: ignore[index]


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not say what is in memory")
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.reshape(-1), lambda a: np.asarray(a).T])
def test_memory_comes_back(tmp_path: Path, view) -> None:
    array = view(in_file(tmp_path / "w", ROWS))
    before, total = resident(), array.sum()
    held = resident()
    mapped.release(array)
    assert held - before > 0.9 * ROWS.nbytes and held - resident() > 0.9 * ROWS.nbytes
    assert array.sum() == total


def test_what_was_written_stays(tmp_path: Path) -> None:
    for mode in ("r+", "c"):
        array = in_file(tmp_path / mode, ROWS, mode)
        array[5] = 7
        mapped.release(array)
        assert (array[5] == 7).all() and (array[6] == ROWS[6]).all()
    for other in (ROWS, np.float32(3), "text", None):
        mapped.release(other)


def test_what_replaces_a_mapped_weight_is_mapped(tmp_path: Path) -> None:
    weight = in_file(tmp_path / "w", ROWS)
    made = mapped.like(2 * ROWS, weight)
    assert isinstance(made, np.memmap) and not made.flags.writeable
    np.testing.assert_array_equal(made, 2 * ROWS)
    for array, source in ((ROWS, ROWS), (weight, weight), (ROWS[:2], weight)):
        assert mapped.like(array, source) is array
    arrays = mapped.all_like({"a": ROWS, "b": ROWS[:2]}, {"w": weight, "v": ROWS})
    assert isinstance(arrays["a"], np.memmap) and not isinstance(arrays["b"], np.memmap)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_codes_of_parts_are_those_of_the_whole(axis, monkeypatch: pytest.MonkeyPatch) -> None:
    array = ROWS[:37, :23]
    shape = () if axis is None else (array.shape[axis],)
    scale = np.random.default_rng(1).uniform(0.01, 0.1, shape).astype(np.float32)
    qparams = QParams(scale, np.zeros(shape, np.int32), INT8, axis)
    whole, squares = qparams.stored(array), squares_of(array, qparams)
    for module in ("jq.util.mapped", "jq.npu.constraints"):
        monkeypatch.setattr(f"{module}.BLOCK", 100)
    np.testing.assert_array_equal(qparams.stored(array), whole)
    np.testing.assert_allclose(squares_of(array, qparams), squares)


def test_exponents_of_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [ROWS[0, :7], ROWS[:9] * 3, ROWS[:1, :0], ROWS[9:60] / 50, ROWS[60]]
    whole = scales.minmse_exponents(arrays, INT8.narrow)
    monkeypatch.setattr(scales, "_TOGETHER", 4)
    np.testing.assert_array_equal(scales.minmse_exponents(arrays, INT8.narrow), whole)


def test_a_histogram_of_parts_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = report.distribution(ROWS[:50])
    for module in ("jq.util.mapped", "jq.evidence.report"):
        monkeypatch.setattr(f"{module}.BLOCK", 3000)
    assert report.distribution(ROWS[:50]) == whole
    assert report.distribution(np.where(ROWS > 4, np.nan, ROWS)) is None


@pytest.mark.parametrize("kernel", [1, 4])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_large_elements_of_a_weight_tell_its_noise(kernel, grouped, power_of_two) -> None:
    rng = np.random.default_rng(2)
    w = rng.standard_normal((256, 128, kernel)).astype(np.float32)
    made, read = np.arange(256), 256 + np.arange(128)[None]
    read = np.broadcast_to(read, (256, 128)) if grouped else read
    rest = np.broadcast_to(rng.uniform(0.5, 2, 128), read.shape), rng.uniform(0.5, 2, 256)
    grid = StepGrid(127.0, power_of_two)
    plain = Weight(made, read, rest[0], np.abs(w), rest[1], grid)
    large = LargeWeight(made, read, rest[0], w, rest[1], grid).near(np.ones(384))
    for factors in (np.ones(384), np.exp2(rng.uniform(-3, 3, 384))):
        near = large.near(factors)
        assert isinstance(near, LargeWeight) and len(near.at) < w.size / 4
        assert near.noise(factors) == pytest.approx(plain.noise(factors), rel=2e-3)
        for some, every in zip(near.extremes(factors), plain.extremes(factors), strict=True):
            for have, want in zip(some, every, strict=True):
                np.testing.assert_allclose(have, want, rtol=1e-6)


def test_weights_without_large_elements_are_few() -> None:
    w = np.ones((256, 128, 1), np.float32)
    args = np.zeros(256, np.int64), np.zeros((1, 128), np.int64), np.ones((1, 128))
    large = LargeWeight(*args, w, np.ones(256), StepGrid(127.0, True)).near(np.ones(1))
    assert isinstance(large, LargeWeight) and 0 < len(large.at) <= w.size / 16
    assert large.noise(np.ones(1)) == pytest.approx(
        Weight(*args, w, np.ones(256), StepGrid(127.0, True)).noise(np.ones(1))
    )


def test_onnxruntime_reads_weights_where_they_are() -> None:
    weight = ROWS[:, :512].copy()
    graph = jq.load(build([node("MatMul", ["x", "w"], ["y"])], {"w": weight}, x=("n", 1024)))
    run = onnxruntime_reading(graph)
    assert len(run.held) == 1
    x = ROWS[:3, :1024].copy()
    np.testing.assert_allclose(run({"x": x})["y"], x @ weight, atol=1e-3)


def test_what_is_made_of_a_view_of_a_file_lies_on_disk_as_well(tmp_path):
    """`np.asarray` of a mapped array is a plain array, whose memory is the file's all the same."""
    np.zeros(1 << 18, np.float32).tofile(tmp_path / "w")
    view = np.asarray(np.memmap(tmp_path / "w", np.float32, "r"))
    assert not isinstance(view, np.memmap)
    made = mapped.like(np.ones(1 << 20, np.int8), view)
    assert isinstance(made, np.memmap) and made.all()
    assert not isinstance(mapped.like(np.ones(1 << 20, np.int8), np.zeros(4)), np.memmap)
