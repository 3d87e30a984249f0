"""The oracles: trying everything, the noise that `jq.equalize` predicts, and the float network's own outputs."""

import itertools

import numpy as np
import pytest

import jq
from jq.recovery.equalization.channels import measure
from jq.recovery.equalization.groups import FIXED, find_groups
from jq.recovery.equalization.noise import Activation, predict
from jq.research import equalize_pow2
from jq.research.integer_factors import _NEAR, _costs, by_program, cheapest, integer_exponents
from tests.research.networks import images, residual

CONFIG = jq.presets["XINT8"]


def total(costs, choice):
    return sum(min(c[k, range(len(choice)), choice].sum() for k in range(len(c))) for c in costs)


def random_costs(rng, channels, kinds, forbidden=False):
    costs = [rng.exponential(size=(k, channels, len(_NEAR))) ** 3 for k in kinds]
    if forbidden:
        costs[0][:, 0, -2:] = np.inf
    return costs


@pytest.mark.parametrize("solve", [cheapest, by_program])
@pytest.mark.parametrize("forbidden", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_cheaper_than_what_is_found(solve, forbidden, seed):
    costs = random_costs(np.random.default_rng(seed), 4, (3, 2, 4), forbidden)
    best = min(total(costs, list(choice)) for choice in itertools.product(range(len(_NEAR)), repeat=4))
    assert total(costs, solve(costs)) == pytest.approx(best, rel=1e-9)


def test_many_steps_go_to_the_solver_and_come_back_as_good():
    costs = random_costs(np.random.default_rng(5), 5, (5,) * 6)  # 15,625 combinations
    best = min(total(costs, list(choice)) for choice in itertools.product(range(len(_NEAR)), repeat=5))
    assert total(costs, cheapest(costs)) == pytest.approx(best, rel=1e-9)


def noise_of(graph, data):
    groups = find_groups(graph)
    return predict(graph, groups, measure(graph, groups, data, CONFIG), CONFIG)


def noise_without_clipping(tensor, f):
    """At the least power of two that reaches the largest value, written from the definition."""
    if isinstance(tensor, Activation):
        f = f[tensor.classes]
        step = 2.0 ** np.ceil(np.log2((tensor.seen.reach * f).max() / tensor.grid.codes))
        lost = np.minimum((step / f) ** 2 / 12 * tensor.seen.active, tensor.seen.power)
        return (lost * tensor.importance.white).sum()
    up, down = f[tensor.made], np.broadcast_to(f[tensor.read], tensor.size.shape[:2])
    step = 2.0 ** np.ceil(np.log2((tensor.size * (up[:, None] / down)[..., None]).max() / tensor.grid.codes))
    each = step**2 / 12 * tensor.size.shape[2] * tensor.power * down**2
    return (each.sum(1) * tensor.importance / up**2).sum()


def test_costs_are_the_noise_of_each_tensor_at_the_step_that_clips_nothing(rng):
    noise = noise_of(residual(), images())
    now = rng.integers(-1, 2, noise.groups.count).astype(float)
    now[FIXED] = 0
    checked = 0
    for g in set(noise.groups.group.tolist()) - {FIXED}:
        classes = np.flatnonzero(noise.groups.group == g)
        choice = rng.integers(0, len(_NEAR), len(classes))
        then = now.copy()
        then[classes] += _NEAR[choice]
        for tensor in (*noise.activations, *noise.weights):
            if (costs := _costs(tensor, now, classes)) is not None:
                own = costs[:, range(len(classes)), choice].sum(1)
                assert own.min() == pytest.approx(noise_without_clipping(tensor, np.exp2(then)), rel=1e-5)
                checked += 1
    assert checked > 6


def test_the_float_network_stays_bit_by_bit_and_the_noise_is_less():
    graph = residual()
    scales = np.float32(2.0) ** np.array([3, -3, 2, -2, 0, 1, -1, 4], np.float32)
    shape = scales[:, None, None, None]
    spoiled = graph.with_arrays(
        {
            **graph.arrays,
            "w1": graph.params["w1"] * 1,
            "w2": graph.params["w2"] * shape,
            "b2": graph.params["b2"] * scales,
            "w3": graph.params["w3"] / scales[None, :, None, None],
        }
    )
    found = equalize_pow2(spoiled, CONFIG, images())
    fn, x = jq.trace(spoiled), {"x": images()}
    np.testing.assert_array_equal(jq.trace(found)(found.params, x)["y"], fn(spoiled.params, x)["y"])
    for name, array in found.params.items():
        ratio = np.log2(np.abs(array[array != 0] / spoiled.params[name][array != 0]))
        np.testing.assert_array_equal(ratio, np.rint(ratio))
    before, after = (noise_of(g, images()).total(np.ones(find_groups(g).count)) for g in (spoiled, found))
    assert after < 0.7 * before


def test_no_factor_is_as_good_as_it_gets():
    noise = noise_of(residual(), images())
    exponents = integer_exponents(noise)
    assert exponents[FIXED] == 0
    assert noise.total(np.exp2(exponents)) <= noise.total(np.ones(noise.groups.count))


def test_float_scales_are_refused():
    with pytest.raises(jq.ConfigError, match="needs scale='power_of_two'"):
        equalize_pow2(residual(), "A8W8", images())


def test_factors_that_are_measured_to_be_worse_are_not_taken(monkeypatch):
    def uneven(noise):
        exponents = 5 * (np.arange(noise.groups.count) % 2)
        exponents[FIXED] = 0
        return exponents

    monkeypatch.setattr("jq.research.integer_factors.integer_exponents", uneven)
    graph = residual()
    assert equalize_pow2(graph, CONFIG, images()) is graph
    assert equalize_pow2(graph, CONFIG) is not graph  # nothing to measure with
