"""Eighty mistakes that users make: each ends with a line that says what is wrong and what to do, and never with 0."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq
from jq.cli import main

MODEL, OTHER = (jq.zoo.path(name) for name in ("fashion_resnet", "fashion_mobilenet"))
Files = dict[str, str]  # by what they are

# The words of a command line, in which {name} is a file of `files`, and what the line has to say.
MISTAKES: dict[str, tuple[str, str]] = {
    # Paths.
    "a model that is not there": ("quantize {none}.onnx", "No such file"),
    "a model by its name's beginning": ("quantize {stem}", "No such file"),
    "a folder as the model": ("inspect {folder}", "Is a directory"),
    "an image as the model": ("lint {image}", "model"),
    "a text as the model": ("quantize {text}", "model"),
    "an empty file as the model": ("inspect {empty}", "model"),
    "an array as the model": ("npu {npy}", "model"),
    "data that are not there": ("quantize {model} --data {none}", "No such file"),
    "an empty folder as data": ("quantize {model} --data {folder}", "holds neither arrays nor images"),
    "a text as data": ("calibrate {model} --data {text}", "no arrays of numbers"),
    "a damaged array as data": ("quantize {model} --data {damaged}", "damaged"),
    "a damaged archive as data": ("quantize {model} --data {damaged_npz}", "damaged"),
    "a config that is not there": ("quantize {model} --config {none}.toml", "No such file"),
    "labels that are not there": ("evaluate --model {model} --data {npy} --labels {none}.csv", "No such file"),
    "a provider's report that is not there": ("npu {quantized} --report {none}.json", "No such file"),
    "a loader that is not there": ("quantize {model} --data {none}.py:load", "not a Python file"),
    "a preprocessing that is not there": ("quantize {model} --data {npy} --prep {none}.toml", "No such file|cannot read"),
    # Folders and outputs.
    "an output in a folder that is not there": ("quantize {model} -o {none}/x.onnx", "--make-dirs"),
    "a report in a folder that is not there": ("quantize {model} --report {none}/r.html", "--make-dirs"),
    "the model as its own output": ("quantize {model} -o {model}", "which is read as well"),
    "a report of an unknown kind": ("quantize {model} --report r.pdf", ".html or .json"),
    "a picture of an unknown kind": ("sensitivity {model} --plot p.png", ".svg"),
    "a ledger of an unknown kind": ("auto {model} --ledger l.txt", ".jsonl"),
    "a folder as the output": ("quantize {model} -o {folder}", "folder|directory"),
    "results into a folder with files": ("infer {model} --data {npy} -o {full}", "exists|empty|new folder"),
    "a dump into a folder with files": ("simulate {quantized} --data {npy} --dump {full}", "exists|empty|new folder"),
    # Names.
    "a command's name": ("quantise {model}", "quantize"),
    "an unknown command": ("frobnicate", "No such command"),
    "a preset's name": ("quantize {model} --config XINT9", "XINT8"),
    "a preset in a loose spelling": ("quantize {model} --config xint8_adarond", "XINT8_ADAROUND"),
    "a chip's name": ("npu {model} --chip strix", "stx"),
    "a backend's name": ("npu {model} --backend X3", "X2"),
    "a backend that the chip has not": ("npu {model} --chip phx --backend X2", "X1"),
    "a target's name": ("simulate {quantized} --data {npy} --target aie3", "aie2_x1"),
    "a reading's name": ("infer {model} --data {npy} -o {none} --reading gpu", "reading|provider"),
    "a format's name": ("quantize {model} --format qqd", "qdq"),
    "a preprocessing's name": ("quantize {model} --data {npy} --prep imagnet", "imagenet"),
    "an option's name": ("quantize {model} --calib {npy}", "--calib"),
    "an option of the config": ("quantize {model} --set metod=minmax", "method"),
    "a method's name": ("quantize {model} --set method=minmx", "minmax"),
    "a loss's name": ("sensitivity {model} --loss kld", "kl"),
    "how to group": ("sensitivity {model} --by leyer", "layer"),
    "a mode's name": ("sensitivity {model} --mode single", "alone"),
    "which tensors": ("sensitivity {model} --kind acts", "activations"),
    "a metric's name": ("evaluate --model {model} --data {npy} --metric mask", "masks"),
    "a node that is not there": ("quantize {model} --data {npy} --input-node stm", "stem"),
    "an output node that is not there": ("quantize {model} --data {npy} --output-node logit", "logits"),
    "an output that is not there": ("evaluate --model {model} --data {npy} --labels {labels} --output y", "logits"),
    "a function that is not there": ("quantize {model} --data {loader}:lod", "load"),
    "a metric's function that is not there": ("evaluate --model {model} --data {npy} --metric {loader}:score", "score"),
    # Layouts, shapes and types.
    "images of another size": ("quantize {model} --data {large}", "28"),
    "arrays of another rank": ("quantize {model} --data {flat}", "28"),
    "arrays of words": ("quantize {model} --data {words}", "str|<U"),
    "arrays with NaN": ("quantize {model} --data {nan}", "NaN"),
    "no samples": ("quantize {model} --data {nothing}", "no samples|empty|0 samples|length"),
    "another input's name": ("quantize {model} --data {renamed}", "input"),
    "a loader that returns nothing": ("quantize {model} --data {loader}:nothing", "returned None"),
    "a loader that fails": ("quantize {model} --data {failing}:load", "ZeroDivisionError"),
    "a loader without a function": ("quantize {model} --data {loader}", "FUNCTION"),
    "a shape that cannot be": ("inspect {model} --shape input=1,1,-28,28", "shape|--shape"),
    "a shape of no input": ("inspect {model} --shape image=1,1,28,28", "input"),
    "a mean of words": ("quantize {model} --data {npy} --mean a,b", "--mean"),
    "a mean of too many channels": ("quantize {model} --data {bytes} --mean 1,2,3", "channel"),
    "a deviation of zero": ("quantize {model} --data {bytes} --std 0", "std"),
    "a scale of zero": ("quantize {model} --data {bytes} --scale 0", "scale"),
    "an order of channels": ("quantize {model} --data {bytes} --order BRG", "BGR"),
    "too few labels": ("evaluate --model {model} --data {npy} --labels {few}", "labels for"),
    "labels of floats": ("evaluate --model {model} --data {npy} --labels {npy}", "whole numbers"),
    "labels in words": ("evaluate --model {model} --data {npy} --labels {text}", "whole number"),
    # Orders of arguments, and what is what.
    "compare's models swapped": ("compare {quantized} {model} --data {npy}", "float model first"),
    "a quantized model that is not there": ("compare {model} {none}.onnx --data {npy}", "No such file"),
    "a model that onnxruntime is to load": ("infer {none}.onnx --data {npy} -o {none}", "No such file"),
    "another network's quantized model": ("compare {other} {image_model} --data {npy}", "different inputs"),
    "a quantized model to quantize": ("quantize {quantized} --data {npy}", "quantized already"),
    "a config of a quantized model": ("npu {quantized} --config A8W8", "quantized already"),
    "a float model to simulate": ("simulate {model} --data {npy}", "quantized"),
    "no model": ("quantize --data {npy}", "needs one float ONNX file"),
    "two models": ("quantize {model} --model_input {model}", "needs one float ONNX file"),
    "compare with one model": ("compare {model}", "Missing argument"),
    "evaluate with one folder": ("evaluate {folder}", "two folders|BASELINE"),
    "data before the model": ("quantize {npy} --data {model}", "model"),
    # Values of options.
    "a limit of zero": ("compare {model} {quantized} --data {npy} --limit 0", "limit"),
    "a limit in words": ("compare {model} {quantized} --data {npy} --limit ten", "--limit"),
    "a setting without a value": ("quantize {model} --set method", "NAME=VALUE"),
    "a setting of another type": ("quantize {model} --set batch=many", "batch"),
    "an override without a value": ("quantize {model} --override stem bias", "PATTERN NAME=VALUE"),
    "a guard in words": ("quantize {model} --guard strong", "dB"),
    "a time without a unit": ("quantize {model} --time-budget soon", "soon"),
    "an opset that is too old": ("quantize {model} --data {npy} --opset 9", "opset"),
    "an opset that is too new": ("quantize {model} --data {npy} --opset 99", "opset"),
    "a target of auto": ("auto {model} --data {npy} --target fast", "top1|agreement"),
    "a target of auto without a number": ("auto {model} --data {npy} --target top1", "top1 -0.5"),
    "a target of auto without labels": ("auto {model} --data {npy} --target 'top1 -1'", "labels"),
    "an option of a provider": ("infer {model} --data {npy} -o {none} --provider-option a", "NAME=VALUE"),
    "a config with an unknown option": ("quantize {model} --config {config}", "metod"),
    "a config that is not TOML": ("quantize {model} --config {broken_toml}", "line|parse|TOML|Invalid"),
    # Damaged models.
    "a model cut in half": ("quantize {half}", "model"),
    "a model without nodes": ("quantize {hollow}", "node|output"),
    "a model with an unknown operator": ("quantize {unknown} --data {npy}", "Magic"),
    "a model with a missing weight": ("inspect {missing}", "weight|missing|w"),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("mistakes")
    images, labels = jq.zoo.calibration_set()
    small = images[:8]
    whole = MODEL.read_bytes()

    def made(name: str, write: Callable[[Path], object]) -> str:
        path = folder / name
        write(path)
        return str(path)

    def model(nodes: list[onnx.NodeProto], shape: tuple[int, ...] = (1, 1, 28, 28)) -> bytes:
        sides = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("input", "y")]
        graph = helper.make_graph(nodes, "g", sides[:1], sides[1:])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.acme", 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())

    full = folder / "full"
    full.mkdir()
    (full / "file.txt").write_text("here")
    (folder / "folder").mkdir()
    quantized = folder / "quantized.onnx"
    jq.quantize(MODEL, small, "XINT8", output=quantized)
    words = np.array(["one", "two"])
    add = helper.make_node("Add", ["input", "w"], ["y"])
    return {
        "model": made("model.onnx", lambda p: p.write_bytes(whole)), "stem": str(folder / "model"),
        "other": made("other.onnx", lambda p: p.write_bytes(OTHER.read_bytes())), "quantized": str(quantized),
        "none": str(folder / "none"), "folder": str(folder / "folder"), "full": str(full),
        "image": made("image.png", lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))),
        "text": made("notes.txt", lambda p: p.write_text("not\na model\n")),
        "empty": made("empty.onnx", lambda p: p.write_bytes(b"")),
        "half": made("half.onnx", lambda p: p.write_bytes(whole[: len(whole) // 2])),
        "hollow": made("hollow.onnx", lambda p: p.write_bytes(model([]))),
        "unknown": made("unknown.onnx", lambda p: p.write_bytes(
            model([helper.make_node("Magic", ["input"], ["y"], domain="com.acme")]))),
        "missing": made("missing.onnx", lambda p: p.write_bytes(model([add]))),
        "image_model": made("image.onnx", lambda p: p.write_bytes(
            model([helper.make_node("Relu", ["input"], ["y"])], (1, 3, 8, 8)))),
        "npy": made("data.npy", lambda p: np.save(p, small)),
        "bytes": made("bytes.npy", lambda p: np.save(p, np.zeros((4, 28, 28, 1), np.uint8))),
        "large": made("large.npy", lambda p: np.save(p, np.zeros((4, 1, 32, 32), np.float32))),
        "flat": made("flat.npy", lambda p: np.save(p, np.zeros((4, 784), np.float32))),
        "words": made("words.npy", lambda p: np.save(p, words)),
        "nan": made("nan.npy", lambda p: np.save(p, np.full_like(small, np.nan))),
        "nothing": made("nothing.npy", lambda p: np.save(p, small[:0])),
        "renamed": made("renamed.npz", lambda p: np.savez(p, picture=small, mask=small)),
        "damaged": made("damaged.npy", lambda p: p.write_bytes(b"\x93NUMPY\x01\x00")),
        "damaged_npz": made("damaged.npz", lambda p: p.write_bytes(b"PK\x03\x04 and no more")),
        "labels": made("labels.npy", lambda p: np.save(p, labels[:8])),
        "few": made("few.npy", lambda p: np.save(p, labels[:3])),
        "loader": made("loader.py", lambda p: p.write_text("def load():\n    return []\n\n\ndef nothing():\n    return None\n")),
        "failing": made("failing.py", lambda p: p.write_text("1 / 0\n")),
        "config": made("config.toml", lambda p: p.write_text('metod = "minmax"\n')),
        "broken_toml": made("broken.toml", lambda p: p.write_text("method = \n")),
    }  # fmt: skip


def test_there_are_eighty() -> None:
    assert len(MISTAKES) >= 80 and len({line for line, _ in MISTAKES.values()}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_never_passes(
    mistake: str, files: Files, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where outputs without a name go
    line, words = MISTAKES[mistake]
    with pytest.raises(SystemExit) as caught:
        main([word.format(**files) for word in shlex.split(line)])
    out, err = capfd.readouterr()
    assert caught.value.code not in (0, None), out
    assert "Traceback" not in err and len(err.splitlines()) <= 6
    last = err.splitlines()[-1]
    assert last.lower().startswith("error: "), err
    assert any(word.lower() in last.lower() for word in words.split("|")), last
    assert not list(tmp_path.iterdir())  # nothing is written
