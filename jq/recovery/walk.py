"""From the inputs to the outputs of a network, unit by unit, with the tensors of the float and the quantized network.

Each unit is tuned on its inputs in the quantized network, all before it already tuned, towards its outputs in the
float network. Both streams are carried on from unit to unit, so that the cost is linear in depth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.data.sources import Source
from jq.data.stream import Stream, concurrently
from jq.graph import Graph
from jq.plan import Plan, QParams
from jq.readings.fake import fake_quant
from jq.readings.patterns import Pattern
from jq.readings.tracing import trace
from jq.recovery.parts import Unit, program, rehearsing, units
from jq.recovery.streams import CHUNK_BYTES, Kept, Store, regrouped
from jq.util.memory import trim

Array = Any
Tensors = dict[str, Kept]
_AHEAD = 4  # units that are compiled before it is their turn
_FREED = 64 << 20  # bytes that are worth giving back to the system


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A unit with its tensors, by the names of its pattern; lists are of chunks of the data."""

    unit: Unit
    given: dict[str, Array]  # weights of the float network
    params: dict[str, Array]  # and as they are now
    plan: Plan
    network: Plan  # the whole one
    results: dict[str, QParams]  # how outputs are quantized
    floats: list[Tensors]  # inputs in the float network
    codes: list[Tensors]  # and in the quantized one
    targets: list[Tensors]  # outputs of the float network
    valid: list[np.ndarray]  # of each chunk, which of its samples are there for the first time
    index: int
    samples: int  # in all chunks

    def replace(self, **changes: Any) -> Site:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Record:
    """The result of a unit: its error before and after, by its method's own measure."""

    unit: str
    before: float
    after: float
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Walked:
    """A network behind its last unit: params and plan as they are now, and the outputs of both networks in chunks."""

    params: dict[str, Any]
    plan: Plan
    floats: Mapping[str, Sequence[Kept]]
    codes: Mapping[str, Sequence[Kept]]
    valid: Sequence[np.ndarray]


Tune = Callable[[Site], tuple[Site, float, float]]  # the site as it is now, and its error before and after


def walk(
    graph: Graph,
    params: Mapping[str, Any],
    plan: Plan,
    parts: Sequence[Unit],
    store: Store,
    tune: Tune,
    *,
    skip: Mapping[int, tuple[dict[str, Any], dict[str, QParams]]] | None = None,
    done: Callable[[int, dict[str, Any], dict[str, QParams], Record], bool] = lambda *_: True,
    limit: int | None = None,
) -> Walked:
    """Return the network after every unit is tuned in turn.

    `done` is called with the changes of each unit, and returns whether there is time for more; the units left are only
    passed. `skip` holds the changes of an earlier run. `limit` is the number of chunks that are used, all by default.
    """
    params, goes_on = dict(params), True
    trim()  # calibration before it leaves as much as the largest unit needs
    inputs = {k: [jnp.asarray(x) for x in chunks[:limit]] for k, chunks in store.inputs.items()}
    floats = {k: [Kept.halved(x, plan.activations.get(k)) for x in chunks] for k, chunks in inputs.items()}
    codes = {k: [Kept.quantized(x, plan.activations.get(k)) for x in chunks] for k, chunks in inputs.items()}
    del inputs
    last = {t: i for i, unit in enumerate(parts) for t in unit.inputs}
    valid, freed = store.valid[:limit], 0
    for i, unit in enumerate(parts):
        start, names = time.perf_counter(), unit.names
        if (size := store.size_for(unit.sample_bytes)) != len(valid[0]):
            for stream in (floats, codes):
                for t in stream:
                    stream[t] = store.keep(itertools.islice(regrouped(stream[t], size), limit))
            valid = store.valid_of(size)[:limit]
        given = unit.inside({k: jnp.asarray(a) for k, a in graph.params.items() if k in names})
        site = Site(
            unit=unit,
            given=given,
            params=given | unit.inside({k: jnp.asarray(params[k]) for k in params if k in names}),
            plan=unit.plan(plan),
            network=plan,
            results={names[t]: plan.activations[t] for t in unit.outputs if t in plan.activations},
            floats=_read(unit, floats, len(valid)),
            codes=_read(unit, codes, len(valid)),
            targets=[],
            valid=valid,
            index=i,
            samples=sum(map(len, store.valid)),
        )
        step = functools.partial(_floating, unit.pattern, given, site.results)
        site = site.replace(targets=list(concurrently(step, site.floats)))
        if skip is not None and i in skip:
            arrays, scales = map(unit.inside, skip[i])
            site = site.replace(params=site.params | arrays, plan=site.plan.replace(scales))
        elif goes_on and unit.layers:
            standing, planned = site.params, site.plan
            site, old, new = tune(site)
            changed = {k: np.asarray(a) for k, a in site.params.items() if a is not standing[k]}
            moved = {k: site.plan[k] for k in site.plan if site.plan[k] is not planned[k]}
            record = Record(unit.label, old, new, time.perf_counter() - start)
            goes_on = done(i, unit.outside(changed), unit.outside(moved), record)
        params |= unit.outside({k: np.asarray(a) for k, a in site.params.items()})
        plan = plan.replace(unit.outside({k: site.plan[k] for k in site.plan}))
        site = site.replace(results={names[t]: plan.activations[t] for t in unit.outputs if t in plan.activations})
        step = functools.partial(_quantized, unit.pattern, site.params, site.plan, site.results)
        coded = list(concurrently(step, site.codes))
        for t in unit.outputs:
            floats[t] = store.keep([chunk[names[t]] for chunk in site.targets])
            codes[t] = store.keep([chunk[names[t]] for chunk in coded])
        for t in [t for t in floats if last.get(t, -1) <= i and t not in graph.output_names]:
            del floats[t], codes[t]
        del site, coded  # with all tensors of the unit
        freed += unit.sample_bytes * sum(map(len, valid))
        if freed > _FREED:
            trim()
            freed = 0
    made, rounded = ({t: kept[t] for t in graph.output_names if t in kept} for kept in (floats, codes))
    return Walked(params, plan, made, rounded, valid)


@contextlib.contextmanager
def rehearsed(*arguments: Any, skip: Mapping[int, Any]) -> Iterator[Callable[[], None]]:
    """Compile the programs of a walk with these arguments in another thread, a few units ahead of it.

    Yields a function to call after each unit of the walk. A failure of this thread is a warning: the walk compiles the
    rest itself.
    """
    graph, params, plan, parts, store, tune = arguments
    room, over, failures = threading.Semaphore(_AHEAD), threading.Event(), list[Exception]()

    def ahead(*_: Any) -> bool:
        room.acquire()
        if over.is_set():
            raise InterruptedError
        return True

    def rehearse() -> None:
        first = dataclasses.replace(store, folder=None)
        try:
            with rehearsing(), contextlib.suppress(InterruptedError):
                walk(graph, params, plan, parts, first, tune, skip=skip, done=ahead, limit=1)
        except Exception as error:  # raised again by the walk, if it is the network's
            failures.append(error)

    thread = threading.Thread(target=rehearse, daemon=True)
    thread.start()
    try:
        yield room.release
    finally:
        over.set()
        room.release()
        thread.join()
    for error in failures:
        warnings.warn(f"compiling ahead of finetuning failed, which only costs time: {error!r}", stacklevel=4)


def store_of(graph: Graph, plan: Plan, source: Source, folder: Path | None) -> Store:
    """All of the data, in chunks that fit the caches."""
    largest = max(u.sample_bytes for u in units(graph, plan, "layer"))
    count = source.length or 64
    size = max(1, min(count, CHUNK_BYTES // max(1, largest)))
    size = -(-count // -(-count // size))
    batches = Stream.of(source, size).alike("finetuning")
    return Store({k: [b.inputs[k] for b in batches] for k in source.head}, [b.valid for b in batches], folder)


def added(parts: Iterable[Any]) -> Any:
    """The sum of the results of chunks: they are small, so the host adds them, which compiles nothing."""
    return functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), parts)


def _read(unit: Unit, kept: Mapping[str, Any], chunks: int) -> list[Tensors]:
    return [{unit.names[t]: kept[t][j] for t in unit.inputs} for j in range(chunks)]


def values(tensors: Mapping[str, Kept]) -> dict[str, Array]:
    """The tensors themselves."""
    return {k: v.value for k, v in tensors.items()}


@program(1)
def _floating(
    pattern: Pattern, params: Mapping[str, Array], results: Mapping[str, QParams], inputs: Tensors
) -> Tensors:
    """The float network's outputs on a chunk."""
    made = jax.vmap(lambda x: trace(pattern.graph)(params, x))(values(inputs))
    return {k: Kept.halved(v, results.get(k)) for k, v in made.items()}


@program(1)
def _quantized(
    pattern: Pattern, params: Mapping[str, Array], plan: Plan, results: Mapping[str, QParams], inputs: Tensors
) -> Tensors:
    made = jax.vmap(lambda x: fake_quant(pattern.graph)(params, plan, x))(values(inputs))
    return {k: Kept.quantized(v, results.get(k)) for k, v in made.items()}
