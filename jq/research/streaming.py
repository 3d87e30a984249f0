"""Streams over all devices, and how many samples fit the caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jq.data.sources import Source
from jq.data.stream import Stream, devices_of, local_mesh
from jq.graph import Graph
from jq.readings.packing import pack
from jq.readings.patterns import sample_bytes as value_bytes
from jq.readings.tracing import trace
from jq.recovery.streams import CHUNK_BYTES

_SAMPLES = 8  # of a device at once, at most


def sample_bytes(graph: Graph) -> int:
    """Bytes of the largest tensor of a sample, about; free dims count as one."""
    return max((value_bytes(v) for k, v in graph.values.items() if k not in graph.arrays), default=1)


def samples_at_once(graph: Graph) -> int:
    """The number of samples that a device takes at once, such that a tensor stays in the caches."""
    return max(1, min(_SAMPLES, CHUNK_BYTES // sample_bytes(graph)))


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
