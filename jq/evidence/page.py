"""A report as one HTML page that needs nothing else: no network, no library, readable from disk.

Tensor names are escaped everywhere. The page's policy allows its own style and script, by their hashes,
and nothing that comes from elsewhere.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib.resources
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from jq.evidence.plots import decibel, depth_plot, histogram, ranges
from jq.util.markup import table, text

if TYPE_CHECKING:
    from jq.evidence.report import Report, Section, TensorRow

REASONS = {
    "bias": "the channels' means are shifted: correct the bias",
    "upstream": "the error came with the inputs and weights, little of it is made by rounding this tensor",
    "changed": "a tool changed the weight itself: corrected, finetuned",
    "constraint": "another exponent would be better, but the NPU's position constraints do not allow it",
    "range": "values beyond the codes are clipped",
    "rounding": "the step is wide for these values",
    "not finite": "NaN or Inf: there are no figures",
}
_BAR = 60.0  # dB of a full bar
_NAMES = 1000  # of unmatched tensors


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of the table: what it sorts by, and how that is shown."""

    title: str
    value: Callable[[TensorRow], Any]
    shown: Callable[[TensorRow], str] | None = None
    help: str = ""


def page(report: Report) -> str:
    """Return the report as an HTML page."""
    style, script = asset("report.css"), asset("report.js")
    policy = f"default-src 'none'; style-src {hashed(style)}; script-src {hashed(script)}; base-uri 'none'; form-action 'none'"
    rows = [(f"t{i}", row) for i, row in enumerate(report.rows)]
    columns = [c for c in _COLUMNS if any(c.value(row) not in (None, "") for row in report.rows)]
    body = [
        f"<header><h1>{text(report.title)}</h1>{_listed(report.facts.items())}</header><main>",
        *(_section(s) for s in report.sections),
        _overview(rows),
        _items("Before quantizing", [(f.severity, f"{f.severity}: {f.where}: {f.message}") for f in report.findings]),
        _items("Mended by the guard", [("", str(mend)) for mend in report.guard]),
        _items("Moved for the NPU", [("", str(move)) for move in report.moves]),
        _table(columns, rows),
        *(_unmatched(model, names) for model, names in report.unmatched.items() if names),
        "</main>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(report.title)}</title><style>{style}</style></head><body>{''.join(body)}"
        f"<script>{script}</script></body></html>"
    )


def _listed(facts: Iterable[tuple[str, Any]]) -> str:
    return f"<dl>{''.join(f'<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>' for k, v in facts)}</dl>"


def _section(section: Section) -> str:
    picture = f'<div class="wide">{section.picture}</div>' if section.picture else ""
    columns = table(section.columns, section.rows)
    return f'<section><h2>{text(section.title)}</h2>{picture}<div class="wide">{columns}</div></section>'


def _overview(rows: list[tuple[str, TensorRow]]) -> str:
    plot = depth_plot(rows)
    reasons = [reason for reason in REASONS if any(row.reason == reason for _, row in rows)]
    legend = "".join(
        f'<div><dt><i class="dot {text(r.replace(" ", "-"))}"></i>{text(r)}</dt><dd>{text(REASONS[r])}</dd></div>'
        for r in reasons
    )
    if not plot:
        return ""
    return (
        "<section><h2>Along the network</h2><p>Circles are activations, diamonds weights; a click opens the tensor.</p>"
        f'<div class="wide">{plot}</div>{f"<dl class=legend>{legend}</dl>" if legend else ""}</section>'
    )


def _items(title: str, items: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f'<li class="{text(kind)}">{text(words)}</li>' for kind, words in items)
    section = f"<section><details><summary><h2>{text(title)}</h2></summary><ul>{rows}</ul></details></section>"
    return section if rows else ""


def _unmatched(model: str, names: tuple[str, ...]) -> str:
    more = [f"and {len(names) - _NAMES:,} more"] if len(names) > _NAMES else []
    return _items(f"Only in the {model} model: {len(names):,} tensors", [("", n) for n in (*names[:_NAMES], *more)])


# --- The table ---


def _table(columns: list[_Column], rows: list[tuple[str, TensorRow]]) -> str:
    heads = "".join(
        f'<th scope="col" aria-sort="none" title="{text(c.help)}"><button type="button">{text(c.title)}</button></th>'
        for c in columns
    )
    choices = sorted({row.kind for _, row in rows}) + [r for r in REASONS if any(row.reason == r for _, row in rows)]
    options = "".join(f"<option>{text(c)}</option>" for c in choices)
    return (
        f'<section><h2>Tensors</h2><form role="search"><label>Filter <input type="search" id="filter"></label> '
        f'<label>Show <select id="kind"><option value="">all</option>{options}</select></label> '
        f'<output id="count" aria-live="polite">{len(rows):,} tensors</output></form>'
        f'<div class="wide"><table id="tensors"><thead><tr>{heads}</tr></thead>'
        f"{''.join(_entry(columns, anchor, row) for anchor, row in rows)}</table></div></section>"
    )


def _entry(columns: list[_Column], anchor: str, row: TensorRow) -> str:
    """A row and what it opens; they are one body of the table, so that sorting keeps them together."""
    cells = "".join(_cell(c, row) for c in columns[1:])
    return (
        f'<tbody id="{anchor}" data-kind="{text(row.kind)}" data-reason="{text(row.reason)}"><tr>'
        f'<th scope="row" data-v="{text(row.tensor)}">'
        f'<button type="button" aria-expanded="false" aria-controls="{anchor}d">{text(row.tensor)}</button></th>{cells}</tr>'
        f'<tr id="{anchor}d" class="more" hidden><td colspan="{len(columns)}">{_details(row)}</td></tr></tbody>'
    )


def _cell(column: _Column, row: TensorRow) -> str:
    value = column.value(row)
    if value is None:
        return '<td data-v=""></td>'
    shown = text(f"{value:.4g}" if column.shown is None and not isinstance(value, str) else value)
    shown = shown if column.shown is None else column.shown(row)
    numeric = "" if isinstance(value, str) else " class=n"
    key = value if isinstance(value, str) else "Infinity" if value == math.inf else repr(value)  # as the script sorts
    return f'<td{numeric} data-v="{text(key)}">{shown}</td>'


def _details(row: TensorRow) -> str:
    facts = [
        ("node", row.node),
        ("format", row.format),
        ("zero point", row.zero_point),
        ("float values", _interval(row.low, row.high)),
        ("codes stand for", _interval(*row.bounds) if row.bounds else None),
        ("moved", "; ".join(row.moves)),
        ("note", row.note),
    ]
    if row.error is not None:
        facts += [
            ("made here", _share(row.error.own)),
            ("by clipping", _share(row.error.clipped)),
            ("shift of means", _share(row.error.shift)),
            ("better exponent", None if row.error.better is None else f"2^{row.error.better}"),
        ]
    facts.append(("reason", f"{row.reason}: {REASONS[row.reason]}" if row.reason in REASONS else row.reason))
    pictures = (("values and grid", histogram(row)), ("range per channel", ranges(row)))
    figures = "".join(f"<figure><figcaption>{k}</figcaption>{v}</figure>" for k, v in pictures if v)
    return f'{_listed(f for f in facts if f[1] not in (None, ""))}<div class="figures">{figures}</div>'


def _interval(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{low:.5g} to {high:.5g}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%} of the squared error"


def _scale(row: TensorRow) -> str:
    return f"2<sup>{row.exponent}</sup>" if row.exponent is not None else f"{row.scale:.4g}"


def _sqnr(row: TensorRow) -> str:
    assert row.sqnr is not None
    width = max(0.0, min(1.0, row.sqnr / _BAR)) * 48
    bar = f'<svg class="bar" viewBox="0 0 48 8" aria-hidden="true"><rect width="{width:.1f}" height="8" rx="2"/></svg>'
    return f"{bar}{decibel(row.sqnr, unit='')}"


def _of_error(name: str) -> Callable[[TensorRow], Any]:
    return lambda row: None if row.error is None else getattr(row.error, name)


_COLUMNS = (
    _Column("tensor", lambda r: r.tensor),
    _Column("kind", lambda r: r.kind),
    _Column("format", lambda r: r.format),
    _Column("scale", lambda r: r.scale, _scale, "of one step; the largest, of several"),
    _Column("SQNR dB", lambda r: r.sqnr, _sqnr, "signal to quantization noise"),
    _Column("own dB", _of_error("made"), lambda r: decibel(r.error.made, '') if r.error else "", "SQNR of its own rounding"),
    _Column("reason", lambda r: r.reason or None, lambda r: f'<i class="dot {text(r.reason.replace(" ", "-"))}"></i>{r.reason}'),
    _Column("cosine", _of_error("cosine"), lambda r: f"{r.error.cosine:.5f}" if r.error else ""),
    _Column("PSNR dB", _of_error("psnr"), lambda r: decibel(r.error.psnr, '') if r.error else ""),
    _Column("L2", _of_error("l2"), help="norm of the error, mean of the samples"),
    _Column("max error", _of_error("largest")),
    _Column("clipped", _of_error("saturated"), lambda r: f"{r.error.saturated:.2%}" if r.error else "", "part of the values"),
    _Column("depth", lambda r: r.depth, help="place in the order of the graph"),
)  # fmt: skip


@functools.cache
def asset(name: str) -> str:
    """The text of a page's own style or script."""
    return (importlib.resources.files("jq.evidence") / "assets" / name).read_text("utf-8")


def hashed(source: str) -> str:
    """A style or script as a page's policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
