"""Images become the input that the model declares; folders and options that do not fit are one clear error."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jq.data.images import ImageFolder, stored
from jq.data.sources import open_source
from jq.data.stream import batches
from jq.errors import ConfigError, DataError, Error
from jq.graph import Dim, Value


def value(*shape: Dim, dtype: Any = np.float32) -> Value:
    return Value("x", np.dtype(dtype), shape)


IMAGE = [value("N", 3, 8, 8)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A red, a green and a blue image, of different sizes and modes, in class folders."""
    image = pytest.importorskip("PIL.Image")
    for name, size, mode, color in (
        ("a/red.png", (8, 8), "RGB", (255, 0, 0)),
        ("b/green.PNG", (20, 10), "RGBA", (0, 255, 0, 255)),
        ("c.png", (8, 30), "P", 0),
    ):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        made = image.new(mode, size, color)
        if mode == "P":
            made.putpalette([0, 0, 255] * 256)
        made.save(path)
    (tmp_path / "photos" / ".thumb.png").write_bytes(b"no image")
    return tmp_path / "photos"


def test_a_bare_folder_of_images_warns_of_its_defaults(photos: Path) -> None:
    with pytest.warns(UserWarning, match=r"RGB / 255.*jq\.data\.images\.ImageFolder"):
        source = open_source(str(photos), IMAGE)
    assert source.length == 3 and source.again
    found = np.concatenate([f["x"] for f in source.samples()])
    np.testing.assert_array_equal(found, np.eye(3, dtype=np.float32)[:, :, None, None] * np.ones((8, 8), np.float32))
    np.testing.assert_array_equal(next(source.samples(skip=2))["x"], found[2:])


def test_preprocessing_of_images(photos: Path) -> None:
    folder = ImageFolder(photos, mean=(0.5, 0.25, 0.0), std=(0.5, 1, 2), order="BGR")
    head = open_source(folder, [value("N", 8, 8, 3)]).head["x"]  # red, as blue, green, red
    np.testing.assert_array_equal(head, np.broadcast_to(np.float32([-1, -0.25, 0.5]), (1, 8, 8, 3)))
    pixels = open_source(ImageFolder(photos), [value("N", 3, 8, 8, dtype=np.uint8)]).head["x"]
    assert pixels.dtype == np.uint8 and pixels[0, :, 0, 0].tolist() == [255, 0, 0]
    grey = open_source(ImageFolder(photos), [value(1, 1, 4, 6)]).head["x"]
    np.testing.assert_allclose(grey, np.full((1, 1, 4, 6), 76 / 255), rtol=1e-6)  # ITU-R 601: 0.299 of red
    half = open_source(ImageFolder(photos), [value(1, 1, 4, 6, dtype=np.float16)]).head["x"]
    assert half.dtype == np.float16
    triple = open_source(ImageFolder(photos), [value(3, 3, 8, 8)])
    assert triple.length == 1 and triple.head["x"].shape == (3, 3, 8, 8)


@pytest.mark.parametrize(
    ("shape", "options", "sizes"),
    [
        (("N", 3, "H", "W"), {}, [(8, 8), (10, 20), (30, 8)]),
        (("N", 3, 16, "W"), {}, [(16, 16), (16, 32), (16, 4)]),
        (("N", 3, "H", "W"), {"resize": 5}, [(5, 5), (5, 10), (19, 5)]),
        (("N", 3, "H", "W"), {"resize": (6, 4)}, [(6, 4)] * 3),
        (("N", 3, "H", "W"), {"resize": 8, "crop": (7, 6)}, [(7, 6)] * 3),
        (("N", "H", "W", "C"), {"crop": 7, "layout": "NHWC"}, [(7, 7)] * 3),
    ],
)
def test_sizes_of_images(photos: Path, shape: Any, options: Any, sizes: Any) -> None:
    source = open_source(ImageFolder(photos, **options), [value(*shape)])
    found = [f["x"].shape[1:3] if options.get("layout") else f["x"].shape[2:] for f in source.samples()]
    assert found == sizes


def test_the_centre_is_what_remains(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(12 * 20, dtype=np.uint8).reshape(12, 20)
    image.fromarray(pixels).save(tmp_path / "a.png")
    options: dict[str, Any] = {"std": 1 / 255, "resize": 12}
    found = open_source(ImageFolder(tmp_path, **options), [value("N", 1, 4, 6)]).head["x"][0, 0]
    np.testing.assert_allclose(found, pixels[4:8, 7:13], rtol=1e-6)
    scaled = open_source(ImageFolder(tmp_path, std=1 / 255), [value("N", 1, 6, 6)]).head["x"][0, 0]
    whole = image.fromarray(pixels).resize((10, 6), image.Resampling.BILINEAR)
    np.testing.assert_allclose(scaled, np.asarray(whole)[:, 2:8], rtol=1e-6)


def test_images_that_are_none(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, inputs: list[Value] = IMAGE, kind: type[Error] = DataError, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            list(open_source(ImageFolder(photos, **options), inputs).samples())

    refused("rank 4", [value("N", 2, 3)])
    refused("no dim of 3 or 1 channels", [value("N", "C", "H", "W")])
    refused("4 channels", [value("N", 4, 8, 8)], layout="NCHW")
    refused("do not fit input", [value("N", 3, 8, 8, dtype=np.int8)])
    refused("mean and std", mean=(1, 2))
    refused("no effect", [value("N", 3, 8, 8, dtype=np.uint8)], ConfigError, mean=0.5)
    refused("multiple of the batch 2", [value(2, 3, 8, 8)])
    refused("differ in size", [value(3, 3, "H", "W")])
    refused(r"red.png: an image of 8x8 pixels, after resizing, is too small", [value("N", 3, 9, 9)], resize=8)
    refused(r"images of 4x8 pixels do not fit input x: float32\[N,3,8,8\]", crop=(8, 4))
    for options in ({"mean": np.nan}, {"std": (1, np.nan, 1)}, {"std": 1e-45}):
        refused("become NaN or Inf in input x", **options)
    refused("become NaN or Inf", [value("N", 3, 8, 8, dtype=np.float16)], std=1e-6)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 400)
    refused("c.png: an image of 8x30 pixels is too large, or becomes", [value("N", 3, "H", 12)])
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused("red.png: an image of 8x8 pixels is too large, or becomes")
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 20)
    refused("red.png: .*decompression bomb")


def test_broken_images_are_named(photos: Path) -> None:
    whole = (photos / "a" / "red.png").read_bytes()
    for broken in (b"", b"no image", whole[:20], whole[:50], whole[:40] + b"xxxx" + whole[44:]):
        (photos / "a" / "red.png").write_bytes(broken)
        with pytest.raises(DataError, match=r"cannot read the image .*red.png"):
            open_source(ImageFolder(photos), IMAGE)
    (photos / "a" / "red.png").write_bytes(whole)
    pytest.importorskip("PIL.Image").new("I;16", (8, 8)).save(photos / "d.png")
    with pytest.raises(DataError, match=r"d.png has pixels of more than 8 bits"):
        list(batches(open_source(ImageFolder(photos), IMAGE), 2))


def test_decoding_threads_end(photos: Path) -> None:
    before = threading.active_count()
    made = batches(open_source(ImageFolder(photos), IMAGE), 1)
    next(made)
    made.close()
    assert threading.active_count() == before


def test_pillow_is_asked_for(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match="pip install pillow"):
        open_source(ImageFolder(photos), IMAGE)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "CHW"},
        {"order": "GBR"},
        {"resize": 0},
        {"crop": (1, 2, 3)},
        {"crop": (4,)},
        {"resize": 4.5},
        {"std": (1, 0, 1)},
    ],
)
def test_options_of_image_folders(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ImageFolder("photos", **options)


def test_pixels_as_they_are_stored(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    deep = np.array([[0, 256], [4096, 65535]], np.uint16)
    image.fromarray(deep).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(stored(tmp_path / "deep.png"), deep)
    for mode, shape in (("1", ()), ("L", ()), ("LA", (2,)), ("RGB", (3,)), ("RGBA", (4,)), ("P", (3,))):
        image.new(mode, (5, 4)).save(tmp_path / f"{mode}.png")
        found = stored(tmp_path / f"{mode}.png")
        assert found.shape == (4, 5, *shape) and found.dtype == np.uint8
    image.new("CMYK", (5, 4)).save(tmp_path / "print.jpg")
    assert stored(tmp_path / "print.jpg").shape == (4, 5, 3)
