"""The network as boxes along its depth, coloured by what layers lose, by why, or by where they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jq.evidence.layers import NetworkLayer, depths_of, lanes_of
from jq.util.markup import text

STEP, LANE, WIDE, TALL, MARGIN = 26, 62, 20, 46, 10  # of the drawing, in pixels
DIP = 46  # of a line that goes below the boxes between its ends
PLACES = {"npu": "on the NPU", "cpu": "on the CPU", "vitis_ep_cpu": "on the CPU, in the provider"}
# Where each step of the colours begins, by share of the outputs' error and by decibels; layers with a negative share
# compensate for others.
SHARES = (-0.001, 0.01, 0.03, 0.10, 0.20)
DECIBELS = (40.0, 30.0, 20.0, 10.0)
_LETTERS = 7  # of an operator's name that a box has room for


def step_of_share(share: float) -> int:
    """Return the step of the colours for a share of the outputs' error; 0 for a layer that compensates for others.

    >>> [step_of_share(s) for s in (-0.1, 0.0, 0.005, 0.02, 0.05, 0.15, 0.9)]
    [0, 1, 1, 2, 3, 4, 5]
    """
    return sum(share > least for least in SHARES)


def step_of_decibels(sqnr: float) -> int:
    """Return the step of the colours for an SQNR in dB.

    >>> [step_of_decibels(s) for s in (float("inf"), 35.0, 25.0, 15.0, 5.0)]
    [1, 2, 3, 4, 5]
    """
    return 1 + sum(sqnr < most for most in DECIBELS)


def drawing(layers: Sequence[NetworkLayer], classes: Mapping[str, Sequence[str]], notes: Mapping[str, str]) -> str:
    """Return the layers as SVG, each box with the classes and the note of its layer, and a link to its row `l` + number.

    >>> drawing((), {}, {})
    ''
    """
    if not layers:
        return ""
    depths = depths_of(layers)
    lanes = lanes_of(depths)
    at = [(MARGIN + STEP * depth, MARGIN + LANE * lane) for depth, lane in zip(depths, lanes, strict=True)]
    width, height = 2 * MARGIN + STEP * (max(depths) + 1), 2 * MARGIN + LANE * (max(lanes) + 1) + DIP // 2
    lines = "".join(
        _edge(at[source], at[number])
        for number, layer in enumerate(layers)
        for source in layer.sources
        if source < number
    )
    boxes = "".join(
        _box(number, layer, place, classes.get(layer.name, ()), notes.get(layer.name, ""))
        for number, (layer, place) in enumerate(zip(layers, at, strict=True))
    )
    return (
        f'<svg class="graph" id="graph" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'aria-hidden="true"><path class="edge" d="{lines}"/>{boxes}</svg>'
    )


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    """A line from the right of one box to the left of another, around the boxes between where there are some."""
    x, y, to, down = start[0] + WIDE, start[1] + TALL // 2, end[0], end[1] + TALL // 2
    if to - x < STEP:
        return f"M{x} {y}L{to} {down}"
    return f"M{x} {y}C{x + STEP} {y + DIP} {to - STEP} {down + DIP} {to} {down}"


def _box(number: int, layer: NetworkLayer, at: tuple[int, int], classes: Sequence[str], note: str) -> str:
    x, y = at
    name = layer.op if len(layer.op) <= _LETTERS else f"{layer.op[: _LETTERS - 1]}…"
    words = f"{layer.name}: {layer.op}" + (f"; {note}" if note else "")
    return (
        f'<a href="#l{number}" tabindex="-1" class="box {text(" ".join(classes))}"><title>{text(words)}</title>'
        f'<rect x="{x}" y="{y}" width="{WIDE}" height="{TALL}" rx="3"/>'
        f'<text transform="translate({x + 13.5} {y + TALL - 4})rotate(-90)">{text(name)}</text></a>'
    )
