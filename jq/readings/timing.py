"""How long a reading takes: a run of one sample after the other, the first ones apart."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import jax
import numpy as np

from jq.data.sources import as_trained, open_source
from jq.errors import ConfigError
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.readings.named import AnyReading, open_reading, reading_name
from jq.readings.runtime import RuntimeReading

_KEPT = 16  # samples that take turns


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of runs of one sample each, or of one batch if the model has a fixed batch size."""

    reading: str
    runs: int
    batch: int  # images, say, of a run
    load_ms: float | None  # loading and compiling, where the reading tells
    warm_up_runs: int
    first_ms: float  # of the warm-up
    warm_up_ms: float  # mean of the rest of it
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    throughput: float  # images in a second

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The figures on one line."""
        loaded = "" if self.load_ms is None else f"loaded in {self.load_ms:,.0f} ms, "
        return (
            f"{self.reading}: mean {self.mean_ms:.3f} ms, p50 {self.p50_ms:.3f}, p90 {self.p90_ms:.3f}, p99 "
            f"{self.p99_ms:.3f} in {self.runs} runs; {self.throughput:,.1f}/s; {loaded}first run {self.first_ms:.3f} ms, "
            f"warm-up {self.warm_up_ms:.3f} ms"
        )


def benchmark(
    model: ModelLike,
    data: Any = None,
    reading: AnyReading = "onnxruntime",
    *,
    runs: int = 100,
    warm_up: int = 10,
    seconds: float = 20.0,
    seed: int = 0,
) -> Timing:
    """Return the latency and throughput of a model on samples of the data, read as `jq.infer` reads it.

    After `warm_up` runs come at most `runs` more: fewer if they take longer than `seconds`, but always one.

    >>> import jq
    >>> timing = jq.benchmark(jq.zoo.path("fashion_resnet"), jq.zoo.evaluation_set()[0][:4], runs=5, warm_up=2)
    >>> timing.runs, timing.warm_up_runs, timing.p50_ms <= timing.p90_ms <= timing.p99_ms
    (5, 2, True)
    """
    if runs < 1 or warm_up < 1:
        raise ConfigError(f"benchmark needs runs and warm_up of 1 or more; got {runs} and {warm_up}")
    graph = model if isinstance(model, Graph) else load(model)
    source = open_source(as_trained(data, graph.metadata), graph.inputs, seed=seed)
    run = open_reading(graph, reading, original=model)
    samples = list(itertools.islice(source.samples(), _KEPT))
    turns = itertools.cycle(samples)
    warm: list[float] = []
    while len(warm) < warm_up and (not warm or sum(warm) < seconds):
        warm.append(_seconds_of(run, next(turns)))
    taken: list[float] = []
    while len(taken) < runs and (not taken or sum(taken) < seconds):
        taken.append(_seconds_of(run, next(turns)))
    per = np.array(taken) * 1e3
    p50, p90, p99 = (float(p) for p in np.percentile(per, (50, 90, 99)))
    shape = np.shape(samples[0][graph.inputs[0].name]) if graph.inputs else ()
    batch = int(shape[0]) if len(shape) > 1 else 1
    return Timing(
        reading=reading_name(run),
        runs=len(taken),
        batch=batch,
        load_ms=run.seconds * 1e3 if isinstance(run, RuntimeReading) else None,
        warm_up_runs=len(warm),
        first_ms=warm[0] * 1e3,
        warm_up_ms=float(np.mean(warm[1:] or warm)) * 1e3,
        mean_ms=float(per.mean()),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        throughput=batch * 1e3 / float(per.mean()),
    )


def _seconds_of(run: Any, sample: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(sample))
    return time.perf_counter() - start
