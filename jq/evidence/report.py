"""Reports of what quantization did to each tensor: as text, JSON, and HTML (`page.py`)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jq.arithmetic.formats import Integer
from jq.arithmetic.losses import decibels
from jq.calibration.stats import Stats
from jq.evidence.layers import NetworkLayer
from jq.evidence.lint_rules import Finding
from jq.evidence.origins import Attribution, Origin
from jq.evidence.page import page
from jq.evidence.pictures import ChangedSample
from jq.evidence.plots import decibel
from jq.evidence.verdict import OutputsVerdict
from jq.graph import Graph
from jq.npu.constraints import Move, errors_of
from jq.plan import Plan, QParams
from jq.plan.scales import channel_axes
from jq.recovery.guard import Guarded, Mend
from jq.util import files, markup
from jq.util.mapped import BLOCK, blocks, is_finite, release

_BINS = 64


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A histogram of equal bins; values beyond the edges count in the first or last bin."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far a tensor of the quantized model is from the float one: `jq.compare` has the equations."""

    cosine: float | None
    l2: float
    psnr: float | None  # dB
    largest: float  # difference of an element
    saturated: float  # part of the elements beyond the bounds
    made: float | None  # SQNR of the tensor's own rounding alone, dB
    own: float | None  # of the squared error, what that rounding makes; None where there is no error
    clipped: float | None  # and what of that clipping makes
    shift: float | None  # of the squared error, what the channels' means are
    better: int | None  # an exponent that would at least halve the error made here
    forbidden: bool = False  # whether the NPU's constraints do not allow that


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """One tensor."""

    tensor: str
    kind: str  # activation or weight
    node: str  # that makes it, or first reads it
    format: str
    scale: float | None  # the largest, of several; None of formats that have none
    exponent: int | None  # of a power of two
    zero_point: int | None
    low: float | None
    high: float | None
    sqnr: float | None  # signal to quantization noise, dB; infinite where nothing is lost
    moves: tuple[str, ...]  # by which constraints its position was changed, and how
    error: Deviation | None = None  # what `compare` measured
    reason: str = ""
    depth: int | None = None  # its place in the order of the graph
    bounds: tuple[float, float] | None = None  # the least and the largest value that its codes stand for
    values: Distribution | None = None  # of the float tensor, before rounding
    channels: tuple[tuple[float, float], ...] | None = None  # the range of each output channel of a weight
    note: str = ""
    origin: Origin | None = None  # of the error, as `compare` measured it


@dataclasses.dataclass(frozen=True)
class Section:
    """A table beside those of tensors, with a picture as SVG."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    picture: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The evidence of a quantization; rows are sorted, the worst first."""

    title: str
    facts: Mapping[str, str]
    rows: tuple[TensorRow, ...]
    moves: tuple[Move, ...]
    findings: tuple[Finding, ...]
    unmatched: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # tensors of one model only
    guard: tuple[Mend, ...] = ()  # what rounding would have ruined, and what was done
    sections: tuple[Section, ...] = ()  # what else is told, in front of the tensors
    attribution: Attribution | None = None  # of the outputs' error to layers
    advice: tuple[tuple[str, str], ...] = ()  # what to do about it: a sentence and a command each
    verdict: OutputsVerdict = dataclasses.field(default_factory=OutputsVerdict)  # what the outputs lost, and who did it
    layers: tuple[NetworkLayer, ...] = ()  # of the quantized model, which rows belong to by their node
    changed: tuple[ChangedSample, ...] = ()  # samples that are put into another class
    subject: str = "quantized"  # the quantized model's name, beside others
    beside: tuple[Report, ...] = ()  # other quantized models of the same float model, to be shown beside this one

    def summary(self, count: int = 10) -> str:
        """The facts, what constraints moved, and the worst tensors, as lines of text."""
        lines = [self.title, *self.verdict.lines(), *(f"  {k}: {v}" for k, v in self.facts.items())]
        lines += [f"  only in the {model} model: {len(n)} tensors" for model, n in self.unmatched.items() if n]
        if self.guard:
            lines += ["repaired by the guard:", *(f"  {m}" for m in self.guard[:count])]
        if len(self.guard) > count:
            lines.append(f"  and {len(self.guard) - count} more")
        if self.moves:
            lines += ["moved for the NPU:", *(f"  {m}" for m in self.moves[:count])]
        if len(self.moves) > count:
            lines.append(f"  and {len(self.moves) - count} more")
        if self.attribution is not None and self.attribution.layers:
            lines += ["layers by their share of the outputs' error:", *self.attribution.lines(count)]
            lines += ["blocks by their share of it:", *self.attribution.lines(count // 2, blocks=True)]
            lines += ["what to do:", *(f"  {words}:\n    {command}" for words, command in self.advice)]
        whole = any(row.error is not None for row in self.rows)
        what = "their whole error against the float model" if whole else "the loss from their own rounding"
        lines.append(f"tensors by {what}, worst first:")
        for r in self.rows[:count]:
            reason = f": {r.reason}" if r.reason else ""
            lines.append(f"  {decibel(r.sqnr):>8} {r.kind:<10} {r.tensor} ({_scale(r)}){reason}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and finite numbers: an infinite SQNR or PSNR, of no error, is None."""
        return _finite(
            {
                "title": self.title,
                "verdict": list(self.verdict.lines()),
                "outputs": [dataclasses.asdict(o) for o in self.verdict.outputs],
                "facts": dict(self.facts),
                "attribution": None if self.attribution is None else dataclasses.asdict(self.attribution),
                "advice": [{"what": words, "command": command} for words, command in self.advice],
                "tensors": [dataclasses.asdict(r) for r in self.rows],
                "guard": [dataclasses.asdict(m) for m in self.guard],
                "moves": [dataclasses.asdict(m) for m in self.moves],
                "findings": [dataclasses.asdict(f) for f in self.findings],
                "unmatched": {k: list(v) for k, v in self.unmatched.items()},
                "layers": [dataclasses.asdict(layer) for layer in self.layers],
                "changed": [dataclasses.asdict(s) | {"picture": None} for s in self.changed],
                "beside": [other.to_dict() for other in self.beside],
            }
        )

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, atomically."""
        files.write(path, json.dumps(self.to_dict(), indent=2, allow_nan=False))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file that needs nothing else, atomically."""
        files.write(path, page(self))

    def _repr_html_(self) -> str:
        rows = [(r.tensor, r.kind, _scale(r), decibel(r.sqnr), r.reason) for r in self.rows]
        return markup.preview(self.title, ("tensor", "kind", "format", "SQNR", "reason"), rows)


def report_of(
    title: str,
    graph: Graph,
    plan: Plan,
    stats: Stats | None,
    facts: Mapping[str, str],
    moves: Sequence[Move] = (),
    findings: Sequence[Finding] = (),
    *,
    shipped: Mapping[str, Any] | None = None,
    guard: Guarded | None = None,
) -> Report:
    """Return the report of a plan: the loss of each tensor, as far as calibration measured it.

    `shipped` are the weights that are exported, where finetuning changed the graph's own: rows describe them, and count
    as lost how far their codes are from the graph's.
    """
    own = {k: a for k, a in (shipped or {}).items() if k in plan.weights}
    tuned = {k: a for k, a in own.items() if not _same(a, graph.params[k])}
    final = graph.with_arrays({**graph.arrays, **tuned})
    error = errors_of(graph, plan, stats)
    by_tensor: dict[str, list[str]] = {}
    for move in moves:
        by_tensor.setdefault(move.tensor, []).append(f"{move.rule}: 2^{-move.before} to 2^{-move.after}")
    depths = {name: i for i, node in reversed([*enumerate(graph.nodes)]) for name in node.reads()}  # first readers
    depths |= {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    axes = channel_axes(graph)
    sqnr = {name: None if (lost := error(name)) is None else decibels(1, lost) for name in plan}
    sqnr |= {name: loss for name, loss in (guard.losses if guard else {}).items() if sqnr.get(name, 0.0) is None}
    for name, array in tuned.items():
        before = graph.params[name].astype(np.float64)
        power, noise = (float(np.square(a).sum()) for a in (before, plan[name].given_back(array) - before))
        sqnr[name] = decibels(power, noise) if power else None
    rows = []
    for name in plan:
        row = _row(name, final, plan, stats, axes.get(name))
        moved, reason = tuple(by_tensor.get(name, ())), "changed" if name in tuned else ""
        rows.append(dataclasses.replace(row, sqnr=sqnr[name], moves=moved, depth=depths.get(name), reason=reason))
    return Report(
        title, dict(facts), worst_first(rows), tuple(moves), tuple(findings), guard=guard.mends if guard else ()
    )


def _same(a: Any, b: np.ndarray) -> bool:
    return a is b or np.array_equal(a, b, equal_nan=True)


def worst_first(rows: Iterable[TensorRow]) -> tuple[TensorRow, ...]:
    """Sort rows by their loss, damaged ones first.

    Weights that a tool changed on purpose, whose distance is no loss, and rows without figures come last.
    """

    def place(row: TensorRow) -> tuple[Any, ...]:
        return row.reason != "not finite", row.sqnr is None, row.reason == "changed", row.sqnr or 0.0

    return tuple(sorted(rows, key=place))


def _row(name: str, graph: Graph, plan: Plan, stats: Stats | None, axis: int | None) -> TensorRow:
    """The row of a tensor's values and grid, without what was lost."""
    weight = name in plan.weights
    node = graph.producer.get(name) or next(iter(graph.consumers.get(name, ())), None)
    low, high, values, channels = None, None, None, None
    if weight and graph.params[name].size:
        array = graph.params[name]
        low, high = float(np.min(array)), float(np.max(array))
        values, channels = distribution(array), channel_ranges(array, axis)
        release(array)
    elif stats is not None and name in stats.tensors:
        low, high = stats.range(name)
    return TensorRow(
        tensor=name,
        kind="weight" if weight else "activation",
        node=node.label if node else "",
        **described(plan[name]),
        low=low,
        high=high,
        sqnr=None,
        moves=(),
        values=values,
        channels=channels,
    )


def described(qparams: QParams | None) -> dict[str, Any]:
    """The fields of a row that tell how a tensor is quantized."""
    if qparams is None:
        return {"format": "float", "scale": None, "exponent": None, "zero_point": None}
    integers = isinstance(qparams.grid, Integer) and not qparams.dynamic
    return {
        "format": str(qparams.grid),
        "scale": float(np.max(qparams.scale)) if integers else None,
        "exponent": int(qparams.exponent) if integers and qparams.is_power_of_two else None,
        "zero_point": int(np.max(qparams.zero_point)) if integers else None,
        "bounds": ends_of(qparams),
    }


def ends_of(qparams: QParams) -> tuple[float, float] | None:
    """The least and the largest value that codes stand for, if they are one grid's.

    >>> from jq.arithmetic.formats import INT8
    >>> ends_of(QParams(np.float32(0.5), np.int32(0), INT8))
    (-64.0, 63.5)
    """
    if not isinstance(qparams.grid, Integer) or qparams.dynamic or np.ndim(qparams.scale):
        return None
    scale, zero = float(qparams.scale), int(qparams.zero_point)
    return (qparams.grid.qmin - zero) * scale, (qparams.grid.qmax - zero) * scale


def distribution(array: np.ndarray) -> Distribution | None:
    """The histogram of an array; None where there are no finite values.

    >>> histogram = distribution(np.float32([0, 1, 1]))
    >>> histogram.low, histogram.high, histogram.counts[0], histogram.counts[-1]
    (0.0, 1.0, 1, 2)
    """
    if not array.size or not is_finite(array):
        return None
    low, high = float(array.min()), float(array.max())
    width, counts = (high - low) / _BINS or 1.0, np.zeros(_BINS, np.int64)
    for part in blocks(array) if array.size > BLOCK else (...,):
        # Many times faster than np.histogram, which searches each value's bin.
        index = np.minimum((array[part].astype(np.float64) - low) / width, _BINS - 1).astype(np.intp)
        counts += np.bincount(index.reshape(-1), minlength=_BINS)
    return Distribution(low, high, tuple(counts.tolist()))


def channel_ranges(array: np.ndarray, axis: int | None) -> tuple[tuple[float, float], ...] | None:
    """The least and the largest value of each channel along an axis.

    >>> channel_ranges(np.float32([[1, 2], [3, -4]]), 0)
    ((1.0, 2.0), (-4.0, 3.0))
    """
    if axis is None or array.ndim < 2 or not array.size:
        return None
    rest = tuple(i for i in range(array.ndim) if i != axis)
    return tuple(zip(array.min(rest).tolist(), array.max(rest).tolist(), strict=True))


def _scale(row: TensorRow) -> str:
    if row.scale is None:
        return row.format
    return f"{row.format}, 2^{row.exponent}" if row.exponent is not None else f"{row.format}, {row.scale:.4g}"


def _finite(value: Any) -> Any:
    """Return the value without Infinity and NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
