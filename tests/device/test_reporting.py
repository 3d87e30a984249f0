"""The device report: made on the CPU and on a vitisai that is played, read back, and refused where it is damaged."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

import jq
from jq.device import report_file
from jq.device.report_file import Recorded
from jq.errors import ConfigError, DataError
from tests.cli.test_commands import run
from tests.device.test_provider_report import report_of
from tests.readings.test_runtime import Played

FLOAT = jq.zoo.path("fashion_resnet")
IMAGES, LABELS = (a[:4] for a in jq.zoo.evaluation_set())


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return jq.quantize(FLOAT, IMAGES, "XINT8").model


@pytest.fixture(scope="module")
def made(model):
    return jq.npu.device_report(model, IMAGES, reading="cpu", labels=LABELS)


def test_what_the_cpu_makes(model, made):
    d = made.document
    wanted = np.stack([jq.open_reading(model)({"input": x[None]})["logits"] for x in IMAGES])
    np.testing.assert_array_equal(made.outputs["logits"].values(), wanted)
    assert made.outputs["logits"].array().dtype == np.uint8
    assert d["placement"]["source"] == "forecast"
    assert d["placement"]["counts"] == dict(jq.npu.forecast(model).counts)
    assert set(d["agreement"]) == {"aie2_x1", "aie2_even", "ort"} and d["agreement"]["ort"]["outputs"][0]["equal"] == 1
    x1 = np.stack([jq.integer.load(model)({"input": x[None]})["logits"] for x in IMAGES])
    row = d["agreement"]["aie2_x1"]["outputs"][0]
    assert row["equal"] == (x1 == wanted).mean() and row["largest"] == np.abs(x1 - wanted).max()
    assert row["steps"] == row["largest"] / made.outputs["logits"].scale
    assert d["accuracy"]["cpu"]["top1"] == (wanted[:, 0].argmax(-1) == LABELS).mean()
    assert d["timing"]["p50_ms"] > 0


def test_nothing_of_the_user_is_inside(tmp_path, monkeypatch, model):
    folder = tmp_path / "home of somebody"
    folder.mkdir()
    onnx.save(model, folder / "net.onnx")
    for i, image in enumerate(IMAGES):
        np.save(folder / f"secret{i}.npy", image)
    made = jq.npu.device_report(
        folder / "net.onnx", IMAGES, reading=jq.Provider("cpu", {"where": str(folder / "x.json")}), benchmark=False
    )
    text = json.dumps(made.to_dict())
    assert "somebody" not in text and "secret" not in text and made.document["run"]["options"] == {"where": "x.json"}
    assert made.inputs["input"].array() is None and made.inputs["input"].histogram is None
    whole = jq.npu.device_report(model, IMAGES, reading="cpu", benchmark=False, with_inputs=True)
    np.testing.assert_array_equal(whole.inputs["input"].array()[:, 0], IMAGES)


def test_outputs_that_are_pictures_are_hashed(tmp_path):
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 3, 32, 32]) for n in "xy")
    graph = onnx.helper.make_graph([node], "g", [x], [y])
    picture = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10)
    data = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    made = jq.npu.device_report(picture, data, reading="cpu", benchmark=False)
    assert made.outputs["y"].array() is None and sum(made.outputs["y"].histogram["counts"]) == data.size
    assert "not quantized" in made.document["agreement"]["aie2_x1"]["absent"]
    made.to_json(tmp_path / "r.json")
    assert "output y [2,1,3,32,32]: hashes and a histogram" in str(jq.npu.read_device_report(tmp_path / "r.json"))


def test_vitisai_writes_its_report_which_is_read(monkeypatch, model):
    forecast = jq.npu.forecast(model)
    Played(monkeypatch, report=report_of(forecast))
    made = jq.npu.device_report(model, IMAGES, benchmark=False)
    assert made.document["placement"]["source"] == "provider" and made.document["placement"]["subgraphs"] == 4
    assert set(made.document["placement"]["nodes"].values()) == {"npu", "vitis_ep_cpu"}
    assert made.document["run"]["provider"] == "vitisai" and "onnxruntime" in made.document["agreement"]
    assert not any("/" in value for value in made.document["run"]["options"].values())


def test_values_that_are_no_codes_and_samples_of_several_shapes():
    odd = Recorded.of("y", [np.float32([1, np.nan])], whole=False)
    assert odd.histogram == {"low": 1.0, "high": 1.0, "counts": [1], "not_finite": 1}
    several = Recorded.of("y", [np.zeros((1, 2), np.float32), np.zeros((1, 3), np.float32)])
    assert several.shape is None and several.array() is None and len(set(several.sha256)) == 2


def test_a_report_is_read_back(made, tmp_path):
    made.to_json(tmp_path / "r.json")
    again = jq.npu.read_device_report(tmp_path / "r.json")
    assert again.to_dict() == made.to_dict() and str(again) == str(made)
    np.testing.assert_array_equal(again.outputs["logits"].array(), made.outputs["logits"].array())


DAMAGE = {
    "cut off": (lambda d: json.dumps(d)[:500], "not JSON, or was cut off"),
    "foreign": (lambda d: '{"a": 1}', "is not a device report"),
    "a list": (lambda d: "[]", "is not a device report"),
    "the provider's": (lambda d: '{"deviceStat": []}', "the provider's own report, which `jq-quant npu"),
    "newer": (lambda d: {**d, "version": 9}, "has version 9, and this jq reads 1"),
    "changed": (lambda d: {**d, "samples": 5}, "was changed after it was written"),
    "no timing": (lambda d: {k: v for k, v in d.items() if k != "timing"}, "has no 'timing'"),
    "wrong type": (lambda d: {**d, "samples": "4"}, "samples needs a whole number; got \"4\""),
    "deep": (lambda d: "[" * 100_000, "not JSON, or was cut off"),
    "text for a mapping": (lambda d: {**d, "versions": "1"}, "versions needs an object"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused_in_words(kind, made, tmp_path):
    damage, message = DAMAGE[kind]
    content = damage(made.to_dict())
    (tmp_path / "r.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=message):
        jq.npu.read_device_report(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", "AAAA"), ("data", "?"), ("shape", [4, 1, 11]), ("shape", [-4]), ("shape", [1] * 65), ("shape", [0, 1 << 70]),
        ("dtype", "O"),
    ],
)  # fmt: skip
def test_damaged_codes_are_refused_even_with_a_right_checksum(field, value, made, tmp_path):
    d = made.to_dict()
    d["outputs"][0][field] = value
    del d["checksum"]
    d["checksum"] = report_file._checksum(d)
    (tmp_path / "r.json").write_text(json.dumps(d))
    with pytest.raises(DataError, match="tensor 'logits'"):
        jq.npu.read_device_report(tmp_path / "r.json")


def test_the_commands(model, tmp_path, capfd):
    onnx.save(model, tmp_path / "q.onnx")
    np.save(tmp_path / "x.npy", IMAGES)
    np.save(tmp_path / "l.npy", LABELS)
    quantized, data, report = (str(tmp_path / n) for n in ("q.onnx", "x.npy", "r.json"))
    code, out, err = run(capfd, "device-report", quantized, "--data", data, "-o", report, "--no-benchmark")
    assert code == 0 and "written:" in out
    assert "vitisai" in jq.readings.provider.available() or "has no vitisai" in err
    assert run(capfd, "device-report", "--read", report)[1].splitlines()[:-1] == out.splitlines()[:-2]
    assert run(capfd, "device-report")[0] == 2 and run(capfd, "device-report", quantized, "--read", report)[0] == 2
    asked = ("--reading", "cpu", "--provider-option", "a=b", "--benchmark", "--json")
    _, out, _ = run(capfd, "infer", quantized, "--data", data, "-o", str(tmp_path / "made"), *asked)
    assert json.loads(out)["benchmark"]["p99_ms"] >= json.loads(out)["benchmark"]["p50_ms"]
    _, out, _ = run(
        capfd, "evaluate", "--model", quantized, "--data", data, "--labels", str(tmp_path / "l.npy"), *asked
    )
    assert json.loads(out)["benchmark"][quantized]["throughput"] > 0
    _, out, _ = run(capfd, "simulate", quantized, "--data", data, *asked)
    assert json.loads(out)["benchmark"]["reading"] == json.loads(out)["onnxruntime_provider"] == "cpu"
    _, out, err = run(capfd, "compare", str(FLOAT), quantized, "--data", data, *asked)
    assert out, err
    assert "logits by cpu" in json.loads(out)["facts"] and json.loads(out)["benchmark"]["runs"]
    code, _, err = run(capfd, "infer", quantized, "--data", data, "-o", str(tmp_path / "n"), "--provider-option", "a")
    assert code == 2 and "--provider-option needs the form NAME=VALUE; got 'a'" in err
    code, _, err = run(
        capfd, "infer", quantized, "-o", str(tmp_path / "n"), "--reading", "jq", "--provider-option", "a=1"
    )
    assert code == 2 and "need --reading with a provider of onnxruntime" in err


def test_labels_need_an_output_and_readings_a_provider(model):
    with pytest.raises(ConfigError, match=r"needs a provider of onnxruntime.*got 'aie2_x1'"):
        jq.npu.device_report(model, IMAGES, reading="aie2_x1")
    with pytest.raises(ConfigError, match="one of logits; got 'y'"):
        jq.npu.device_report(model, IMAGES, reading="cpu", labels=LABELS, output="y", benchmark=False)
