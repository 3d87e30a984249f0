"""A forecast as one HTML page: the graph in the colours of the places, what breaks it, what to change, every node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jq.evidence.page import asset, hashed
from jq.util.markup import table, text

if TYPE_CHECKING:
    from jq.npu.forecasting import Forecast
    from jq.npu.placing import UnitPlace

_STEP, _LANE, _SIDE, _MARGIN = 22, 22, 14, 12  # of the drawing, in pixels
_COLUMNS, _NAMED = 50, 5
_PLACES = {"npu": "on the NPU", "cpu": "on the CPU", "vitis_ep_cpu": "on the CPU, in the provider"}


def places_page(forecast: Forecast) -> str:
    """Return a forecast as an HTML page, which needs no network."""
    style = asset("report.css") + asset("places.css")
    policy = f"default-src 'none'; style-src {hashed(style)}; base-uri 'none'; form-action 'none'"
    lines = list(forecast.lines())
    shares = "".join(
        f'<div><dt><i class="dot {text(p.replace("_", "-"))}"></i>{text(_PLACES[p])}</dt><dd>{count:,} nodes</dd></div>'
        for p, count in forecast.counts.items()
    )
    body = [
        f"<header><h1>{text(lines[0])}</h1><dl>{shares}<div><dt>subgraphs</dt><dd>{forecast.subgraphs}</dd></div></dl>"
        "</header><main>",
        "<section><h2>The graph</h2><p>A square is what computes between two quantizers; it reads like text.</p>"
        f'<div class="wide">{graph_drawing(forecast.units)}</div></section>',
        _section(
            "What breaks it",
            ("rule", "how sure", "nodes", "operators", "where", "source"),
            (
                (
                    rule.says,
                    rule.evidence,
                    sum(len(b.nodes) for b in breaks),
                    _each(op for b in breaks for op in b.ops),
                    _each(b.node for b in breaks),
                    rule.source,
                )
                for rule, breaks in forecast.broken.items()
            ),
        ),
        _section(
            "What to change",
            ("change", "how sure", "NPU", "CPU", "provider", "subgraphs"),
            ((a.what, a.evidence, *(a.counts[p] for p in _PLACES), a.subgraphs) for a in forecast.advice),
        ),
        _section(
            "Nodes",
            ("node", "operator", "place", "rule", "subgraph"),
            (
                (name, p.op, _PLACES[p.place], p.rule, "" if p.subgraph is None else p.subgraph)
                for name, p in forecast.nodes.items()
            ),
        ),
        *(f"<p>{text(note)}</p>" for note in forecast.notes),
        "</main>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(lines[0])}</title><style>{style}</style></head><body>{''.join(body)}</body></html>"
    )


def graph_drawing(units: Sequence[UnitPlace]) -> str:
    """A square for each unit in the colour of its place, in the column of its depth, and a line for each tensor.

    >>> graph_drawing(())
    ''
    """
    if not units:
        return ""
    depths: list[int] = []
    lanes: Counter[int] = Counter()
    cells: list[tuple[int, int]] = []  # depth, and lane among those of the same depth
    for unit in units:
        depths.append(max((depths[s] + 1 for s in unit.sources if s < len(depths)), default=0))
        cells.append((depths[-1], lanes[depths[-1]]))
        lanes[depths[-1]] += 1
    tops = [_MARGIN]  # of lines of the drawing, which is folded like text
    for first in range(0, max(depths) + 1, _COLUMNS):
        tops.append(tops[-1] + _LANE * (max(lanes[d] for d in range(first, first + _COLUMNS)) + 1))
    at = [(_MARGIN + depth % _COLUMNS * _STEP, tops[depth // _COLUMNS] + lane * _LANE) for depth, lane in cells]
    half = _SIDE // 2
    lines = [
        f'<path class="edge" d="M{at[s][0] + half} {at[s][1] + half}L{x + half} {y + half}"/>'
        for number, (unit, (x, y)) in enumerate(zip(units, at, strict=True))
        for s in unit.sources
        if s < len(at) and depths[s] // _COLUMNS == depths[number] // _COLUMNS
    ]
    squares = [
        f'<rect class="unit {text(unit.place)}" x="{x}" y="{y}" width="{_SIDE}" height="{_SIDE}" rx="3">'
        f"<title>{text(unit.name)}: {text(', '.join(unit.ops))}: {text(unit.rule)}</title></rect>"
        for unit, (x, y) in zip(units, at, strict=True)
    ]
    width, height = 2 * _MARGIN + min(max(depths) + 1, _COLUMNS) * _STEP, tops[-1]
    return (
        f'<svg class="graph" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="The graph by place">{"".join(lines)}{"".join(squares)}</svg>'
    )


def _each(words: Iterable[str]) -> str:
    """Each of some words once, and no more than a line of them."""
    each = list(dict.fromkeys(words))
    return ", ".join(each[:_NAMED]) + (f" and {len(each) - _NAMED} more" if len(each) > _NAMED else "")


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    rows = list(rows)
    content = f'<div class="wide">{table(columns, rows)}</div>'
    return (
        f'<section class="list"><details open><summary><h2>{text(title)}</h2></summary>{content}</details></section>'
        if rows
        else ""
    )
