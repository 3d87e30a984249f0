"""Walks of many lanes over data, here or, part by part of the data, on an executor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.data.arrays import Sample
from jq.data.sources import in_memory
from jq.data.stream import Program, Stream, devices_of, local_mesh
from jq.errors import ConfigError
from jq.graph import Graph
from jq.plan import Plan
from jq.readings.tracing import trace
from jq.research.executors import Executor, Shipped, performed, shipping
from jq.research.lanes import Lanes
from jq.research.losses import Measure
from jq.research.streaming import packed
from jq.util.cache import enable

_PARTS = 16  # of the data, at most, that are walked elsewhere

MeasureOf = Callable[[Graph], Measure]
"""What makes the measure of a graph's outputs: a function of a module, or another value that can be sent to a worker."""


@dataclasses.dataclass(frozen=True, eq=False)
class WalkedNetwork:
    """The parts that all walks have in common."""

    graph: Graph  # in the forms of the plan
    params: Mapping[str, Any] | None
    plan: Plan
    measure: MeasureOf

    def program(self, walk: Walk, stream: Stream) -> Program:
        """The compiled program of a walk: what the measure gives of each lane, and whether the float outputs are finite."""
        lanes, measure = Lanes(self.graph, walk.groups, inverted=walk.inverted), self.measure(self.graph)
        reference, all_quantized = (-1, 0) if lanes.inverted else (0, -1)
        order = np.array([*range(1, len(lanes.groups)), all_quantized])

        def program(given: Any, inputs: Mapping[str, Any], _: Any) -> dict[str, Any]:
            z = lanes(given[0], given[1], inputs, stream.known)
            own = {k: v[reference] for k, v in z.items()}
            shown = {k: v[order] for k, v in z.items()}
            each = jax.vmap(jax.vmap(measure), in_axes=(None, 0), out_axes=1)(own, shown)
            floats = [v for v in own.values() if jnp.issubdtype(v.dtype, jnp.floating)]
            finite = [jnp.all(jnp.isfinite(v).reshape(len(v), -1), axis=1) for v in floats]
            return {**each, "finite": jnp.all(jnp.stack(finite), axis=0)}

        return stream.spread(program)


@dataclasses.dataclass(frozen=True)
class Walk:
    """Groups of tensors that are walked together, each in a lane of its own."""

    groups: tuple[frozenset[str], ...]
    inverted: bool


def walked(network: WalkedNetwork, walks: Sequence[Walk], stream: Stream) -> list[dict[str, np.ndarray]]:
    """Return the results [samples, groups] of each walk."""
    arguments = packed(network.graph, network.params, stream), network.plan
    return [stream.rows(network.program(walk, stream), arguments, title="sensitivity") for walk in walks]


def walked_elsewhere(
    network: WalkedNetwork, walks: Sequence[Walk], stream: Stream, executor: Executor
) -> list[dict[str, np.ndarray]]:
    """Return the same from workers, each of which takes some batches of a walk: equal programs, so equal bits."""
    batches = list(stream.batches())
    size = -(-len(batches) // _PARTS)
    parts = [batches[i : i + size] for i in range(0, len(batches), size)]
    with shipping() as ship:
        shipped, data = ship(network), [ship(part) for part in parts]
        frame = ship(Frame(stream.source.head, stream.size, devices_of(stream.mesh)))
        items = [(shipped, walk, frame, part) for walk in walks for part in data]
        made: dict[int, dict[str, np.ndarray]] = dict(performed(executor, _part, items))
    rows = [made[i] for i in range(len(items))]
    groups = [rows[i : i + len(parts)] for i in range(0, len(rows), len(parts))]
    return [{k: np.concatenate([row[k] for row in group]) for k in group[0]} for group in groups]


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """All that a stream is made of besides its samples."""

    head: Sample
    size: int
    devices: int


def _part(network: Shipped, walk: Walk, frame: Shipped, batches: Shipped) -> dict[str, np.ndarray]:
    """In a worker: a walk over some batches."""
    enable()
    stream, program, arguments = _prepared(network, walk, frame)
    rows: dict[str, np.ndarray] = stream.rows(program, arguments, batches.value)
    return rows


@functools.lru_cache(maxsize=1)
def _prepared(network: Shipped, walk: Walk, frame: Shipped) -> tuple[Stream, Program, Any]:
    """A compiled walk, with the weights on the devices."""
    own: WalkedNetwork = network.value
    like: Frame = frame.value
    if jax.local_device_count() < like.devices:
        few = f"a worker has {jax.local_device_count()} JAX devices, but the process that distributes the work has {like.devices}"
        raise ConfigError(f"{few}; give both the same number, because sums over other shares differ in the last bits")
    stream = Stream.of(in_memory([like.head]), like.size, trace(own.graph), mesh=local_mesh(like.devices))
    return stream, own.program(walk, stream), (packed(own.graph, own.params, stream), own.plan)
