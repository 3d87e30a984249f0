"""The table of a page: a line for each layer, which unfolds to its tensors, each of which unfolds to its pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jq.evidence.drawing import PLACES
from jq.evidence.layers import NetworkLayer
from jq.evidence.origins import Attribution, LayerShare
from jq.evidence.plots import decibel, histogram, ranges
from jq.util.markup import text

if TYPE_CHECKING:
    from jq.evidence.report import TensorRow

REASONS = {
    "bias": "the means of channels are shifted; correct the bias",
    "upstream": "the error comes from the inputs; less than a hundredth of it is added here",
    "weights": "the rounding and tuning of the weights add most here",
    "form": "the NPU's form of the operator adds most here",
    "changed": "a tool corrected or finetuned the weight itself",
    "constraint": "another exponent would be better, but the NPU's position constraints do not allow it",
    "range": "values beyond the codes are clipped",
    "rounding": "the step is coarse for these values",
    "not finite": "NaN or Inf, so there are no figures",
}
_BAR = 60.0  # dB of a full bar


@dataclasses.dataclass(frozen=True)
class LayerLine:
    """A layer with its tensors, worst first, and its share of the outputs' error where that is known."""

    layer: NetworkLayer
    rows: tuple[tuple[str, TensorRow], ...]  # with their anchors
    share: LayerShare | None = None

    @property
    def sqnr(self) -> float | None:
        """The least SQNR of the tensors that it makes; changed weights are no loss."""
        known = [row.sqnr for _, row in self.rows if row.sqnr is not None and row.reason != "changed"]
        return min(known, default=None)

    @property
    def reason(self) -> str:
        """Why it loses: by what it does to the outputs or, where that is not known, by its worst tensor."""
        if self.share is not None and self.share.effect > 0:
            return self.share.cause
        return self.rows[0][1].reason if self.rows else ""


def lines_of(
    layers: Sequence[NetworkLayer], rows: Sequence[tuple[str, TensorRow]], attribution: Attribution | None
) -> list[LayerLine]:
    """Return each layer with the rows of its nodes' tensors; a row of no layer is left out."""
    by_node = {node: i for i, layer in enumerate(layers) for node in layer.nodes}
    by_name = {layer.name: i for i, layer in enumerate(layers) if not layer.nodes}
    groups: dict[int, list[tuple[str, TensorRow]]] = {}
    for anchor, row in rows:
        number = by_name.get(row.tensor, by_node.get(row.node))
        if number is not None:
            groups.setdefault(number, []).append((anchor, row))
    shares = {} if attribution is None else {share.name: share for share in attribution.layers}
    return [LayerLine(layer, tuple(groups.get(i, ())), shares.get(layer.name)) for i, layer in enumerate(layers)]


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column: what it sorts tensors and layers by, and how that is shown."""

    title: str
    value: Callable[[TensorRow], Any]
    shown: Callable[[Any], str] | None = None
    help: str = ""
    whole: Callable[[LayerLine], Any] = lambda line: None

    def used(self, rows: Sequence[TensorRow], lines: Sequence[LayerLine]) -> bool:
        """Whether anything has a value here."""
        values = (*map(self.value, rows), *map(self.whole, lines))
        return any(value not in (None, "") for value in values)


def tensor_table(rows: Sequence[tuple[str, TensorRow]], lines: Sequence[LayerLine]) -> str:
    """Return the section with the table; without layers, of the tensors alone."""
    columns = [c for c in _COLUMNS if c.used([row for _, row in rows], lines)]
    heads = "".join(
        f'<th scope="col" aria-sort="none" title="{text(c.help)}"><button type="button">{text(c.title)}</button></th>'
        for c in columns
    )
    kinds = {row.kind for _, row in rows} | {row.reason for _, row in rows}
    choices = "".join(f"<option>{text(c)}</option>" for c in ("activation", "weight", *REASONS) if c in kinds)
    placed = {anchor for line in lines for anchor, _ in line.rows}
    views = '<option value="layers">layers</option>' if placed else ""
    groups = [
        _layer(columns, number, line) + "".join(_tensor(columns, anchor, row, number) for anchor, row in line.rows)
        for number, line in enumerate(lines)
    ]
    alone = (_tensor(columns, anchor, row, None) for anchor, row in rows if anchor not in placed)
    return (
        '<section><h2>Layers and their tensors</h2><form role="search" aria-label="Rows of the table">'
        '<label>Filter <input type="search" id="filter"></label> '
        f'<label>Show <select id="kind"><option value="">all</option>{choices}</select></label> '
        f'<label>Rows <select id="view">{views}<option value="tensors">tensors</option></select></label> '
        f'<output id="count" aria-live="polite">{len(rows):,} tensors</output></form>'
        '<div class="wide" tabindex="0" role="region" aria-label="Table of layers and tensors">'
        f'<table id="tensors"><thead><tr>{heads}</tr></thead>{"".join(groups)}{"".join(alone)}</table></div></section>'
    )


def _layer(columns: Sequence[_Column], number: int, line: LayerLine) -> str:
    """A layer's line, with a button if it has tensors to show."""
    cells = "".join(_cell(c, c.whole(line)) for c in columns[1:])
    controls = " ".join(anchor for anchor, _ in line.rows)
    name = text(line.layer.name)
    button = (
        f'<button type="button" aria-expanded="false" aria-controls="{controls}">{name}</button>' if controls else name
    )
    return f'<tbody id="l{number}" class="layer"><tr><th scope="row" data-v="{name}">{button}</th>{cells}</tr></tbody>'


def _tensor(columns: Sequence[_Column], anchor: str, row: TensorRow, layer: int | None) -> str:
    """A tensor's line and what it opens; they are one body of the table, so that sorting keeps them together."""
    cells = "".join(_cell(c, c.value(row)) for c in columns[1:])
    inside = "" if layer is None else f' data-layer="l{layer}" hidden'
    return (
        f'<tbody id="{anchor}" class="tensor" data-kind="{text(row.kind)}" data-reason="{text(row.reason)}"{inside}><tr>'
        f'<th scope="row" data-v="{text(row.tensor)}">'
        f'<button type="button" aria-expanded="false" aria-controls="{anchor}d">{text(row.tensor)}</button></th>{cells}</tr>'
        f'<tr id="{anchor}d" class="more" hidden><td colspan="{len(columns)}">{_details(row)}</td></tr></tbody>'
    )


def _cell(column: _Column, value: Any) -> str:
    if value is None or value == "":
        return '<td data-v=""></td>'
    shown = column.shown(value) if column.shown else text(value if isinstance(value, str) else f"{value:.4g}")
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
    return f'{listed(f for f in facts if f[1] not in (None, ""))}<div class="figures">{figures}</div>'


def listed(facts: Iterable[tuple[str, Any]]) -> str:
    """Return pairs of a name and a value as a list of definitions."""
    return f"<dl>{''.join(f'<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>' for k, v in facts)}</dl>"


def dotted(reason: str) -> str:
    """Return a reason behind a dot in its colour."""
    return f'<i class="dot {text(reason.replace(" ", "-"))}"></i>{text(reason)}'


def _interval(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{low:.5g} to {high:.5g}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%} of the squared error"


def _step(scale: float) -> str:
    mantissa, exponent = math.frexp(scale)
    return f"2<sup>{exponent - 1}</sup>" if mantissa == 0.5 else f"{scale:.4g}"


def _bar(sqnr: float) -> str:
    width = max(0.0, min(1.0, sqnr / _BAR)) * 48
    bar = f'<svg class="bar" viewBox="0 0 48 8" aria-hidden="true"><rect width="{width:.1f}" height="8" rx="2"/></svg>'
    return f"{bar}{decibel(sqnr, unit='')}"


def _decibels(value: float) -> str:
    return decibel(value, unit="")


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _of_error(name: str) -> Callable[[TensorRow], Any]:
    return lambda row: None if row.error is None else getattr(row.error, name)


# SQNR stands right beside the name, so that a narrow screen shows it.
_COLUMNS = (
    _Column("name", lambda r: r.tensor),
    _Column("SQNR dB", lambda r: r.sqnr, _bar, "signal to quantization noise; for a layer, of its worst tensor", lambda g: g.sqnr),
    _Column("effect", lambda r: None if r.origin is None else r.origin.effect, _percent,
            "share of the outputs' squared error; below zero, it compensates for others",
            lambda g: None if g.share is None else g.share.effect),
    _Column("reason", lambda r: r.reason or None, dotted, "for a layer, what adds most to the outputs' error", lambda g: g.reason),
    _Column("kind", lambda r: r.kind, help="for a layer, its operator", whole=lambda g: g.layer.op),
    _Column("runs", lambda r: None, help="according to jq's rules for the compiler; `jq-quant npu` gives the reason",
            whole=lambda g: PLACES.get(g.layer.place)),
    _Column("block", lambda r: None, help="a part of the network with one tensor in and one out", whole=lambda g: g.layer.block),
    _Column("format", lambda r: r.format),
    _Column("scale", lambda r: r.scale, _step, "the size of one step; the largest if there are several"),
    _Column("own dB", _of_error("made"), _decibels, "SQNR of its own rounding"),
    _Column("came in", lambda r: None if r.origin is None else r.origin.upstream, _percent, "share of the squared error"),
    _Column("cosine", _of_error("cosine"), lambda v: f"{v:.5f}"),
    _Column("PSNR dB", _of_error("psnr"), _decibels),
    _Column("L2", _of_error("l2"), help="norm of the error, averaged over samples"),
    _Column("max error", _of_error("largest")),
    _Column("clipped", _of_error("saturated"), lambda v: f"{v:.2%}", "share of the values"),
    _Column("depth", lambda r: r.depth, help="place in the order of the graph",
            whole=lambda g: min((r.depth for _, r in g.rows if r.depth is not None), default=None)),
)  # fmt: skip
