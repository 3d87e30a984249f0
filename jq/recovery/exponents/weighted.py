"""Errors of rounding, weighed by their effect on the outputs: MinMSE with squared gradients.

To first order an error e of a tensor changes the outputs by J e, and the square of a random projection u of that is,
on average, |J e|^2. Its gradient g = J'u gives, of errors that come independently, the sum of g^2 e^2: the error
table of calibration with weights. One streaming pass of the float network and its gradients makes it for all
exponents in question. Values that the codes cannot reach are cut off to one side, and such errors add up: the square of
the sum of g e counts that, but is noisy. The sum of both decides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic import layout
from jq.arithmetic.exponents import LONGEST, error_sums
from jq.arithmetic.losses import classes_axis
from jq.arithmetic.numerics import inverse_power
from jq.data.stream import concurrently
from jq.graph import Graph
from jq.plan import Plan
from jq.readings.fake import as_planned
from jq.readings.hooks import Hook, needing_gradients
from jq.readings.packing import pack
from jq.readings.tracing import trace
from jq.recovery.exponents.descent import Moves, Step, Way
from jq.recovery.exponents.segments import Loss, SampleBlock

Array = Any
_FEW = 4  # samples at once
_NEAR = (2, 1, 0, -1, -2, -3)  # exponents that are compared, from the plan's own


def at_least_cost(
    graph: Graph, blocks: Sequence[SampleBlock], way: Way, moves: Moves, loss: Loss, key: Array
) -> Iterator[Way]:
    """Yield ways to the plan whose activations have the exponents of least weighted error, each with those that move with
    it: first those that gain most by that.
    """
    groups = [g for g in moves.groups if all(t in way.plan.activations for t in g)]
    near = {g: [int(way.plan[g[0]].exponent) + n for n in _NEAR] for g in groups}
    with needing_gradients("method='weighted'"):
        tables = weighted_errors(graph, way.plan, blocks, {t: near[g] for g in groups for t in g}, loss, key)
    samples, here = sum(int(b.valid.sum()) for b in blocks), _NEAR.index(0)
    costs = {g: sum(tables[t].sum(0) for t in g) / samples for g in groups}
    for group in sorted(groups, key=lambda g: costs[g].min() - costs[g][here]):
        for k in np.argsort(costs[group], kind="stable").tolist():
            if k == here:
                break
            if (plan := moves.to(way.plan, group, near[group][k])) is not None:
                gain = float(costs[group][here] - costs[group][k])
                way = way.then(plan, Step(group, near[group][here], near[group][k], gain))
                yield way
                break


def weighted_errors(
    graph: Graph,
    plan: Plan,
    blocks: Sequence[SampleBlock],
    exponents: Mapping[str, Sequence[int]],
    loss: Loss,
    key: Array,
) -> dict[str, np.ndarray]:
    """Return [2, exponents] of some activations: estimates of what rounding each adds to the loss of all samples.

    First as if errors were independent, then of the errors as they are, in one random direction for each sample.
    """
    graph = as_planned(graph, plan)
    fn, params, names = trace(graph), pack(graph), frozenset(exponents)
    grids = {t: plan.activations[t].grid for t in names}
    places = {t: jnp.asarray(e, jnp.int32) for t, e in exponents.items()}

    def of_sample(params: Any, inputs: Any, key: Array) -> dict[str, Array]:
        def outputs(deltas: Mapping[str, Array]) -> tuple[Any, dict[str, Array]]:
            seen: dict[str, Array] = {}

            def probed(name: str, value: Any) -> Any:  # deltas are added for their gradients
                def added(x: Array) -> Array:
                    seen[name] = jnp.asarray(x)
                    return seen[name] + deltas[name] if name in deltas else seen[name]

                return layout.mapped(added, value)

            return fn.quantized(params, Hook(names, probed), inputs), seen

        shapes = jax.eval_shape(outputs, {})[1]
        zeros = {k: jnp.zeros(v.shape, v.dtype) for k, v in shapes.items()}
        y, pull, seen = jax.vjp(outputs, zeros, has_aux=True)
        keys = {k: jax.random.fold_in(key, i) for i, k in enumerate(sorted(y))}
        (gradients,) = pull({k: _projected(loss, y[k], keys[k]) for k in keys})
        return {k: _table(x, gradients[k], places[k], grids[k]) for k, x in seen.items()}

    @jax.jit
    def step(params: Any, inputs: Any, valid: Array, key: Array) -> dict[str, Array]:
        sums = jax.vmap(lambda x, k: of_sample(params, x, k))(inputs, jax.random.split(key, len(valid)))
        return jax.tree.map(lambda v: jnp.tensordot(valid.astype(jnp.float32), v, 1), sums)

    given: list[tuple[Any, ...]] = []
    for block in blocks:
        for start in range(0, len(block.valid), _FEW):
            at = (np.arange(start, start + _FEW)).clip(max=len(block.valid) - 1)
            valid = block.valid[at] & (np.arange(start, start + _FEW) < len(block.valid))
            given.append(({k: v[at] for k, v in block.inputs.items()}, valid, jax.random.fold_in(key, len(given))))
    total: dict[str, np.ndarray] = {}
    for sums in concurrently(functools.partial(step, params), *zip(*given, strict=True)):
        for k, v in sums.items():
            total[k] = total.get(k, 0) + np.asarray(v, np.float64)
    return total


def _projected(loss: Loss, y: Array, key: Array) -> Array:
    """The gradient of a random projection of an output such that its variance is the loss, to second order."""
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return np.zeros(y.shape, jax.dtypes.float0)
    draw = jax.random.normal(key, y.shape)
    if loss == "mse":
        return draw * lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(y)), 1e-30))
    axis = classes_axis(y)
    p = jax.nn.softmax(y, axis)
    root = jnp.sqrt(p) * draw
    return (root - p * jnp.sum(root, axis, keepdims=True)) * jnp.sqrt(0.5)


def _table(x: Array, gradient: Array, exponents: Array, grid: Any) -> Array:
    """[2, candidates]: the sum of squares, and the square of the sum, of errors times gradients."""
    x, gradient = (jnp.pad(v.reshape(-1), (0, -x.size % min(x.size, LONGEST))) for v in (x, gradient))
    least, most = grid.qmin - grid.middle, grid.qmax - grid.middle
    sums = error_sums(x, inverse_power(exponents), least, most, slopes=gradient)
    return jnp.stack([sums.square, jnp.square(sums.total)]) * jnp.ldexp(jnp.float32(1), 2 * exponents)
