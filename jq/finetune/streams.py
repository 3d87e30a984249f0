"""What flows between the units of a network: tensors of all calibration data, in small types, in memory or on disk."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.formats import Integer
from jq.plan import QParams

Array = Any
_FINEST = -100  # exponent of a scale, well inside those that devices do not flush to zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A tensor in a smaller type: value = (array - zero) * scale.

    What is quantized is kept as its codes, so exactly; floats in half precision, relative to their largest.
    """

    array: Array
    scale: Array
    zero: Array
    whole: bool = dataclasses.field(default=False, metadata={"static": True})  # kept as it is

    @classmethod
    def quantized(cls, x: Array, found: QParams | None) -> Kept:
        """A tensor that a plan quantizes, or not."""
        if found is None or not isinstance(found.grid, Integer) or found.grid.bits > 16 or found.dynamic:
            return cls(x, jnp.float32(1), jnp.float32(0), True)
        return cls(found.codes(x).astype(found.grid.dtype), jnp.float32(found.scale), jnp.float32(found.zero_point))

    @classmethod
    def halved(cls, x: Array) -> Kept:
        """A tensor in half precision, if it is of floats."""
        if x.dtype != jnp.float32:
            return cls(x, jnp.float32(1), jnp.float32(0), True)
        _, exponent = jnp.frexp(jnp.max(jnp.abs(x), initial=0))
        scale = jnp.exp2(jnp.maximum(exponent - 15, _FINEST).astype(jnp.float32))
        return cls((x / scale).astype(jnp.float16), scale, jnp.float32(0))

    @property
    def value(self) -> Array:
        """The tensor."""
        if self.whole:
            return self.array
        return (self.array.astype(jnp.float32) - self.zero) * self.scale


def joined(chunks: Sequence[Kept]) -> Kept:
    """Chunks of a tensor as one, at the largest scale among them."""
    if chunks[0].whole or chunks[0].array.dtype != jnp.float16:
        return dataclasses.replace(chunks[0], array=jnp.concatenate([c.array for c in chunks]))
    scale = jnp.max(jnp.stack([c.scale for c in chunks]))
    arrays = [c.array * (c.scale / scale).astype(jnp.float16) for c in chunks]
    return Kept(jnp.concatenate(arrays), scale, chunks[0].zero)


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
    """The calibration data in chunks, and where tensors between units are kept: in memory, or in files of a folder."""

    inputs: Mapping[str, list[np.ndarray]]
    valid: list[np.ndarray]
    folder: Path | None = None
    _names: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self.valid)

    def keep(self, chunks: Sequence[Kept]) -> list[Kept]:
        """The chunks of a tensor, read from disk when they are needed if there is a folder."""
        return list(chunks) if self.folder is None else [self._on_disk(c, self.folder) for c in chunks]

    def _on_disk(self, kept: Kept, folder: Path) -> Kept:
        path = folder / f"{next(self._names)}.npy"
        np.save(path, np.asarray(kept.array))
        mapped = np.load(path, mmap_mode="r")
        os.unlink(path)  # the mapping keeps the file until it is let go
        return dataclasses.replace(kept, array=mapped)
