"""Curvature: the oracles are jax.hessian and jacobians of the same function, on small networks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jq
from jq import research
from jq.research.losses import losses, probe
from tests.research.conftest import CLASSES

SAMPLES = 3


@pytest.fixture(scope="module")
def case(small):
    graph, _, images = small
    return graph, images[:SAMPLES]


def scores_of(params, x, shift, name):
    """The network in lax's plainest form, with one of its tensors shifted."""
    params = {k: v + shift if k == name else v for k, v in params.items()}
    x = x[None] + (shift if name == "x" else 0)

    def conv(x, layer, **options):
        y = jax.lax.conv_general_dilated(x, params[f"{layer}.w"], **options)
        return y + params[f"{layer}.b"][:, None, None]

    y = jax.nn.relu(conv(x, "stem", window_strides=(2, 2), padding=[(1, 1)] * 2)) + (
        shift if name == "stem.relu" else 0
    )
    d = jax.nn.relu(conv(y, "deep", window_strides=(1, 1), padding=[(1, 1)] * 2, feature_group_count=8))
    total = conv(d, "point", window_strides=(1, 1), padding=[(0, 0)] * 2) + y
    return (jnp.mean(total, (2, 3)) @ params["head.w"] + params["head.b"])[0]


SHAPES = {"x": (1, 3, 9, 9), "stem.relu": (1, 8, 5, 5), "stem.w": (8, 3, 3, 3), "deep.w": (8, 1, 3, 3)}


def kl_hessian(z):
    p = jax.nn.softmax(z)
    return jnp.diag(p) - jnp.outer(p, p)


@pytest.mark.parametrize("loss", ["kl", "mse", "cosine"])
def test_a_probe_has_the_hessian_of_its_loss_as_second_moment(loss):
    z = jnp.asarray(np.random.default_rng(1).standard_normal((1, 5)), jnp.float32)
    expected = jax.hessian(lambda d: losses({"z": z}, {"z": z + d[None]})[loss])(jnp.full(5, 1e-6))
    keys = jax.random.split(jax.random.key(0), 5_000)
    v = jax.vmap(lambda key: probe(loss, {"z": z}, key)["z"][0])(keys)
    np.testing.assert_allclose(v.T @ v / len(v), expected, atol=0.08 * float(jnp.abs(expected).max()))


def test_fisher_is_the_diagonal_of_the_gauss_newton_matrix(case):
    graph, images = case
    found = research.fisher(graph, images, tensors=list(SHAPES), probes=200)
    for name, shape in SHAPES.items():

        def diagonal(x, name=name, shape=shape):
            z = scores_of(graph.params, x, jnp.zeros(shape), name)
            jacobian = jax.jacobian(lambda s: scores_of(graph.params, x, s, name))(jnp.zeros(shape)).reshape(
                CLASSES, -1
            )
            return jnp.einsum("ia,ij,ja->a", jacobian, kl_hessian(z), jacobian).reshape(shape)

        expected = np.mean([diagonal(x) for x in images], axis=0)
        axis = 0 if name in graph.params else 1
        expected = expected.sum(tuple(i for i in range(4) if i != axis))
        np.testing.assert_allclose(found[name], expected, rtol=0.25, atol=0.02 * expected.max())
        assert found[name].sum() == pytest.approx(expected.sum(), rel=0.1)


@pytest.mark.parametrize(("name", "labelled"), [("stem.relu", True), ("deep.w", False), ("deep.w", True)])
def test_hessian_trace(case, name, labelled):
    graph, images = case
    labels = np.array([0, 3, 1])

    @jax.jit
    def hessian(x, label):
        def value(shift):
            z = scores_of(graph.params, x, shift, name)
            own = scores_of(graph.params, x, jnp.zeros(SHAPES[name]), name)
            return -jax.nn.log_softmax(z)[label] if labelled else losses({"z": own[None]}, {"z": z[None]})["kl"]

        size = int(np.prod(SHAPES[name]))
        return jax.hessian(value)(jnp.zeros(SHAPES[name])).reshape(size, size)

    probes = 100
    found = research.hessian_trace(graph, images, tensors=[name], labels=labels if labelled else None, probes=probes)
    each = np.array([hessian(x, label) for x, label in zip(images, labels, strict=True)])
    expected = np.mean([np.trace(h) for h in each])
    # Of random signs, r'Hr has the variance 2 |H|^2 off the diagonal.
    variance = [2 * (np.square(h).sum() - np.square(np.diag(h)).sum()) / probes for h in each]
    assert found[name] == pytest.approx(expected, abs=float(4 * np.sqrt(np.sum(variance)) / SAMPLES), rel=1e-3)


def test_one_seed_gives_the_same_numbers(case):
    graph, images = case
    one, two, other = (research.fisher(graph, images, tensors=["deep.w"], seed=s)["deep.w"] for s in (0, 0, 1))
    assert (one == two).all()
    assert (one != other).any()


def test_mistakes_are_named(case):
    graph, images = case
    with pytest.raises(jq.ConfigError, match="no tensor 'deep"):
        research.fisher(graph, images, tensors=["deep.v"])
    with pytest.raises(jq.ConfigError, match="top1"):
        research.fisher(graph, images, loss="top1")
    with pytest.raises(jq.ConfigError, match="labels"):
        research.hessian_trace(graph, images, labels=[1])
