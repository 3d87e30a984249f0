"""`jq.ops.masks`: masks of attention in the spellings of exporters, and what quantizing makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import jq
from jq.ops.masks import masks
from tests.conftest import onnxruntime_outputs
from tests.flow import stages
from tests.passes.models import build, node, normal

LOWEST = np.float32(np.finfo(np.float32).min)
ARRAYS = {"one": np.float32(1), "ax": np.array([1]), "w": normal(8, 8, seed=3) * np.float32(0.4)}
SPREAD = [node("Unsqueeze", ["mask", "ax"], ["u"]), node("Cast", ["u"], ["f"], to=TensorProto.FLOAT)]
SEEN = [node("Unsqueeze", ["mask", "ax"], ["u"]), node("Cast", ["u"], ["b"], to=TensorProto.BOOL)]
FAR = [*SPREAD, node("Sub", ["one", "f"], ["l"]), node("Mul", ["l", "far"], ["m"])]
CAUSAL = np.triu(np.full((5, 5), -np.inf, np.float32), 1)
CASES = {
    "torch": ([*FAR, node("Add", ["s", "m"], ["y"])], {"far": LOWEST}, {"far", "m", "y"}),
    "bert": ([*FAR, node("Add", ["m", "s"], ["y"])], {"far": np.float32(-10000)}, {"far", "m", "y"}),
    "taken away": ([*FAR, node("Sub", ["s", "m"], ["y"])], {"far": np.float32(1e9)}, {"far", "m", "y"}),
    "where": ([*SEEN, node("Where", ["b", "s", "far"], ["y"])], {"far": np.float32(-np.inf)}, {"far", "y"}),
    "causal": ([node("Add", ["s", "far"], ["y"])], {"far": CAUSAL}, {"far", "y"}),
}


def attention(middle, arrays):
    """Attention of a sequence to itself, with the scores "s" and the masked ones "y"."""
    nodes = [node("MatMul", ["x", "w"], ["q"]), node("Transpose", ["x"], ["t"], perm=[0, 2, 1])]
    nodes += [node("MatMul", ["q", "t"], ["s"]), *middle, node("Softmax", ["y"], ["p"], axis=-1)]
    nodes += [node("MatMul", ["p", "x"], ["z"])]
    mask = helper.make_tensor_value_info("mask", TensorProto.INT64, ["N", 5])
    used = {i for n in nodes for i in n.input}
    arrays = {k: a for k, a in (ARRAYS | arrays).items() if k in used}
    return build(nodes, arrays, x=("N", 5, 8), outputs=("z",), extra_inputs=[mask] if "mask" in used else ())


@pytest.mark.parametrize("config", ["XINT8", "A8W8", "BF16"])
@pytest.mark.parametrize("name", CASES)
def test_a_mask_stays_in_float_and_the_scores_do_not(name, config):
    middle, arrays, held = CASES[name]
    model = attention(middle, arrays)
    assert masks(jq.load(model)) == held
    data = {"x": normal(6, 5, 8), "mask": np.arange(5) < np.array([5, 3, 4, 1, 2, 5])[:, None]}
    data = {v.name: data[v.name].astype(v.dtype) for v in jq.load(model).inputs}
    result = jq.quantize(model, data, config)
    assert "s" in result.plan and not held & set(result.plan)
    (want,), (have,) = (onnxruntime_outputs(m, data) for m in (model, result.model))
    assert 10 * np.log10(np.square(want).sum() / np.square(want - have).sum()) > 25
    assert [f for f in jq.lint(model, config) if f.rule == "non-finite"] == []


@pytest.mark.parametrize("name", ["torch", "where"])
def test_every_stage_passes_a_mask(name):
    model = attention(*CASES[name][:2])
    data = {"x": normal(4, 5, 8), "mask": (np.arange(5) < np.array([[5], [3], [4], [1]])).astype(np.int64)}
    assert list(stages(model, data, "A8W8"))[-1] == "sensitivity"


def test_large_numbers_elsewhere_are_no_masks():
    nodes = [node("Mul", ["x", "k"], ["a"]), node("Relu", ["a"], ["r"]), node("Softmax", ["r"], ["y"])]
    assert not masks(jq.load(build(nodes, {"k": np.float32(1e4)}))) and not masks(
        jq.load(build(nodes[:2], {"k": np.float32(1e4)}, outputs=("r",)))
    )
