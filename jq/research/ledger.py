"""The table that an ablation appends to: one line per run, whole or not there, as JSON lines or CSV.

Several processes may append to one file. Each holds the file's lock while it writes a line at the end, or removes what a
writer that was killed left there. Locks are those of the operating system: on NFS they need version 4, or version 3 with its
lock service; a file system without them may mix lines, which the next reader refuses.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jq.errors import ConfigError, DataError
from jq.util import files

Row = Mapping[str, Any]
Column = type | tuple[type, ...]

NUMBER: Column = (int, float, type(None))


@dataclasses.dataclass(frozen=True, eq=False)
class Ledger:
    """Rows in a file, or in memory alone."""

    columns: Mapping[str, Column]  # with the types of their values
    path: Path | None
    rows: list[Row]

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, columns: Mapping[str, Column]) -> Ledger:
        """The rows of earlier runs, whose values have the columns' types; a last line torn by a kill is removed."""
        if path is None:
            return cls(columns, None, [])
        made = cls(columns, Path(path), [])
        if made.path.suffix not in (".jsonl", ".csv"):  # type: ignore[union-attr]
            raise ConfigError(f"{path}: expected a name that ends in .jsonl or .csv")
        files.check_writable(path)
        made._read(Path(path))
        return made

    def append(self, row: Row) -> None:
        """Add a row: its line reaches the disk in one write before this returns."""
        self.rows.append(row)
        if self.path is None:
            return
        with files.writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with files.locked(self.path) as file:
                end = _whole(file)
                head = b"" if end or self.path.suffix != ".csv" else self._csv(self.columns)
                line = head + self._line(row)
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())

    def _line(self, row: Row) -> bytes:
        if self.path is not None and self.path.suffix == ".csv":
            return self._csv([_cell(row[c]) for c in self.columns])
        return json.dumps(row).encode() + b"\n"

    @staticmethod
    def _csv(values: Any) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(values)
        return text.getvalue().encode()

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        content = files.content(path, largest=_LARGEST)
        whole = content[: content.rfind(b"\n") + 1]
        try:
            text = whole.decode()
            if path.suffix == ".csv":
                head, *rest = list(csv.reader(io.StringIO(text, newline=""))) or [list(self.columns)]
                if head != list(self.columns):
                    raise ValueError(f"its columns are {', '.join(head)}")
                self.rows.extend({c: self._value(c, v) for c, v in zip(head, r, strict=True)} for r in rest)
            else:
                self.rows.extend(files.parsed(line) for line in text.split("\n") if line.strip())
            for row in self.rows:
                self._check(row)
        except (ValueError, csv.Error) as error:
            raise DataError(f"{path} is not a table of these runs: {error}; give the name of a new file") from error
        if whole != content:  # of a file that is a table otherwise
            with files.writing(path), files.locked(path) as file:
                _whole(file)

    def _value(self, column: str, text: str) -> Any:
        """A cell's value: JSON, and in columns of words a plain word."""
        is_word = self.columns[column] is str and not text.startswith('"')
        return text if is_word else files.parsed(text)

    def _check(self, row: Any) -> None:
        """Raise a ValueError for a row that no run wrote."""
        if not isinstance(row, dict):
            raise ValueError(f"it holds {str(row)[:60]!r} instead of a row")
        for column, kind in self.columns.items():
            if column not in row:
                raise ValueError(f"a row has no {column!r}")
            if not isinstance(row[column], kind) or isinstance(row[column], bool):
                raise ValueError(f"a row has {str(row[column])[:60]!r} as its {column!r}")


def _whole(file: BinaryIO) -> int:
    """Remove a last line without an end from a file that this process has locked; return where the next one begins."""
    end = file.seek(0, os.SEEK_END)
    tail = b""
    while len(tail) < end and b"\n" not in tail:
        length = min(end, max(_TAIL, 2 * len(tail)))
        file.seek(end - length)
        tail = file.read(length)
    whole = end - len(tail) + tail.rfind(b"\n") + 1
    if whole < end:
        file.truncate(whole)
    return whole


def _cell(value: Any) -> str:
    """A value in one line of CSV: words as they are, unless they break lines or look like JSON, which is all else."""
    is_word = isinstance(value, str) and len(value.splitlines()) < 2 and not value.startswith('"')
    return value if is_word and value == value.rstrip("\r\n") else json.dumps(value)


_LARGEST = 256 << 20  # bytes
_TAIL = 1 << 16  # bytes in which the last line ends, as a rule
