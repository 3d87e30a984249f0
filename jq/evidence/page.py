"""A report as one HTML page that needs nothing else: no network, no library, readable from disk.

Tensor names are escaped everywhere. The page's policy allows its own style and script, by their hashes, pictures that are
in the page, and nothing that comes from elsewhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jq.evidence.drawing import DECIBELS, PLACES, SHARES, drawing, step_of_decibels, step_of_share
from jq.evidence.origins import PARTS
from jq.evidence.pictures import ChangedSample
from jq.evidence.plots import decibel, depth_lines, depth_plot
from jq.evidence.table import REASONS, LayerLine, lines_of, listed, tensor_table
from jq.evidence.verdict import OutputsVerdict
from jq.util.markup import table, text

if TYPE_CHECKING:
    from jq.evidence.report import Report, Section, TensorRow

_NAMES = 1000  # of unmatched tensors
_LAYERS = 20  # the worst, which a table names


def page(report: Report) -> str:
    """Return the report as an HTML page."""
    style, script = asset("report.css"), asset("report.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {hashed(style)}; script-src {hashed(script)}; base-uri 'none'; "
        "form-action 'none'"
    )
    rows = [(f"t{i}", row) for i, row in enumerate(report.rows)]
    lines = lines_of(report.layers, rows, report.attribution)
    body = [
        f"<header><h1>{text(report.title)}</h1>{_verdict(report.verdict)}{listed(report.facts.items())}</header><main>",
        _advice(report),
        _graph(lines),
        *_side_by_side(report),
        *_attributed(report),
        _changed(report.changed),
        *(_section(s) for s in report.sections),
        _overview(rows),
        _items("Before quantizing", [(f.severity, f"{f.severity}: {f.where}: {f.message}") for f in report.findings]),
        _items("Repaired by the guard", [("", str(mend)) for mend in report.guard]),
        _items("Moved for the NPU", [("", str(move)) for move in report.moves]),
        tensor_table(rows, lines) if rows or lines else "",
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


def _verdict(verdict: OutputsVerdict) -> str:
    """The figures of the outputs as tiles, and the sentences."""
    tiles = "".join(
        f'<div class="tile"><h2>{text(loss.name)}</h2><dl>'
        + "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in loss.figures().items())
        + "</dl></div>"
        for loss in verdict.outputs
    )
    where = f"<p>Against the float model, on {text(verdict.samples)}.</p>" if tiles else ""
    sentences = "".join(f"<p><strong>{text(s[:1].upper() + s[1:])}</strong></p>" for s in verdict.sentences)
    return (f'<div class="tiles">{tiles}</div>' if tiles else "") + where + sentences


def _advice(report: Report) -> str:
    items = "".join(f"<li>{text(words)}: <code>{text(command)}</code></li>" for words, command in report.advice)
    return f"<section><h2>What to do</h2><ul>{items}</ul></section>" if items else ""


# --- The graph ---


def _graph(lines: Sequence[LayerLine]) -> str:
    """The drawing of the layers, with what its colours may mean."""
    shares = any(line.share is not None for line in lines)
    steps = {line.layer.name: _step(line, shares) for line in lines}
    classes = {
        line.layer.name: (
            f"loss{steps[line.layer.name]}" if steps[line.layer.name] is not None else "unknown",
            (line.reason or "none").replace(" ", "-"),
            line.layer.place.replace("_", "-") or "nowhere",
        )
        for line in lines
    }
    picture = drawing([line.layer for line in lines], classes, {line.layer.name: _note(line) for line in lines})
    if not picture:
        return ""
    modes = {
        "loss": any(step is not None for step in steps.values()),
        "reason": any(line.reason for line in lines),
        "place": any(line.layer.place for line in lines),
    }
    named = {"loss": "loss", "reason": "reason", "place": "placement"}
    options = "".join(f'<option value="{mode}">{named[mode]}</option>' for mode, known in modes.items() if known)
    return (
        "<section><h2>The network</h2><p>A box is a layer, from the inputs on the left to the outputs on the right; a click "
        "opens it in the table below.</p>"
        f'<form class="zoom" aria-label="The drawing"><label>Colours <select id="colour">{options}</select></label> '
        '<button type="button" id="closer" class="tool">closer</button> '
        '<button type="button" id="farther" class="tool">farther</button> '
        '<button type="button" id="whole" class="tool">whole</button></form>'
        f'<div class="wide" id="canvas" tabindex="0" role="region" aria-label="Drawing of the network">{picture}</div>'
        f"{_legend(shares, lines, [mode for mode, known in modes.items() if known])}</section>"
    )


def _step(line: LayerLine, shares: bool) -> int | None:
    """The step of the colours of a layer: of its share where shares are known, else of its worst SQNR."""
    if shares:
        return None if line.share is None else step_of_share(line.share.effect)
    return None if line.sqnr is None else step_of_decibels(line.sqnr)


def _note(line: LayerLine) -> str:
    parts = [] if line.share is None else [f"{line.share.effect:.1%} of the outputs' error"]
    parts += [] if line.sqnr is None else [f"worst SQNR {decibel(line.sqnr)}"]
    parts += [f"{PLACES[line.layer.place]}: {line.layer.rule}"] if line.layer.place in PLACES else []
    return "; ".join(parts)


def _legend(shares: bool, lines: Sequence[LayerLine], modes: Sequence[str]) -> str:
    """The meaning of the colours, for each way to colour."""
    if shares:
        words = ["compensates for others", f"to {SHARES[1]:.0%}"] + [f"above {least:.0%}" for least in SHARES[1:]]
        steps, title = list(enumerate(words)), "share of the outputs' squared error"
    else:
        words = [f"{DECIBELS[0]:g} dB and more"] + [f"below {most:g}" for most in DECIBELS]
        steps, title = list(enumerate(words, 1)), "worst SQNR of a layer's tensors"
    kinds = {
        "loss": (title, [(f"loss{i}", word) for i, word in steps]),
        "reason": ("reason", [(r.replace(" ", "-"), r) for r in REASONS if any(line.reason == r for line in lines)]),
        "place": ("placement", [(p.replace("_", "-"), w) for p, w in PLACES.items()]),
    }
    made = []
    for mode in modes:
        caption, entries = kinds[mode]
        items = "".join(f'<li><i class="swatch {c}"></i>{text(w)}</li>' for c, w in entries)
        hidden = "" if mode == modes[0] else " hidden"
        made.append(f'<div class="key" data-mode="{mode}"{hidden}><p>{text(caption)}</p><ul>{items}</ul></div>')
    return "".join(made)


# --- Several models ---


def _side_by_side(report: Report) -> Iterator[str]:
    """Yield the sections that show several quantized models of one float model beside each other."""
    reports = (report, *report.beside)
    if len(reports) < 2:
        return
    names = [r.subject for r in reports]
    figures: dict[tuple[str, str], list[str]] = {}
    for i, one in enumerate(reports):
        for loss in one.verdict.outputs:
            for figure, value in loss.figures().items():
                figures.setdefault((loss.name, figure), [""] * len(reports))[i] = value
    rows = [(f"{output}: {figure}", *values) for (output, figure), values in figures.items()]
    yield (
        '<section><h2>Side by side</h2><div class="wide" tabindex="0" role="region" aria-label="Outputs side by side">'
        f"{table(('output', *names), rows)}</div>"
        f'<div class="wide" tabindex="0" role="region" aria-label="SQNR side by side">{depth_lines(_series(reports))}</div>'
        "</section>"
    )
    shares = [{} if r.attribution is None else {s.name: s.effect for s in r.attribution.layers} for r in reports]
    ranked = sorted({n for s in shares for n in s}, key=lambda n: -max(s.get(n, 0.0) for s in shares))
    if ranked:
        cells = [(n, *(f"{s[n]:.1%}" if n in s else "" for s in shares)) for n in ranked[:_LAYERS]]
        yield _scrolled("Layers by their share of the outputs' error, side by side", ("layer", *names), cells)


def _series(reports: Sequence[Report]) -> list[tuple[str, list[tuple[int, float]]]]:
    """The SQNR of each model's activations along the depth."""
    return [
        (
            r.subject,
            sorted(
                (row.depth, row.sqnr)
                for row in r.rows
                if row.kind == "activation" and row.depth is not None and row.sqnr is not None
            ),
        )
        for r in reports
    ]


# --- Sections ---


def _attributed(report: Report) -> Iterator[str]:
    """Yield the sections that say which blocks and layers make the outputs' error."""
    if report.attribution is None:
        return
    lines = listed(PARTS.items()).replace("<dl>", '<dl class="legend">', 1)
    made = report.attribution
    for title, shares in (("Blocks", made.blocks), ("Layers", made.layers)):
        rows = [
            (s.name, s.op, f"{s.effect:.1%}", *(f"{s.effects[part]:.1%}" for part in PARTS)) for s in shares[:_LAYERS]
        ]
        columns = (title.lower()[:-1], "operator", "of the outputs' error", *PARTS)
        more = f"The worst {_LAYERS} of {len(shares)}. " if len(shares) > _LAYERS else ""
        words = f"<p>{more}A share below zero compensates for what others add.</p>{lines if title == 'Blocks' else ''}"
        yield _folded(f"{title} by their share of the outputs' error", words + _region(title, table(columns, rows)))


def _changed(samples: Sequence[ChangedSample]) -> str:
    """The samples whose class is another one."""
    if not samples:
        return ""
    cards = "".join(
        f"<li>{_image(s)}<span>{text(s.name or f'sample {s.place}')}</span><span>class {s.before} became {s.after}</span>"
        + (
            f'<span class="{text(s.kind.split()[0])}">{text(s.kind)}, right: {s.right}</span>'
            if s.right is not None
            else ""
        )
        + "</li>"
        for s in samples
    )
    return f'<section><h2>Samples that changed class</h2><ul class="samples">{cards}</ul></section>'


def _image(sample: ChangedSample) -> str:
    if not sample.picture:
        return ""
    words = f"{sample.name or f'sample {sample.place}'}, as the model is fed"
    return f'<img alt="{text(words)}" src="data:image/png;base64,{sample.picture}">'


def _section(section: Section) -> str:
    plain = re.sub("<style>.*?</style>", "", section.picture)  # the page has its own, and its policy refuses others
    picture = _region(f"{section.title}, picture", plain) if plain else ""
    return (
        f"<section><h2>{text(section.title)}</h2>{picture}"
        f"{_region(section.title, table(section.columns, section.rows)) if section.rows else ''}</section>"
    )


def _scrolled(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<section><h2>{text(title)}</h2>{_region(title, table(columns, rows))}</section>"


def _region(name: str, content: str) -> str:
    """Content that may be wider than the screen, such that a keyboard can scroll it."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{text(name)}">{content}</div>'


def _folded(title: str, content: str) -> str:
    return f"<section><details><summary><h2>{text(title)}</h2></summary>{content}</details></section>"


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
        f"{_region('Plot along the network', plot)}{f'<dl class=legend>{legend}</dl>' if legend else ''}</section>"
    )


def _items(title: str, items: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f'<li class="{text(kind)}">{text(words)}</li>' for kind, words in items)
    return _folded(title, f"<ul>{rows}</ul>") if rows else ""


def _unmatched(model: str, names: tuple[str, ...]) -> str:
    more = [f"and {len(names) - _NAMES:,} more"] if len(names) > _NAMES else []
    return _items(f"Only in the {model} model: {len(names):,} tensors", [("", n) for n in (*names[:_NAMES], *more)])


@functools.cache
def asset(name: str) -> str:
    """The text of a page's own style or script."""
    return (importlib.resources.files("jq.evidence") / "assets" / name).read_text("utf-8")


def hashed(source: str) -> str:
    """A style or script as a page's policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
