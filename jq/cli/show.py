"""Terminal output: plain text and tables in which untrusted names are escaped."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jq.errors import DataError
from jq.util.progress import log

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?%?")
_DECIBELS = re.compile(r"(-?\d+\.\d) dB")
_COLOURS = {"error": "1;31", "warning": "33"}  # bold red, yellow
_WORD = 12  # characters that a column of words needs
_UNKNOWN = 120  # characters of a line where there is no terminal to say how many


def printable(text: str) -> str:
    r"""Return `text` on one line with control characters escaped.

    >>> printable("conv\x1b[2J\n")
    'conv\\x1b[2J\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def answer(as_json: bool, document: Any, *parts: Any) -> None:
    """Print a command's result: one JSON document, or lines and tables for a reader, unless --quiet is asked for."""
    try:
        if as_json:
            print(json.dumps(document, indent=2))
        elif log.isEnabledFor(logging.WARNING):
            _show(parts)
    except BrokenPipeError:
        raise
    except OSError as error:  # here where Python does not buffer
        raise unwritable(error) from None


def unwritable(error: OSError) -> DataError:
    """Return the error of a standard output that cannot be written."""
    return DataError(f"cannot write to standard output: {error.strerror or error}")


def _show(parts: Iterable[Any]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False, width=_width())
    for part in parts:
        console.print(coloured(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))


def _width() -> int:
    return shutil.get_terminal_size((_UNKNOWN, 24)).columns


def coloured(line: str) -> Any:
    """Return a line in which decibels are green, yellow or red; on a terminal that has colours, which rich knows.

    >>> [(str(span.style), span.start) for span in coloured("y: SQNR 14.5 dB").spans]
    [('yellow', 8)]
    """
    from rich.text import Text

    text = Text(printable(line))
    for match in _DECIBELS.finditer(text.plain):
        value = float(match[1])
        style = next((name for most, name in ((10.0, "red"), (20.0, "yellow")) if value < most), "green")
        text.stylize(style, match.start(), match.end())
    return text


def marked(word: str, message: str) -> str:
    """Return a line of an error or a warning; its first word is coloured on a terminal, unless NO_COLOR is set.

    >>> marked("error", "no such file")
    'error: no such file'
    """
    plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return f"{word}: {message}" if plain else f"\x1b[{_COLOURS[word]}m{word}:\x1b[0m {message}"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Any:
    """Return a rich table of plain text, in which nothing is read as markup.

    Words are folded where the terminal is narrow, numbers never: where even they do not fit, long ones are abbreviated.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(str(cell)) for cell in row] for row in rows]
    numeric = [any(_NUMBER.fullmatch(row[i]) for row in cells) and all(not row[i] or _NUMBER.fullmatch(row[i])
               for row in cells) for i in range(len(columns))]  # fmt: skip
    widths = [
        max(map(len, (columns[i], *(row[i] for row in cells)))) if numeric[i] else _WORD for i in range(len(columns))
    ]
    if sum(widths) + 3 * len(columns) > _width():
        cells = [[abbreviated(cell) if numeric[i] else cell for i, cell in enumerate(row)] for row in cells]
    table = Table(title=title and Text(printable(title)), title_justify="left")
    for column, number in zip(columns, numeric, strict=True):
        table.add_column(column, overflow="fold", no_wrap=number, justify="right" if number else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def abbreviated(number: str) -> str:
    """Return a number in at most three or four digits.

    >>> abbreviated("12,345,678"), abbreviated("-0.00123456"), abbreviated("37"), abbreviated("2.5e-07")
    ('12.3M', '-0.00123', '37', '2.5e-07')
    """
    if not number:  # an empty cell of a column of numbers
        return number
    value = float(number.replace(",", "").rstrip("%"))
    if "," not in number:
        short = f"{value:.3g}" + "%" * number.endswith("%")
        return short if len(short) < len(number) else number
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return number
