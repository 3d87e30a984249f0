"""Images as data: how a folder of files becomes a model's only input."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jq.data.arrays import Sample, readable
from jq.errors import ConfigError, DataError, check_choice
from jq.graph import Dim, Value

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
DEFAULTS = (
    "images are fed as RGB / 255, scaled to cover the model's size and cropped to their centre; if it was trained "
    "otherwise, pass jq.data.images.ImageFolder(path, mean=..., std=...)"
)


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Images of a folder and its subfolders, sorted by path, and how they become one input of a model.

    An image is scaled to cover `crop`, cut out of its centre, and becomes (pixel / 255 - mean) / std; an
    integer input gets the pixels as they are. Images of a model without fixed height or width keep theirs.

    >>> ImageFolder("photos", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=256).order
    'RGB'
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    mean: float | Sequence[float] = 0.0  # of pixel / 255, per channel in `order`
    std: float | Sequence[float] = 1.0  # 1 / 255 leaves pixels in 0..255
    layout: Literal["NCHW", "NHWC"] | None = None  # None: by where 3 or 1 stands in the input's shape
    order: Literal["RGB", "BGR"] = "RGB"
    resize: int | tuple[int, int] | None = None  # of the short side, or (height, width); None: so as to cover `crop`
    crop: int | tuple[int, int] | None = None  # (height, width); None: what the model declares

    def __post_init__(self) -> None:
        if self.layout is not None:
            check_choice("ImageFolder: layout", self.layout, ("NCHW", "NHWC"))
        check_choice("ImageFolder: order", self.order, ("RGB", "BGR"))
        for name in ("resize", "crop"):
            size = getattr(self, name)
            pair = (size, size) if isinstance(size, int) else tuple(np.atleast_1d(size).tolist())
            if size is not None and (len(pair) != 2 or any(not isinstance(d, int) or d < 1 for d in pair)):
                raise ConfigError(f"ImageFolder: {name}={size!r}; expected a size, or (height, width)")
        if not np.all(self.std):
            raise ConfigError("ImageFolder: std holds a zero, by which pixels would be divided")


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
        raise DataError(f"{path}: images fit one input of rank 4; the model has {', '.join(map(str, inputs))}")
    guesses = ((layout, c) for c in (3, 1) for layout in ("NCHW", "NHWC") if value.shape[layout.index("C")] == c)
    layout = folder.layout or next(guesses, (None, 0))[0]
    if layout is None:
        raise DataError(f"{path}: input {value} has no dim of 3 or 1 channels; pass ImageFolder(path, layout=...)")
    height, width, channels = (value.shape[layout.index(axis)] for axis in "HWC")
    channels = channels if isinstance(channels, int) else 3
    mean, std = np.asarray(folder.mean, np.float32), np.asarray(folder.std, np.float32)
    if channels not in (1, 3) or mean.size not in (1, channels) or std.size not in (1, channels):
        raise DataError(f"{path}: images with such mean and std do not fit the {channels} channels of input {value}")
    crop = (folder.crop, folder.crop) if isinstance(folder.crop, int) else folder.crop or (height, width)
    if any(isinstance(d, int) and d != c for d, c in zip((height, width), crop, strict=True)):
        raise DataError(f"{path}: images of {crop[1]}x{crop[0]} pixels do not fit input {value}; leave out crop")
    integer = value.dtype == np.uint8
    if not integer and (value.dtype is None or not jnp.issubdtype(value.dtype, jnp.floating)):
        raise DataError(f"{path}: pixels do not fit input {value}; give arrays of that type")
    if integer and (mean.any() or (std != 1).any()):
        raise ConfigError(f"{path}: input {value} takes pixels as they are, so mean and std have no effect")
    with np.errstate(over="ignore"):
        extremes = ((np.asarray([[0], [1]], np.float32) - mean) / std).astype(np.float32 if integer else value.dtype)
    if not np.isfinite(extremes).all():
        scaling = f"mean={folder.mean} and std={folder.std}"
        raise DataError(f"{path}: with {scaling}, pixels become NaN or Inf in input {value}")
    files, size = files_of(Path(path), SUFFIXES), (value.shape[0] if isinstance(value.shape[0], int) else 0) or 1
    if not files or len(files) % size:
        raise DataError(f"{path} holds {len(files)} images; expected some, in a multiple of the batch {size}")

    def decode(file: Path) -> np.ndarray:
        pixels = _pixels(file, "RGB" if channels == 3 else "L", folder.resize, crop)
        pixels = pixels[..., ::-1] if folder.order == "BGR" else pixels
        array = pixels if integer else ((pixels.astype(np.float32) / 255 - mean) / std).astype(value.dtype)
        return np.ascontiguousarray(array if layout == "NHWC" else array.transpose(2, 0, 1))

    def read(group: list[Path]) -> Sample:
        arrays = [decode(file) for file in group]
        if len({a.shape for a in arrays}) > 1:
            raise DataError(f"{group[0]} and those after it differ in size; pass ImageFolder(path, crop=...)")
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
    with readable(file, "the image "), _pillow().open(file) as image:
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # whose other frames are previews
            raise DataError(f"{file} has {image.n_frames} frames; expected one image")
        _check_size(file, (image.height, image.width))
        if image.mode in ("P", "PA"):
            image = image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
        elif image.mode not in ("L", "LA", "RGB", "RGBA", "F") and not image.mode.startswith("I"):
            image = image.convert("L" if image.mode == "1" else "RGB")
        return np.asarray(image)


def _pixels(
    file: Path, mode: str, resize: int | tuple[int, int] | None, crop: Sequence[Dim | None]
) -> np.ndarray:  # uint8 [height, width, channels]
    bilinear = _pillow().Resampling.BILINEAR
    with readable(file, "the image "), _pillow().open(file) as image:
        if image.mode.startswith(("I", "F")):
            raise DataError(f"{file}: its pixels have more than 8 bits; give arrays instead")
        sizes = (image.height, image.width)
        wanted = [d if isinstance(d, int) else None for d in crop]
        if isinstance(resize, int):
            factors = [resize / min(sizes)] * 2
        elif resize is not None:
            factors = [r / s for r, s in zip(resize, sizes, strict=True)]
        else:
            factors = [max((w / s for w, s in zip(wanted, sizes, strict=True) if w), default=1.0)] * 2
        grown = [max(1, round(s * f)) for s, f in zip(sizes, factors, strict=True)]
        out = [w or g for w, g in zip(wanted, grown, strict=True)]
        _check_size(file, sizes, out)
        if any(o > g for o, g in zip(out, grown, strict=True)):
            raise DataError(f"{file}: with {grown[1]}x{grown[0]} pixels, too small to crop {out[1]}x{out[0]} out of it")
        # The part that remains is cut out first: what a thin image would grow to need not fit in memory.
        height, width = (min(s, o / f) for s, o, f in zip(sizes, out, factors, strict=True))
        left, top = (sizes[1] - width) // 2, (sizes[0] - height) // 2
        box = (left, top, left + width, top + height)
        shown = image.convert(mode).resize((out[1], out[0]), bilinear, box)
        return np.asarray(shown, np.uint8).reshape(*out, len(mode))


def _check_size(file: Path, sizes: Sequence[int], *made: Sequence[int]) -> None:
    """Raise a DataError if an image has, or is resized to, too many pixels."""
    if max(map(math.prod, (sizes, *made))) > (_pillow().MAX_IMAGE_PIXELS or math.inf):
        raise DataError(f"{file}: an image of {sizes[1]}x{sizes[0]} pixels becomes too large")


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise ConfigError("to read images, Pillow is needed: pip install pillow") from error
    return PIL.Image
