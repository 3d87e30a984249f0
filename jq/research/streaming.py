"""Streams over all devices, and how many samples fit the caches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jq.data.arrays import Sample
from jq.data.sources import Source
from jq.data.stream import Stream, devices_of, local_mesh
from jq.graph import Graph
from jq.readings.packing import pack
from jq.readings.tracing import trace
from jq.recovery.exponents.segments import sizes_of
from jq.recovery.streams import CHUNK_BYTES

_SAMPLES = 8  # of a device at once, at most


def sample_bytes(graph: Graph, sample: Sample) -> int:
    """Bytes of the largest tensor of a sample, about; free dims are those that it has, but for the first, the batch."""
    shapes = [v.shape or () for k, v in graph.values.items() if k not in graph.arrays]
    if all(isinstance(d, int) for s in shapes for d in s[1:]):
        return 4 * max((math.prod(d for d in s if isinstance(d, int)) for s in shapes), default=1)
    return max(sizes_of(graph, sample).values(), default=1)


def samples_at_once(graph: Graph, sample: Sample) -> int:
    """The number of samples like this one that a device takes at once, such that a tensor stays in the caches."""
    return max(1, min(_SAMPLES, CHUNK_BYTES // sample_bytes(graph, sample)))


def streamed(graph: Graph, source: Source, samples: int, mesh: Mesh | None) -> Stream:
    """Return the stream over all devices, each of which takes `samples` at once."""
    mesh = mesh or local_mesh()
    devices = devices_of(mesh)
    if source.length is not None:  # so that few samples leave no device idle, and the last step is full
        samples = max(1, min(samples, -(-source.length // devices)))
    return Stream.of(source, samples * devices, trace(graph), mesh=mesh)


def packed(graph: Graph, params: Mapping[str, Any] | None, stream: Stream) -> dict[str, Any]:
    """Return the graph's params, replaced where `params` has others, on the devices of a stream."""
    return pack(graph, {**graph.params, **(params or {})}, stream.mesh)
