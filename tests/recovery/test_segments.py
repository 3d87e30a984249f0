"""The oracle is `jq.fake_quant` of the whole network, and numpy for the losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jq
from jq.arithmetic.numerics import power_of_two
from jq.recovery.exponents.segments import Segments, Shifts, blocks_of, is_shift
from tests.research.networks import images, planned, residual

CONFIG = jq.presets["XINT8"]


def outputs(plan):
    return np.asarray(jq.fake_quant(residual())(residual().params, plan, {"x": images()})["y"], np.float64)


def mse(have, want):
    return np.square(have - want).sum(1) / np.square(want).sum(1)


def kl(have, want):
    have, want = (v - np.log(np.exp(v).sum(1, keepdims=True)) for v in (have, want))
    return (np.exp(want) * (want - have)).sum(1)


def coarser(plan, tensor, octaves=1):
    return plan.replace({tensor: dataclasses.replace(plan[tensor], scale=plan[tensor].scale * np.float32(2**octaves))})


@pytest.mark.parametrize("loss", [mse, kl])
def test_losses_are_those_of_the_whole_network_from_every_segment(loss):
    kept, apart = blocks_of(residual(), images(), CONFIG, apart=4)
    segments = Segments.of(residual(), {}, planned(), loss.__name__, {"x": images()[:1]})
    assert len(segments.parts) > 2
    y = np.asarray(jq.trace(residual())(residual().params, {"x": images()})["y"], np.float64)
    seen = np.arange(24) % 4 != 3
    states, parents = segments.begin(kept), [0, 0]
    ways = [planned(), coarser(planned(), "s")]
    for s in range(len(segments.parts)):
        found = np.concatenate(list(segments.losses(s, ways, parents, states, kept)), 1)
        for plan, own in zip(ways, found, strict=True):
            np.testing.assert_allclose(own, loss(outputs(plan), y)[seen], rtol=1e-3, atol=1e-7)
        if s + 1 < len(segments.parts):
            states, parents = segments.advance(s, ways, parents, states), [0, 1]
    last = np.concatenate(list(segments.losses(0, ways, [0, 0], segments.begin(apart), apart)), 1)
    np.testing.assert_allclose(last[1], loss(outputs(ways[1]), y)[~seen], rtol=1e-3, atol=1e-7)


def test_a_short_block_is_filled_up_and_does_not_count():
    kept, apart = blocks_of(residual(), images(), CONFIG, apart=4)
    assert sum(int(b.valid.sum()) for b in kept) == 18
    assert sum(int(b.valid.sum()) for b in apart) == 6
    assert len({b.valid.size for b in kept}) == 1


@pytest.mark.parametrize("exponent", [-125, -7, 0, 3, 110])
def test_shifts_round_as_the_plan_does(exponent, rng):
    x = np.ldexp(rng.uniform(-300, 300, 4096).astype(np.float32), exponent)
    x[:600] = np.ldexp(np.arange(-300, 300, dtype=np.float32) + 0.5, exponent)  # ties
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0  # the device flushes them
    plan = planned().replace({"r1": dataclasses.replace(planned()["r1"], scale=power_of_two(exponent))})
    have = jax.jit(lambda plan, x: Shifts(plan, frozenset(["r1"])).fake_quant("r1", x))(plan, jnp.asarray(x))
    np.testing.assert_array_equal(have, plan.fake_quant("r1", x))


def test_what_is_no_shift_is_rounded_by_the_plan_itself(rng):
    odd = dataclasses.replace(planned()["r1"], scale=np.float32(0.3))
    x = rng.standard_normal(100).astype(np.float32)
    assert not is_shift(odd)
    assert is_shift(planned()["r1"])
    plan = planned().replace({"r1": odd})
    np.testing.assert_array_equal(Shifts(plan, frozenset()).fake_quant("r1", x), plan.fake_quant("r1", x))
