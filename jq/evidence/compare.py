"""The float and the quantized model side by side: what each tensor lost, where, and why."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jq.arithmetic.formats import Integer
from jq.arithmetic.losses import decibels
from jq.arithmetic.numerics import power_of_two
from jq.config import QuantConfig, presets
from jq.data.labels import Labels
from jq.data.preprocessing import Pixels
from jq.data.sources import Source, as_trained, open_source
from jq.data.stream import local_mesh
from jq.errors import ConfigError
from jq.evidence.advice import Advice, advised
from jq.evidence.attribution import attributed
from jq.evidence.gains import outer_factors
from jq.evidence.layers import CHIP, layers_of
from jq.evidence.origins import Origin, largest
from jq.evidence.pictures import changed_samples
from jq.evidence.report import (
    Deviation,
    Distribution,
    Report,
    TensorRow,
    channel_ranges,
    described,
    distribution,
    ends_of,
    worst_first,
)
from jq.evidence.side_by_side import (
    BatchSums,
    Pair,
    Tensor,
    Total,
    activations,
    added_up,
    stem_of,
    tried,
)
from jq.evidence.verdict import OutputLoss, OutputsVerdict
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.npu.facts import CHIPS
from jq.npu.placing import place
from jq.plan import Plan, QParams
from jq.plan.scales import channel_axes
from jq.readings.agreement import Compared, agreement
from jq.readings.named import AnyReading, open_reading, reading_name
from jq.util import files

_MOST = 0.5  # a part above this share of an error is its reason
_NEW = 0.01  # where less than this share of an error, 20 dB below it, is new, all of it came from upstream


def compare(
    model: ModelLike,
    quantized: ModelLike,
    data: Any = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    reading: AnyReading | None = None,
    labels: Labels | Sequence[int] | np.ndarray | None = None,
) -> Report:
    """Return what each tensor of a model, quantized by any tool, lost against the float model, the worst first.

    For a tensor x of the float model, y of the quantized one as its readers get it, and the rounding Q that the
    quantized model gives the tensor, over all elements and samples,

        e = y - x         the whole error,        SQNR = 10 lg (sum x^2 / sum e^2),
        o = Q(x) - x      what is made here,      PSNR = 10 lg ((max x - min x)^2 / mean e^2),
        c = o where x is beyond the bounds of Q,  cosine = sum xy / sqrt(sum x^2 sum y^2),
        m = mean of e per channel,                L2 = mean over the samples of sqrt(sum e^2).

    The error of an activation is split into what came in with its inputs, the rounding and tuning of weights,
    another form of its operator, its own rounding, and what a constraint of the NPU adds to that. Each new part has
    a share of the outputs' squared error, and these are summed over layers (`jq.evidence.attribution` has the equations).
    `report.verdict` says what the outputs lost and which layers make most of it, `report.advice` what to do.

    The reason of a row is the first of these that holds, sums being over squares:

        bias        sum m > sum e / 2: a shift of the channels' means, which a bias could take back
        upstream    less than a hundredth of the error is new (where errors are not split: sum o < sum e / 2)
        changed     of a weight, sum o < sum e / 2: a tool corrected or tuned it; such rows come last
        range       of the new parts, rounding is the largest, and sum c > sum o / 2: values are clipped
        weights, rounding, constraint, form: the largest of the new parts

    Errors are split on the first 16 samples (4 to 16 for large networks), if the data can be read again and the outputs have
    gradients. Otherwise, and for weights, the reason is constraint where another exponent would halve sum o, but constraints
    do not allow it.

    Where a tool equalized the network, channels are scaled. Such a tensor is compared after its channels' factors are
    undone, and its note says so; its picture shows the scaled values, which the grid is for. The factors are those of
    least squares on what is not clipped of the first samples, and are believed only if they explain most of the error,
    and such factors what became of some weight.

    Tensors are matched by name, a tool's endings such as `_DequantizeLinear_Output` aside; those that only one model
    has are in `report.unmatched`. Tensors with NaN or Inf have no figures, and the reason "not finite". An exact
    tensor has an infinite SQNR, which is null in JSON. `data` is what `jq.calibrate` takes, `limit` the number of
    samples to take from it. With a `reading`, a device's, say (`jq.infer` has the names), the quantized model's outputs
    are compared as that reading gives them too, in `report.facts`. With `labels`, the right class of each sample, the verdict
    has both models' top-1, and `report.changed` says which samples became right or wrong. Where layers run is what the rules
    of jq.npu say of the chip stx.

    >>> import jq
    >>> images, _ = jq.zoo.calibration_set()
    >>> model = jq.quantize(jq.zoo.path("fashion_resnet"), images[:32], "XINT8").model
    >>> report = compare(jq.zoo.path("fashion_resnet"), model, images[:32])
    >>> worst = report.rows[0]
    >>> worst.sqnr < 30, worst.error.cosine > 0.98
    (True, True)
    """
    whole = quantized if isinstance(quantized, Graph) else load(quantized)
    pair = Pair.of(model, whole)
    source = open_source(as_trained(data, pair.quantized.metadata), pair.original.inputs, seed=seed).limited(limit)
    step = BatchSums.of(pair, source, mesh or local_mesh())
    scored = next((t.name for t in step.tensors if t.scores), None)
    if labels is not None and scored is None:
        raise ConfigError("labels need an output with the scores of classes, [samples, classes]; this model has none")
    _right(labels, source, source.length)  # what does not fit is told before the work
    totals = added_up(step)
    rows = [_activation_row(step, t, totals[t.name]) for t in step.tensors]
    rows += _weight_rows(pair, {t.twin: t for t in step.tensors}, totals)
    # Data that can be read only once are read already.
    origins, attribution = attributed(pair, step.tensors, totals, rows, source) if source.again else ({}, None)
    rows = [_with_origin(row, origins) for row in rows]
    models = {"float": (model, pair.original), "quantized": (quantized, pair.quantized)}
    facts = {k: f"{name_of(m, g.name)}, {len(g.nodes)} nodes without quantizers" for k, (m, g) in models.items()}
    facts |= {
        "samples": str(int(totals[step.tensors[0].name].sums["samples"])),
        "tensors compared": f"{len(rows)}, quantized: {sum(r.format != 'float' for r in rows)}",
    }
    if reading is not None:
        facts |= _as_read(model, quantized, source, reading)
    title = f"{name_of(quantized, 'quantized model')} against {name_of(model, 'float model')}"
    right = _right(labels, source, int(facts["samples"]))
    verdict = OutputsVerdict(
        tuple(_outputs(pair, step.tensors, totals, right)),
        f"{facts['samples']} samples",
        (attribution.headline(),) if attribution is not None else (),
    )
    advice: Advice = ()
    if attribution is not None:
        path = os.fspath(model) if isinstance(model, (str, os.PathLike)) else "model.onnx"
        held = data.data if isinstance(data, Pixels) else data
        folder = os.fspath(held) if isinstance(held, (str, os.PathLike)) else "calib/"
        made_by = _preset_of(pair.quantized, pair.plan)
        advice = advised(attribution, pair.original, made_by, path, folder, source.preprocessing)
    return Report(
        title,
        facts,
        worst_first(rows),
        (),
        (),
        _unmatched(pair, step.tensors, rows),
        attribution=attribution,
        advice=advice,
        verdict=verdict,
        layers=layers_of(pair.quantized, pair.plan, place(whole, CHIPS[CHIP].backends[0]).nodes),
        changed=() if scored is None else changed_samples(totals[scored].sums["best"].astype(int), source, right),
        subject=name_of(quantized, "quantized model"),
    )


def side_by_side(reports: Sequence[Report]) -> Report:
    """Return the first of several reports on one float model, with the others shown beside it.

    >>> plain = Report("a", {}, (), (), ())
    >>> len(side_by_side([plain, plain, plain]).beside)
    2
    """
    return dataclasses.replace(reports[0], beside=tuple(reports[1:]))


def _right(labels: Labels | Sequence[int] | np.ndarray | None, source: Source, count: int | None) -> np.ndarray | None:
    """The right class of each of `count` samples, or None if the classes are not known."""
    if labels is None or count is None:
        return None
    known = labels if isinstance(labels, Labels) else Labels(np.asarray(labels, np.int64))
    if known.names is None and len(known.values) > count:  # of data of which a limit takes the first
        known = Labels(known.values[:count])
    return known.of(count, None if source.names is None else source.names[:count])


def _as_read(model: ModelLike, quantized: ModelLike, source: Source, reading: AnyReading) -> dict[str, str]:
    """The loss of each output against the float model where a reading runs the quantized one, in words."""
    truth, run = open_reading(model), open_reading(quantized, reading)
    powers: dict[str, list[np.ndarray]] = {}
    counts: dict[str, list[Compared]] = {}
    for sample in source.samples():
        ours, theirs = ({k: np.asarray(v) for k, v in r(sample).items()} for r in (truth, run))
        for output in (k for k in ours if k in theirs and ours[k].shape == theirs[k].shape):
            x, y = (v.astype(np.float64) for v in (ours[output], theirs[output]))
            powers.setdefault(output, []).append(np.array([np.square(x).sum(), np.square(x - y).sum()]))
            counts.setdefault(output, []).append(Compared.of(ours[output], theirs[output]))
    words = {}
    for output, parts in counts.items():
        kept, same = _decibels(*map(float, np.sum(powers[output], axis=0))), agreement(output, parts).top1
        known = "no finite SQNR" if kept is None or not math.isfinite(kept) else f"SQNR {kept:.1f} dB"
        classes = "" if same is None else f", same class for {same:.2%} of the samples"
        words[f"{output} by {reading_name(reading)}"] = f"{known}{classes}, against the float model"
    return words


def _outputs(
    pair: Pair, tensors: Sequence[Tensor], totals: Mapping[str, Total], right: np.ndarray | None
) -> Iterator[OutputLoss]:
    """Yield the loss of each output over all samples."""
    for t in (t for t in tensors if t.name in pair.original.output_names):
        sums = totals[t.name].sums
        kept = _decibels(float(sums["channels"][0].sum()), float(sums["values"][0]))
        if not t.scores:
            yield OutputLoss(t.name, kept)
            continue
        divergence, other = map(float, sums["classes"] / sums["samples"])
        top1 = None
        if right is not None:
            before, after = (float((sums["best"][:, i] == right).mean()) for i in range(2))
            top1 = before, after
        yield OutputLoss(t.name, kept, 1 - other, divergence, top1)


def _unmatched(pair: Pair, tensors: Sequence[Tensor], rows: Sequence[TensorRow]) -> dict[str, tuple[str, ...]]:
    """The tensors that have no row, by the model that has them."""
    ours, theirs = {t.name for t in tensors}, {t.twin for t in tensors}
    stems = {n for n in pair.quantized.producer if stem_of(n, dict.fromkeys(ours)) in ours}
    weights = {r.tensor for r in rows if r.kind == "weight"}
    return {
        "float": tuple(n for n in activations(pair.original) if n not in ours),
        "quantized": tuple(n for n in activations(pair.quantized) if n not in theirs | stems)
        + tuple(w for w in pair.plan.weights if w not in weights),
    }


# --- Rows ---


@dataclasses.dataclass(frozen=True)
class _Figures:
    """The sums of a tensor, with its channels' factors undone: see `compare` for the equations."""

    lost: float  # squares of the whole error
    own: float  # squares of the error that is made here
    clipped: float  # squares of its part beyond the bounds
    shift: float  # squares of the channels' mean errors
    near: Mapping[int, float]  # squares of the error that another exponent would make, by the change of the exponent
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
        return _decibels(self.xx, self.lost)

    def deviation(self, rounded: bool, better: int | None, forbidden: bool) -> Deviation:
        """The figures of a report, of a tensor that is rounded or not."""
        norm = math.sqrt(self.xx) * math.sqrt(self.yy)
        return Deviation(
            cosine=1.0 if not self.lost else min(1.0, self.xy / norm) if norm else None,
            l2=self.l2,
            psnr=_decibels((self.high - self.low) ** 2, self.lost / self.size),
            largest=self.largest,
            saturated=self.beyond / self.size,
            made=_decibels(self.xx, self.own) if rounded else None,
            own=min(1.0, self.own / self.lost) if self.lost else None,
            clipped=min(1.0, self.clipped / self.lost) if self.lost else None,
            shift=min(1.0, self.shift / self.lost) if self.lost else None,
            better=better,
            forbidden=forbidden,
        )

    def better(self) -> int | None:
        """The change of the exponent that would reduce the error made here most, if it would at least halve it."""
        best = min(self.near, key=lambda k: self.near[k], default=None)
        return best if best is not None and self.near[best] < _MOST * self.own else None


def _decibels(signal: float, noise: float) -> float | None:
    return decibels(signal, noise) if signal or not noise else None


def _row(pair: Pair, figures: _Figures, name: str, qparams: QParams | None, kind: str, **details: Any) -> TensorRow:
    """The row of a tensor, called `name` in the quantized model."""
    change, constrained, reason = None, False, "not finite"
    if figures.finite:
        change = figures.better()
        if change is not None and qparams is not None and name in pair.plan:
            other = dataclasses.replace(qparams, scale=qparams.scale * power_of_two(change))
            constrained = not pair.allows(name, other)
        reason = _reason(figures, kind == "activation", constrained)
    better = None if change is None or qparams is None else int(qparams.exponent) + change
    return TensorRow(
        kind=kind,
        **described(qparams),
        low=figures.low if math.isfinite(figures.low) else None,
        high=figures.high if math.isfinite(figures.high) else None,
        sqnr=figures.sqnr if figures.finite else None,
        moves=(),
        error=figures.deviation(qparams is not None, better, constrained) if figures.finite else None,
        reason=reason,
        **details,
    )


def _with_origin(row: TensorRow, origins: Mapping[str, Origin]) -> TensorRow:
    """An activation's row with where its error comes from, and the reason that this gives."""
    origin = origins.get(row.tensor) if row.kind == "activation" else None
    if origin is None or row.reason in ("", "bias", "not finite"):
        return dataclasses.replace(row, origin=origin)
    reason = largest(origin.parts)
    if origin.upstream > 1 - _NEW:
        reason = "upstream"
    elif reason == "rounding" and row.error is not None and (row.error.clipped or 0) > _MOST * (row.error.own or 0):
        reason = "range"
    return dataclasses.replace(row, origin=origin, reason=reason)


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


def _activation_row(step: BatchSums, tensor: Tensor, total: Total) -> TensorRow:
    sums, gains = total.sums, total.gains
    lost, own, clipped, beyond = map(float, sums["values"])
    xx, xy, yy, shift, _, _ = sums["channels"]
    low, high, largest = map(float, sums["extremes"])
    figures = _Figures(
        lost=lost,
        own=own,
        clipped=clipped,
        shift=float(np.square(shift).sum() * shift.size / sums["size"]),  # each channel has as many elements
        near=dict(zip(tensor.changes, map(float, sums["near"]), strict=True)),
        beyond=beyond,
        xx=float(xx.sum()),
        xy=float((xy / gains).sum()),
        yy=float((yy / gains**2).sum()),
        low=low,
        high=high,
        largest=largest,
        size=float(sums["size"]),
        l2=float(sums["l2"] / sums["samples"]),
    )
    node = step.pair.quantized.producer.get(tensor.twin)
    return _row(
        step.pair,
        figures,
        tensor.twin,
        tensor.qparams,
        "activation",
        tensor=tensor.name,
        node=node.label if node else "",
        depth=tensor.depth,
        values=Distribution(*total.edges, tuple(map(int, sums["counts"]))) if figures.finite else None,
        note=_note(gains),
    )


def _weight_rows(pair: Pair, tensors: Mapping[str, Tensor], totals: Mapping[str, Total]) -> Iterator[TensorRow]:
    """The rows of the quantized weights that the float model has, too; tensors are by their quantized names."""
    graph, axes = pair.quantized, channel_axes(pair.quantized)
    for name, (x, back) in pair.weights.items():
        qparams, node = pair.plan.weights[name], graph.consumers[name][0]
        around = {t: totals[tensors[t].name].gains for t in (*node.inputs[:1], *node.outputs) if t in tensors}
        made = tensors.get(node.outputs[0])
        x = x.astype(np.float64)
        factors = _factors(x, back, around, around.get(node.outputs[0]))
        yield _row(
            pair,
            _figures_of_weight(x, back, qparams, factors),
            name,
            qparams,
            "weight",
            tensor=name,
            node=node.label,
            depth=None if made is None else made.depth,
            values=distribution(x * factors),
            channels=channel_ranges(x * factors, axes.get(name)),
            note=_note(factors),
        )


def _figures_of_weight(x: np.ndarray, back: np.ndarray, qparams: QParams, factors: np.ndarray) -> _Figures:
    scaled = (x * factors).astype(np.float32)
    y, ends = back / factors, ends_of(qparams)
    lost, made = y - x, qparams.given_back(scaled) / factors - x
    beyond = np.zeros(x.shape, bool) if ends is None else (scaled < ends[0]) | (scaled > ends[1])
    near = {k: dataclasses.replace(qparams, scale=qparams.scale * power_of_two(k), coded=None) for k in tried(qparams)}
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
    return outer_factors(x, back)


def _note(factors: np.ndarray) -> str:
    if (factors == 1).all():
        return ""
    return f"equalized: compared after channels scaled by {factors.min():.3g} to {factors.max():.3g} are scaled back"


def _preset_of(graph: Graph, plan: Plan) -> str:
    """The preset by which jq made a quantized model, or one with scales like those of a model of another tool."""
    try:
        config = QuantConfig.from_dict(files.parsed(graph.metadata.get("jq.config", "{}")))
        made = next((name for name, preset in presets.items() if preset == config), None)
    except (ValueError, ConfigError):  # of another version
        made = None
    if made is not None:
        return made
    qparams = list(plan.activations.values())
    if not qparams or all(q.is_power_of_two for q in qparams):
        return "XINT8"
    wide = [q for q in qparams if isinstance(q.grid, Integer) and q.grid.bits > 8]
    return "A16W8" if 2 * len(wide) > len(qparams) else "A8W8"  # a few of another width are islands


def name_of(model: ModelLike, otherwise: str) -> str:
    """The file name of a model, or what it is called otherwise."""
    return Path(model).name if isinstance(model, (str, os.PathLike)) else otherwise
