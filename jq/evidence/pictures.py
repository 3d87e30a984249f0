"""Samples that changed their class, with their pictures where they are images."""

from __future__ import annotations

import base64
import dataclasses
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jq.arithmetic.layout import channels_last
from jq.data.preprocessing import Preprocessing
from jq.data.sources import Source

_MOST = 24  # samples
_SIDE = 96  # pixels of a picture's longer side
_LEAST = 8  # of a side, below which an array is no picture


@dataclasses.dataclass(frozen=True)
class ChangedSample:
    """A sample that the quantized model puts into another class."""

    place: int  # in the data
    name: str  # of its file; empty where it has none
    before: int  # class, by the float model
    after: int
    right: int | None  # where labels are known
    picture: str  # PNG in base64; empty where there is none

    @property
    def kind(self) -> str:
        """The kind of the change, as far as the labels tell."""
        if self.right is None:
            return "changed"
        return (
            "lost" if self.right == self.before else "gained" if self.right == self.after else "wrong before and after"
        )


def changed_samples(best: np.ndarray, source: Source, labels: np.ndarray | None) -> tuple[ChangedSample, ...]:
    """Return samples whose class is another one, those that were right first; `best` is [samples, 2], by both models.

    Pictures are read from the source again, if that can be.
    """
    places = np.flatnonzero(best[:, 0] != best[:, 1])
    if labels is not None:
        places = places[np.argsort(labels[places] != best[places, 0], kind="stable")]
    chosen = [int(place) for place in places[:_MOST]]
    pictures = dict(_pictures(source, set(chosen))) if source.again else {}
    return tuple(
        ChangedSample(
            place,
            source.names[place] if source.names is not None and place < len(source.names) else "",
            int(best[place, 0]),
            int(best[place, 1]),
            None if labels is None else int(labels[place]),
            pictures.get(place, ""),
        )
        for place in chosen
    )


def _pictures(source: Source, places: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the pictures of some samples."""
    for place, sample in enumerate(source.samples()):
        if place > max(places, default=-1):
            return
        if place in places and (pixels := pixels_of(sample, source.preprocessing)) is not None:
            yield place, base64.b64encode(png(pixels)).decode()


def pixels_of(sample: Mapping[str, np.ndarray], preprocessing: Preprocessing | None) -> np.ndarray | None:
    """Return the first input that may be an image as pixels [height, width, 1 or 3]; None where there is none.

    How pixels were fed is undone where that is known; else the least value is black and the largest white.
    """
    for value in sample.values():
        array = np.asarray(value)
        if array.ndim != 4 or array.shape[0] != 1 or array.dtype.kind not in "fu":
            continue
        image = array[0] if array.shape[-1] in (1, 3) else channels_last(array)[0]
        if image.shape[-1] in (1, 3) and min(image.shape[:2]) >= _LEAST and np.isfinite(image).all():
            small = _smaller(image.astype(np.float32))
            return _stretched(small) if preprocessing is None else preprocessing.undo(small)
    return None


def _smaller(image: np.ndarray) -> np.ndarray:
    """An image of at most `_SIDE` pixels on a side, each the mean of those that it replaces."""
    every = -(-max(image.shape[:2]) // _SIDE)
    height, width = (side // every * every for side in image.shape[:2])
    cut = image[:height, :width].reshape(height // every, every, width // every, every, -1)
    mean: np.ndarray = cut.mean((1, 3))
    return mean


def _stretched(image: np.ndarray) -> np.ndarray:
    low, high = float(image.min()), float(image.max())
    return np.rint((image - low) * (255 / ((high - low) or 1.0))).astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """Return pixels [height, width, 1 or 3] of bytes as a PNG file.

    >>> png(np.zeros((2, 2, 3), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, channels = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    parts: Sequence[tuple[bytes, bytes]] = (
        (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""),
    )  # fmt: skip
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
