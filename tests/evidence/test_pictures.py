"""Samples that changed class: which, in which order, and their pictures."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

import jq
from jq.data.preprocessing import PREPROCESSINGS
from jq.data.sources import in_memory
from jq.evidence.pictures import changed_samples, pixels_of, png


def test_a_png_is_read_back() -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for channels in (1, 3):
        pixels = np.random.default_rng(0).integers(0, 256, (9, 17, channels)).astype(np.uint8)
        with image.open(io.BytesIO(png(pixels))) as read:
            assert np.array_equal(np.asarray(read).reshape(pixels.shape), pixels)


@pytest.mark.parametrize("name", PREPROCESSINGS)
@pytest.mark.parametrize("last", [False, True])
def test_pictures_are_the_pixels_that_were_fed(name: str, last: bool) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (24, 32, 3)).astype(np.uint8)
    fed = PREPROCESSINGS[name].apply(pixels)
    sample = {"ids": np.zeros((1, 4)), "x": (fed if last else fed.transpose(2, 0, 1))[None]}
    assert np.abs(pixels_of(sample, PREPROCESSINGS[name]).astype(int) - pixels).max() <= 1


def test_what_is_no_picture_has_none() -> None:
    assert pixels_of({"x": np.zeros((1, 64, 7, 7))}, None) is None and pixels_of({"x": np.zeros((1, 4))}, None) is None
    large = pixels_of({"x": np.arange(3 * 300 * 200.0).reshape(1, 3, 300, 200)}, None)
    assert large.shape == (75, 50, 3) and (large.min(), large.max()) == (0, 255)


def test_lost_samples_come_first() -> None:
    best = np.array([[1, 1], [1, 2], [2, 3], [0, 1]])
    source = in_memory([{"x": np.full((1, 1, 8, 8), i, np.float32)} for i in range(4)])
    made = changed_samples(best, source, np.array([1, 2, 2, 5]))
    assert [(s.place, s.kind) for s in made] == [(2, "lost"), (1, "gained"), (3, "wrong before and after")]
    assert all(base64.b64decode(s.picture).startswith(b"\x89PNG") for s in made)
    assert [s.place for s in changed_samples(best, source, None)] == [1, 2, 3]


def test_compare_tells_which_samples_changed_and_the_top1_of_both() -> None:
    images, labels = (part[:150] for part in jq.zoo.evaluation_set())
    path = jq.zoo.path("fashion_mobilenet")
    model = jq.quantize(path, images[:16], "XINT8").model
    report = jq.compare(path, model, images, labels=labels)
    one, other = (jq.evaluate.model_scores(m, images).values.argmax(1) for m in (path, model))
    assert report.verdict.outputs[0].top1 == pytest.approx(
        [np.mean(one == labels), np.mean(other == labels)], abs=0.007
    )
    apart = set(np.flatnonzero(one != other))
    assert apart and len(apart ^ {s.place for s in report.changed}) <= 1  # onnxruntime may decide a tie otherwise
    with pytest.raises(jq.DataError, match="149 labels for 150 samples"):
        jq.compare(path, model, images, labels=labels[:149])
