"""The outputs of quantized models, compared with the float ones in onnxruntime."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.evidence.outputs import Reference, output_losses, warn_of_outputs
from jq.evidence.verdict import OutputLoss


def product(factor, other=1.0):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 4))]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("N", 4)) for name in "yz"]
    nodes = [helper.make_node("Mul", ["x", name], [out]) for name, out in zip("ab", "yz", strict=True)]
    constants = [numpy_helper.from_array(np.float32(v), k) for k, v in {"a": factor, "b": other}.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_losses_are_those_of_each_output():
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    reference = Reference.of(jq.load(product(1.0)), x)
    kept = {loss.name: loss.sqnr for loss in output_losses(reference, product(1.1, np.nan)).outputs}
    assert kept["y"] == pytest.approx(20, abs=1e-3) and kept["z"] == -np.inf


def test_what_keeps_little_is_warned_of():
    with pytest.warns(UserWarning, match=r"'y' 2\.0 dB.*try"):
        warn_of_outputs([OutputLoss("y", 2.0), OutputLoss("z", 20.0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_outputs([OutputLoss("y", 20.0)])


def test_a_model_that_onnxruntime_does_not_run_has_no_figures():
    broken = product(1.0)
    broken.graph.node[0].op_type = "NoSuchOperator"
    x = np.zeros((2, 4), np.float32)
    assert output_losses(Reference.of(jq.load(product(1.0)), x), broken).outputs == ()
    assert output_losses(Reference.of(jq.load(broken), x), product(1.0)).outputs == ()
