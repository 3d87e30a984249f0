"""Outcomes of `jq.auto`: the best model, the config that makes it again, and the table of what was tried."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto

from jq.config import QuantConfig
from jq.config_file import as_toml
from jq.device.provider import provider_config
from jq.evidence.plots import front_plot
from jq.evidence.report import Report, Section
from jq.npu.facts import CHIPS
from jq.pipeline import Result
from jq.research.goals import Goal
from jq.research.judging import Score
from jq.util import files, markup


@dataclasses.dataclass(frozen=True)
class Tried:
    """A rung, and what came of it."""

    rung: str
    outcome: str  # kept, or why not
    seconds: float
    score: Score | None = None
    cost: float | None = None  # bit operations, in units of 8 bits everywhere
    narrow: float | None = None  # the share of products in 8 bits
    islands: int | None = None
    size: int | None = None  # bytes
    forecast: str = ""  # nodes on the NPU, on the CPU, and subgraphs


@dataclasses.dataclass(frozen=True, eq=False)
class AutoResult:
    """The best model that was found, the config that reproduces it, and what was tried."""

    result: Result
    config: QuantConfig
    goal: Goal
    reached: bool  # with confidence on the deciding samples
    why: str  # it ended, and what is in the way
    rungs: tuple[Tried, ...]
    whole: float  # the float network's own value; nan of metrics that compare with it
    chip: str

    @property
    def model(self) -> ModelProto:
        """The quantized model."""
        return self.result.model

    @property
    def report(self) -> Report:
        """The report of the model, with the table of rungs and their picture."""
        own, (columns, rows, _) = self.result.report, self.cells()
        verdict = dataclasses.replace(own.verdict, sentences=(self.outcome, *own.verdict.sentences))
        section = Section("Rungs", columns, rows, self.plot())
        return dataclasses.replace(own, verdict=verdict, sections=(section, *own.sections))

    @property
    def outcome(self) -> str:
        """One line: the goal, whether it was reached, and why the search ended."""
        reached = "" if self.goal.bound is None else ": reached" if self.reached else ": not reached"
        return f"{self.goal}{reached}; {self.why}"

    def __str__(self) -> str:
        """The outcome, and a line for each rung."""
        columns, rows, _ = self.cells()
        told = (", ".join(f"{k} {v}" for k, v in zip(columns, row, strict=True) if v) for row in rows)
        return "\n".join([self.outcome, *(f"  {line}" for line in told)])

    def cells(self) -> tuple[Sequence[str], list[list[str]], str]:
        """Columns, rows and title of the table of rungs."""
        columns = ["rung", self.goal.metric, "cost", "8 bits", "islands", "MB", "NPU/CPU/subgraphs", "s", "outcome"]
        return columns, [_cells(t) for t in self.rungs], str(self.goal)

    def plot(self) -> str:
        """A picture of what rungs are worth against what they cost, as SVG."""
        points = [(t.rung, t.cost, t.score.value) for t in self.rungs if t.score and t.cost is not None]
        if not points:
            return ""
        marks = sorted({(c, v) for _, c, v in points})
        best = [p for i, p in enumerate(marks) if all(_better(p[1], q[1], self.goal) for q in marks[:i])]
        return front_plot(
            f"{self.goal.metric} against cost", "bit operations, 8 bits: 1", self.goal.metric, best, points
        )

    def to_dict(self) -> dict[str, Any]:
        """The outcome and the rungs as JSON holds them."""
        rungs = [
            {k: _finite(v) for k, v in dataclasses.asdict(t).items() if k != "score"}
            | {"score": None if t.score is None else {k: _finite(v) for k, v in dataclasses.asdict(t.score).items()}}
            for t in self.rungs
        ]
        outcome = {"goal": str(self.goal), "reached": self.reached, "why": self.why, "float": _finite(self.whole)}
        return {**outcome, "config": self.config.to_dict(), "rungs": rungs}

    def save(self, path: str | os.PathLike[str]) -> list[Path]:
        """Write the model, and beside it its config as .toml and the report as .html; return their names.

        With islands in float, on a chip that runs these in BF16, also the provider's vitisai_config.json.
        """
        model = Path(path)
        files.write(model, self.model.SerializeToString())
        config, page = model.with_suffix(".toml"), model.with_suffix(".html")
        files.write(config, as_toml(self.config))
        self.report.to_html(page)
        written = [model, config, page]
        if any(t.islands for t in self.rungs if t.outcome == "chosen") and CHIPS[self.chip].bfloat16:
            written.append(model.with_name("vitisai_config.json"))
            provider_config(self.model, self.chip).write(written[-1])
        return written

    def _repr_html_(self) -> str:
        columns, rows, title = self.cells()
        return markup.preview(title, columns, rows) + self.plot()


def _cells(t: Tried) -> list[str]:
    return [
        t.rung,
        "" if t.score is None else shown(t.score),
        "" if t.cost is None else f"{t.cost:.2f}",
        "" if t.narrow is None else f"{t.narrow:.0%}",
        "" if t.islands is None else str(t.islands),
        "" if t.size is None else f"{t.size / 1e6:.2f}",
        t.forecast,
        f"{t.seconds:.0f}",
        t.outcome,
    ]


def shown(score: Score) -> str:
    """A value with its interval."""
    ends = "" if score.low is None or score.high is None else f" ({score.low:.3g} to {score.high:.3g})"
    return f"{score.value:.4g}{ends}"


def _better(value: float, other: float, goal: Goal) -> bool:
    return value > other if goal.higher else value < other


def _finite(value: Any) -> Any:
    """A value as JSON holds it: numbers that are not finite are None."""
    if isinstance(value, tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
