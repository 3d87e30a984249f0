"""HTML for reports and notebooks in which every name from a model is escaped text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

_SHOWN = 10


def text(value: Any) -> str:
    """A value as text between tags or in a quoted attribute.

    >>> text('<a title="&">')
    '&lt;a title=&quot;&amp;&quot;&gt;'
    """
    return html.escape(str(value), quote=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain table.

    >>> table(("a",), [("<b>",)])
    '<table><thead><tr><th scope="col">a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    heads = "".join(f'<th scope="col">{text(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{text(v)}</td>" for v in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def preview(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], count: int = _SHOWN) -> str:
    """Return the HTML that a notebook shows for a value: a title and the first rows of a table.

    >>> preview("three", ("n",), [(1,), (2,), (3,)], count=1).endswith("<p>and 2 more</p></div>")
    True
    """
    more = f"<p>and {len(rows) - count:,} more</p>" if len(rows) > count else ""
    return f"<div><p><b>{text(title)}</b></p>{table(columns, rows[:count])}{more}</div>"
