"""The right classes of samples, read from the files that users have."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jq.data import arrays, images
from jq.errors import ConfigError, DataError, suggest
from jq.util import files

_MOST_CLASSES = 1 << 31
_LABELS = (".csv", ".npy", ".npz", ".txt")
_RESULTS = images.SUFFIXES | {".npy", ".npz"}  # endings that names of samples are written with


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """The right class of each sample."""

    values: np.ndarray  # int64 [samples]
    names: tuple[str, ...] | None = None  # of the samples; None: they are in order

    def of(self, count: int, names: Sequence[str] | None) -> np.ndarray:
        """Return the label of each of `count` samples, matched by name if the labels have names."""
        if self.names is None:
            if len(self.values) != count:
                raise DataError(f"there are {len(self.values)} labels for {count} samples")
            return self.values
        if names is None:
            raise DataError("labels have names, but samples have none: they come from one array, or share their names")
        known = dict(zip(self.names, self.values, strict=True))
        missing = [name for name in names if name not in known]
        if missing:
            near = suggest(missing[0], known)
            raise DataError(f"{len(missing)} samples have no label; the first is {missing[0]!r}.{near}")
        return np.array([known[name] for name in names])


def read_labels(path: str | os.PathLike[str], offset: int = 0) -> Labels:
    """Return the labels in a file, plus `offset`: 1 where the model has a class for the background in front, say.

    An .npy file holds whole numbers [samples]; an .npz file such an array, called "labels" if there are several; a .txt
    file one number in each line; a .csv file that, or a sample's name and its label, below a heading or not. Labels
    without names are in the order of the samples.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "labels.csv").write_text("image,label\\ncat.png,3\\ndog.png,7\\n")
    ...     found = read_labels(f"{folder}/labels.csv")
    >>> found.names, found.values
    (('cat', 'dog'), array([3, 7]))
    """
    path = Path(path)
    if abs(offset) >= _MOST_CLASSES:
        raise ConfigError(f"the offset of labels must be less than {_MOST_CLASSES} in magnitude; got {offset}")
    if path.suffix.lower() not in _LABELS:
        raise DataError(f"{path}: expected a file of labels that ends in one of {', '.join(_LABELS)}")
    if path.suffix.lower() in (".npy", ".npz"):
        return Labels(_from_array(path) + offset)
    text = files.text(path)
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline="")) if any(row)]
    except csv.Error as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if rows and path.suffix.lower() == ".csv" and not _is_whole(rows[0][-1]):
        rows = rows[1:]
    widths = {len(row) for row in rows}
    most = 2 if path.suffix.lower() == ".csv" else 1
    bad = next((row for row in rows if not _is_whole(row[-1])), None)
    if not rows or len(widths) > 1 or max(widths) > most or bad:
        problem = f"the line {','.join(bad)!r}" if bad else f"{len(rows)} lines of {sorted(widths)} columns"
        raise DataError(f"{path} holds {problem}; expected a whole number in each line{', or name,label' * (most > 1)}")
    values = np.array([int(row[-1]) for row in rows], np.int64) + offset
    return Labels(values, _unique(path, [row[0] for row in rows]) if widths == {2} else None)


def _from_array(path: Path) -> np.ndarray:
    with arrays.opened(path) as file:
        if not isinstance(file, arrays.Archive):
            array = np.array(file)
        else:
            whole = [k for k, v in file.members.items() if v.dtype and v.dtype.kind in "iu" and len(v.shape or ()) == 1]
            chosen = "labels" if "labels" in whole or len(whole) != 1 else whole[0]
            if chosen not in whole:
                raise DataError(
                    f"{path} holds {', '.join(map(str, file.members.values()))}; expected an array 'labels'"
                )
            array = file.read(chosen)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path} holds {array.dtype}{list(array.shape)}; expected whole numbers [samples]")
    return array.astype(np.int64)


def _unique(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return names as results have them: without the suffix of an image or array."""
    stems = [name[: -len(s)] if (s := Path(name).suffix).lower() in _RESULTS else name for name in names]
    twice = next((name for name in stems if stems.count(name) > 1), None) if len(set(stems)) < len(stems) else None
    if twice is not None:
        raise DataError(f"{path} names {twice!r} more than once")
    return tuple(stems)


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 10
