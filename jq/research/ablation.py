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

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic.losses import decibels
from jq.config import QuantConfig
from jq.data.arrays import Sample
from jq.data.labels import Labels
from jq.data.sources import open_source, readable_again
from jq.data.stream import Batch, Program, Stream
from jq.errors import DataError
from jq.evaluation import metrics
from jq.graph import Graph
from jq.graph.read import load
from jq.passes.prepare import prepare
from jq.pipeline import Calibrated, calibrated, corrected
from jq.plan import Plan
from jq.readings.fake import fake_quant
from jq.readings.packing import pack
from jq.readings.tracing import trace
from jq.recovery.finetuning import check_tunable, draws, kind_of, rescaled, store_of, tune_stage
from jq.recovery.parts import Kind, Unit, keeping_programs, units
from jq.recovery.streams import CHUNK_BYTES, Store
from jq.research.experiment import Experiment, Subject
from jq.research.ledger import NUMBER, Column, Ledger, Row
from jq.research.tables import Results
from jq.util.cache import enable
from jq.util.digest import digest
from jq.util.progress import progress_bar
from jq.version import __version__

COLUMNS: Mapping[str, Column] = {
    "hash": str, "model": str, "config": str, "seed": int, "same_as_seed": NUMBER, "options": str, "samples": int,
    "float_top1": NUMBER, "top1": NUMBER, "agreement": NUMBER, "sqnr": NUMBER, "kl": NUMBER, "seconds": NUMBER,
    "added_seconds": NUMBER, "megabytes": NUMBER, "digest": str, "jq": str, "jax": str, "jaxlib": str,
}  # fmt: skip
# Options that only tuning reads.
_TUNING = ("finetune", "finetune_steps", "finetune_rate", "finetune_batch", "finetune_drop")
_JAXLIB = importlib.metadata.version("jaxlib")
_BATCH = 64  # samples that are measured at once, of data whose number is not known


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


def ablate(experiment: Experiment, output: str | os.PathLike[str] | None = None) -> Results:
    """Return a row for each config on each model with each seed; append them to `output`, .jsonl or .csv.

    Rows that the file has already, by a hash of model, data, config, seed and versions, are not computed again, so that
    a killed run resumes. Numbers are those of `jq.quantize`, bit by bit. Rows of seeds on which nothing depends
    repeat the first one's and name it. `added_seconds` is what a row took beyond the rows before it, `seconds` what all
    of its steps took, whoever they were done for, and `megabytes` the peak of the process until then.

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
    with progress_bar("ablate", total, "runs") as advance, keeping_programs():
        for _, groups in _by(work.groups, lambda g: g.subject):
            bench = _Bench.of(sources[groups[0].subject])
            for group in groups:
                for row in _rows(group, sources[group.subject], bench):
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
    groups = tuple(Group(subject, config, tuple(alike)) for (subject, config), alike in left)
    return Work(groups, tuple(done[r.hash] for r in runs if r.hash in done))


def _trunk(run: Run, source: _Source) -> QuantConfig:
    """The config of the steps before finetuning, where only random data depend on the seed."""
    plain, seed = QuantConfig(), run.config.seed if source.data is None else 0
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
    evaluation: Any
    labels: np.ndarray | None
    identity: str


def _opened(subject: Subject) -> _Source:
    graph = subject.model if isinstance(subject.model, Graph) else load(subject.model)
    data = subject.data if subject.data is None else readable_again(subject.data, graph.inputs)
    evaluation = data if subject.evaluation is None else readable_again(subject.evaluation, graph.inputs)
    if evaluation is None:
        raise DataError("an ablation without data needs evaluation data: random data of each seed cannot be compared")
    sources = [part if part is None else open_source(part, graph.inputs) for part in (data, evaluation)]
    digests = [[] if source is None else [*map(digest, source.samples())] for source in sources]
    labels = subject.labels
    if isinstance(labels, Labels):
        labels = labels.of(len(digests[1]), None if sources[1] is None else sources[1].names)
    labels = None if labels is None else np.asarray(labels, np.int64)
    return _Source(graph, data, evaluation, labels, digest(graph, *digests, labels))


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


# --- A group of runs, as a tree of steps ---


def _rows(group: Group, source: _Source, bench: _Bench) -> Iterator[Row]:
    """The rows of a group, one by one."""
    start = time.perf_counter()
    any_tuning = next((r.config.finetune for r in group.runs if r.stages), None)
    # With a stage named the data stay readable; no step of these looks further at it.
    common = calibrated(source.graph, source.data, group.config.replace(finetune=any_tuning))
    tree, spent = _Tree(common, group.config), time.perf_counter() - start
    measured = bench.measurer(common.graph)
    last = start
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
        return stage, *numbers, config.finetune_batch, config.finetune_drop if stage == "block" else None, config.seed

    @functools.cached_property
    def _units(self) -> Mapping[str, list[Unit]]:
        return {kind: units(self.common.graph, self.common.guarded.plan, kind) for kind in get_args(Kind)}

    @functools.cached_property
    def _store(self) -> Store:
        return store_of(self.common.graph, self.common.guarded.plan, self.common.data, self.config, None)


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


# --- Measures ---

Measure = Callable[[Graph, Mapping[str, Any], Plan], dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Bench:
    """The evaluation data of a model, and the float model's outputs on them."""

    stream: Stream
    batches: list[Batch]
    labels: np.ndarray | None
    reference: list[np.ndarray]  # each output [samples, ...]

    @classmethod
    def of(cls, source: _Source) -> _Bench:
        """Float targets, once for all runs of a model."""
        graph = prepare(source.graph)
        opened, fn = open_source(source.evaluation, graph.inputs), trace(graph)
        shapes = [[d for d in v.shape or () if isinstance(d, int)] for v in graph.values.values()]
        largest = 4 * max((math.prod(shape) for shape in shapes), default=1)
        stream = Stream.of(opened, max(1, min(CHUNK_BYTES // largest, opened.length or _BATCH)), fn)
        batches = list(stream.batches())
        program = _outputs(fn, stream)
        return cls(stream, batches, source.labels, stream.rows(program, pack(graph), batches, concurrent=True))

    def measurer(self, graph: Graph) -> Measure:
        """The function that measures quantizations of one graph; one program, as weights and plans are arguments."""
        qfn = fake_quant(graph)
        program = _outputs(lambda given, sample: qfn(given[0], given[1], sample), self.stream)

        def measure(own: Graph, params: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
            arguments = pack(own.with_arrays({**own.arrays, **params})), jax.tree.map(jnp.asarray, plan)
            return self._compared(self.stream.rows(program, arguments, self.batches, concurrent=True))

        return measure

    def _compared(self, outputs: list[np.ndarray]) -> dict[str, Any]:
        pairs = [(a, b) for a, b in zip(self.reference, outputs, strict=True) if a.dtype.kind == "f"]
        signal = sum(float(np.sum(np.square(a, dtype=np.float64))) for a, _ in pairs)
        noise = sum(float(np.sum(np.square(a.astype(np.float64) - b))) for a, b in pairs)
        sqnr = decibels(signal, noise) if signal and noise else None
        samples, classes = len(outputs[0]), [p for p in pairs if p[0].ndim <= 3 and p[0].shape[-1] > 1]
        row: dict[str, Any] = {"samples": samples, "sqnr": sqnr}
        row |= dict.fromkeys(("float_top1", "top1", "agreement", "kl"))
        if classes:
            one, two = (a.reshape(-1, a.shape[-1]).astype(np.float64) for a in classes[0])
            row["agreement"] = float(np.mean(one.argmax(-1) == two.argmax(-1)))
            row["kl"] = float(np.mean(np.sum(np.exp(_log(one)) * (_log(one) - _log(two)), -1)))
            if self.labels is not None:
                row |= {"float_top1": metrics.topk(one, self.labels), "top1": metrics.topk(two, self.labels)}
        return row


def _outputs(fn: Callable[[Any, Sample], Mapping[str, Any]], stream: Stream) -> Program:
    """The compiled program of all outputs of a function of arguments and one sample."""

    def program(arguments: Any, inputs: Sample, _: Any) -> list[Any]:
        return list(jax.vmap(lambda sample: fn(arguments, {**sample, **stream.known}))(inputs).values())

    return stream.spread(program)


def _log(scores: np.ndarray) -> np.ndarray:
    """Logarithms of probabilities, which scores are or become by softmax."""
    if scores.min() >= 0 and np.allclose(scores.sum(-1), 1, atol=1e-3):
        return np.log(np.maximum(scores, 1e-12))
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
