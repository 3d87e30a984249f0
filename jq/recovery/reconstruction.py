"""Reconstruction: units are tuned by gradient so that, on their inputs in the quantized network, their outputs are those
of the float network.

Weights and biases are learned through their rounding, and so are thresholds, as exponents that are rounded too:
Jain et al., Trained Quantization Thresholds, arXiv:1903.08066. Units are blocks as in Li et al., BRECQ
(arXiv:2102.05426), whose outputs count by the Fisher information of their channels, and inputs may be mixed with the
float network's, as in Wei et al., QDrop (arXiv:2203.05740). As in BRECQ, too, weights may instead stay between the two
codes beside them, by AdaRound's sigmoid, which a regularizer drives to one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jq.arithmetic import layout
from jq.arithmetic.formats import Integer
from jq.arithmetic.losses import mse, power
from jq.arithmetic.numerics import nearest
from jq.data.stream import concurrently
from jq.graph import Graph
from jq.ops.linear import linear_layer
from jq.plan import Plan, QParams
from jq.readings.fake import fake_quant
from jq.readings.patterns import Pattern
from jq.readings.tracing import trace
from jq.recovery.adaquant import falling
from jq.recovery.adaround import annealed, hard, initial, regularizer, soft
from jq.recovery.parts import Unit, program
from jq.recovery.streams import Kept, joined
from jq.recovery.walk import Site, Tensors, added, values

Array = Any
_DECIDES = 4  # chunks of the data, of which one decides
_LOOKS = 4  # states on the way of the learning that are looked at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reconstruction:
    """Settings of a unit's tuning. Learning rates of weights and biases are in codes per step, at first.

    A pytree of its numbers: programs depend on the shapes of batches, and on whether inputs are mixed.
    """

    steps: int = 100
    batch: int = dataclasses.field(default=10, metadata={"static": True})
    weights: float = 0.05
    biases: float = 0.02
    exponents: float = 0.01  # octaves per step; 0 leaves the scales
    drop: float | None = None  # share of the inputs that come from the float network
    logits: float = 0.1  # per step, of weights between two codes
    pressure: float = 1.0  # of the regularizer's mean on these, beside the error relative to that at first
    warm: float = 0.2  # share of the steps without it
    beta: tuple[float, float] = (20.0, 2.0)
    # Errors count by this power of theirs: 2 by their squares, more by the largest of them.
    norm: float = dataclasses.field(default=2.0, metadata={"static": True})
    # Samples of a batch whose gradients are computed together, as memory allows.
    at_once: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Tuned:
    """The learned values of a unit."""

    arrays: Mapping[str, Array]  # weights and biases; while weights lie between two codes, the logits of these
    exponents: Mapping[tuple[str, ...], Array]  # of tensors, those that have one together: real numbers

    def plan(self, plan: Plan) -> Plan:
        """The plan with these exponents, rounded."""
        scales = {name: jnp.exp2(nearest(e)) for group, e in self.exponents.items() for name in group}
        return plan.replace({k: dataclasses.replace(plan[k], scale=s) for k, s in scales.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Between:
    """Weights of the float network that stay between the two codes beside them; none, where they are learned themselves."""

    weights: Mapping[str, Array]
    scales: Mapping[str, Array]  # along them

    @classmethod
    def of(cls, site: Site, names: Sequence[str]) -> Between:
        """The named weights of a site, which have codes around zero."""
        return cls({k: site.given[k] for k in names}, {k: _step_of(site, k) for k in names})

    def logits(self) -> dict[str, Array]:
        """The logits of the weights as they are in the float network."""
        return {k: initial(w, self.scales[k]) for k, w in self.weights.items()}

    def rounded(self, tuned: Tuned, plan: Plan, way: Callable[..., Array]) -> dict[str, Array]:
        """The arrays with weights in place of their logits, by `soft` or `hard`."""
        grids = {k: plan.weights[k].grid for k in self.weights}
        made = {k: way(w, tuned.arrays[k], self.scales[k], grids[k]) for k, w in self.weights.items()}
        return {**tuned.arrays, **made}

    def regularizer(self, tuned: Tuned, beta: Array) -> Array:
        """How far weights are from codes, 1 for half a step, on average; 0 without weights."""
        count = max(1, sum(w.size for w in self.weights.values()))
        return sum((regularizer(tuned.arrays[k], beta) for k in self.weights), jnp.float32(0)) / count


def tune_unit(
    site: Site,
    how: Reconstruction,
    groups: Sequence[tuple[str, ...]],
    allowed: Callable[[Site], bool],
    importance: Mapping[str, Array],
    key: Array,
    scaled: Sequence[str] = (),
    softly: Sequence[str] = (),
) -> tuple[Site, float, float]:
    """Return the site tuned, if that lowers its error on data that it was not tuned on.

    One chunk of the data in four decides, and the others are learned from; with fewer, all do both. `groups` of
    activations may have other powers of two as scales, each group as one, where that is `allowed`. Neighbouring exponents
    are tried first; then they are learned with the weights, if the result is allowed, and so are those of the weights
    `scaled`. Weights named `softly` begin as in the float network, and stay between two codes of the scale that they have.
    Of the states on the way of the learning, the best is taken.
    """
    graph = site.unit.pattern.graph
    layers = [graph.nodes[site.unit.nodes.index(n)] for n in site.unit.layers]
    views = [layer for n in layers if (layer := linear_layer(graph, n)) is not None]
    weights, biases = {v.weight for v in views}, {v.bias for v in views if v.bias is not None}
    rates = dict.fromkeys(weights, how.weights) | dict.fromkeys(biases, how.biases)
    steps = {k: rate * _step_of(site, k) for k, rate in rates.items()}
    between = Between.of(site, [k for k in softly if k in weights])
    steps |= dict.fromkeys(between.weights, jnp.float32(how.logits))
    searched = (*groups, *((k,) for k in scaled if k not in between.weights))
    start = Tuned(
        {k: site.params[k] for k in steps},
        {group: jnp.log2(jnp.asarray(site.plan[group[0]].scale)) for group in searched},
    )
    apart = len(site.valid) >= _DECIDES
    learned = [i for i in range(len(site.valid)) if not apart or (i + 1) % _DECIDES]
    deciding = slice(_DECIDES - 1, None, _DECIDES) if apart else slice(None)
    codes, targets, valid = site.codes[deciding], site.targets[deciding], site.valid[deciding]
    whole = [
        {k: joined([chunks[i][k] for i in learned]) for k in chunks[0]}
        for chunks in (site.codes, site.floats, site.targets)
    ]
    scale = {k: importance.get(k, jnp.ones(())) / power(y.value) / len(whole[2]) for k, y in whole[2].items()}
    samples = sum(int(site.valid[i].sum()) for i in learned)

    def error(trial: Tuned) -> float:
        step = functools.partial(_error, site.unit.pattern, how.norm, trial, site.params, site.plan, scale)
        return float(added(concurrently(step, codes, targets, valid))) / sum(int(v.sum()) for v in valid)

    old = best = error(start)
    for group in groups:
        for step in (-1, 1):
            trial = dataclasses.replace(start, exponents={**start.exponents, group: start.exponents[group] + step})
            if allowed(_moved(site, trial)) and (new := error(trial)) < best:
                start, best = trial, new
                break
    tuned, first = start, dataclasses.replace(start, arrays={**start.arrays, **between.logits()})
    for rate in dict.fromkeys((how.exponents if start.exponents else 0.0, 0.0)):
        rates_of = Tuned(steps, dict.fromkeys(start.exponents, jnp.float32(rate)))
        way = _optimized(
            site.unit.pattern, samples, how, first, rates_of, between, site.params, site.plan, scale, *whole, key
        )
        trials = [_state(way, i) for i in range(_LOOKS)]
        if allowed(_moved(site, trials[-1])):
            for trial in trials:
                if allowed(_moved(site, trial)) and (new := error(trial)) < best:
                    tuned, best = trial, new
            break
    return (_moved(site, tuned), old, best) if best < old else (site, old, old)


def _state(way: Tuned, index: int) -> Tuned:
    """One of the states on the way of the learning, with exponents as whole numbers."""
    state = jax.tree.map(lambda a: a[index], way)
    return dataclasses.replace(state, exponents={k: jnp.round(e) for k, e in state.exponents.items()})


def _moved(site: Site, tuned: Tuned) -> Site:
    """The site with the learned values; unchanged ones stay the same objects."""
    before, after = site.plan, tuned.plan(site.plan)
    scales = {k: np.asarray(after[k].scale, np.float32) for group in tuned.exponents for k in group}
    changed = {
        k: dataclasses.replace(before[k], scale=s[()])
        for k, s in scales.items()
        if not np.array_equal(s, np.asarray(before[k].scale, np.float32))
    }
    return site.replace(params=site.params | dict(tuned.arrays), plan=site.plan.replace(changed))


def _step_of(site: Site, name: str) -> Array:
    """The step between the codes of an array; for one that is not quantized, 1/128 of its largest magnitude."""
    qparams: QParams | None = site.plan.weights.get(name)
    if qparams is None or not isinstance(qparams.grid, Integer) or qparams.grid.bits > 16:
        return jnp.maximum(jnp.max(jnp.abs(site.params[name])), 1e-12) / 128
    scale = jnp.asarray(qparams.scale)
    return scale if qparams.axis is None else layout.along(scale, site.params[name].ndim, qparams.axis)


def _off(y: Mapping[str, Array], z: Mapping[str, Array], scale: Mapping[str, Array], norm: float) -> Array:
    """The error of each sample: squares by channel, weighed, or another power of the differences."""

    def of(name: str) -> Array:
        weight = scale[name].reshape(-1, *(1,) * max(0, y[name].ndim - 3)) if scale[name].ndim else scale[name]
        if norm == 2:
            return jax.vmap(mse, (0, 0, None))(y[name], z[name], weight)
        return jax.vmap(lambda y, z: jnp.mean((weight * jnp.square(y - z)) ** (norm / 2)))(y[name], z[name])

    return sum(of(name) for name in y)


@program(2)
def _optimized(
    pattern: Pattern, samples: int, how: Reconstruction, start: Tuned, rates: Tuned, between: Between,
    params: Mapping[str, Array], plan: Plan, scale: Mapping[str, Array], codes: Tensors, floats: Tensors,
    targets: Tensors, key: Array,
) -> Tuned:  # fmt: skip
    """States on the way of Adam on batches, with rates that fall to zero on a cosine; their weights are on codes."""
    fn = fake_quant(pattern.graph)
    adam = optax.scale_by_adam(b2=0.99)

    def error(tuned: Tuned, index: Array, key: Array) -> Array:
        x, y = (_picked(t, index) for t in (codes, targets))
        if how.drop is not None:
            kept = _picked(floats, index)
            x = {k: jnp.where(jax.random.bernoulli(key, how.drop, v.shape), kept[k], v) for k, v in x.items()}
        # What lies between two codes is not rounded again.
        arrays, rest = between.rounded(tuned, plan, soft), tuned.plan(plan).replace(dict.fromkeys(between.weights))
        z = jax.vmap(lambda x: fn({**params, **arrays}, rest, x))(x)
        return jnp.mean(_off(y, z, scale, how.norm))

    def loss(tuned: Tuned, index: Array, key: Array, i: Array) -> Array:
        if not between.weights:
            return error(tuned, index, key)
        t = (i / how.steps - how.warm) / (1 - how.warm)
        pressure = between.regularizer(tuned, annealed(t, *how.beta))
        return error(tuned, index, key) / least + jnp.where(t > 0, how.pressure, 0) * pressure

    def step(i: Array, carry: tuple[Tuned, Any]) -> tuple[Tuned, Any]:
        tuned, state = carry
        chosen, mixed = jax.random.split(jax.random.fold_in(key, i))
        batch = min(how.batch, samples)
        parts = batch // math.gcd(batch, how.at_once or batch)
        index = jax.random.permutation(chosen, samples)[:batch].reshape(parts, -1)
        gradients = jax.lax.map(lambda p: jax.grad(loss)(tuned, *p, i), (index, jax.random.split(mixed, parts)))
        update, state = adam.update(jax.tree.map(lambda g: jnp.mean(g, 0), gradients), state)
        return jax.tree.map(lambda v, u, r: v - falling(r, i, how.steps) * u, tuned, update, rates), state

    def stretch(carry: tuple[Tuned, Any], number: Array) -> tuple[tuple[Tuned, Any], Tuned]:
        ends = number * how.steps // _LOOKS, (number + 1) * how.steps // _LOOKS
        carry = jax.lax.fori_loop(*ends, step, carry)
        return carry, dataclasses.replace(carry[0], arrays=between.rounded(carry[0], plan, hard))

    # The error of nearest rounding on a batch, beside which the regularizer's weight means the same for all units.
    sides = {k: jnp.where(start.arrays[k] >= 0, jnp.inf, -jnp.inf) for k in between.weights}
    decided = dataclasses.replace(start, arrays={**start.arrays, **sides})
    least = error(decided, jnp.arange(min(how.batch, samples)), key) if sides else 1.0
    return jax.lax.scan(stretch, (start, adam.init(start)), jnp.arange(_LOOKS))[1]


def _picked(tensors: Tensors, index: Array) -> dict[str, Array]:
    return {k: dataclasses.replace(t, array=t.array[index]).value for k, t in tensors.items()}


@program(2)
def _error(
    pattern: Pattern, norm: float, tuned: Tuned, params: Mapping[str, Array], plan: Plan, scale: Mapping[str, Array],
    codes: Tensors, targets: Tensors, valid: Array,
) -> Array:  # fmt: skip
    fn = fake_quant(pattern.graph)
    z = jax.vmap(lambda x: fn({**params, **tuned.arrays}, tuned.plan(plan), x))(values(codes))
    return jnp.sum(valid * _off(values(targets), z, scale, norm))


def fisher(graph: Graph, parts: Sequence[Unit], inputs: Mapping[str, Array], key: Array) -> dict[str, Array]:
    """Return the importance of each channel of the units' outputs for those of the network, 1 on average.

    The squared gradient of a random projection of the outputs is, on average, the diagonal of J'J.
    """
    seen = {k: Kept.halved(jnp.asarray(v)).value for k, v in inputs.items()}
    params = {k: jnp.asarray(v) for k, v in graph.params.items()}
    for unit in parts:
        own = unit.inside(params)
        seen |= unit.outside(_forward(unit.pattern, own, unit.inside({t: seen[t] for t in unit.inputs})))
    back: dict[str, Array] = {}
    for i, value in enumerate(graph.outputs):
        if value.name not in seen or not jnp.issubdtype(seen[value.name].dtype, jnp.floating):
            continue
        draw = jax.random.normal(jax.random.fold_in(key, i), seen[value.name].shape)
        back[value.name] = draw / jnp.sqrt(jnp.mean(jnp.square(seen[value.name])) + 1e-30)
    counts: dict[str, Array] = {}
    for unit in reversed(parts):
        outputs = [t for t in unit.outputs if jnp.issubdtype(seen[t].dtype, jnp.floating)]
        own = unit.inside(params)
        back |= {t: jnp.zeros_like(seen[t]) for t in outputs if t not in back}
        cotangent = unit.inside({t: back[t] for t in outputs})
        pulled = _backward(unit.pattern, own, unit.inside({t: seen[t] for t in unit.inputs}), cotangent)
        for t in outputs:
            square = jnp.square(back[t])
            channels = jnp.mean(square, tuple(i for i in range(square.ndim) if i != 2 or square.ndim < 3))
            counts[t] = channels / jnp.maximum(jnp.mean(channels), 1e-30)
        for t, g in unit.outside(pulled).items():
            back[t] = back[t] + g if t in back else g
    return counts


@program(1)
def _forward(pattern: Pattern, params: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
    return jax.vmap(lambda x: trace(pattern.graph)(params, x))(dict(inputs))


@program(1)
def _backward(
    pattern: Pattern, params: Mapping[str, Array], inputs: Mapping[str, Array], cotangent: Mapping[str, Array]
) -> dict[str, Array]:
    """The gradients of the inputs, those of numbers that are no floats left out: no gradient passes integers."""
    moving = {k: v for k, v in inputs.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def outputs(moving: Mapping[str, Array]) -> dict[str, Array]:
        made = _forward(pattern, params, {**inputs, **moving})
        return {k: made[k] for k in cotangent}

    _, pull = jax.vjp(outputs, moving)
    return pull(dict(cotangent))[0]
