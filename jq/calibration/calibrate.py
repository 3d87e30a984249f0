"""Calibration: every statistic of every tensor in one streaming pass.

The graph is traced with a tap on each tensor; what the taps return are observers' states, so a step takes
a batch to a few small arrays, in one compiled call, and no tensor outlives its reading. Samples are taken
one at a time, as the vendor's tool does (`data.stream.folded`), and the host adds the steps up in 64 bits.

What an observer must know beforehand, where the candidates of the error table or the bins of a histogram
lie, comes from the first data. If later data outgrow it, bins are added and that batch is computed again, or
the table, of which six candidates serve where sixteen would be needed without looking, is made anew in a
second pass, from the range that is then known: the result is exact either way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jq.calibration.observed import (
    Observed,
    States,
    focused_tensors,
    formed_inputs,
    linear_inputs,
    observed_tensors,
    observers_of,
)
from jq.calibration.observers import ErrorTable, HistogramObserver, Observer, Place, State, wide
from jq.calibration.stats import Stats, read, write
from jq.config import QuantConfig, resolve
from jq.data.sources import Source, fingerprint, open_source
from jq.data.stream import Batch, Stream, concurrently, devices_of, local_mesh, narrow, shares
from jq.errors import DataError, ModelError
from jq.graph import Graph
from jq.readings.data_shapes import traceable
from jq.readings.packing import like_packed, pack
from jq.readings.tracing import trace
from jq.util.digest import digest
from jq.util.progress import progress_bar

_FIRST = 32  # samples that the error table's candidates are chosen from
_COPIED = 1 << 29  # bytes of weights
_MOST_BINS = 1 << 18  # of a histogram that grows: all tensors' do, as one array holds them


def calibrate(
    graph: Graph,
    data: Any,
    config: QuantConfig | str = "XINT8",
    *,
    mesh: Mesh | None = None,
    observers: Mapping[str, Observer] | None = None,
    like: Stats | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    reaches: Mapping[str, float] | None = None,
) -> Stats:
    """Return the statistics of every tensor of the graph that `config` needs, from one streaming pass.

    `data` is an onnxruntime `CalibrationDataReader`, an iterable of `{input name: array}`, an array or a dict
    of stacked arrays, a path to `.npz`, `.npy` or a folder of images or arrays, or None for random data.
    Batches are split over `mesh`, by default over all local devices. `observers` adds statistics of your own.
    `like` puts candidates and bins where other statistics have them, so that both merge. With `checkpoint`,
    an interrupted run resumes from that file when it is started again, and ends with the same bytes. `reaches` are the
    largest magnitudes of tensors where they are about known already, which saves a look at the first samples.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> images, _ = jq.zoo.calibration_set()
    >>> jq.calibrate(graph, images[:16])
    Stats(26 tensors, 16 samples, method='minmse', observers=['means', 'ties', 'errors'])
    """
    config, graph = resolve(config), traceable(graph)
    if (empty := next((v for v in graph.inputs if 0 in (v.shape or ())), None)) is not None:
        raise ModelError(
            f"input {empty} has no elements, so there is nothing to calibrate; make these dims positive or free"
        )
    source = open_source(data, graph.inputs, seed=config.seed)
    step = _Step.of(graph, config, source, mesh, like.observers if like is not None else None, observers or {})
    stream, keeper = step.stream, _Keeper()
    if checkpoint:
        identity = digest(
            fingerprint(source), dict(step.observers), step.observed.rows, stream.size, jax.__version__, graph
        )
        processes = {device.process_index for device in stream.mesh.devices.flat}
        keeper = _Keeper(Path(checkpoint), identity, shared=len(processes) > 1)
    stats = keeper.resume()
    begun = stream.batches(skip=0 if stats is None else stats.samples)
    with progress_bar("calibrate", source.length) as progress, contextlib.closing(begun):
        batches: Iterator[Batch] = begun
        if stats is None:
            known = like.places if like is not None else _places_for(step, reaches or {})
            places, batches = (known, begun) if known is not None else _places(step, begun)
            stats = step.fresh(config, places)
        else:
            step = step.observing(stats.observers)  # some may have grown
            progress(stats.samples)
        stats = _accumulate(step, stats, batches, keeper, progress)
        # The table of such a tensor may lack the best candidate for its range; with `like` the merged one counts.
        judged = stats.tensors if like is None and "errors" in stats.observers else ()
        outgrown = [t for t in judged if stats.best_exponent(t) is None]
        if outgrown and not source.again:
            raise DataError(
                f"tensor {outgrown[0]!r} needs exponents beyond the candidates from the first {_FIRST} samples, and the data "
                "cannot be read again; give a list, arrays or a reader with rewind()"
            )
        if outgrown:  # the range is known now, so that this pass is the last
            places = {name: _placed(o, stats.states[name]) for name, o in stats.observers.items()}
            stats = _accumulate(step, step.fresh(config, places), stream.batches(), keeper, progress)
    keeper.forget()
    return stats


def compile_ahead(graph: Graph, source: Source, config: QuantConfig, mesh: Mesh | None = None) -> None:
    """Compile the program of a calibration on samples like a source's first one, which alone is looked at."""
    step = _Step.of(traceable(graph), config, source, mesh)
    if not step.stream.wide:
        step.compile()


def _devices(graph: Graph) -> Mesh:
    """All local devices; one, where those of a CPU would each hold a copy of large weights in the same memory."""
    size = sum(a.nbytes for a in graph.params.values())
    return local_mesh(1 if jax.default_backend() == "cpu" and size > _COPIED else None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """One batch to the states of all tensors."""

    observed: Observed
    stream: Stream

    @classmethod
    def of(
        cls,
        graph: Graph,
        config: QuantConfig,
        source: Source,
        mesh: Mesh | None,
        observers: Mapping[str, Observer] | None = None,
        more: Mapping[str, Observer] = {},
    ) -> _Step:
        """The step for these observers, by default those that a config needs, and more."""
        if observers is None:
            outputs, focused = tuple(v.name for v in graph.outputs), focused_tensors(graph, config)
            own = observers_of(config, linear_inputs(graph), formed_inputs(graph), outputs, focused, again=source.again)
            observers = own | dict(more)
        stream = Stream.of(source, config.batch, trace(graph), mesh=mesh or _devices(graph))
        return cls(Observed.of(graph, observed_tensors(graph, config), observers, stream), stream)

    def compile(self) -> None:
        """Compile the program for a batch."""
        places = {
            n: o.place(np.zeros(self.observed.count(n)), np.ones(self.observed.count(n)))
            for n, o in self.observers.items()
        }
        arguments = like_packed(self.observed.graph, self.stream.mesh), self.observed.by_tensor(_used(places))
        self.observed.program(self.stream).compiled(arguments, *self.stream.like())

    @property
    def observers(self) -> Mapping[str, Observer]:
        """The observers by name."""
        return self.observed.observers

    def fresh(self, config: QuantConfig, places: Mapping[str, Place]) -> Stats:
        """Statistics of no data."""
        states = {name: wide(o.init(self.observed.count(name), places[name])) for name, o in self.observers.items()}
        return Stats(config, self.observed.rows, self.observers, places, states, 0)

    def __call__(self, batch: Batch, places: Mapping[str, Place]) -> States:
        """The batch's states; a DataError if a tensor has NaN or Inf."""
        program = self.observed.program(self.stream)
        arguments = self._params, self.observed.by_tensor(_used(places))
        made = shares(self.stream.run(program, arguments, batch), self.stream.mesh)
        states = functools.reduce(self._merged, map(self.observed.joined, made))
        _check_finite(self.observed, states, batch)
        return states

    def _merged(self, a: States, b: States) -> States:
        """The states of two devices as one, in 64 bits."""
        return {name: o.merge(wide(a[name]), wide(b[name])) for name, o in self.observers.items()}

    def observing(self, observers: Mapping[str, Observer]) -> _Step:
        """The same step with other observers."""
        return dataclasses.replace(self, observed=dataclasses.replace(self.observed, observers=observers))

    @functools.cached_property
    def _params(self) -> Mapping[str, Any]:
        return pack(self.observed.graph, mesh=self.stream.mesh)


def _used(places: Mapping[str, Place]) -> dict[str, Place]:
    """The parts of places that a program reads, in the types that JAX computes in."""
    host = ("edges", "coarsest")
    return {name: {k: narrow(v) for k, v in place.items() if k not in host} for name, place in places.items()}


def _places_for(step: _Step, reaches: Mapping[str, float]) -> dict[str, Place] | None:
    """The places of candidates for tensors of about these largest magnitudes; None where they do not tell them all.

    Candidates follow magnitudes alone, where bins follow both ends of a range. They have room for one octave above; so they
    are placed for half an octave less, and serve for half an octave more or less.
    """
    placed = [o for o in step.observers.values() if o.extent is not None]
    known = reaches.keys() >= step.observed.rows.keys()
    if not placed or not known or not all(isinstance(o, ErrorTable) for o in placed):
        return None
    places: dict[str, Place] = {}
    for name, observer in step.observers.items():
        rows = [reaches[tensor] for tensor, counts in step.observed.rows.items() for _ in range(counts[name])]
        high = np.array(rows, np.float64) / np.sqrt(2)
        places[name] = _placed(observer, {"low": -high, "high": high})
    return places


def _places(step: _Step, batches: Iterator[Batch]) -> tuple[dict[str, Place], Iterator[Batch]]:
    """The places of candidates and bins, and all batches, of which the first were read to find them.

    The range of the first samples comes from the same compiled step, as it costs less to compute their tables in
    vain than to compile another program. Where bins are made for all data, a program of ranges alone reads them.
    """
    placed = {name: o.extent for name, o in step.observers.items() if o.extent is not None}
    if not placed:
        return {name: {} for name in step.observers}, batches
    bins = [o for o in step.observers.values() if isinstance(o, HistogramObserver)]
    looked: Iterable[Batch]
    if any(o.growth == 1 for o in bins):
        if not step.stream.source.again:
            raise DataError(
                "this method reads the data twice, the first time for the range of its histograms; give a list, arrays or a "
                "reader with rewind(), or set histogram_range='first'"
            )
        finder = step.observing(placed)
        count, looked = sys.maxsize, step.stream.batches()
    else:
        finder, count = step, step.stream.source.first if bins else _FIRST
        kept = list(itertools.islice(batches, -(-count // step.stream.size)))
        looked, batches = kept, itertools.chain(kept, batches)
    counts = {n: step.observed.count(n) for n in finder.observers}
    anywhere = {n: o.place(np.zeros(counts[n]), np.ones(counts[n])) for n, o in finder.observers.items()}
    states = {name: wide(o.init(step.observed.count(name), {})) for name, o in placed.items()}
    for batch in looked:
        batch = dataclasses.replace(batch, valid=batch.valid & (np.arange(batch.valid.size) < count - batch.start))
        seen = finder(batch, anywhere)
        states = {name: o.merge(states[name], seen[name]) for name, o in placed.items()}
    places: dict[str, Place] = {name: _placed(o, states.get(name, {})) for name, o in step.observers.items()}
    return places, batches


def _accumulate(
    step: _Step, stats: Stats, batches: Iterable[Batch], keeper: _Keeper, progress: Callable[[int], None]
) -> Stats:
    """The statistics with all batches added."""
    # What may ask for more bins comes in turn, and so do devices, all of which compute already.
    grows = any(isinstance(o, HistogramObserver) for o in step.observers.values())
    in_turn = grows or devices_of(step.stream.mesh) > 1

    def seen(batch: Batch) -> tuple[Batch, States]:
        return batch, step(batch, stats.places)

    for batch, states in map(seen, batches) if in_turn else concurrently(seen, batches):
        step, stats = _added(step, stats, batch, states)
        keeper.keep(stats)
        progress(batch.count)
    return stats


def _added(step: _Step, stats: Stats, batch: Batch, seen: States) -> tuple[_Step, Stats]:
    """The statistics with a batch added, and the step to go on with: one with more bins where they were outgrown."""
    for name, observer in step.observers.items():
        if isinstance(observer, HistogramObserver):
            low, high = seen[name]["low"], seen[name]["high"]
            covered = observer.covers(stats.places[name], low, high)
            if not covered.all():
                growth = observer.growth_for(stats.places[name], low, high)
                if observer.bins * growth > _MOST_BINS:
                    owner = step.observed.owner(name, int(covered.argmin()))
                    raise DataError(
                        f"tensor {owner!r} exceeds the range of the first samples so far that its histogram would need "
                        f"{observer.bins * growth:,} bins; put typical samples first, or use another method"
                    )
                stats = stats.grown(name, growth)
                step = step.observing(stats.observers)
                return _added(step, stats, batch, step(batch, stats.places))
    states = {name: o.merge(stats.states[name], seen[name]) for name, o in step.observers.items()}
    return step, dataclasses.replace(stats, states=states, samples=stats.samples + batch.count)


def _placed(observer: Observer, state: State) -> dict[str, np.ndarray]:
    """The place of an observer's candidates or bins for a range, if it has any."""
    return observer.place(state["low"], state["high"]) if observer.extent is not None else {}


def _check_finite(observed: Observed, states: States, batch: Batch) -> None:
    """Raise for the first tensor in which the batch left NaN or Inf.

    XLA's minimum and maximum of a large tensor pass over NaN; sums do not.
    """
    for name, state in states.items():
        bad = {
            "NaN": np.isnan(state["sums"][:, -1] if "sums" in state else state.get("total", np.zeros(1))),
            "Inf": (np.isinf(state["low"]) | np.isinf(state["high"])) & (state["low"] <= state["high"])
            if {"low", "high"} <= state.keys()
            else np.zeros(1, bool),
        }
        for kind, rows in bad.items():
            if rows.any():
                last = batch.start + batch.count - 1
                raise DataError(
                    f"tensor {observed.owner(name, int(rows.argmax()))!r} has {kind} in samples {batch.start} to {last}: "
                    "either the model overflows on these samples, or they are damaged"
                )


@dataclasses.dataclass(frozen=True)
class _Keeper:
    """Keeps a run's statistics in a file; without a path it does nothing.

    Where several processes make one run, the first decides and writes, on storage that all of them read.
    """

    path: Path | None = None
    identity: str = ""  # of the run: a file of another one is refused
    shared: bool = False

    def resume(self) -> Stats | None:
        """The statistics that an earlier run left, or None."""
        exists = self.path is not None and self.path.exists()
        if self.shared:
            exists = bool(multihost_utils.broadcast_one_to_all(np.int32(exists)))
        if self.path is None or not exists:
            return None
        stats, extra = read(self.path)
        if extra.get("identity") != self.identity:
            raise DataError(
                f"{self.path} belongs to another model, config or data; remove it, or choose another checkpoint"
            )
        return stats

    def keep(self, stats: Stats) -> None:
        """Write the statistics so far, which all processes have."""
        if self.path is not None and self._writes:
            write(self.path, stats, {"identity": self.identity})

    def forget(self) -> None:
        """Remove the file: the run has ended."""
        if self.path is not None and self._writes:
            self.path.unlink(missing_ok=True)
        if self.shared:
            multihost_utils.sync_global_devices("jq.calibrate has ended")

    @property
    def _writes(self) -> bool:
        return not self.shared or jax.process_index() == 0
