"""Two models in one streaming pass: which tensors both have, what a batch shows of them, and the sums of all batches.

One program computes both networks on a sample and gives all tensors of both. Small programs take each of them to a few
sums, which the host adds up in 64 bits. Compiling is what takes the time, and tensors of one kind and shape share one of
these: a program of all sums would have thousands of kernels, of 20 ms each. Tensors live as long as their sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jq.arithmetic import layout
from jq.arithmetic.exponents import NEIGHBOURS, error_sums
from jq.arithmetic.formats import Integer
from jq.config import presets
from jq.data.arrays import Sample
from jq.data.sources import Source
from jq.data.stream import Batch, Program, Stream, devices_of, replicated
from jq.errors import ModelError
from jq.evidence.gains import ChannelProducts, fitted_gains, is_equalized
from jq.evidence.report import ends_of
from jq.evidence.verdict import ScoreKind, distances, kind_of_scores
from jq.exchange.quantized import split_quantizers
from jq.graph import Graph, Value
from jq.graph.quantizers import is_quantized
from jq.graph.read import ModelLike, load
from jq.npu.constraints import violations
from jq.passes import simplify
from jq.plan import Plan, QParams
from jq.readings.data_shapes import traceable
from jq.readings.fake import fake_quant
from jq.readings.integer.recognition import rounded_grid
from jq.readings.packing import pack
from jq.readings.tracing import AnyOrder, Traced
from jq.recovery.equalization.groups import find_groups

Array = Any
Sums = dict[str, np.ndarray]

# A program of both networks runs on few samples: LLVM would take longer over it than it saves.
QUICKLY_COMPILED = {"xla_backend_optimization_level": 1}
_FIRST = 16  # samples that gains and bins are chosen from
_BINS = 64
_COUNTED = 1 << 18  # values of a tensor and a sample that a histogram counts at most
_MARGIN = 1 / 8  # of the first samples' range, on both sides of the histogram
_BEYOND = 1.25  # of the codes' range, which it shows of an equalized tensor
# Endings that tools append to the name of a tensor.
_ENDINGS = ("_DequantizeLinear_Output", "_QuantizeLinear_Output", "_QuantizeLinear_Input", "_quantized", "_Mul")
_TINY, _LARGEST = 1e-30, 1e38  # of which differences are numbers of float32


# --- Which tensors ---


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """Both models without their quantizers, and the plans of these."""

    original: Graph
    original_plan: Plan  # empty, if the model is a float one
    quantized: Graph
    plan: Plan

    @classmethod
    def of(cls, model: ModelLike, quantized: ModelLike) -> Pair:
        """The pair of two models, which must have the same inputs."""
        graphs = [m if isinstance(m, Graph) else load(m) for m in (model, quantized)]
        made = [any(map(is_quantized, graph.walk())) for graph in graphs]
        if made == [True, False]:
            raise ModelError("the first model is quantized and the second is not; give the float model first")
        one, other = map(_floats_and_plan, graphs)
        ours, theirs = ({v.name: v for v in g.inputs} for g in (one[0], other[0]))
        if ours.keys() != theirs.keys() or not all(_alike(ours[k], theirs[k]) for k in ours):
            raise ModelError(
                f"the models have different inputs: {', '.join(map(str, one[0].inputs))}; in the quantized one, "
                f"{', '.join(map(str, other[0].inputs))}. Compare a model with one made from it"
            )
        return cls(*one, *other)

    @property
    def graphs(self) -> tuple[tuple[Graph, Plan], tuple[Graph, Plan]]:
        """Each model with its plan."""
        return (self.original, self.original_plan), (self.quantized, self.plan)

    @functools.cached_property
    def weights(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The quantized weights that the float model has too, as both have them."""
        # The float weights are those that quantizers see.
        ours, theirs = simplify(self.original).params, self.quantized.params
        return {
            k: (ours[k], q.given_back(theirs[k]))
            for k, q in self.plan.weights.items()
            if k in ours and ours[k].shape == theirs[k].shape and ours[k].size and k in self.quantized.consumers
        }

    @functools.cached_property
    def equalized(self) -> bool:
        """Whether some weight is another one, apart from factors of its rows and columns."""
        return is_equalized(self.weights.values())

    def gains(self, sums: Mapping[str, ChannelProducts]) -> dict[str, np.ndarray]:
        """By what the quantized model scales the channels of each tensor, by its float name."""
        if not self.equalized:
            return {name: np.ones(len(own.xx)) for name, own in sums.items()}
        public = (v.name for v in (*self.original.inputs, *self.original.outputs))
        return fitted_gains(sums, find_groups(simplify(self.original)), public)

    @functools.cached_property
    def violations(self) -> int:
        """How many of the NPU's constraints the plan breaks."""
        return len(violations(self.quantized, self.plan, presets["XINT8"]))

    def allows(self, tensor: str, qparams: QParams) -> bool:
        """Whether the NPU could have the tensor quantized so, all others being as they are."""
        plan = self.plan.replace({tensor: qparams})
        return len(violations(self.quantized, plan, presets["XINT8"])) <= self.violations


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of both models."""

    name: str  # in the float model
    twin: str  # in the quantized one
    channels: int  # along the second axis; 1 where that may have any length
    depth: int  # its place in the order of the quantized model
    qparams: QParams | None  # how the quantized model rounds it
    coded: bool  # whether the quantized model has the codes
    scores: ScoreKind = ""  # of an output [samples, classes]

    @property
    def changes(self) -> tuple[int, ...]:
        """By how much its exponent is changed, to see whether another is better."""
        return tried(self.qparams) if self.qparams is not None and self.qparams.axis is None else ()

    @property
    def kind(self) -> SumsKind:
        """All that the program of its sums depends on."""
        return SumsKind(self.channels, self.coded, self.changes, self.scores)


def _floats_and_plan(model: Graph) -> tuple[Graph, Plan]:
    graph, plan = split_quantizers(model)
    return traceable(graph), plan


def tried(qparams: QParams | None) -> tuple[int, ...]:
    """By how much an exponent is changed, to see whether another is better; nothing where there is none."""
    short = qparams is not None and isinstance(qparams.grid, Integer) and qparams.grid.bits <= 16
    return NEIGHBOURS if qparams is not None and short and not qparams.dynamic and qparams.is_power_of_two else ()


def _shared_tensors(pair: Pair, shapes: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The float tensors that the quantized model has too, by its names for them, in its order."""
    ours, theirs = shapes
    twins: dict[str, tuple[int, str]] = {}
    for depth, name in enumerate(theirs):
        stem = stem_of(name, ours)
        if stem is not None and ours[stem].shape == theirs[name].shape:
            twins[stem] = depth, name  # of several forms the last, which is the one that is read
    tensors = []
    for name, (depth, twin) in twins.items():
        qparams, coded = pair.plan.activations.get(twin), False
        if not jnp.issubdtype(theirs[twin].dtype, jnp.floating):
            qparams, coded = _grid(pair.quantized, twin), True
            if qparams is None:
                continue
        shape, declared = tuple(ours[name].shape), pair.original.values.get(name)
        fixed = declared is not None and declared.shape is not None and len(shape) == len(declared.shape) > 1
        channels = shape[1] if fixed and isinstance(declared.shape[1], int) else 1  # type: ignore[union-attr,index]
        tensors.append(Tensor(name, twin, channels, depth, qparams, coded, kind_of_scores(pair.original, name, shape)))
    return tensors


def stem_of(name: str, known: Mapping[str, Any]) -> str | None:
    """The float model's name of a tensor."""
    while name not in known:
        ending = next((e for e in _ENDINGS if name.endswith(e)), None)
        if ending is None:
            return None
        name = name.removesuffix(ending)
    return name


def _grid(graph: Graph, name: str) -> QParams | None:
    """The scale and zero point of the codes of an integer operator."""
    grid = rounded_grid(graph, graph.producer[name]) if name in graph.producer else None
    return None if grid is None else QParams(np.float32(grid.scale), np.int32(grid.zero_point), grid.grid)


def activations(graph: Graph) -> list[str]:
    """The tensors that are computed, and the inputs."""
    return [*(v.name for v in graph.inputs), *(o for n in graph.nodes for o in n.outputs if o)]


def _alike(one: Value, other: Value) -> bool:
    """Whether the same data may fit two inputs: dims that are free in one may be fixed in the other."""
    if one.dtype != other.dtype:
        return False
    if one.shape is None or other.shape is None:
        return True
    pairs = zip(one.shape, other.shape, strict=False)
    return len(one.shape) == len(other.shape) and not any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs
    )


# --- One batch ---


@dataclasses.dataclass(frozen=True)
class SumsKind:
    """All that the program of a tensor's sums depends on, besides shapes and formats."""

    channels: int
    coded: bool
    changes: tuple[int, ...]
    scores: ScoreKind


@dataclasses.dataclass(frozen=True, eq=False)
class BatchSums:
    """A sample for each device to its sums, compiled."""

    pair: Pair
    tensors: tuple[Tensor, ...]
    stream: Stream

    @classmethod
    def of(cls, pair: Pair, source: Source, mesh: Mesh) -> BatchSums:
        """The step for data like the source's."""
        readers = [_tapped(g, p, activations(g)) for g, p in pair.graphs]
        stream = Stream.of(source, devices_of(mesh), *readers, mesh=mesh)
        shapes = [
            stream.shapes(functools.partial(_arrays, r, p), dict(g.params))
            for r, (g, p) in zip(readers, pair.graphs, strict=True)
        ]
        floats = {k: v for k, v in shapes[0].items() if jnp.issubdtype(v.dtype, jnp.floating) and v.size}
        # In the order of the graph, which the dict that comes back is not in.
        theirs = {k: shapes[1][k] for k in activations(pair.quantized) if k in shapes[1]}
        tensors = _shared_tensors(pair, ({k: floats[k] for k in activations(pair.original) if k in floats}, theirs))
        if not tensors:
            raise ModelError("the models share no tensor of the same name and shape: was one made from the other?")
        return cls(pair, tuple(tensors), stream)

    def total(self, batches: Iterable[Batch], places: Mapping[str, Sums], title: str | None = None) -> dict[str, Sums]:
        """The sums of each tensor over all samples of the batches."""
        details = {t.name: (t.qparams, _ends(t), places[t.name]) for t in self.tensors}
        arguments = self._params, jax.device_put(details, replicated(self.stream.mesh))
        results = self.stream.results(self._program, arguments, batches, title=title)
        parts = ({k: _summed(sums, batch.valid) for k, sums in made.items()} for batch, made in results)
        return functools.reduce(lambda a, b: {k: _merged(v, b[k]) for k, v in a.items()}, parts)

    @functools.cached_property
    def _params(self) -> tuple[dict[str, Any], dict[str, Any], Plan]:
        one, other = (pack(graph, mesh=self.stream.mesh) for graph, _ in self.pair.graphs)
        # Params that both models share are one array, so XLA computes their common parts once, with equal results.
        same = {k for k, v in one.items() if k in other and _identical(v, other[k])}
        return one, {k: one[k] if k in same else v for k, v in other.items()}, self.pair.plan

    @functools.cached_property
    def _program(self) -> Program:
        names = [t.name for t in self.tensors], [t.twin for t in self.tensors]
        ours, theirs = (_tapped(*model, own) for model, own in zip(self.pair.graphs, names, strict=True))

        def one(arguments: Any, sample: Sample, _: Array) -> list[tuple[Any, Any]]:
            one, other, plan = arguments
            x = ours.quantized(one, self.pair.original_plan, sample)[1]
            y = theirs.quantized(other, plan, sample)[1]
            return [(layout.going_on(x[t.name]), layout.going_on(y[t.twin])) for t in self.tensors]

        networks, sums = self.stream.each(one, QUICKLY_COMPILED), {t.kind: self._sums_of(t.kind) for t in self.tensors}

        def program(arguments: Any, inputs: Sample, numbers: Array) -> dict[str, dict[str, Array]]:
            params, details = arguments
            seen = zip(self.tensors, networks(params, inputs, numbers), strict=True)
            return {t.name: sums[t.kind](details[t.name], both, numbers) for t, both in seen}

        return program

    def _sums_of(self, kind: SumsKind) -> Program:
        """The program of the sums of all tensors of a kind."""

        def each(details: Any, both: Any, _: Array) -> dict[str, Array]:
            return jax.lax.map(lambda values: _sums(kind, *values, *details), both)

        return self.stream.spread(each, QUICKLY_COMPILED)


def _ends(tensor: Tensor) -> np.ndarray:
    """The ends of a tensor's codes, which are infinite where it has none."""
    ends = None if tensor.qparams is None else ends_of(tensor.qparams)
    return np.array(ends or (-np.inf, np.inf), np.float32)


def _tapped(graph: Graph, plan: Plan, names: Sequence[str]) -> Traced:
    """The graph as a function that gives these tensors too, in whatever order they lie."""
    return fake_quant(graph, taps=dict.fromkeys(names, AnyOrder(lambda x: x))).traced(plan)


def _arrays(reading: Traced, plan: Plan, params: Mapping[str, Any], sample: Sample) -> dict[str, Array]:
    """The arrays among the tapped values, in ONNX's order."""
    plain = {k: layout.plain(v) for k, v in reading.quantized(params, plan, sample)[1].items()}
    return {k: jnp.asarray(v) for k, v in plain.items() if isinstance(v, (jax.Array, np.ndarray)) and v.dtype != object}


def _sums(
    kind: SumsKind, x: Any, y: Any, qparams: QParams | None, ends: Array, place: Mapping[str, Array]
) -> dict[str, Array]:
    """The sums of one sample of a tensor; see `compare` for the equations."""
    last = layout.is_last(x) and layout.is_last(y)
    x, y = ((layout.raw if last else layout.plain)(v) for v in (x, y))
    x = x.astype(jnp.float32)
    if kind.coded:
        assert qparams is not None
        y = (y.astype(jnp.float32) - qparams.zero_point) * qparams.scale
    axis = x.ndim - 1 if last else 1
    along = [-1 if i == axis else 1 for i in range(x.ndim)] if kind.channels > 1 else [1] * x.ndim
    rest = tuple(i for i in range(x.ndim) if i != axis or kind.channels == 1)
    gain = place["gain"].reshape(along)
    scaled, y = x * gain, y.astype(jnp.float32)
    lost = y / gain - x

    def own(q: QParams) -> Array:
        return q.fake_quant(scaled, axis if q.axis is not None and last else None) / gain - x

    def squared(v: Array) -> Array:
        return jnp.sum(v * v)

    made = jnp.zeros_like(x) if qparams is None else own(qparams)
    beyond = (scaled < ends[0]) | (scaled > ends[1])
    unclipped = jnp.where(((y <= ends[0]) | (y >= ends[1])) & (y != 0), 0, x)
    near = jnp.zeros(0)
    if qparams is not None and kind.changes:
        near = _near(scaled, 1 / jnp.broadcast_to(gain, x.shape), qparams, kind.changes)
    values = [squared(lost), squared(made), squared(jnp.where(beyond, made, 0)), jnp.sum(beyond, dtype=jnp.float32)]
    channels = [jnp.sum(v, rest) for v in (x * x, x * y, y * y, lost, unclipped * unclipped, unclipped * y)]
    return {
        "values": jnp.stack(values),
        "near": near,
        "channels": jnp.stack([jnp.atleast_1d(c) for c in channels]),
        "extremes": jnp.stack([jnp.min(x), jnp.max(x), jnp.max(jnp.abs(lost))]),
        "counts": _counts(scaled, place["edges"]),
        "size": jnp.float32(x.size),
        "classes": distances(kind.scores, x, y / gain),
        "best": _best(kind, x, y / gain),
    }


def _near(x: Array, factor: Array, qparams: QParams, changes: Sequence[int]) -> Array:
    """The squared error of rounding to other exponents, times factors, by how much each changes the tensor's own."""
    assert isinstance(qparams.grid, Integer)
    scales = qparams.scale * jnp.exp2(jnp.asarray(changes, jnp.float32))
    ends = (jnp.broadcast_to(end - qparams.zero_point, scales.shape) for end in (qparams.grid.qmin, qparams.grid.qmax))
    return error_sums(x, 1 / scales, *ends, slopes=factor).square * scales**2


def _best(kind: SumsKind, x: Array, y: Array) -> Array:
    """The class that each model puts the sample into, where it is scores of classes."""
    return jnp.stack([jnp.argmax(v) for v in (x, y)]) if kind.scores else jnp.zeros(0, jnp.int32)


def _counts(x: Array, edges: Array) -> Array:
    """Count the values in each of the equal bins between two edges; values beyond them count in the outermost bins.

    For a large tensor only every `stride`-th value is counted, because counting costs more than all other sums together.
    """
    low, high = edges
    index = jnp.floor((x.reshape(-1)[:: stride(x.size)] - low) * (_BINS / (high - low)))
    return jnp.zeros(_BINS, jnp.int32).at[jnp.clip(index, 0, _BINS - 1).astype(jnp.int32)].add(1)


def stride(size: int) -> int:
    """Return the step between the values of a tensor that are counted: one that shares no factor with any of its axes.

    >>> stride(1000), stride(4 * 65536 * 9)
    (1, 11)
    """
    least = -(-size // _COUNTED)
    return next(step for step in itertools.count(least) if math.gcd(step, size) == 1)


def _identical(one: Any, other: Any) -> bool:
    arrays = [layout.raw(v) for v in (one, other)]
    alike = type(one) is type(other) and arrays[0].shape == arrays[1].shape and arrays[0].dtype == arrays[1].dtype
    return alike and np.asarray(arrays[0]).tobytes() == np.asarray(arrays[1]).tobytes()


# --- All batches ---


@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """The sums of all samples of a tensor."""

    sums: Sums  # in 64 bits
    edges: tuple[float, float]
    gains: np.ndarray  # by which the quantized model has each channel scaled


def added_up(step: BatchSums) -> dict[str, Total]:
    """The sums of all samples. The first of them are read twice, as they say where bins lie and what gains are."""
    places = {
        t.name: {"gain": np.ones(t.channels, np.float32), "edges": np.array([0, 1], np.float32)} for t in step.tensors
    }
    with contextlib.closing(step.stream.batches()) as batches:
        first = list(itertools.islice(batches, math.ceil(_FIRST / step.stream.size)))
        seen = step.total(first, places)
        gains = step.pair.gains({name: _channel_sums(sums) for name, sums in seen.items()})
        places = {t.name: _place(t, seen[t.name], gains[t.name]) for t in step.tensors}
        total = step.total(itertools.chain(first, batches), places, title="compare")
    return {
        k: Total(total[k], (float(place["edges"][0]), float(place["edges"][1])), place["gain"].astype(np.float64))
        for k, place in places.items()
    }


def _summed(sums: Sums, valid: np.ndarray) -> Sums:
    """The sums over the samples of a batch that are there."""
    kept = {k: v[valid].astype(np.float64) for k, v in sums.items()}
    (low, high, largest), best = kept.pop("extremes").T, kept.pop("best")
    with np.errstate(invalid="ignore"):
        kept |= {"l2": np.sqrt(kept["values"][:, 0]), "samples": np.ones_like(low)}
    extremes = np.array([low.min(), high.max(), largest.max()])
    return {k: v.sum(0) for k, v in kept.items()} | {"extremes": extremes, "best": best}


def _merged(one: Sums, other: Sums) -> Sums:
    (a, b, c), (d, e, f) = one["extremes"], other["extremes"]
    extremes, best = np.array([min(a, d), max(b, e), max(c, f)]), np.concatenate([one["best"], other["best"]])
    return {k: v + other[k] for k, v in one.items() if k != "best"} | {"extremes": extremes, "best": best}


def _channel_sums(first: Sums) -> ChannelProducts:
    xx, xy, yy, _, unclipped_xx, unclipped_xy = first["channels"]
    return ChannelProducts(xx, xy, yy, unclipped_xx, unclipped_xy, float(first["size"]))


def _place(tensor: Tensor, first: Sums, gains: np.ndarray) -> Sums:
    """Where the bins of a tensor lie, as the first samples show them, and the gains of its channels."""
    low, high, _ = first["extremes"]
    if not (np.isfinite(low) and np.isfinite(high)):
        low, high = 0.0, 1.0
    ends = None if tensor.qparams is None else ends_of(tensor.qparams)
    if (gains != 1).any():  # where the scaled values end is not known, but far beyond the codes no one looks
        low, high = min(0.0, low * gains.max()), max(0.0, high * gains.max())
        low, high = (low, high) if ends is None else (max(low, _BEYOND * ends[0]), min(high, _BEYOND * ends[1]))
    # Bins of float32 that are wide enough to be told apart.
    room = max((high - low) * _MARGIN, np.abs([low, high]).max() * 1e-4, _TINY)
    edges = np.clip([low - room, high + room], -_LARGEST, _LARGEST)
    return {"gain": gains.astype(np.float32), "edges": edges.astype(np.float32)}
