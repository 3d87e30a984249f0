"""The whole flow, its report, and what quantization costs in accuracy."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re

import jax
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import jq
from jq.evidence.report import Report, TensorRow
from jq.pipeline import calibrated
from jq.recovery.equalization import equalize_as_quark


@pytest.fixture(scope="module")
def images():
    return jq.zoo.calibration_set()[0]


@pytest.fixture(scope="module")
def result(images, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "model.onnx"
    return jq.quantize(jq.zoo.path("fashion_resnet"), images[:128], output=path), path


def top1(model, x, labels):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.mean(session.run(None, {"input": x})[0].argmax(-1) == labels)


def test_the_file_is_the_model(result):
    found, path = result
    assert path.read_bytes() == found.model.SerializeToString()
    onnx.checker.check_model(path, full_check=True)


def test_xint8_keeps_the_accuracy_of_an_even_network(result):
    """Float is 92.6 % right on these images; the uneven network needs equalization through ReLU6."""
    found, _ = result
    x, labels = jq.zoo.evaluation_set()
    floating = onnx.load(jq.zoo.path("fashion_resnet"))
    assert top1(found.model, x, labels) >= top1(floating, x, labels) - 0.005


def test_bias_correction_is_worth_points_on_the_uneven_network(images):
    """Where Quark's equalization leaves it uneven."""
    x, labels = jq.zoo.evaluation_set()
    config = jq.presets["XINT8"].replace(cle=False)
    graph = equalize_as_quark(jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), config))
    with_it = jq.quantize(graph, images[:128], config).model
    without = jq.quantize(graph, images[:128], config.replace(bias_correction=False)).model
    assert top1(with_it, x, labels) > top1(without, x, labels) + 0.05


def test_equalized_is_said_only_of_a_graph_that_is(images, caplog):
    """A vendor's node without its domain's opset, at which ONNX's shape inference gives up: no channels are found."""
    caplog.set_level("INFO", logger="jq")  # a command that ran before has set it
    graph = jq.load(jq.zoo.path("fashion_mobilenet"))
    config = jq.presets["XINT8"].replace(bias_correction=False)
    calibrated(graph, images[:16], config)
    assert "equalized" in caplog.messages
    caplog.clear()
    last = graph.nodes[-1]
    gelu = last.replace(op_type="Gelu", domain="com.microsoft", inputs=last.outputs, outputs=("y",), attrs={}, name="")
    outputs = (dataclasses.replace(graph.outputs[0], name="y"),)
    broken = graph.replace(nodes=(*graph.nodes, gelu), outputs=outputs)
    with pytest.warns(UserWarning, match=r"shape inference fails.*No opset import for domain com\.microsoft"):
        same = calibrated(broken, images[:16], config).graph
    assert "equalization changed nothing" in caplog.messages and "equalized" not in caplog.messages
    prepared = jq.prepare(broken, config).params
    assert all(np.array_equal(a, prepared[name]) for name, a in same.params.items())


@pytest.mark.parametrize("kind", ["graph", "bytes", "proto"])
def test_models_of_any_kind_give_the_same(images, kind):
    path = jq.zoo.path("fashion_resnet")
    source = {"graph": jq.load(path), "bytes": path.read_bytes(), "proto": onnx.load(path)}[kind]
    by_path, found = (jq.quantize(m, images[:8]).model for m in (path, source))
    assert [t.SerializeToString() for t in found.graph.initializer] == [
        t.SerializeToString() for t in by_path.graph.initializer
    ]


def test_strings_in_a_graph_count_by_their_text():
    """The bytes of an array of strings would be addresses."""
    helper = onnx.helper

    def digest(text):
        words = helper.make_tensor("words", onnx.TensorProto.STRING, [1], [text])
        nodes = [helper.make_node("Conv", ["x", "w"], ["y"]), helper.make_node("Identity", ["words"], ["z"])]
        sides = [("x", 1, ["N", 1, 2, 2]), ("y", 1, ["N", 1, 2, 2]), ("z", onnx.TensorProto.STRING, [1])]
        x, *outputs = (helper.make_tensor_value_info(*side) for side in sides)
        weight = onnx.numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "w")
        model = helper.make_model(
            helper.make_graph(nodes, "g", [x], outputs, [weight, words]),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
        )
        found = jq.quantize(model, np.ones((2, 1, 2, 2), np.float32))
        assert {"x", "w", "y"} == {*found.plan} and set(found.stats.tensors) == {"x", "y"}
        return found.report.facts["source sha256"]

    assert digest("".join(["a", "b"])) == digest("".join(["a", "b"])) != digest("ac")


def test_devices_give_one_devices_model(images):
    mesh = jax.make_mesh((1,), ("batch",), devices=jax.local_devices()[:1])
    path = jq.zoo.path("fashion_resnet")
    assert jq.quantize(path, images[:8], mesh=mesh).model == jq.quantize(path, images[:8]).model


def test_finetuning_is_of_the_graph_without_analytic_correction(images, monkeypatch):
    monkeypatch.setattr("jq.pipeline.correct_biases", lambda *_: pytest.fail("biases are finetuned already"))
    config = jq.presets["XINT8"].replace(finetune="bias", cle=False)
    found = jq.quantize(jq.zoo.path("fashion_resnet"), images[:8], config)
    assert (
        found.plan.weights
        and json.loads({p.key: p.value for p in found.model.metadata_props}["jq.config"])["finetune"] == "bias"
    )


class TestReport:
    def test_every_tensor_has_a_row_and_the_worst_is_first(self, result):
        report = result[0].report
        assert {r.tensor for r in report.rows} == set(result[0].plan)
        known = [r.sqnr for r in report.rows if r.sqnr is not None]
        assert known == sorted(known) and known[0] > 20

    def test_a_weights_noise_is_what_its_codes_lose(self, result):
        found, _ = result
        row = next(r for r in found.report.rows if r.tensor == "stem.weight")
        w, q = found.graph.params["stem.weight"].astype(np.float64), found.plan["stem.weight"]
        lost = w - np.clip(np.rint(w / float(q.scale)), -127, 127) * float(q.scale)
        assert row.sqnr == pytest.approx(10 * np.log10(np.square(w).sum() / np.square(lost).sum()))
        assert (row.kind, row.node, row.format, row.exponent) == ("weight", "stem", "int8", int(q.exponent))

    def test_an_activations_noise_is_what_calibration_measured(self, result, images):
        found, _ = result
        x, q = images[:128].astype(np.float64), found.plan["input"]
        lost = x - (np.clip(np.rint(x / float(q.scale)) + 128, 0, 255) - 128) * float(q.scale)
        row = next(r for r in found.report.rows if r.tensor == "input")
        assert row.sqnr == pytest.approx(10 * np.log10(np.square(x).sum() / np.square(lost).sum()), abs=0.01)
        assert (row.low, row.high) == (images[:128].min(), images[:128].max())

    def test_moves_name_rule_node_and_cost(self, result):
        (move,) = result[0].report.moves
        assert move.rule == "align_pool" and move.tensor == move.node == "pool.mean"
        assert move.error_after > move.error_before > 0
        assert "align_pool of 'pool.mean' moved 'pool.mean'" in result[0].report.summary()
        row = next(r for r in result[0].report.rows if r.tensor == "pool.mean")
        assert row.moves == (f"align_pool: 2^{-move.before} to 2^{-move.after}",)

    def test_json_holds_all_of_it(self, result, tmp_path):
        result[0].report.to_json(tmp_path / "report.json")
        found = json.loads((tmp_path / "report.json").read_text())
        assert len(found["tensors"]) == len(result[0].plan) and found["moves"][0]["rule"] == "align_pool"
        assert found["facts"]["samples"] == "128" and found["findings"]

    def test_the_page_stands_alone(self, result, tmp_path):
        path = tmp_path / "deep" / "report.html"
        result[0].report.to_html(path)
        page = path.read_text()
        assert not re.search("https?:", page) and page.count("<tr>") > len(result[0].plan)
        assert [p.name for p in path.parent.iterdir()] == ["report.html"]

    def test_names_from_a_model_are_text(self, tmp_path):
        hostile = '<script>alert("x")</script>'
        row = TensorRow(hostile, "weight", hostile, "int8", 0.5, -1, 0, -1.0, 1.0, 30.0, (hostile,))
        Report(hostile, {hostile: hostile}, (row,), (), ()).to_html(tmp_path / "report.html")

        class Tags(html.parser.HTMLParser):
            def __init__(self):
                super().__init__()
                self.found = []

            def handle_starttag(self, tag, attrs):
                self.found.append(tag)

        tags = Tags()
        tags.feed((tmp_path / "report.html").read_text())
        assert tags.found.count("script") == 1  # ours
