"""Factors of equalized channels, read off two models: those that the weights were multiplied by."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.data.sources import open_source
from jq.data.stream import local_mesh
from jq.evidence.side_by_side import BatchSums, Pair, added_up

FACTORS = np.float32(2.0 ** np.linspace(-6, 0, 8))
STEP = 1 / 16  # of the rounded tensor: the smallest channels get a code or none
TENSORS = ("c", "r", "s", "p")


def network(factors: np.ndarray | None = None) -> onnx.ModelProto:
    """Conv, Relu, a sum with another Conv, a pool and a Conv; with factors, in QDQ and equalized by them."""
    rng, arrays, nodes = np.random.default_rng(5), dict[str, np.ndarray](), list[onnx.NodeProto]()
    f = np.ones(8, np.float32) if factors is None else factors

    def rounded(name: str, scale: float, dtype: type) -> str:
        if factors is None:
            return name
        arrays[f"{name}_scale"], arrays[f"{name}_zero"] = np.float32(scale), np.array(0, dtype)
        for op, inputs, output in (("Quantize", name, f"{name}_q"), ("Dequantize", f"{name}_q", f"{name}_back")):
            nodes.append(helper.make_node(f"{op}Linear", [inputs, f"{name}_scale", f"{name}_zero"], [output]))
        return f"{name}_back"

    def conv(x: str, weight: str, y: str, array: np.ndarray) -> None:
        arrays[weight] = array.astype(np.float32)
        nodes.append(helper.make_node("Conv", [x, rounded(weight, 2.0**-13, np.int16)], [y], name=y, pads=[1] * 4))

    conv("x", "w1", "c", rng.standard_normal((8, 3, 3, 3)) / 4 * f[:, None, None, None])
    conv("x", "w2", "d", rng.standard_normal((8, 3, 3, 3)) / 4 * f[:, None, None, None])
    nodes.append(helper.make_node("Relu", ["c"], ["r"], name="relu"))
    nodes.append(
        helper.make_node("Add", [rounded("r", STEP, np.uint8), rounded("d", STEP, np.int8)], ["s"], name="add")
    )
    nodes.append(helper.make_node("MaxPool", ["s"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]))
    conv("p", "w3", "y", rng.standard_normal((4, 8, 3, 3)) / 64 / f[None, :, None, None])
    sides = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", ("N", 3, 8, 8)), ("y", ("N", 4, 4, 4)))
    ]
    tensors = [numpy_helper.from_array(a, k) for k, a in arrays.items()]
    graph = helper.make_graph(nodes, "equalized", sides[:1], sides[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def data(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((16, 3, 8, 8)).astype(np.float32)


def test_factors_are_those_of_the_weights(data: np.ndarray) -> None:
    """On the rounded tensor alone, those of the small channels would be off by more than its rounding."""
    pair = Pair.of(network(), network(FACTORS))
    totals = added_up(BatchSums.of(pair, open_source(data, pair.original.inputs), local_mesh(1)))
    for name in TENSORS:
        np.testing.assert_allclose(totals[name].gains, FACTORS, rtol=0.02, err_msg=name)
    assert (totals["x"].gains == 1).all() and (totals["y"].gains == 1).all()


def test_equalized_channels_are_no_form_of_their_operator(data: np.ndarray) -> None:
    report = jq.compare(network(), network(FACTORS), data)
    rows = {row.tensor: row for row in report.rows}
    for name in ("r", "d", "s", "p"):
        origin = rows[name].origin
        assert origin is not None and abs(origin.parts["form"]) < 0.02, name
    assert rows["r"].reason == rows["d"].reason == "rounding"
    assert report.attribution is not None
    assert abs(sum(layer.effects["form"] for layer in report.attribution.layers)) < 0.02


def test_channels_that_are_not_scaled_have_no_factors(data: np.ndarray) -> None:
    pair = Pair.of(network(), network(np.ones(8, np.float32)))
    totals = added_up(BatchSums.of(pair, open_source(data, pair.original.inputs), local_mesh(1)))
    assert all((total.gains == 1).all() for total in totals.values())
