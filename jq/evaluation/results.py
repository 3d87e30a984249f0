"""Folders of results: images and arrays by name, read lazily and never trusted."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jq.data import arrays, images
from jq.errors import DataError

SUFFIXES = images.SUFFIXES | {".npy", ".npz"}
_MOST_UNPACKED = 1 << 30  # bytes of one array of an archive, where some bytes can stand for a thousand times as many


@dataclasses.dataclass(frozen=True)
class Entry:
    """One result in a folder."""

    key: str  # path in the folder without the ending; of an archive's array, with its name behind that
    file: str  # path in the folder
    suffix: str
    read: Callable[[], np.ndarray] = dataclasses.field(repr=False)  # raises a DataError if that cannot be


def entries(folder: Path) -> list[Entry]:
    """Return the results in a folder and those below, in the order of samples; the arrays of an .npz are entries too.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.ones(2))
    ...     np.savez(f"{folder}/b.npz", boxes=np.ones(4))
    ...     [(entry.key, entry.read().size) for entry in entries(Path(folder))]
    [('a', 2), ('b/boxes', 4)]
    """
    try:
        there = folder.is_dir()
    except (OSError, ValueError) as error:  # too long a name, a null byte in it
        raise DataError(f"cannot read the folder {folder}: {error}") from error
    if not there:
        raise DataError(f"{folder} is {'not a folder' if folder.exists() else 'missing'}; expected a folder of results")
    results = [entry for file in images.files_of(folder, SUFFIXES) for entry in _entries(folder, file)]
    if not results:
        raise DataError(f"{folder} holds no results; expected files with one of {', '.join(sorted(SUFFIXES))}")
    return results


def _entries(folder: Path, file: Path) -> Iterator[Entry]:
    inside, suffix = file.relative_to(folder), file.suffix.lower()
    key = inside.with_suffix("").as_posix()
    if suffix == ".npz":
        try:
            with arrays.opened(file) as archive:
                members = dict(archive.members) if isinstance(archive, arrays.Archive) else {}
            if not members:
                raise DataError(f"{file} holds no arrays")
        except DataError as error:
            yield Entry(key, inside.as_posix(), suffix, functools.partial(_refuse, str(error)))
            return
        for name in members:
            yield Entry(f"{key}/{name}", inside.as_posix(), suffix, functools.partial(_member, file, name))
    else:
        read = _array if suffix == ".npy" else images.stored
        yield Entry(key, inside.as_posix(), suffix, functools.partial(read, file))


def _refuse(reason: str) -> np.ndarray:
    raise DataError(reason)


def _member(file: Path, name: str) -> np.ndarray:
    with arrays.opened(file) as archive:
        if not isinstance(archive, arrays.Archive) or name not in archive.members:
            raise DataError(f"{file} no longer holds array {name!r}")
        member = archive.members[name]
        elements = math.prod(d for d in member.shape or () if isinstance(d, int))
        size = elements * (member.dtype or np.dtype(bool)).itemsize
        if size > _MOST_UNPACKED:
            raise DataError(f"{file}: array {member} would unpack to {size:,} bytes; store it as .npy")
        return _numbers(file, archive.read(name))


def _array(file: Path) -> np.ndarray:
    with arrays.opened(file) as content:
        if isinstance(content, arrays.Archive):
            raise DataError(f"{file} is an archive of several arrays; rename it to .npz")
        return _numbers(file, content)


def _numbers(file: Path, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise DataError(f"{file} holds {array.dtype}; expected real numbers")
    return array
