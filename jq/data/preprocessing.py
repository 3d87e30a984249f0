"""How pixels become the numbers that a model was trained on: one value, kept in TOML files and in quantized models."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jq.errors import ConfigError, check_choice, suggest
from jq.util import files

METADATA = "jq.preprocessing"  # the key under which a quantized model keeps it
Order = Literal["RGB", "BGR"]
Layout = Literal["NCHW", "NHWC"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box"]
Size = int | tuple[int, int]
Resize = float | Size | Literal["letterbox"]
LETTERBOX = "letterbox"  # the whole image in the middle of the input, gray around it, as detectors have it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image becomes one input of a model: scaled, cropped to its centre, then (pixel * scale - mean) / std.

    An integer input gets the pixels as they are. Images of a model without fixed height or width keep theirs.

    >>> Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=256).order
    'RGB'
    """

    order: Order = "RGB"  # of the channels, as the model takes them
    scale: float = 1 / 255  # of pixels, which are 0 to 255
    mean: float | Sequence[float] = 0.0  # of scaled pixels, per channel in `order`
    std: float | Sequence[float] = 1.0  # what scaled pixels, less the mean, are divided by
    layout: Layout | None = None  # None: by where 3 or 1 stands in the input's shape
    # Of the short side, (height, width), below 1 the share of it that `crop` takes, or "letterbox"; None: so as to cover `crop`.
    resize: Resize | None = None
    crop: Size | None = None  # (height, width); None: what the model declares
    interpolation: Interpolation = "bilinear"  # of resizing

    def __post_init__(self) -> None:
        for name, kind in (("order", Order), ("interpolation", Interpolation)):
            check_choice(f"preprocessing: {name}", getattr(self, name), get_args(kind))
        if self.layout is not None:
            check_choice("preprocessing: layout", self.layout, get_args(Layout))
        for name in ("mean", "std"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        for name in ("resize", "crop"):
            object.__setattr__(self, name, _size(name, getattr(self, name)))
        if not np.all(self.std):
            raise ConfigError("preprocessing: std contains 0, but pixels are divided by it")
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"preprocessing: scale needs a number above 0; got {self.scale!r}")

    def __str__(self) -> str:
        """The preprocessing in words.

        >>> str(PREPROCESSINGS["keras-caffe"])
        'BGR, minus (103.939, 116.779, 123.68), resize 0.875'
        """
        words = [self.values]
        words += [f"{name} {getattr(self, name)}" for name in ("resize", "crop", "layout") if getattr(self, name)]
        words += [self.interpolation] if self.interpolation != "bilinear" else []
        return ", ".join(words)

    @property
    def values(self) -> str:
        """The change to the values of pixels, in words; arrays need no more, as they keep their size."""
        factor = "" if self.scale == 1 else f" / {1 / self.scale:g}"
        words = [f"{self.order}{factor}"]
        words += [f"minus {_listed(self.mean)}"] if np.any(self.mean) else []
        words += [f"divided by {_listed(self.std)}"] if np.any(np.asarray(self.std) != 1) else []
        return ", ".join(words)

    def apply(self, pixels: np.ndarray) -> np.ndarray:  # float32, of the same shape
        """Return RGB or gray pixels [..., channels], 0 to 255, in the model's order and scale.

        >>> PREPROCESSINGS["tf"].apply(np.uint8([[[0, 127, 255]]])).round(3)
        array([[[-1.   , -0.004,  1.   ]]], dtype=float32)
        """
        pixels = self.ordered(pixels)
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        # Divided, not multiplied: a scale of 1 / 255 is no float32.
        scaled: np.ndarray = (pixels.astype(np.float32) / np.float32(1 / self.scale) - mean) / std
        return scaled

    def undo(self, values: np.ndarray) -> np.ndarray:  # uint8, of the same shape
        """Return what `apply` made of pixels [..., channels] as RGB or gray pixels.

        >>> PREPROCESSINGS["tf"].undo(PREPROCESSINGS["tf"].apply(np.uint8([[[0, 127, 255]]])))
        array([[[  0, 127, 255]]], dtype=uint8)
        """
        pixels = (values * np.asarray(self.std, np.float32) + np.asarray(self.mean, np.float32)) / self.scale
        return self.ordered(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))

    def ordered(self, pixels: np.ndarray) -> np.ndarray:
        """Return RGB or gray pixels [..., channels] with the channels in the model's order."""
        return pixels[..., ::-1] if self.order == "BGR" else pixels

    @property
    def alone(self) -> Preprocessing:
        """The preprocessing without what a subclass adds to it."""
        return Preprocessing(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Preprocessing)})

    def to_dict(self) -> dict[str, Any]:
        """Return all that is not a default, for JSON and TOML."""
        plain = Preprocessing()
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Preprocessing)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in own.items() if v != getattr(plain, k)}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], where: str = "preprocessing") -> Preprocessing:
        """Return the preprocessing of some options, on top of the one that `preset` names.

        >>> Preprocessing.from_dict({"preset": "tf", "crop": 192}).crop
        192
        """
        known = {f.name for f in dataclasses.fields(Preprocessing)}
        for name in options.keys() - known - {"preset"}:
            raise ConfigError(
                f"{where} has no option {name!r}.{suggest(name, known)} Available: {', '.join(sorted(known))}"
            )
        start = preset(options["preset"]) if "preset" in options else Preprocessing()
        return dataclasses.replace(start, **{k: v for k, v in options.items() if k != "preset"})

    def to_toml(self) -> str:
        """Return the preprocessing as the text of a TOML file, which `read_preprocessing` reads.

        >>> Preprocessing(mean=127.0, std=128.0, scale=1).to_toml()
        'scale = 1\\nmean = [127.0]\\nstd = [128.0]\\n'
        """
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in self.to_dict().items())

    def options(self) -> list[str]:
        """Return the options of the command line that give this preprocessing.

        >>> PREPROCESSINGS["tf"].options(), Preprocessing(mean=(0.5, 0.4, 0.5), crop=192).options()
        (['--prep', 'tf'], ['--mean', '0.5,0.4,0.5', '--crop', '192'])
        """
        own = self.alone
        named = next((name for name, known in PREPROCESSINGS.items() if known == own), None)
        if named is not None:
            return ["--prep", named] if own != UNIT else []
        values = {k: ",".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in self.to_dict().items()}
        return [word for name, value in values.items() for word in (f"--{name}", value)]

    def to_metadata(self) -> dict[str, str]:
        """Return what a quantized model keeps."""
        return {METADATA: json.dumps(self.to_dict())}


@dataclasses.dataclass(frozen=True, eq=False)
class Pixels:
    """Data of any accepted form, and the preprocessing of the pixels among them; other numbers are fed as they are."""

    data: Any
    preprocessing: Preprocessing


def preset(name: str) -> Preprocessing:
    """Return a preprocessing by its name."""
    check_choice("--prep", name, PREPROCESSINGS)
    return PREPROCESSINGS[name]


def read_preprocessing(path: str | os.PathLike[str]) -> Preprocessing:
    """Return the preprocessing that a TOML file describes: the fields of `Preprocessing`, and `preset`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "mine.toml"
    ...     _ = path.write_text('preset = "imagenet"\\ncrop = 192')
    ...     read_preprocessing(path).crop
    192
    """
    return Preprocessing.from_dict(files.document(path, error=ConfigError, form="TOML"), str(path))


def stored_preprocessing(metadata: Mapping[str, str]) -> Preprocessing | None:
    """Return the preprocessing that a model's metadata name, if they do.

    >>> stored_preprocessing(PREPROCESSINGS["tf"].to_metadata()) == PREPROCESSINGS["tf"]
    True
    """
    if METADATA not in metadata:
        return None
    try:
        options = files.parsed(metadata[METADATA])
    except ValueError as error:
        raise ConfigError(f"the model's metadata {METADATA!r} is not JSON: {error}; give --prep") from error
    if not isinstance(options, dict):
        raise ConfigError(f"the model's metadata {METADATA!r} needs options by name; got {options!r}; give --prep")
    return Preprocessing.from_dict(options, f"the model's metadata {METADATA!r}")


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    try:
        array = np.atleast_1d(np.asarray(value, np.float64))
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    if array.ndim != 1 or not array.size:
        raise ConfigError(f"preprocessing: {name} needs a number, or one for each channel; got {value!r}")
    return tuple(array.tolist())


def _size(name: str, value: Any) -> Any:
    """A size as an int, a pair, or of `resize` a share."""
    if value is None or (name == "resize" and (value == LETTERBOX or (isinstance(value, float) and 0 < value < 1))):
        return value
    pair = (value, value) if isinstance(value, int) else tuple(np.atleast_1d(value).tolist())
    if len(pair) != 2 or any(not isinstance(d, int) or isinstance(d, bool) or d < 1 for d in pair):
        also = ", a share below 1, or 'letterbox'" if name == "resize" else ""
        raise ConfigError(f"preprocessing: {name}={value!r}; expected a size, or (height, width){also}")
    return value if isinstance(value, int) else pair


def _listed(value: Any) -> str:
    words = ", ".join(f"{v:g}" for v in np.atleast_1d(value))
    return f"({words})" if np.size(value) > 1 else words


# UNIT is taken where nothing is said.
UNIT = Preprocessing()
PREPROCESSINGS: Mapping[str, Preprocessing] = {
    "unit": UNIT,
    "imagenet": Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=0.875),
    "keras-caffe": Preprocessing(order="BGR", scale=1.0, mean=(103.939, 116.779, 123.68), resize=0.875),
    "tf": Preprocessing(scale=1.0, mean=127.5, std=127.5, resize=0.875),
    "raw": Preprocessing(scale=1.0),
}
