"""What calibration learns of a tensor: statistics that merge.

An observer is a frozen value; its state is a dict of small arrays. `observe` reads one tensor of one feed,
`merge` joins two states, in the order of the data, and `init` is what merges as nothing. So

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

from jq.formats import Integer
from jq.numerics import exponent_of, inverse_power

Array = Any
State = dict[str, Array]
Place = Mapping[str, Array]

_ROW = 4096  # elements that the error table takes at a time
CANDIDATES = 5  # exponents that Quark compares, from one above the nearest on


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
        """What one tensor shows, given the rows of the place that are its own."""
        raise NotImplementedError

    def merge(self, a: State, b: State) -> State:
        """The state of a's data followed by b's."""
        raise NotImplementedError

    def update(self, state: State, x: Array, place: Place = {}) -> State:  # noqa: B006  never written
        """The state after one more tensor."""
        return self.merge(state, self.observe(x, place))

    @property
    def extent(self) -> Range | None:
        """What decides where the candidates or bins lie; None where nothing does."""
        return None

    def place(self, low: Array, high: Array) -> dict[str, np.ndarray]:
        """Where they lie, for values of which the first were in [low, high]."""
        return {}

    def covers(self, place: Place, low: Array, high: Array) -> np.ndarray:
        """Which rows have a place that serves values in [low, high]."""
        return np.ones(np.shape(low), bool)

    def rows(self, shape: tuple[int, ...]) -> int:
        """How many rows a tensor of this shape has."""
        return 1 if self.axis is None or not shape else shape[self.axis % len(shape)]

    def _by_row(self, x: Array) -> Array:
        """The tensor as [rows, *rest]."""
        return x[None] if self.axis is None or not x.ndim else jnp.moveaxis(x, self.axis, 0)


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
        return {"low": jnp.full(rows, jnp.inf), "high": jnp.full(rows, -jnp.inf)}

    def observe(self, x: Array, place: Place) -> State:
        x = self._by_row(jnp.abs(x) if self.absolute else x)
        rest = tuple(range(1, x.ndim))
        return {"low": x.min(rest, initial=jnp.inf), "high": x.max(rest, initial=-jnp.inf)}

    def merge(self, a: State, b: State) -> State:
        minimum, maximum = (np.minimum, np.maximum) if _on_host(a) else (jnp.minimum, jnp.maximum)
        return {"low": minimum(a["low"], b["low"]), "high": maximum(a["high"], b["high"])}


@dataclasses.dataclass(frozen=True)
class MovingRange(Observer):
    """Exponential moving average of each feed's minimum and maximum.

    After m_0, m_1, ... it is m_0, then v + weight (m - v). As a sum, value + decay * first with value =
    sum of weight (1 - weight)^(n - i) m_i and decay = (1 - weight)^n, which merges.
    """

    weight: float = 0.01

    def init(self, rows: int, place: Place) -> State:
        zero = jnp.zeros(rows)
        return {"decay": jnp.ones(rows)} | dict.fromkeys(("low", "high", "first_low", "first_high"), zero)

    def observe(self, x: Array, place: Place) -> State:
        seen = Range(self.axis).observe(x, place)
        decay = jnp.full(seen["low"].shape, 1 - self.weight)
        first = {f"first_{k}": v for k, v in seen.items()}
        return {"decay": decay} | first | {k: self.weight * v for k, v in seen.items()}

    def merge(self, a: State, b: State) -> State:
        where = np.where if _on_host(a) else jnp.where
        merged = {k: a[k] * b["decay"] + b[k] for k in ("low", "high")}
        merged |= {k: where(a["decay"] < 1, a[k], b[k]) for k in ("first_low", "first_high")}
        return merged | {"decay": a["decay"] * b["decay"]}

    def finish(self, state: State) -> State:
        """The averages as a range."""
        return {k: state[k] + state["decay"] * state[f"first_{k}"] for k in ("low", "high")}


@dataclasses.dataclass(frozen=True)
class Moments(Observer):
    """Count, sum and sum of squares: mean, second moment and the power of the signal."""

    def init(self, rows: int, place: Place) -> State:
        return {"count": jnp.zeros(rows, jnp.int32), "total": jnp.zeros(rows), "square": jnp.zeros(rows)}

    def observe(self, x: Array, place: Place) -> State:
        x = self._by_row(x)
        rest = tuple(range(1, x.ndim))
        count = jnp.full(x.shape[0], math.prod(x.shape[1:]), jnp.int32)
        return {"count": count, "total": x.sum(rest), "square": (x * x).sum(rest)}

    def merge(self, a: State, b: State) -> State:
        return {k: a[k] + b[k] for k in a}


def base_exponent(low: Array, high: Array, grid: Integer) -> np.ndarray:
    """Return the exponent nearest to the symmetric scale of a range: the middle of what MinMSE compares.

    >>> int(base_exponent(-1.0, 3.0, INT8.narrow))  # 6 / 254 lies nearest to 2**-5
    -5
    """
    reach = np.maximum(np.maximum(-np.asarray(low, np.float64), np.asarray(high, np.float64)), 0)
    scale = (2 * reach / (grid.qmax - grid.qmin)).astype(np.float32)
    return exponent_of(np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale))


@dataclasses.dataclass(frozen=True)
class ErrorTable(Observer):
    """Squared quantization error at each of several candidate exponents, in units of the squared scale.

    Row r, column k is for the exponent place["coarsest"][r] - k. `total` is the whole error, `clipped` the
    part of it that saturation causes; what rounding causes is the difference. The table is of use while the
    values keep to half of what the coarsest candidate holds, which is how `search` reads it.
    """

    grid: Integer = dataclasses.field(kw_only=True)
    candidates: int = dataclasses.field(kw_only=True)

    @property
    def extent(self) -> Range:
        return Range()

    def place(self, low: Array, high: Array) -> dict[str, np.ndarray]:
        """Candidates for values that begin in a range, with room to grow above what MinMSE compares for it."""
        room = self.candidates - CANDIDATES
        return {"coarsest": base_exponent(low, high, self.grid) + 1 + room}

    def covers(self, place: Place, low: Array, high: Array) -> np.ndarray:
        """Which rows hold all that MinMSE compares for a range."""
        coarsest = base_exponent(low, high, self.grid) + 1
        return (coarsest <= place["coarsest"]) & (coarsest - CANDIDATES >= place["coarsest"] - self.candidates)

    def init(self, rows: int, place: Place) -> State:
        zeros = jnp.zeros((rows, self.candidates))
        return {"total": zeros, "clipped": zeros}

    def observe(self, x: Array, place: Place) -> State:
        """Accumulate elementwise over pieces of the tensor, and reduce last.

        A reduction of each candidate's errors costs ten times as much: XLA does not vectorize a clip inside
        one. The slice is of the flat tensor because XLA divides indices to slice a reshaped one, and the
        reshape stands inside the loop because it would be fused with what computes the tensor.
        """
        inverse = inverse_power(place["coarsest"][0] - jnp.arange(self.candidates))[:, None]
        low, high = (float(q - self.grid.middle) for q in (self.grid.qmin, self.grid.qmax))
        size = x.size
        row = next((d for d in range(min(size, 2 * _ROW), _ROW // 4, -1) if size % d == 0), min(size, _ROW))

        def errors(piece: Array) -> tuple[Array, Array]:
            scaled = piece * inverse
            total = scaled - lax.round(jnp.clip(scaled, low, high), lax.RoundingMethod.TO_NEAREST_EVEN)
            clipped = scaled[1:] - jnp.clip(scaled[1:], low, high)  # nothing reaches the coarsest one's bounds
            return total * total, clipped * clipped

        def step(sums: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
            piece = lax.dynamic_slice(x.reshape(-1), (index * row,), (row,))
            return jax.tree.map(jnp.add, sums, errors(piece)), None

        zeros = (jnp.zeros((self.candidates, row)), jnp.zeros((self.candidates - 1, row)))
        sums, _ = lax.scan(step, zeros, jnp.arange(size // row))
        total, clipped = (s.sum(1) for s in sums)
        if size % row:
            rest = errors(x.reshape(-1)[size // row * row :])
            total, clipped = total + rest[0].sum(1), clipped + rest[1].sum(1)
        return {"total": total[None], "clipped": jnp.concatenate([jnp.zeros(1), clipped])[None]}

    def merge(self, a: State, b: State) -> State:
        return {k: a[k] + b[k] for k in a}


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
        low, high = (np.array(v, dtype, ndmin=1) for v in (low, high))
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
        rounded = edges.astype(np.float32)
        rounded = np.where(rounded < edges, np.nextafter(rounded, np.float32(np.inf)), rounded)
        return {"edges": edges, "thresholds": rounded, "per_bin": (1 / width[:, 0]).astype(np.float32)}

    def covers(self, place: Place, low: Array, high: Array) -> np.ndarray:
        """Which rows have bins for all values of a range; magnitudes below the first edge do not count."""
        edges = place["edges"]
        return ((edges[:, 0] <= low) | self.absolute) & (high <= edges[:, -1])

    def init(self, rows: int, place: Place) -> State:
        return self.extent.init(rows, place) | {"counts": jnp.zeros((rows, self.bins * self.growth), jnp.int32)}

    def observe(self, x: Array, place: Place) -> State:
        rows = self._by_row(jnp.abs(x) if self.absolute else x)
        return self.extent.observe(x, place) | {
            "counts": jax.vmap(self._counts)(rows.reshape(rows.shape[0], -1), place["thresholds"], place["per_bin"])
        }

    def _counts(self, x: Array, thresholds: Array, per_bin: Array) -> Array:
        last = thresholds.size - 2
        guess = jnp.clip(((x - thresholds[0]) * per_bin).astype(jnp.int32), 0, last)
        # The division is off by one bin at most; the thresholds decide.
        index = guess - (x < thresholds[guess]) + ((x >= thresholds[guess + 1]) & (guess < last))
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
        counts[end - 1 : end] += counts[end : end + 1]  # values on the last edge
        return Histogram(counts[start:end], edges[start : end + 1])

    def grown(self, place: Place, state: State) -> tuple[HistogramObserver, Place, State]:
        """The same counts with room for twice as many bins on each side."""
        more = dataclasses.replace(self, growth=2 * self.growth + 1)
        margin = self.bins * (self.growth // 2)
        inner = place["edges"][:, margin : margin + self.bins + 1]
        added = self.bins * (more.growth // 2) - margin
        counts = np.pad(state["counts"], ((0, 0), (added, added)))
        return more, more.place(inner[:, 0], inner[:, -1]), {**state, "counts": counts}


def _on_host(state: State) -> bool:
    return all(isinstance(leaf, np.ndarray) for leaf in state.values())
