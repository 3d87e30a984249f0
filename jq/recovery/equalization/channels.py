"""What the channels of the float model hold: one streaming pass over the calibration data.

Of each channel of each tensor that matters: its range, mean and power, how often it is not zero, and of what a Clip
reads, what lies beyond its bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic.layout import channels_last
from jq.config import QuantConfig
from jq.data.sources import batches, open_source
from jq.graph import Graph
from jq.readings.packing import pack
from jq.readings.tracing import AnyOrder, trace
from jq.recovery.equalization.groups import Groups

Sums = dict[str, dict[str, Any]]
_ROWS = 8  # positions whose sums are kept apart


@dataclasses.dataclass(frozen=True, eq=False)
class Channels:
    """Statistics of the channels of one tensor, each an array [C]."""

    reach: np.ndarray  # largest magnitude; of a Clip's output, without its upper bound
    mean: np.ndarray
    power: np.ndarray  # mean square
    active: np.ndarray  # part of the values that is not zero
    over: np.ndarray  # mean of what exceeds a Clip's bound
    beyond: np.ndarray  # and its mean square
    pixels: int  # values of a channel in one sample

    @property
    def variance(self) -> np.ndarray:
        """Mean square about the mean."""
        return np.maximum(self.power - self.mean**2, 0)

    @property
    def is_finite(self) -> bool:
        """Whether the model overflowed on no value."""
        return all(np.isfinite(v).all() for v in (self.reach, self.mean, self.power))

    @classmethod
    def unknown(cls, count: int) -> Channels:
        """Without data: channels alike, of standard normal values."""
        one, zero = np.ones(count), np.zeros(count)
        return cls(4 * one, zero, one, one, zero, zero, 1)


def measure(graph: Graph, groups: Groups, data: Any, config: QuantConfig) -> dict[str, Channels]:
    """Return the statistics of all tensors with channels, but for what a Relu or Clip alone reads."""
    wanted = _wanted(graph, groups)
    source = open_source(data, graph.inputs, seed=config.seed)
    known = {k: v for k, v in source.head.items() if k in trace(graph).static_inputs}
    step = _step(graph, wanted, known)
    params, total, count = pack(graph), None, 0
    for batch in batches(source, config.batch):
        inputs = {k: v for k, v in batch.inputs.items() if k not in known}
        seen = jax.tree.map(lambda v: np.asarray(v, np.float64), step(params, inputs, batch.valid))
        total = seen if total is None else {k: _merged(total[k], v, np.maximum) for k, v in seen.items()}
        count += int(batch.valid.sum())
    assert total is not None  # `open_source` raises where there are no data
    return {wanted[name][1]: _finished(sums, count) for name, sums in total.items()}


def _wanted(graph: Graph, groups: Groups) -> dict[str, tuple[float | None, str]]:
    """The tensors to look at, each with the bound of the Clip that reads it, and the tensor it is looked at for."""
    found: dict[str, tuple[float | None, str]] = {name: (None, name) for name in groups.channels}
    for node in graph.nodes:  # what is cut at once is never rounded
        if node.op_type in ("Relu", "Clip") and graph.sole_reader(node.inputs[0]) is node:
            found.pop(node.inputs[0], None)
    for node, bound in groups.clips:
        found.pop(node.outputs[0], None)
        found[node.inputs[0]] = bound, node.outputs[0]
    return found


def _step(
    graph: Graph, wanted: Mapping[str, tuple[float | None, str]], known: Mapping[str, np.ndarray]
) -> Callable[..., Any]:
    """A batch to the sums of all tensors, compiled."""
    taps = {name: AnyOrder(functools.partial(_sums, bound)) for name, (bound, _) in wanted.items()}
    fn = trace(graph, taps=taps)

    @jax.jit
    def step(params: Any, inputs: Any, valid: jax.Array) -> Sums:
        def take(total: Sums, feed: tuple[Any, jax.Array]) -> tuple[Sums, None]:
            sample, counts = feed
            seen = {k: _merged(total[k], v) for k, v in fn(params, {**sample, **known})[1].items()}
            return jax.tree.map(lambda new, old: jnp.where(counts, new, old), seen, total), None

        shapes = jax.eval_shape(lambda s: fn(params, {**s, **known})[1], jax.tree.map(lambda v: v[0], inputs))
        none = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), shapes)
        return lax.scan(take, none, (inputs, valid))[0]

    return step


def _sums(bound: float | None, value: Any) -> dict[str, jax.Array]:
    """The sums of one sample; of what a Clip reads, those of what it makes, but the largest value.

    Some rows at a time are added up elementwise, and reduced last: XLA's reductions take two to four times as long.
    """
    x = channels_last(value)
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    rows = jnp.pad(rows, ((0, -len(rows) % _ROWS), (0, 0)))  # zeros change no sum
    pieces = rows.reshape(-1, _ROWS, x.shape[-1])

    def add(found: dict[str, jax.Array], piece: jax.Array) -> tuple[dict[str, jax.Array], None]:
        return _merged(found, _terms(bound, piece)), None

    none = jax.tree.map(jnp.zeros_like, jax.eval_shape(functools.partial(_terms, bound), pieces[0]))
    found, _ = lax.scan(add, none, pieces)
    sums = {k: v.max(0) if k == "reach" else v.sum(0) for k, v in found.items()}
    return sums | {"pixels": jnp.float32(x.size / x.shape[-1])}


def _terms(bound: float | None, x: jax.Array) -> dict[str, jax.Array]:
    """What each value adds to the sums."""
    found = {}
    if bound is not None:
        x = jnp.maximum(x, 0)
        over = jnp.maximum(x - bound, 0)
        found = {"over": over, "beyond": jnp.square(over)}
    found["reach"] = jnp.abs(x)
    x = x if bound is None else jnp.minimum(x, bound)
    return found | {"total": x, "squares": jnp.square(x), "active": (x != 0).astype(jnp.float32)}


def _merged(a: Mapping[str, Any], b: Mapping[str, Any], maximum: Callable[..., Any] = jnp.maximum) -> dict[str, Any]:
    return {k: maximum(a[k], b[k]) if k == "reach" else a[k] + b[k] for k in a}


def _finished(sums: Mapping[str, np.ndarray], count: int) -> Channels:
    pixels = float(sums["pixels"])
    zero = np.zeros_like(sums["reach"])
    return Channels(
        reach=np.asarray(sums["reach"], np.float64),
        mean=sums["total"] / pixels,
        power=sums["squares"] / pixels,
        active=sums["active"] / pixels,
        over=sums.get("over", zero) / pixels,
        beyond=sums.get("beyond", zero) / pixels,
        pixels=round(pixels / count),
    )
