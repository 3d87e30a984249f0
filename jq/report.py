"""What quantizing did to each tensor: a table, JSON, and one HTML page that stands alone."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jq import files
from jq.constraints import Move, errors_of
from jq.formats import Integer
from jq.graph import Graph
from jq.lint import Finding
from jq.plan import Plan
from jq.stats import Stats


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantized tensor."""

    tensor: str
    kind: str  # activation or weight
    node: str  # that makes it, or first reads it
    format: str
    scale: float | None  # the largest, of several; None of formats that have none
    exponent: int | None  # of a power of two
    zero_point: int | None
    low: float | None
    high: float | None
    sqnr: float | None  # signal to quantization noise, dB, on the calibration data
    moves: tuple[str, ...]  # by which constraints its position was changed, and how


@dataclasses.dataclass(frozen=True)
class Report:
    """The evidence of a quantization; rows are sorted, the worst first."""

    title: str
    facts: Mapping[str, str]
    rows: tuple[Row, ...]
    moves: tuple[Move, ...]
    findings: tuple[Finding, ...]

    def summary(self, count: int = 10) -> str:
        """The facts, what constraints moved, and the worst tensors, as lines of text."""
        lines = [self.title, *(f"  {k}: {v}" for k, v in self.facts.items())]
        if self.moves:
            lines += ["moved for the NPU:", *(f"  {m}" for m in self.moves[:count])]
        if len(self.moves) > count:
            lines.append(f"  and {len(self.moves) - count} more")
        lines.append("tensors that lost most:")
        lines += [f"  {_decibel(r.sqnr):>8} {r.kind:<10} {r.tensor} ({_scale(r)})" for r in self.rows[:count]]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers."""
        return {
            "title": self.title,
            "facts": dict(self.facts),
            "tensors": [dataclasses.asdict(r) for r in self.rows],
            "moves": [dataclasses.asdict(m) for m in self.moves],
            "findings": [dataclasses.asdict(f) for f in self.findings],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, atomically."""
        files.write(path, json.dumps(self.to_dict(), indent=2))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file that needs nothing else, atomically."""
        files.write(path, _page(self))


def report_of(
    title: str,
    graph: Graph,
    plan: Plan,
    stats: Stats | None,
    facts: Mapping[str, str],
    moves: Sequence[Move] = (),
    findings: Sequence[Finding] = (),
) -> Report:
    """Return the report of a plan: what each tensor lost, as far as calibration measured it."""
    error = errors_of(graph, plan, stats)
    by_tensor: dict[str, list[str]] = {}
    for move in moves:
        by_tensor.setdefault(move.tensor, []).append(f"{move.rule}: 2^{-move.before} to 2^{-move.after}")
    rows = [_row(name, graph, plan, stats, _sqnr(error(name)), by_tensor.get(name, [])) for name in plan]
    rows.sort(key=lambda r: (r.sqnr is None, r.sqnr))
    return Report(title, dict(facts), tuple(rows), tuple(moves), tuple(findings))


def _row(name: str, graph: Graph, plan: Plan, stats: Stats | None, sqnr: float | None, moves: list[str]) -> Row:
    found, weight = plan[name], name in plan.weights
    node = graph.producer.get(name) or next(iter(graph.consumers.get(name, ())), None)
    low, high = None, None
    if weight and graph.params[name].size:
        low, high = float(np.min(graph.params[name])), float(np.max(graph.params[name]))
    elif stats is not None and name in stats.tensors:
        low, high = stats.range(name)
    integers = isinstance(found.grid, Integer) and not found.dynamic
    return Row(
        tensor=name,
        kind="weight" if weight else "activation",
        node=node.label if node else "",
        format=str(found.grid),
        scale=float(np.max(found.scale)) if integers else None,
        exponent=int(found.exponent) if integers and found.is_power_of_two else None,
        zero_point=int(np.max(found.zero_point)) if integers else None,
        low=low,
        high=high,
        sqnr=sqnr,
        moves=tuple(moves),
    )


def _sqnr(error: float | None) -> float | None:
    return None if error is None or error <= 0 else -10 * math.log10(error)


def _decibel(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"


def _scale(row: Row) -> str:
    if row.scale is None:
        return row.format
    return f"{row.format}, 2^{row.exponent}" if row.exponent is not None else f"{row.format}, {row.scale:.4g}"


# ---------------------------------------------------------------------------------------------
# HTML
# ---------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #8884; vertical-align: top; }
th button { all: unset; cursor: pointer; font-weight: 600; } td.n { text-align: right; white-space: nowrap; }
.bar { display: inline-block; height: .6rem; background: #4a90d9; border-radius: 2px; }
.error { color: #c33; } .warning { color: #b70; } .scroll { overflow-x: auto; }
"""
_SCRIPT = """
document.querySelectorAll("table.sortable").forEach(table => {
  table.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
    const down = button.dataset.down !== "1"; button.dataset.down = down ? "1" : "0";
    const key = row => { const v = row.cells[column].dataset.v; return v === "" ? null : isNaN(v) ? v : +v; };
    [...table.tBodies[0].rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (x === null || y === null) return (x === null) - (y === null);
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? 1 : -1);
    }).forEach(row => table.tBodies[0].append(row));
  }));
});
"""
_COLUMNS = ("tensor", "kind", "node", "format", "scale", "low", "high", "SQNR dB", "")


def _page(report: Report) -> str:
    facts = "".join(f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in report.facts.items())
    findings = "".join(
        f'<li class="{_text(f.severity)}">{_text(f.severity)}: {_text(f.where)}: {_text(f.message)}</li>'
        for f in report.findings
    )
    moves = "".join(f"<li>{_text(str(m))}</li>" for m in report.moves)
    heads = "".join(f"<th><button>{_text(c)}</button></th>" for c in _COLUMNS)
    rows = "".join(map(_html_row, report.rows))
    parts = [
        f"<h1>{_text(report.title)}</h1><table>{facts}</table>",
        f"<h2>Before quantizing</h2><ul>{findings}</ul>" if findings else "",
        f"<h2>Moved for the NPU</h2><ul>{moves}</ul>" if moves else "",
        f'<h2>Tensors</h2><div class="scroll"><table class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
    ]
    title, body = _text(report.title), "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>{body}<script>{_SCRIPT}</script></body></html>"
    )


def _html_row(row: Row) -> str:
    cells = [_cell(v) for v in (row.tensor, row.kind, row.node, row.format)]
    shown = "" if row.scale is None else f"2^{row.exponent}" if row.exponent is not None else f"{row.scale:.4g}"
    cells += [_cell(row.scale, shown), _cell(row.low), _cell(row.high), _cell(row.sqnr)]
    width = 0 if row.sqnr is None else max(0, min(60, row.sqnr))
    note = "<br>".join(map(_text, row.moves))
    cells.append(f'<td data-v="{width:.1f}"><span class="bar" style="width:{width * 2:.0f}px"></span> {note}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: str | float | None, shown: str | None = None) -> str:
    if value is None or isinstance(value, str):
        return f'<td data-v="{_text(value or "")}">{_text(value or "")}</td>'
    return f'<td class="n" data-v="{value!r}">{_text(f"{value:.4g}" if shown is None else shown)}</td>'


def _text(value: str) -> str:
    return html.escape(str(value), quote=True)
