"""Many quantizations of models as one piece of work: configs by models by seeds, each step done once.

A run is a path of steps: load, prepare, equalize, calibrate, the stages of finetuning, measure. Runs whose first steps
are the same, with the same data, options and seed as far as a step asks for them, are one until they part; so runs form
a tree, which is walked in depth. Programs depend on structure alone: learning rates, steps, strengths and seeds
are arguments, and one program serves all the runs of a group.

Runs are not stacked with `vmap`, though they could be: of four runs, rounding by a layer's form takes 0.9 of the time of
one by one and gradient steps 2.3 times as long, with other bits (`experiments/bench/ablate.py vmap`, two cores). A run
gives here, bit by bit, what `jq.quantize` gives alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from jq.config import QuantConfig
from jq.data.labels import Labels
from jq.data.preprocessing import Pixels
from jq.data.sources import drawn, open_source, readable_again
from jq.errors import DataError
from jq.graph import Graph
from jq.graph.read import load
from jq.pipeline import Calibrated, calibrated, corrected
from jq.plan import Plan
from jq.recovery.finetuning import check_tunable, draws, kind_of, rescaled, tune_stage
from jq.recovery.parts import Kind, Unit, keeping_programs, units
from jq.recovery.streams import Store
from jq.recovery.walk import store_of
from jq.research.executors import Executor, Shipped, performed, shipping
from jq.research.experiment import Experiment, Subject
from jq.research.ledger import NUMBER, Column, Ledger, Row
from jq.research.measuring import Bench
from jq.research.tables import Results
from jq.util.cache import enable
from jq.util.digest import digest
from jq.util.progress import progress_bar
from jq.version import __version__

COLUMNS: Mapping[str, Column] = {
    "hash": str, "model": str, "config": str, "seed": int, "same_as_seed": NUMBER, "options": str, "samples": int,
    "float_top1": NUMBER, "top1": NUMBER, "agreement": NUMBER, "sqnr": NUMBER, "kl": NUMBER, "seconds": NUMBER,
    "added_seconds": NUMBER, "megabytes": NUMBER, "digest": str, "jq": str, "jax": str, "jaxlib": str,
    **{f"{name}_{end}": NUMBER for name in ("change", "agreement", "sqnr", "kl") for end in ("low", "high")},
    "change": NUMBER, "only_float": NUMBER, "only_quantized": NUMBER, "p": NUMBER, "hits": str,
}  # fmt: skip
# Options that only tuning reads.
_TUNING = ("finetune", "finetune_steps", "finetune_rate", "finetune_batch", "finetune_drop", "finetune_norm")
_JAXLIB = importlib.metadata.version("jaxlib")


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One quantization to be made."""

    subject: str
    name: str  # of its config
    config: QuantConfig  # with its seed
    hash: str  # of all that its numbers depend on

    @property
    def stages(self) -> tuple[str, ...]:
        """Those of its finetuning."""
        return self.config.stages


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Runs that are the same until biases are corrected or finetuning begins."""

    subject: str
    config: QuantConfig  # without finetuning
    runs: tuple[Run, ...]
    tuning: str | None  # the finetuning of one of them, which says that data are read more than once

    @property
    def results(self) -> int:
        """How many different ones are expected: only blocks and networks are tuned on samples that a seed draws."""
        drawn = {r: any(kind_of(s) != "layer" for s in r.stages) for r in self.runs}
        return len({r.config if drawn[r] else r.config.replace(seed=0) for r in self.runs})


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """The groups of runs to do, and the rows that a table holds already."""

    groups: tuple[Group, ...]
    done: tuple[Row, ...]


def ablate(
    experiment: Experiment, output: str | os.PathLike[str] | None = None, *, executor: Executor | None = None
) -> Results:
    """Return a row for each config on each model with each seed; append them to `output`, .jsonl or .csv.

    Rows that the file has already, by a hash of model, data, config, seed and versions, are not computed again, so that
    a killed run resumes. Numbers are those of `jq.quantize`, bit by bit. Rows of seeds on which nothing depends
    repeat the first one's and name it. `added_seconds` is what a row took beyond the rows before it, `seconds` what all
    of its steps took, whoever they were done for, and `megabytes` the peak of the process until then.

    An `executor` computes the same rows elsewhere: `Processes(4)`, Dask's, MPI's. Runs that share more than calibration
    stay together, and a worker keeps its last calibration. Each measure has the ends of its 95 % interval beside it, by
    a bootstrap of the samples whose seed is 0; `change` is top-1 less that of the float model.

    >>> from jq.research import Experiment, Subject, ablate, grid
    >>> model = Subject.bundled("fashion_resnet", samples=16)
    >>> results = ablate(Experiment(subjects={"resnet": model}, configs=grid("XINT8", cle=[False, True])))
    >>> [row["config"] for row in results.rows]
    ['cle=False', 'cle=True']
    """
    enable()
    sources = {name: _opened(subject) for name, subject in experiment.subjects.items()}
    ledger = Ledger.open(output, COLUMNS)
    work = _work(experiment, sources, ledger.rows)
    total = sum(len(g.runs) for g in work.groups)
    wanted = [run.hash for run in runs_of(experiment, sources)]
    with progress_bar("ablate", total, "runs") as advance:
        made = _here(work, sources) if executor is None else _elsewhere(work, sources, executor)
        with contextlib.closing(made) as rows_made:
            for row in rows_made:
                ledger.append(row)
                advance(1)
    rows = {row["hash"]: row for row in ledger.rows}
    return Results([rows[h] for h in wanted])


def work_of(experiment: Experiment, output: str | os.PathLike[str] | None = None) -> Work:
    """Return the groups of runs that `ablate` would do, and the rows that it would not do again."""
    sources = {name: _opened(subject) for name, subject in experiment.subjects.items()}
    return _work(experiment, sources, Ledger.open(output, COLUMNS).rows)


def _work(experiment: Experiment, sources: Mapping[str, _Source], rows: Sequence[Row]) -> Work:
    done = {row["hash"]: row for row in rows}
    runs = runs_of(experiment, sources)
    left = _by([r for r in runs if r.hash not in done], lambda r: (r.subject, _trunk(r, sources[r.subject])))
    groups = tuple(
        Group(subject, config, tuple(alike), next((r.config.finetune for r in alike if r.stages), None))
        for (subject, config), alike in left
    )
    return Work(groups, tuple(done[r.hash] for r in runs if r.hash in done))


def _trunk(run: Run, source: _Source) -> QuantConfig:
    """The config of the steps before finetuning, where only data that are random or drawn depend on the seed."""
    plain, seed = QuantConfig(), run.config.seed if source.data is None or source.count is not None else 0
    return run.config.replace(**{name: getattr(plain, name) for name in _TUNING}, seed=seed)


def _by(items: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    """Items of like keys together, in the order of their first."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


@dataclasses.dataclass(frozen=True, eq=False)
class _Source:
    """A subject whose model is loaded."""

    graph: Graph
    data: Any  # of calibration; None for random ones
    count: int | None  # samples of them that a seed draws; None for all
    evaluation: Any
    labels: np.ndarray | None
    identity: str

    def calibration(self, seed: int) -> Any:
        """The data that a run of this seed sees."""
        return self.data if self.count is None else drawn(self.data, self.graph.inputs, self.count, seed)

    @property
    def travelling(self) -> _Source:
        """A copy for another machine: places of files are absolute, and data that cannot be pickled are samples."""
        parts = {name: _travelling(getattr(self, name), self.graph) for name in ("data", "evaluation")}
        return dataclasses.replace(self, **parts)


def _travelling(data: Any, graph: Graph) -> Any:
    if isinstance(data, Pixels):
        return dataclasses.replace(data, data=_travelling(data.data, graph))
    if isinstance(data, (str, os.PathLike)):
        return Path(data).absolute()
    try:
        pickle.dumps(data)
    except Exception:  # whatever a user's class raises
        return list(open_source(data, graph.inputs).samples())
    return data


def _opened(subject: Subject) -> _Source:
    graph = subject.model if isinstance(subject.model, Graph) else load(subject.model)
    data = subject.data if subject.data is None else readable_again(subject.data, graph.inputs)
    evaluation = data if subject.evaluation is None else readable_again(subject.evaluation, graph.inputs)
    if evaluation is None:
        raise DataError("an ablation without data needs evaluation data: random data of each seed cannot be compared")
    sources = [part if part is None else open_source(part, graph.inputs) for part in (data, evaluation)]
    digests = [[] if source is None else [*map(digest, source.samples())] for source in sources]
    count = subject.samples if subject.samples is not None and subject.samples < len(digests[0]) else None
    labels = subject.labels
    if isinstance(labels, Labels):
        labels = labels.of(len(digests[1]), None if sources[1] is None else sources[1].names)
    labels = None if labels is None else np.asarray(labels, np.int64)
    identity = digest(graph, *digests, labels, *(() if count is None else (count,)))
    return _Source(graph, data, count, evaluation, labels, identity)


def runs_of(experiment: Experiment, sources: Mapping[str, _Source]) -> list[Run]:
    """Return all runs: by model, then config, then seed."""
    runs = []
    for subject, source in sources.items():
        for name, config in experiment.configs.items():
            for seed in experiment.seeds:
                own = config.replace(seed=seed)
                identity = digest(source.identity, own.to_dict(), __version__, jax.__version__, _JAXLIB)
                runs.append(Run(subject, name, own, identity[:16]))
    return runs


# --- Where groups are computed ---


def _here(work: Work, sources: Mapping[str, _Source]) -> Generator[Row, None, None]:
    with keeping_programs():
        for subject, groups in _by(work.groups, lambda g: g.subject):
            source = sources[subject]
            bench = _bench(source)
            for group in groups:
                start = time.perf_counter()
                yield from _rows(group, bench, *_common(source, group), start)


def _elsewhere(work: Work, sources: Mapping[str, _Source], executor: Executor) -> Generator[Row, None, None]:
    """The rows as groups end: those of runs that have nothing in common but calibration are apart."""
    with shipping() as ship:
        shipped = {name: ship(sources[name].travelling) for name in {g.subject for g in work.groups}}
        items = [(shipped[g.subject], part) for g in work.groups for part in _parts(g)]
        with contextlib.closing(performed(executor, _worked, items)) as results:
            for _, rows in results:
                yield from rows


def _parts(group: Group) -> list[Group]:
    """The runs of a group that share no stage of finetuning with the others."""

    def first_stage(run: Run) -> tuple[Any, ...]:
        return (run.stages[0], run.config.finetune_steps, run.config.finetune_rate) if run.stages else ()

    return [dataclasses.replace(group, runs=tuple(runs)) for _, runs in _by(group.runs, first_stage)]


def _worked(shipped: Shipped, group: Group) -> list[Row]:
    """In a worker: the rows of a group; the last model's float outputs, and the last calibration, are kept."""
    enable()
    bench, start = _shared_bench(shipped), time.perf_counter()
    common = _shared_common(shipped, group.config, group.tuning)
    with keeping_programs():
        return list(_rows(group, bench, *common, start))


@functools.lru_cache(maxsize=1)
def _shared_bench(shipped: Shipped) -> Bench:
    return _bench(shipped.value)


@functools.lru_cache(maxsize=1)
def _shared_common(shipped: Shipped, config: QuantConfig, tuning: str | None) -> tuple[Calibrated, float]:
    return _common(shipped.value, Group("", config, (), tuning))


def _bench(source: _Source) -> Bench:
    return Bench.of(source.graph, source.evaluation, source.labels)


def _common(source: _Source, group: Group) -> tuple[Calibrated, float]:
    """The calibration that all runs of a group begin with, and its seconds."""
    start = time.perf_counter()
    # With a stage named the data stay readable; no step of these looks further at it.
    made = calibrated(source.graph, source.calibration(group.config.seed), group.config.replace(finetune=group.tuning))
    return made, time.perf_counter() - start


# --- A group of runs, as a tree of steps ---


def _rows(group: Group, bench: Bench, common: Calibrated, spent: float, start: float) -> Iterator[Row]:
    """The rows of a group that began at `start`, one by one; calibration took `spent`."""
    tree, measured, last = _Tree(common, group.config), bench.measurer(common.graph), start
    for runs, graph, params, plan, seconds in tree.leaves(group.runs):
        begun = time.perf_counter()
        measures = measured(graph, params, plan)
        now = time.perf_counter()
        for i, run in enumerate(runs):
            first = next(r for r in runs if r.name == run.name)
            yield {
                "hash": run.hash, "model": run.subject, "config": run.name, "seed": run.config.seed,
                "same_as_seed": None if first is run else first.config.seed,
                "options": json.dumps(_options(run.config)), **measures,
                "seconds": round(spent + seconds + now - begun, 3), "added_seconds": 0.0 if i else round(now - last, 3),
                "megabytes": _peak(), "digest": _digest(params, plan), "jq": __version__, "jax": jax.__version__,
                "jaxlib": _JAXLIB,
            }  # fmt: skip
        last = now


@dataclasses.dataclass(frozen=True, eq=False)
class _Tree:
    """The steps that runs of a group share."""

    common: Calibrated
    config: QuantConfig

    def leaves(self, runs: Sequence[Run]) -> Iterator[tuple[list[Run], Graph, Mapping[str, Any], Plan, float]]:
        """Runs that end alike, with what they end with and the seconds of their own steps."""
        plain = [r for r in runs if not r.stages or not len(self.common.guarded.plan)]
        if plain:
            start = time.perf_counter()
            result = corrected(self.common)
            yield plain, result.graph, result.graph.params, result.guarded.plan, time.perf_counter() - start
        if tuned := [r for r in runs if r not in plain]:
            check_tunable(tuned[0].config, self.common.guarded.plan)
            yield from self._below(tuned, 0, dict(self.common.graph.params), self.common.guarded.plan, 0.0)

    def _below(
        self, runs: Sequence[Run], number: int, params: dict[str, Any], plan: Plan, spent: float
    ) -> Iterator[tuple[list[Run], Graph, Mapping[str, Any], Plan, float]]:
        """The same, of runs that are alike in their first stages."""
        if ended := [r for r in runs if len(r.stages) == number]:
            yield ended, self.common.graph, params, rescaled(self.common.graph, plan), spent
        for _, alike in _by([r for r in runs if r not in ended], lambda r: self._step(r, number)):
            start, config = time.perf_counter(), alike[0].config
            group = self._units[kind_of(alike[0].stages[number])]
            tuned = tune_stage(self.common.graph, params, plan, group, self._store, config, number)
            yield from self._below(alike, number + 1, *tuned, spent + time.perf_counter() - start)

    def _step(self, run: Run, number: int) -> tuple[Any, ...]:
        """All that a stage of a run depends on besides the stages before."""
        stage, config = run.stages[number], run.config
        numbers = (config.finetune_steps, config.finetune_rate) if stage != "bias" else ()
        if not draws(stage, self._units[kind_of(stage)], self.common.guarded.plan):
            return stage, *numbers
        of_blocks = (config.finetune_drop, config.finetune_norm) if kind_of(stage) == "block" else ()
        return stage, *numbers, config.finetune_batch, *of_blocks, config.seed

    @functools.cached_property
    def _units(self) -> Mapping[str, list[Unit]]:
        return {kind: units(self.common.graph, self.common.guarded.plan, kind) for kind in get_args(Kind)}

    @functools.cached_property
    def _store(self) -> Store:
        graph = self.common.graph
        source = open_source(self.common.data, graph.inputs, seed=self.config.seed)
        return store_of(graph, self.common.guarded.plan, source, None)


def _options(config: QuantConfig) -> dict[str, Any]:
    """The options that differ from the defaults, but for the seed."""
    default = QuantConfig().to_dict()
    return {k: v for k, v in config.to_dict().items() if v != default[k] and k != "seed"}


def _digest(params: Mapping[str, Any], plan: Plan) -> str:
    """A hash of weights and plan, in the form of the tables that are published: equal bytes, equal digest."""
    whole = hashlib.sha256()
    for name in sorted(params):
        whole.update(name.encode() + np.ascontiguousarray(params[name]).tobytes())
    for name in sorted(plan):
        q = plan[name]
        whole.update(repr((name, q.grid, q.axis, q.dynamic)).encode())
        whole.update(np.asarray(q.scale).tobytes() + np.asarray(q.zero_point).tobytes())
    return whole.hexdigest()[:16]


def _peak() -> int | None:
    """The most megabytes that the process has had; None on Windows, which has no such count."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(most / (1 << 20 if sys.platform == "darwin" else 1 << 10))
