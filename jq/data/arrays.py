"""Arrays in .npy and .npz files of unknown origin: headers are checked before memory is taken, nothing is unpickled."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jq.errors import DataError, Error
from jq.graph import Value
from jq.util import files

Sample = dict[str, np.ndarray]
"""One item of data: an array for each input of a model."""

_DEFLATE_RATIO = 1032  # of bytes out to bytes in, the most that deflate can do
_HEADERS = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}


@dataclasses.dataclass(frozen=True, eq=False)
class Archive:
    """An open .npz file: what it holds, and each array when it is asked for."""

    members: Mapping[str, Value]
    file: np.lib.npyio.NpzFile

    def read(self, name: str) -> np.ndarray:
        """The array of this name, in memory."""
        return self.file[name]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[np.ndarray | Archive]:
    """Yield the mapped array of an .npy file, or the archive that an .npz is; what fails inside is a DataError.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/two.npz", a=np.zeros((2, 3)), b=np.ones(4))
    ...     with opened(Path(folder, "two.npz")) as archive:
    ...         sorted(archive.members), archive.read("b")
    (['a', 'b'], array([1., 1., 1., 1.]))
    """
    with readable(path):
        file = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(file, np.ndarray):
            yield file
        else:
            with file:
                yield Archive(_members(path, file), file)


@contextlib.contextmanager
def readable(path: Path, kind: str = "") -> Iterator[None]:
    """Make a DataError of what fails while a file is read."""
    try:
        files.check_regular(path)
        yield
    except Error:
        raise
    except Exception as error:  # numpy, zipfile, zlib and Pillow's plugins raise a dozen kinds
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if any(words in text.lower() for words in ("pickle", "python objects")):
            text = "it holds no arrays of numbers; pickled objects are refused, because reading them can run any code"
        raise DataError(f"cannot read {kind}{path}: {getattr(error, 'strerror', None) or text}") from error


def _members(path: Path, npz: np.lib.npyio.NpzFile) -> dict[str, Value]:
    assert npz.zip
    members, size = {}, path.stat().st_size
    for info in npz.zip.infolist():
        if info.filename.endswith(".npy"):
            with npz.zip.open(info) as file:
                shape, _, dtype = _HEADERS[np.lib.format.read_magic(file)[0]](file)
            member = Value(info.filename.removesuffix(".npy"), dtype, shape)
            held = min(info.file_size, size * _DEFLATE_RATIO)
            if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > held:
                raise DataError(f"{path}: array {member} declares more than the file holds")
            members[member.name] = member
    return members
