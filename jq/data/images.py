"""Images as data: how a folder of files becomes a model's only input."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

import jax.numpy as jnp
import numpy as np

from jq.data.arrays import Sample, readable
from jq.data.preprocessing import Preprocessing
from jq.errors import ConfigError, DataError
from jq.graph import Dim, Value

_FORMATS = {
    ".bmp": "BMP", ".gif": "GIF", ".jpeg": "JPEG", ".jpg": "JPEG", ".pgm": "PPM", ".png": "PNG", ".ppm": "PPM", ".tif": "TIFF",
    ".tiff": "TIFF", ".webp": "WEBP",
}  # fmt: skip  # as Pillow calls them
SUFFIXES = frozenset(_FORMATS)
_GRAY = 114  # around a letterbox, as detectors are trained
DEFAULTS = (
    "images are fed as RGB / 255, resized to cover the model's input and cropped to the centre; if the model was trained "
    "with other values, give --prep (imagenet, keras-caffe, tf, raw) or --mean and --std; in Python, "
    "jq.data.images.ImageFolder(path, mean=..., std=...)"
)


@dataclasses.dataclass(frozen=True)
class ImageFolder(Preprocessing):
    """Images of a folder and its subfolders, sorted by path, and how they become one input of a model.

    >>> ImageFolder("photos", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=256).order
    'RGB'
    """

    path: str | os.PathLike[str]


def files_of(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """Return the files with these suffixes in a folder and its subfolders, in order, without hidden ones."""
    paths, seen = [], set()

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror or error}") from error

    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [f for f in folders if not f.startswith(".")]
        paths += [Path(root, n) for n in names if not n.startswith(".") and Path(n).suffix.lower() in suffixes]
    return sorted(paths, key=in_order)


def in_order(path: PurePath) -> tuple[tuple[str, ...], str]:
    """Return the key by which samples are sorted: by path, the ending last, so that results lie in the order of their data.

    >>> sorted(map(PurePath, ["a/b.npy", "a.o.npy", "a-b.npy", "a.npy"]), key=in_order)[0]
    PurePosixPath('a.npy')
    """
    return path.with_suffix("").parts, path.suffix


def reader(folder: ImageFolder, inputs: Sequence[Value]) -> tuple[list[list[Path]], Callable[[list[Path]], Sample]]:
    """Return the files of each sample, and the function that turns such files into it."""
    _pillow()
    path, value = folder.path, inputs[0]
    if len(inputs) > 1 or value.shape is None or len(value.shape) != 4:
        raise DataError(
            f"{path}: images need a model with one input of rank 4; this one has {', '.join(map(str, inputs))}"
        )
    guesses = ((layout, c) for c in (3, 1) for layout in ("NCHW", "NHWC") if value.shape[layout.index("C")] == c)
    layout = folder.layout or next(guesses, (None, 0))[0]
    if layout is None:
        raise DataError(f"{path}: input {value} has no dim of 3 or 1 channels; pass ImageFolder(path, layout=...)")
    height, width, channels = (value.shape[layout.index(axis)] for axis in "HWC")
    channels = channels if isinstance(channels, int) else 3
    if channels not in (1, 3) or any(np.size(v) not in (1, channels) for v in (folder.mean, folder.std)):
        raise DataError(f"{path}: mean and std do not fit the {channels} channels of input {value}")
    crop = (folder.crop, folder.crop) if isinstance(folder.crop, int) else folder.crop or (height, width)
    if any(isinstance(d, int) and d != c for d, c in zip((height, width), crop, strict=True)):
        raise DataError(f"{path}: images of {crop[1]}x{crop[0]} pixels do not fit input {value}; leave out crop")
    integer = value.dtype == np.uint8
    if not integer and (value.dtype is None or not jnp.issubdtype(value.dtype, jnp.floating)):
        raise DataError(f"{path}: pixels do not fit input {value}; give arrays of that type")
    if integer and (np.any(folder.mean) or np.any(np.asarray(folder.std) != 1)):
        raise ConfigError(f"{path}: input {value} takes raw pixels, so mean and std have no effect; leave them out")
    with np.errstate(over="ignore"):
        ends = np.repeat(np.array([[0], [255]], np.uint8), channels, axis=1)
        extremes = folder.apply(ends).astype(np.float32 if integer else value.dtype)
    if not np.isfinite(extremes).all():
        scaling = f"mean={folder.mean} and std={folder.std}"
        raise DataError(f"{path}: with {scaling}, pixels become NaN or Inf in input {value}")
    files, size = files_of(Path(path), SUFFIXES), (value.shape[0] if isinstance(value.shape[0], int) else 0) or 1
    if not files or len(files) % size:
        raise DataError(f"{path} holds {len(files)} images; expected a multiple of the batch {size}")

    def decode(file: Path) -> np.ndarray:
        pixels = _pixels(file, "RGB" if channels == 3 else "L", folder, crop)
        array = folder.ordered(pixels) if integer else folder.apply(pixels).astype(value.dtype)
        return np.ascontiguousarray(array if layout == "NHWC" else array.transpose(2, 0, 1))

    def read(group: list[Path]) -> Sample:
        arrays = [decode(file) for file in group]
        if len({a.shape for a in arrays}) > 1:
            raise DataError(
                f"{group[0]} and the other images of its batch differ in size; pass ImageFolder(path, crop=...)"
            )
        return {value.name: np.stack(arrays)}

    return [files[i : i + size] for i in range(0, len(files), size)], read


def stored(file: Path) -> np.ndarray:  # [height, width] or [height, width, channels]
    """Return the pixels of an image file as they are stored: gray as one channel, transparency as a channel.

    >>> import tempfile, PIL.Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     PIL.Image.new("RGB", (4, 2), (255, 0, 7)).save(f"{folder}/a.png")
    ...     stored(Path(folder, "a.png"))[0, 0]
    array([255,   0,   7], dtype=uint8)
    """
    with readable(file, "the image "), _open(file) as image:
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # whose other frames are previews
            raise DataError(f"{file} has {image.n_frames} frames; expected one image")
        _check_size(file, (image.height, image.width))
        if image.mode in ("P", "PA"):
            image = image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
        elif image.mode not in ("L", "LA", "RGB", "RGBA", "F") and not image.mode.startswith("I"):
            image = image.convert("L" if image.mode == "1" else "RGB")
        return np.asarray(image)


def _pixels(
    file: Path, mode: str, how: Preprocessing, crop: Sequence[Dim | None]
) -> np.ndarray:  # uint8 [height, width, channels]
    filter = getattr(_pillow().Resampling, how.interpolation.upper())
    with readable(file, "the image "), _open(file) as image:
        if image.mode.startswith(("I", "F")):
            raise DataError(f"{file} has pixels of more than 8 bits; give arrays instead")
        sizes = (image.height, image.width)
        wanted = [d if isinstance(d, int) else None for d in crop]
        resize = how.resize
        if isinstance(resize, str):  # a letterbox
            return _letterboxed(image.convert(mode), file, wanted, filter)
        if isinstance(resize, int):
            factors = [resize / min(sizes)] * 2
        elif isinstance(resize, tuple):
            factors = [r / s for r, s in zip(resize, sizes, strict=True)]
        else:
            cover = max((w / s for w, s in zip(wanted, sizes, strict=True) if w), default=resize or 1.0)
            factors = [cover / (resize or 1.0)] * 2
        grown = [max(1, round(s * f)) for s, f in zip(sizes, factors, strict=True)]
        out = [w or g for w, g in zip(wanted, grown, strict=True)]
        _check_size(file, sizes, out)
        if any(o > g for o, g in zip(out, grown, strict=True)):
            raise DataError(
                f"{file}: an image of {grown[1]}x{grown[0]} pixels, after resizing, is too small to crop {out[1]}x{out[0]} pixels"
            )
        # The part that remains is cut out first: what a thin image would grow to need not fit in memory.
        height, width = (min(s, o / f) for s, o, f in zip(sizes, out, factors, strict=True))
        left, top = (sizes[1] - width) // 2, (sizes[0] - height) // 2
        box = (left, top, left + width, top + height)
        shown = image.convert(mode).resize((out[1], out[0]), filter, box)
        return np.asarray(shown, np.uint8).reshape(*out, len(mode))


def letterbox(sizes: Sequence[int], into: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return height and width that an image has inside a letterbox, and how much gray is above and left of it.

    >>> letterbox((480, 640), (640, 640))
    ((480, 640), (80, 0))
    """
    factor = min(w / s for w, s in zip(into, sizes, strict=True))
    height, width = (max(1, round(s * factor)) for s in sizes)
    top, left = (round((w - s) / 2 - 0.1) for w, s in zip(into, (height, width), strict=True))
    return (height, width), (top, left)


def _letterboxed(image: Any, file: Path, wanted: Sequence[int | None], filter: Any) -> np.ndarray:
    """The whole image in the middle of the input, on gray."""
    if None in wanted:
        raise DataError(f"{file}: resize='letterbox' needs an input of fixed height and width, or crop; give crop")
    into = [w for w in wanted if w is not None]
    _check_size(file, (image.height, image.width), into)
    (height, width), (top, left) = letterbox((image.height, image.width), into)
    pixels = np.asarray(image.resize((width, height), filter), np.uint8).reshape(height, width, -1)
    whole = np.full((*into, pixels.shape[-1]), _GRAY, np.uint8)
    whole[top : top + height, left : left + width] = pixels
    return whole


def _check_size(file: Path, sizes: Sequence[int], *made: Sequence[int]) -> None:
    """Raise a DataError if an image has, or is resized to, too many pixels."""
    if max(map(math.prod, (sizes, *made))) > (_pillow().MAX_IMAGE_PIXELS or math.inf):
        raise DataError(
            f"{file}: an image of {sizes[1]}x{sizes[0]} pixels is too large, or becomes too large when resized"
        )


def _open(file: Path) -> Any:
    """Open an image only in the format of its file extension: for some others, Pillow starts programs."""
    pillow = _pillow()
    return pillow.open(file, formats=[_FORMATS[file.suffix.lower()]])


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise ConfigError("reading images needs Pillow: pip install pillow") from error
    return PIL.Image
