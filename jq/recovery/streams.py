"""Tensors between the units of a network, of all calibration data, in small types, in memory or on disk."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.formats import FLOAT16, Integer
from jq.data.arrays import Sample
from jq.plan import QParams, QTensor

Array = Any
CHUNK_BYTES = 12 << 20  # of the largest tensor of a unit, in a chunk of the data
_CHUNKS = 4  # and no fewer
APART = 4  # every fourth sample is held back where a search or a stage is judged
_SEQUENCE = 4  # dims of (samples, batch, steps, features), which is no image
_FINEST = -100  # exponent of a scale, well inside those that devices do not flush to zero
_HALF, _BEYOND = 15, 4  # exponent of what half precision can hold, and how far a tensor may go beyond its plan's range


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A tensor (samples, batch, ...) in a smaller type: the codes of a `QTensor`, or without `qparams` the array itself.

    Codes are exact; floats are kept in half precision, relative to their largest. Images have their channels last, as
    those who make them and who read them have them so: XLA drops the transposes.
    """

    array: Array
    qparams: QParams | None

    @classmethod
    def quantized(cls, x: Array, qparams: QParams | None) -> Kept:
        """A tensor that a plan quantizes, or not."""
        if qparams is None or not isinstance(qparams.grid, Integer) or qparams.grid.bits > 16 or qparams.dynamic:
            return cls(_channels_last(x), None)
        return cls(qparams.codes(_channels_last(x)).astype(qparams.grid.dtype), qparams)

    @classmethod
    def halved(cls, x: Array, qparams: QParams | None = None) -> Kept:
        """A tensor in half precision, if it is of floats, of about the range that a plan gives it or its own."""
        x = _channels_last(x)
        if x.dtype != jnp.float32:
            return cls(x, None)
        if qparams is None or not isinstance(qparams.grid, Integer) or qparams.dynamic:
            _, exponent = jnp.frexp(jnp.max(jnp.abs(x), initial=0))
            exponent -= _HALF
        else:
            _, exponent = jnp.frexp(jnp.float32(qparams.scale))
            exponent += qparams.grid.bits - (_HALF - _BEYOND)
        scale = jnp.exp2(jnp.maximum(exponent, _FINEST).astype(jnp.float32))
        codes = jnp.clip(x / scale, -FLOAT16.largest, FLOAT16.largest).astype(jnp.float16)
        return cls(codes, QParams(scale, np.int32(0), FLOAT16))

    @property
    def value(self) -> Array:
        """The tensor."""
        x = self.array if self.qparams is None else QTensor(self.array, self.qparams).value()
        return layout.channels_first(x, 2) if x.ndim > _SEQUENCE else x


def _channels_last(x: Array) -> Array:
    return layout.channels_last(jnp.asarray(x), 2) if x.ndim > _SEQUENCE else x


def joined(chunks: Sequence[Kept]) -> Kept:
    """Chunks of a tensor as one, at the largest scale among them. By numpy, which compiles nothing."""
    first, arrays = chunks[0], [np.asarray(c.array) for c in chunks]
    if len(chunks) == 1:
        return first
    scales = [1.0 if c.qparams is None else float(c.qparams.scale) for c in chunks]
    scale = max(scales)
    for i, (array, own) in enumerate(zip(arrays, scales, strict=True)):
        if own != scale:
            arrays[i] = (array.astype(np.float32) * np.float32(own / scale)).astype(array.dtype)
    qparams = first.qparams and dataclasses.replace(first.qparams, scale=jnp.float32(scale))
    return Kept(np.concatenate(arrays), qparams)


def regrouped(chunks: list[Kept], size: int) -> Iterator[Kept]:
    """Yield the same samples in chunks of another size, of which one divides the other; the last may come several times.

    The list is emptied on the way, so that a tensor, the largest thing in memory, is never there twice.
    """
    together = max(1, size // len(chunks[0].array))
    while chunks:
        whole = joined(chunks[:together])
        del chunks[:together]
        array = np.asarray(whole.array)
        for start in range(0, len(array), size):
            part = array[start : start + size]
            missing = size - len(part)
            filled = np.concatenate([part, np.repeat(part[-1:], missing, axis=0)]) if missing else part
            yield dataclasses.replace(whole, array=jnp.asarray(filled))


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
    """The calibration data in chunks, and where tensors between units are kept: in memory, or in files of a folder."""

    inputs: Mapping[str, list[np.ndarray]]
    valid: list[np.ndarray]
    folder: Path | None = None
    _names: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def size_for(self, sample_bytes: int) -> int:
        """The samples of a chunk where the largest tensor of one has `sample_bytes`: a power of two times the least."""
        least, samples = len(self.valid[0]), sum(map(len, self.valid))
        most = max(least, min(CHUNK_BYTES // max(1, sample_bytes), samples // _CHUNKS))
        return least << (most // least).bit_length() - 1

    def valid_of(self, size: int) -> list[np.ndarray]:
        """Masks of chunks of this size: which of their samples are there for the first time."""
        samples = sum(int(v.sum()) for v in self.valid)
        count = -(-sum(map(len, self.valid)) // size)
        return list((np.arange(count * size) < samples).reshape(count, size))

    def samples(self) -> list[Sample]:
        """The samples, each once."""
        return [
            {k: chunks[i][j] for k, chunks in self.inputs.items()}
            for i, valid in enumerate(self.valid)
            for j in np.flatnonzero(valid)
        ]

    def keep(self, chunks: Iterable[Kept]) -> list[Kept]:
        """The chunks of a tensor, read from disk when they are needed if there is a folder."""
        return list(chunks) if self.folder is None else [self._on_disk(c, self.folder) for c in chunks]

    def _on_disk(self, kept: Kept, folder: Path) -> Kept:
        path = folder / f"{next(self._names)}.npy"
        np.save(path, np.asarray(kept.array))
        mapped = np.load(path, mmap_mode="r")
        os.unlink(path)  # the mapping keeps the file until it is let go
        return dataclasses.replace(kept, array=mapped)
