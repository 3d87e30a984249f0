"""`jq.passes.spelled`: a newer operator at an older opset computes what onnxruntime says of the operator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import jq
from jq.graph.read import load
from jq.graph.write import to_model
from jq.passes.opset import with_opset
from jq.readings.runtime import onnxruntime_reading
from tests.passes.models import build, node, normal
from tests.passes.spelling import Writer, model_of

OPERATORS = {
    "LayerNormalization": (17, {}, (normal(8), normal(8))),
    "LayerNormalization without bias": (17, {"axis": 1, "epsilon": 0.1}, (normal(5, 8),)),
    "RMSNormalization": (23, {"epsilon": 0.1}, (normal(8),)),
    "GroupNormalization": (21, {"num_groups": 5, "epsilon": 0.1}, (normal(5), normal(5))),
    "Gelu": (20, {}, ()),
    "Gelu by tanh": (20, {"approximate": "tanh"}, ()),
    "HardSwish": (14, {}, ()),
    "Mish": (18, {}, ()),
}


@pytest.mark.parametrize("case", OPERATORS)
@pytest.mark.parametrize("version", [13, 15, 17, 19, 22])
def test_an_older_opset_computes_the_same(case: str, version: int) -> None:
    since, attrs, held = OPERATORS[case]
    op_type, *_ = case.split()
    arrays = {f"c{i}": a for i, a in enumerate(held)}
    model = build([node(op_type, ["x", *arrays], ["y"], **attrs)], arrays, x=(4, 5, 8), opset=23)
    model.graph.output[0].type.CopyFrom(model.graph.input[0].type)  # onnx does not infer it of GroupNormalization
    graph = with_opset(load(model), version)
    assert graph.opset() == version and graph.output_names == {"y"}
    assert (op_type in {n.op_type for n in graph.nodes}) is (version >= since)
    exported = to_model(graph)
    onnx.checker.check_model(exported)
    feed = {"x": 3 * normal(4, 5, 8)}
    want, have = onnxruntime_reading(model)(feed)["y"], onnxruntime_reading(exported)(feed)["y"]
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [13, 17, 19, 20, 22, None])
def test_a_quantized_model_loads_at_every_opset(opset: int | None) -> None:
    def spelling(w: Writer) -> str:
        x = w("MatMul", "x", normal(8, 8))
        d = w("Sub", x, w.reduce("ReduceMean", x, -1))
        root = w("Sqrt", w("Add", w.reduce("ReduceMean", w("Mul", d, d), -1), 1e-5))
        x = w("MatMul", w("Add", w("Mul", w("Div", d, root), normal(8)), normal(8)), normal(8, 8))
        return w("MatMul", w("Mul", w("Mul", x, 0.5), w("Add", w("Erf", w("Div", x, 2**0.5)), 1.0)), normal(8, 8))

    model, data = model_of(spelling, (2, 5, 8)), {"x": normal(2, 5, 8)}
    made = jq.quantize(model, [data], "XINT8", opset=opset).model
    assert made.opset_import[0].version == (opset or 20)
    want, have = onnxruntime_reading(model)(data)["y"], onnxruntime_reading(made)(data)["y"]
    assert np.square(have - want).mean() < 0.01 * np.square(want).mean()
