"""Sequential calibration: each tensor's exponent is searched on the outputs of the quantized network before it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic.exponents import NEIGHBOURS
from jq.arithmetic.losses import mse, power
from jq.data.sources import in_memory
from jq.data.stream import concurrently
from jq.graph import Graph
from jq.plan import Plan
from jq.readings.fake import fake_quant
from jq.readings.patterns import Pattern
from jq.recovery.exponents.descent import Moves, Step, Way
from jq.recovery.exponents.segments import SampleBlock
from jq.recovery.parts import program, units
from jq.recovery.walk import Site, Tensors, added, store_of, values, walk

Array = Any


def in_turn(
    graph: Graph, blocks: Sequence[SampleBlock], way: Way, moves: Moves, params: Mapping[str, Any]
) -> Iterator[Way]:
    """Yield ways to the plan whose activations have, layer by layer, the exponents that bring the layer's output nearest
    to that of the float network, on the outputs of the layers before it with their own new exponents.

    Tensors that must be alike get the exponent of the first of them.
    """
    ways = [way]
    first = {g[0]: g for g in moves.groups if all(t in way.plan.activations for t in g)}

    def tune(site: Site) -> tuple[Site, float, float]:
        def off(plan: Plan) -> float:
            step = functools.partial(_off, site.unit.pattern, site.params, site.unit.plan(plan))
            return float(added(concurrently(step, site.codes, site.targets, site.valid)))

        before = best = off(ways[-1].plan)
        for name in site.unit.outside(site.plan.activations):
            group, here, there = first.get(name, ()), ways[-1], ways[-1]
            for near in NEIGHBOURS if group else ():
                exponent = int(here.plan[name].exponent)
                trial = moves.to(here.plan, group, exponent + near)
                if trial is not None and (loss := off(trial)) < best:
                    there, best = here.then(trial, Step(group, exponent, exponent + near, best - loss)), loss
            if there is not here:
                ways.append(there)
        return site.replace(plan=site.unit.plan(ways[-1].plan)), before, best

    samples = [{k: v[i] for k, v in b.inputs.items()} for b in blocks for i in np.flatnonzero(b.valid)]
    parts, store = units(graph, way.plan, "layer"), store_of(graph, way.plan, in_memory(samples), None)
    walk(graph, {**graph.params, **params}, way.plan, parts, store, tune)
    yield from ways[1:]


@program(1)
def _off(
    pattern: Pattern, params: Mapping[str, Array], plan: Plan, codes: Tensors, targets: Tensors, valid: Array
) -> Array:
    """Squared error of a unit's outputs against the float network's, relative to their power."""
    made = jax.vmap(lambda x: fake_quant(pattern.graph)(params, plan, x))(values(codes))
    pairs = [(target.value, made[name]) for name, target in targets.items()]
    return sum(jnp.sum(valid * jax.vmap(mse)(z, y)) / power(z) for z, y in pairs)
