"""The order of axes: numpy's own transposes are the oracle, and no other module does what this one is for."""

from __future__ import annotations

import ast
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jq
from jq.arithmetic import layout

ROOT = Path(jq.__file__).parent
TREES = {
    str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in ROOT.rglob("*.py") if p != Path(str(layout.__file__))
}
# What is moved there are no channels: the axes of an image that the caller names, the groups of a linear layer.
# Those of metrics and forms, and of the user's own arrays, which may have no batch and so count from the end.
OTHER_AXES = {"evaluation/metrics.py", "recovery/quadratic_form.py", "data/fitting.py"}
BETWEEN = ([1, -1], [-1, 1])


def numbered(*shape: int) -> np.ndarray:
    """An array of which every element is another number."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def calls_of_moveaxis(tree: ast.Module) -> list[ast.Call]:
    """The calls of a function of this name, numpy's or JAX's."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == "moveaxis"]


@pytest.mark.every_case
@pytest.mark.parametrize("module", sorted(TREES))
def test_no_other_module_unwraps_a_value_or_moves_channels(module: str) -> None:
    tree = TREES[module]
    names = {getattr(n, "id", getattr(n, "attr", getattr(n, "name", ""))) for n in ast.walk(tree)}
    assert names.isdisjoint({"ChannelsLast", "Packed"}), "layout.raw, mapped and axis_of serve this"
    if not module.startswith("ops/"):
        assert module in OTHER_AXES or not calls_of_moveaxis(tree), "layout.channels_last, channels_first, rows"
    for call in calls_of_moveaxis(tree):
        assert [ast.unparse(a) for a in call.args[1:]] not in [list(map(str, b)) for b in BETWEEN]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_a_value_with_its_channels_last_says_where_an_axis_lies(shape: tuple[int, ...]) -> None:
    x = numbered(*shape)
    value = layout.moved(jnp.asarray(x))
    assert layout.is_last(value) and not layout.is_last(x)
    np.testing.assert_array_equal(layout.raw(value), np.moveaxis(x, 1, -1))
    for axis in range(-x.ndim, x.ndim):
        for held in (x, value):
            summed = layout.raw(held).sum(layout.axis_of(held, axis))
            assert sorted(summed.ravel().tolist()) == sorted(x.sum(axis).ravel().tolist())
    np.testing.assert_array_equal(layout.plain(layout.mapped(lambda a: a + 1, value)), x + 1)
    np.testing.assert_array_equal(layout.arranged(jnp.asarray(x), value), layout.raw(value))


@pytest.mark.parametrize("order", [(1, 0), (2, 3, 1, 0), (2, 1, 0)])
def test_a_packed_weight_says_where_an_axis_lies(order: tuple[int, ...]) -> None:
    w = numbered(*range(2, 2 + len(order)))
    packed = layout.packed(w, order)
    np.testing.assert_array_equal(layout.raw(packed), w.transpose(order))
    np.testing.assert_array_equal(layout.unpacked(packed), w)
    np.testing.assert_array_equal(layout.arranged(jnp.asarray(w), packed), layout.raw(packed))
    for axis in range(-w.ndim, w.ndim):
        assert layout.raw(packed).shape[layout.axis_of(packed, axis)] == w.shape[axis]
    np.testing.assert_array_equal(layout.unpacked(layout.mapped(lambda a: 2 * a, packed)), 2 * w)


@pytest.mark.parametrize(("shape", "axis"), [((3,), 0), ((3, 4), 0), ((2, 3), 1), ((2, 3, 4), 1), ((2, 2, 3, 4, 5), 2)])
def test_plain_arrays_with_leading_axes_of_samples(shape: tuple[int, ...], axis: int) -> None:
    x = numbered(*shape)
    for array in (x, jnp.asarray(x)):
        last = layout.channels_last(array, axis)
        assert isinstance(last, type(array))
        np.testing.assert_array_equal(last, np.moveaxis(x, axis, -1))
        np.testing.assert_array_equal(layout.channels_first(last, axis), x)
        np.testing.assert_array_equal(layout.rows(array, axis)[1], np.take(x, 1, axis))
        np.testing.assert_array_equal(layout.rows(array, None), x[None])


def test_samples_without_channels_stay_as_they_are() -> None:
    x = numbered(4, 3)
    assert layout.channels_last(x, 2) is x and layout.channels_first(x, 2) is x
