"""Large batches: in chunks that stay in the caches, and over devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jq.data.stream import devices_of, divided, replicated, shared

Forward = Callable[[Any, Any], Any]  # fn(params, inputs) -> outputs, each of which leads with the batch

# Above about this many bytes per intermediate tensor, a CPU spends its time on cache misses and on
# the page faults of freshly mapped buffers: MobileNetV2 on one core takes 74 ms for 8 images at once
# and 32 in chunks of two.
_CHUNK_BYTES = 12 << 20


def chunked(fn: Forward, size: int | None = None, mesh: Mesh | None = None) -> Forward:
    """Return `fn(params, inputs)` evaluated over chunks of the batch, for a model that treats samples independently.

    Without `size`, a chunk is as large as keeps the largest intermediate tensor in the caches of a CPU;
    a last short chunk runs by itself. With `mesh`, the batch is first split over its devices. That is
    how XLA's CPU backend uses several cores well: one device per core (`jax_num_cpu_devices`, set before
    JAX starts) takes half the time of one device that spreads every operation over two.

    >>> import jq, jax
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> forward = jax.jit(jq.chunked(jq.trace(graph)))
    >>> images, labels = jq.zoo.calibration_set()
    >>> forward(jq.pack(graph), {"input": images})["logits"].shape
    (512, 10)
    """
    if mesh is not None:
        return _sharded(chunked(fn, size), mesh)

    def mapped(params: Any, inputs: Any) -> Any:
        batch = _batch(inputs)
        chunk = min(batch, size or _chunk_size(fn, params, inputs))
        if chunk >= batch:
            return fn(params, inputs)
        whole = batch // chunk
        stacked = jax.tree.map(lambda x: x[: whole * chunk].reshape(whole, chunk, *x.shape[1:]), inputs)
        outputs = jax.lax.map(lambda x: fn(params, x), stacked)
        outputs = jax.tree.map(lambda y: y.reshape(whole * chunk, *y.shape[2:]), outputs)
        if whole * chunk == batch:
            return outputs
        rest = fn(params, jax.tree.map(lambda x: x[whole * chunk :], inputs))
        return jax.tree.map(lambda y, z: jnp.concatenate([y, z]), outputs, rest)

    return mapped


def _sharded(fn: Forward, mesh: Mesh) -> Forward:
    """`fn` with the batch split over the first axis of the mesh; copies of the last image pad an uneven batch."""
    whole, parts = replicated(mesh), divided(mesh)
    split = shared(lambda params, inputs, _: fn(params, inputs), mesh)

    def spread(params: Any, inputs: Any) -> Any:
        batch = _batch(inputs)
        missing = -batch % devices_of(mesh)
        if missing:
            inputs = jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], missing, 0)]), inputs)
        outputs = split(jax.device_put(params, whole), jax.device_put(inputs, parts), None)
        return jax.tree.map(lambda y: y[:batch], jax.device_put(outputs, whole)) if missing else outputs

    return spread


def _batch(inputs: Any) -> int:
    return jax.tree.leaves(inputs)[0].shape[0]


def _chunk_size(fn: Forward, params: Any, inputs: Any) -> int:
    """The chunk whose largest intermediate fits `_CHUNK_BYTES`, made a divisor of the batch if one is near."""
    batch = _batch(inputs)
    types = jax.tree.map(jax.typeof, params)

    def sizes(count: int) -> list[int]:
        images = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), inputs)
        program = jax.make_jaxpr(fn)(types, images)
        return [v.aval.size * v.aval.dtype.itemsize for e in program.eqns for v in e.outvars]

    # What a second image adds: weights that the program moves do not count.
    image = max((two - one for one, two in zip(sizes(1), sizes(2), strict=False)), default=1)
    fitting = max(1, min(batch, _CHUNK_BYTES // max(1, image)))
    return next((c for c in range(fitting, fitting // 2, -1) if batch % c == 0), fitting)
