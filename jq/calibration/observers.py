"""Statistics of a tensor that merge.

An observer is a frozen value; its state is a dict of small arrays. `observe` reads one tensor of one sample,
`merge` joins two states, in the order of the data, and `init` is the identity of `merge`. So

    update(state, x) = merge(state, observe(x)),

and the same `merge` joins steps, devices and runs: on the device in 32 bits, on the host in 64. Leaves
lead with an axis of rows, one row per tensor or per channel; the calibration pass puts the rows of all
tensors of a graph under each other and merges them at once. A `place` holds what an observer must know
before it sees data, where its candidates or bins lie; see `place`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic import layout
from jq.arithmetic.exponents import MINMSE, base_exponent, descending, error_sums
from jq.arithmetic.formats import Integer
from jq.arithmetic.numerics import FINEST, power_of_two
from jq.npu.facts import HARD_SIGMOID
from jq.ops.saturating import SATURATING

Array = Any
State = dict[str, Array]
Place = Mapping[str, Array]

TIE_EXPONENTS = np.arange(-40, 41)  # of steps at which ties are counted
REACHES = 2.0 ** np.arange(7, 0.5, -0.5)  # of a saturating function's argument, the largest first
_FINER = 16  # octaves from a candidate to where hardly anything is rounded


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's values (or of their magnitudes) in bins of equal width.

    Bin i holds edges[i] <= x < edges[i + 1]; the last one its upper edge too.
    """

    counts: np.ndarray  # int64 [bins]
    edges: np.ndarray  # float32 or float64 [bins + 1]


@dataclasses.dataclass(frozen=True)
class Observer:
    """Base of all observers: of the whole tensor, or of each channel along `axis`."""

    axis: int | None = None

    def init(self, rows: int, place: Place) -> State:
        """The state of no data."""
        raise NotImplementedError

    def observe(self, x: Array, place: Place) -> State:
        """The state of one tensor, given its own rows of the place."""
        raise NotImplementedError

    def merge(self, a: State, b: State) -> State:
        """The state of a's data followed by b's: by default, sums."""
        return {k: a[k] + b[k] for k in a}

    def update(self, state: State, x: Array, place: Place = {}) -> State:  # noqa: B006  never written
        """The state after one more tensor."""
        return self.merge(state, self.observe(x, place))

    @property
    def extent(self) -> Range | None:
        """The observer whose state decides where candidates or bins lie; None without any."""
        return None

    def place(self, low: Array, high: Array) -> dict[str, np.ndarray]:
        """Where they lie, for values of which the first were in [low, high]."""
        return {}

    def covers(self, place: Place, low: Array, high: Array) -> np.ndarray:
        """Which rows have a place that serves values in [low, high]."""
        return np.ones(np.shape(low), bool)

    def observes(self, tensor: str) -> bool:
        """Whether it looks at a tensor at all."""
        return True

    @property
    def unnamed(self) -> Observer:
        """The same without names of tensors, which decide only whether it looks at one."""
        return self

    def rows(self, shape: tuple[int, ...]) -> int:
        """How many rows a tensor of this shape has."""
        return 1 if self.axis is None or not shape else shape[self.axis % len(shape)]

    def _by_row(self, x: Array) -> Array:
        """The tensor as [rows, *rest]."""
        return layout.rows(x, self.axis)


@dataclasses.dataclass(frozen=True)
class Chosen(Observer):
    """Base of observers of some tensors only."""

    only: tuple[str, ...] = ()

    def observes(self, tensor: str) -> bool:
        return tensor in self.only

    @property
    def unnamed(self) -> Chosen:
        return dataclasses.replace(self, only=())


@dataclasses.dataclass(frozen=True)
class Range(Observer):
    """Minimum and maximum, of the values or, if `absolute`, of their magnitudes.

    >>> observer = Range()
    >>> state = observer.update(observer.init(1, {}), jnp.array([3.0, -5.0]))
    >>> float(state["low"][0]), float(state["high"][0])
    (-5.0, 3.0)
    """

    absolute: bool = False

    def init(self, rows: int, place: Place) -> State:
        return {"low": np.full(rows, np.inf, _float()), "high": np.full(rows, -np.inf, _float())}

    def observe(self, x: Array, place: Place) -> State:
        x = self._by_row(jnp.abs(x) if self.absolute else x)
        rest = tuple(range(1, x.ndim))
        return {"low": x.min(rest, initial=jnp.inf), "high": x.max(rest, initial=-jnp.inf)}

    def merge(self, a: State, b: State) -> State:
        minimum, maximum = (np.minimum, np.maximum) if _on_host(a, b) else (jnp.minimum, jnp.maximum)
        return {"low": minimum(a["low"], b["low"]), "high": maximum(a["high"], b["high"])}


@dataclasses.dataclass(frozen=True)
class MovingRange(Observer):
    """Exponential moving average of each sample's minimum and maximum.

    After m_0, m_1, ... it is m_0, then v + weight (m - v). As a sum, value + decay * first with value =
    sum of weight (1 - weight)^(n - i) m_i and decay = (1 - weight)^n, which merges.
    """

    weight: float = 0.01

    def init(self, rows: int, place: Place) -> State:
        zeros = dict.fromkeys(("low", "high", "first_low", "first_high"), np.zeros(rows, _float()))
        return {"feeds": np.zeros(rows, np.int32), "decay": np.ones(rows, _float())} | zeros

    def observe(self, x: Array, place: Place) -> State:
        seen = Range(self.axis).observe(x, place)
        one = jnp.ones_like(seen["low"])
        first = {f"first_{k}": v for k, v in seen.items()}
        counted = {"feeds": one.astype(jnp.int32), "decay": (1 - self.weight) * one}
        return counted | first | {k: self.weight * v for k, v in seen.items()}

    def merge(self, a: State, b: State) -> State:
        where = np.where if _on_host(a, b) else jnp.where
        merged = {k: a[k] * b["decay"] + b[k] for k in ("low", "high")}
        merged |= {k: where(a["feeds"] > 0, a[k], b[k]) for k in ("first_low", "first_high")}
        return merged | {"feeds": a["feeds"] + b["feeds"], "decay": a["decay"] * b["decay"]}

    def finish(self, state: State) -> State:
        """The averages as a range."""
        return {k: state[k] + state["decay"] * state[f"first_{k}"] for k in ("low", "high")}


@dataclasses.dataclass(frozen=True)
class Moments(Observer):
    """Count, sum and sum of squares: mean, second moment and the power of the signal."""

    def init(self, rows: int, place: Place) -> State:
        none = np.zeros(rows, _float())
        return {"count": np.zeros(rows, np.int32), "total": none, "square": none}

    def observe(self, x: Array, place: Place) -> State:
        x = self._by_row(x)
        rest = tuple(range(1, x.ndim))
        count = jnp.full(x.shape[0], math.prod(x.shape[1:]), jnp.int32)
        return {"count": count, "total": x.sum(rest), "square": (x * x).sum(rest)}


@dataclasses.dataclass(frozen=True)
class ChannelSums(Chosen):
    """Count and sum of each channel of some tensors."""

    axis: int | None = 1

    def init(self, rows: int, place: Place) -> State:
        return {"count": np.zeros(rows, np.int32), "total": np.zeros(rows, _float())}

    def observe(self, x: Array, place: Place) -> State:
        x = self._by_row(x)
        count = jnp.full(x.shape[0], math.prod(x.shape[1:]), jnp.int32)
        return {"count": count, "total": x.sum(tuple(range(1, x.ndim)))}


@dataclasses.dataclass(frozen=True)
class FormLoss(Chosen):
    """Sums of squares of Sigmoid on some tensors, and of the difference of the chip's HardSigmoid from it.

    The `gate` sums are of the function itself, the `swish` sums of its product with the tensor.
    """

    def init(self, rows: int, place: Place) -> State:
        return dict.fromkeys(("gate_lost", "gate_power", "swish_lost", "swish_power"), np.zeros(rows, _float()))

    def observe(self, x: Array, place: Place) -> State:
        x = self._by_row(x)
        gate = jax.nn.sigmoid(x)
        lost = jnp.clip(HARD_SIGMOID["alpha"] * x + HARD_SIGMOID["beta"], 0, 1) - gate
        parts = {"gate_lost": lost, "gate_power": gate, "swish_lost": x * lost, "swish_power": x * gate}
        return {k: jnp.square(v).sum(tuple(range(1, x.ndim))) for k, v in parts.items()}


@dataclasses.dataclass(frozen=True)
class Ties(Chosen):
    """How many samples' two largest values get one code, by the exponent of the step, in tensors of one value per class.

    Two values round to one code of a step with the probability max(0, 1 - difference / step), wherever codes begin, and
    surely from the last code on.
    """

    last: int | None = None  # the largest code above zero; None where zero may be any code

    def rows(self, shape: tuple[int, ...]) -> int:
        return int(1 < math.prod(shape[1:]) == max(shape[1:], default=0))

    def init(self, rows: int, place: Place) -> State:
        none = np.zeros(rows, np.int32)
        return {"seen": none, "equal": none, "ties": np.zeros((rows, len(TIE_EXPONENTS)), _float())}

    def observe(self, x: Array, place: Place) -> State:
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))  # of no sample, too
        largest = x.max(1, keepdims=True)
        rest = jnp.where(x == largest, -jnp.inf, x).max(1, keepdims=True)  # `lax.top_k` would sort millions of values
        second = jnp.where((x == largest).sum(1, keepdims=True) > 1, largest, rest)
        difference, steps = largest - second, power_of_two(TIE_EXPONENTS)
        ties = jnp.maximum(0, 1 - difference / steps)
        if self.last is not None:
            ties = jnp.where(second >= self.last * steps, 1, ties)
        seen, equal = jnp.full(1, x.shape[0], jnp.int32), (difference == 0).sum(0, dtype=jnp.int32)
        return {"seen": seen, "equal": equal, "ties": ties.sum(0)[None]}


@dataclasses.dataclass(frozen=True)
class ErrorTable(Observer):
    """Squared error at each of several candidate exponents, the power of the signal, its elements, and the range.

    Candidate k is the exponent place["coarsest"] - k. The sums are columns of one array with one formula,

        sum of (x * inverse - rint(clip(x * inverse, least, most)))**2,

    because one kernel call per piece of a tensor is what a small tensor costs: the whole error of each
    candidate; the part of it that saturation causes for the first `parts` of them, which is the error on a
    much finer grid with the candidate's own bounds; and the power, the error of clipping all to zero.
    """

    grid: Integer = dataclasses.field(kw_only=True)
    candidates: int = dataclasses.field(kw_only=True)
    parts: int = 1

    @property
    def extent(self) -> Range:
        return Range()

    def place(self, low: Array, high: Array) -> dict[str, np.ndarray]:
        """Candidates for values that begin in a range, with room to grow above what MinMSE compares for it."""
        coarsest = base_exponent(low, high, self.grid) + MINMSE[0] + self.candidates - len(MINMSE)
        return self.place_at(np.atleast_1d(coarsest))

    def place_at(self, coarsest: np.ndarray) -> dict[str, np.ndarray]:
        """Candidates from an exponent down, and the columns that follow from them."""
        exponents = descending(coarsest, self.candidates)
        finer = np.maximum(exponents[:, : self.parts] - _FINER, FINEST)
        columns = np.concatenate([exponents, finer, exponents[:, :1]], 1)
        reach = np.concatenate([np.zeros_like(exponents), exponents[:, : self.parts] - finer], 1)
        least, most = (
            np.pad(np.ldexp(np.float32(q - self.grid.middle), reach), ((0, 0), (0, 1)))
            for q in (self.grid.qmin, self.grid.qmax)
        )
        return {"coarsest": coarsest, "inverse": power_of_two(-columns), "least": least, "most": most}

    def init(self, rows: int, place: Place) -> State:
        sums = np.zeros((rows, self.candidates + self.parts + 1), _float())
        return self.extent.init(rows, place) | {"count": np.zeros(rows, np.int32), "sums": sums}

    def observe(self, x: Array, place: Place) -> State:
        if not x.size:
            return self.init(1, place)
        sums = error_sums(x, *(place[k][0] for k in ("inverse", "least", "most")))
        # A range of its own: XLA's library reduces the tensor as it lies, in a tenth of the time of the table.
        count = jnp.full(1, x.size, jnp.int32)
        return self.extent.observe(x, place) | {"count": count, "sums": sums.square[None]}

    def merge(self, a: State, b: State) -> State:
        return self.extent.merge(a, b) | {k: a[k] + b[k] for k in ("count", "sums")}

    def finish(self, state: State, place: Place) -> dict[str, np.ndarray]:
        """By row: the exponents, and in units of their squared scales `total`, `clipped`, and of the first `power`."""
        exponents = descending(place["coarsest"], self.candidates)
        total, clipped, power = np.split(state["sums"], [self.candidates, self.candidates + self.parts], 1)
        widened = place["most"][:, self.candidates : -1] / np.float32(self.grid.qmax - self.grid.middle)
        return {"exponent": exponents, "total": total, "clipped": clipped / widened**2, "power": power[:, 0]}


@dataclasses.dataclass(frozen=True)
class ErrorsBehind(Chosen):
    """Squared error of a saturating function of some tensors, at each of several scales of theirs.

    In range it is the residual times the function's slope; what is clipped counts by the function's own values, so that
    clipping costs nothing where the function is flat. It is so from some place on whatever the data, so that the
    candidates are fixed: their reaches are those of `REACHES`. Sums are in units of the squared scale.
    """

    function: str = dataclasses.field(kw_only=True)  # of `SATURATING`
    gates: bool = dataclasses.field(kw_only=True)  # x * f(x)
    grid: Integer = dataclasses.field(kw_only=True)

    @property
    def scales(self) -> np.ndarray:
        """The candidates, the coarsest first."""
        return REACHES / (self.grid.qmax - self.grid.middle)

    def init(self, rows: int, place: Place) -> State:
        return {"sums": np.zeros((rows, REACHES.size), _float())}

    def observe(self, x: Array, place: Place) -> State:
        if not x.size:
            return self.init(1, place)

        def f(v: Array) -> Array:
            return SATURATING[self.function](v) * (v if self.gates else 1)

        values, slopes = jax.jvp(f, (x,), (jnp.ones_like(x),))
        least, most = (
            np.full(REACHES.size, q - self.grid.middle, np.float32) for q in (self.grid.qmin, self.grid.qmax)
        )
        scales = self.scales.astype(np.float32)
        behind = values, f(jnp.stack([least * scales, most * scales]))
        return {"sums": error_sums(x, 1 / scales, least, most, slopes=slopes, behind=behind).square[None]}

    def finish(self, state: State) -> np.ndarray:
        """The error of each candidate, of one row."""
        return np.asarray(state["sums"][0] * np.square(self.scales))


@dataclasses.dataclass(frozen=True)
class HistogramObserver(Observer):
    """Counts in bins of equal width, whose number grows on both sides while their width stays.

    The bins start as numpy's of the range that the place is made for: `bins` equal ones over [low, high], or
    over [-a, a] if `centred`, or over magnitudes [least, a] if `absolute`. The device counts in `growth` times
    as many; what lies beyond shows in the range, and then the step is run again with more.
    """

    bins: int = 2048
    absolute: bool = False
    centred: bool = False
    growth: int = 1  # an odd number: 3 has room for as many bins again on both sides
    double: bool = True  # edges in float64, as Quark computes them, or in float32, as onnxruntime

    @property
    def extent(self) -> Range:
        return Range(self.axis, absolute=self.absolute)

    def place(self, low: Array, high: Array) -> dict[str, np.ndarray]:
        """Edges for values that begin in a range: of magnitudes if `absolute`."""
        dtype = np.float64 if self.double else np.float32
        some = np.array(low <= high, ndmin=1)  # others had no elements
        low, high = (np.where(some, v, 0).astype(dtype) for v in (low, high))
        if self.centred:
            high = np.maximum(np.abs(low), np.abs(high))
            low = -high
        flat = low == high  # numpy's rule for a range of no width
        half = dtype(0.5)
        low, high = np.where(flat, low - half, low), np.where(flat, high + half, high)
        inner = np.linspace(low, high, self.bins + 1, axis=-1, dtype=dtype)
        width = (high - low)[:, None] / self.bins
        beyond = width * np.arange(1, self.bins * (self.growth // 2) + 1)
        edges = np.concatenate([low[:, None] - beyond[:, ::-1], inner, high[:, None] + beyond], axis=-1)
        # x >= edge for a float32 x is x >= the least float32 that is not below the edge.
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            rounded = edges.astype(np.float32)
            rounded = np.where(rounded < edges, np.nextafter(rounded, np.float32(np.inf)), rounded)
            per_bin, spread = (1 / width[:, 0]).astype(np.float32), rounded[:, -1] - rounded[:, 0]
            # Where float32 overflows or cannot tell bins apart, a bin is searched, not found by division.
            apart = width[:, 0] > 4 * np.spacing(np.abs(rounded).max(-1))
        divisible = np.isfinite(spread) & np.isfinite(per_bin) & apart
        return {"edges": edges, "thresholds": rounded, "per_bin": per_bin, "divisible": divisible}

    def covers(self, place: Place, low: Array, high: Array) -> np.ndarray:
        """Which rows have bins for all values of a range; magnitudes below the first edge do not count."""
        edges = place["edges"]
        return ((edges[:, 0] <= low) | self.absolute) & (high <= edges[:, -1]) | (low > high)

    def init(self, rows: int, place: Place) -> State:
        return self.extent.init(rows, place) | {"counts": np.zeros((rows, self.bins * self.growth), np.int32)}

    def observe(self, x: Array, place: Place) -> State:
        rows = self._by_row(jnp.abs(x) if self.absolute else x)
        flat = rows.reshape(rows.shape[0], -1)
        counts = lax.map(self._counts, (flat, *(place[k] for k in ("thresholds", "per_bin", "divisible"))))
        return self.extent.observe(x, place) | {"counts": counts}

    def _counts(self, given: tuple[Array, Array, Array, Array]) -> Array:
        x, thresholds, per_bin, divisible = given
        last = thresholds.size - 2

        def divided() -> Array:  # off by one bin at most; the thresholds decide
            guess = jnp.clip(((x - thresholds[0]) * per_bin).astype(jnp.int32), 0, last)
            return guess - (x < thresholds[guess]) + ((x >= thresholds[guess + 1]) & (guess < last))

        def searched() -> Array:
            index = jnp.searchsorted(thresholds, x, side="right").astype(jnp.int32) - 1
            return jnp.where(x == thresholds[-1], last, jnp.minimum(index, last))

        index = lax.cond(divisible, divided, searched)
        inside = (x >= thresholds[0]) & (x <= thresholds[-1])
        return jnp.zeros(last + 1, jnp.int32).at[jnp.where(inside, index, last + 1)].add(1, mode="drop")

    def merge(self, a: State, b: State) -> State:
        return self.extent.merge(a, b) | {"counts": a["counts"] + b["counts"]}

    def finish(self, state: State, place: Place) -> Histogram:
        """The histogram of one row: the bins that it began with, and those that it grew."""
        counts, edges = np.array(state["counts"], np.int64), place["edges"]
        margin = self.bins * (self.growth // 2)
        end = max(margin + self.bins, int(np.searchsorted(edges, state["high"])))
        start = min(margin, max(0, int(np.searchsorted(edges, state["low"], side="right")) - 1))
        start = margin if self.absolute else start
        if end < counts.size:
            counts[end - 1] += counts[end]  # values on the last edge
        return Histogram(counts[start:end], edges[start : end + 1])

    def growth_for(self, place: Place, low: Array, high: Array) -> int:
        """The growth at which a range has bins, with room to spare."""
        edges = place["edges"]
        width = (edges[:, -1] - edges[:, 0]) / (self.bins * self.growth)
        below, above = edges[:, 0] - low, high - edges[:, -1]
        over = np.maximum(np.where(self.absolute, 0, below), above) / width
        return self.growth + 2 * math.ceil(2 * max(0, over[low <= high].max(initial=0)) / self.bins)

    def grown(self, place: Place, state: State, growth: int) -> tuple[HistogramObserver, Place, State]:
        """The same counts with room for more bins on each side."""
        more = dataclasses.replace(self, growth=growth)
        margin = self.bins * (self.growth // 2)
        inner = place["edges"][:, margin : margin + self.bins + 1]
        added = self.bins * (more.growth // 2) - margin
        counts = np.pad(state["counts"], ((0, 0), (added, added)))
        return more, more.place(inner[:, 0], inner[:, -1]), {**state, "counts": counts}


def wide(state: State) -> State:
    """A state as the host adds it up: in 64 bits."""
    return {
        k: np.asarray(v, np.int64 if jnp.issubdtype(v.dtype, jnp.integer) else np.float64) for k, v in state.items()
    }


def _float() -> np.dtype:
    """JAX's own type of floats: of 64 bits in its 64-bit mode. By numpy, states of many shapes compile nothing."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def _on_host(*states: State) -> bool:
    return all(isinstance(leaf, np.ndarray) for state in states for leaf in state.values())
