"""`strict_quark` against models that AMD Quark quantized: same quantizers, positions, codes, and outputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import jq
from tests.conftest import SHARED

FOLDER = SHARED and SHARED / "quark_reference"
CASES = [("cnn", False), ("ref", False), ("zoo", False), ("cle", False), ("cle", True), ("t_smallw", False)]

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="needs the models that Quark quantized, shared/spec/quark_reference"
)


def quantizers(model):
    """Scale and zero point of every activation, and scale and codes of every constant operand, by what uses them."""
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    arrays |= {
        n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant"
    }
    made = {o: n for n in model.graph.node for o in n.output}
    activations, weights = {}, {}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            scale, zero_point = arrays[node.input[1]], arrays[node.input[2]]
            name = node.input[0].removesuffix("_QuantizeLinear_Input")
            activations[name] = float(scale), int(zero_point), zero_point.dtype
        elif node.op_type != "DequantizeLinear":
            for index, name in enumerate(node.input):
                if name in made and made[name].op_type == "DequantizeLinear" and made[name].input[0] in arrays:
                    codes, scale = (arrays[i] for i in made[name].input[:2])
                    weights[node.output[0].removesuffix("_QuantizeLinear_Input"), index] = codes, float(scale)
    return activations, weights


def outputs(model, data, count):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = sorted(o.name for o in session.get_outputs())
    count = min([count, *map(len, data.values())])
    return names, [session.run(names, {k: v[i : i + 1] for k, v in data.items()}) for i in range(count)]


@pytest.mark.parametrize(("name", "cle"), CASES)
def test_all_is_quarks(name, cle):
    data = dict(np.load(FOLDER / f"{name}.calib.npz"))
    config = jq.presets["XINT8"].replace(strict_quark=True, cle=cle)
    ours = jq.quantize(FOLDER / f"{name}.onnx", data, config).model
    theirs = onnx.load(FOLDER / f"{name}.XINT8{'_cle' if cle else ''}.onnx")
    (activations, weights), (expected, expected_weights) = quantizers(ours), quantizers(theirs)
    assert activations == expected
    assert weights.keys() == expected_weights.keys()
    for key, (codes, scale) in expected_weights.items():
        assert weights[key][1] == scale, key
        np.testing.assert_array_equal(weights[key][0], codes, err_msg=str(key))
    (names, ours_out), (names_out, theirs_out) = outputs(ours, data, 64), outputs(theirs, data, 64)
    assert names == names_out
    for a, b in zip(ours_out, theirs_out, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_by_default_the_moved_weights_keep_their_values():
    """Tiny weights, whose position Quark moves and whose codes it leaves: 6 dB there."""
    data = dict(np.load(FOLDER / "t_smallw.calib.npz"))
    path = FOLDER / "t_smallw.onnx"
    _, reference = outputs(onnx.load(path), data, 16)

    def decibels(config):
        _, found = outputs(jq.quantize(path, data, config).model, data, 16)
        x, y = np.ravel([a[0] for a in reference]), np.ravel([a[0] for a in found])
        return 10 * np.log10(np.square(x).sum() / np.square(x - y).sum())

    assert decibels("XINT8") > 35
    assert decibels(jq.presets["XINT8"].replace(strict_quark=True, cle=False)) < 10
