"""Results of an ablation: mean and spread over seeds, as text, Markdown, LaTeX and a plot."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from jq.evidence.plots import dots
from jq.research.ledger import Row
from jq.util import markup

_PERCENT = ("float_top1", "top1", "agreement")
_TITLES = {
    "float_top1": "float top-1", "top1": "top-1", "agreement": "agreement", "sqnr": "SQNR, dB", "kl": "KL",
    "added_seconds": "s",
}  # fmt: skip
_DIGITS = {"sqnr": 2, "kl": 5, "added_seconds": 1}


@dataclasses.dataclass(frozen=True)
class Spread:
    """A measure over seeds."""

    mean: float
    deviation: float  # standard deviation of the sample; 0 of one
    count: int


@dataclasses.dataclass(frozen=True)
class Line:
    """One config on one model."""

    model: str
    config: str
    seeds: int
    different: int  # results among them
    measures: dict[str, Spread]


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The rows of an ablation, in its order."""

    rows: Sequence[Row]

    def _groups(self) -> list[tuple[tuple[str, str], list[Row]]]:
        """The rows of each config on each model."""
        return [(k, list(rows)) for k, rows in itertools.groupby(self.rows, lambda r: (r["model"], r["config"]))]

    def summary(self) -> list[Line]:
        """Mean and spread over seeds of each config on each model."""
        lines = []
        for (model, config), rows in self._groups():
            values_of = {m: [float(r[m]) for r in rows if r[m] is not None] for m in _TITLES}
            spreads = {m: _spread(values) for m, values in values_of.items() if values}
            lines.append(Line(model, config, len(rows), len({r["digest"] for r in rows}), spreads))
        return lines

    def to_markdown(self) -> str:
        """The summary as a Markdown table."""
        columns, cells = self.cells()
        rows = [columns, ["---"] * len(columns), *cells]
        return "\n".join("| " + " | ".join(c.replace("|", r"\|") for c in row) + " |" for row in rows) + "\n"

    def to_latex(self) -> str:
        """The summary as a LaTeX tabular, with the rules of booktabs."""
        columns, cells = self.cells()
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in (columns, *cells)]
        body = "\n".join(lines[1:])
        return (
            f"\\begin{{tabular}}{{ll{'r' * (len(columns) - 2)}}}\n\\toprule\n{lines[0]}\n\\midrule\n{body}\n"
            "\\bottomrule\n\\end{tabular}\n"
        )

    def to_svg(self, measure: str = "sqnr") -> str:
        """A plot of a measure: a row for each config on each model, a dot for each seed, a line at the mean."""
        many = len({r["model"] for r in self.rows}) > 1
        series = [
            (f"{model}: {config}" if many else config, [float(r[measure]) for r in rows if r[measure] is not None])
            for (model, config), rows in self._groups()
        ]
        return dots(_TITLES.get(measure, measure), series)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Titles and cells of the summary, as text."""
        lines = self.summary()
        shown = [m for m in _TITLES if any(m in line.measures for line in lines)]
        titles = ["model", "config", "seeds", *(_TITLES[m] for m in shown)]
        rows = []
        for line in lines:
            seeds = f"{line.seeds}"
            if line.seeds > 1 and line.different < line.seeds:
                seeds += ", all the same" if line.different == 1 else f", {line.different} different"
            texts = [_shown(m, line.measures[m]) if m in line.measures else "" for m in shown]
            rows.append([line.model, line.config, seeds, *texts])
        return titles, rows

    def _repr_html_(self) -> str:
        columns, cells = self.cells()
        return markup.preview(f"{len(self.rows)} runs", columns, cells, count=len(cells))


def _spread(values: Sequence[float]) -> Spread:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(statistics.fmean(values), deviation, len(values))


def _shown(measure: str, spread: Spread) -> str:
    if measure == "added_seconds":  # what all seeds took together
        return f"{spread.mean * spread.count:.1f}"
    factor, digits = (100, 2) if measure in _PERCENT else (1, _DIGITS[measure])
    text = f"{factor * spread.mean:.{digits}f}"
    deviates = spread.deviation and math.isfinite(spread.mean)
    return f"{text} ± {factor * spread.deviation:.{digits}f}" if deviates else text


def _latex(text: str) -> str:
    """Text with what LaTeX reads otherwise escaped."""
    special = {c: "\\" + c for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "±": r"$\pm$"}
    special["^"] = r"\textasciicircum{}"
    return "".join(special.get(c, c) for c in text)
