"""Predicted noise of rounding to few bits, from channels and weights, for any factors.

A tensor with one scale has the rounding error step^2 / 12 in every channel, where its largest channel decides the step.
In the original's units, channel c with the factor s_c has step^2 / 12 / s_c^2. The error of a weight is multiplied by
its input, and has its power; the error of a bias is a constant. How much of an error reaches the outputs of the
network depends on the weights on its way: see `importance`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jq.arithmetic.exponents import MINMSE
from jq.arithmetic.formats import Integer
from jq.config import QuantConfig
from jq.graph import Graph, Node
from jq.ops.kinds import adds, averages, cuts, is_concat, pools_average
from jq.plan.placement import absorbed, rule_of
from jq.recovery.equalization.channels import Channels
from jq.recovery.equalization.groups import Groups, Layer
from jq.util.mapped import BLOCK, blocks, release

Elements = tuple[np.ndarray, Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]
_TINY = 1e-30  # in place of powers that are zero, where something is divided by them
# Of a large weight, elements that have this part of the largest in their row or column: as few as one of `_FEW`.
_LARGE_SHARES, _FEW = (0.7, 0.9, 0.999), 16
_CANDIDATES = np.array(MINMSE[:3])  # the two finest clip most of a range, and hardly ever win


@dataclasses.dataclass(frozen=True, eq=False)
class Importance:
    """Weights of the noise power of channels: the part of the outputs' power that it becomes."""

    white: np.ndarray  # of noise that differs from pixel to pixel
    steady: np.ndarray  # of a constant

    @property
    def mixed(self) -> np.ndarray:
        """The mean of both, for the error of a weight: it changes with the image, but little."""
        return (self.white + self.steady) / 2


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """An activation that is rounded."""

    name: str
    classes: np.ndarray  # [C]
    seen: Channels
    importance: Importance
    bound: float  # of the Clip that makes it; inf without one
    grid: StepGrid

    def noise(self, factors: np.ndarray) -> float:
        """The predicted noise with these factors of all classes, including what its Clip no longer cuts."""
        f, seen = factors[self.classes], self.seen
        reach, passed = np.minimum(seen.reach, self.bound / f), self.passed(f)
        steps = self.grid.steps(float((reach * f).max(initial=0)))[:, None]
        # `cut` is beyond the largest code, with values distributed exponentially. A channel of less than half a step
        # is lost, with its own power.
        largest = self.grid.codes * steps / f
        mean = np.sqrt(np.maximum(seen.power, _TINY) / (2 * np.maximum(seen.active, 1e-3)))
        cut = np.where(largest < reach, seen.power * np.exp(-largest / mean), 0)
        noise = np.minimum(np.square(steps / f) / 12 * seen.active, seen.power) + cut
        best = (noise * f**2).sum(1).argmin()
        return float(((noise[best] + passed) * self.importance.white).sum())

    def passed(self, f: np.ndarray) -> np.ndarray:
        """The mean square that a Clip at the bound b adds to channels with factors f < 1, which it cuts at b / f."""
        if self.bound == np.inf:
            return np.zeros_like(f)
        u = self.bound * np.maximum(1 / f - 1, 0) / self.tail
        return self.seen.beyond * (1 - np.exp(-u) * (1 + u))

    @property
    def tail(self) -> np.ndarray:
        """The mean excess over the Clip's bound, of values beyond it, as if distributed exponentially."""
        return np.maximum(self.seen.beyond / np.maximum(2 * self.seen.over, _TINY), 1e-3 * self.bound)


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight of a layer, or its bias as the weight of an input of ones, that is rounded."""

    made: np.ndarray  # classes of the outputs [O]
    read: np.ndarray  # classes of the inputs that the elements multiply [O or 1, J]
    power: np.ndarray  # of these inputs
    size: np.ndarray  # magnitudes [O, J, K]
    importance: np.ndarray  # of the outputs [O]
    grid: StepGrid
    each: float = 1.0  # elements that one which is looked at stands for
    per_channel: bool = False  # whether each output has a step of its own

    @functools.cached_property
    def kernels(self) -> np.ndarray:
        """The largest magnitude of each kernel [O, J]."""
        return self.size.max(2)

    def noise(self, factors: np.ndarray) -> float:
        """The predicted noise with these factors of all classes."""
        up, down = factors[self.made], factors[self.read]
        if self.per_channel:  # a row's step has its own factor, which its noise is divided by
            steps = (self.kernels / down).max(1) / self.grid.codes
            power = np.broadcast_to(self.power * down**2, self.kernels.shape).sum(1)
            return float((self.importance * steps**2) @ power) * self.size.shape[2] / 12
        weight, power = self.importance / up**2, np.broadcast_to(self.power * down**2, self.size.shape[:2])
        size, rows, columns = self.scaled(up, down)
        reach = float(size.max(initial=0))
        steps = self.grid.steps(reach)
        alike = self.size.size > BLOCK and len(self.power) == len(down) == 1  # so that the sums of one row do for all
        sums = np.full(len(power), power[0].sum()) if alike else power.sum(1)
        even = self.size.shape[2] * float(sums @ weight) / 12
        cuts = self.grid.codes * steps.min() < reach
        at = np.flatnonzero(size > self.grid.codes * steps.min()) if cuts else np.zeros(0, np.int64)
        cut = self.each * np.square(np.maximum(size[at] - self.grid.codes * steps[:, None], 0))
        best = (steps**2 / 12 * self.size.size + cut.sum(1)).argmin()
        return float(steps[best] ** 2 * even + cut[best] @ (weight[rows(at)] * power[rows(at), columns(at)]))

    def scaled(self, up: np.ndarray, down: np.ndarray) -> Elements:
        """The magnitudes of the elements with factors, and what gives the rows and columns of some."""
        size, kernel = self.size * (up[:, None] / down)[:, :, None].astype(np.float32), self.size.shape[2]
        columns = self.size.shape[1]
        return size.reshape(-1), lambda at: at // kernel // columns, lambda at: at // kernel % columns

    def extremes(self, factors: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the largest kernel of each row, and of each column: rows, columns, magnitudes with these factors."""
        size = self.kernels * (factors[self.made][:, None] / factors[self.read]).astype(np.float32)
        for at in ((np.arange(len(size)), size.argmax(1)), (size.argmax(0), np.arange(size.shape[1]))):
            yield *at, size[at]

    def near(self, factors: np.ndarray) -> Weight:
        """The same, for factors near these."""
        return self


@dataclasses.dataclass(frozen=True, eq=False)
class LargeWeight(Weight):
    """A weight of which only the elements that are large in their row or column are looked at: they make the range.

    `size` is the weight itself, with signs and where it lies: a copy of it would be a second network in memory.
    """

    at: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))  # in the flat weight

    @functools.cached_property
    def kernels(self) -> np.ndarray:
        """The largest magnitude of each kernel [O, J]."""
        return np.abs(self.size).max(2)

    @functools.cached_property
    def elements(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Their rows, columns and magnitudes."""
        rows, columns = np.unravel_index(self.at // self.size.shape[2], self.size.shape[:2])
        sizes = np.abs(self.size.reshape(-1)[self.at])
        release(self.size)
        return rows, columns, sizes

    def scaled(self, up: np.ndarray, down: np.ndarray) -> Elements:
        """The magnitudes of these elements with factors, and what gives the rows and columns of some."""
        rows, columns, sizes = self.elements
        read = np.broadcast_to(down, self.size.shape[:2])[rows, columns]
        return (sizes * (up[rows] / read)).astype(np.float32), rows.__getitem__, columns.__getitem__

    def extremes(self, factors: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the largest of these elements of each row, and of each column."""
        rows, columns, _ = self.elements
        sizes = self.scaled(factors[self.made], factors[self.read])[0]
        for order, line in self.lines:
            ordered, starts = sizes[order], np.flatnonzero(np.diff(line, prepend=-1))
            largest = np.maximum.reduceat(ordered, starts) if len(starts) else ordered
            at = np.flatnonzero(ordered == np.repeat(largest, np.diff(starts, append=len(line))))
            first = order[at[np.flatnonzero(np.diff(line[at], prepend=-1))]]
            yield rows[first], columns[first], sizes[first]

    @functools.cached_property
    def lines(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """The elements in the order of their rows, and of their columns, each with these."""
        rows, columns, _ = self.elements
        order = np.argsort(columns, kind="stable")
        return (np.arange(len(rows)), rows), (order, columns[order])

    def near(self, factors: np.ndarray) -> Weight:
        """The same with what is large at these factors as well."""
        up, down = factors[self.made][:, None, None], factors[self.read][:, :, None]
        parts = [(part, down if len(down) == 1 else down[part]) for part in blocks(self.size)]
        row, column = np.zeros(len(self.size)), np.zeros(self.size.shape[1])
        for part, own in parts:
            size = np.abs(self.size[part]) * (up[part] / own).astype(np.float32)
            row[part], column = size.max((1, 2), initial=0), np.maximum(column, size.max((0, 2), initial=0))
        for share in _LARGE_SHARES:
            large_at = list[np.ndarray]()
            of_row, of_column = (share * np.maximum(v, _TINY) for v in (row, column))
            for part, own in parts:
                size = np.abs(self.size[part]) * (up[part] / own).astype(np.float32)
                large = (size >= of_row[part, None, None]) | (size >= of_column[:, None])
                large_at.append(np.flatnonzero(large) + part.start * (self.size.size // len(self.size)))
            count = sum(map(len, large_at))
            if count * _FEW <= self.size.size:
                break
        release(self.size)
        # Of many alike, as those of ternary weights, some will do.
        each = max(1, math.ceil(count * _FEW / self.size.size))
        at = np.union1d(self.at, np.concatenate(large_at)[::each])
        return dataclasses.replace(self, at=at, each=max(self.each, float(each)))


@dataclasses.dataclass(frozen=True)
class StepGrid:
    """Steps and codes of a kind of tensor."""

    codes: float  # on either side of zero
    power_of_two: bool

    def steps(self, reach: float) -> np.ndarray:
        """The steps of which the one of least squared error is taken, for a range."""
        step = max(reach, _TINY) / self.codes
        if not self.power_of_two:
            return np.array([step])
        return np.exp2(np.rint(np.log2(step)) + _CANDIDATES)


@dataclasses.dataclass(frozen=True, eq=False)
class Noise:
    """The tensors that are rounded, and the noise that they add together."""

    groups: Groups
    activations: tuple[Activation, ...]
    weights: tuple[Weight, ...]
    seen: Mapping[str, Channels]  # of all tensors that were measured

    def reaches(self, factors: np.ndarray) -> dict[str, float]:
        """The largest magnitude that each measured tensor has with these factors of all classes."""
        bounds = {node.outputs[0]: bound for node, bound in self.groups.clips}
        most = {name: float((c.reach * factors[self.groups.channels[name]]).max()) for name, c in self.seen.items()}
        return {name: min(reach, bounds.get(name, np.inf)) for name, reach in most.items()}

    @functools.cached_property
    def terms(self) -> tuple[tuple[Callable[[np.ndarray], float], frozenset[int]], ...]:
        """The noise of each tensor as a function of the factors, with the groups whose factors matter."""
        group = self.groups.group
        terms = [(a.noise, a.classes) for a in self.activations]
        terms += [(w.noise, np.append(w.made, w.read)) for w in self.weights]
        return tuple((noise, frozenset(group[classes].tolist())) for noise, classes in terms)

    def near(self, factors: np.ndarray) -> Noise:
        """The same, where large weights are looked at for what counts near these factors."""
        return dataclasses.replace(self, weights=tuple(weight.near(factors) for weight in self.weights))

    def total(self, factors: np.ndarray) -> float:
        """The predicted noise, as a part of the power of the network's outputs."""
        return sum(noise(factors) for noise, _ in self.terms)


def predict(graph: Graph, groups: Groups, seen: Mapping[str, Channels], config: QuantConfig) -> Noise:
    """Return the noise of all tensors that a config rounds in a graph."""
    important = importance(graph, groups, seen)
    grids = [
        StepGrid((1 << f.bits - 1) - 1.0 if isinstance(f, Integer) else 127.0, config.scale == "power_of_two")
        for f in (config.activation, config.weight)
    ]
    bounds = {node.outputs[0]: bound for node, bound in groups.clips}
    unrounded = absorbed(graph).keys() | _moved(graph)
    # Averages have the step of their inputs, as the NPU's pools need.
    aligned = graph.nodes if "align_pool" in config.constraints else ()
    pooled = {node.outputs[0]: node.inputs[0] for node in aligned if pools_average(node)}
    activations = []
    for name in groups.channels:
        if name in seen and name in important and name not in unrounded:
            source = pooled.get(name, name)  # whose step it has
            reach = seen[source].reach if source in seen else seen[name].reach
            channels = dataclasses.replace(seen[name], reach=reach)
            bound = bounds.get(source, np.inf) if source in seen else np.inf
            activations.append(Activation(name, groups.channels[name], channels, important[name], bound, grids[0]))
    weights = []
    for layer in groups.layers:
        if layer.y not in important:
            continue
        x, made, counts = seen[layer.x], groups.channels[layer.y], important[layer.y]
        # Where biases are corrected, a weight's error has no mean.
        power = (x.variance if config.corrects_bias else x.power)[layer.reads]
        read = groups.channels[layer.x][layer.reads]
        of_layer, channelwise = (made, read, power), config.per_channel
        if layer.weight.size > BLOCK:
            large = LargeWeight(*of_layer, layer.weight, counts.mixed, grids[1], per_channel=channelwise)
            weights.append(large.near(np.ones(groups.count)))
        else:
            size = np.abs(layer.weight)
            weights.append(Weight(*of_layer, size, counts.mixed, grids[1], per_channel=channelwise))
        if layer.bias is not None and config.bias == "weight":
            one = np.ones((1, 1))
            size = np.abs(layer.bias)[:, None, None]
            weights.append(Weight(made, np.zeros((1, 1), np.int64), one, size, counts.steady, grids[1]))
    return Noise(groups, tuple(activations), tuple(weights), seen)


def _moved(graph: Graph) -> set[str]:
    """Tensors that hold the rounded values of others."""
    return {o for node in graph.nodes if (rule := rule_of(graph, node)) and rule.shares for o in node.outputs}


def importance(graph: Graph, groups: Groups, seen: Mapping[str, Channels]) -> dict[str, Importance]:
    """Return the importance of the channels of every tensor, from the outputs backwards.

    An output's noise counts by its part of the output's power. A layer passes noise on by its squared weights, scaled
    such that what it reads counts as much altogether as what it makes: errors, as parts of the power, add up from
    layer to layer. In a sum, an operand counts by its part of the power.
    """
    layers = {layer.node: layer for layer in groups.layers}
    backwards = _Backwards(groups, seen)
    for name in graph.output_names:
        backwards.spread(name, 1.0)
    for node in reversed(graph.nodes):
        y = next((o for o in node.outputs if o in backwards.importance), None)
        if node in layers and y is not None:
            backwards.layer(layers[node])
        elif y is None or not backwards.follow(node):
            for name in dict.fromkeys(node.reads()):
                backwards.spread(name, 1.0 if y is None else backwards.parts[y])
    return backwards.importance


class _Backwards:
    """Importance, carried from the outputs backwards, and the part of the outputs' power of each tensor."""

    def __init__(self, groups: Groups, seen: Mapping[str, Channels]) -> None:
        self.channels, self.seen = groups.channels, seen
        self.importance: dict[str, Importance] = {}
        self.parts: dict[str, float] = {}

    def add(self, name: str, white: np.ndarray, steady: np.ndarray, part: float) -> None:
        """Add a reader of a tensor."""
        if name in self.channels:
            if (old := self.importance.get(name)) is not None:
                white, steady = white + old.white, steady + old.steady
            self.importance[name] = Importance(white, steady)
            self.parts[name] = self.parts.get(name, 0.0) + part

    def spread(self, name: str, part: float) -> None:
        """Add a reader that is not known: all noise counts alike."""
        if name in self.channels and name in self.seen:
            even = np.full(len(self.channels[name]), part / max(self.seen[name].variance.sum(), _TINY))
            self.add(name, even, even, part)

    def layer(self, layer: Layer) -> None:
        """Carry importance through a layer: by squared weights, of a constant by their sums over a kernel."""
        after, part, x = self.importance[layer.y], self.parts[layer.y], self.seen[layer.x]

        def back(gain: np.ndarray, part: slice) -> np.ndarray:
            if len(layer.reads) == 1 and layer.weight.size > BLOCK:  # a sum in another order, many times faster
                return np.bincount(layer.reads[0], after.white[part] @ gain, len(x.mean))
            reads = np.broadcast_to(layer.reads if len(layer.reads) == 1 else layer.reads[part], gain.shape)
            return np.bincount(reads.ravel(), (gain * after.white[part, None]).ravel(), len(x.mean))

        white, steady = np.zeros(len(x.mean)), np.zeros(len(x.mean))
        for rows in blocks(layer.weight):
            white += back(np.square(layer.weight[rows]).sum(2, dtype=np.float64), rows)
            steady += back(np.square(layer.weight[rows].sum(2, dtype=np.float64)), rows)
        release(layer.weight)
        norm = part / max((white * x.variance).sum(), _TINY)
        self.add(layer.x, white * norm, steady * norm, part)

    def follow(self, node: Node) -> bool:
        """Carry importance through a node that moves, cuts, adds or averages channels; False for other nodes."""
        x, y = node.inputs[0] if node.inputs else "", node.outputs[0]
        count = len(self.channels.get(x, ()))
        if node.domain or y not in self.importance or not count:
            return False
        after, part = self.importance[y], self.parts[y]
        match node:
            case _ if cuts(node):
                active = self.seen[y].active if y in self.seen else 1.0
                self.add(x, after.white * active, after.steady * active, part)
            case _ if adds(node):
                known = [n for n in node.inputs if n in self.seen and len(self.seen[n].mean) == len(after.white)]
                own = [float((after.white * self.seen[n].variance).sum()) for n in known]
                for name, power in zip(known, own, strict=True):
                    self.add(name, after.white, after.steady, part * power / max(sum(own), _TINY))
            case _ if is_concat(node):
                counts = [len(self.channels.get(name, ())) for name in node.inputs]
                if not all(counts) or sum(counts) != len(after.white):
                    return False
                for name, end, size in zip(node.inputs, np.cumsum(counts), counts, strict=True):
                    part_of = slice(end - size, end)
                    self.add(name, after.white[part_of], after.steady[part_of], part * size / len(after.white))
            case _:
                if len(after.white) % count:
                    return False
                white, steady = (v.reshape(count, -1).sum(1) for v in (after.white, after.steady))
                if averages(node) and x in self.seen and y in self.seen:
                    white = white * (self.seen[y].pixels / max(self.seen[x].pixels, 1))
                self.add(x, white, steady, part)
        return True
