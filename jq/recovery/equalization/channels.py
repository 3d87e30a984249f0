"""Statistics of the float model's channels, from one streaming pass over the calibration data.

For each channel of each tensor that matters: its range, mean and power, how often it is not zero, and for the input of
a Clip, how far it exceeds the bound.
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
from jq.data.sources import open_source
from jq.data.stream import Stream
from jq.graph import Graph
from jq.ops.kinds import cuts
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
    taps = {name: AnyOrder(functools.partial(_sums, bound)) for name, (bound, _) in wanted.items()}
    fn, source = trace(graph, taps=taps), open_source(data, graph.inputs, seed=config.seed)
    stream = Stream.of(source, config.batch, fn)
    program = stream.folded(lambda params, sample: fn(params, sample)[1], _merged_all)
    total = stream.total(program, pack(graph), functools.partial(_merged_all, maximum=np.maximum))
    return {wanted[name][1]: _finished(sums) for name, sums in total.items()}


def _wanted(graph: Graph, groups: Groups) -> dict[str, tuple[float | None, str]]:
    """The tensors to observe, each with the bound of the Clip that reads it, and the tensor that it is observed for."""
    tensors: dict[str, tuple[float | None, str]] = {name: (None, name) for name in groups.channels}
    for node in graph.nodes:  # what is cut at once is never rounded
        if cuts(node) and graph.sole_reader(node.inputs[0]) is node:
            tensors.pop(node.inputs[0], None)
    for node, bound in groups.clips:
        tensors.pop(node.outputs[0], None)
        tensors[node.inputs[0]] = bound, node.outputs[0]
    return tensors


def _sums(bound: float | None, value: Any) -> dict[str, jax.Array]:
    """The sums of one sample; of a Clip's input, those of its output, but for the largest value.

    Some rows at a time are added up elementwise, and reduced last: XLA's reductions take two to four times as long.
    """
    x = channels_last(value)
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    rows = jnp.pad(rows, ((0, -len(rows) % _ROWS), (0, 0)))  # zeros change no sum
    pieces = rows.reshape(-1, _ROWS, x.shape[-1])

    def add(sums: dict[str, jax.Array], piece: jax.Array) -> tuple[dict[str, jax.Array], None]:
        return _merged(sums, _terms(bound, piece)), None

    none = jax.tree.map(jnp.zeros_like, jax.eval_shape(functools.partial(_terms, bound), pieces[0]))
    by_row, _ = lax.scan(add, none, pieces)
    sums = {k: v.max(0) if k == "reach" else v.sum(0) for k, v in by_row.items()}
    return sums | {"pixels": jnp.float32(x.size / x.shape[-1]), "samples": jnp.float32(1)}


def _terms(bound: float | None, x: jax.Array) -> dict[str, jax.Array]:
    """The terms of the sums, elementwise."""
    terms = {}
    if bound is not None:
        x = jnp.maximum(x, 0)
        over = jnp.maximum(x - bound, 0)
        terms = {"over": over, "beyond": jnp.square(over)}
    terms["reach"] = jnp.abs(x)
    x = x if bound is None else jnp.minimum(x, bound)
    return terms | {"total": x, "squares": jnp.square(x), "active": (x != 0).astype(jnp.float32)}


def _merged(a: Mapping[str, Any], b: Mapping[str, Any], maximum: Callable[..., Any] = jnp.maximum) -> dict[str, Any]:
    return {k: maximum(a[k], b[k]) if k == "reach" else a[k] + b[k] for k in a}


def _merged_all(a: Sums, b: Sums, maximum: Callable[..., Any] = jnp.maximum) -> Sums:
    return {name: _merged(sums, b[name], maximum) for name, sums in a.items()}


def _finished(sums: Mapping[str, np.ndarray]) -> Channels:
    pixels, zero = float(sums["pixels"]), np.zeros_like(sums["reach"])
    names = ("total", "squares", "active", "over", "beyond")
    mean, power, active, over, beyond = (sums.get(name, zero) / pixels for name in names)
    return Channels(sums["reach"], mean, power, active, over, beyond, round(pixels / float(sums["samples"])))
