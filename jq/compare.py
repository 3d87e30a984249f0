"""The float and the quantized model side by side: what each tensor lost, where, and why.

Both models are traced into one compiled step that takes a batch of samples to a few sums per tensor and sample; the
host adds them up in 64 bits. No tensor outlives its reading, and memory does not grow with the number of samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jq.config import presets
from jq.constraints import violations
from jq.data import Batch, Source, batches, open_source
from jq.errors import DataError, ModelError
from jq.fake import fake_quant
from jq.formats import Integer
from jq.graph import Graph
from jq.integer.recognize import rounded_grid
from jq.layout import ChannelsLast, Packed, pack
from jq.numerics import power_of_two
from jq.onnx_read import load
from jq.passes import simplify
from jq.pipeline import Source as Model
from jq.plan import Plan, QParams
from jq.progress import progress_bar
from jq.quantized import split_quantizers
from jq.report import (
    Deviation,
    Distribution,
    Report,
    Row,
    channel_ranges,
    described,
    distribution,
    ends_of,
    worst_first,
)
from jq.search import channel_axes
from jq.trace import AnyOrder, Traced

Array = Any
Sums = dict[str, np.ndarray]

_BATCH = 4  # samples per device and step
_FIRST = 16  # samples that gains and bins are chosen from
_BINS = 64
_MARGIN = 1 / 8  # of the first samples' range, on both sides of the histogram
_BEYOND = 1.25  # of the codes' range, which it shows of an equalized tensor
_NEAR = (-2, -1, 1, 2)  # exponents tried beside a tensor's own
_MOST = 0.5  # of an error: what is more than this of it is its reason
_EQUALIZED, _EXPLAINED = (
    0.5,
    0.25,
)  # octaves that some channel is scaled by; of the error, what is left when that is undone
_OTHER = 0.1  # of a weight's power: rounding to 8 bits changes it by less
_ROUNDS = 4  # of fitting factors to the rows and the columns of a weight
# What tools append to the name of a tensor, for what they make of it.
_ENDINGS = ("_DequantizeLinear_Output", "_QuantizeLinear_Output", "_QuantizeLinear_Input", "_quantized", "_Mul")
_TINY = 1e-30


def compare(
    model: Model,
    quantized: Model,
    data: Any = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Report:
    """Return what each tensor of a quantized model, of any tool, lost against the float model, the worst first.

    For a tensor x of the float model, y of the quantized one as its readers get it, and the rounding Q that the
    quantized model gives the tensor, over all elements and samples,

        e = y - x         the whole error,        SQNR = 10 lg (sum x^2 / sum e^2),
        o = Q(x) - x      what is made here,      PSNR = 10 lg ((max x - min x)^2 / mean e^2),
        c = o where x is beyond the bounds of Q,  cosine = sum xy / sqrt(sum x^2 sum y^2),
        m = mean of e per channel,                L2 = mean over the samples of sqrt(sum e^2).

    The reason of a row is the first of these that holds, sums being over squares:

        bias        sum m > sum e / 2: a shift of the channels' means, which a bias could take back
        upstream    sum o < sum e / 2: the error came with the inputs and weights of what makes the tensor
                    (of a weight "changed": a tool corrected or tuned it; such rows come last)
        constraint  another exponent would halve sum o, but the NPU's position constraints do not allow it
        range       sum c > sum o / 2: values are clipped
        rounding    else

    Where a tool equalized the network, channels are scaled. Such a tensor is compared after its channels' factors are
    undone, and its note says so; its picture shows the scaled values, which the grid is for. The factors are those of
    least squares on what is not clipped of the first samples, and are believed only if they explain most of the error,
    and such factors what became of some weight.

    Tensors are matched by name, a tool's endings such as `_DequantizeLinear_Output` aside; those that only one model
    has are in `report.unmatched`. Tensors with NaN or Inf have no figures, and the reason "not finite". An exact
    tensor has an infinite SQNR, which is null in JSON. `data` is what `jq.calibrate` takes, `limit` the number of
    samples to take from it.

    >>> import jq
    >>> images, _ = jq.zoo.calibration_set()
    >>> model = jq.quantize(jq.zoo.path("fashion_resnet"), images[:32], "XINT8").model
    >>> report = compare(jq.zoo.path("fashion_resnet"), model, images[:32])
    >>> worst = report.rows[0]
    >>> worst.sqnr < 30, worst.error.cosine > 0.98
    (True, True)
    """
    pair = _Models.of(model, quantized)
    source = open_source(data, pair.float.inputs, seed=seed).limited(limit)
    mesh = mesh or jax.make_mesh((jax.local_device_count(),), ("batch",), devices=jax.local_devices())
    step = _Step.of(pair, source, mesh)
    totals = _added_up(step, source)
    rows = [_activation_row(step, t, totals[t.name]) for t in step.tensors]
    rows += _weight_rows(pair, {t.twin: t for t in step.tensors}, totals)
    facts = {
        "float": _described(model, pair.float),
        "quantized": _described(quantized, pair.quantized),
        "samples": str(totals[step.tensors[0].name].samples),
        "tensors compared": f"{len(rows)}, quantized: {sum(r.format != 'float' for r in rows)}",
    }
    title = f"{_name(quantized, 'quantized model')} against {_name(model, 'float model')}"
    return Report(title, facts, worst_first(rows), (), (), _unmatched(pair, step.tensors, rows))


# ---------------------------------------------------------------------------------------------
# Which tensors
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Models:
    """Both models without their quantizers, and the plans of these."""

    float: Graph
    float_plan: Plan  # empty, if the model is a float one
    quantized: Graph
    plan: Plan

    @classmethod
    def of(cls, model: Model, quantized: Model) -> _Models:
        one, other = (split_quantizers(m if isinstance(m, Graph) else load(m)) for m in (model, quantized))
        ours, theirs = ({v.name: v.dtype for v in g.inputs} for g in (one[0], other[0]))
        if ours != theirs:
            raise ModelError(
                f"the models have different inputs: {', '.join(map(str, one[0].inputs))}; in the quantized one "
                f"{', '.join(map(str, other[0].inputs))}. Compare a model with what was made of it"
            )
        return cls(*one, *other)

    @functools.cached_property
    def folded(self) -> Graph:
        """The float model with the weights that quantizers see."""
        return simplify(self.float)

    @functools.cached_property
    def weights(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The quantized weights that the float model has too, as both have them."""
        theirs = self.quantized.params
        return {
            k: (self.folded.params[k], q.given_back(theirs[k]))
            for k, q in self.plan.weights.items()
            if k in self.folded.params and self.folded.params[k].shape == theirs[k].shape and theirs[k].size
        }

    @functools.cached_property
    def equalized(self) -> bool:
        """Whether some weight is another one, but for factors of its rows and columns."""
        for x, back in self.weights.values():
            plain = np.square(back - x).sum() if x.ndim > 1 else 0.0
            if plain > _OTHER * np.square(x, dtype=np.float64).sum():
                factors = _outer_factors(x, back)
                if np.square(back / factors - x).sum() < _EXPLAINED * plain:
                    return True
        return False

    @functools.cached_property
    def violations(self) -> int:
        """How many of the NPU's constraints the plan breaks."""
        return len(violations(self.quantized, self.plan, presets["XINT8"]))

    def allows(self, tensor: str, found: QParams) -> bool:
        """Whether the NPU could have the tensor quantized so, all others being as they are."""
        return len(violations(self.quantized, self.plan.replace({tensor: found}), presets["XINT8"])) <= self.violations


@dataclasses.dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of both models."""

    name: str  # in the float model
    twin: str  # in the quantized one
    shape: tuple[int, ...]  # of one sample
    channels: int  # along the second axis; 1 where that may have any length
    depth: int  # its place in the order of the quantized model
    found: QParams | None  # how the quantized model rounds it
    coded: bool  # whether the quantized model has the codes


def _tried(found: QParams | None) -> tuple[int, ...]:
    """By how much an exponent is changed, to see whether another is better; nothing where there is none."""
    short = found is not None and isinstance(found.grid, Integer) and found.grid.bits <= 16
    return _NEAR if found is not None and short and not found.dynamic and found.is_power_of_two else ()


def _shared_tensors(pair: _Models, shapes: Sequence[Mapping[str, Any]]) -> list[_Tensor]:
    """The float tensors that the quantized model has too, by its names for them, in its order."""
    ours, theirs = shapes
    twins: dict[str, tuple[int, str]] = {}
    for depth, name in enumerate(theirs):
        stem = _stem(name, ours)
        # Of several forms of a tensor the last is the one that is read, but for those that keep its name.
        if stem is not None and ours[stem].shape == theirs[name].shape:
            twins[stem] = depth, name
    found = []
    for name, (depth, twin) in twins.items():
        qparams, coded = pair.plan.activations.get(twin), False
        if not jnp.issubdtype(theirs[twin].dtype, jnp.floating):
            qparams, coded = _grid(pair.quantized, twin), True
            if qparams is None:
                continue
        shape, declared = tuple(ours[name].shape), pair.float.values.get(name)
        fixed = declared is not None and declared.shape is not None and len(shape) == len(declared.shape) > 1
        channels = shape[1] if fixed and isinstance(declared.shape[1], int) else 1  # type: ignore[union-attr,index]
        found.append(_Tensor(name, twin, shape, channels, depth, qparams, coded))
    return found


def _stem(name: str, known: Mapping[str, Any]) -> str | None:
    """The float model's name of a tensor."""
    while name not in known:
        ending = next((e for e in _ENDINGS if name.endswith(e)), None)
        if ending is None:
            return None
        name = name.removesuffix(ending)
    return name


def _grid(graph: Graph, name: str) -> QParams | None:
    """What the codes that an integer operator makes stand for."""
    grid = rounded_grid(graph, graph.producer[name]) if name in graph.producer else None
    return None if grid is None else QParams(np.float32(grid.scale), np.int32(grid.zero_point), grid.codes)


def _unmatched(pair: _Models, tensors: Sequence[_Tensor], rows: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    """The tensors that have no row, by the model that has them."""
    ours, theirs = {t.name for t in tensors}, {t.twin for t in tensors}
    stems = {n for n in pair.quantized.producer if _stem(n, dict.fromkeys(ours)) in ours}
    weights = {r.tensor for r in rows if r.kind == "weight"}
    return {
        "float": tuple(n for n in _activations(pair.float) if n not in ours),
        "quantized": tuple(n for n in _activations(pair.quantized) if n not in theirs | stems)
        + tuple(w for w in pair.plan.weights if w not in weights),
    }


def _activations(graph: Graph) -> list[str]:
    """The tensors that are computed, and the inputs."""
    return [*(v.name for v in graph.inputs), *(o for n in graph.nodes for o in n.outputs if o)]


# ---------------------------------------------------------------------------------------------
# One batch
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """A batch to the sums of each of its samples, compiled."""

    pair: _Models
    tensors: tuple[_Tensor, ...]
    known: Mapping[str, np.ndarray]  # inputs that decide shapes, the same for all samples
    mesh: Mesh
    size: int  # samples per batch
    wide: bool

    @classmethod
    def of(cls, pair: _Models, source: Source, mesh: Mesh) -> _Step:
        """The step for data like the source's."""
        readers = [_tapped(g, p, _activations(g)) for g, p in _graphs(pair)]
        static = set().union(*(r.static_inputs for r in readers))
        known = {k: v for k, v in source.head.items() if k in static}
        with _types_of(wide := any(r.wide for r in readers)):
            feed = {k: _narrow(v) for k, v in source.head.items() if k not in known}
            shapes = [
                jax.eval_shape(
                    lambda params, inputs, r=r, p=p: _arrays(r(params, inputs | known, p)[1]), dict(g.params), feed
                )
                for r, (g, p) in zip(readers, _graphs(pair), strict=True)
            ]
        floats = {k: v for k, v in shapes[0].items() if jnp.issubdtype(v.dtype, jnp.floating) and v.size}
        # In the order of the graph, which the dict that comes back is not in.
        theirs = {k: shapes[1][k] for k in _activations(pair.quantized) if k in shapes[1]}
        tensors = _shared_tensors(pair, ({k: floats[k] for k in _activations(pair.float) if k in floats}, theirs))
        if not tensors:
            raise ModelError("the models have no tensor of one name and shape: is one made of the other?")
        return cls(pair, tuple(tensors), known, mesh, _BATCH * mesh.shape[mesh.axis_names[0]], wide)

    def __call__(self, batch: Batch, places: Mapping[str, Sums]) -> dict[str, Sums]:
        """The sums of each tensor, led by an axis of the samples."""
        for name, value in self.known.items():
            if not (batch.inputs[name] == value).all():
                raise DataError(f"input {name!r} decides shapes, so all samples must have the value {value}")
        split = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names[0]))
        with _types_of(self.wide):
            inputs = {k: jax.device_put(_narrow(v), split) for k, v in batch.inputs.items() if k not in self.known}
            return jax.tree.map(np.asarray, self._compiled(self._params, inputs, dict(places)))

    @functools.cached_property
    def _params(self) -> tuple[dict[str, Any], dict[str, Any], Plan, dict[str, QParams]]:
        one, other = (pack(graph, mesh=self.mesh) for graph, _ in _graphs(self.pair))
        # What both models have is one array: XLA computes what is the same in both once, and so alike.
        same = {k for k, v in one.items() if k in other and _identical(v, other[k])}
        other = {k: one[k] if k in same else v for k, v in other.items()}
        return one, other, self.pair.plan, {t.name: t.found for t in self.tensors if t.found is not None}

    @functools.cached_property
    def _compiled(self) -> Any:
        whole, split = PartitionSpec(), PartitionSpec(self.mesh.axis_names[0])
        spread = jax.shard_map(
            self._share, mesh=self.mesh, in_specs=(whole, split, whole), out_specs=split, check_vma=False
        )
        return jax.jit(spread)

    def _share(self, params: Any, inputs: Any, places: Any) -> Any:
        """The sums of one device's samples, taken one at a time."""
        graphs = _graphs(self.pair)
        ours = _tapped(*graphs[0], [t.name for t in self.tensors])
        theirs = _tapped(*graphs[1], [t.twin for t in self.tensors])

        def take(_: None, sample: Any) -> tuple[None, Any]:
            feed = {**sample, **self.known}
            one, other, plan, found = params
            x = ours(one, feed, self.pair.float_plan)[1]
            y = theirs(other, feed, plan)[1]
            return None, {
                t.name: _sums(t, x[t.name], y[t.twin], found.get(t.name), places[t.name]) for t in self.tensors
            }

        return lax.scan(take, None, inputs)[1]


def _graphs(pair: _Models) -> tuple[tuple[Graph, Plan], tuple[Graph, Plan]]:
    """Each model with its plan."""
    return (pair.float, pair.float_plan), (pair.quantized, pair.plan)


def _tapped(graph: Graph, plan: Plan, names: Sequence[str]) -> Traced:
    """The graph as a function that gives these tensors too, in whatever order they lie."""
    tap = AnyOrder(lambda x, last: ChannelsLast(x) if last else x)
    return fake_quant(graph, taps=dict.fromkeys(names, tap)).traced(plan)


def _arrays(tapped: Mapping[str, Any]) -> dict[str, Array]:
    """The tensors among what was tapped, in ONNX's order."""
    plain = {k: v.plain if isinstance(v, ChannelsLast) else v for k, v in tapped.items()}
    return {k: jnp.asarray(v) for k, v in plain.items() if isinstance(v, (jax.Array, np.ndarray)) and v.dtype != object}


def _sums(tensor: _Tensor, x: Any, y: Any, found: QParams | None, place: Mapping[str, Array]) -> dict[str, Array]:
    """What one sample of a tensor shows; see `compare` for the equations."""
    last = isinstance(x, ChannelsLast) and isinstance(y, ChannelsLast)
    x, y = ((v.array if last else v.plain) if isinstance(v, ChannelsLast) else v for v in (x, y))
    x = x.astype(jnp.float32)
    if tensor.coded:
        assert found is not None
        y = (y.astype(jnp.float32) - found.zero_point) * found.scale
    axis = x.ndim - 1 if last else 1
    along = [-1 if i == axis else 1 for i in range(x.ndim)] if tensor.channels > 1 else [1] * x.ndim
    rest = tuple(i for i in range(x.ndim) if i != axis or tensor.channels == 1)
    gain = place["gain"].reshape(along)
    scaled, y = x * gain, y.astype(jnp.float32)
    lost = y / gain - x

    def own(q: QParams) -> Array:
        return q.fake_quant(scaled, axis if q.axis is not None and last else None) / gain - x

    def squared(v: Array) -> Array:
        return jnp.sum(v * v)

    made, beyond, unclipped = jnp.zeros_like(x), jnp.zeros(x.shape, bool), x
    if found is not None:
        made = own(found)
        ends = None if tensor.found is None else ends_of(tensor.found)
        if ends is not None:
            beyond = (scaled < ends[0]) | (scaled > ends[1])
            unclipped = jnp.where(((y <= ends[0]) | (y >= ends[1])) & (y != 0), 0, x)
    # Whether there is an exponent is known of the tensor's own, not while tracing.
    near = [dataclasses.replace(found, scale=found.scale * 2.0**k) for k in _tried(tensor.found) if found is not None]
    values = [squared(lost), squared(made), squared(jnp.where(beyond, made, 0)), jnp.sum(beyond, dtype=jnp.float32)]
    channels = [jnp.sum(v, rest) for v in (x * x, x * y, y * y, lost, unclipped * unclipped, unclipped * y)]
    return {
        "values": jnp.stack(values),
        "near": jnp.stack([squared(own(q)) for q in near]) if near else jnp.zeros(0),
        "channels": jnp.stack([jnp.atleast_1d(c) for c in channels]),
        "extremes": jnp.stack([jnp.min(x), jnp.max(x), jnp.max(jnp.abs(lost))]),
        "counts": _counts(scaled, place["edges"]),
        "size": jnp.float32(x.size),
    }


def _counts(x: Array, edges: Array) -> Array:
    """How many values lie in each of the equal bins between two edges; what is beyond counts in the last ones."""
    low, high = edges
    index = jnp.floor((x.reshape(-1) - low) * (_BINS / (high - low)))
    return jnp.zeros(_BINS, jnp.int32).at[jnp.clip(index, 0, _BINS - 1).astype(jnp.int32)].add(1)


def _identical(one: Any, other: Any) -> bool:
    arrays = [v.array if isinstance(v, Packed) else v for v in (one, other)]
    alike = type(one) is type(other) and arrays[0].shape == arrays[1].shape and arrays[0].dtype == arrays[1].dtype
    return alike and np.asarray(arrays[0]).tobytes() == np.asarray(arrays[1]).tobytes()


def _narrow(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, jax.dtypes.canonicalize_dtype(np.asarray(array).dtype))


def _types_of(wide: bool) -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


# ---------------------------------------------------------------------------------------------
# All batches
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Total:
    """The sums of all samples of a tensor."""

    sums: Sums
    edges: tuple[float, float]
    gains: np.ndarray  # by which the quantized model has each channel scaled
    l2: float  # of each sample, added up
    samples: int


def _added_up(step: _Step, source: Source) -> dict[str, _Total]:
    """The sums of all samples. The first of them are read twice, as they say where bins lie and what gains are."""
    places = {
        t.name: {"gain": np.ones(t.channels, np.float32), "edges": np.array([0, 1], np.float32)} for t in step.tensors
    }
    totals: dict[str, _Total] = {}
    with progress_bar("compare", source.length) as advance, contextlib.closing(batches(source, step.size)) as stream:
        first = list(itertools.islice(stream, math.ceil(_FIRST / step.size)))
        for batch in first:
            for name, sums in step(batch, places).items():
                totals[name] = _joined(totals.get(name), sums, batch.valid, places[name])
        places = {t.name: _place(t, totals.pop(t.name).sums, step.pair) for t in step.tensors}
        for batch in itertools.chain(first, stream):
            seen = step(batch, places)
            for name, sums in seen.items():
                totals[name] = _joined(totals.get(name), sums, batch.valid, places[name])
            advance(int(batch.valid.sum()))
    return totals


def _merged(sums: Sums, valid: np.ndarray) -> Sums:
    """The samples of a batch that are there, added up in 64 bits."""
    kept = {k: v[valid].astype(np.float64) for k, v in sums.items()}
    low, high, largest = kept.pop("extremes").T
    return {k: v.sum(0) for k, v in kept.items()} | {"extremes": np.array([low.min(), high.max(), largest.max()])}


def _joined(before: _Total | None, sums: Sums, valid: np.ndarray, place: Sums) -> _Total:
    new = _merged(sums, valid)
    with np.errstate(invalid="ignore"):
        l2 = float(np.sqrt(sums["values"][valid, 0].astype(np.float64)).sum())
    count = int(valid.sum())
    if before is None:
        low, high = map(float, place["edges"])
        return _Total(new, (low, high), place["gain"].astype(np.float64), l2, count)
    (a, b, c), (d, e, f) = before.sums["extremes"], new["extremes"]
    added = {k: v + new[k] for k, v in before.sums.items()} | {"extremes": np.array([min(a, d), max(b, e), max(c, f)])}
    return dataclasses.replace(before, sums=added, l2=before.l2 + l2, samples=before.samples + count)


def _place(tensor: _Tensor, first: Sums, pair: _Models) -> Sums:
    """Where the bins of a tensor lie, and the gains of its channels, as the first samples show them."""
    low, high, _ = first["extremes"]
    if not (np.isfinite(low) and np.isfinite(high)):
        low, high = 0.0, 1.0
    # Bins of float32 that are wide enough to be told apart.
    room = max((high - low) * _MARGIN, np.abs([low, high]).max() * 1e-4, 1e-30)
    public = {v.name for v in (*pair.float.inputs, *pair.float.outputs)}
    alike = tensor.name in public or not pair.equalized
    gains = np.ones(tensor.channels) if alike else _gains(first["channels"], float(first["size"]))
    return {"gain": gains.astype(np.float32), "edges": np.array([low - room, high + room], np.float32)}


def _gains(channels: np.ndarray, size: float) -> np.ndarray:
    """By what each channel of an equalized tensor is scaled; ones, where that does not explain the error.

    Of least squares on what is not clipped; a channel that hardly shows above the noise gets the mean of all.
    """
    xx, xy, yy, _, unclipped_xx, unclipped_xy = channels
    ones = np.ones_like(xx)
    if not np.isfinite(channels).all() or not unclipped_xy.sum() > 0:
        return ones
    noise = np.sum(yy - np.divide(xy**2, xx, out=np.zeros_like(xx), where=xx > 0)) / size
    mean = unclipped_xy.sum() / unclipped_xx.sum()
    power, product = unclipped_xx + max(noise, _TINY), unclipped_xy + max(noise, _TINY) * mean
    gains = np.where(product > 0, product / power, mean)
    # In units of the float model's channels, lest one large gain decides.
    plain, fitted = (float(np.sum(yy / g**2 - 2 * xy / g + xx)) for g in (ones, gains))
    scaled = np.abs(np.log2(gains)).max() > _EQUALIZED
    return gains if scaled and fitted < _EXPLAINED * plain else ones


# ---------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Figures:
    """What was summed of a tensor, with its channels' factors undone: see `compare` for the equations."""

    lost: float  # squares of the whole error
    own: float  # of what is made here
    clipped: float  # of the part of that beyond the bounds
    shift: float  # of the means of the channels
    near: Mapping[int, float]  # of what would be made here, by the change of the exponent
    beyond: float  # elements
    xx: float
    xy: float
    yy: float
    low: float
    high: float
    largest: float
    size: float
    l2: float  # of a sample

    @property
    def finite(self) -> bool:
        """Whether there are figures at all."""
        fields = {**dataclasses.asdict(self), "near": sum(self.near.values())}
        return all(math.isfinite(v) for v in fields.values())

    @property
    def sqnr(self) -> float | None:
        """In dB; None of a tensor of zeros that does not stay so."""
        return _decibel(self.xx, self.lost)

    def deviation(self, rounded: bool, better: int | None) -> Deviation:
        """The figures of a report, of a tensor that is rounded or not."""
        norm = math.sqrt(self.xx) * math.sqrt(self.yy)
        return Deviation(
            cosine=1.0 if not self.lost else min(1.0, self.xy / norm) if norm else None,
            l2=self.l2,
            psnr=_decibel((self.high - self.low) ** 2, self.lost / self.size),
            largest=self.largest,
            saturated=self.beyond / self.size,
            made=_decibel(self.xx, self.own) if rounded else None,
            own=min(1.0, self.own / self.lost) if self.lost else None,
            clipped=min(1.0, self.clipped / self.lost) if self.lost else None,
            shift=min(1.0, self.shift / self.lost) if self.lost else None,
            better=better,
        )

    def better(self) -> int | None:
        """The change of the exponent that would halve what is made here, and halve it most; None if none would."""
        best = min(self.near, key=lambda k: self.near[k], default=None)
        return best if best is not None and self.near[best] < _MOST * self.own else None


def _decibel(signal: float, noise: float) -> float | None:
    if not noise:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else None


def _row(pair: _Models, figures: _Figures, name: str, found: QParams | None, activation: bool, **details: Any) -> Row:
    """The row of a tensor, called `name` in the quantized model."""
    change, constrained, reason = None, False, "not finite"
    if figures.finite:
        change = figures.better()
        if change is not None and found is not None and name in pair.plan:
            constrained = not pair.allows(name, dataclasses.replace(found, scale=found.scale * power_of_two(change)))
        reason = _reason(figures, activation, constrained)
    better = None if change is None or found is None else int(found.exponent) + change
    return Row(
        kind="activation" if activation else "weight",
        **described(found),
        low=figures.low if math.isfinite(figures.low) else None,
        high=figures.high if math.isfinite(figures.high) else None,
        sqnr=figures.sqnr if figures.finite else None,
        moves=(),
        error=figures.deviation(found is not None, better) if figures.finite else None,
        reason=reason,
        **details,
    )


def _reason(figures: _Figures, activation: bool, constrained: bool) -> str:
    """Why a tensor lost what it did: the first reason that holds; "" if it lost nothing."""
    if not figures.lost:
        return ""
    if activation and figures.shift > _MOST * figures.lost:
        return "bias"
    if figures.own < _MOST * figures.lost:
        return "upstream" if activation else "changed"
    if constrained:
        return "constraint"
    return "range" if figures.clipped > _MOST * figures.own else "rounding"


def _activation_row(step: _Step, tensor: _Tensor, total: _Total) -> Row:
    sums, gains = total.sums, total.gains
    lost, own, clipped, beyond = map(float, sums["values"])
    xx, xy, yy, shift, _, _ = sums["channels"]
    low, high, largest = map(float, sums["extremes"])
    figures = _Figures(
        lost=lost,
        own=own,
        clipped=clipped,
        shift=float(np.square(shift).sum() * shift.size / sums["size"]),  # each channel has as many elements
        near=dict(zip(_tried(tensor.found), map(float, sums["near"]), strict=True)),
        beyond=beyond,
        xx=float(xx.sum()),
        xy=float((xy / gains).sum()),
        yy=float((yy / gains**2).sum()),
        low=low,
        high=high,
        largest=largest,
        size=float(sums["size"]),
        l2=total.l2 / total.samples,
    )
    node = step.pair.quantized.producer.get(tensor.twin)
    return _row(
        step.pair,
        figures,
        tensor.twin,
        tensor.found,
        True,
        tensor=tensor.name,
        node=node.label if node else "",
        depth=tensor.depth,
        values=Distribution(*total.edges, tuple(map(int, sums["counts"]))) if figures.finite else None,
        note=_note(gains),
    )


def _weight_rows(pair: _Models, tensors: Mapping[str, _Tensor], totals: Mapping[str, _Total]) -> Iterator[Row]:
    """The rows of the quantized weights that the float model has, too; tensors are by their quantized names."""
    graph, axes = pair.quantized, channel_axes(pair.quantized)
    for name, (x, back) in pair.weights.items():
        found, node = pair.plan.weights[name], graph.consumers[name][0]
        around = {t: totals[tensors[t].name].gains for t in (*node.inputs[:1], *node.outputs) if t in tensors}
        made = tensors.get(node.outputs[0])
        x = x.astype(np.float64)
        factors = _factors(x, back, around, around.get(node.outputs[0]))
        yield _row(
            pair,
            _figures_of_weight(x, back, found, factors),
            name,
            found,
            False,
            tensor=name,
            node=node.label,
            depth=None if made is None else made.depth,
            values=distribution(x * factors),
            channels=channel_ranges(x * factors, axes.get(name)),
            note=_note(factors),
        )


def _figures_of_weight(x: np.ndarray, back: np.ndarray, found: QParams, factors: np.ndarray) -> _Figures:
    scaled = (x * factors).astype(np.float32)
    y, ends = back / factors, ends_of(found)
    lost, made = y - x, found.given_back(scaled) / factors - x
    beyond = np.zeros(x.shape, bool) if ends is None else (scaled < ends[0]) | (scaled > ends[1])
    near = {k: dataclasses.replace(found, scale=found.scale * power_of_two(k), coded=None) for k in _tried(found)}
    return _Figures(
        lost=float(np.square(lost).sum()),
        own=float(np.square(made).sum()),
        clipped=float(np.square(made[beyond]).sum()),
        shift=0.0,
        near={k: float(np.square(q.given_back(scaled) / factors - x).sum()) for k, q in near.items()},
        beyond=float(beyond.sum()),
        xx=float(np.square(x).sum()),
        xy=float((x * y).sum()),
        yy=float(np.square(y).sum()),
        low=float(x.min()),
        high=float(x.max()),
        largest=float(np.abs(lost).max()),
        size=float(x.size),
        l2=float(np.sqrt(np.square(lost).sum())),
    )


def _factors(x: np.ndarray, back: np.ndarray, around: Mapping[str, np.ndarray], made: np.ndarray | None) -> np.ndarray:
    """By what each element of a weight is scaled, if tensors around it are equalized: a product of rows and columns."""
    ones = np.ones((1,) * x.ndim)
    if all((g == 1).all() for g in around.values()):
        return ones
    if x.ndim < 2:  # a bias is scaled as what it is added to; of its own single values nothing could be told
        return made.reshape(x.shape) if made is not None and made.size == x.size else ones
    return _outer_factors(x, back)


def _outer_factors(x: np.ndarray, back: np.ndarray) -> np.ndarray:
    """The factors of a weight's rows and of its columns that are nearest to what was made of it, multiplied."""
    factors = np.ones((1,) * x.ndim)
    for axis in (0, 1) * _ROUNDS:
        rest = tuple(i for i in range(x.ndim) if i != axis)
        fitted = x * factors
        power, product = (np.sum(v, rest, keepdims=True) for v in (fitted**2, fitted * back))
        factors = factors * np.divide(product, power, out=np.ones_like(power), where=(power > 0) & (product > 0))
    return factors


def _note(factors: np.ndarray) -> str:
    if (factors == 1).all():
        return ""
    return f"equalized: compared after channels scaled by {factors.min():.3g} to {factors.max():.3g} are scaled back"


def _described(model: Model, graph: Graph) -> str:
    return f"{_name(model, graph.name)}, {len(graph.nodes)} nodes without quantizers"


def _name(model: Model, otherwise: str) -> str:
    return Path(model).name if isinstance(model, (str, os.PathLike)) else otherwise
