"""Pictures of a report as inline SVG: small, without a library, in the colours that the page's style gives its classes.

Coordinates are those of a `viewBox`; a path of straight lines stands for what would be many elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from jq.util.markup import text

if TYPE_CHECKING:
    from jq.evidence.report import TensorRow

Place = Callable[[float], float]


def decibel(value: float | None, unit: str = " dB") -> str:
    """Return a ratio as text.

    >>> decibel(41.26), decibel(float("inf")), decibel(None)
    ('41.3 dB', 'exact', '')
    """
    return "" if value is None else "exact" if value == math.inf else f"{value:.1f}{unit}"


_WIDTH, _HEIGHT = 440, 190  # of the pictures of one tensor
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 20, 40  # margins
_COLUMNS = 128  # of ranges, at most: channels share them
_LINES = 48  # of a grid, at most


def depth_plot(rows: Sequence[tuple[str, TensorRow]]) -> str:
    """SQNR along the depth of the network, a point for each row with its anchor; "" if there is nothing to show.

    >>> depth_plot([])
    ''
    """
    shown = [
        (anchor, row, row.depth, row.sqnr)
        for anchor, row in rows
        if row.depth is not None and row.sqnr is not None and row.reason != "changed"  # which is no loss
    ]
    if len(shown) < 2:
        return ""
    width, height, left, bottom, top = 1120, 270, 48, 44, 12
    finite = [s for _, r, _, s in shown if r.sqnr != math.inf]
    low, high = min([0.0, *finite]), max([20.0, *finite])
    depths = [d for _, _, d, _ in shown]
    first, last = min(depths), max(depths)

    def at(depth: float, sqnr: float) -> tuple[float, float]:
        x = left + (width - left - 16) * (depth - first) / max(1, last - first)
        return x, top + (height - top - bottom) * (1 - (min(sqnr, high) - low) / (high - low))

    parts = [_gridline(left, width, at(first, tick)[1], f"{tick:g}") for tick in _nice(low, high, 5)]
    parts += _ticks(_nice(first, last, 10), lambda depth: at(depth, low)[0], height - bottom)
    activations = sorted((d, s) for _, r, d, s in shown if r.kind == "activation")
    if activations:
        parts.append(f'<path class="line" d="{_polyline(at(d, s) for d, s in activations)}"/>')
    for anchor, row, depth, sqnr in sorted(shown, key=lambda s: s[1].kind != "weight"):
        (x, y), reason = at(depth, sqnr), row.reason.replace(" ", "-") or "none"
        shape = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
            if row.kind == "activation"
            else f'<path d="M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4-4z"/>'
        )
        title = f"{row.tensor}: {decibel(sqnr)}"
        title += f", {row.reason}" if row.reason else ""
        parts.append(
            f'<a href="#{text(anchor)}" class="point {text(row.kind)} {text(reason)}" tabindex="-1">'
            f"<title>{text(title)}</title>{shape}</a>"
        )
    parts.append(_axis_names(left, width, top, height, "SQNR, dB", "place of the node in the order of the network"))
    # A group, as an image may hold no links.
    return _svg(width, height, "SQNR of each tensor along the depth of the network, in dB", parts, role="group")


_HUES = 6  # lines that have a colour of their own


def depth_lines(series: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> str:
    """SQNR along the depth of the network, a line for each model with its name; "" if there is nothing to show.

    >>> depth_lines([("one", [(0, 10.0)])])
    ''
    """
    shown = [(name, [(d, s) for d, s in points if math.isfinite(s)]) for name, points in series]
    every = [point for _, points in shown for point in points]
    if len(every) < 2:
        return ""
    width, height, left, bottom, top = 1120, 290, 48, 44, 24 + 16 * len(shown)
    (first, last), (low, high) = ((f(v) for f in (min, max)) for v in zip(*every, strict=True))
    low, high = min(0.0, low), max(20.0, high)

    def at(depth: float, sqnr: float) -> tuple[float, float]:
        x = left + (width - left - 16) * (depth - first) / max(1, last - first)
        return x, top + (height - top - bottom) * (1 - (sqnr - low) / (high - low))

    parts = [_gridline(left, width, at(first, tick)[1], f"{tick:g}") for tick in _nice(low, high, 5)]
    parts += _ticks(_nice(first, last, 10), lambda depth: at(depth, low)[0], height - bottom)
    for i, (name, points) in enumerate(shown):
        hue = f"hue{i % _HUES}"
        if points:
            parts.append(f'<path class="curve {hue}" d="{_polyline(at(d, s) for d, s in points)}"/>')
        parts.append(f'<path class="curve {hue}" d="M{left} {10 + 16 * i}h24"/>' + _label(left + 30, 14 + 16 * i, name))
    parts.append(_axis_names(left, width, top, height, "SQNR, dB", "place of the node in the order of the network"))
    return _svg(width, height, "SQNR of the activations of each model along the depth, in dB", parts)


def histogram(row: TensorRow) -> str:
    """The values of a float tensor, and the grid that they are rounded to; counts are on a logarithmic axis."""
    values = row.values
    if values is None:
        return ""
    low, high = values.low, values.high
    if row.bounds is not None:
        low, high = min(low, row.bounds[0]), max(high, row.bounds[1])
    place = _axis(low, high)
    floor = _HEIGHT - _BOTTOM
    largest = math.log1p(max(values.counts))
    bins = len(values.counts)
    edges = [place(values.low + (values.high - values.low) * i / bins) for i in range(bins + 1)]
    bars = []
    for count, start, end in zip(values.counts, edges, edges[1:], strict=False):
        if count:
            tall = (floor - _TOP) * math.log1p(count) / largest
            bars.append(f"M{start:.1f} {floor}v{-tall:.1f}h{end - start:.2f}V{floor}z")
    powers = [10**k for k in range(math.floor(math.log10(max(values.counts))) + 1)]
    parts = [
        _gridline(_LEFT, _WIDTH, floor - (floor - _TOP) * math.log1p(count) / largest, abbreviated(count))
        for count in powers
    ]
    parts.append(f'<path class="bars" d="{"".join(bars)}"/>')
    if row.bounds is not None:
        ends = [place(b) for b in row.bounds]
        parts += [
            f'<rect class="beyond" x="{start:.1f}" y="{_TOP}" width="{end - start:.1f}" height="{floor - _TOP}"/>'
            for start, end in ((place(low), ends[0]), (ends[1], place(high)))
            if end > start
        ]
        parts.append(f'<path class="bound" d="{"".join(f"M{x:.1f} {_TOP}V{floor}" for x in ends)}"/>')
        parts.append(_codes(row, place))
    parts += _ticks(_nice(low, high, 5), place, floor)
    parts.append(_axis_names(_LEFT, _WIDTH, _TOP, _HEIGHT, "values, logarithmic", "value"))
    grid = "" if row.bounds is None else f", and the bounds {row.bounds[0]:.4g} to {row.bounds[1]:.4g} of its codes"
    return _svg(_WIDTH, _HEIGHT, f"Histogram of the float values, on a logarithmic axis{grid}", parts)


def _codes(row: TensorRow, place: Place) -> str:
    """The grid over the histogram: lines at what the codes stand for, or at every n-th of them."""
    if row.bounds is None or row.scale is None:
        return ""
    low, high = row.bounds
    codes, floor = round((high - low) / row.scale), _HEIGHT - _BOTTOM + 5
    every = 2 ** max(0, math.ceil(math.log2(max(1, codes) / _LINES)))
    marks = "".join(f"M{place(low + i * row.scale):.1f} {_TOP}V{floor}" for i in range(0, codes + 1, every))
    step = f"2^{row.exponent}" if row.exponent is not None else f"{row.scale:.4g}"
    caption = f"step {step}, a line for " + ("each code" if every == 1 else f"every {every} codes")
    return f'<path class="codes" d="{marks}"/>' + _label(_WIDTH - _RIGHT, _TOP - 8, caption, "end")


def ranges(row: TensorRow) -> str:
    """The range of each output channel of a weight, beside the bounds of its codes; neighbours share a column."""
    if not row.channels:
        return ""
    count = math.ceil(len(row.channels) / math.ceil(len(row.channels) / _COLUMNS))
    each = math.ceil(len(row.channels) / count)
    columns = [row.channels[i : i + each] for i in range(0, len(row.channels), each)]
    spans = [(min(low for low, _ in c), max(high for _, high in c)) for c in columns]
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    if row.bounds is not None:
        low, high = min(low, row.bounds[0]), max(high, row.bounds[1])
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    floor, room = _HEIGHT - _BOTTOM, (high - low) or 1.0

    def at(value: float) -> float:
        return _TOP + (floor - _TOP) * (1 - (value - low) / room)

    wide = (_WIDTH - _LEFT - _RIGHT) / len(spans)
    bars = "".join(
        f"M{_LEFT + wide * i:.1f} {at(top):.1f}h{wide * 0.8:.2f}v{max(0.5, at(bottom) - at(top)):.1f}h{-wide * 0.8:.2f}z"
        for i, (bottom, top) in enumerate(spans)
    )
    parts = [_gridline(_LEFT, _WIDTH, at(t), f"{t:g}") for t in _nice(low, high, 4)]
    parts.append(_label(2, _TOP - 8, "value"))
    parts.append(f'<path class="bars" d="{bars}"/>')
    if row.bounds is not None:
        lines = "".join(f"M{_LEFT} {at(b):.1f}H{_WIDTH - _RIGHT}" for b in row.bounds)
        parts.append(f'<path class="bound" d="{lines}"/>')
    shared = "" if each == 1 else f", {each} to a column"
    numbers = [n for n in _nice(0, len(row.channels) - 1, 6) if n == int(n)]
    parts += _ticks(numbers, lambda channel: _LEFT + wide * (channel / each + 0.4), floor)
    parts.append(_label((_LEFT + _WIDTH) / 2, _HEIGHT - 6, f"{len(row.channels)} output channels{shared}", "middle"))
    return _svg(_WIDTH, _HEIGHT, "Range of each output channel", parts)


_STYLE = (  # of pictures that stand by themselves
    "<style>text{font:12px sans-serif;fill:#333}.rule{stroke:#ddd}.bars{fill:#4878a8}.guess{fill:#b8cce0}"
    ".spread{stroke:#222;fill:none}.mean,.line{stroke:#c05020;fill:none;stroke-width:2}circle{fill:#4878a8;opacity:.7}</style>"
)


def dots(name: str, series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """A row for each series, with a dot for each of its numbers and a line at their mean; it carries its own style.

    >>> dots("SQNR, dB", [])
    ''
    """
    shown = [(label, [v for v in values if math.isfinite(v)]) for label, values in series]
    everything = [v for _, values in shown for v in values]
    if not everything:
        return ""
    left, right, each, top = 16 + 7 * min(60, max(len(label) for label, _ in shown)), 24, 22, 12
    width, height = left + 520 + right, top + each * len(shown) + 40
    low, high = min(everything), max(everything)
    room = (high - low) or abs(high) or 1.0
    low, high = low - room / 20, high + room / 20
    at, floor = _axis(low, high, left, width - right), height - 40
    parts = _rules(_nice(low, high, 6), at, top, floor, floor + 16)
    for i, (label, values) in enumerate(shown):
        y = top + each * (i + 0.5)
        parts.append(_label(left - 8, y + 4, label if len(label) <= 60 else f"{label[:59]}…", "end"))
        parts += [f'<circle cx="{at(v):.1f}" cy="{y:.1f}" r="4"/>' for v in values]
        if values:
            parts.append(f'<path class="mean" d="M{at(math.fsum(values) / len(values)):.1f} {y - 7:.1f}v14"/>')
    parts.append(_label((left + width - right) / 2, height - 6, name, "middle"))
    return _picture(width, height, name, parts).replace(" viewBox", f' width="{width}" viewBox', 1)


def before_after_plot(title: str, rows: Sequence[tuple[str, float, float]]) -> str:
    """A line for each name from its value before (a ring) to that after (a dot), all above 0, on a logarithmic axis.

    >>> before_after_plot("spread", [("conv", 10.0, 2.0)]).count("<circle")
    2
    """
    width, height = 860, _TOP + _ROW * len(rows) + _BOTTOM
    every = [math.log10(value) for _, *values in rows for value in values]
    low, high = math.floor(min(every)), max(math.ceil(max(every)), math.floor(min(every)) + 1)
    at = _axis(low, high, _NAMES, width - 20)
    floor = height - _BOTTOM
    parts = [
        f'<path class="rule" d="M{at(k):.1f} {_TOP}V{floor}"/>' + _label(at(k), floor + 15, f"{10.0**k:g}", "middle")
        for k in range(low, high + 1)
    ]
    for i, (name, before, after) in enumerate(rows):
        y, ends = _TOP + _ROW * i + 9, [at(math.log10(value)) for value in (before, after)]
        parts.append(_label(_NAMES - 8, y + 4, name if len(name) < 40 else f"...{name[-36:]}", "end"))
        parts.append(f'<path class="line" d="M{ends[0]:.1f} {y}H{ends[1]:.1f}"/>')
        parts.append(
            f'<circle class="ring" cx="{ends[0]:.1f}" cy="{y}" r="4"/><circle class="bars" cx="{ends[1]:.1f}" cy="{y}" r="4"/>'
        )
    parts.append(
        _label(_NAMES, 12, "ring: before, dot: after") + _label((_NAMES + width) / 2, height - 6, title, "middle")
    )
    return _svg(width, height, title, parts)


_ROW, _NAMES = 18, 260  # height of a bar, and room for its name


def ranking_plot(title: str, unit: str, bars: Sequence[tuple[str, float, float, bool]]) -> str:
    """A bar for each name with its value, the spread around it, and whether it was measured (dark) or estimated.

    >>> ranking_plot("losses", "kl", [("conv", 0.5, 0.1, True)]).startswith("<svg")
    True
    """
    width, height = 860, _TOP + _ROW * len(bars) + _BOTTOM
    low = min([0.0, *(v - e for _, v, e, _ in bars)])
    high = max([v + e for _, v, e, _ in bars], default=0.0)
    at = _axis(low, high, _NAMES, width - 20)
    parts = _rules(_nice(low, high, 5), at, _TOP, height - _BOTTOM, height - 8)
    for i, (name, value, spread, measured) in enumerate(bars):
        y, ends = _TOP + _ROW * i, sorted((at(0.0), at(value)))
        parts.append(_label(_NAMES - 8, y + 13, name if len(name) < 40 else f"...{name[-36:]}", "end"))
        parts.append(
            f'<rect class="{"bars" if measured else "guess"}" x="{ends[0]:.1f}" y="{y + 3}" '
            f'width="{ends[1] - ends[0]:.1f}" height="{_ROW - 6}"><title>{text(f"{name}: {value:.4g} {unit}")}</title></rect>'
        )
        if spread:
            parts.append(f'<path class="spread" d="M{at(value - spread):.1f} {y + 9}H{at(value + spread):.1f}"/>')
    return _picture(width, height, title, parts)


def front_plot(
    title: str,
    horizontal: str,
    vertical: str,
    front: Sequence[tuple[float, float]],
    marks: Sequence[tuple[str, float, float]],
) -> str:
    """A front of points from left to right, and points with names.

    >>> front_plot("kl", "bits", "loss", [(1, 2), (2, 1)], [("chosen", 1.5, 1.4)]).count("<circle")
    3
    """
    width, height, left, bottom = 640, 320, 70, 40
    xs, ys = [p[0] for p in front] + [m[1] for m in marks], [p[1] for p in front] + [m[2] for m in marks]
    across, up = max(xs) - min(xs) or 1.0, max([0.0, *ys]) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (width - left - 60) * (x - min(xs)) / across, _TOP + (height - _TOP - bottom) * (1 - y / up)

    parts = [_gridline(left, width, at(min(xs), t)[1], f"{t:g}") for t in _nice(0, up, 5)]
    parts += [_label(at(t, 0)[0], height - 22, f"{t:g}", "middle") for t in _nice(min(xs), max(xs), 6)]
    parts.append(f'<path class="line" d="{_polyline(at(*p) for p in front)}"/>')
    for x, y in (at(*p) for p in front):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    for name, x, y in ((m[0], *at(*m[1:])) for m in marks):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>' + _label(x + 8, y - 6, name))
    parts.append(_label((left + width) / 2, height - 6, horizontal, "middle") + _label(6, 14, vertical))
    return _picture(width, height, title, parts)


# --- Parts ---


def _axis(low: float, high: float, start: float = _LEFT, end: float = _WIDTH - _RIGHT) -> Place:
    """From a value to its place on a horizontal axis, by default of a tensor's picture."""
    room = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / room


def _svg(width: int, height: int, name: str, parts: Iterable[str], role: str = "img") -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="{role}" aria-label="{text(name)}"><title>{text(name)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _picture(width: int, height: int, name: str, parts: Iterable[str]) -> str:
    """A picture that stands by itself, with its own style."""
    picture = _svg(width, height, name, [_STYLE, *parts])
    return picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _label(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(words)}</text>'


def _gridline(left: float, right: float, y: float, words: str) -> str:
    line = f'<path class="rule" d="M{left} {y:.1f}H{right - _RIGHT}"/>'
    return line + _label(left - 6, y + 4, words, "end")


def _ticks(ticks: Sequence[float], place: Place, floor: float) -> list[str]:
    """A mark and a number for each tick of a horizontal axis."""
    return [
        f'<path class="rule" d="M{place(t):.1f} {floor}v4"/>' + _label(place(t), floor + 15, f"{t:g}", "middle")
        for t in ticks
    ]


def _axis_names(left: float, width: float, top: float, height: float, vertical: str, horizontal: str) -> str:
    """The names of both axes: one in the top left corner, one below the middle."""
    return _label(2, top - 4 if top > 16 else top, vertical) + _label(
        (width + left) / 2, height - 6, horizontal, "middle"
    )


def abbreviated(count: int) -> str:
    """Return a count as an axis has room for.

    >>> abbreviated(1), abbreviated(10_000), abbreviated(10_000_000)
    ('1', '10k', '10M')
    """
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count // size}{letter}"
    return str(count)


def _rules(ticks: Sequence[float], place: Place, top: float, floor: float, below: float) -> list[str]:
    """A vertical line for each tick, with its number below."""
    lines = [f'<path class="rule" d="M{place(t):.1f} {top}V{floor}"/>' for t in ticks]
    return [line + _label(place(t), below, f"{t:g}", "middle") for line, t in zip(lines, ticks, strict=True)]


def _polyline(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _nice(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers between two.

    >>> _nice(0, 47, 5)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    room = (high - low) / count
    if not room > 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(room))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= room)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
