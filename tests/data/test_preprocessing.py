"""Preprocessing is one value: applied like numpy does it, read back from TOML and metadata, taken for arrays of bytes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jq
from jq.data.fitting import fitting
from jq.data.images import ImageFolder
from jq.data.preprocessing import (
    PREPROCESSINGS,
    Pixels,
    Preprocessing,
    preset,
    read_preprocessing,
    stored_preprocessing,
)
from jq.data.sources import as_trained, open_source, preprocessing_of
from jq.errors import ConfigError, DataError
from jq.graph import Value

FIRST = [Value("x", np.dtype(np.float32), ("N", 3, 4, 5))]
LAST = [Value("x", np.dtype(np.float32), ("N", 4, 5, 3))]
BYTES = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3)).astype(np.uint8)
MODEL = jq.zoo.path("fashion_resnet")
MEAN, STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("name", "equation"),
    [
        ("unit", lambda x: x / 255),
        ("imagenet", lambda x: (x / 255 - MEAN) / STD),
        ("keras-caffe", lambda x: x[..., ::-1] - np.float32([103.939, 116.779, 123.68])),
        ("tf", lambda x: (x - np.float32(127.5)) / np.float32(127.5)),
        ("raw", lambda x: x),
    ],
)
def test_presets_are_the_equations_that_models_were_trained_with(name: str, equation: Any) -> None:
    made = preset(name).apply(BYTES)
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, equation(BYTES.astype(np.float32)))


@pytest.mark.parametrize("how", [*PREPROCESSINGS.values(), Preprocessing(crop=(3, 4), resize=9, interpolation="box")])
def test_it_is_the_same_after_toml_and_metadata(how: Preprocessing, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(how.to_toml())
    assert read_preprocessing(path) == how
    assert stored_preprocessing(how.to_metadata()) == how
    assert stored_preprocessing({}) is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("means = 3", "no option 'means'. Did you mean 'mean'"),
        ('preset = "imagnet"', "Did you mean 'imagenet'"),
        ("mean = [", "is not TOML"),
        ('order = "RBG"', "order needs one of RGB, BGR"),
        ('mean = "a"', "mean needs a number"),
        ("resize = 1.5", "resize=1.5; expected a size"),
        ("scale = 0", "scale needs a number above 0"),
    ],
)
def test_files_that_are_none(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_preprocessing(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_preprocessing(tmp_path / "none.toml")


@pytest.mark.parametrize("inputs", [FIRST, LAST])
@pytest.mark.parametrize("last", [True, False])
def test_bytes_in_any_order_of_axes_become_the_input(inputs: list[Value], last: bool) -> None:
    how = preset("keras-caffe")
    data = BYTES if last else BYTES.transpose(0, 3, 1, 2)
    with pytest.warns(UserWarning, match="bytes are taken as pixels and fed as BGR, minus"):
        source = open_source(Pixels(data, how), inputs)
    wanted = how.apply(BYTES)
    wanted = wanted.transpose(0, 3, 1, 2) if inputs is FIRST else wanted
    np.testing.assert_array_equal(np.concatenate([s["x"] for s in source.samples()]), wanted)
    np.testing.assert_array_equal(next(source.samples(skip=4))["x"], wanted[4:5])
    assert source.preprocessing == how and source.length == 6
    items = open_source([{"x": image[None]} for image in data], inputs)
    np.testing.assert_array_equal(next(items.samples())["x"], jq.data.preprocessing.UNIT.apply(BYTES)[:1]
                                  .transpose((0, 3, 1, 2) if inputs is FIRST else (0, 1, 2, 3)))  # fmt: skip


def test_float64_and_channels_last_are_taken_with_a_line() -> None:
    data = BYTES.astype(np.float64) / 7
    with pytest.warns(UserWarning, match=r"float64\[6,4,5,3\].*in front.*float64 is rounded to float32"):
        source = open_source(data, FIRST)
    np.testing.assert_array_equal(source.head["x"], data[:1].astype(np.float32).transpose(0, 3, 1, 2))
    assert source.preprocessing is None


def test_arrays_that_fit_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = np.zeros((6, 3, 4, 5), np.float32)
        source = open_source(plain, FIRST)
        assert np.shares_memory(source.stack["x"], plain)
        assert fitting(FIRST[0], np.zeros((6, 4, 4, 5), np.uint8), None, "data") is None
        assert fitting(Value("x", np.dtype(np.int32), ("N", 3)), np.zeros((6, 3), np.uint8), None, "data") is None
    with pytest.raises(DataError, match="normalise pixels"):
        open_source(np.zeros((6, 4, 4, 5), np.uint8), FIRST)
    with pytest.raises(DataError, match="mean and std do not fit the 3 channels"):
        open_source(Pixels(BYTES, Preprocessing(mean=(1.0, 2.0))), FIRST)


def test_a_share_of_the_size_is_left_by_the_crop(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, (40, 32, 3)).astype(np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    value = [Value("x", np.dtype(np.float32), (1, 3, 28, 28))]  # 28 / 0.875 = 32: nothing is scaled
    found = open_source(ImageFolder(tmp_path, resize=0.875, scale=1), value).head["x"][0]
    np.testing.assert_array_equal(found, pixels[6:34, 2:30].transpose(2, 0, 1))
    nearest = open_source(ImageFolder(tmp_path, resize=64, crop=64, scale=1, interpolation="nearest"),
                          [Value("x", np.dtype(np.float32), (1, 3, "H", "W"))]).head["x"][0]  # fmt: skip
    doubled = pixels.repeat(2, 0).repeat(2, 1)
    np.testing.assert_array_equal(nearest, doubled[8:72].transpose(2, 0, 1))


def test_a_quantized_model_keeps_it_and_compare_takes_it() -> None:
    how = Preprocessing(mean=0.25, std=0.5)
    images = (jq.zoo.calibration_set()[0][:16] * 255).round().astype(np.uint8)
    with pytest.warns(UserWarning, match="bytes are taken as pixels"):
        model = jq.quantize(MODEL, Pixels(images, how), "XINT8").model
    metadata = jq.load(model).metadata
    assert stored_preprocessing(metadata) == how
    assert as_trained(images, metadata).preprocessing == how
    with pytest.warns(UserWarning, match="but the model was quantized on images fed as RGB / 255, minus 0.25"):
        assert preprocessing_of(as_trained(Pixels(images, preset("tf")), metadata)) == preset("tf")
    alike, other = (jq.compare(MODEL, model, Pixels(images, h)).rows for h in (how, preset("raw")))
    stored = jq.compare(MODEL, model, images).rows
    assert [r.sqnr for r in stored] == [r.sqnr for r in alike] != [r.sqnr for r in other]
    floats = jq.quantize(MODEL, jq.zoo.calibration_set()[0][:16], "XINT8").model
    assert stored_preprocessing(jq.load(floats).metadata) is None
