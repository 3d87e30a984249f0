"""How much each tensor of a plan loses by its own rounding, on a few samples, as a whole and by part.

A tensor can keep 40 dB as a whole and lose a part of it entirely: boxes and scores joined by one Concat, attention
scores beside a mask of -10000. And an error counts for as much as its readers make of it: what enters a sum is held
against the sum, a weight's error is multiplied by what the layer reads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jq.arithmetic.formats import Integer
from jq.arithmetic.losses import decibels
from jq.data.arrays import Sample
from jq.graph import Graph, Node, Value
from jq.graph.unused import remove_unused
from jq.ops.kinds import adds, is_concat, is_softmax
from jq.ops.linear import linear_layer
from jq.ops.saturating import SATURATING, saturating_reader
from jq.plan import Plan, QParams
from jq.readings.runtime import onnxruntime_reading
from jq.recovery.bias_correction import shift_through

_ELEMENTS = 1 << 15  # of a tensor that are kept of a sample
_HIDDEN = 30.0  # below the largest of a row, a softmax gives less than 1e-13
_LEAK = 12.0  # and of what a mask has set so far below, this much must be left


@dataclasses.dataclass(frozen=True)
class Loss:
    """The SQNR in dB that rounding leaves a tensor, or the part of it that loses most."""

    tensor: str
    part: str  # "" for the whole
    sqnr: float


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelMoments:
    """Means over a few samples, by channel of a tensor."""

    power: np.ndarray
    shift: np.ndarray  # of the mean, by rounding


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
    """The activations of a float graph on a few samples, with large tensors subsampled."""

    graph: Graph
    samples: Sequence[Sample]
    values: Mapping[str, Sequence[np.ndarray]]
    shapes: Mapping[str, Sequence[tuple[int, ...]]]  # as they are before elements are left out

    @classmethod
    def of(cls, graph: Graph, samples: Sequence[Sample], plan: Plan) -> Watched:
        """The activations that the losses of a plan need, as onnxruntime computes them."""
        made = [k for k in _needed(graph, plan) if k in graph.producer]
        whole = graph.replace(outputs=tuple(Value(k, np.dtype(np.float32)) for k in made))
        run, seen = onnxruntime_reading(remove_unused(whole)), dict[str, list[np.ndarray]]()
        shapes: dict[str, list[tuple[int, ...]]] = {}
        steps: dict[str, tuple[int, int]] = {}
        for sample in samples:
            given = {v.name: sample[v.name] for v in graph.inputs}
            for name, array in itertools.chain(given.items(), run(given).items()):
                if array.dtype == np.float32:
                    axis, step = steps.setdefault(name, _step(graph, name, array.shape))
                    thin = array if step == 1 else array[(slice(None),) * axis + (slice(None, None, step),)].copy()
                    seen.setdefault(name, []).append(thin)
                    shapes.setdefault(name, []).append(array.shape)
        return cls(graph, samples, seen, shapes)

    def covering(self, plan: Plan) -> Watched:
        """The activations that the losses of another plan need."""
        return (
            self
            if self.values.keys() >= _needed(self.graph, plan).keys()
            else Watched.of(self.graph, self.samples, plan)
        )

    def losses(self, plan: Plan) -> Iterator[Loss]:
        """Yield the loss of each tensor that a plan rounds to integers at a scale of its own."""
        for name, qparams in plan.activations.items():
            if name in self.values and isinstance(qparams.grid, Integer) and not qparams.dynamic:
                yield self._activation(name, qparams)
        for node in self.graph.nodes:
            layer = linear_layer(self.graph, node)
            if layer is not None and layer.weight in plan.weights and node.inputs[0] in self.values:
                loss = self._weight(node, layer.weight, plan.weights[layer.weight])
                if loss is not None:
                    yield loss

    def shifts(self, plan: Plan) -> Iterator[tuple[Node, float]]:
        """Yield each layer with a bias, and how far, in dB, what its input's rounding shifts its means by is below its output.

        Bias correction takes back (Q(W) - W) E[x] and, of Q(W) E[Q(x) - x], what negative tails cause, measured through all
        that lies between two layers. Here x is rounded alone, on few samples: enough to tell whether biases must be fitted.
        """
        for node in self.graph.nodes:
            layer = linear_layer(self.graph, node)
            if layer is None or layer.bias is None or layer.weight not in plan.weights:
                continue
            weight, seen = self.graph.params[layer.weight], self._channels(node, plan.activations.get(node.inputs[0]))
            by_output = layer.unfolded(weight)
            if by_output is None or seen is None or len(seen.power) != int(by_output.reads.max()) + 1:
                continue
            shift = shift_through(layer, plan, weight, seen.shift)
            power = (np.square(by_output.weight, dtype=np.float64).sum(-1) * seen.power[by_output.reads]).sum()
            if power and np.isfinite(shift).all():
                yield node, decibels(float(power), float(np.square(shift).sum()))

    def _activation(self, name: str, qparams: QParams) -> Loss:
        readers = self.graph.consumers.get(name, ())
        worst = Loss(name, "", np.inf)
        totals: dict[str, np.ndarray] = {}
        seen = saturating_reader(self.graph, name)
        for number, x in enumerate(self.values[name]):
            x, error = _behind(seen, x, qparams.on_host(x))
            for part, (signal, noise) in self._parts(name, x, error, readers, number):
                totals[part] = totals.get(part, 0) + np.array([signal, noise])
        for part, (signal, noise) in totals.items():
            sqnr = decibels(float(signal), float(noise)) if np.isfinite(noise) else -np.inf
            if sqnr < worst.sqnr and signal > 0:
                worst = Loss(name, part, sqnr)
        return worst

    def _parts(
        self, name: str, x: np.ndarray, error: np.ndarray, readers: Sequence[Node], number: int
    ) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield signal and noise, as sums of squares, of each part of a tensor."""
        made = self.graph.producer.get(name)
        if not x.size:
            return
        if x.ndim and (soft := next(filter(is_softmax, readers), None)) is not None:
            axis = int(soft.attrs.get("axis", -1 if self.graph.opset() >= 13 else 1))
            yield "the scores that a Softmax tells apart", _of_scores(x, error, axis % x.ndim)
        known = self.shapes.keys() | self.graph.arrays.keys()
        if made is not None and is_concat(made) and x.ndim and known.issuperset(made.inputs):
            axis, start = int(made.attrs["axis"]) % x.ndim, 0
            for operand in made.inputs:
                shape = (
                    self.graph.arrays[operand].shape if operand in self.graph.arrays else self.shapes[operand][number]
                )
                where = (slice(None),) * axis + (slice(start, start := start + shape[axis]),)
                yield f"operand {operand!r}", (_power(x[where]), _power(error[where]))
        signal = _power(x)
        if readers and all(adds(n) for n in readers):
            sums = [_power(self.values[n.outputs[0]][number]) for n in readers if n.outputs[0] in self.values]
            signal = max(signal, min(sums, default=0.0))
        yield "", (signal, _power(error))

    def _weight(self, node: Node, name: str, qparams: QParams) -> Loss | None:
        layer = linear_layer(self.graph, node)
        assert layer is not None
        weight = self.graph.params[name]
        by_output = layer.unfolded(weight)
        if by_output is None or not isinstance(qparams.grid, Integer):
            return None
        channels = self._channels(node)
        if channels is None or len(channels.power) != int(by_output.reads.max()) + 1:
            return None
        power = channels.power
        lost = layer.unfolded(qparams.on_host(weight) - weight)
        assert lost is not None
        signal, noise = (
            float((np.square(w).sum(-1) * power[by_output.reads]).sum()) for w in (by_output.weight, lost.weight)
        )
        return Loss(name, "", decibels(signal, noise)) if signal else None

    def _channels(self, node: Node, qparams: QParams | None = None) -> ChannelMoments | None:
        """Means of what a linear node reads, channel by channel, and what rounding shifts it by; None where it was not watched."""
        values = self.values.get(node.inputs[0], ())
        if not values or values[0].ndim < 2:
            return None
        axis = (
            1 if values[0].ndim == self.graph.params[node.inputs[1]].ndim and values[0].ndim > 2 else values[0].ndim - 1
        )
        rest = tuple(i for i in range(values[0].ndim) if i != axis)
        static = qparams is not None and isinstance(qparams.grid, Integer) and not qparams.dynamic

        def mean(fn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
            return np.asarray(np.mean([fn(x).mean(rest, dtype=np.float64) for x in values], 0))

        return ChannelMoments(
            power=mean(lambda x: np.square(x, dtype=np.float64)),
            shift=mean(lambda x: qparams.on_host(x) - x if static and qparams else np.zeros_like(x)),
        )


def _needed(graph: Graph, plan: Plan) -> dict[str, Value]:
    """The float tensors that are rounded, that layers read, and that are made of rounded ones by sums and joins."""
    named = {*plan.activations}
    for node in graph.nodes:
        if linear_layer(graph, node) is not None:
            named.add(node.inputs[0])
        if is_concat(node) and not named.isdisjoint(node.outputs):
            named.update(node.inputs)
        if adds(node) and not plan.activations.keys().isdisjoint(node.inputs):
            named.update(node.outputs)
    values = {k: v for k, v in graph.values.items() if k in named and k not in graph.arrays}
    return {k: v for k, v in values.items() if v.dtype == np.float32 and not v.containers}


def _behind(reader: tuple[str, bool] | None, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A tensor and its error, of what a function that saturates makes of it, if that alone reads it."""
    if reader is not None:
        function, gates = reader
        x, y = (np.asarray(SATURATING[function](v)) * (v if gates else np.float32(1)) for v in (x, y))
    return x, y - x


def _power(x: np.ndarray) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def _of_scores(x: np.ndarray, error: np.ndarray, axis: int) -> tuple[float, float]:
    """Signal and noise of those scores that are not masked: differences within a row count, in units of one or more.

    A masked score that rounding brings near the others is an error of the distance that is missing.
    """
    largest = x.max(axis, keepdims=True)
    shown = x > largest - _HIDDEN
    count = shown.sum(axis, keepdims=True)
    spread, lost = (np.where(shown, v - np.where(shown, v, 0).sum(axis, keepdims=True) / count, 0) for v in (x, error))
    missing = np.where(shown, 0, np.maximum(x + error - (largest - _LEAK), 0))
    return _power(spread) + float(shown.sum()), _power(lost) + _power(missing)


def _step(graph: Graph, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The axis along which a large tensor is thinned out, and the step: its longest that does not tell parts apart."""
    made, size = graph.producer.get(name), int(np.prod(shape))
    if size <= _ELEMENTS or len(shape) < 2:
        return 0, 1
    joined = {int(made.attrs["axis"]) % len(shape)} if made is not None and is_concat(made) else set()
    near = [n for n in graph.consumers.get(name, ()) if is_softmax(n)]
    joined |= {int(n.attrs.get("axis", -1)) % len(shape) for n in near} | {1}
    free = [a for a in range(len(shape)) if a not in joined] or [0]
    axis = max(free, key=lambda a: shape[a])
    return axis, max(1, min(shape[axis], -(-size // _ELEMENTS)))
