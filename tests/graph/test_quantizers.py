"""One answer to "is this model quantized": of `lint` before any work, and of `quantize`."""

from __future__ import annotations

import numpy as np
import pytest

import jq
from jq.graph.domains import CONTRIB, MICROSOFT, QUARK, VITIS
from tests.passes.models import build, node

QUANTIZED = [
    *[
        ("", op)
        for op in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul")
    ],
    *[("", op) for op in ("ConvInteger", "MatMulInteger")],
    *[(MICROSOFT, op) for op in ("QuantizeLinear", "DequantizeLinear", "QLinearAdd", "QGemm", "QAttention")],
    *[(MICROSOFT, op) for op in ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits")],
    *[(QUARK, op) for op in ("ExtendedQuantizeLinear", "ExtendedDequantizeLinear", "BFPQuantizeDequantize")],
    *[(QUARK, "MXQuantizeDequantize"), (CONTRIB, "FixNeuron")],
    *[(VITIS, op) for op in ("VitisQuantizeLinear", "VitisDequantizeLinear", "BFPFixNeuron", "MXFixNeuron")],
]


def with_operator(domain: str, op_type: str) -> jq.Graph:
    graph = jq.load(
        build([node("Conv", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"])], {"w": np.ones((4, 4, 1, 1), np.float32)})
    )
    changed = {graph.nodes[1]: graph.nodes[1].replace(op_type=op_type, domain=domain)}
    return graph.edit(changed).replace(opsets={"": 17, **({domain: 1} if domain else {})})


@pytest.mark.parametrize(("domain", "op_type"), QUANTIZED)
def test_quantize_refuses_what_lint_calls_quantized(domain, op_type):
    graph = with_operator(domain, op_type)
    assert [f.severity for f in jq.lint(graph) if f.rule == "already-quantized"] == ["error"]
    with pytest.raises(jq.ModelError, match=f"quantized already: node .* is a .*{op_type}"):
        jq.quantize(graph, {"x": np.ones((2, 4, 5, 6), np.float32)})


@pytest.mark.parametrize("op_type", ["Relu", "Clip", "Abs"])
def test_a_float_model_is_not_quantized(op_type):
    graph = with_operator("", op_type)
    assert "already-quantized" not in [f.rule for f in jq.lint(graph)]
    assert len(jq.quantize(graph, {"x": np.ones((2, 4, 5, 6), np.float32)}).plan)
