"""Small models, and what every pass is held to: the float output stays what onnxruntime says of the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from jq.graph import Graph
from jq.graph.read import load
from jq.graph.write import to_model
from jq.passes.prepare import prepare
from jq.readings.tracing import trace
from tests.conftest import onnxruntime_outputs

node = helper.make_node


def build(
    nodes: Sequence[onnx.NodeProto],
    arrays: Mapping[str, np.ndarray] = {},
    *,
    x: Sequence[int | str | None] = (2, 4, 5, 6),
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
    dtype: int = TensorProto.FLOAT,
    extra_inputs: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", dtype, x), *extra_inputs],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(np.asarray(a), k) for k, a in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    # onnxruntime wants the outputs' types, and infers them itself only if they are not there at all.
    inferred = onnx.shape_inference.infer_shapes(model)
    for output in model.graph.output:
        found = next((v for v in inferred.graph.output if v.name == output.name), None)
        output.CopyFrom(found)
    return model


def prepared(model: onnx.ModelProto, *, x: np.ndarray | None = None, **inputs: np.ndarray) -> Graph:
    """The prepared graph, after its outputs were compared with the original's: exported, and traced."""
    graph = load(model)
    result = prepare(graph)
    if x is None:
        x = (
            np.random.default_rng(1)
            .standard_normal([d if isinstance(d, int) else 3 for d in graph.inputs[0].shape])
            .astype(np.float32)
        )
    feeds = {"x": x, **inputs}
    exported = to_model(result)
    onnx.checker.check_model(exported)
    expected, found = onnxruntime_outputs(model, feeds), onnxruntime_outputs(exported, feeds)
    traced = trace(result)(result.params, feeds)
    assert [v.name for v in result.outputs] == [v.name for v in graph.outputs]
    for value, want, have in zip(graph.outputs, expected, found, strict=True):
        assert want.dtype == have.dtype
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * max(1e-30, np.abs(want).max(initial=0)))
        np.testing.assert_allclose(
            traced[value.name], want, rtol=1e-4, atol=1e-5 * max(1e-30, np.abs(want).max(initial=0))
        )
    assert prepare(result) is result  # nothing is left to do
    return result


def ops(graph: Graph) -> list[str]:
    return [n.op_type for n in graph.nodes]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def statistics(prefix: str, channels: int, seed: int = 0) -> dict[str, np.ndarray]:
    gamma, beta, mean = normal(3, channels, seed=seed)
    # small variances: where the epsilon decides
    return {
        f"{prefix}.g": gamma,
        f"{prefix}.b": beta,
        f"{prefix}.m": mean,
        f"{prefix}.v": normal(channels, seed=seed + 1) ** 2 * 1e-4,
    }


def batchnorm(source: str, target: str, prefix: str, **attrs: Any) -> onnx.NodeProto:
    return node("BatchNormalization", [source, *(f"{prefix}.{p}" for p in "gbmv")], [target], name=prefix, **attrs)
