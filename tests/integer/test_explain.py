"""Counts that can be counted by hand, causes that are the right ones, and nothing left unexplained."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx
import pytest

import jq
from jq.cli import main
from tests.integer.test_chip import REFERENCES, XINT8_NAMES, by_onnxruntime, chain, images, quantized, reference

DEVICES = ("dpu", "aie2_x1", "aie2_even")


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("name", XINT8_NAMES)
def test_every_difference_has_a_cause(name, target):
    _, log = jq.integer.load(quantized(name), target).explain({"input": images()[:8]})
    assert log.unexplained == 0 and log.floats == {}
    differs = sum(row.differs for row in log.rows)
    assert (differs > 0) == (target != "aie2_even")
    assert differs == sum(row.causes.get("tie", 0) for row in log.rows)


@pytest.mark.skipif(not REFERENCES, reason="the reference models are not part of this repository")
@pytest.mark.parametrize("target", jq.integer.TARGETS)
@pytest.mark.parametrize("path", REFERENCES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_difference_on_models_of_other_tools_has_a_cause(path, target):
    model, feeds = reference(path)
    if target == "dpu" and "XINT8" not in path.name:
        with pytest.raises(jq.ModelError, match="powers of two"):
            jq.integer.load(model, target)
        return
    _, log = jq.integer.load(model, target).explain(feeds)
    assert log.unexplained == 0
    assert target != "ort" or all(row.differs == row.diverged == 0 for row in log.rows)


def test_integers_are_those_of_the_run_and_the_first_divergence_is_the_first():
    chip, feeds = jq.integer.load(quantized(XINT8_NAMES[0]), "aie2_x1"), {"input": images()[:8]}
    outputs, log = chip.explain(feeds)
    for tensor, array in chip.codes(feeds).items():
        np.testing.assert_array_equal(log.codes[tensor], array)
    np.testing.assert_array_equal(outputs["logits"], chip(feeds)["logits"])
    first = log.first_divergence
    before = log.rows[: log.rows.index(first)]
    assert first.diverged == first.differs and all(row.diverged == 0 for row in before)


PARAMETERS = {"s": np.float32(1), "z": np.int8(0)}


def log_of(model: onnx.ModelProto, x: np.ndarray, target: str | jq.integer.Target) -> jq.integer.Log:
    _, log = jq.integer.load(model, target).explain({"x": x})
    assert log.unexplained == 0
    return log


def halved(*nodes, **arrays) -> onnx.ModelProto:
    """`real` is what x stands for, `made` is rounded to y in steps of 2."""
    return chain(
        ("DequantizeLinear", "x s z", "real", {}),
        *nodes,
        ("QuantizeLinear", "made two z", "y", {}),
        arrays={**PARAMETERS, "two": np.float32(2), **arrays},
        shape=None,
    )


def test_ties_and_saturations_are_counted():
    x = np.array([[-128, -3, -1, 0, 1, 2, 3, 127]], np.int8)
    log = log_of(halved(("Sum", "real real real", "made", {})), x, "dpu")
    # 3 x / 2: ties where x is odd, but the two at the ends saturate
    assert log.floats == {}
    (row,) = log.rows
    assert (row.ties, row.saturated, row.largest, row.bits) == (5, 2, 384, 10)


@pytest.mark.parametrize(
    ("nodes", "arrays", "x", "cause"),
    [
        ((("Identity", "real", "made", {}),), {}, [[-3, -1, 1, 3]], "tie"),
        ((("AveragePool", "real", "made", {"kernel_shape": [3, 3]}),), {}, np.full((1, 1, 3, 3), 100), "pool factor"),
        ((("LeakyRelu", "real", "made", {"alpha": 0.2}),), {}, [[-124, -123, 7]], "constant"),
        ((("Clip", "real low six", "made", {}),), {"low": np.float32(0), "six": np.float32(6)}, [[50, 2]], "constant"),
    ],
)
def test_causes(nodes, arrays, x, cause):
    target = dataclasses.replace(jq.integer.DPU, name="mine", rounding="half_up", slope_shift=2, slope=None)
    log = log_of(halved(*nodes, **arrays), np.asarray(x, np.int8), target)
    (row,) = log.rows
    assert set(row.causes) == {cause} and row.differs > 0
    assert row.operators == nodes[0][0]
    assert row.factor_error == pytest.approx(7 / 64 * 9 - 1 if cause == "pool factor" else 0)


def test_float32_that_loses_bits_is_flagged_by_the_size_of_the_sums():
    """Weights so that partial sums reach 2**24: 127 * 127 * 1100 is more, times 1000 it is not."""
    for depth, flagged in ((1100, 1), (1000, 0)):
        weight = np.full((depth, 1), 127, np.int8)
        model = chain(
            ("DequantizeLinear", "x s z", "real", {}),
            ("DequantizeLinear", "w s z", "weight", {}),
            ("MatMul", "real weight", "made", {}),
            ("QuantizeLinear", "made big z", "y", {}),
            arrays={**PARAMETERS, "w": weight, "big": np.float32(2**18)},
            shape=(1, depth),
        )
        log = log_of(model, np.full((1, depth), 127, np.int8), "aie2_even")
        assert log.rows[-1].inexact == flagged
        assert log.rows[-1].largest == 127 * 127 * depth


def test_two_batches_add_up():
    chip = jq.integer.load(quantized(XINT8_NAMES[0]), "dpu")
    _, one = chip.explain({"input": images()[:4]})
    _, two = chip.explain({"input": images()[4:8]})
    _, both = chip.explain({"input": images()[:8]})
    assert (one + two).rows == both.rows and (one + two).samples == 8


# ---------------------------------------------------------------------------------------------
# A data set, and the command line
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulate")
    onnx.save(quantized(XINT8_NAMES[0]), folder / "model.onnx")
    np.savez(folder / "data.npz", input=images()[:12])
    return folder


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *map(str, arguments)])
    return stop.value.code or 0


def test_simulate_writes_what_it_found(files, capsys):
    output, dump = files / "found.json", files / "dump"
    options = ("--data", files / "data.npz", "--target", "aie2_even", "-o", output, "--dump", dump)
    assert run(files / "model.onnx", *options) == 0
    text = capsys.readouterr().out
    assert "unexplained: 0" in text and "same class for 100.00%" in text
    found = json.loads(output.read_text())
    assert found["samples"] == 12 and found["unexplained"] == 0
    assert found["onnxruntime"][0]["equal"] == 1.0 and found["onnxruntime_absent"] is None
    manifest = json.loads((dump / "manifest.json").read_text())
    codes = jq.integer.load(files / "model.onnx", "aie2_even").codes({"input": images()[:12]})
    assert [t["tensor"] for t in manifest["tensors"]] == [t["tensor"] for t in found["tensors"]]
    for tensor in manifest["tensors"]:
        held = np.load(dump / tensor["file"])
        assert str(held.dtype) == tensor["dtype"] and list(held.shape) == tensor["shape"]
        np.testing.assert_array_equal(held, codes[tensor["tensor"]])
    assert sorted(p.name for p in dump.iterdir()) == sorted(
        ["manifest.json", *(t["file"] for t in manifest["tensors"])]
    )


def test_agreement_says_how_far_outputs_are_apart(files):
    chip = jq.integer.load(files / "model.onnx", "dpu")
    (found,) = jq.integer.simulate(chip, images()[:12]).agreements
    (theirs,) = by_onnxruntime(quantized(XINT8_NAMES[0]), {"input": images()[:12]}, ["logits"]).values()
    ours = np.asarray(chip({"input": images()[:12]})["logits"])
    assert found.largest == np.abs(ours - theirs).max() > 0
    assert found.equal == np.mean(ours == theirs) and found.top1 == np.mean(ours.argmax(-1) == theirs.argmax(-1))


def test_a_model_that_onnxruntime_cannot_run():
    chip = jq.integer.load(quantized(XINT8_NAMES[0], format="fix_neuron"), "dpu")
    found = jq.integer.simulate(chip, images()[:2])
    assert found.agreements == () and "FixNeuron" in found.without and found.log.samples == 2


def test_simulate_as_json_of_some_samples(files, capsys):
    assert run(files / "model.onnx", "--data", files / "data.npz", "--limit", 4, "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 4


def test_a_folder_of_something_else_is_left_alone(files, capsys):
    other = files / "other"
    other.mkdir()
    (other / "mine.txt").write_text("keep")
    (other / "manifest.json").write_text('{"name": "of a web page"}')
    assert run(files / "model.onnx", "--data", files / "data.npz", "--dump", other) == 2
    assert "not an earlier dump" in capsys.readouterr().err
    assert (other / "mine.txt").read_text() == "keep"


def test_errors_are_one_line(files, capsys):
    assert run(files / "model.onnx", "--target", "nothing") == 2
    assert run(jq.zoo.path(XINT8_NAMES[0]), "--target", "dpu") == 2
    assert run(files / "model.onnx", "--data", files / "data.npz", "--limit", 0) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
