"""Every fast form equals XLA's plain convolution, its gradients too, and the fast path is really taken."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jq
from jq.arithmetic import kernels

OPTIMIZED = True  # the compiled program is looked at

# channels, filters, group, kernel, strides, dilations, pads
CASES = {
    "dense": (16, 6, 1, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))),
    "dense-asymmetric": (16, 6, 1, (3, 2), (1, 1), (1, 2), ((2, 0), (0, 1))),
    "dense-strided": (16, 6, 1, (3, 3), (2, 2), (1, 1), ((0, 1), (1, 0))),
    "dense-strided-dilated": (16, 6, 1, (3, 3), (2, 3), (2, 1), ((1, 2), (3, 1))),
    "stem": (3, 8, 1, (3, 3), (2, 2), (1, 1), ((0, 1), (0, 1))),
    "stem-dilated": (3, 8, 1, (3, 3), (1, 2), (2, 1), ((1, 1), (2, 1))),
    "pointwise-strided": (4, 6, 1, (1, 1), (2, 2), (1, 1), ((0, 0), (0, 0))),
    "depthwise": (8, 8, 8, (3, 3), (2, 2), (1, 1), ((1, 0), (0, 1))),
    "depthwise-multiplier": (8, 16, 8, (3, 2), (1, 1), (2, 1), ((1, 1), (1, 1))),
    "thin-groups": (24, 12, 6, (3, 3), (2, 1), (1, 2), ((1, 1), (0, 2))),
    "wide-groups": (64, 32, 2, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))),
    "1d": (32, 6, 1, (5,), (2,), (1,), ((2, 1),)),
    "1d-groups": (4, 6, 2, (5,), (2,), (1,), ((2, 1),)),
    "3d": (4, 6, 2, (3, 3, 3), (2, 1, 1), (1, 2, 1), ((1, 1), (0, 2), (1, 0))),
}


def operands(rng: np.random.Generator, case: tuple) -> tuple[jax.Array, jax.Array]:
    channels, filters, group, kernel, *_ = case
    x = rng.standard_normal((2, *(11, 13, 9)[: len(kernel)], channels), np.float32)
    w = rng.standard_normal((*kernel, channels // group, filters), np.float32)
    return jnp.asarray(x), jnp.asarray(w)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_conv_and_its_gradients_equal_the_plain_form(rng, case):
    _, _, group, _, strides, dilations, pads = case
    x, w = operands(rng, case)

    def run(lowering):
        def loss(x, w):
            y = kernels.conv(x, w, strides=strides, dilations=dilations, pads=pads, group=group, lowering=lowering)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, *grads

    for fast, plain in zip(
        jax.jit(run, static_argnums=0)("cpu"), jax.jit(run, static_argnums=0)("native"), strict=True
    ):
        np.testing.assert_allclose(fast, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_conv_transpose_equals_the_spread_form(rng, case):
    _, _, group, kernel, strides, _, crops = case
    x, w = operands(rng, case)
    args = {"strides": strides, "dilations": (1,) * len(kernel), "crops": crops, "group": group}
    np.testing.assert_allclose(
        kernels.conv_transpose(x, w, **args),
        kernels.conv_transpose(x, w, **args, lowering="native"),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
@pytest.mark.parametrize("size", [2, 3, 70])
def test_pools_equal_numpy(rng, dtype, size):
    x = rng.integers(-128, 127, (2, 75, 5, 3)).astype(dtype)
    low = np.iinfo(dtype).min if dtype == np.int8 else -np.inf
    pads, strides = ((1, 0), (2, 1)), (2, 1)
    grown = np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=low)
    windows = np.lib.stride_tricks.sliding_window_view(grown, (size, 3), (1, 2))[:, ::2]
    found = kernels.max_pool(jnp.asarray(x), (size, 3), strides, (1, 1), pads)
    np.testing.assert_array_equal(found, windows.max((-1, -2)))
    zeros = np.pad(x, ((0, 0), *pads, (0, 0)))
    sums = np.lib.stride_tricks.sliding_window_view(zeros.astype(np.int32), (size, 3), (1, 2))[:, ::2].sum((-1, -2))
    summed = kernels.sum_pool(jnp.asarray(x.astype(np.float32)), (size, 3), strides, (1, 1), pads)
    np.testing.assert_allclose(summed, sums, rtol=1e-6)


def test_int8_convolution_is_exact_at_the_extremes():
    """All -128 x -128 over 2048 channels: 3.0e8, far above what float32 holds exactly."""
    x, w = jnp.full((1, 4, 4, 2048), -128, jnp.int8), jnp.full((3, 3, 2048, 4), -128, jnp.int8)
    y = jax.jit(
        lambda x, w: kernels.conv(x, w, strides=(1, 1), dilations=(1, 1), pads=((0, 0), (0, 0)), dtype=jnp.int32)
    )(x, w)
    assert y.dtype == jnp.int32
    assert np.all(np.asarray(y) == 128 * 128 * 9 * 2048)


def convolutions(compiled: jax.stages.Compiled) -> tuple[int, int]:
    """How many convolutions the compiled program holds inside calls of the library, and outside."""
    text = compiled.as_text()
    library = set(re.findall(r"calls=(%[\w.]+)[^\n]*__ynn_fusion", text))
    bodies = re.findall(r"^(%[\w.]+) \(.*?^}", text, re.DOTALL | re.MULTILINE)
    inside = 0
    for name, body in zip(bodies, re.findall(r"^%[\w.]+ \((.*?)^}", text, re.DOTALL | re.MULTILINE), strict=True):
        inside += body.count(" convolution(") if name in library else 0
    return inside, text.count(" convolution(") - inside


needs_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the library is that of XLA's CPU backend")


@needs_cpu
@pytest.mark.parametrize("name", jq.zoo.models())
def test_every_dense_convolution_reaches_the_library(name):
    """So that a slow path cannot come back unseen. Depthwise ones become slices, pointwise ones products."""
    graph = jq.prepare(jq.load(jq.zoo.path(name)))
    convs = [n for n in graph.nodes if n.op_type == "Conv" and n.attrs["group"] == 1]
    dense = [n for n in convs if n.attrs["kernel_shape"] != (1, 1)]
    images = np.zeros((8, 1, 28, 28), np.float32)
    compiled = jax.jit(jq.trace(graph)).lower(jq.pack(graph), {"input": images}).compile()
    assert convolutions(compiled) == (len(dense), 0)


@needs_cpu
def test_gradients_reach_the_library_inside_a_scan():
    x, w = jnp.zeros((8, 28, 28, 64)), jnp.zeros((3, 3, 64, 64))  # XLA's own code takes small ones as quickly

    def loss(w, x):
        return jnp.sum(kernels.conv(x, w, strides=(1, 1), dilations=(1, 1), pads=((1, 1), (1, 1))) ** 2)

    def fit(w, x):
        return lax.scan(lambda w, _: (w - 1e-6 * jax.grad(loss)(w, x), None), w, None, length=3)[0]

    inside, outside = convolutions(jax.jit(fit).lower(w, x).compile())
    assert inside >= 2  # the forward and the weight's gradient
    assert outside == 0


@needs_cpu
def test_transposed_convolution_multiplies_no_zeros():
    """Two by two phases of one 3 x 3 kernel: a quarter of the work of the spread form."""
    x, w = jnp.zeros((1, 32, 32, 32)), jnp.zeros((4, 4, 32, 32))

    def flops(lowering):
        def run(x, w):
            return kernels.conv_transpose(
                x, w, strides=(2, 2), dilations=(1, 1), crops=((1, 1), (1, 1)), lowering=lowering
            )

        convs = [
            e for e in jax.make_jaxpr(run)(x, w).eqns if "conv" in str(e.primitive) or "custom_vjp" in str(e.primitive)
        ]
        (program,) = convs
        out, kernel = program.outvars[0].aval.shape, program.invars[1].aval.shape
        return np.prod(out) * np.prod(kernel[:-1])

    assert flops("cpu") * 3 < flops("native")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_empty_batch_stays_empty(rng, case):
    _, _, group, _, strides, dilations, pads = case
    x, w = operands(rng, case)
    window = {"strides": strides, "dilations": dilations, "group": group}
    for lowering in ("cpu", "native"):
        assert kernels.conv(x[:0], w, pads=pads, lowering=lowering, **window).shape[0] == 0
        assert kernels.conv_transpose(x[:0], w, crops=pads, lowering=lowering, **window).shape[0] == 0


@pytest.mark.parametrize("weights_too", [False, True])
def test_conv_under_vmap(rng, weights_too):
    x, w = operands(rng, CASES["dense"])
    xs, ws = jnp.stack([x, 2 * x]), jnp.stack([w, w + 1])

    def run(x, w):
        return kernels.conv(x, w, strides=(1, 1), dilations=(1, 1), pads=((1, 1), (1, 1)))

    found = jax.vmap(run, (0, 0 if weights_too else None))(xs, ws if weights_too else w)
    for i, y in enumerate(found):
        np.testing.assert_allclose(y, run(xs[i], ws[i] if weights_too else w), rtol=1e-4, atol=1e-4)


def test_taps_cover_the_window_in_order():
    places = [place for place, _ in kernels.taps(jnp.zeros((1, 5, 5, 1)), (2, 3), (1, 1), (1, 1), ((0, 0), (0, 0)), 0)]
    assert places == list(itertools.product(range(2), range(3)))


# ---------------------------------------------------------------------------------------------
# Integers: every form against sums of Python-sized integers
# ---------------------------------------------------------------------------------------------

INTEGER_CASES = CASES | {
    "stem-7x7": (3, 8, 1, (7, 7), (2, 2), (1, 1), ((3, 3), (3, 3))),
    "odd-channels": (6, 8, 1, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))),
    "large-window": (16, 8, 1, (7, 7), (1, 1), (1, 1), ((3, 3), (3, 3))),
    "one-channel": (1, 8, 1, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))),
    "pointwise": (40, 8, 1, (1, 1), (1, 1), (1, 1), ((0, 0), (0, 0))),
}


def summed(x: np.ndarray, w: np.ndarray, group: int, strides, dilations, pads) -> np.ndarray:
    """The convolution of integers in int64, tap by tap."""
    x, w = np.pad(x.astype(np.int64), [(0, 0), *pads, (0, 0)]), w.astype(np.int64)
    kernel, (depth, filters) = w.shape[:-2], w.shape[-2:]
    count = [
        (n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[1:-1], kernel, strides, dilations, strict=True)
    ]
    total = np.zeros((x.shape[0], *count, filters), np.int64)
    for place in itertools.product(*map(range, kernel)):
        cut = tuple(
            slice(p * d, p * d + (c - 1) * s + 1, s)
            for p, d, c, s in zip(place, dilations, count, strides, strict=True)
        )
        part, size = x[(slice(None), *cut)], filters // group
        for g in range(group):
            weight = w[place][:, g * size : (g + 1) * size]
            total[..., g * size : (g + 1) * size] += part[..., g * depth : (g + 1) * depth] @ weight
    return total


@pytest.mark.parametrize("extreme", [False, True], ids=["random", "extreme"])
@pytest.mark.parametrize("case", INTEGER_CASES.values(), ids=INTEGER_CASES)
def test_integer_conv_is_exact(rng, case, extreme):
    channels, filters, group, kernel, strides, dilations, pads = case
    shape = (2, *(11, 13, 9)[: len(kernel)], channels)
    values = [-128, 127] if extreme else np.arange(-128, 128)
    x = rng.choice(values, shape).astype(np.int8)
    w = rng.choice(values, (*kernel, channels // group, filters)).astype(np.int8)
    window = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    found = jax.jit(lambda x, w: kernels.conv(x, w, dtype=jnp.int32, **window))(x, w)
    np.testing.assert_array_equal(found, summed(x, w, group, strides, dilations, pads))


@pytest.mark.parametrize(("kernel", "channels"), [((3, 3), 512), ((1, 1), 4608), ((7, 7), 24)])
def test_integer_sums_beyond_what_float32_holds(kernel, channels):
    """All products are (-128)**2: partial sums pass 2**24, where a float32 form would drop low bits."""
    x = np.full((1, *kernel, channels), -128, np.int8)
    w = np.full((*kernel, channels, 2), -128, np.int8)
    x[..., 0], w[..., 0, :] = 127, 1  # so that the sum is no multiple of a power of two
    unit = {"strides": (1, 1), "dilations": (1, 1), "pads": ((0, 0), (0, 0))}
    found = np.asarray(jax.jit(lambda x, w: kernels.conv(x, w, dtype=jnp.int32, **unit))(x, w))
    wanted = summed(x, w, 1, (1, 1), (1, 1), ((0, 0), (0, 0)))
    assert wanted.min() >= 1 << 24
    np.testing.assert_array_equal(found, wanted)
    assert np.any(wanted != wanted.astype(np.float32))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_integer_transposed_conv_is_exact(rng, group, dilation):
    x = rng.integers(-128, 128, (2, 5, 6, 8)).astype(np.int8)
    w = rng.integers(-128, 128, (3, 2, 8 // group, 6)).astype(np.int8)
    options = {"strides": (2, 3), "dilations": (dilation,) * 2, "crops": ((1, 0), (0, 1)), "group": group}
    found = kernels.conv_transpose(jnp.asarray(x), jnp.asarray(w), dtype=jnp.int32, **options)
    floats = kernels.conv_transpose(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), **options)
    assert np.abs(floats).max() < 1 << 24  # so that these are exact
    np.testing.assert_array_equal(found, floats)


def test_image_sums(rng):
    for kind in (np.int8, np.int16):
        x = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, (2, 9, 7, 5)).astype(kind)
        wanted = x.astype(np.int64).sum((1, 2), keepdims=True)
        np.testing.assert_array_equal(kernels.image_sums(jnp.asarray(x)), wanted)
