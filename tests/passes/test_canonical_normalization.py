"""`jq.passes.canonical.normalization` and `softmax`: every spelling becomes the one operator, what is nearly one stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jq.plan.selection import selected
from tests.passes.models import build, node, normal
from tests.passes.spelling import AS_IT_IS, Spelling, Writer, canonical, model_of, ops

TOKENS, IMAGE = (2, 5, 8), (2, 8, 5, 6)
SCALE, BIAS = 1 + normal(8) / 4, normal(8)
EPS = 1e-5


def mean(w: Writer, x: str, *axes: int) -> str:
    return w.reduce("ReduceMean", x, *(axes or (-1,)))


def centre(w: Writer, *axes: int) -> str:
    return w("Sub", "x", mean(w, "x", *axes))


def square(w: Writer, x: str) -> str:
    return w("Pow", x, 2.0)


def scaled(w: Writer, y: str, scale: np.ndarray = SCALE, bias: np.ndarray = BIAS) -> str:
    return w("Add", w("Mul", y, scale), bias)


def plain(w: Writer, *axes: int, eps: float = EPS) -> str:
    d = centre(w, *axes)
    return w("Div", d, w("Sqrt", w("Add", mean(w, square(w, d), *axes), eps)))


def computed_twice(w: Writer) -> str:
    d = w("Sub", mean(w, "x"), "x")
    return w("Div", centre(w), w("Sqrt", w("Add", EPS, mean(w, w("Mul", d, d)))))


def of_squares(w: Writer) -> str:
    m = mean(w, "x")
    variance = w("Sub", mean(w, w("Mul", "x", "x")), w("Mul", m, m))
    return w("Div", w("Sub", "x", m), w("Sqrt", w("Add", variance, EPS)))


def by_reciprocal(w: Writer) -> str:
    d = centre(w)
    return w("Mul", w("Reciprocal", w("Sqrt", w("Add", mean(w, w("Mul", d, d)), EPS))), d)


def by_power(w: Writer) -> str:
    d = centre(w)
    return w("Mul", d, w("Pow", w("Add", mean(w, square(w, d)), EPS), -0.5))


def by_sums(w: Writer) -> str:
    d = w("Sub", "x", w("Div", w.reduce("ReduceSum", "x", 2), 8.0))
    return w("Div", d, w("Sqrt", w("Add", w("Mul", w.reduce("ReduceSum", w("Mul", d, d), -1), 1 / 8), EPS)))


def by_sum_square(w: Writer) -> str:
    d = centre(w)
    return w("Div", d, w("Sqrt", w("Add", w("Div", w.reduce("ReduceSumSquare", d, -1), 8.0), EPS)))


def without_keepdims(w: Writer) -> str:
    last = np.array([2], np.int64)
    d = w("Sub", "x", w("Unsqueeze", w.reduce("ReduceMean", "x", -1, keepdims=0), last))
    variance = w("Unsqueeze", w.reduce("ReduceMean", w("Mul", d, d), -1, keepdims=0), last)
    return w("Div", d, w("Sqrt", w("Add", variance, EPS)))


def in_doubles(w: Writer) -> str:
    x = w("Cast", "x", to=11)
    d = w("Sub", x, mean(w, x))
    return w("Cast", w("Div", d, w("Sqrt", w("Add", mean(w, w("Mul", d, d)), np.float64(EPS)))), to=1)


def root_first(w: Writer) -> str:
    d = centre(w)
    factor = w("Div", SCALE, w("Sqrt", w("Add", mean(w, square(w, d)), EPS)))
    return w("Add", w("Mul", "x", factor), w("Sub", BIAS, w("Mul", mean(w, "x"), factor)))


LAYER_NORM: list[Spelling] = [
    lambda w: scaled(w, plain(w)),
    lambda w: scaled(w, computed_twice(w)),
    lambda w: scaled(w, of_squares(w)),
    lambda w: scaled(w, by_reciprocal(w)),
    lambda w: scaled(w, by_power(w)),
    lambda w: scaled(w, by_sums(w)),
    lambda w: scaled(w, by_sum_square(w)),
    lambda w: scaled(w, without_keepdims(w)),
    lambda w: w("Add", BIAS, w("Mul", SCALE, plain(w, 2))),
    lambda w: w("Mul", plain(w), SCALE),
    lambda w: w("Sub", plain(w), BIAS),
    lambda w: plain(w, eps=1e-12),
    lambda w: scaled(w, w("Neg", plain(w)), SCALE.reshape(1, 1, 8)),
    lambda w: w("Mul", scaled(w, plain(w)), 0.25),
    root_first,
]


@pytest.mark.parametrize("spelling", LAYER_NORM)
def test_every_spelling_becomes_layer_normalization(spelling: Spelling) -> None:
    assert ops(canonical(model_of(spelling, TOKENS))) == ["LayerNormalization"]


@pytest.mark.parametrize("opset", range(13, 26))
@pytest.mark.parametrize("spelling", [LAYER_NORM[0], LAYER_NORM[2], LAYER_NORM[5], LAYER_NORM[7]])
def test_at_every_opset(spelling: Spelling, opset: int) -> None:
    graph = canonical(model_of(spelling, TOKENS, opset))
    assert ops(graph) == ["LayerNormalization"]
    assert graph.opset() == max(17, opset)


def test_its_numbers_are_the_models() -> None:
    graph = canonical(model_of(lambda w: scaled(w, plain(w, eps=2e-6)), TOKENS))
    (node,) = graph.nodes
    assert node.attrs == {"axis": -1, "epsilon": float(np.float32(2e-6))}
    np.testing.assert_array_equal(graph.params[node.inputs[1]], SCALE)
    np.testing.assert_array_equal(graph.params[node.inputs[2]], BIAS)


def test_casts_to_a_wider_type_are_of_no_effect() -> None:
    w = Writer()
    nodes = [node("Identity", [in_doubles(w)], ["y"])]
    arrays = {k: a.astype(np.float64) if a.dtype.kind == "f" else a for k, a in w.arrays.items()}
    assert ops(canonical(build([*w.nodes, *nodes], arrays, x=TOKENS))) == ["LayerNormalization"]


@pytest.mark.parametrize("shape", [("batch", 5, 8), ("batch", "tokens", 8), (4, 8)])
def test_symbolic_dims_around_it(shape: Sequence[int | str]) -> None:
    assert ops(canonical(model_of(LAYER_NORM[0], shape))) == ["LayerNormalization"]


def test_over_several_axes() -> None:
    held = normal(5, 8)
    graph = canonical(model_of(lambda w: scaled(w, plain(w, 1, 2), held, held), TOKENS))
    assert ops(graph) == ["LayerNormalization"] and graph.nodes[0].attrs["axis"] == -2


def test_over_the_channels_of_an_image() -> None:
    by_channel = SCALE.reshape(8, 1, 1), BIAS.reshape(8, 1, 1)
    graph = canonical(model_of(lambda w: scaled(w, plain(w, 1), *by_channel), IMAGE))
    assert ops(graph) == ["Transpose", "LayerNormalization", "Transpose"]


INSTANCE_NORM: list[Spelling] = [
    lambda w: scaled(w, plain(w, 2, 3), SCALE.reshape(8, 1, 1), BIAS.reshape(8, 1, 1)),
    lambda w: scaled(w, plain(w, -1, -2), SCALE.reshape(1, 8, 1, 1), BIAS.reshape(1, 8, 1, 1)),
    lambda w: plain(w, 2, 3),
    lambda w: w("Mul", plain(w, 2, 3), SCALE.reshape(8, 1, 1)),
]


@pytest.mark.parametrize("spelling", INSTANCE_NORM)
def test_over_positions_it_is_an_instance_normalization(spelling: Spelling) -> None:
    assert ops(canonical(model_of(spelling, IMAGE))) == ["InstanceNormalization"]
    assert ops(canonical(model_of(spelling, ("batch", 8, "height", 6)))) == ["InstanceNormalization"]


RMS_NORM: list[Spelling] = [
    lambda w: w("Mul", w("Div", "x", w("Sqrt", w("Add", mean(w, square(w, "x")), EPS))), SCALE),
    lambda w: w("Mul", SCALE, w("Mul", "x", w("Reciprocal", w("Sqrt", w("Add", mean(w, square(w, "x")), EPS))))),
    lambda w: w("Mul", SCALE, w("Mul", w("Pow", w("Add", mean(w, w("Mul", "x", "x")), EPS), -0.5), "x")),
    lambda w: w("Mul", "x", w("Div", SCALE, w("Sqrt", w("Add", EPS, mean(w, square(w, "x")))))),
    lambda w: w("Div", "x", w("Sqrt", w("Add", mean(w, square(w, "x")), EPS))),
    lambda w: w("Div", w("Mul", "x", SCALE), w("Sqrt", w("Add", mean(w, square(w, w("Abs", "x"))), EPS))),
    lambda w: w("Div", "x", w("Sqrt", w("Add", w("Div", w.reduce("ReduceSumSquare", "x", -1), 8.0), EPS))),
    lambda w: w("Div", "x", w("Pow", w("Add", w("Mul", w.reduce("ReduceSum", square(w, "x"), 2), 0.125), EPS), 0.5)),
]


@pytest.mark.parametrize("spelling", RMS_NORM)
def test_without_the_mean_it_is_an_rms_normalization(spelling: Spelling) -> None:
    graph = canonical(model_of(spelling, TOKENS))
    assert ops(graph) == ["RMSNormalization"] and graph.opset() == 23


def guarded(w: Writer, eps: float) -> list[str]:
    d = centre(w)
    variance = mean(w, square(w, d))
    return [
        w("Div", d, w("Sqrt", w("Max", variance, eps))),
        w("Div", d, w("Sqrt", w("Clip", variance, eps))),
        w("Div", d, w("Max", w("Sqrt", variance), eps)),
        w("Div", d, w("Add", w("Sqrt", variance), eps)),
    ]


@pytest.mark.parametrize("index", range(4))
def test_an_epsilon_that_is_only_a_guard_may_stand_anywhere(index: int) -> None:
    assert ops(canonical(model_of(lambda w: scaled(w, guarded(w, 1e-12)[index]), TOKENS))) == ["LayerNormalization"]
    assert "LayerNormalization" not in ops(canonical(model_of(lambda w: scaled(w, guarded(w, 0.01)[index]), TOKENS)))


def of_length_one(w: Writer, axis: int = -1) -> list[str]:
    squares = w.reduce("ReduceSum", w("Mul", "x", "x"), axis)
    return [
        w("Div", "x", w("Max", w.reduce("ReduceL2", "x", axis), 1e-12)),
        w("Div", "x", w("Clip", w.reduce("ReduceL2", "x", axis), 1e-12)),
        w("Div", "x", w("Sqrt", w("Max", squares, 1e-24))),
        w("Mul", "x", w("Reciprocal", w("Sqrt", w("Add", squares, 1e-18)))),
    ]


@pytest.mark.parametrize("index", range(4))
def test_vectors_of_length_one(index: int) -> None:
    graph = canonical(model_of(lambda w: of_length_one(w)[index], TOKENS))
    assert ops(graph) == ["LpNormalization"]
    graph = canonical(model_of(lambda w: of_length_one(w, 1)[index], IMAGE))
    assert ops(graph) == ["LpNormalization"] and graph.nodes[0].attrs["axis"] == 1


def in_groups(w: Writer, shape: Sequence[int], back: Sequence[int], *, decomposed: bool = False) -> str:
    x = w("Reshape", "x", np.array(shape, np.int64))
    if decomposed:
        d = w("Sub", x, w.reduce("ReduceMean", x, -1))
        x = w("Div", d, w("Sqrt", w("Add", w.reduce("ReduceMean", w("Mul", d, d), -1), EPS)))
    else:
        x = w("InstanceNormalization", x, np.ones(4), np.zeros(4), epsilon=EPS)
    return w("Reshape", x, np.array(back, np.int64))


GROUP_NORM: list[Spelling] = [
    lambda w: scaled(w, in_groups(w, (0, 4, -1), (0, 8, 5, 6)), SCALE.reshape(8, 1, 1), BIAS.reshape(8, 1, 1)),
    lambda w: scaled(w, in_groups(w, (2, 4, -1), IMAGE), SCALE.reshape(1, 8, 1, 1), BIAS.reshape(1, 8, 1, 1)),
    lambda w: scaled(w, in_groups(w, (2, 4, 60), IMAGE), SCALE.reshape(8, 1, 1), BIAS.reshape(8, 1, 1)),
    lambda w: scaled(w, in_groups(w, (2, 4, 10, 6), IMAGE), SCALE.reshape(8, 1, 1), BIAS.reshape(8, 1, 1)),
    lambda w: w("Mul", SCALE.reshape(8, 1, 1), in_groups(w, (0, 4, -1), IMAGE)),
    lambda w: in_groups(w, (0, 4, -1), IMAGE),
    lambda w: scaled(
        w, in_groups(w, (0, 4, -1), IMAGE, decomposed=True), SCALE.reshape(8, 1, 1), BIAS.reshape(8, 1, 1)
    ),
    lambda w: w("Add", in_groups(w, (2, 4, -1), IMAGE, decomposed=True), BIAS.reshape(8, 1, 1)),
]


@pytest.mark.parametrize("spelling", GROUP_NORM)
def test_group_normalization(spelling: Spelling) -> None:
    graph = canonical(model_of(lambda w: w("Relu", w("Identity", spelling(w))), IMAGE))
    assert ops(graph) == ["GroupNormalization", "Relu"] and graph.opset() == 21
    assert graph.values[graph.nodes[0].outputs[0]].shape == IMAGE


def test_groups_across_the_batch_stay() -> None:
    assert "GroupNormalization" not in ops(canonical(model_of(lambda w: in_groups(w, (1, 4, -1), IMAGE), IMAGE)))
    assert "GroupNormalization" not in ops(canonical(model_of(lambda w: in_groups(w, (0, 4, -1), (2, 8, 6, 5)), IMAGE)))


NEAR: list[Spelling] = [
    lambda w: w("Div", centre(w), w("Sqrt", w("Add", mean(w, square(w, w("Sub", "x", mean(w, "x", 1)))), EPS))),
    lambda w: w("Div", w("Sub", "x", w("Mul", mean(w, "x"), 0.99)),
                w("Sqrt", w("Add", mean(w, square(w, centre(w))), EPS))),
    lambda w: w("Div", centre(w), w("Pow", w("Add", mean(w, square(w, centre(w))), EPS), 0.51)),
    lambda w: w("Div", centre(w), w("Sqrt", w("Add", mean(w, w("Pow", centre(w), 4.0)), EPS))),
    lambda w: w("Div", centre(w), w("Sqrt", w("Add", mean(w, square(w, centre(w))), 2.0))),
]  # fmt: skip


@pytest.mark.parametrize("spelling", NEAR)
def test_what_is_nearly_one_stays(spelling: Spelling) -> None:
    assert not {"LayerNormalization", "RMSNormalization"} & set(ops(canonical(model_of(spelling, TOKENS))))


def test_a_scale_along_other_axes_stays_behind_it() -> None:
    model = model_of(lambda w: w("Mul", plain(w), normal(5, 1)), (2, 3, 5, 8))
    assert ops(canonical(model)) == ["LayerNormalization", "Mul"]


def test_bessels_correction_is_a_scale() -> None:
    def unbiased(w: Writer) -> str:
        variance = w("Div", w.reduce("ReduceSumSquare", centre(w), -1), 7.0)
        return w("Div", centre(w), w("Sqrt", w("Add", variance, EPS)))

    assert ops(canonical(model_of(unbiased, TOKENS))) == ["LayerNormalization"]


def test_what_is_read_elsewhere_stays() -> None:
    def twice(w: Writer) -> str:
        d = centre(w)
        normalized = w("Div", d, w("Sqrt", w("Add", mean(w, square(w, d)), EPS)))
        return w("Concat", normalized, d, axis=2)

    assert "LayerNormalization" not in ops(canonical(model_of(twice, TOKENS)))


def test_an_unknown_size_stays() -> None:
    assert "LayerNormalization" not in ops(canonical(model_of(lambda w: plain(w), ("batch", 5, "width"))))


def test_excluded_and_unnamed_forms_stay() -> None:
    model = model_of(LAYER_NORM[0], TOKENS)
    assert "Sqrt" in ops(canonical(model, AS_IT_IS.replace(exclude=("Sqrt_*",))))
    assert "Sqrt" in ops(canonical(model, AS_IT_IS.replace(overrides=(("Sqrt_*", {"symmetric": True}),))))
    assert "Sqrt" in ops(canonical(model, AS_IT_IS.replace(canonical=("gelu",))))
    assert "Sqrt" in ops(canonical(model, AS_IT_IS.replace(strict_quark=True)))


@pytest.mark.parametrize("spelling", [LAYER_NORM[0], GROUP_NORM[0]])
def test_an_option_for_the_last_node_is_one_for_the_form(spelling: Spelling) -> None:
    """Reports name the form by this label: whoever excludes it gets the form in float, not its parts in 8 bits."""
    model = model_of(spelling, TOKENS if spelling is LAYER_NORM[0] else IMAGE)
    last = model.graph.node[-2].name
    for config in (AS_IT_IS.replace(exclude=(last,)), AS_IT_IS.replace(overrides=((last, {"symmetric": True}),))):
        (node,) = canonical(model, config).nodes
        assert node.label == last and node.op_type.endswith("Normalization")
    graph = canonical(model, AS_IT_IS.replace(exclude=(last,)))
    assert not selected(graph, AS_IT_IS.replace(exclude=(last,), op_types=None))


def shifted(w: Writer, axis: int = -1) -> str:
    return w("Exp", w("Sub", "x", w.reduce("ReduceMax", "x", axis)))


SOFTMAX: list[Spelling] = [
    lambda w: (e := shifted(w)) and w("Div", e, w.reduce("ReduceSum", e, -1)),
    lambda w: (e := w("Exp", "x")) and w("Div", e, w.reduce("ReduceSum", e, -1)),
    lambda w: (e := shifted(w)) and w("Mul", e, w("Reciprocal", w.reduce("ReduceSum", e, 2))),
    lambda w: (e := shifted(w)) and w("Mul", w("Div", 1.0, w.reduce("ReduceSum", e, 2)), e),
    lambda w: (e := shifted(w)) and w("Mul", w("Pow", w.reduce("ReduceSum", e, 2), -1.0), e),
    lambda w: w("Exp", w("Sub", "x", w("Log", w.reduce("ReduceSum", w("Exp", "x"), -1)))),
    lambda w: w("Div", shifted(w), w.reduce("ReduceSum", shifted(w), -1)),
    lambda w: (e := w("Exp", w("Sub", "x", 2.0))) and w("Div", e, w.reduce("ReduceSum", e, 2)),
]


@pytest.mark.parametrize("spelling", SOFTMAX)
def test_softmax(spelling: Spelling) -> None:
    graph = canonical(model_of(spelling, TOKENS))
    assert ops(graph) == ["Softmax"] and graph.nodes[0].attrs["axis"] == 2


def test_softmax_over_another_axis() -> None:
    graph = canonical(model_of(lambda w: (e := shifted(w, 1)) and w("Div", e, w.reduce("ReduceSum", e, 1)), TOKENS))
    assert ops(graph) == ["Softmax"] and graph.nodes[0].attrs["axis"] == 1
    mixed = model_of(lambda w: (e := shifted(w, 1)) and w("Div", e, w.reduce("ReduceSum", e, 2)), TOKENS)
    assert ops(canonical(mixed)) == ["ReduceMax", "Sub", "Softmax"]  # of which a shift changes nothing
    unequal = model_of(
        lambda w: w("Div", w("Exp", "x"), w.reduce("ReduceSum", w("Exp", w("Mul", "x", 1.01)), 2)), TOKENS
    )
    assert "Softmax" not in ops(canonical(unequal))
