"""Weights that are mapped from files: read one after the other, they need no memory of their own."""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_LEAST = 1 << 20  # bytes: below, a system call costs more than it gives back
_GIVES_BACK = hasattr(mmap, "MADV_DONTNEED")  # not on Windows
BLOCK = 1 << 22  # elements of a large array that are taken at a time


def release(array: Any) -> None:
    """Give back the memory in which an array's file is mapped; who reads it again gets it from the file.

    Any other array is left alone, and so is one that may have been written to without its file.
    """
    if not isinstance(array, np.ndarray) or array.nbytes < _LEAST:
        return
    owner = _owner(array)
    if isinstance(owner, mmap.mmap) and _GIVES_BACK:
        owner.madvise(mmap.MADV_DONTNEED)


def _owner(array: Any) -> Any:
    """Return the holder of an array's memory; None where that is a file that may be unlike its memory."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.mode not in ("r", "r+"):
            return None
        array = array.base
    return array


def like(array: np.ndarray, source: Any) -> np.ndarray:
    """Return what a weight becomes, on disk if the weight itself was: in a file without a name, where there is room.

    >>> like(np.zeros(2), np.ones(2))
    array([0., 0.])
    """
    if not _is_mapped(source) or _is_mapped(array) or array.nbytes < _LEAST or array.dtype == object:
        return array
    with contextlib.suppress(OSError), tempfile.TemporaryFile(prefix="jq-") as file:
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        return np.memmap(file, array.dtype, "r", 0, array.shape)
    return array


def all_like(arrays: Mapping[str, np.ndarray], source: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays made from others, on disk if one of those is."""
    mapped = next(filter(_is_mapped, source.values()), None)
    return {name: like(array, mapped) for name, array in arrays.items()}


def _is_mapped(array: Any) -> bool:
    return isinstance(_owner(array), mmap.mmap) and _GIVES_BACK


def one_by_one(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays by name, each released when the next one is asked for.

    >>> list(one_by_one({"a": np.zeros(1)}))
    [('a', array([0.]))]
    """
    for name, array in arrays.items():
        yield name, array
        release(array)


def ends(array: np.ndarray) -> tuple[Any, Any]:
    """Return the least and the largest element, or zero where that is beyond; NaN if the array holds one.

    >>> ends(np.float32([1, 3]))
    (np.float32(0.0), np.float32(3.0))
    """
    return np.min(array, initial=0), np.max(array, initial=0)


def is_finite(array: np.ndarray) -> bool:
    """Whether an array of floats holds neither NaN nor infinity, without one of bools beside it."""
    return bool(np.isfinite(ends(array)).all())


def blocks(array: np.ndarray) -> Iterator[slice]:
    """Yield the parts of an array along its first axis that are worked on at a time, so that copies of a part are small.

    >>> [(s.start, s.stop) for s in blocks(np.broadcast_to(0, (5, 1 << 21)))]
    [(0, 2), (2, 4), (4, 5)]
    """
    rows = len(array)
    each = max(1, BLOCK // max(1, array.size // max(1, rows)))
    yield from (slice(start, min(start + each, rows)) for start in range(0, rows, each))
