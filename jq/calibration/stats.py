"""Statistics of every tensor: small arrays, saved without pickle, merged across runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jq.arithmetic.exponents import minmse_candidates
from jq.arithmetic.formats import Integer
from jq.calibration.observers import (
    TIE_EXPONENTS,
    ErrorsBehind,
    ErrorTable,
    Histogram,
    HistogramObserver,
    MovingRange,
    Observer,
    Place,
    State,
    Ties,
    wide,
)
from jq.config import QuantConfig
from jq.errors import DataError, Error, suggest
from jq.util import files

_VERSION = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Stats:
    """Statistics by observer, with the rows of all tensors stacked.

    `tensors` gives each tensor's number of rows per observer: one, or one per channel. Memory does not depend
    on how much data there were.
    """

    config: QuantConfig
    tensors: Mapping[str, Mapping[str, int]]
    observers: Mapping[str, Observer]
    places: Mapping[str, Place]
    states: Mapping[str, State]
    samples: int  # how many were seen

    def __repr__(self) -> str:
        seen = f"{len(self.tensors)} tensors, {self.samples} samples"
        return f"Stats({seen}, method={self.config.method!r}, observers={list(self.observers)})"

    @functools.cached_property
    def _offsets(self) -> dict[str, dict[str, slice]]:
        offsets: dict[str, dict[str, slice]] = {}
        for observer in self.observers:
            start = 0
            for tensor, rows in self.tensors.items():
                offsets.setdefault(tensor, {})[observer] = slice(start, start + rows[observer])
                start += rows[observer]
        return offsets

    def rows(self, tensor: str, observer: str) -> State:
        """A tensor's rows of an observer's state."""
        if tensor not in self.tensors:
            raise DataError(f"no statistics for tensor {tensor!r}.{suggest(tensor, self.tensors)}")
        where = self._offsets[tensor][observer]
        return {k: v[where] for k, v in self.states[observer].items()}

    def range(self, tensor: str) -> tuple[float, float]:
        """The least and the largest value that a tensor had; of a moving average, the averages.

        >>> import jq
        >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
        >>> stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:8])
        >>> [round(v, 3) for v in stats.range("input")]
        [-0.81, 2.023]
        """
        moving = self.observers.get("moving_range")
        if isinstance(moving, MovingRange):
            state = moving.finish(self.rows(tensor, "moving_range"))
        else:
            state = self.rows(tensor, "errors" if "errors" in self.observers else "range")
        low, high = float(state["low"].min()), float(state["high"].max())
        return (low, high) if low <= high else (0.0, 0.0)  # of no elements

    def histogram(self, tensor: str) -> Histogram:
        """The counts of a tensor's values, or of their magnitudes."""
        observer = self.observers.get("histogram")
        if not isinstance(observer, HistogramObserver):
            raise DataError(f"statistics of method {self.config.method!r} hold no histograms")
        state, where = self.rows(tensor, "histogram"), self._offsets[tensor]["histogram"]
        place = {k: v[where][0] for k, v in self.places["histogram"].items()}
        return observer.finish({k: v[0] for k, v in state.items()}, place)

    def errors(self, tensor: str) -> dict[str, np.ndarray]:
        """Summed squared error of quantizing a tensor at each candidate exponent, coarsest first.

        `clipped` is the part that saturation causes, as far as it was kept: see `QuantConfig.error_parts`;
        `power` is what the values' own squares sum up to.

        >>> import jq
        >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
        >>> stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:8])
        >>> table = stats.errors("input")
        >>> list(table), int(table["exponent"][table["total"].argmin()])
        (['exponent', 'total', 'clipped', 'power'], -6)
        """
        observer = self.observers.get("errors")
        if not isinstance(observer, ErrorTable):
            raise DataError(f"statistics of method {self.config.method!r} hold no table of errors")
        state, where = self.rows(tensor, "errors"), self._offsets[tensor]["errors"]
        table = observer.finish(state, {k: v[where] for k, v in self.places["errors"].items()})
        exponent, power = table["exponent"][0], np.ldexp(table["power"][0], 2 * table["exponent"][0, 0])
        total, clipped = (np.ldexp(v, 2 * exponent[: v.size]) for v in (table["total"][0], table["clipped"][0]))
        return {"exponent": exponent, "total": total, "clipped": clipped, "power": power}

    def errors_behind(self, tensor: str) -> np.ndarray | None:
        """Summed squared error behind the function that alone reads a tensor, at each of `REACHES`; None without one."""
        for name, observer in self.observers.items():
            if isinstance(observer, ErrorsBehind) and self.tensors.get(tensor, {}).get(name):
                return observer.finish(self.rows(tensor, name))
        return None

    def mean_square(self, tensor: str) -> float | None:
        """The power of a tensor per element; None without elements, or where the method keeps no power.

        >>> import jq
        >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
        >>> images = jq.zoo.calibration_set()[0][:8]
        >>> bool(np.isclose(jq.calibrate(graph, images).mean_square("input"), np.square(images).mean()))
        True
        """
        if "errors" in self.observers:
            power, count = self.errors(tensor)["power"], self.rows(tensor, "errors")["count"].sum()
        elif "moments" in self.observers:
            power, count = (self.rows(tensor, "moments")[k].sum() for k in ("square", "count"))
        else:
            return None
        return float(power) / int(count) if count else None

    def ties(self, tensor: str, step: float, last: int | None) -> float | None:
        """The share of samples that a step makes ties of their two largest values; None if it was not measured.

        Samples whose two largest are equal in float do not count. `last` is the largest code above zero, None where zero
        may be any code.

        >>> import jq
        >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
        >>> stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:64])
        >>> [round(stats.ties("logits", step, 127), 2) for step in (0.25, 4)]
        [0.0, 0.11]
        """
        observer = self.observers.get("ties")
        if not isinstance(observer, Ties) or observer.last != last or not self.tensors[tensor]["ties"]:
            return None
        seen, equal, counts = (self.rows(tensor, "ties")[part][0] for part in ("seen", "equal", "ties"))
        return float(np.interp(math.log2(step), TIE_EXPONENTS, counts) - equal) / max(1, int(seen))

    def best_exponent(self, tensor: str) -> int | None:
        """The exponent of least squared error among Quark's five candidates; ties go to the coarser; None if unknown.

        The coarsest may be missing from the table of a tensor that outgrew it; it is known all the same not to be best, if
        what rounding alone costs at the coarsest that is there exceeds the least: grids of powers of two
        are nested, and where nothing is clipped, no coarser one is nearer to any value.
        """
        table, observer = self.errors(tensor), self.observers["errors"]
        assert isinstance(observer, ErrorTable)
        wanted = minmse_candidates(*self.range(tensor), observer.grid)
        there = np.isin(table["exponent"], wanted)
        if not there.any() or wanted[-1] < table["exponent"][-1]:
            return None
        best = int(np.where(there, table["total"], np.inf).argmin())
        missing = wanted[0] > table["exponent"][0]
        if missing and not table["total"][best] < table["total"][0] - table["clipped"][0]:
            return None
        return int(table["exponent"][best])

    def merge(self, other: Stats) -> Stats:
        """The statistics of both runs' data, of this one's first.

        Candidates and bins must lie in the same places: calibrate the second run with `like=` the first.
        """
        mine, theirs = ((s.config, s.tensors, s.observers.keys()) for s in (self, other))
        if mine != theirs:
            raise DataError("statistics of different models or configs cannot be merged")
        for name in self.observers:
            self, other = self._grown_like(other, name), other._grown_like(self, name)
        if self.observers != other.observers or any(
            not np.array_equal(v, other.places[o][k]) for o, place in self.places.items() for k, v in place.items()
        ):
            raise DataError(
                "these statistics have different candidates or bins, so they cannot be merged; "
                "calibrate the second run with the first as like="
            )
        states = {name: o.merge(self.states[name], other.states[name]) for name, o in self.observers.items()}
        return dataclasses.replace(self, states=states, samples=self.samples + other.samples)

    def _grown_like(self, other: Stats, name: str) -> Stats:
        """With as many bins in a histogram as the other has, if that has more."""
        mine, theirs = self.observers[name], other.observers[name]
        if not isinstance(mine, HistogramObserver) or not isinstance(theirs, HistogramObserver):
            return self
        return self if mine.growth >= theirs.growth else self.grown(name, theirs.growth)

    def grown(self, name: str, growth: int) -> Stats:
        """With room for more bins on both sides of a histogram."""
        observer = self.observers[name]
        assert isinstance(observer, HistogramObserver)
        more, place, state = observer.grown(self.places[name], self.states[name], growth)
        return dataclasses.replace(
            self,
            observers={**self.observers, name: more},
            places={**self.places, name: place},
            states={**self.states, name: state},
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        write(path, self, {})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Stats:
        """Read what `save` wrote; anything else is a DataError."""
        return read(path)[0]


def write(path: str | os.PathLike[str], stats: Stats, extra: Mapping[str, Any]) -> None:
    """Write statistics and JSON beside them."""
    kinds = {"state": stats.states, "place": stats.places}
    leaves = ((f"{kind}/{o}/{k}", v) for kind, own in kinds.items() for o, part in own.items() for k, v in part.items())
    arrays = {key: np.ascontiguousarray(value) for key, value in leaves}
    header = {
        "version": _VERSION,
        "config": stats.config.to_dict(),
        "tensors": stats.tensors,
        "observers": {name: {"kind": type(o).__name__, **dataclasses.asdict(o)} for name, o in stats.observers.items()},
        "feeds": stats.samples,
        "extra": extra,
    }
    # One key of metadata: their order in the file is not defined.
    files.write(path, safetensors.numpy.save(arrays, {"jq": json.dumps(header)}))


def read(path: str | os.PathLike[str]) -> tuple[Stats, Mapping[str, Any]]:
    """Read what `write` wrote: the statistics and the JSON beside them."""
    try:
        with files.reading(path), safetensors.safe_open(path, "numpy") as file:
            header = files.parsed((file.metadata() or {})["jq"])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no dict
        if header["version"] != _VERSION:
            raise DataError(
                f"{path} has version {header['version']}; this jq reads version {_VERSION}; calibrate again"
            )
        observers = {name: _observer(fields) for name, fields in header["observers"].items()}
        parts: dict[str, dict[str, dict[str, np.ndarray]]] = {k: {o: {} for o in observers} for k in ("state", "place")}
        for key, array in arrays.items():
            kind, observer, leaf = key.split("/")
            parts[kind][observer][leaf] = array
        config, tensors, samples = QuantConfig.from_dict(header["config"]), header["tensors"], int(header["feeds"])
        stats = Stats(config, tensors, observers, parts["place"], parts["state"], samples)
        _check(stats)
        extra = header["extra"]
    except Error:
        raise
    except Exception as error:  # safetensors and json raise several kinds on damaged files
        raise DataError(f"{path} is not a statistics file written by jq: {error}") from error
    return stats, extra


def _check(stats: Stats) -> None:
    """Whether states and places have the shapes and types that their observers give them."""
    for name, observer in stats.observers.items():
        rows = sum(counts[name] for counts in stats.tensors.values())
        place = {} if observer.extent is None else observer.place(np.zeros(rows), np.ones(rows))
        state = wide(observer.init(rows, place))
        for given, expected in ((stats.places[name], place), (stats.states[name], state)):
            if _types(given) != _types(expected):
                raise DataError(f"observer {name!r} with {rows} rows has {_types(given)}; expected {_types(expected)}")


def _types(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {k: f"{v.dtype}{list(v.shape)}" for k, v in sorted(arrays.items())}


def _observer(described: Mapping[str, Any]) -> Observer:
    kinds: list[type[Observer]] = [Observer]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    known = {kind.__name__: kind for kind in kinds}
    name, fields = described["kind"], {k: v for k, v in described.items() if k != "kind"}
    if name not in known:
        raise DataError(f"unknown observer {name!r}: import the module that defines it first")
    values: dict[str, Any] = {k: Integer(**v) if isinstance(v, dict) else v for k, v in fields.items()}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return known[name](**values)
