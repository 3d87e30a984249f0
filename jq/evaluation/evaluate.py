"""Two folders of results side by side: how far a quantized model's outputs are from the float model's.

`jq.evaluate.compare_folders` compares any results; `classify`, with labels, says how often classifiers are right.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jq.errors import DataError
from jq.evaluation import metrics
from jq.evaluation.accuracy import (
    Accuracy,
    Classification,
    Labels,
    Scores,
    classify,
    folder_scores,
    model_scores,
    read_labels,
)
from jq.evaluation.estimates import Estimate, bootstrap
from jq.evaluation.paired import Paired, measures, paired, summarized
from jq.evaluation.results import Entry, entries
from jq.evidence.lint_rules import Finding
from jq.util import files
from jq.util.progress import progress_bar

__all__ = [
    "METRICS", "Accuracy", "Classification", "Estimate", "Evaluation", "Labels", "MetricTotal", "Paired", "ResultRow",
    "Scores", "bootstrap", "classify", "compare_folders", "folder_scores", "measures", "model_scores", "paired",
    "read_labels", "summarized",
]  # fmt: skip

METRICS = ("cosine", "l2", "psnr", "ssim")


@dataclasses.dataclass(frozen=True)
class ResultRow:
    """One result in both folders."""

    key: str  # path in the folder without the ending
    baseline: str  # file
    quantized: str
    shape: tuple[int, ...]
    cosine: float
    l2: float
    psnr: float  # dB; inf if they are equal, NaN if no value of the baseline is above zero
    ssim: float | None  # None unless it is an image of at least 11 x 11


@dataclasses.dataclass(frozen=True)
class MetricTotal:
    """One metric over all results."""

    mean: float | None  # None if no result has the metric
    worst: float | None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Two folders of results compared, with a finding for everything that could not be compared."""

    baseline: str
    quantized: str
    rows: tuple[ResultRow, ...]  # by key
    findings: tuple[Finding, ...]

    @property
    def complete(self) -> bool:
        """Whether all results could be compared."""
        return not any(f.severity == "error" for f in self.findings)

    @property
    def identical(self) -> int:
        """The number of results that are equal in all values."""
        return sum(row.l2 == 0 for row in self.rows)

    @property
    def totals(self) -> Mapping[str, MetricTotal]:
        """Mean and worst value of each metric; PSNR is over results that differ, since it is infinite for the others."""
        totals = {}
        for metric in METRICS:
            values = [v for row in self.rows if (v := getattr(row, metric)) is not None and math.isfinite(v)]
            mean = float(np.mean(values)) if values else None
            totals[metric] = MetricTotal(mean, (max if metric == "l2" else min)(values, default=None))
        return totals

    def summary(self, count: int = 10) -> str:
        """The totals, the worst results and the findings, as lines of text."""
        lines = [f"{len(self.rows)} results compared, {self.identical} of them identical"]
        for metric, total in self.totals.items():
            if total.mean is not None:
                lines.append(f"  {metric}: mean {total.mean:.6g}, worst {total.worst:.6g}")
        if self.rows:
            lines.append("furthest apart:")
        for row in sorted(self.rows, key=lambda r: r.cosine)[:count]:
            similarity = "" if row.ssim is None else f", ssim {row.ssim:.6g}"
            lines.append(f"  {row.key}: cosine {row.cosine:.6g}, l2 {row.l2:.6g}, psnr {row.psnr:.6g}{similarity}")
        lines += [str(f) for f in self.findings[:count]]
        if len(self.findings) > count:
            lines.append(f"and {len(self.findings) - count} more findings")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return dicts, lists, strings and numbers for JSON; infinite or undefined values are None."""
        return {
            "baseline": self.baseline,
            "quantized": self.quantized,
            "compared": len(self.rows),
            "identical": self.identical,
            "totals": {k: dataclasses.asdict(v) for k, v in self.totals.items()},
            "results": [_plain(row) for row in self.rows],
            "findings": [dataclasses.asdict(f) for f in self.findings],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict`, atomically."""
        files.write(path, json.dumps(self.to_dict(), indent=2) + "\n")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV line for each result, atomically; PSNR of equal results is inf, missing values are empty."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow([field.name for field in dataclasses.fields(ResultRow)])
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            numbers = ["" if v is None or math.isnan(v) else repr(v) for v in (getattr(row, m) for m in METRICS)]
            writer.writerow([row.key, row.baseline, row.quantized, shape, *numbers])
        files.write(path, text.getvalue())


def compare_folders(baseline: str | os.PathLike[str], quantized: str | os.PathLike[str]) -> Evaluation:
    """Return the distance between the results in two folders, per file and in total.

    Results are images, .npy and the arrays of .npz files. They belong together if their paths in the folders are the
    same but for the ending, so that a PNG may be held against an array. Each pair has the `jq.metrics` cosine, L2 and
    PSNR, whose peak is the baseline's largest value, and if its last two axes (those before the last, if that has at most
    four channels) are large enough, SSIM. What cannot be compared is a finding: a missing partner, another shape, NaN or
    Inf, no elements, what cannot be read, a name that several files share. Memory is that of one pair.

    Cosine, L2 and PSNR are defined as by AMD Quark's evaluate tool, in float64 instead of float32. That tool gives NaN
    for the cosine with an array of zeros, and a PSNR of finite value to equal results and to a baseline that is nowhere
    above zero; it reads gray images as three equal channels; and its SSIM is another one: it leaves the squared means
    in variances and covariance, and takes 255 for the range of any data.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
    ...     np.save(f"{one}/a.npy", np.array([3.0, 4.0]))
    ...     np.save(f"{two}/a.npy", np.array([3.0, 4.5]))
    ...     np.save(f"{two}/b.npy", np.array([1.0]))
    ...     found = compare_folders(one, two)
    >>> found.rows[0].key, found.rows[0].l2, found.findings[0].rule
    ('a', 0.5, 'missing')
    """
    one, two = Path(baseline), Path(quantized)
    ours, theirs = entries(one), entries(two)
    if one.samefile(two):
        raise DataError(f"{one} and {two} are the same folder; expected the results of two models")
    rows, findings = list[ResultRow](), list[Finding]()
    paired, unpaired = _paired(ours, theirs)
    with progress_bar("evaluate", len(paired)) as advance:
        for mine, other in paired:
            row, problems = _compared(mine, other)
            rows += [row] if row else []
            findings += problems
            advance(1)
    findings = sorted([*unpaired, *findings], key=lambda f: (f.severity != "error", f.where))
    return Evaluation(str(one), str(two), tuple(rows), tuple(findings))


def _paired(ours: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[list[tuple[Entry, Entry]], list[Finding]]:
    """Pair entries with the same key and, where several share it, the same suffix."""
    pairs, findings = [], []
    one, two = _by_key(ours), _by_key(theirs)
    for key in sorted(one.keys() | two.keys(), key=natural):
        mine, other = one.get(key, []), two.get(key, [])
        if len(mine) == len(other) == 1:
            pairs.append((mine[0], other[0]))
            continue
        alike = [(a, b) for a in mine for b in other if a.suffix == b.suffix]
        if mine and other and len(alike) == len(mine) == len(other):
            pairs += alike
        elif mine and other:
            names = ", ".join(sorted({e.file for e in (*mine, *other)}))
            message = f"several files have this name: {names}; leave one of them in each folder"
            findings.append(Finding("ambiguous", "error", key, message))
        else:
            there, not_there = ("baseline", "quantized") if mine else ("quantized", "baseline")
            shown = ", ".join(e.file for e in mine or other)
            message = f"{shown} is among the {there} results only; there is no such {not_there} result"
            findings.append(Finding("missing", "error", key, message))
    return pairs, findings


def natural(name: str) -> list[tuple[int, str]]:
    """Return what names sort by such that numbers in them count as numbers.

    >>> sorted(["image10", "image2", "image"], key=natural)
    ['image', 'image2', 'image10']
    """
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _by_key(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.key, []).append(entry)
    return groups


def _compared(mine: Entry, other: Entry) -> tuple[ResultRow | None, list[Finding]]:
    key, read, findings = mine.key, list[np.ndarray](), list[Finding]()
    for entry in (mine, other):
        try:
            read.append(entry.read())
        except DataError as error:
            findings.append(Finding("unreadable", "error", key, str(error)))
        except MemoryError:
            findings.append(Finding("unreadable", "error", key, f"no memory to read {entry.file}"))
    if findings:
        return None, findings
    x, y = read
    if x.dtype != y.dtype:
        message = f"the baseline is {x.dtype} and the quantized result {y.dtype}; their values are compared"
        findings.append(Finding("other-type", "warning", key, message))
    findings += _refusals(key, x, y)
    if any(f.rule != "other-type" for f in findings):
        return None, findings
    axes = _image_axes(x.shape)
    ssim = None if axes is None else metrics.ssim(x, y, axes=axes)
    distances = {"cosine": metrics.cosine(x, y), "l2": metrics.l2(x, y), "psnr": metrics.psnr(x, y)}
    return ResultRow(key, mine.file, other.file, x.shape, ssim=ssim, **distances), findings


def _refusals(key: str, x: np.ndarray, y: np.ndarray) -> Iterator[Finding]:
    """Yield the reasons why two arrays cannot be compared."""
    if x.shape != y.shape:
        message = f"the baseline has the shape {list(x.shape)} and the quantized result {list(y.shape)}"
        yield Finding("other-shape", "error", key, message)
        return
    if not x.size:
        yield Finding("no-elements", "warning", key, f"both are empty, with the shape {list(x.shape)}")
        return
    for side, array in (("baseline", x), ("quantized result", y)):
        bad = array.size - int(np.count_nonzero(np.isfinite(array)))
        if bad:
            yield Finding("not-finite", "error", key, f"{bad} of {array.size} values of the {side} are NaN or Inf")


def _image_axes(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the axes of height and width if this may be an image that SSIM's window fits in."""
    if len(shape) < 2:
        return None
    axes = (-3, -2) if len(shape) > 2 and shape[-1] <= 4 else (-2, -1)
    return axes if min(shape[a] for a in axes) >= metrics.SSIM_WINDOW else None


def _plain(row: ResultRow) -> dict[str, Any]:
    """A row as JSON can hold it."""
    fields = dataclasses.asdict(row) | {"shape": list(row.shape)}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
