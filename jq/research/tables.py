"""Results of an ablation: mean, spread over seeds and intervals over samples, as text, Markdown, LaTeX and a plot."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jq.config import QuantConfig
from jq.evaluation.metrics import sign_test
from jq.evidence.plots import dots
from jq.research.ledger import Row
from jq.research.measuring import hits_of
from jq.util import markup

_PERCENT = ("float_top1", "top1", "change", "agreement")
_TITLES = {
    "float_top1": "float top-1", "top1": "top-1", "change": "change", "agreement": "agreement", "sqnr": "SQNR, dB",
    "kl": "KL", "added_seconds": "s",
}  # fmt: skip
_DIGITS = {"sqnr": 2, "kl": 5, "added_seconds": 1}
_BEST: Mapping[str, Callable[..., float]] = {"top1": max, "agreement": max, "sqnr": max, "kl": min}
_FACTORS = 4  # options that differ, at most, for each to have a column


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
    intervals: dict[str, tuple[float, float]]  # 95 %, over the samples: the mean of the seeds' ends
    p: float | None  # of the sign test against the model's best config; None of that and of tables without samples


@dataclasses.dataclass(frozen=True)
class _Cell:
    text: str
    best: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The rows of an ablation, in its order."""

    rows: Sequence[Row]

    def _groups(self) -> list[tuple[tuple[str, str], list[Row]]]:
        """The rows of each config on each model."""
        return [(k, list(rows)) for k, rows in itertools.groupby(self.rows, lambda r: (r["model"], r["config"]))]

    def summary(self) -> list[Line]:
        """Mean and spread over seeds of each config on each model, with intervals over samples."""
        lines = []
        for (model, config), rows in self._groups():
            values_of = {m: [float(r[m]) for r in rows if r.get(m) is not None] for m in _TITLES}
            spreads = {m: _spread(values) for m, values in values_of.items() if values}
            ends = {
                m: [(r[f"{m}_low"], r[f"{m}_high"]) for r in rows if r.get(f"{m}_low") is not None] for m in _TITLES
            }
            means = {
                m: (statistics.fmean(e[0] for e in v), statistics.fmean(e[1] for e in v)) for m, v in ends.items() if v
            }
            different = len({r["digest"] for r in rows})
            lines.append(Line(model, config, len(rows), different, spreads, means, self._p(model, rows)))
        return lines

    def _p(self, model: str, rows: Sequence[Row]) -> float | None:
        """Whether a config is as often right as the best one of its model.

        Right are the samples with the label's class or, without labels, with the float model's. A sample counts for the
        config of which more seeds have it right: with one seed, that is McNemar's exact test.
        """
        all_rows = dict(self._groups())
        measured = {k: v for k, v in all_rows.items() if k[0] == model and all(r.get("hits") for r in v)}
        if len(measured) < 2 or not all(r.get("hits") for r in rows):
            return None
        sums = {k: np.mean([hits_of(r) for r in v], axis=0) for k, v in measured.items()}
        best = max(sums.values(), key=np.sum)
        own = sums[rows[0]["model"], rows[0]["config"]]
        return None if own is best else sign_test(int(np.sum(best > own)), int(np.sum(own > best)))

    def factors(self) -> dict[str, dict[str, str]]:
        """The values of the options that differ, by config: empty where they are many, or do not tell configs apart."""
        options = {r["config"]: json.loads(r.get("options") or "{}") for r in self.rows}
        default = QuantConfig().to_dict()
        names = dict.fromkeys(itertools.chain(*options.values()))
        values = {c: {n: _word(o.get(n, default.get(n))) for n in names} for c, o in options.items()}
        varied = [n for n in names if len({v[n] for v in values.values()}) > 1]
        told = {c: {n: v[n] for n in varied} for c, v in values.items()}
        apart = len({tuple(v.values()) for v in told.values()}) == len(told)
        return told if apart and 0 < len(varied) <= _FACTORS else {}

    def to_markdown(self) -> str:
        """The summary as a Markdown table, with the best of each model in bold."""
        columns, cells = self._table()
        rows = [[_escaped(c) for c in columns], ["---"] * len(columns)]
        rows += [[f"**{_escaped(c.text)}**" if c.best else _escaped(c.text) for c in row] for row in cells]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"

    def to_latex(self) -> str:
        """The summary as a LaTeX tabular, with the rules of booktabs and the best of each model in bold."""
        columns, cells = self._table()
        rows = [[_latex(c) for c in columns]]
        rows += [[f"\\textbf{{{_latex(c.text)}}}" if c.best else _latex(c.text) for c in row] for row in cells]
        lines = [" & ".join(row) + r" \\" for row in rows]
        body = "\n".join(lines[1:])
        words = sum(c in ("model", "config", *next(iter(self.factors().values()), ())) for c in columns)
        return (
            f"\\begin{{tabular}}{{{'l' * words}{'r' * (len(columns) - words)}}}\n\\toprule\n{lines[0]}\n\\midrule\n{body}\n"
            "\\bottomrule\n\\end{tabular}\n"
        )

    def to_svg(self, measure: str = "sqnr") -> str:
        """A plot of a measure: a row for each config on each model, a dot for each seed, a line at the mean."""
        many = len({r["model"] for r in self.rows}) > 1
        series = [
            (f"{model}: {config}" if many else config, [float(r[measure]) for r in rows if r.get(measure) is not None])
            for (model, config), rows in self._groups()
        ]
        return dots(_TITLES.get(measure, measure), series)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Titles and cells of the summary, as text."""
        titles, cells = self._table()
        return titles, [[c.text for c in row] for row in cells]

    def _table(self) -> tuple[list[str], list[list[_Cell]]]:
        lines, factors = self.summary(), self.factors()
        shown = [m for m in _TITLES if any(m in line.measures for line in lines)]
        tested = any(line.p is not None for line in lines)
        named = list(next(iter(factors.values()), {}))
        told = bool(named) and all(f"{name}=" in line.config for line in lines for name in named)  # names of a grid
        named = named if told else ["config", *named]
        titles = ["model", *named, "seeds", *(_TITLES[m] for m in shown), *(["p"] if tested else [])]
        best = {}
        for model, own in itertools.groupby(lines, lambda line: line.model):
            alike = list(own)
            for m, better in _BEST.items():
                values = [line.measures[m].mean for line in alike if m in line.measures]
                if len(values) > 1 and min(values) < max(values):
                    best[model, m] = better(values)
        rows = []
        for line in lines:
            seeds = f"{line.seeds}"
            if line.seeds > 1 and line.different < line.seeds:
                seeds += ", all the same" if line.different == 1 else f", {line.different} different"
            words = [*([] if told else [line.config]), *factors.get(line.config, {}).values()]
            row = [_Cell(text) for text in (line.model, *words, seeds)]
            for m in shown:
                text = _shown(m, line) if m in line.measures else ""
                row.append(_Cell(text, bool(text) and best.get((line.model, m)) == line.measures[m].mean))
            rows.append(row + ([_Cell("" if line.p is None else f"{line.p:.2g}")] if tested else []))
        return titles, rows

    def _repr_html_(self) -> str:
        columns, cells = self.cells()
        return markup.preview(f"{len(self.rows)} runs", columns, cells, count=len(cells))


def _spread(values: Sequence[float]) -> Spread:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(statistics.fmean(values), deviation, len(values))


def _shown(measure: str, line: Line) -> str:
    spread = line.measures[measure]
    if measure == "added_seconds":  # what all seeds took together
        return f"{spread.mean * spread.count:.1f}"
    factor, digits = (100, 2) if measure in _PERCENT else (1, _DIGITS[measure])
    text = f"{factor * spread.mean:.{digits}f}"
    if spread.deviation and math.isfinite(spread.mean):
        text += f" ± {factor * spread.deviation:.{digits}f}"
    if measure in line.intervals:
        low, high = (f"{factor * end:.{digits}f}" for end in line.intervals[measure])
        text += f" [{low}, {high}]"
    return text


def _word(value: object) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


def _latex(text: str) -> str:
    """Text with what LaTeX reads otherwise escaped."""
    special = {c: "\\" + c for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "±": r"$\pm$"}
    special["^"] = r"\textasciicircum{}"
    return "".join(special.get(c, c) for c in text)
