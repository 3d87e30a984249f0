"""`jq.passes.canonical.factors`: scales and shifts go into weights where that is exact, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jq.config import CANONICAL
from jq.evidence.lint import lint
from jq.graph.read import load
from jq.passes.canonical import FORMS
from jq.readings.tracing import trace
from tests.passes.models import build, node, normal
from tests.passes.spelling import AS_IT_IS, Spelling, Writer, canonical, model_of, ops

IMAGE, TOKENS = (2, 4, 5, 6), (2, 5, 8)
CHANNELS = (1 + np.abs(normal(4, 1, 1))) * np.array([1, -1, 2, 0.5]).reshape(4, 1, 1)
W1, W3, DEPTHWISE = normal(3, 4, 1, 1), normal(3, 4, 3, 3), normal(4, 1, 3, 3)
MATRIX, SQUARE = normal(8, 6), normal(8, 8)


def bent(w: Writer) -> str:
    return w("Tanh", "x")  # through which no factor goes


FORWARD: list[Spelling] = [
    lambda w: w("Conv", w("Mul", bent(w), 0.3), W1),
    lambda w: w("Conv", w("Mul", CHANNELS, bent(w)), W3, normal(3), pads=[1, 1, 1, 1]),
    lambda w: w("Conv", w("Div", bent(w), CHANNELS), DEPTHWISE, pads=[1, 1, 1, 1], group=4),
    lambda w: w("Conv", w("Add", bent(w), CHANNELS), W1),
    lambda w: w("Conv", w("Sub", bent(w), 0.5), W3, normal(3)),
    lambda w: w("Conv", w("Sub", CHANNELS, bent(w)), W3, normal(3)),
    lambda w: w("Conv", w("Add", w("Mul", bent(w), [0.3]), [-0.2]), W1),
    lambda w: w("Conv", w("Mul", w("Add", bent(w), CHANNELS), CHANNELS), DEPTHWISE, group=4),
    lambda w: w("ConvTranspose", w("Mul", bent(w), CHANNELS), normal(4, 3, 2, 2), strides=[2, 2]),
    lambda w: w("Conv", w("Add", w("Div", w("Sub", bent(w), CHANNELS), 3.0), 0.25), W1),
]


@pytest.mark.parametrize("spelling", FORWARD)
def test_in_front_of_a_convolution(spelling: Spelling) -> None:
    assert ops(canonical(model_of(spelling, IMAGE))) in (["Tanh", "Conv"], ["Tanh", "ConvTranspose"])


MATRICES: list[Spelling] = [
    lambda w: w("MatMul", w("Mul", bent(w), 0.3), MATRIX),
    lambda w: w("MatMul", w("Mul", bent(w), normal(8)), MATRIX),
    lambda w: w("MatMul", w("Div", bent(w), 4.0), MATRIX),
    lambda w: w("Mul", w("MatMul", bent(w), MATRIX), 0.125),
    lambda w: w("Mul", w("MatMul", bent(w), MATRIX), normal(6)),
]
BIASED: list[Spelling] = [
    lambda w: w("Add", w("MatMul", w("Add", bent(w), normal(8)), MATRIX), normal(6)),
    lambda w: w("Mul", w("Add", w("MatMul", bent(w), MATRIX), normal(6)), 0.125),
    lambda w: w("Div", w("Add", normal(6), w("MatMul", bent(w), MATRIX)), [[4.0]]),
    lambda w: w("Sub", w("MatMul", w("Sub", 1.0, bent(w)), MATRIX), normal(6)),
]


@pytest.mark.parametrize("spelling", MATRICES)
def test_around_a_matrix(spelling: Spelling) -> None:
    assert ops(canonical(model_of(spelling, TOKENS))) == ["Tanh", "MatMul"]


@pytest.mark.parametrize("spelling", BIASED)
def test_around_a_matrix_with_a_bias(spelling: Spelling) -> None:
    assert ops(canonical(model_of(spelling, TOKENS))) in (["Tanh", "MatMul", "Add"], ["Tanh", "MatMul", "Sub"])


@pytest.mark.parametrize("transposed", [0, 1])
def test_in_front_of_gemm(transposed: int) -> None:
    def spelling(w: Writer) -> str:
        x = w("Add", w("Mul", bent(w), normal(8)), 0.5)
        return w("Gemm", x, MATRIX.T if transposed else MATRIX, normal(6), transB=transposed, alpha=2.0, beta=0.5)

    assert ops(canonical(model_of(spelling, (3, 8)))) == ["Tanh", "Gemm"]


def shifted(pads: dict[str, Any], shift: Any = 0.2) -> Spelling:
    return lambda w: w("Conv", w("Add", w("Mul", bent(w), 0.03), shift), W3, normal(3), **pads)


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 1, 0, 0]])
def test_a_shift_before_padding_is_padded_with_what_becomes_zero(pads: list[int], opset: int) -> None:
    graph = canonical(model_of(shifted({"pads": pads}), IMAGE, opset))
    assert ops(graph) == ["Tanh", "Pad", "Conv"]
    np.testing.assert_allclose(graph.params[graph.nodes[1].inputs[2]], -0.2 / 0.03, rtol=1e-6)


def test_where_the_padding_is_not_one_number_the_shift_stays_and_its_scale_goes() -> None:
    for spelling in (shifted({"auto_pad": "SAME_UPPER"}), shifted({"pads": [1, 1, 1, 1]}, CHANNELS)):
        graph = canonical(model_of(spelling, IMAGE))
        assert ops(graph) == ["Tanh", "Add", "Conv"]


def test_a_transposed_convolution_does_not_take_a_shift() -> None:
    model = model_of(lambda w: w("ConvTranspose", w("Add", bent(w), 0.2), normal(4, 3, 2, 2)), IMAGE)
    assert ops(canonical(model)) == ["Tanh", "Add", "ConvTranspose"]


def test_all_readers_take_it_in_or_none() -> None:
    def spelling(w: Writer, last: Callable[[Writer, str], str]) -> str:
        x = w("Mul", bent(w), 0.3)
        return w("Concat", w("Conv", x, W1), last(w, x), axis=1)

    both = canonical(model_of(lambda w: spelling(w, lambda w, x: w("Conv", x, normal(2, 4, 1, 1))), IMAGE))
    assert "Mul" not in ops(both)
    one = canonical(model_of(lambda w: spelling(w, lambda w, x: w("Sigmoid", x)), IMAGE))
    assert "Mul" in ops(one)


def test_a_positive_scale_goes_through_what_commutes_with_it() -> None:
    def through(scale: object) -> Spelling:
        return lambda w: w("Conv", w("MaxPool", w("Relu", w("Mul", bent(w), scale)), kernel_shape=[2, 2]), W1)

    assert "Mul" not in ops(canonical(model_of(through(0.3), IMAGE)))
    assert "Mul" not in ops(canonical(model_of(through(np.abs(CHANNELS)), IMAGE)))
    assert "Mul" in ops(canonical(model_of(through(-0.3), IMAGE)))
    assert "Mul" in ops(canonical(model_of(through(CHANNELS), IMAGE)))


def test_a_number_goes_through_what_moves_elements() -> None:
    def moved(scale: object) -> Spelling:
        def spelling(w: Writer) -> str:
            x = w("Transpose", w("Mul", bent(w), scale), perm=[0, 2, 1])
            return w("MatMul", w("Reshape", x, np.array([2, 5, 8], np.int64)), MATRIX)

        return spelling

    assert "Mul" not in ops(canonical(model_of(moved(0.3), (2, 8, 5))))
    assert "Mul" in ops(canonical(model_of(moved(normal(5)), (2, 8, 5))))


SCALINGS: list[Callable[[Writer, str, str], str]] = [
    lambda w, q, k: w("Div", w("MatMul", q, w("Transpose", k, perm=[0, 1, 3, 2])), 2.0),
    lambda w, q, k: w("Mul", w("MatMul", q, w("Transpose", k, perm=[0, 1, 3, 2])), 0.5),
    lambda w, q, k: w("MatMul", w("Mul", q, 0.5), w("Transpose", k, perm=[0, 1, 3, 2])),
    lambda w, q, k: w("MatMul", q, w("Transpose", w("Div", k, 2.0), perm=[0, 1, 3, 2])),
    lambda w, q, k: w("MatMul", w("Mul", q, 0.7), w("Transpose", w("Mul", k, 0.7), perm=[0, 1, 3, 2])),
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_scale_of_attention_goes_into_a_projection(scaling: Callable[[Writer, str, str], str]) -> None:
    def spelling(w: Writer) -> str:
        def heads(x: str) -> str:
            return w("Transpose", w("Reshape", x, np.array([2, 5, 2, 4], np.int64)), perm=[0, 2, 1, 3])

        q, k, v = (heads(w("Add", w("MatMul", bent(w), normal(8, 8) + i), normal(8))) for i in range(3))
        masked = w("Add", scaling(w, q, k), np.where(np.arange(5) < 4, 0.0, -100.0).reshape(1, 1, 1, 5))
        return w("MatMul", w("Softmax", masked, axis=-1), v)

    left = ops(canonical(model_of(spelling, TOKENS)))
    assert not {"Mul", "Div"} & set(left)
    assert left[left.index("Softmax") - 1] == "Add"


def test_a_part_of_one_projection_keeps_its_scale() -> None:
    """Queries would be smaller than the keys and values that share their quantizer."""

    def spelling(w: Writer) -> str:
        x = w("Add", w("MatMul", bent(w), normal(8, 24)), normal(24))
        q, k, v = (w("Slice", x, np.array([i]), np.array([i + 8]), np.array([2])) for i in (0, 8, 16))
        scores = w("MatMul", w("Mul", q, 0.35), w("Transpose", k, perm=[0, 2, 1]))
        return w("MatMul", w("Softmax", scores, axis=-1), v)

    assert ops(canonical(model_of(spelling, TOKENS))).count("Mul") == 1


STAYS: list[Spelling] = [
    lambda w: w("Conv", w("Mul", bent(w), normal(5, 6)), W1),  # by position
    lambda w: w("Conv", w("Mul", bent(w), 0.0), W1),
    lambda w: w("Conv", w("Mul", w("Mul", bent(w), "x"), w("Sigmoid", "x")), W1),  # by what is no constant
    lambda w: w("Conv", w("Div", 1.0, bent(w)), W1),
    lambda w: w("Mul", bent(w), 0.3),  # the output
]


@pytest.mark.parametrize("spelling", STAYS)
def test_what_is_no_factor_of_a_channel_stays(spelling: Spelling) -> None:
    model = model_of(spelling, IMAGE)
    assert len(canonical(model).nodes) == len(model.graph.node) - 1


def test_what_makes_a_tensor_wider_stays() -> None:
    model = model_of(lambda w: w("Conv", w("Mul", bent(w), CHANNELS), W1), (2, 1, 5, 6))
    assert "Mul" in ops(canonical(model))


def test_a_weight_that_others_read_is_left_alone() -> None:
    nodes = [
        node("Tanh", ["x"], ["t"]), node("Mul", ["t", "c"], ["m"]), node("Conv", ["m", "w"], ["a"]),
        node("Conv", ["x", "w"], ["b"]), node("Add", ["a", "b"], ["y"]),
    ]  # fmt: skip
    graph = canonical(build(nodes, {"c": np.float32([0.3]), "w": W1}, x=IMAGE))
    assert ops(graph) == ["Tanh", "Conv", "Conv", "Add"]


def test_lint_says_what_is_put_together() -> None:
    def spelling(w: Writer) -> str:
        gate = w("Clip", w("Add", "x", 3.0), 0.0, 6.0)
        return w("Conv", w("Mul", w("Div", w("Mul", "x", gate), 6.0), 0.3), W1)

    model = model_of(spelling, IMAGE)
    first, second = [f for f in lint(model) if f.rule == "canonical-form"]
    assert (first.severity, first.where) == (
        "note",
        "Div_3",
    ) and "1 region of 4 nodes that compute hard_swish" in first.message
    assert second.where == "Mul_4" and "1 scale or shift" in second.message
    assert not [f for f in lint(model, AS_IT_IS.replace(canonical=())) if f.rule == "canonical-form"]


def test_a_name_keeps_its_value() -> None:
    """Tensors that hold other values have other names, so that tools compare like with like; labels of nodes stay."""

    def spelling(w: Writer) -> str:
        x = w("Add", w("MatMul", w("Relu", w("Mul", bent(w), 0.3)), MATRIX), normal(6))
        x = w("Transpose", w("Mul", w("Transpose", x, perm=[0, 2, 1]), 0.125), perm=[0, 2, 1])
        return w("Add", w("MatMul", w("Add", w("Tanh", x), 0.5), normal(6, 6)), normal(6))

    model = model_of(spelling, TOKENS)
    graph, before = canonical(model), load(model)
    feed = {"x": normal(*TOKENS)}
    want = trace(before, taps=list(before.producer))(before.params, feed)[1]
    have = trace(graph, taps=list(graph.producer))(graph.params, feed)[1]
    assert "Mul" not in ops(graph) and len(have) > len(set(have) - set(want)) == 4
    for name in set(have) & set(want):
        np.testing.assert_allclose(have[name], want[name], rtol=1e-4, atol=1e-5)
    assert {n.label for n in graph.nodes} <= {n.label for n in before.nodes}


def test_every_form_is_an_option_under_its_name() -> None:
    assert set(CANONICAL) == {*FORMS, "group_norm", "factors"}
