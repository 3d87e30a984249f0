"""Two models side by side, against onnxruntime's tensors and numpy, and models of which the answer is known."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.cli import main
from jq.evidence.report import TensorRow, worst_first
from tests.conftest import SHARED

FLOAT = TensorProto.FLOAT


@pytest.fixture(scope="module")
def images():
    return jq.zoo.calibration_set()[0][:24]


@pytest.fixture(scope="module")
def quantized(images):
    """With no equalization, so that every tensor is the float one and its error."""
    config = jq.presets["XINT8"].replace(cle=False, bias_correction=False)
    return jq.quantize(jq.zoo.path("fashion_resnet"), images, config).model


@pytest.fixture(scope="module")
def report(images, quantized):
    return jq.compare(jq.zoo.path("fashion_resnet"), quantized, images)


def tensors_of(model, images):
    """Every float tensor of a model by onnxruntime, without its optimizations."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    known = {o.name for o in model.graph.output}
    inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
    kinds = {v.name: v.type.tensor_type.elem_type for v in inferred}
    names = [o for n in model.graph.node for o in n.output if o not in known and kinds.get(o) == FLOAT]
    model.graph.output.extend(helper.make_tensor_value_info(n, FLOAT, None) for n in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    every = [o.name for o in session.get_outputs()]
    return {"input": images} | dict(zip(every, session.run(every, {"input": images}), strict=True))


def test_figures_are_those_of_onnxruntimes_tensors(images, quantized, report):
    """A value near a tie may get the next code in one of them, so not to the last digit."""
    ours, theirs = tensors_of(onnx.load(jq.zoo.path("fashion_resnet")), images), tensors_of(quantized, images)
    compared = 0
    for row in report.rows:
        twin = next((n for n in (f"{row.tensor}_DequantizeLinear_Output", row.tensor) if n in theirs), None)
        if row.kind == "weight" or twin is None or row.tensor not in ours:
            continue
        x, y = ours[row.tensor].astype(np.float64), theirs[twin].astype(np.float64)
        e = y - x
        want = {
            "cosine": (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()),
            "l2": np.sqrt(np.square(e).reshape(len(e), -1).sum(1)).mean(),
            "psnr": 10 * np.log10(np.ptp(x) ** 2 / np.square(e).mean()),
        }
        assert row.sqnr == pytest.approx(10 * np.log10((x * x).sum() / (e * e).sum()), abs=0.05), row.tensor
        assert {k: getattr(row.error, k) for k in want} == pytest.approx(want, rel=5e-3), row.tensor
        assert (row.low, row.high) == pytest.approx((x.min(), x.max()), rel=1e-4, abs=1e-5)
        assert row.error.largest == pytest.approx(np.abs(e).max(), rel=0.2)
        compared += 1
    assert compared > 30


def test_what_is_made_here_is_the_rounding_of_the_float_tensor(images, report):
    row = next(r for r in report.rows if r.tensor == "input")
    x = images.astype(np.float64)
    lost = x - (np.clip(np.rint(x / row.scale) + row.zero_point, 0, 255) - row.zero_point) * row.scale
    beyond = (x < row.bounds[0]) | (x > row.bounds[1])
    assert row.error.made == pytest.approx(row.sqnr) == pytest.approx(10 * np.log10((x**2).sum() / (lost**2).sum()))
    assert row.error.saturated == pytest.approx(beyond.mean(), abs=1e-6)
    assert row.error.own == 1 and row.error.largest == pytest.approx(np.abs(lost).max(), rel=1e-6)
    assert row.error.clipped == pytest.approx((lost**2)[beyond].sum() / (lost**2).sum(), rel=1e-4)
    assert row.error.shift == pytest.approx(lost.mean() ** 2 * lost.size / (lost**2).sum(), rel=1e-4)
    assert sum(row.values.counts) == x.size


def test_weights_are_compared_with_the_folded_ones(quantized, report):
    arrays = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    params = jq.prepare(jq.load(jq.zoo.path("fashion_resnet"))).params
    row = next(r for r in report.rows if r.tensor == "stage1.0.conv1.weight")
    codes = next(a for n, a in arrays.items() if n.startswith("stage1.0.conv1.weight") and a.ndim == 4)
    x = params[row.tensor].astype(np.float64)
    lost = codes * row.scale - x
    assert row.sqnr == pytest.approx(10 * np.log10((x**2).sum() / (lost**2).sum()))
    assert row.reason == "rounding" and row.error.own == 1
    assert row.channels == tuple((float(c.min()), float(c.max())) for c in params[row.tensor])


def test_the_worst_is_first(report):
    known = [r.sqnr for r in report.rows if r.reason != "changed"]
    assert known == sorted(known) and len(known) > 40

    def row(name, sqnr, reason):
        return TensorRow(name, "weight", "", "int8", 1.0, 0, 0, -1.0, 1.0, sqnr, (), reason=reason)

    rows = [row("known", 3.0, ""), row("nan", None, "not finite"), row("none", None, ""), row("bias", -9.0, "changed")]
    assert [r.tensor for r in worst_first(rows)] == ["nan", "known", "bias", "none"]


@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_identical_models_have_no_error_at_all(images, quantized, kind, tmp_path):
    model = quantized if kind == "quantized" else onnx.load(jq.zoo.path("fashion_resnet"))
    found = jq.compare(model, model, images[:5])
    assert all(r.sqnr == np.inf and r.reason == "" for r in found.rows) and found.unmatched == {
        "float": (),
        "quantized": (),
    }
    zeros = [(r.error.l2, r.error.largest, r.error.cosine, r.error.psnr) for r in found.rows]
    assert set(zeros) == {(0.0, 0.0, 1.0, np.inf)}
    found.to_json(tmp_path / "report.json")

    def refuse(literal):
        raise AssertionError(f"{literal} is not JSON")

    again = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert {t["sqnr"] for t in again["tensors"]} == {None} and {t["error"]["l2"] for t in again["tensors"]} == {0.0}


def test_batches_and_limit_do_not_matter(images, quantized, report):
    path = jq.zoo.path("fashion_resnet")
    some = jq.compare(path, quantized, [{"input": images[:7]}, {"input": images[7:]}], limit=24)
    assert [r.tensor for r in some.rows] == [r.tensor for r in report.rows] and some.facts["samples"] == "24"
    assert [r.sqnr for r in some.rows] == pytest.approx([r.sqnr for r in report.rows], rel=1e-4)
    assert jq.compare(path, quantized, images, limit=3).facts["samples"] == "3"


# ---------------------------------------------------------------------------------------------
# Models of which the reason is known
# ---------------------------------------------------------------------------------------------


def qdq(name, scale, zero_point=0, dtype=np.int8, source=None):
    """A quantizer as onnxruntime's tool names it, and its arrays."""
    codes, back = f"{name}_QuantizeLinear_Output", f"{name}_DequantizeLinear_Output"
    nodes = [
        helper.make_node("QuantizeLinear", [source or name, f"{name}_scale", f"{name}_zero"], [codes]),
        helper.make_node("DequantizeLinear", [codes, f"{name}_scale", f"{name}_zero"], [back]),
    ]
    arrays = {f"{name}_scale": np.float32(scale), f"{name}_zero": np.array(zero_point, dtype)}
    return nodes, arrays, back


def model_of(nodes, arrays, shape=("N", 3, 4, 4), out="y"):
    sides = [helper.make_tensor_value_info(n, FLOAT, shape) for n in ("x", out)]
    tensors = [numpy_helper.from_array(np.asarray(a), k) for k, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", sides[:1], sides[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def two_relus(*scales):
    """x -> Neg -> a -> Neg -> y, each tensor rounded with its scale or not at all."""
    nodes, arrays, at = [], {}, "x"
    for name, scale in zip(("x", "a"), scales, strict=True):
        if name == "a":
            nodes.append(helper.make_node("Neg", [at], ["a"], name="first"))
            at = "a"
        if scale is not None:
            made, more, at = qdq(name, scale)
            nodes, arrays = nodes + made, arrays | more
    return model_of([*nodes, helper.make_node("Neg", [at], ["y"], name="second")], arrays)


FLOAT_MODEL = two_relus(None, None)


def rows_of(model, data, original=FLOAT_MODEL):
    return {r.tensor: r for r in jq.compare(original, model, data).rows}


@pytest.fixture
def data(rng):
    return rng.uniform(-1, 1, (20, 3, 4, 4)).astype(np.float32)


def test_rounding_and_what_comes_of_it(data):
    found = rows_of(two_relus(1 / 64, None), data)
    assert {k: r.reason for k, r in found.items()} == {"x": "rounding", "a": "upstream", "y": "upstream"}
    assert (
        found["y"].sqnr == pytest.approx(found["x"].sqnr) == pytest.approx(10 * np.log10(1 / 3 * 12 * 64**2), abs=0.3)
    )


def test_clipping_is_named(data):
    """A finer grid would not help, a coarser one would, and nothing forbids it."""
    found = rows_of(two_relus(None, 1 / 512), data)["a"]
    assert (found.reason, found.error.better) == ("range", -7)
    assert found.error.saturated == pytest.approx((np.abs(data) > 0.25).mean(), abs=0.01)


def test_clipping_is_not_taken_for_equalization(data):
    found = rows_of(two_relus(None, 1 / 8192), data)
    assert all(r.note == "" for r in found.values()) and found["y"].sqnr < 1


def test_a_shift_of_means_is_a_matter_of_the_bias(data):
    def model(bias):
        nodes = [helper.make_node("Add", ["x", "b"], ["y"], name="add")]
        return model_of(nodes, {"b": np.float32(bias).reshape(3, 1, 1)})

    found = rows_of(model([0.1, 0.2, 0.3]), data, model([0, 0, 0]))["y"]
    assert found.reason == "bias" and found.error.shift == pytest.approx(1, abs=1e-3)


def test_an_exponent_that_constraints_forbid(data):
    """A Concat's operands have one position on the NPU: the small one's best is not allowed."""

    mul = helper.make_node("Mul", ["x", "c"], ["small"], name="mul")
    neg = helper.make_node("Neg", ["x"], ["large"], name="neg")
    factor, shape = {"c": np.float32(2**-6).reshape(1, 1, 1, 1)}, ("N", "C", 4, 4)
    original = model_of([mul, neg, helper.make_node("Concat", ["small", "large"], ["y"], axis=1)], factor, shape)
    small, large, joined = (qdq(name, 2**-7) for name in ("small", "large", "y"))
    joined[0][0].input[0], joined[0][1].output[0] = "concat", "y"
    concat = helper.make_node("Concat", [small[2], large[2]], ["concat"], axis=1)
    nodes = [mul, neg, *small[0], *large[0], concat, *joined[0]]
    found = rows_of(model_of(nodes, factor | small[1] | large[1] | joined[1], shape), data, original)
    assert (found["small"].reason, found["small"].error.better) == ("constraint", -9)
    assert found["large"].reason == "rounding" and found["y"].reason == "upstream"  # its step is that of its operands


def test_nan_and_infinity_are_reported_not_summed(data, tmp_path):
    def model(scale):
        nodes, arrays, at = qdq("x", scale) if scale else ([], {}, "x")
        return model_of([*nodes, helper.make_node("Log", [at], ["y"])], arrays)

    found = jq.compare(model(None), model(1 / 64), data)
    worst = found.rows[0]
    assert (worst.tensor, worst.reason, worst.sqnr, worst.error) == ("y", "not finite", None, None)
    found.to_html(tmp_path / "r.html")
    found.to_json(tmp_path / "r.json")
    assert "not finite" in (tmp_path / "r.html").read_text() and "NaN" not in (tmp_path / "r.json").read_text()


# ---------------------------------------------------------------------------------------------
# Equalized networks, other tools
# ---------------------------------------------------------------------------------------------


def test_equalized_tensors_are_compared_in_their_own_scale(data, rng):
    """Rows of one weight scaled, columns of the next scaled back: without the factors, errors larger than signals."""
    factors = np.float32([0.25, 0.5, 2, 4, 1, 1])
    first, second = rng.normal(size=(6, 3, 1, 1)).astype(np.float32), rng.normal(size=(3, 6, 1, 1)).astype(np.float32)
    bias, ones = rng.normal(size=6).astype(np.float32), np.ones(6, np.float32)

    def model(scale, rounded):
        nodes, arrays, names = [], {"zero": np.int8(0)}, {}
        columns = scale.reshape(-1, 1, 1)
        for name, array in {"v": first * columns[:, None], "b": bias * scale, "w": second / columns}.items():
            step = np.float32(np.abs(array).max() / 127)
            arrays[name], names[name] = array, name
            if rounded:
                del arrays[name]
                arrays |= {f"{name}_quantized": np.rint(array / step).astype(np.int8), f"{name}_scale": step}
                names[name] = f"{name}_DequantizeLinear_Output"
                given = [f"{name}_quantized", f"{name}_scale", "zero"]
                nodes.append(helper.make_node("DequantizeLinear", given, [names[name]]))
        nodes.append(helper.make_node("Conv", ["x", names["v"], names["b"]], ["c"]))
        nodes.append(helper.make_node("Relu", ["c"], ["r"]))
        return model_of([*nodes, helper.make_node("Conv", ["r", names["w"]], ["y"])], arrays)

    found = rows_of(model(factors, True), data, model(ones, False))
    assert {k for k, r in found.items() if r.note} == {"c", "r", "v", "b", "w"}
    assert all(r.sqnr > 20 for r in found.values())
    low, high = re.search("scaled by (.*) to (.*) are", found["c"].note).groups()
    assert (float(low), float(high)) == pytest.approx((0.25, 4), rel=0.1)
    assert not any(r.note for r in rows_of(model(ones, True), data, model(ones, False)).values())


@pytest.mark.parametrize(
    "name", ["cnn.XINT8", "ref.A8W8", "cle.XINT8_cle", "ort/cnn.qdq_u8s8", "ort/cnn.qoperator_u8s8"]
)
def test_models_of_other_tools(name):
    folder = None if SHARED is None else SHARED / "quark_reference"
    if folder is None or not folder.is_dir():
        pytest.skip("the models that Quark and onnxruntime quantized are not here: shared/spec")
    stem = name.removeprefix("ort/").split(".")[0]
    path = SHARED / "ort_reference" / f"{name.removeprefix('ort/')}.onnx" if "/" in name else folder / f"{name}.onnx"
    data = dict(np.load(folder / f"{stem}.calib.npz"))
    value = jq.load(folder / f"{stem}.onnx").inputs[0]
    data = {value.name: next(iter(data.values()))}
    found = jq.compare(folder / f"{stem}.onnx", path, data, limit=8)
    activations = [r for r in found.rows if r.kind == "activation"]
    floats = len(activations) + len(found.unmatched["float"])
    assert len(activations) > 0.7 * floats
    assert np.median([r.sqnr for r in activations]) > 20  # single ones of these models are hopeless


# ---------------------------------------------------------------------------------------------
# What users do wrong; the command
# ---------------------------------------------------------------------------------------------


def test_models_that_do_not_belong_together(data):
    other = model_of([helper.make_node("Neg", ["z"], ["y"])], {})
    other.graph.input[0].name = "z"
    with pytest.raises(jq.ModelError, match="different inputs"):
        jq.compare(FLOAT_MODEL, other, data)
    renamed = model_of([helper.make_node("Neg", ["x"], ["out"])], {}, out="out")
    found = jq.compare(FLOAT_MODEL, renamed, data)
    assert found.unmatched == {"float": ("a", "y"), "quantized": ("out",)}
    assert "only in the float model: 2 tensors" in found.summary()


@pytest.mark.parametrize("limit", [0, -1, 1.5, "all"])
def test_limits_that_are_none(data, limit):
    with pytest.raises(jq.ConfigError, match="at least one sample"):
        jq.compare(FLOAT_MODEL, FLOAT_MODEL, data, limit=limit)


def test_the_command(quantized, images, tmp_path, capsys):
    onnx.save(quantized, tmp_path / "q.onnx")
    np.save(tmp_path / "d.npy", images)
    given = ["compare", str(jq.zoo.path("fashion_resnet")), str(tmp_path / "q.onnx"), "--data", str(tmp_path / "d.npy")]
    for name in ("r.html", "r.json"):
        with pytest.raises(SystemExit) as end:
            main([*given, "--limit", "4", "--json", "--report", str(tmp_path / name)])
        assert end.value.code == 0
    printed = json.loads(capsys.readouterr().out.split("}\n{")[0] + "}")
    assert printed["facts"]["samples"] == "4" and printed == json.loads((tmp_path / "r.json").read_text())
    with pytest.raises(SystemExit) as end:
        main([*given, "--report", str(tmp_path / "r.txt")])
    assert end.value.code == 2 and "needs a name that ends in" in capsys.readouterr().err
