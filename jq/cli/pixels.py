"""Options that every command with --data has: which data, and how their pixels become what the model was trained on."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jq.data.preprocessing import LETTERBOX, PREPROCESSINGS, UNIT, Pixels, Preprocessing, preset, read_preprocessing
from jq.errors import ConfigError, DataError, suggest

_NAMES = ", ".join(PREPROCESSINGS)
_Numbers = "R,G,B"


def _prep(incomplete: str) -> list[str]:
    return [name for name in PREPROCESSINGS if name.startswith(incomplete)]


def _option(text: str, metavar: str, **settings: Any) -> Any:
    return Annotated[str | None, typer.Option(help=text, metavar=metavar, show_default=False, **settings)]


PIXEL_OPTIONS: Mapping[str, Any] = {
    "prep": _option(
        f"The preprocessing that the model was trained with: {_NAMES}, or a .toml file [a quantized model's own, or unit].",
        "NAME",
        autocompletion=_prep,
    ),
    "mean": _option("Subtract this from the scaled pixels: one number, or one for each channel.", _Numbers),
    "std": _option("Then divide by this.", _Numbers),
    "scale": _option("Multiply pixels (0 to 255) by this number, such as 1/255.", "NUMBER"),
    "resize": _option(
        "Resize the short side to this, or the image to HEIGHT,WIDTH; a number below 1 makes --crop keep this share of the "
        "short side; letterbox fits the whole image into a gray frame, as detectors expect.",
        "SIZE",
    ),
    "crop": _option("Cut SIZE or HEIGHT,WIDTH out of the centre [the model's size].", "SIZE"),
    "interpolation": _option("How to resize: nearest, bilinear, bicubic, lanczos or box.", "NAME"),
    "order": _option("The order of the channels: RGB or BGR.", "ORDER"),
    "layout": _option("NCHW or NHWC, if it is not clear from the model's input.", "LAYOUT"),
}


def data_of(path: Path | None, options: Mapping[str, str | None]) -> Any:
    """Return what --data names, with the preprocessing that the options ask for, if they do.

    >>> data_of(Path("photos"), {"prep": "imagenet", "crop": "192"}).preprocessing.crop
    192
    """
    data = None if path is None else _loaded(path)
    said = {k: v for k, v in options.items() if v is not None}
    if not said:
        return data
    if data is None:
        raise ConfigError(f"--{next(iter(said))} needs --data; got no data")
    return Pixels(data, preprocessing(said))


def preprocessing(options: Mapping[str, str]) -> Preprocessing:
    """Return the preprocessing that options of the command line describe.

    >>> preprocessing({"scale": "1/128", "mean": "1,1,1"}).scale
    0.0078125
    """
    changes = {
        name: _PARSED.get(name, lambda _, text: text)(name, text) for name, text in options.items() if name != "prep"
    }
    return dataclasses.replace(_named(options["prep"]) if "prep" in options else UNIT, **changes)


def _named(name: str) -> Preprocessing:
    return read_preprocessing(name) if name.endswith(".toml") else preset(name)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--{name} needs a number, or one for each channel as in 0.485,0.456,0.406; got {text!r}"
        ) from None


def _number(name: str, text: str) -> float:
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"--{name} needs a number, or a fraction as in 1/255; got {text!r}") from None


def _size(name: str, text: str) -> float | int | str | tuple[int, ...]:
    if text == LETTERBOX:
        return text
    try:
        if "," in text:
            return tuple(int(part) for part in text.split(","))
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ConfigError(f"--{name} needs a size, HEIGHT,WIDTH, or letterbox for --resize; got {text!r}") from None


_PARSED: Mapping[str, Callable[[str, str], Any]] = {
    "mean": _numbers,
    "std": _numbers,
    "scale": _number,
    "resize": _size,
    "crop": _size,
}


# --- Loaders ---


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Samples of a generator function, which is called anew for each pass."""

    function: Callable[[], Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.function())


def _loaded(path: Path) -> Any:
    """The path itself or, of FILE.py:FUNCTION, what the user's function returns."""
    file, colon, name = str(path).rpartition(":")
    if not colon or not file.endswith(".py"):
        if path.suffix == ".py":
            raise ConfigError(f"--data {path} needs the name of a function in it: {path}:FUNCTION")
        return path
    function = function_in(Path(file), name)
    data = function()
    if data is None:
        raise DataError(f"--data {path}: {name}() returned None; expected arrays, an iterable of samples or a reader")
    return _Calls(function) if hasattr(data, "__next__") else data


def function_in(file: Path, name: str) -> Callable[..., Any]:
    """Return a function of a Python file of the user's."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"cannot read {file}: it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code
        raise ConfigError(f"{file} does not run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise ConfigError(f"{file} has no function {name!r}.{suggest(name, known)}")
    return function
