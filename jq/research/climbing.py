"""`auto`: climb rungs of quantization until a goal holds, on samples that nothing was calibrated or tuned on.

One sample in four decides, the others calibrate and tune. Each rung makes a config from the best model so far; what is no
better on the deciding samples is not kept. So the result is a config, with which `jq.quantize` makes the same model again,
and a table of what was tried. It ends when the goal holds with confidence, when time is up, or when nothing is left.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jq.arithmetic.losses import decibels
from jq.config import QuantConfig
from jq.data.labels import Labels
from jq.data.sources import decides, open_source, readable_again
from jq.device.forecasting import forecast
from jq.errors import ConfigError, DataError, Error, check_choice
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.npu.facts import CHIPS
from jq.pipeline import Calibrated, Measured, Result, calibrated, quantize
from jq.research.goals import OWN, Goal, goal_of, samples_needed
from jq.research.islands import apart, islands, price, work
from jq.research.judging import Judge, Score
from jq.research.ledger import Ledger
from jq.research.metrics import Evaluate, EvaluationError
from jq.research.outcomes import AutoResult, Tried, shown
from jq.research.recorded import COLUMNS, read_row, row_of, rows_of
from jq.research.rungs import RUNGS, Candidate, Climb, Limits, Rung
from jq.research.widening import Wide, part_losses
from jq.util.digest import digest
from jq.util.durations import seconds_of
from jq.util.progress import log, progress_bar
from jq.version import __version__

_EVERY = 4  # samples, of which one decides
_WRITING = 0.1  # of the time, for judging what was tuned last, and for writing
_DECIBELS = 10.0  # of error that twice the bit operations must gain to be worth it


def auto(
    model: ModelLike,
    data: Any,
    *,
    target: str | float | None = None,
    chip: str = "stx",
    budget: float | str | None = None,
    evaluate: Evaluate | None = None,
    labels: Labels | Sequence[int] | np.ndarray | None = None,
    float_islands: int = 1,
    wide: Wide | None = None,
    max_cost: float = 1.15,
    rungs: Sequence[Rung] = RUNGS,
    ledger: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> AutoResult:
    """Return a float model quantized so that a target holds, or the best model found, and the config that reproduces it.

    `target` is "top1 -0.5" (points below float; needs `labels`), "agreement 98" (percent of the samples in float's class),
    "kl 0.02", "sqnr 25", or "file.py:function 0.98"; None finds the knee of accuracy against cost. `evaluate` is a function
    of a model, or of `outputs` (and `labels`), whose larger values are better; the target is then its least value, and a
    number with a sign is relative to the float model. `budget` is a time: seconds, or text such as "5m".

    One sample in four of `data`, which is what `jq.quantize` takes, is held out for decisions; the others calibrate and tune.
    Besides the regions that heads and the guard leave in float, a model may have `float_islands` regions in the `wide` format
    (None: int16 activations if scales are floats and the chip has A16W8, otherwise float). It may cost `max_cost` times the bit
    operations of 8 bits everywhere, or of itself without these regions, where that is above `max_cost` already. `ledger`, a
    .jsonl file, records what was tried: an interrupted search resumes from it.

    >>> import jq
    >>> images, labels = jq.zoo.calibration_set()
    >>> result = jq.auto(jq.zoo.path("fashion_resnet"), images[:64], target="sqnr 10", chip="phx")
    >>> result.reached, [t.rung for t in result.rungs]
    (True, ['XINT8'])
    """
    start, limit = time.perf_counter(), seconds_of(budget)
    if chip not in CHIPS:
        raise ConfigError(f"no chip {chip!r}; expected one of {', '.join(CHIPS)}")
    if wide is not None:
        check_choice("wide", wide, get_args(Wide))
    _check_limits(float_islands, max_cost)
    goal, evaluate = goal_of(target, evaluate)
    search = _Search.of(model, data, goal, evaluate, labels, Limits(chip, max_cost, float_islands, wide), seed)
    book = Ledger.open(ledger, COLUMNS)
    known = rows_of(book, search.identity)
    spent, recorded = sum(row["seconds"] for row in known.values()), {row["rung"] for row in known.values()}
    climb, tried, why, late = search.climb(), list[Tried](), "", ""

    def left() -> float:
        return math.inf if limit is None else (1 - _WRITING) * limit - spent - (time.perf_counter() - start)

    with progress_bar("auto", len(rungs), "rungs") as advance:
        for rung in rungs:
            if not rung.applies(climb):
                advance(1)
                continue
            if climb.tried and rung.name not in recorded and left() < _time_of(rung, tried):
                late = late or rung.name
                advance(1)
                continue
            step, ended = search.step(rung, climb, known, book, left())
            advance(1)
            if step is None:
                continue
            climb, row = step
            tried.append(row)
            log.info("%s: %s", rung.name, row.outcome)
            if ended:
                why = ended
                break
            if climb.best is not None and climb.best.score.holds and goal.bound is not None:
                why = f"{climb.best.rung} meets it"
                break
    if not why:
        why = f"the time limit of {limit:g} s was reached before {late}" if late else "nothing is left to try"
    return search.ended(climb, tried, why)


def _check_limits(float_islands: int, max_cost: float) -> None:
    if not isinstance(float_islands, int) or float_islands < 0:
        raise ConfigError(
            f"float_islands is {float_islands!r}; expected the number of regions that may be added, 0 or more"
        )
    if not (isinstance(max_cost, (int, float)) and math.isfinite(max_cost) and max_cost >= 1):
        raise ConfigError(f"max_cost is {max_cost!r}; expected at least 1, the bit operations of 8 bits everywhere")


def _time_of(rung: Rung, tried: Sequence[Tried]) -> float:
    """Seconds that a rung is taken to need: the most of those that made a model, but for the first, which compiles.

    One that stops in time needs twice the least, which a model takes that is not tuned.
    """
    made = [t.seconds for t in tried if t.score is not None]
    return 2 * min(made, default=0.0) if rung.stops else max(made[1:] or made, default=0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Search:
    """The model, the data and the judge that all rungs share."""

    model: ModelLike
    graph: Graph
    data: Any
    judge: Judge
    limits: Limits
    held_out: int
    seed: int
    identity: str  # of model, data, goal and limits
    measured: Measured
    lost: dict[tuple[QuantConfig, Wide], Mapping[str, float]]  # by parts
    warned: dict[QuantConfig, list[Warning | str]]  # of a candidate: repeated of the one that is chosen

    @classmethod
    def of(
        cls,
        model: ModelLike,
        data: Any,
        goal: Goal,
        evaluate: Evaluate | None,
        labels: Labels | Sequence[int] | np.ndarray | None,
        limits: Limits,
        seed: int,
    ) -> _Search:
        """The search, once samples are split and the float network has run on those that decide."""
        graph = model if isinstance(model, Graph) else load(model)
        if data is None:
            raise ConfigError("auto needs data: random samples cannot decide anything")
        data = readable_again(data, graph.inputs, seed)
        source = open_source(data, graph.inputs, seed=seed)
        samples = list(source.samples())
        count = len(samples)
        if count < 2:
            raise DataError(f"auto needs at least 2 samples, because some calibrate and others decide; got {count}")
        every = min(_EVERY, count)
        deciding = [s for i, s in enumerate(samples) if decides(i, every)]
        known = None if labels is None else _labels(labels, source.names, len(samples), every)
        warn_of_few(goal, len(deciding))
        judge = Judge.of(goal, graph, deciding, known, evaluate)
        identity = digest(graph, *map(digest, samples), str(goal), known, limits, seed, __version__)[:12]
        return cls(model, graph, data, judge, limits, every, seed, identity, {}, {}, {})

    def climb(self) -> Climb:
        """The climb before its first rung."""
        return Climb(self.limits, self.calibrated, self.losses, frozenset(node.label for node in self.graph.nodes))

    def calibrated(self, config: QuantConfig) -> Calibrated:
        """The model by a config, on the samples that do not decide."""
        own = config.replace(held_out=self.held_out, seed=self.seed)
        return calibrated(self.graph, self.data, own, measured=self.measured)

    def losses(self, config: QuantConfig, wide: Wide) -> Mapping[str, float]:
        """The loss of each part of the model by a config, as far as a wide format would mend it; measured once."""
        if (config, wide) not in self.lost:
            self.lost[config, wide] = part_losses(self.calibrated(config), self.judge.measure, wide)
        return self.lost[config, wide]

    def step(
        self, rung: Rung, climb: Climb, known: Mapping[str, Any], book: Ledger, left: float
    ) -> tuple[tuple[Climb, Tried] | None, str]:
        """One rung: the climb behind it and what came of it, None where there is nothing new; and why the search ends here."""
        start = time.perf_counter()
        config = rung.config(climb)
        if config is None:
            return None, ""
        config = config.replace(held_out=self.held_out, seed=self.seed)
        if any(c.config == config for c in climb.tried):
            return None, ""
        if (cost := price(config)) > self.limits.most:
            return (climb, Tried(rung.name, self._too_costly(cost, self.limits.most), 0.0, cost=cost)), ""
        key = f"{self.identity}{digest(rung.name, config.to_dict())[:12]}"
        if key in known:
            row = known[key]
            candidate, outcome = read_row(row, rung.name, config), row["outcome"]
            took, ended = float(row["seconds"]), ""
        else:
            candidate, outcome, ended = self._made(rung.name, config, climb, left)
            took = time.perf_counter() - start
            if not ended:
                book.append(row_of(key, rung.name, config, candidate, outcome, took))
        if candidate is None:
            return (climb, Tried(rung.name, outcome, took)), ended
        tried = Tried(
            rung.name, outcome, took, candidate.score, candidate.cost, candidate.narrow, candidate.islands,
            candidate.size, candidate.forecast,
        )  # fmt: skip
        if outcome not in ("kept", "no better"):
            return (climb, tried), ended
        best = candidate if outcome == "kept" else climb.best
        return (dataclasses.replace(climb, best=best, tried=(*climb.tried, candidate)), tried), ended

    def _made(self, name: str, config: QuantConfig, climb: Climb, left: float) -> tuple[Candidate | None, str, str]:
        """A candidate, whether it is kept, and why the search ends here."""
        try:
            result = self.quantized(config, None if math.isinf(left) else max(left, 0.0))
        except Error as error:
            return None, f"failed: {error}", ""
        if not result.complete:
            return None, "the time limit was reached before it was tuned", f"the time limit was reached in {name}"
        graph, plan = result.graph, result.plan
        cost, narrow = work(graph, plan)
        count = len(islands(graph, apart(graph, plan, config)))
        sizes = cost, narrow, count, result.model.ByteSize(), self._forecast(result)
        try:
            score = self.judge.score(result.model)
        except EvaluationError as error:
            held = Score(math.nan, None, None, None, math.inf, False)
            candidate = Candidate(name, config, held, *sizes, result)
            outcome = "kept" if climb.best is None else f"failed: {error}"
            return candidate, outcome, str(error)
        except Error as error:
            return None, f"failed: {error}", ""
        candidate = Candidate(name, config, score, *sizes, result)
        return candidate, self._outcome(candidate, climb), ""

    def quantized(self, config: QuantConfig, left: float | None = None) -> Result:
        """A model by a config; its warnings wait until it is chosen."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = quantize(self.model, self.data, config, time_budget=left, measured=self.measured)
        self.warned[config] = [w.message for w in caught]
        return result

    def _outcome(self, candidate: Candidate, climb: Climb) -> str:
        best, (cost, count) = climb.best, climb.most
        if not candidate.is_plain and candidate.cost > cost * (1 + 1e-9):
            return self._too_costly(candidate.cost, cost)
        if best is None:
            return "kept"
        if not candidate.is_plain and candidate.islands > count:
            return f"too many islands: {candidate.islands}, the limit is {count}"
        score = candidate.score
        better = score.error < best.score.error or (score.holds and not best.score.holds)
        return "kept" if better else "no better"

    def _too_costly(self, cost: float, most: float) -> str:
        return f"too costly: {cost:.2f}, the limit is {most:.3g}"

    def _forecast(self, result: Result) -> str:
        try:
            made = forecast(load(result.model), self.limits.chip)
        except Error as error:
            log.info("no forecast: %s", error)
            return ""
        return f"{made.counts['npu']}/{made.counts['cpu']}/{made.subgraphs}"

    def ended(self, climb: Climb, tried: Sequence[Tried], why: str) -> AutoResult:
        """The result: the best model, or the knee where there is no bound."""
        goal = self.judge.goal
        chosen = climb.best if goal.bound is not None or goal.metric == OWN else knee(climb.tried)
        chosen = climb.best if chosen is None else chosen
        if chosen is None:
            reasons = "; ".join(f"{t.rung}: {t.outcome}" for t in tried)
            raise DataError(f"auto made no model: {reasons or 'no rung applies'}")
        result = chosen.result or self.quantized(chosen.config)
        for message in dict.fromkeys(map(str, self.warned[chosen.config])):
            warnings.warn(message, stacklevel=3)
        reached = goal.bound is not None and chosen.score.holds
        rungs = tuple(dataclasses.replace(t, outcome="chosen") if t.rung == chosen.rung else t for t in tried)
        why = why if reached else f"{why}; {self._in_the_way(chosen, result, tried)}"
        return AutoResult(result, chosen.config, goal, reached, why, rungs, self.judge.whole, self.limits.chip)

    def _in_the_way(self, chosen: Candidate, result: Result, tried: Sequence[Tried]) -> str:
        goal, parts = self.judge.goal, [f"best found: {chosen.rung}, {shown(chosen.score)}"]
        needed = samples_needed(goal)
        if needed is not None and needed > len(self.judge.deciding.samples):
            parts.append(
                f"{len(self.judge.deciding.samples)} deciding samples cannot show {goal}: that takes {needed}, "
                f"so {needed * self.held_out} in all"
            )
        worst = [r for r in result.report.rows if r.sqnr is not None and r.kind == "activation"][:2]
        if worst:
            parts.append("largest losses by rounding: " + ", ".join(f"{r.tensor} ({r.sqnr:.0f} dB)" for r in worst))
        parts += [f"{t.rung} is {t.outcome}" for t in tried if t.outcome.startswith("too costly")][:1]
        return "; ".join(parts)


def warn_of_few(goal: Goal, count: int) -> None:
    """Warn where the deciding samples cannot show the goal, whatever the models are."""
    needed = samples_needed(goal)
    if needed is not None and needed > count:
        warnings.warn(
            f"{count} samples decide: they cannot show {goal}, which takes at least {needed}, so the search continues to "
            "the best model that it finds; give more data",
            stacklevel=4,
        )


def knee(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate that is worth its cost: a tenth more bit operations must gain a dB of error."""
    inside = [c for c in candidates if math.isfinite(c.score.error)]
    return max(inside, key=lambda c: decibels(1.0, max(c.score.error, 1e-30)) - _DECIBELS * c.cost, default=None)


def _labels(
    labels: Labels | Sequence[int] | np.ndarray, names: Sequence[str] | None, count: int, every: int
) -> np.ndarray:
    """The labels of the deciding samples; those with names are matched with the samples' names."""
    values = labels.of(count, names) if isinstance(labels, Labels) else np.asarray(labels)
    if values.ndim != 1 or values.dtype.kind not in "iu" or len(values) != count:
        raise DataError(
            f"labels are {values.dtype}{list(values.shape)}; expected one whole number for each of {count} samples"
        )
    return values[[i for i in range(count) if decides(i, every)]].astype(np.int64)
