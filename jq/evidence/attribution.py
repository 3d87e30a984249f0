"""Who did it: the error of every tensor in parts, and what each new part does to the outputs.

For a tensor t, let x be its values in the float model and y in the quantized one, c the values that the float model
computes from the quantized model's inputs of t, and p the values that the quantized model has before it rounds. Then

    y - x = (c - x) + (p - c) + (y - p)

splits the error into what came in, what weights or another form of the operators add, and what rounding adds. Where a
constraint forbids a better exponent, the last term is split again, into what that exponent would add and the rest. A
part's share of the squared error is its product with y - x, so the shares add up to 1.

The float model with n = y - c added to each tensor is the quantized model; with s n, 0 <= s <= 1, it leads from one to
the other. So the outputs' error E is the integral over s of J n, summed over tensors, J being the derivative of the
outputs, and the product of E with each term is that tensor's share of E's square, exactly but for the quadrature: two
steps of Gauss. All shares of a step come from one backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.numerics import power_of_two
from jq.data.sources import Source
from jq.data.stream import Stream, local_mesh
from jq.evidence.layers import layer_of
from jq.evidence.origins import PARTS, Attribution, LayerShare, Origin, summed
from jq.evidence.report import TensorRow
from jq.evidence.side_by_side import QUICKLY_COMPILED, Pair, Tensor, Total
from jq.ops.linear import linear_layer
from jq.plan import Plan, QParams
from jq.readings.fake import as_planned
from jq.readings.hooks import Hook
from jq.readings.packing import pack
from jq.readings.tracing import AnyOrder, trace
from jq.recovery.parts import blocks
from jq.util.progress import log

Array = Any

_SAMPLES = 16  # shares hardly change with more
_LEAST, _VALUES = (
    4,
    1 << 28,
)  # samples of a large network: as many as have this many values in all tensors, but at least four
_STEPS = (0.5 - math.sqrt(1 / 12), 0.5 + math.sqrt(1 / 12))  # of Gauss's quadrature between 0 and 1
_MAP = 3  # dims from which on an output is a map, whose channels count alike


@dataclasses.dataclass(frozen=True)
class _SharesKind:
    """All that the program of a tensor's shares depends on, besides shapes and formats."""

    added: str  # the part that its nodes add before rounding: weights or form
    channels: int
    rounded: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Products:
    """A sample to its products: [tensors, 2 + parts] for the tensors, [tensors, parts] for the outputs, and E's square.

    Networks are programs of their own, and give all tensors; tensors of one kind and shape share the program of their
    products, since compiling is what takes the time.
    """

    pair: Pair
    tensors: tuple[Tensor, ...]
    kinds: Mapping[str, _SharesKind]
    known: Mapping[str, np.ndarray]  # inputs that decide shapes

    def __call__(self, arguments: Any, inputs: Mapping[str, Array], _: Array) -> tuple[Array, Array, Array]:
        params, gains, qparams, better, weights = arguments
        sample = {k: v[0] for k, v in inputs.items()}
        x, computed, before, y, outputs = self._values(params, sample, gains, qparams)
        errors = {k: y[k] - outputs[k] for k in weights}
        pulls = {k: (errors[k] * weights[k]).astype(outputs[k].dtype) for k in weights}
        noise = {k: y[k] - computed[k] for k in y}
        slopes = [self._slopes(params, sample, noise, pulls, np.float32(step)) for step in _STEPS]
        shares, effects = [], []
        for name, kind in self.kinds.items():
            pull = sum(s[name] for s in slopes) / len(slopes)
            values = x[name], computed[name], before[name], y[name], pull
            share, effect = _products(kind, values, gains[name], better.get(name))
            shares.append(share)
            effects.append(effect)
        whole = sum(jnp.sum(errors[k] * pulls[k]) for k in weights)
        return jnp.stack(shares)[None], jnp.stack(effects)[None], jnp.asarray(whole)[None]

    @functools.cached_property
    def _values(self) -> Any:
        """The program of the tensors of both networks, and of the outputs, in ONNX's order and the float model's scale."""
        graph, plans = self.pair.original, self.pair.original_plan
        fn = trace(as_planned(graph, plans), taps=dict.fromkeys(self.kinds, AnyOrder(layout.plain)))

        def values(params: Any, sample: Mapping[str, Array], gains: Any, qparams: Any) -> Any:
            ours, theirs, plan = params
            outputs, x = fn.quantized(ours, Hook(plans, plans.fake_quant), {**sample, **self.known})
            y, before = self._quantized(theirs, plan, {**sample, **self.known}, gains, qparams)
            computed: dict[str, Array] = {}

            def forced(name: str, value: Any) -> Any:
                value = plans.fake_quant(name, value) if name in plans else value
                if name not in y:
                    return value
                computed[name] = layout.plain(value)
                return layout.mapped(lambda _: layout.arranged(y[name], value), value)

            fn.quantized(ours, Hook({*y, *plans}, forced), {**sample, **self.known})
            return x, computed, before, y, outputs

        return jax.jit(values, compiler_options=QUICKLY_COMPILED)

    @functools.cached_property
    def _slopes(self) -> Any:
        """The program of the outputs' derivatives, times `pulls`, by what is added to each tensor: a part of its noise."""
        graph, plans = self.pair.original, self.pair.original_plan
        fn = trace(as_planned(graph, plans))

        def slopes(params: Any, sample: Mapping[str, Array], noise: Any, pulls: Any, step: Array) -> Any:
            def injected(added: dict[str, Array]) -> dict[str, Array]:
                def changed(name: str, value: Any) -> Any:
                    value = plans.fake_quant(name, value) if name in plans else value
                    if name not in added:
                        return value
                    return layout.mapped(lambda v: jnp.asarray(v) + layout.arranged(added[name], value), value)

                made = fn.quantized(params[0], Hook({*added, *plans}, changed), {**sample, **self.known})
                return {k: made[k] for k in pulls}

            return jax.vjp(injected, {k: step * v for k, v in noise.items()})[1](pulls)[0]

        return jax.jit(slopes, compiler_options=QUICKLY_COMPILED)

    def _quantized(
        self, params: Any, plan: Plan, sample: Mapping[str, Array], gains: Any, qparams: Any
    ) -> tuple[dict[str, Array], dict[str, Array | None]]:
        """The tensors of the quantized model, and their values before rounding, in the float model's scale."""
        seen: dict[str, Array] = {}

        def rounded(name: str, value: Any) -> Any:
            seen[name] = layout.plain(value)
            return plan.fake_quant(name, value)

        graph = as_planned(self.pair.quantized, self.pair.plan)
        fn = trace(graph, taps=dict.fromkeys((t.twin for t in self.tensors), AnyOrder(layout.plain)))
        made = fn.quantized(params, Hook(self.pair.plan, rounded), sample)[1]
        y, before = {}, dict[str, Array | None]()
        for t in self.tensors:
            value, gain = made[t.twin], _along(t.channels, gains[t.name], made[t.twin])
            if t.coded:
                q = qparams[t.name]
                y[t.name], before[t.name] = (value.astype(jnp.float32) - q.zero_point) * q.scale / gain, None
            else:
                y[t.name], before[t.name] = value / gain, seen.get(t.twin, value) / gain
        return y, before


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY_COMPILED)
def _products(kind: _SharesKind, values: Any, gains: Array, better: QParams | None) -> tuple[Array, Array]:
    """The products of a tensor's error with its parts, and of the outputs' with what each of its new parts does there."""
    x, computed, before, y, pull = values
    before, error = y if before is None else before, y - x
    parts: dict[str, Array | None] = dict.fromkeys(PARTS)
    parts[kind.added] = before - computed
    rounding = y - before
    if better is not None:
        gain = _along(kind.channels, gains, y)
        best = better.fake_quant(before * gain) / gain
        parts["constraint"], rounding = y - best, best - before
    parts["rounding"] = rounding if kind.rounded else None

    def product(one: Array, other: Array | None) -> Array:
        return jnp.float32(0) if other is None else jnp.sum(one * other)

    shares = [product(error, v) for v in (error, computed - x, *parts.values())]
    return jnp.stack(shares), jnp.stack([product(pull, v) for v in parts.values()])


def attributed(
    pair: Pair, tensors: Sequence[Tensor], totals: Mapping[str, Total], rows: Sequence[TensorRow], source: Source
) -> tuple[dict[str, Origin], Attribution | None]:
    """Return where the error of each activation and, by layers, of the outputs comes from; nothing where that is not known.

    `totals` and `rows` are of all samples: they say how channels are scaled, how large outputs are, and of which
    tensors the exponent is one that only a constraint explains.
    """
    weights = _weights(pair, tensors, totals)
    finite = all(np.isfinite(total.sums["values"]).all() for total in totals.values())
    if not weights or not finite:
        return {}, None
    kinds = {
        t.name: _SharesKind(_added(pair, t, tensors), t.channels, t.qparams is not None and not t.coded)
        for t in tensors
    }
    stream = Stream.of(
        source.limited(_samples(totals)), 1, trace(pair.original), trace(pair.quantized), mesh=local_mesh(1)
    )
    step = _Products(pair, tuple(tensors), kinds, stream.known)
    arguments = (
        (pack(pair.original, mesh=stream.mesh), pack(pair.quantized, mesh=stream.mesh), pair.plan),
        {k: total.gains.astype(np.float32) for k, total in totals.items()},
        {t.name: t.qparams for t in tensors if t.qparams is not None},
        _better(tensors, rows),
        weights,
    )
    try:
        shares, effects, whole = stream.rows(step, arguments, title="attribute")
    except ValueError as error:  # JAX's for loops whose length depends on data, which have no gradients
        log.info("errors are not attributed: %s", error)
        return {}, None
    shares, effects = shares.sum(0, dtype=np.float64), effects.sum(0, dtype=np.float64)
    total, count = float(whole.sum(dtype=np.float64)), len(whole)
    if not total > 0 or not np.isfinite(effects).all():
        return {}, None
    origins = {}
    for t, (power, upstream, *parts), effect in zip(tensors, shares, effects / total, strict=True):
        if power > 0:
            origins[t.name] = Origin(
                float(upstream / power),
                dict(zip(PARTS, (float(p / power) for p in parts), strict=True)),
                dict(zip(PARTS, map(float, effect), strict=True)),
            )
    layers = _layers(pair, tensors, origins)
    return origins, Attribution(layers, count, _blocks(pair, layers))


def _samples(totals: Mapping[str, Total]) -> int:
    """How many samples are enough: a map of a large image has many values to average over."""
    values = sum(total.sums["size"] / total.sums["samples"] for total in totals.values())
    return int(np.clip(_VALUES / values, _LEAST, _SAMPLES))


def _along(channels: int, gain: Array, value: Array) -> Array:
    """The factors of a tensor's channels as they broadcast against it."""
    return gain.reshape([-1 if i == 1 else 1 for i in range(value.ndim)]) if channels > 1 else gain.reshape(())


def _weights(pair: Pair, tensors: Sequence[Tensor], totals: Mapping[str, Total]) -> dict[str, np.ndarray]:
    """The weight of the squared error of each output: one over its power or, of a map, over that of each channel."""
    made = {}
    for t in (t for t in tensors if t.name in pair.original.output_names):
        power = totals[t.name].sums["channels"][0]
        value = pair.original.values.get(t.name)
        rank = len(value.shape) if value is not None and value.shape is not None else 0
        if rank >= _MAP and t.channels > 1:
            least = power.max() * 1e-6  # a channel of zeros
            weight = (1 / np.maximum(power, least)).reshape([-1 if i == 1 else 1 for i in range(rank)]) / power.size
        else:
            weight = np.array(1 / power.sum())
        if power.sum() > 0:
            made[t.name] = weight.astype(np.float32)
    return made


def _better(tensors: Sequence[Tensor], rows: Sequence[TensorRow]) -> dict[str, QParams]:
    """The qparams that tensors would have without the constraint that forbids them."""
    exponents = {
        r.tensor: r.error.better for r in rows if r.kind == "activation" and r.error is not None and r.error.forbidden
    }
    return {
        t.name: dataclasses.replace(t.qparams, scale=power_of_two(exponent))
        for t in tensors
        if (exponent := exponents.get(t.name)) is not None and t.qparams is not None
    }


def _added(pair: Pair, tensor: Tensor, tensors: Sequence[Tensor]) -> str:
    """The part that the quantized model's nodes between a tensor and those before it add."""
    known, pending = {t.twin for t in tensors}, [tensor.twin]
    while pending:
        node = pair.quantized.producer.get(pending.pop())
        if node is None:
            continue
        if any(name in pair.quantized.params and (name in pair.plan.weights or linear_layer(pair.quantized, node))
               for name in node.inputs):  # fmt: skip
            return "weights"
        pending += [name for name in node.reads() if name not in known]
    return "form"


def _layers(pair: Pair, tensors: Sequence[Tensor], origins: Mapping[str, Origin]) -> tuple[LayerShare, ...]:
    """The layers with the effects of their tensors, the largest first."""
    graph, grouped = pair.quantized, dict[tuple[str, str], list[Tensor]]()
    for t in (t for t in tensors if t.name in origins):
        node = graph.producer.get(t.twin)
        layer = None if node is None else layer_of(graph, pair.plan, node)
        grouped.setdefault((t.name, "input") if layer is None else (layer.label, layer.op_type), []).append(t)
    layers = []
    for (name, op), members in grouped.items():
        effects = {part: sum(origins[t.name].effects[part] for t in members) for part in PARTS}
        layers.append(LayerShare(name, op, tuple(t.name for t in members), effects))
    return tuple(sorted(layers, key=lambda layer: -layer.effect))


def _blocks(pair: Pair, layers: Sequence[LayerShare]) -> tuple[LayerShare, ...]:
    """The blocks with the effects of their layers, the largest first."""
    known, grouped = blocks(pair.quantized, pair.plan), dict[str, list[LayerShare]]()
    for layer in layers:
        grouped.setdefault(known.get(layer.name, layer.name), []).append(layer)
    made = (summed(name, "block", members) for name, members in grouped.items())
    return tuple(sorted(made, key=lambda block: -block.effect))
