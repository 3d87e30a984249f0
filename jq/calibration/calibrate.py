"""Calibration: every statistic of every tensor in one streaming pass.

The graph is traced with a tap on each tensor; what the taps return are observers' states, so a step takes
a batch to a few small arrays, in one compiled call, and no tensor outlives its reading. Within a step a
`lax.scan` takes one sample at a time, as the vendor's tool does: a batch has no effect on the result, and
a short last one is masked. Devices take shares of the batch, and their states merge in order. The host
adds the steps up in 64 bits.

What an observer must know beforehand, where the candidates of the error table or the bins of a histogram
lie, comes from the first data. If later data outgrow it, bins are added and that batch is computed again, or
the table, of which six candidates serve where sixteen would be needed without looking, is made anew in a
second pass, from the range that is then known: the result is exact either way.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jq.arithmetic import layout
from jq.arithmetic.exponents import MINMSE
from jq.calibration.checkpoint import Keeper
from jq.calibration.observers import (
    ErrorTable,
    HistogramObserver,
    Means,
    Moments,
    MovingRange,
    Observer,
    Place,
    Range,
    State,
    wide,
)
from jq.calibration.stats import Stats
from jq.config import QuantConfig, resolve
from jq.data.sources import Batch, Source, batches, fingerprint, open_source
from jq.errors import ConfigError, DataError
from jq.graph import Graph, Node
from jq.ops.linear import has_product
from jq.ops.table import lookup
from jq.readings.packing import pack
from jq.readings.tracing import AnyOrder, trace
from jq.util.digest import digest
from jq.util.progress import progress_bar

States = dict[str, State]

_FIRST = 32  # samples that the error table's candidates are chosen from
_MOST_BINS = 1 << 18  # of a histogram that grows: all tensors' do, as one array holds them
_ROOM = 1  # octaves that values may grow beyond the first batch before the table is made anew
_ROOM_ONCE = 11  # the same where data cannot be read again


def calibrate(
    graph: Graph,
    data: Any,
    config: QuantConfig | str = "XINT8",
    *,
    mesh: Mesh | None = None,
    observers: Mapping[str, Observer] | None = None,
    like: Stats | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Stats:
    """Return the statistics of every tensor of the graph that `config` needs, from one streaming pass.

    `data` is an onnxruntime `CalibrationDataReader`, an iterable of `{input name: array}`, an array or a dict
    of stacked arrays, a path to `.npz`, `.npy` or a folder of images or arrays, or None for random data.
    Batches are split over `mesh`, by default over all local devices. `observers` adds statistics of your own.
    `like` puts candidates and bins where other statistics have them, so that both merge. With `checkpoint`,
    a run that was stopped goes on from that file when it is started again, and ends with the same bytes.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> images, _ = jq.zoo.calibration_set()
    >>> jq.calibrate(graph, images[:16])
    Stats(26 tensors, 16 samples, method='minmse', observers=['means', 'errors'])
    """
    config = resolve(config)
    source = open_source(data, graph.inputs, seed=config.seed)
    mesh = mesh or jax.make_mesh((jax.local_device_count(),), ("batch",), devices=jax.local_devices())
    own = observers_of(config, linear_inputs(graph), again=source.again)
    wanted = own | dict(observers or {}) if like is None else like.observers
    step = _Step.of(graph, source, wanted, config, mesh)
    keeper = Keeper(Path(checkpoint), step.identity(source), step.shared) if checkpoint else Keeper()
    stream: Iterator[Batch]
    with progress_bar("calibrate", source.length) as progress:
        stats = keeper.resume()
        if stats is None:
            stream = batches(source, step.size)
            places, stream = (like.places, stream) if like is not None else _places(step, source, stream)
            stats = step.fresh(config, places)
        else:
            step = dataclasses.replace(step, observers=stats.observers)  # some may have grown
            stream = batches(source, step.size, skip=stats.feeds)
            progress(stats.feeds)
        stats = _accumulate(step, stats, stream, keeper, progress)
        outgrown = _outgrown(stats) if like is None else []  # what matters then is the merged statistics
        if outgrown and not source.again:
            raise DataError(
                f"tensor {outgrown[0]!r} left the exponents that the first {_FIRST} samples put in question, and the data "
                "cannot be read again; give a list, arrays or a reader with rewind()"
            )
        if outgrown:  # the range is known now, so that this pass is the last
            places = {name: _placed(o, stats.states[name]) for name, o in stats.observers.items()}
            stream = batches(source, step.size)
            stats = _accumulate(step, step.fresh(config, places), stream, keeper, progress)
    keeper.forget()
    return stats


def observed(graph: Graph, config: QuantConfig) -> list[str]:
    """The tensors whose statistics `config` needs.

    With power-of-two scales that leaves out what a Relu or Clip alone reads, as its range is the output's as it was
    observed; with float scales it is all of them, as in onnxruntime's calibrators.
    """
    names = dict.fromkeys(v.name for v in graph.inputs)
    names |= dict.fromkeys(name for node in graph.nodes for name in node.outputs if name)
    cutting = [node for node in graph.nodes if cuts_alone(graph, node)]
    unseen = {node.inputs[0] for node in cutting} - {node.outputs[0] for node in cutting}
    return [n for n in names if n not in unseen or config.scale == "float"]


def cuts_alone(graph: Graph, node: Node) -> bool:
    """Whether a node alone reads its input and cuts it to an interval."""
    entry = lookup(node, graph.opset(node.domain))
    return entry is not None and entry.cuts and len(graph.consumers[node.inputs[0]]) == 1


def linear_inputs(graph: Graph) -> tuple[str, ...]:
    """The tensors that operators read whose channels' means tell what rounding of the weight shifts, with a bias."""
    biased = [n for n in graph.nodes if len(n.inputs) > 2 and has_product(graph, n)]
    return tuple(dict.fromkeys(n.inputs[0] for n in biased))


def observers_of(config: QuantConfig, linear: tuple[str, ...] = (), *, again: bool = True) -> dict[str, Observer]:
    """The observers that a method needs; `again` says whether the data can be read twice."""
    found: dict[str, Observer] = {}
    if config.corrects_bias and linear:
        found["means"] = Means(only=linear)
    if config.moving_average is not None:
        found["moving_range"] = MovingRange(weight=config.moving_average)
    if config.method == "minmse":
        room = _ROOM if again else _ROOM_ONCE
        count = len(MINMSE) + room
        parts = count if config.error_parts else 1
        found["errors"] = ErrorTable(grid=config.activation_grid, candidates=count, parts=parts)
        return found
    found |= {"range": Range(), "moments": Moments()}
    if config.method not in ("nonoverflow", "minmax"):
        quark = config.method == "minmse_hist"
        absolute = config.symmetric and config.method in ("percentile", "layerwise_percentile")
        found["histogram"] = HistogramObserver(
            bins=config.bins,
            absolute=absolute,
            centred=not absolute and not quark,
            growth=3 if quark or config.histogram_range == "first" else 1,
            double=quark,
        )
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """One batch to the states of all tensors, compiled."""

    graph: Graph
    observers: Mapping[str, Observer]
    tensors: Mapping[str, Mapping[str, int]]  # rows of each tensor by observer
    mesh: Mesh
    size: int  # samples per batch
    known: Mapping[str, np.ndarray]  # inputs that decide shapes, the same for all samples

    @classmethod
    def of(
        cls, graph: Graph, source: Source, observers: Mapping[str, Observer], config: QuantConfig, mesh: Mesh
    ) -> _Step:
        """The step for data like the source's, on the tensors that turn out to be floats."""
        names = observed(graph, config)
        fn = trace(graph, taps=names)
        known = {k: v for k, v in source.head.items() if k in fn.static_inputs}
        with types_of(fn.wide):
            feed = {k: narrow(v) for k, v in source.head.items() if k not in known}
            seen = jax.eval_shape(
                lambda params, inputs: {k: v for k, v in fn(params, inputs | known)[1].items() if _is_float(v)},
                dict(graph.params),
                feed,
            )
        floats = {k: seen[k].shape for k in names if k in seen}
        tensors = {
            k: {name: o.rows(shape) if o.observes(k) else 0 for name, o in observers.items()}
            for k, shape in floats.items()
        }
        size = _multiple(config.batch, mesh)
        largest = max((math.prod(shape) for shape in floats.values()), default=0)
        if largest * size >= 1 << 31:
            raise ConfigError(f"batch={config.batch} of tensors of {largest} elements cannot be counted in 32 bits")
        return cls(graph, observers, tensors, mesh, size, known)

    def fresh(self, config: QuantConfig, places: Mapping[str, Place]) -> Stats:
        """Statistics of no data."""
        states = {name: wide(o.init(self.count(name), places[name])) for name, o in self.observers.items()}
        return Stats(config, self.tensors, self.observers, places, states, 0)

    def identity(self, source: Source) -> str:
        """The identity of a run of this step on these data."""
        return digest(fingerprint(source), self.observers, self.tensors, self.size, jax.__version__, self.graph)

    @property
    def shared(self) -> bool:
        """Whether several processes run it together."""
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def count(self, observer: str) -> int:
        """Rows of an observer's state."""
        return sum(rows[observer] for rows in self.tensors.values())

    def __call__(self, batch: Batch, places: Mapping[str, Place]) -> Any:
        """The batch's states, on their way."""
        for name, value in self.known.items():
            if not (batch.inputs[name] == value).all():
                raise DataError(f"input {name!r} decides shapes, so all samples must have the value {value}")
        split = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names[0]))
        with types_of(self._fn.wide):
            inputs = {k: narrow(v) for k, v in batch.inputs.items() if k not in self.known}
            inputs, valid = jax.tree.map(
                lambda v: jax.make_array_from_callback(v.shape, split, lambda part: v[part]), (inputs, batch.valid)
            )
        used = {
            name: {k: narrow(v) for k, v in place.items() if k not in ("edges", "coarsest")}
            for name, place in places.items()
        }
        with types_of(self._fn.wide):
            return _compiled(self)(self._params, inputs, valid, used)

    @functools.cached_property
    def _params(self) -> Mapping[str, Any]:
        return pack(self.graph, mesh=self.mesh)

    @functools.cached_property
    def _fn(self) -> Any:
        return trace(self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Step) and self._program == other._program

    def __hash__(self) -> int:
        return hash(self._program)

    @functools.cached_property
    def _program(self) -> tuple[Any, ...]:
        """What the compiled program hangs on, so that the next calibration of the same graph finds it."""
        tensors = tuple((name, tuple(rows.items())) for name, rows in self.tensors.items())
        known = tuple((name, str(value.dtype), value.shape, value.tobytes()) for name, value in self.known.items())
        return self.graph, tuple(self.observers.items()), tensors, known, self.mesh

    def _share(self, params: Any, inputs: Any, valid: jax.Array, places: Mapping[str, Place]) -> States:
        """The states of one device's share of the batch, merged with those of the others in their order."""

        def take(states: States, feed: tuple[Any, jax.Array]) -> tuple[States, None]:
            sample, counts = feed
            seen = self._tapped(places)(params, {**sample, **self.known})[1] if self.tensors else {}
            rows = {
                name: jax.tree.map(
                    lambda *leaves: jnp.concatenate(leaves), *(s[name] for s in seen.values() if name in s)
                )
                for name in self.observers
                if any(name in s for s in seen.values())
            }
            new = self._merged(states, rows)
            return jax.tree.map(lambda a, b: jnp.where(counts, a, b), new, states), None

        none = {name: o.init(self.count(name), places[name]) for name, o in self.observers.items()}
        states, _ = lax.scan(take, none, (inputs, valid))
        everyone = lax.all_gather(states, self.mesh.axis_names[0])
        shares = [jax.tree.map(lambda v, i=i: v[i], everyone) for i in range(_devices(self.mesh))]
        return functools.reduce(self._merged, shares)

    def _merged(self, a: States, b: States) -> States:
        return {name: o.merge(a[name], b[name]) if name in b else a[name] for name, o in self.observers.items()}

    def _tapped(self, places: Mapping[str, Place]) -> Any:
        """The traced graph, whose taps return the observers' states."""
        starts = {
            name: itertools.accumulate([rows[name] for rows in self.tensors.values()], initial=0) for name in places
        }

        def tap(rows: Mapping[str, int]) -> AnyOrder | Callable[[Any], Any]:
            own = {}
            for name, place in places.items():
                start = next(starts[name])
                own[name] = {k: v[start : start + rows[name]] for k, v in place.items()}

            here = {name: o for name, o in self.observers.items() if rows[name]}

            def observe(value: Any) -> States:
                x, axis = jnp.asarray(layout.raw(value)).astype(jnp.float32), layout.axis_of(value, 1)
                turned = {n: dataclasses.replace(o, axis=axis) if o.axis == 1 else o for n, o in here.items()}
                return {name: o.observe(x, own[name]) for name, o in turned.items()}

            return AnyOrder(observe) if all(o.axis in (None, 1) for o in here.values()) else observe

        return trace(self.graph, taps={name: tap(rows) for name, rows in self.tensors.items()})


@functools.lru_cache(maxsize=4)
def _compiled(step: _Step) -> Callable[..., Any]:
    whole, split = PartitionSpec(), PartitionSpec(step.mesh.axis_names[0])
    spread = jax.shard_map(
        step._share, mesh=step.mesh, in_specs=(whole, split, split, whole), out_specs=whole, check_vma=False
    )
    # The widest vectors make the error table, which is all arithmetic, a fifth faster and nothing slower.
    options = {"xla_cpu_prefer_vector_width": 512} if step.mesh.devices.flat[0].platform == "cpu" else None
    return jax.jit(spread, compiler_options=options)


def _places(step: _Step, source: Source, stream: Iterator[Batch]) -> tuple[dict[str, Place], Iterator[Batch]]:
    """Where candidates and bins lie, and the stream with what was read of it to find that out.

    The range of the first samples comes from the same compiled step, as it costs less to compute their tables in
    vain than to compile another program. Where bins are made for all data, a program of ranges alone reads them.
    """
    placed = {name: o.extent for name, o in step.observers.items() if o.extent is not None}
    if not placed:
        return {name: {} for name in step.observers}, stream
    bins = [o for o in step.observers.values() if isinstance(o, HistogramObserver)]
    looked: Iterable[Batch]
    if any(o.growth == 1 for o in bins):
        if not source.again:
            raise DataError(
                "this method reads the data twice, first for the range of its histograms: give a list, arrays or a "
                "reader with rewind(), or set histogram_range='first'"
            )
        finder = dataclasses.replace(step, observers=placed)
        count, looked = sys.maxsize, batches(source, step.size)
    else:
        finder, count = step, source.first if bins else _FIRST
        kept = list(itertools.islice(stream, -(-count // step.size)))
        looked, stream = kept, itertools.chain(kept, stream)
    anywhere = {n: o.place(np.zeros(step.count(n)), np.ones(step.count(n))) for n, o in finder.observers.items()}
    states = {name: wide(o.init(step.count(name), {})) for name, o in placed.items()}
    for batch in looked:
        batch = dataclasses.replace(batch, valid=batch.valid & (np.arange(batch.valid.size) < count - batch.start))
        seen = _fetched(finder(batch, anywhere))
        _check_finite(finder, seen, batch)
        states = {name: o.merge(states[name], seen[name]) for name, o in placed.items()}
    places: dict[str, Place] = {name: _placed(o, states.get(name, {})) for name, o in step.observers.items()}
    return places, stream


def _accumulate(
    step: _Step, stats: Stats, stream: Iterable[Batch], keeper: Keeper, progress: Callable[[int], None]
) -> Stats:
    """The statistics with all of the stream added."""
    for batch in stream:
        step, stats = _added(step, stats, batch)
        keeper.keep(stats)
        progress(int(batch.valid.sum()))
    return stats


def _added(step: _Step, stats: Stats, batch: Batch) -> tuple[_Step, Stats]:
    """The statistics with a batch added, and the step to go on with: one with more bins where they were outgrown."""
    seen = _fetched(step(batch, stats.places))
    _check_finite(step, seen, batch)
    for name, observer in step.observers.items():
        if isinstance(observer, HistogramObserver):
            low, high = seen[name]["low"], seen[name]["high"]
            covered = observer.covers(stats.places[name], low, high)
            if not covered.all():
                growth = observer.growth_for(stats.places[name], low, high)
                if observer.bins * growth > _MOST_BINS:
                    owner = _owner(step, name, int(covered.argmin()))
                    raise DataError(
                        f"tensor {owner!r} outgrew the range of the first data so far that its histogram would need "
                        f"{observer.bins * growth:,} bins; let typical data come first, or take another method"
                    )
                stats = stats.grown(name, growth)
                step = dataclasses.replace(step, observers=stats.observers)
                return _added(step, stats, batch)
    states = {name: o.merge(stats.states[name], seen[name]) for name, o in step.observers.items()}
    return step, dataclasses.replace(stats, states=states, feeds=stats.feeds + int(batch.valid.sum()))


def _outgrown(stats: Stats) -> list[str]:
    """The tensors whose error table may lack the best candidate for the range that they turned out to have."""
    return [t for t in stats.tensors if "errors" in stats.observers and stats.best_exponent(t) is None]


def _placed(observer: Observer, state: State) -> dict[str, np.ndarray]:
    """Where an observer's candidates or bins belong for a range, if it has any."""
    return observer.place(state["low"], state["high"]) if observer.extent is not None else {}


def _check_finite(step: _Step, seen: States, batch: Batch) -> None:
    """Raise for the first tensor in which the batch left NaN or Inf.

    XLA's minimum and maximum of a large tensor pass over NaN; sums do not.
    """
    for name, state in seen.items():
        found = {
            "NaN": np.isnan(state["sums"][:, -1] if "sums" in state else state.get("total", np.zeros(1))),
            "Inf": (np.isinf(state["low"]) | np.isinf(state["high"])) & (state["low"] <= state["high"])
            if {"low", "high"} <= state.keys()
            else np.zeros(1, bool),
        }
        for kind, rows in found.items():
            if rows.any():
                last = batch.start + int(batch.valid.sum()) - 1
                raise DataError(
                    f"tensor {_owner(step, name, int(rows.argmax()))!r} has {kind} in samples {batch.start} to {last}: "
                    "the model overflows on them, or they are damaged"
                )


def _owner(step: _Step, observer: str, row: int) -> str:
    """The tensor that a row of an observer's state belongs to."""
    ends = list(itertools.accumulate(rows[observer] for rows in step.tensors.values()))
    return list(step.tensors)[bisect.bisect_right(ends, row)]


def _devices(mesh: Mesh) -> int:
    """Over how many devices a batch is split: the first axis of the mesh."""
    return mesh.shape[mesh.axis_names[0]]


def _multiple(count: int, mesh: Mesh) -> int:
    """The least count not below this one that splits evenly."""
    return -(-count // _devices(mesh)) * _devices(mesh)


def _fetched(states: Any) -> States:
    """Device arrays, of which every process holds all, as numpy."""
    return jax.tree.map(lambda v: np.asarray(v.addressable_data(0)), states)


def narrow(array: np.ndarray) -> np.ndarray:
    """An array in the type that JAX computes in."""
    return np.asarray(array, jax.dtypes.canonicalize_dtype(np.asarray(array).dtype))


def _is_float(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) and jnp.issubdtype(value.dtype, jnp.floating)


def types_of(wide: bool) -> contextlib.AbstractContextManager[Any]:
    """JAX with 64-bit types, for a function that is `Traced.wide`."""
    return jax.enable_x64(True) if wide else contextlib.nullcontext()
