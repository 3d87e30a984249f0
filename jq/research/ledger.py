"""The table that an ablation appends to: one line per run, whole or not there, as JSON lines or CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jq.errors import ConfigError, DataError
from jq.util import files

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Ledger:
    """Rows in a file, or in memory alone."""

    columns: tuple[str, ...]
    path: Path | None
    rows: list[Row]

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, columns: tuple[str, ...]) -> Ledger:
        """The rows of earlier runs; a last line torn by a kill is removed from the file."""
        if path is None:
            return cls(columns, None, [])
        made = cls(columns, Path(path), [])
        if made.path.suffix not in (".jsonl", ".csv"):  # type: ignore[union-attr]
            raise ConfigError(f"{path}: expected a name that ends with .jsonl or .csv")
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
            with open(self.path, "ab") as file:
                head = b"" if file.tell() or self.path.suffix != ".csv" else self._csv(self.columns)
                file.write(head + self._line(row))
                file.flush()
                os.fsync(file.fileno())

    def _line(self, row: Row) -> bytes:
        if self.path is not None and self.path.suffix == ".csv":
            # JSON, so that what is read is what was written; plain words stay words.
            return self._csv([v if isinstance(v := row[c], str) else json.dumps(v) for c in self.columns])
        return json.dumps(row).encode() + b"\n"

    @staticmethod
    def _csv(values: Any) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(values)
        return text.getvalue().encode()

    def _read(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            files.write(path, whole)
        try:
            lines = whole.decode().splitlines()
            if path.suffix == ".csv":
                head, *rest = list(csv.reader(lines)) or [list(self.columns)]
                if head != list(self.columns):
                    raise ValueError(f"its columns are {', '.join(head)}")
                self.rows.extend({c: _parsed(c, v) for c, v in zip(head, r, strict=True)} for r in rest)
            else:
                self.rows.extend(json.loads(line) for line in lines if line.strip())
        except ValueError as error:
            raise DataError(f"{path} is no table of an ablation: {error}; give the name of a new file") from error
        for row in self.rows:
            if not isinstance(row, dict) or "hash" not in row:
                raise DataError(f"{path} holds rows without a hash: it is no table of an ablation; give a new name")


_WORDS = ("hash", "model", "config", "options", "digest", "jq", "jax", "jaxlib", "machine")


def _parsed(column: str, text: str) -> Any:
    return text if column in _WORDS else json.loads(text)
