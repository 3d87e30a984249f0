"""Terminal output: plain text and tables in which untrusted names are escaped."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from jq.util.progress import log


def printable(text: str) -> str:
    r"""Return `text` on one line with control characters escaped.

    >>> printable("conv\x1b[2J\n")
    'conv\\x1b[2J\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def answer(as_json: bool, document: Any, *parts: Any) -> None:
    """Print a command's result: one JSON document, or lines and tables for a reader, unless --quiet is asked for."""
    if as_json:
        print(json.dumps(document, indent=2))
    elif log.isEnabledFor(logging.WARNING):
        from rich.console import Console

        console = Console(markup=False, highlight=False, emoji=False)
        for part in parts:
            console.print(printable(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Any:
    """Return a rich table of plain text, in which nothing is read as markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title and Text(printable(title)), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table
