"""A program over the feeds of any data: sharded over devices, one compilation, what it makes of each feed in order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jq.calibration.calibrate import narrow, types_of
from jq.data.sources import Source, batches
from jq.errors import DataError
from jq.graph import Graph
from jq.plan import Plan
from jq.readings.packing import pack
from jq.readings.tracing import trace
from jq.recovery.streams import CHUNK_BYTES
from jq.util.progress import progress_bar

Array = Any
Program = Callable[[Any, Any, Mapping[str, Any], Array], dict[str, Array]]
"""Of params, plan, inputs that lead with feeds and the feeds' numbers: arrays that lead with feeds."""

_FEEDS = 8  # of a device at once, at most


def feed_bytes(graph: Graph) -> int:
    """About how many bytes the largest tensor of one feed has; dims that are not known count as 1."""
    shapes = [v.shape or () for k, v in graph.values.items() if k not in graph.arrays]
    return 4 * max((math.prod(d for d in s if isinstance(d, int)) for s in shapes), default=1)


def feeds_at_once(graph: Graph) -> int:
    """How many feeds a device takes at once, such that a tensor stays in the caches."""
    return max(1, min(_FEEDS, CHUNK_BYTES // feed_bytes(graph)))


def known_inputs(graph: Graph, source: Source) -> dict[str, np.ndarray]:
    """The inputs that decide shapes, the same for all feeds."""
    static = trace(graph).static_inputs
    return {k: v for k, v in source.head.items() if k in static}


def over_feeds(
    program: Program,
    graph: Graph,
    params: Mapping[str, Any] | None,
    plan: Plan | None,
    source: Source,
    *,
    title: str,
    feeds: int = 1,
    mesh: Mesh | None = None,
) -> dict[str, np.ndarray]:
    """What a program makes of all feeds, one after the other; `feeds` are taken at once by each device."""
    mesh = mesh or jax.make_mesh((jax.local_device_count(),), ("batch",), devices=jax.local_devices())
    whole, split = PartitionSpec(), PartitionSpec(mesh.axis_names[0])
    where, known = NamedSharding(mesh, split), known_inputs(graph, source)
    devices = mesh.shape[mesh.axis_names[0]]
    if source.length is not None:  # so that few feeds leave no device idle, and the last step is full
        feeds = max(1, min(feeds, -(-source.length // devices)))
    arrays = pack(graph, {**graph.params, **(params or {})}, mesh)
    step = jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=(whole, whole, split, split), out_specs=split, check_vma=False)
    )
    found: list[dict[str, np.ndarray]] = []
    with (
        progress_bar(title, source.length) as advance,
        types_of(trace(graph).wide),
        contextlib.closing(batches(source, feeds * devices)) as stream,
    ):
        coming: tuple[Any, np.ndarray] | None = None
        for batch in stream:
            for name, value in known.items():
                if not (batch.inputs[name] == value).all():
                    raise DataError(f"input {name!r} decides shapes, so all samples must have the value {value}")
            numbers = np.minimum(np.arange(len(batch.valid)), int(batch.valid.sum()) - 1) + batch.start
            inputs = {k: jax.device_put(narrow(v), where) for k, v in batch.inputs.items() if k not in known}
            started = step(arrays, plan, inputs, jax.device_put(numbers.astype(np.int32), where)), batch.valid
            if coming is not None:  # read while the next step runs
                found.append(_taken(*coming))
            coming = started
            advance(int(batch.valid.sum()))
        if coming is not None:
            found.append(_taken(*coming))
    if not found:
        raise DataError("the data hold no samples")
    return {k: np.concatenate([part[k] for part in found]) for k in found[0]}


def _taken(made: Mapping[str, Any], valid: np.ndarray) -> dict[str, np.ndarray]:
    return {k: np.asarray(v)[valid] for k, v in made.items()}
