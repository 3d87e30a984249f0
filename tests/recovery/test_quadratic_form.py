"""The quadratic form of a layer's error, against the layer itself and errors computed directly in 64 bits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import jq
from jq.graph import Graph, Node
from jq.ops.linear import linear_layer
from jq.recovery.quadratic_form import Form, shrinkage, sums
from tests.conftest import onnxruntime_outputs

# Operator, shapes of input, weight and bias, attributes.
CASES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, dict[str, Any]]] = {
    "conv": ("Conv", (6, 4, 7, 6), (8, 4, 3, 3), (8,), {}),
    "padded": ("Conv", (6, 4, 7, 6), (8, 4, 3, 2), (8,), {"pads": [1, 0, 2, 1]}),
    "strided": ("Conv", (6, 4, 9, 8), (8, 4, 3, 3), (8,), {"strides": [2, 3], "pads": [1, 1, 1, 1]}),
    "dilated": ("Conv", (6, 4, 9, 8), (5, 4, 3, 2), (5,), {"dilations": [2, 3]}),
    "same_upper": ("Conv", (6, 4, 7, 6), (5, 4, 2, 3), (5,), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same_lower": ("Conv", (6, 4, 7, 6), (5, 4, 2, 2), None, {"auto_pad": "SAME_LOWER"}),
    "valid": ("Conv", (6, 4, 7, 6), (5, 4, 2, 2), (5,), {"auto_pad": "VALID"}),
    "pointwise": ("Conv", (6, 4, 5, 5), (7, 4, 1, 1), (7,), {}),
    "grouped": ("Conv", (6, 6, 7, 6), (9, 2, 3, 3), (9,), {"group": 3, "pads": [1, 1, 1, 1]}),
    "wide_groups": ("Conv", (6, 10, 7, 6), (4, 5, 3, 3), (4,), {"group": 2, "strides": [2, 2]}),
    "depthwise": ("Conv", (6, 5, 7, 6), (5, 1, 3, 3), (5,), {"group": 5, "pads": [1, 1, 1, 1]}),
    "multiplied": ("Conv", (6, 4, 7, 6), (8, 1, 3, 2), (8,), {"group": 4}),
    "line": ("Conv", (6, 4, 11), (5, 4, 3), (5,), {"pads": [2, 1], "dilations": [2]}),
    "cube": ("Conv", (6, 2, 5, 4, 4), (3, 2, 2, 3, 2), (3,), {}),
    "gemm": ("Gemm", (40, 6), (6, 5), (5,), {}),
    "gemm_transposed": ("Gemm", (40, 6), (5, 6), (1, 5), {"transB": 1, "alpha": 0.5}),
    "gemm_alpha": ("Gemm", (40, 6), (6, 5), (5,), {"alpha": -2.0}),
    "matmul": ("MatMul", (40, 6), (6, 5), None, {}),
    "matmul_wide": ("MatMul", (8, 7, 6), (6, 9), None, {}),
    "matmul_narrow": ("MatMul", (8, 7, 6), (6, 2), None, {}),
    "matmul_4": ("MatMul", (8, 2, 3, 6), (6, 6), None, {}),
}
PRODUCTS = [name for name, case in CASES.items() if case[0] != "Conv"]  # whose channels are last


@functools.cache
def case(name: str) -> tuple[onnx.ModelProto, Graph, Node, np.ndarray]:
    op, x_shape, w_shape, b_shape, attrs = CASES[name]
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(x_shape) + 0.5 * rng.standard_normal((*x_shape[:-1], 1)) + 0.3).astype(np.float32)
    arrays = {"w": rng.standard_normal(w_shape).astype(np.float32)}
    if b_shape:
        arrays["b"] = rng.standard_normal(b_shape).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(op, ["x", *arrays], ["y"], name="layer", **attrs)],
        name,
        [helper.make_tensor_value_info("x", 1, x_shape)],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(a, k) for k, a in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    loaded = jq.load(model)
    return model, loaded, loaded.nodes[0], x


@functools.cache
def parts(name: str) -> tuple[Any, Node, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """How the layer is a product, it, its input, weight, result without bias by onnxruntime, and bias by channel."""
    model, graph, node, x = case(name)
    view = linear_layer(graph, node)
    assert view is not None and view.product is not None
    assert view.weight == "w" and view.bias == ("b" if len(node.inputs) > 2 else None)
    (y,) = onnxruntime_outputs(model, {"x": x})
    return view.product, node, x, graph.params["w"], y, graph.params.get("b", np.zeros(1, np.float32)).reshape(-1)


@functools.cache
def noisy(name: str) -> np.ndarray:
    """What the input of a layer might be off by."""
    x, rng = parts(name)[2], np.random.default_rng(5)
    return (0.1 * x * (rng.random(x.shape) < 0.5) + 0.2 * rng.standard_normal(x.shape) - 0.1).astype(np.float32)


@functools.cache
def reordered(name: str, every: int = 1) -> tuple[np.ndarray, ...]:
    """Rows of the input and of noise, columns, and the weight back from them; at some places or all."""
    linear, node, x, w, y, _ = parts(name)
    places = None if every == 1 else np.arange(y[0, 0].size)[1::every]

    @jax.jit
    def made(x: Any, w: Any, off: Any) -> tuple[Any, ...]:
        columns = linear.columns(w, node.attrs)
        back = linear.weights(columns, w.shape, node.attrs)
        return *(linear.rows(v, w, node.attrs, places) for v in (x, off)), columns, back

    return tuple(np.asarray(a) for a in made(x, w, noisy(name)))


def flat(name: str) -> np.ndarray:
    """The results of a layer as positions by channels."""
    y = parts(name)[4]
    return (np.moveaxis(y, 1, -1) if name not in PRODUCTS else y).reshape(
        -1, y.shape[1 if name not in PRODUCTS else -1]
    )


@pytest.mark.parametrize("name", CASES)
def test_rows_times_columns_are_the_operator(name):
    rows, _, columns, _ = reordered(name)
    have = np.einsum("pkg,gko->pgo", rows.astype(np.float64), columns.astype(np.float64)).reshape(len(rows), -1)
    np.testing.assert_allclose(have + parts(name)[5], flat(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["padded", "grouped", "depthwise", "line"])
def test_rows_at_some_places_are_those_of_all(name):
    images = len(parts(name)[2])
    for every, some in zip(reordered(name)[:2], reordered(name, 3)[:2], strict=True):
        every, some = (a.reshape(images, -1, *a.shape[1:]) for a in (every, some))
        np.testing.assert_array_equal(some, every[:, 1::3])


@pytest.mark.parametrize("name", CASES)
def test_columns_are_weights_in_another_order(name):
    _, node, _, w, _, _ = parts(name)
    *_, columns, back = reordered(name)
    np.testing.assert_array_equal(back, w)
    assert columns.shape[0] == node.attrs.get("group", 1) and columns.size == w.size


@functools.cache
def program(name: str, samples: int) -> Any:
    """Of input, what it is off by and what counts, and a change of the weight: the form, its value, gradient and best bias."""
    linear, node, _, w, _, _ = parts(name)

    @jax.jit
    def made(x: Any, off: Any, valid: Any, d: Any) -> tuple[Any, ...]:
        form = Form.of(sums(linear, node.attrs, x, off, jnp.asarray(w), valid, samples))
        return form, form(d), form(0 * d), form.gradient(d), form.shift(d)[:, 0]

    return made


@dataclasses.dataclass
class Found:
    form: Form
    change: np.ndarray
    error: float
    start: float
    gradient: np.ndarray
    shift: np.ndarray
    rows: np.ndarray  # of valid images, in 64 bits
    off: np.ndarray


@functools.cache
def formed(name: str, left_out: int = 0, samples: int = 1) -> Found:
    """The form of a layer whose inputs are off by noise, at a random change of its weight."""
    x = parts(name)[2]
    rows, of_noise, columns, _ = reordered(name)
    off = np.einsum("pkg,gko->pog", of_noise.astype(np.float64), columns.astype(np.float64))
    valid = np.arange(len(x)) < len(x) - left_out
    d = 0.1 * np.random.default_rng(7).standard_normal(columns.shape).astype(np.float32)
    form, *found = program(name, samples)(x, noisy(name), valid.astype(np.float32), d)
    seen = np.repeat(valid, len(rows) // len(valid))
    error, start, gradient, shift = (np.asarray(a, np.float64) for a in found)
    return Found(
        form, d.astype(np.float64), error, start, gradient, shift, *(a[seen].astype(np.float64) for a in (rows, off))
    )


def direct(rows: np.ndarray, off: np.ndarray, d: np.ndarray) -> tuple[float, np.ndarray]:
    """The squared error by position with the best bias, and that bias."""
    left = off - np.einsum("pkg,gko->pog", rows, d)
    shift = left.mean(0)
    return float(np.square(left - shift).sum() / len(rows)), shift.T


MERGED = list(CASES)


@pytest.mark.parametrize("name", MERGED)
def test_the_form_is_the_mean_squared_error_with_the_best_bias(name):
    found = formed(name)
    assert found.error == pytest.approx(direct(found.rows, found.off, found.change)[0], rel=1e-4)
    assert found.start == pytest.approx(found.off.var(0).sum(), rel=1e-4)


@pytest.mark.parametrize("name", MERGED)
def test_the_best_bias_is_what_the_mean_is_off(name):
    found = formed(name)
    _, shift = direct(found.rows, found.off, found.change)
    np.testing.assert_allclose(found.shift, shift, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", MERGED)
def test_the_gradient_is_that_of_finite_differences(name):
    found = formed(name)
    way = np.random.default_rng(8).standard_normal(found.change.shape)
    up, down = (direct(found.rows, found.off, found.change + s * way)[0] for s in (1e-5, -1e-5))
    assert np.sum(found.gradient * way) == pytest.approx((up - down) / 2e-5, rel=1e-3)


@pytest.mark.parametrize("name", ["strided", "wide_groups", "depthwise", "line", "gemm", "matmul_4"])
def test_feeds_that_are_not_valid_do_not_count(name):
    found = formed(name, 2)
    error, shift = direct(found.rows, found.off, found.change)
    assert found.error == pytest.approx(error, rel=1e-4)
    np.testing.assert_allclose(found.shift, shift, rtol=1e-3, atol=2e-5)


def test_chunks_add_up():
    linear, node, x, w, _, _ = parts("grouped")
    off = noisy("grouped")
    part = jax.jit(lambda x, off: sums(linear, node.attrs, x, off, jnp.asarray(w), jnp.ones(len(x)), 1))
    whole, halves = part(x, off), [part(x[i::2], off[i::2]) for i in (0, 1)]
    for name in vars(whole).keys() - {"parts", "covariance2", "mean2"}:
        have, want = getattr(halves[0], name) + getattr(halves[1], name), getattr(whole, name)
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["padded", "depthwise"])
def test_with_many_samples_some_positions_of_each_image_are_enough(name):
    some, every = formed(name, samples=100000).form, formed(name).form
    assert not np.allclose(some.a, every.a)
    assert np.all(np.linalg.eigvalsh(np.asarray(some.a, np.float64)) > -1e-5)
    x = parts(name)[2]
    linear, node, _, w, _, _ = parts(name)
    ones = jnp.ones(len(x))
    found = sums(linear, node.attrs, jnp.asarray(x), jnp.asarray(noisy(name)), jnp.asarray(w), ones, 100000)
    assert float(found.count) == len(x)  # one of each


def in_parts(off: np.ndarray, x: np.ndarray, w: np.ndarray) -> tuple[Form, Form]:
    """The forms of a matrix product with inputs that are off, from ten parts of the data, and without any spread between them."""
    linear, node, *_ = parts("matmul_wide")
    made = [
        sums(linear, node.attrs, jnp.asarray(a), jnp.asarray(b), jnp.asarray(w), jnp.ones(len(a)), 1)
        for a, b in zip(np.split(x, 10), np.split(off, 10), strict=True)
    ]
    total = jax.tree.map(lambda *a: sum(a), *made)
    return Form.of(total), Form.of(dataclasses.replace(total, covariance2=0.0, mean2=0.0))


class TestWhatIsChance:
    X = np.random.default_rng(1).standard_normal((900, 24)).astype(np.float32)
    W = np.random.default_rng(2).standard_normal((24, 8)).astype(np.float32)
    NOISE = np.random.default_rng(3).standard_normal((900, 24)).astype(np.float32)

    def test_noise_that_has_nothing_to_do_with_inputs_is_left_out(self):
        form, whole = in_parts(self.NOISE, self.X, self.W)
        assert np.linalg.norm(form.r) < 0.5 * np.linalg.norm(whole.r)
        assert np.linalg.norm(form.mean_e) < 0.5 * np.linalg.norm(whole.mean_e)

    def test_what_all_parts_agree_on_is_kept(self):
        mixed = self.X @ np.random.default_rng(4).standard_normal((24, 24)).astype(np.float32) + 3
        form, whole = in_parts(mixed, self.X, self.W)
        np.testing.assert_allclose(form.r, whole.r, rtol=0.1, atol=0.1 * np.abs(whole.r).max())
        np.testing.assert_allclose(form.mean_e, whole.mean_e, rtol=0.05)

    def test_one_part_says_nothing_of_chance(self):
        assert float(shrinkage(1.0, 1.0, 1)) == 1

    def test_the_factor_is_right_on_average(self):
        """Of means of draws around `true`, the square less what is chance is `true` squared."""
        draws = 2 + 5 * np.random.default_rng(5).standard_normal((20000, 10))
        mean2, squares = draws.mean(1) ** 2, (draws**2).sum(1)
        unclipped = mean2 - (squares / 10 - mean2) / 9
        assert unclipped.mean() == pytest.approx(4, rel=0.05)
        have = np.asarray(shrinkage(mean2, squares, 10))
        np.testing.assert_allclose(have, np.clip(unclipped / mean2, 0, 1), rtol=1e-4, atol=1e-5)
