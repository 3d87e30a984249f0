"""Odd models and data: each is finetuned to a file that onnxruntime runs as jq simulates it, or an error says why not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal
from tests.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STAGES = ("adaround+block", "adaquant", "bias")
W = normal(4, 4, 3, 3, seed=1)
V = normal(4, 4, 3, 3, seed=2)
B = normal(4, seed=3)
IMAGES = normal(6, 4, 6, 6, seed=4)
X = ("N", 4, 6, 6)


def info(name: str, *shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def conv(x: str, y: str, w: str = "w", *b: str, **attrs: Any) -> onnx.NodeProto:
    return node("Conv", [x, w, *b], [y], **{"pads": [1] * 4, **attrs})


def branches() -> onnx.NodeProto:
    """An If whose branches capture a tensor and a constant."""
    bodies = {
        side: helper.make_graph([node(op, ["r", "k"], [side])], side, [], [onnx.ValueInfoProto(name=side)])
        for side, op in (("then", "Mul"), ("else", "Add"))
    }
    return node("If", ["yes"], ["i"], then_branch=bodies["then"], else_branch=bodies["else"])


def loop() -> onnx.NodeProto:
    """Adds a captured tensor three times."""
    body = helper.make_graph(
        [node("Add", ["before", "r"], ["after"]), node("Identity", ["go"], ["on"])],
        "body",
        [info("i", kind=TensorProto.INT64), info("go", kind=TensorProto.BOOL), info("before", *X)],
        [info("on", kind=TensorProto.BOOL), info("after", *X)],
    )
    return node("Loop", ["three", "", "r"], ["l"], body=body)


MATRIX = normal(4, 5, seed=5)
ROWS = normal(6, 7, 4, seed=6)
Case = tuple[onnx.ModelProto, dict[str, np.ndarray]]


def cases() -> dict[str, Case]:
    pair = [info("z", *X)]
    ids = np.random.default_rng(1).integers(0, 5, (6, 3))
    two = {"x": IMAGES, "z": IMAGES[::-1] * 2}
    weights = {"w": W, "v": V, "b": B}
    arrays = weights | {"m": MATRIX}
    relu = node("Relu", ["a"], ["r"])
    shape = np.int64
    return {
        "no_layers": (build([node("Relu", ["x"], ["a"]), node("Add", ["a", "x"], ["y"])], x=X), {"x": IMAGES}),
        "shared_bias": (
            build([conv("x", "a", "w", "b"), relu, conv("r", "y", "v", "b")], weights, x=X), {"x": IMAGES}
        ),
        "shared_weight": (
            build([conv("x", "a", "w", "b"), relu, conv("r", "y", "w")], weights, x=X), {"x": IMAGES}
        ),
        "batch_of_one": (build([conv("x", "a", "w", "b"), relu, conv("r", "y", "v")], weights, x=(1, 4, 6, 6)), {"x": IMAGES}),
        "batch_of_three": (build([conv("x", "a", "w", "b"), relu, conv("r", "y", "v")], weights, x=(3, 4, 6, 6)), {"x": IMAGES}),
        "reshape_of_one": (
            build(
                [conv("x", "a", "w", "b"), relu, node("Reshape", ["r", "s"], ["f"]), node("Gemm", ["f", "g"], ["y"])],
                weights | {"s": np.array([1, 144], shape), "g": normal(144, 5, seed=8)}, x=(1, 4, 6, 6),
            ), {"x": IMAGES},
        ),
        "strings": (
            build([conv("x", "y"), node("Identity", ["words"], ["z"])],
                  weights | {"words": np.array(["a", "b"], object)}, x=X, outputs=("y", "z")), {"x": IMAGES},
        ),
        "batched_weight": (
            build([node("MatMul", ["x", "k"], ["a"]), relu, node("MatMul", ["r", "q"], ["y"])],
                  {"k": normal(2, 4, 5, seed=7), "q": normal(5, 3, seed=8)}, x=("N", 2, 7, 4)), {"x": normal(6, 2, 7, 4)},
        ),
        "two_inputs": (
            build([conv("x", "a"), conv("z", "c", "v"), node("Add", ["a", "c"], ["y"])], weights, x=X, extra_inputs=pair),
            two,
        ),
        "input_read_late": (
            build([conv("x", "a"), relu, node("Add", ["r", "z"], ["c"]), conv("c", "y", "v")], weights, x=X, extra_inputs=pair),
            two,
        ),
        "integers_read_late": (
            build(
                [conv("x", "a"), relu, node("GlobalAveragePool", ["r"], ["p"]), node("Flatten", ["p"], ["f"]),
                 node("MatMul", ["f", "m"], ["c"]), node("Gather", ["t", "ids"], ["e"]),
                 node("ReduceMean", ["e"], ["n"], axes=[1], keepdims=0), node("Add", ["c", "n"], ["y"])],
                arrays | {"t": normal(5, 5, seed=9)}, x=X, extra_inputs=[info("ids", "N", 3, kind=TensorProto.INT64)],
            ), {"x": IMAGES, "ids": ids},
        ),
        "layer_inside_a_part": (
            build(
                [node("Relu", ["x"], ["n"]), conv("n", "a"), node("GlobalAveragePool", ["a"], ["p"]),
                 node("Flatten", ["p"], ["f"]), node("Cast", ["ids"], ["g"], to=1), node("ReduceMean", ["g"], ["h"], axes=[1]),
                 node("Add", ["f", "h"], ["y"])],
                weights, x=X, extra_inputs=[info("ids", "N", 3, kind=TensorProto.INT64)],
            ), {"x": IMAGES, "ids": ids},
        ),
        "not_quantized_input": (build([node("Sin", ["x"], ["s"]), conv("s", "a"), relu, conv("r", "y", "v")], weights, x=X), {"x": IMAGES}),  # noqa: E501
        "transposed": (
            build([conv("x", "a"), relu, node("ConvTranspose", ["r", "v", "b"], ["y"], strides=[2, 2])], weights, x=X),
            {"x": IMAGES},
        ),
        "weight_on_the_left": (
            build([node("MatMul", ["k", "x"], ["a"]), relu, node("MatMul", ["r", "q"], ["y"])],
                  {"k": normal(3, 7, seed=7), "q": normal(4, 5, seed=8)}, x=("N", 7, 4)), {"x": ROWS},
        ),
        "products_of_activations": (
            build([node("MatMul", ["x", "k"], ["a"]), node("MatMul", ["x", "q"], ["c"]),
                   node("Transpose", ["c"], ["d"], perm=[0, 2, 1]), node("MatMul", ["a", "d"], ["e"]),
                   node("Softmax", ["e"], ["f"]), node("MatMul", ["f", "a"], ["y"])],
                  {"k": normal(4, 5, seed=7), "q": normal(4, 5, seed=8)}, x=("N", 7, 4)), {"x": ROWS},
        ),
        "weight_of_rank_3": (
            build([node("MatMul", ["x", "k"], ["a"]), relu, node("MatMul", ["r", "q"], ["y"])],
                  {"k": normal(1, 4, 5, seed=7), "q": normal(5, 3, seed=8)}, x=("N", 7, 4)), {"x": ROWS},
        ),
        "weight_of_rank_1": (
            build([node("MatMul", ["x", "q"], ["a"]), relu, node("MatMul", ["r", "k"], ["y"])],
                  {"k": normal(5, seed=7), "q": normal(4, 5, seed=8)}, x=("N", 7, 4)), {"x": ROWS},
        ),
        "gemm_of_transposed": (
            build([node("Gemm", ["x", "k", "c"], ["a"], transA=1), relu, node("Gemm", ["r", "q"], ["y"], transB=1, alpha=0.5)],
                  {"k": normal(4, 5, seed=7), "q": normal(3, 5, seed=8), "c": normal(5)}, x=(4, 3)), {"x": normal(24, 3)},
        ),
        "gemm_beta": (
            build([node("Gemm", ["x", "k", "c"], ["y"], beta=0.25)], {"k": normal(4, 5, seed=7), "c": normal(5)}, x=("N", 4)),
            {"x": normal(16, 4)},
        ),
        "gemm_bias_of_one": (
            build([node("Gemm", ["x", "k", "c"], ["y"])], {"k": normal(4, 5, seed=7), "c": normal(1)}, x=("N", 4)),
            {"x": normal(16, 4)},
        ),
        "gemm_bias_of_rows": (
            build([node("Gemm", ["x", "k", "c"], ["y"])], {"k": normal(4, 5, seed=7), "c": normal(3, 5)}, x=(3, 4)),
            {"x": normal(12, 4)},
        ),
        "one_dimension": (
            build([node("Conv", ["x", "l", "b"], ["a"]), relu, node("Conv", ["r", "l2"], ["y"], dilations=[2])],
                  {"l": normal(4, 4, 3, seed=7), "l2": normal(2, 4, 2, seed=8), "b": B}, x=("N", 4, 9)), {"x": normal(6, 4, 9)},
        ),
        "classes": (
            build([conv("x", "a"), relu, node("GlobalAveragePool", ["r"], ["p"]), node("Flatten", ["p"], ["f"]),
                   node("MatMul", ["f", "m"], ["y"]), node("ArgMax", ["y"], ["best"])], arrays, x=X, outputs=("y", "best")),
            {"x": IMAGES},
        ),
        "classes_alone": (
            build([conv("x", "a"), relu, node("ArgMax", ["r"], ["y"], axis=1)], weights, x=X), {"x": IMAGES},
        ),
        "input_as_output": (
            build([conv("x", "y"), node("Identity", ["x"], ["same"])], weights, x=X, outputs=("y", "same")), {"x": IMAGES},
        ),
        "constant_output": (
            build([conv("x", "y"), node("Neg", ["b"], ["c"])], weights, x=X, outputs=("y", "c")), {"x": IMAGES},
        ),
        "output_read_again": (
            build([conv("x", "a"), relu, conv("r", "y", "v")], weights, x=X, outputs=("r", "y")), {"x": IMAGES},
        ),
        "one_after_the_other": (
            build([conv("x", "a"), conv("x", "c", "v"), node("Relu", ["c"], ["d"]), relu, node("Add", ["r", "d"], ["y"])], weights, x=X),  # noqa: E501
            {"x": IMAGES},
        ),
        "shape_arithmetic": (
            build([conv("x", "a"), relu, node("Shape", ["r"], ["s"]), node("Gather", ["s", "zero"], ["n"]),
                   node("Concat", ["n", "rest"], ["t"], axis=0), node("Reshape", ["r", "t"], ["f"]),
                   node("Gemm", ["f", "g"], ["y"])],
                  weights | {"zero": np.array([0], shape), "rest": np.array([-1], shape), "g": normal(144, 5, seed=8)}, x=X),
            {"x": IMAGES},
        ),
        "if": (
            build([conv("x", "a"), relu, node("ReduceMean", ["r"], ["u"], keepdims=0), node("Greater", ["u", "o"], ["yes"]),
                   branches(), conv("i", "y", "v")], weights | {"k": np.float32(2), "o": np.float32(0.1)}, x=(1, 4, 6, 6)),
            {"x": IMAGES},
        ),
        "loop": (
            build([conv("x", "a"), relu, loop(), conv("l", "y", "v")], weights | {"three": np.array(3, shape)}, x=X),
            {"x": IMAGES},
        ),
        "zeros": (build([conv("x", "a", "w", "b"), relu, conv("r", "y", "v")], weights, x=X), {"x": IMAGES * 0}),
        "zero_weights": (build([conv("x", "a"), relu, conv("r", "y", "v")], {"w": W * 0, "v": V}, x=X), {"x": IMAGES}),
        "tiny": (build([conv("x", "a"), relu, conv("r", "y", "v")], {"w": W * 1e-20, "v": V * 1e-16}, x=X), {"x": IMAGES}),
        "huge": (build([conv("x", "a"), relu, conv("r", "y", "v")], {"w": W * 1e15, "v": V * 1e15}, x=X), {"x": IMAGES}),
    }  # fmt: skip


CASES = cases()
CONFIG = jq.presets["XINT8"].replace(finetune_steps=6, finetune_batch=3)


def flow(name: str, config: jq.QuantConfig) -> None:
    model, data = CASES[name]
    before = model.SerializeToString()
    found = jq.quantize(model, data, config)
    assert model.SerializeToString() == before
    assert all(np.isfinite(a).all() for a in found.graph.params.values())
    assert all(
        np.isfinite(found.plan[k].scale).all() and np.all(np.asarray(found.plan[k].scale) > 0) for k in found.plan
    )
    assert jq.npu.constraints.violations(found.graph, found.plan, config) == []
    size = next((d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim), 0) or len(data["x"])
    feeds = {k: a[:size] for k, a in data.items()}
    simulated = jq.fake_quant(found.graph)(found.graph.params, found.plan, feeds)
    for value, want in zip(found.graph.outputs, onnxruntime_outputs(found.model, feeds), strict=True):
        have = np.asarray(simulated[value.name])
        if want.dtype.kind not in "fiu":
            np.testing.assert_array_equal(have, want)
            continue
        known = found.plan.get(value.name)
        step = float(known.scale) if known is not None else 1e-4 * np.abs(want).max() + 1e-30
        assert np.isfinite(want).all() and np.max(np.abs(have - want)) <= 1.01 * step
        assert np.mean(np.abs(have - want) > 0.5 * step) < 0.05


@pytest.mark.parametrize(("name", "stage"), sampled(itertools.product(CASES, STAGES[:2]), 5))
def test_model(name: str, stage: str) -> None:
    flow(name, CONFIG.replace(finetune=stage))
