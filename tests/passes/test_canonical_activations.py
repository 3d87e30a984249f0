"""`jq.passes.canonical.activations`: every spelling becomes the one operator, and what is nearly one stays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.passes.spelling import Spelling, Writer, canonical, model_of, ops

SHAPE = (2, 4, 5, 6)


def clip(w: Writer, x: str, low: float, high: float) -> str:
    return w("Clip", x, low, high)


HARD_SWISH: list[Spelling] = [
    lambda w: w("Div", w("Mul", "x", clip(w, w("Add", "x", 3.0), 0.0, 6.0)), 6.0),
    lambda w: w("Div", w("Mul", clip(w, w("Add", 3.0, "x"), 0.0, 6.0), "x"), [6.0]),
    lambda w: w("Mul", w("Mul", "x", clip(w, w("Add", "x", 3.0), 0.0, 6.0)), 1 / 6),
    lambda w: w("Mul", "x", w("Div", clip(w, w("Add", "x", 3.0), 0.0, 6.0), 6.0)),
    lambda w: w("Mul", "x", w("Mul", 1 / 6, clip(w, w("Add", "x", 3.0), 0.0, 6.0))),
    lambda w: w("Mul", w("Div", "x", 6.0), clip(w, w("Add", "x", 3.0), 0.0, 6.0)),
    lambda w: w("Mul", "x", w("Div", w("Min", w("Relu", w("Add", "x", 3.0)), 6.0), 6.0)),
    lambda w: w("Mul", "x", w("Min", w("Max", w("Add", w("Mul", "x", 1 / 6), 0.5), 0.0), 1.0)),
    lambda w: w("Div", w("Mul", "x", clip(w, w("Sub", "x", -3.0), 0.0, 6.0)), 6.0),
    lambda w: w("Mul", "x", clip(w, w("Div", w("Add", "x", 3.0), 6.0), 0.0, 1.0)),
]
HARD_SIGMOID: list[Spelling] = [
    lambda w: w("Div", clip(w, w("Add", "x", 3.0), 0.0, 6.0), 6.0),
    lambda w: w("Mul", clip(w, w("Add", "x", 3.0), 0.0, 6.0), 1 / 6),
    lambda w: clip(w, w("Add", w("Mul", "x", 1 / 6), 0.5), 0.0, 1.0),
    lambda w: clip(w, w("Add", 0.5, w("Div", "x", 6.0)), 0.0, 1.0),
    lambda w: w("Min", w("Max", w("Div", w("Add", "x", 3.0), 6.0), 0.0), 1.0),
    lambda w: w("Div", w("Min", w("Relu", w("Add", "x", 3.0)), 6.0), 6.0),
    lambda w: w("Sub", 1.0, w("Div", clip(w, w("Sub", 3.0, "x"), 0.0, 6.0), 6.0)),
    lambda w: w("Add", clip(w, w("Div", "x", 6.0), -0.5, 0.5), 0.5),
]
ROOT = math.sqrt(2)
GELU: list[Spelling] = [
    lambda w: w("Mul", w("Mul", "x", w("Add", w("Erf", w("Div", "x", ROOT)), 1.0)), 0.5),
    lambda w: w("Mul", 0.5, w("Mul", "x", w("Add", 1.0, w("Erf", w("Mul", "x", 1 / ROOT))))),
    lambda w: w("Mul", w("Mul", 0.5, "x"), w("Add", w("Erf", w("Div", "x", ROOT)), 1.0)),
    lambda w: w("Mul", "x", w("Mul", 0.5, w("Add", w("Erf", w("Div", "x", ROOT)), 1.0))),
    lambda w: w("Mul", "x", w("Add", w("Mul", 0.5, w("Erf", w("Div", "x", ROOT))), 0.5)),
    lambda w: w("Div", w("Mul", w("Add", w("Erf", w("Div", "x", ROOT)), 1.0), "x"), 2.0),
    lambda w: w("Mul", w("Div", "x", 2.0), w("Sub", w("Erf", w("Div", "x", w("Sqrt", 2.0))), -1.0)),
    lambda w: w("Mul", "x", w("Mul", 0.5, w("Sub", 1.0, w("Erf", w("Neg", w("Div", "x", ROOT)))))),
]
SLOPE = math.sqrt(2 / math.pi)


def inner(w: Writer, cube: str) -> str:
    return w("Tanh", w("Mul", SLOPE, w("Add", "x", w("Mul", 0.044715, cube))))


GELU_TANH: list[Spelling] = [
    lambda w: w("Mul", w("Mul", 0.5, "x"), w("Add", 1.0, inner(w, w("Pow", "x", 3.0)))),
    lambda w: w("Mul", w("Mul", 0.5, "x"), w("Add", 1.0, inner(w, w("Mul", "x", w("Mul", "x", "x"))))),
    lambda w: w("Mul", "x", w("Mul", 0.5, w("Add", inner(w, w("Mul", w("Pow", "x", 2.0), "x")), 1.0))),
    lambda w: w("Mul", w("Mul", "x", w("Add", inner(w, w("Pow", "x", 3.0)), 1.0)), 0.5),
    lambda w: w("Mul", "x", w("Add", w("Mul", inner(w, w("Pow", "x", 3.0)), 0.5), 0.5)),
    lambda w: w("Mul", "x", w("Sigmoid", w("Mul", 2 * SLOPE, w("Add", "x", w("Mul", 0.044715, w("Pow", "x", 3.0)))))),
    lambda w: w("Mul", "x", w("Sigmoid", w("Mul", w("Mul", 2 * SLOPE, "x"),
                w("Add", w("Mul", 0.044715, w("Mul", "x", "x")), 1.0)))),
    lambda w: w("Div", w("Mul", "x", w("Add", inner(w, w("Pow", "x", 3.0)), 1.0)), 2.0),
]  # fmt: skip
SILU: list[Spelling] = [
    lambda w: w("Div", "x", w("Add", 1.0, w("Exp", w("Neg", "x")))),
    lambda w: w("Div", "x", w("Add", w("Exp", w("Mul", "x", -1.0)), 1.0)),
    lambda w: w("Mul", "x", w("Reciprocal", w("Add", w("Exp", w("Neg", "x")), 1.0))),
    lambda w: w("Mul", "x", w("Div", 1.0, w("Add", 1.0, w("Exp", w("Neg", "x"))))),
    lambda w: w("Mul", "x", w("Mul", 0.5, w("Add", w("Tanh", w("Mul", 0.5, "x")), 1.0))),
    lambda w: w("Mul", w("Div", "x", 2.0), w("Add", w("Tanh", w("Div", "x", 2.0)), 1.0)),
    lambda w: w("Mul", "x", w("Pow", w("Add", w("Exp", w("Neg", "x")), 1.0), -1.0)),
    lambda w: w("Mul", "x", w("Sub", 1.0, w("Sigmoid", w("Neg", "x")))),
]
SIGMOID: list[Spelling] = [
    lambda w: w("Reciprocal", w("Add", w("Exp", w("Neg", "x")), 1.0)),
    lambda w: w("Div", 1.0, w("Add", 1.0, w("Exp", w("Neg", "x")))),
    lambda w: w("Mul", 0.5, w("Add", w("Tanh", w("Mul", 0.5, "x")), 1.0)),
    lambda w: w("Sub", 1.0, w("Sigmoid", w("Neg", "x"))),
]
SPELLINGS = [
    *((["HardSwish"], s) for s in HARD_SWISH),
    *((["HardSigmoid"], s) for s in HARD_SIGMOID),
    *((["Gelu"], s) for s in (*GELU, *GELU_TANH)),
    *((["Sigmoid", "Mul"], s) for s in SILU),
    *((["Sigmoid"], s) for s in SIGMOID),
    (["Mish"], lambda w: w("Mul", "x", w("Tanh", w("Softplus", "x")))),
    (["Mish"], lambda w: w("Mul", w("Tanh", w("Log", w("Add", w("Exp", "x"), 1.0))), "x")),
]


@pytest.mark.parametrize(("expected", "spelling"), SPELLINGS)
def test_every_spelling_becomes_the_operator(expected: list[str], spelling: Spelling) -> None:
    assert ops(canonical(model_of(spelling, SHAPE))) == expected


@pytest.mark.parametrize("opset", range(13, 26))
@pytest.mark.parametrize(("expected", "spelling"), [SPELLINGS[i] for i in (0, 10, 18, 26, 34)])
def test_at_every_opset(expected: list[str], spelling: Spelling, opset: int) -> None:
    graph = canonical(model_of(spelling, SHAPE, opset))
    assert ops(graph) == expected
    assert graph.opset() == max(opset, 20 if expected == ["Gelu"] else 14 if expected == ["HardSwish"] else 13)


def test_gelu_says_which() -> None:
    kinds = [canonical(model_of(s, SHAPE)).nodes[0].attrs.get("approximate", "none") for s in (GELU[0], GELU_TANH[0])]
    assert kinds == ["none", "tanh"]


def test_the_slope_of_a_hard_sigmoid_is_the_models() -> None:
    (node,) = canonical(model_of(lambda w: clip(w, w("Add", w("Mul", "x", 0.2), 0.4), 0.0, 1.0), SHAPE)).nodes
    assert node.op_type == "HardSigmoid"
    np.testing.assert_allclose([node.attrs["alpha"], node.attrs["beta"]], [0.2, 0.4], rtol=1e-6)


NEAR: list[Spelling] = [
    lambda w: w("Div", w("Mul", "x", clip(w, w("Add", "x", 3.001), 0.0, 6.0)), 6.0),
    lambda w: w("Div", w("Mul", "x", clip(w, w("Add", "x", 3.0), 0.0, 6.01)), 6.0),
    lambda w: w("Div", w("Mul", "x", clip(w, w("Add", "x", 3.0), 0.0, 6.0)), 6.001),
    lambda w: w("Mul", w("Mul", "x", w("Add", w("Erf", w("Div", "x", 1.42)), 1.0)), 0.5),
    lambda w: w("Mul", w("Mul", "x", w("Add", w("Erf", w("Div", "x", ROOT)), 1.001)), 0.5),
    lambda w: w("Mul", w("Mul", 0.5, "x"), w("Add", 1.0, w("Tanh", w("Mul", SLOPE, w("Add", "x", w("Mul", 0.0448,
                w("Pow", "x", 3.0))))))),
    lambda w: w("Div", "x", w("Add", 1.001, w("Exp", w("Neg", "x")))),
    lambda w: w("Mul", "x", w("Sigmoid", w("Mul", "x", 1.702))),
    lambda w: clip(w, w("Add", w("Mul", "x", 0.2), 0.5), 0.0, 1.1),
    lambda w: w("Mul", "x", clip(w, w("Add", w("Mul", "x", [[[0.1]], [[0.2]], [[0.3]], [[0.4]]]), 0.5), 0.0, 1.0)),
]  # fmt: skip


@pytest.mark.parametrize("spelling", NEAR)
def test_what_is_nearly_one_stays(spelling: Spelling) -> None:
    model = model_of(spelling, SHAPE)
    assert len(canonical(model).nodes) == len(model.graph.node) - 1  # but for the Identity


def test_what_is_read_elsewhere_stays() -> None:
    def twice(w: Writer) -> str:
        gate = clip(w, w("Add", "x", 3.0), 0.0, 6.0)
        return w("Concat", w("Div", w("Mul", "x", gate), 6.0), gate, axis=1)

    assert ops(canonical(model_of(twice, SHAPE))) == ["Add", "Clip", "Mul", "Div", "Concat"]


def test_an_output_inside_stays() -> None:
    model = model_of(HARD_SWISH[0], SHAPE)
    inside = model.graph.node[1].output[0]
    model.graph.output.append(model.graph.output[0])
    model.graph.output[1].name = inside
    assert ops(canonical(model)) == ["Add", "Clip", "Mul", "Div"]


def test_two_sources_stay() -> None:
    def other(w: Writer) -> str:
        return w("Div", w("Mul", w("Neg", "x"), clip(w, w("Add", w("Abs", "x"), 3.0), 0.0, 6.0)), 6.0)

    assert "HardSwish" not in ops(canonical(model_of(other, SHAPE)))


def test_a_constant_that_adds_a_dimension_stays() -> None:
    def wide(w: Writer) -> str:
        return w("Div", w("Mul", "x", clip(w, w("Add", "x", [[3.0]]), 0.0, 6.0)), 6.0)

    assert ops(canonical(model_of(wide, (5,)))) == ["Add", "Clip", "Mul", "Div"]


def test_the_product_of_a_gate_is_a_spelling_that_stays() -> None:
    assert ops(canonical(model_of(lambda w: w("Mul", "x", w("Sigmoid", "x")), SHAPE))) == ["Sigmoid", "Mul"]
    hard = model_of(lambda w: w("Mul", "x", w("HardSigmoid", "x", alpha=1 / 6, beta=0.5)), SHAPE)
    assert ops(canonical(hard)) == ["HardSigmoid", "Mul"]
