"""The observers that a config needs on a graph's tensors, and their compiled program: a monoid over samples."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.exponents import MINMSE
from jq.arithmetic.formats import Integer
from jq.calibration.observers import (
    ChannelSums,
    ErrorsBehind,
    ErrorTable,
    FormLoss,
    HistogramObserver,
    Moments,
    MovingRange,
    Observer,
    Place,
    Range,
    State,
    Ties,
)
from jq.config import QuantConfig
from jq.data.arrays import Sample
from jq.data.stream import Stream
from jq.errors import ConfigError
from jq.graph import Graph, Node
from jq.npu.rewrites.activations import sigmoids
from jq.ops.linear import has_product
from jq.ops.masks import masks
from jq.ops.saturating import TIED, saturating_reader
from jq.ops.table import lookup
from jq.readings.chain import Chain
from jq.readings.tracing import AnyOrder, trace
from jq.util.digest import digest

States = dict[str, State]

_KEPT = 4  # programs of a graph
_ROOM = 1  # octaves that values may grow beyond the first batch before the error table is made anew
_ROOM_ONCE = 11  # the same where data cannot be read again


def observed_tensors(graph: Graph, config: QuantConfig) -> list[str]:
    """The tensors whose statistics `config` needs.

    With power-of-two scales that leaves out what a Relu or Clip alone reads, as its range is the output's as it was
    observed; with float scales it is all of them, as in onnxruntime's calibrators. Masks have no range: see `masks`.
    """
    names = dict.fromkeys(v.name for v in graph.inputs)
    names |= dict.fromkeys(name for node in graph.nodes for name in node.outputs if name)
    cutting = [node for node in graph.nodes if cuts_alone(graph, node)]
    unseen = {node.inputs[0] for node in cutting} - {node.outputs[0] for node in cutting}
    unseen = unseen if config.scale != "float" else set()
    unseen |= masks(graph) if not config.strict_quark else set()
    return [n for n in names if n not in unseen]


def cuts_alone(graph: Graph, node: Node) -> bool:
    """Whether a node alone reads its input and cuts it to an interval."""
    entry = lookup(node, graph.opset(node.domain))
    return entry is not None and entry.cuts and len(graph.consumers[node.inputs[0]]) == 1


def linear_inputs(graph: Graph) -> tuple[str, ...]:
    """The inputs of linear layers with a bias, whose channels' means tell by how much rounding the weight shifts it."""
    biased = [n for n in graph.nodes if len(n.inputs) > 2 and has_product(graph, n)]
    return tuple(dict.fromkeys(n.inputs[0] for n in biased))


def formed_inputs(graph: Graph) -> tuple[str, ...]:
    """The inputs of activations whose form on the NPU is taken or not by what it loses."""
    return tuple(dict.fromkeys(node.inputs[0] for node in sigmoids(graph)))


def focused_tensors(graph: Graph, config: QuantConfig) -> dict[tuple[str, bool], tuple[str, ...]]:
    """The tensors that only a saturating function reads, by that function, where ranges are searched behind it.

    That is in 8 bits with symmetric scales: powers of two by the least squared error, or floats of the whole range. Not
    the first around HardSigmoid, where the NPU ties positions to one another, so that a finer input moves the others: a
    recognizer of HardSwishs has a KL divergence of 0.26 so, and of 0.19 without.
    """
    narrow = isinstance(config.activation, Integer) and config.activation.bits <= 8
    searched = config.method == ("minmse" if config.scale == "power_of_two" else "minmax")
    searched = searched and config.moving_average is None
    if not (narrow and searched and config.symmetric) or config.strict_quark:
        return {}
    functions: dict[tuple[str, bool], tuple[str, ...]] = {}
    for tensor in (o for n in graph.nodes for o in n.outputs if o):
        function = saturating_reader(graph, tensor)
        if function is not None and not (config.scale == "power_of_two" and function[0] in TIED):
            functions[function] = (*functions.get(function, ()), tensor)
    return functions


def observers_of(
    config: QuantConfig,
    linear: tuple[str, ...] = (),
    formed: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
    focused: Mapping[tuple[str, bool], tuple[str, ...]] | None = None,
    *,
    again: bool = True,
) -> dict[str, Observer]:
    """The observers that a method needs; `again` says whether the data can be read twice."""
    observers: dict[str, Observer] = {}
    for (function, gates), names in (focused or {}).items():
        behind = ErrorsBehind(function=function, gates=gates, grid=config.activation_grid, only=names)
        observers[f"behind_{function}{'_gate' * gates}"] = behind
    if config.corrects_bias and linear:
        observers["means"] = ChannelSums(only=linear)
    if "sigmoid_to_hard_sigmoid" in config.forms and formed and not config.strict_quark:
        observers["forms"] = FormLoss(only=formed)
    if outputs:
        observers["ties"] = Ties(last=last_code(config), only=outputs)
    if config.moving_average is not None:
        observers["moving_range"] = MovingRange(weight=config.moving_average)
    if config.method == "minmse":
        room = _ROOM if again else _ROOM_ONCE
        count = len(MINMSE) + room
        parts = count if config.error_parts else 1
        observers["errors"] = ErrorTable(grid=config.measured_grid, candidates=count, parts=parts)
        return observers
    observers |= {"range": Range(), "moments": Moments()}
    if config.method not in ("nonoverflow", "minmax"):
        quark = config.method == "minmse_hist"
        absolute = config.symmetric and config.method in ("percentile", "layerwise_percentile")
        observers["histogram"] = HistogramObserver(
            bins=config.bins,
            absolute=absolute,
            centred=not absolute and not quark,
            growth=3 if quark or config.histogram_range == "first" else 1,
            double=quark,
        )
    return observers


def last_code(config: QuantConfig) -> int | None:
    """The largest code above zero; None where zero may be any code, or activations have none."""
    if not isinstance(config.activation, Integer) or not config.symmetric:
        return None
    return config.activation_grid.qmax - config.activation_grid.middle


@dataclasses.dataclass(frozen=True, eq=False)
class Observed:
    """Observers on the tensors of a graph; the tensors' rows lie under each other in an observer's state."""

    graph: Graph
    observers: Mapping[str, Observer]
    rows: Mapping[str, Mapping[str, int]]  # of each tensor by observer

    @classmethod
    def of(cls, graph: Graph, tensors: list[str], observers: Mapping[str, Observer], stream: Stream) -> Observed:
        """The observers on those of the tensors that turn out to be floats."""
        shapes = _float_shapes(graph, tensors, stream)
        largest = max(map(math.prod, shapes.values()), default=0)
        if largest * stream.size >= 1 << 31:
            raise ConfigError(f"batch={stream.size} with tensors of {largest} elements exceeds 32-bit counts; use less")
        rows = {
            tensor: {name: o.rows(shape) if o.observes(tensor) else 0 for name, o in observers.items()}
            for tensor, shape in shapes.items()
        }
        return cls(graph, observers, rows)

    def count(self, observer: str) -> int:
        """Rows of an observer's state."""
        return sum(rows[observer] for rows in self.rows.values())

    def owner(self, observer: str, row: int) -> str:
        """The tensor that a row of an observer's state belongs to."""
        ends = list(itertools.accumulate(rows[observer] for rows in self.rows.values()))
        return list(self.rows)[bisect.bisect_right(ends, row)]

    def program(self, stream: Stream) -> Chain:
        """The compiled program; the next calibration of the same graph finds it again."""
        key = tuple(self.observers.items()), self._rows_of_tensors, digest(stream.known), stream.mesh
        programs = self.graph.programs
        if key not in programs:
            watcher = _ObserverWatcher(self.observers, self._rows_of_tensors)
            programs[key] = Chain.of(self.graph, watcher, stream)
            for oldest in list(programs)[:-_KEPT]:
                del programs[oldest]
        return programs[key]

    @property
    def _rows_of_tensors(self) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
        return tuple((name, tuple(rows.items())) for name, rows in self.rows.items())

    def joined(self, states: Sequence[States]) -> States:
        """The states of a chain's pieces as one: their tensors' rows lie under each other."""
        joined = {}
        for name, observer in self.observers.items():
            parts = [state[name] for state in states if name in state] or [observer.init(0, {})]
            joined[name] = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        return joined

    def by_tensor(self, places: Mapping[str, Place]) -> dict[str, dict[str, Place]]:
        """The rows of each tensor's places: on the host, as each slice of a program's is a kernel to compile."""
        parts: dict[str, dict[str, Place]] = {tensor: {} for tensor in self.rows}
        for name, place in places.items():
            ends = itertools.accumulate(rows[name] for rows in self.rows.values())
            for (tensor, rows), end in zip(self.rows.items(), ends, strict=True):
                parts[tensor][name] = {k: v[end - rows[name] : end] for k, v in place.items()}
        return parts


@dataclasses.dataclass(frozen=True)
class _ObserverWatcher:
    """Observers on tensors; the tensors' rows lie under each other."""

    observers: Mapping[str, Observer]
    rows: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]  # of each tensor by observer

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors, in the order of the network."""
        return tuple(name for name, _ in self.rows)

    @property
    def lasting(self) -> bool:
        """Whether all observers are this package's."""
        return all(type(o).__module__.startswith("jq.") for o in self.observers.values())

    def within(self, names: Mapping[str, str]) -> _ObserverWatcher:
        """The same of some tensors alone, by other names, with the observers that they have."""
        rows = tuple((names[name], self._counts[name]) for name in names if name in self._counts)
        seen = {observer for _, counts in rows for observer, count in counts if count}
        return _ObserverWatcher({name: o.unnamed for name, o in self.observers.items() if name in seen}, rows)

    def tap(self, tensor: str, argument: Mapping[str, Place]) -> AnyOrder | Callable[[Any], Any]:
        """The function from a tensor to its observers' states."""
        counts = dict(self._counts[tensor])
        here = {name: o for name, o in self.observers.items() if counts[name]}

        def observe(value: Any) -> States:
            x, axis = jnp.asarray(layout.raw(value)).astype(jnp.float32), layout.axis_of(value, 1)
            turned = {n: dataclasses.replace(o, axis=axis) if o.axis == 1 else o for n, o in here.items()}
            return {name: o.observe(x, argument[name]) for name, o in turned.items()}

        return AnyOrder(observe) if all(o.axis in (None, 1) for o in here.values()) else observe

    def state(self, seen: Mapping[str, States]) -> States:
        """The states of one sample."""
        own = {name: [states[name] for states in seen.values() if name in states] for name in self.observers}
        return {name: jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts) for name, parts in own.items()}

    def none(self) -> States:
        """The states of no data."""
        counts = {name: sum(dict(counts)[name] for _, counts in self.rows) for name in self.observers}
        return {name: o.init(counts[name], {}) for name, o in self.observers.items()}

    @functools.cached_property
    def _counts(self) -> dict[str, tuple[tuple[str, int], ...]]:
        return dict(self.rows)

    def merged(self, a: States, b: States) -> States:
        """The states of a's data followed by b's."""
        return {name: o.merge(a[name], b[name]) for name, o in self.observers.items()}


def _float_shapes(graph: Graph, tensors: list[str], stream: Stream) -> dict[str, tuple[int, ...]]:
    """The shapes in one sample of those tensors that are floats."""
    fn = trace(graph, taps=tensors)

    def floats(params: Any, sample: Sample) -> dict[str, Any]:
        arrays = {k: v for k, v in fn(params, sample)[1].items() if isinstance(v, (jax.Array, np.ndarray, np.generic))}
        return {k: v for k, v in arrays.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    seen = stream.shapes(floats, dict(graph.params))
    return {k: seen[k].shape for k in tensors if k in seen}
