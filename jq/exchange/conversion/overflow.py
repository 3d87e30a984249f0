"""Activations beyond a floating-point type's largest number, found on data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jq.arithmetic.formats import Float
from jq.data.sources import open_source
from jq.data.stream import Stream
from jq.exchange.conversion.precision import matches_any
from jq.graph import Graph
from jq.readings.packing import pack
from jq.readings.tracing import trace

_BATCH = 8


def overflowing(graph: Graph, format: Float, data: Any, *, exclude: Collection[str] = ()) -> dict[str, float]:
    """Return the largest magnitude on `data` of every float32 tensor that is beyond a type's largest number.

    `data` is what `jq.calibrate` takes. Tensors that only excluded nodes make and read are left out, and those inside
    If, Loop and Scan are not looked at.

    >>> import jq
    >>> from jq.arithmetic.formats import FLOAT16
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> images, _ = jq.zoo.calibration_set()
    >>> overflowing(graph, FLOAT16, images[:4])
    {}
    >>> sorted(overflowing(graph, FLOAT16, images[:4] * 1e5))[:2]
    ['input', 'logits']
    """
    inside = {n for n in graph.nodes if matches_any(n, exclude)}
    tensors = [v.name for v in graph.inputs] + [o for n in graph.nodes for o in n.outputs if o]
    around = {t: {graph.producer.get(t), *graph.consumers.get(t, ())} - {None, *inside} for t in tensors}
    floats = {k for k, v in graph.values.items() if v.dtype == np.float32 and not v.containers}
    watched = [t for t in tensors if t in floats and around[t]]
    if not watched:
        return {}
    fn = trace(graph, taps=dict.fromkeys(watched, _magnitude))
    stream = Stream.of(open_source(data, graph.inputs), _BATCH, fn)
    program = stream.folded(lambda params, sample: fn(params, sample)[1], _larger)
    largest = stream.total(program, pack(graph), _larger)
    return {name: float(largest[name]) for name in watched if largest[name] > format.largest}


def _larger(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    return {name: jnp.fmax(value, b[name]) for name, value in a.items()}  # which passes over NaN


def _magnitude(x: Any) -> Any:
    return jnp.max(jnp.abs(x), initial=0)
