"""Tools that are run as modules, by Quark's paths and with Quark's arguments."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq

IMAGES = jq.zoo.calibration_set()[0][:4]


def run(tool: str, *argv: str) -> None:
    importlib.import_module(f"jq.compat.quark.tools.{tool}").main([str(word) for word in argv])


def outputs(path: Path, images: np.ndarray = IMAGES) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[session.get_inputs()[0].type]
    return session.run(None, {session.get_inputs()[0].name: images.astype(dtype)})[0].astype(np.float32)


def sqnr(path: Path, images: np.ndarray = IMAGES) -> float:
    return jq.metrics.sqnr(outputs(Path(jq.zoo.path("fashion_resnet"))), outputs(path, images))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "int8.onnx"
    jq.quantize(jq.zoo.path("fashion_resnet"), IMAGES, "S8S8_AAWS", output=path)
    return path


@pytest.mark.parametrize("module", ["evaluate", "evaluate.py"])
@pytest.mark.parametrize("spelled", [("--baseline_results_folder", "--quantized_results_folder"), ()])
def test_evaluate(tmp_path: Path, rng: np.random.Generator, spelled: Sequence[str], module: str) -> None:
    folders = [str(tmp_path / name) for name in ("float", "quantized")]
    logits = rng.normal(size=(4, 10)).astype(np.float32)
    for folder, array in zip(folders, (logits, logits + 0.1), strict=True):
        Path(folder).mkdir()
        np.save(Path(folder) / "results.npy", array)
    argv = [word for pair in zip(spelled, folders, strict=True) for word in pair] if spelled else folders
    command = [sys.executable, "-m", f"jq.compat.quark.tools.{module}", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.lower()
    flat, moved = logits.ravel().astype(float), (logits + 0.1).ravel().astype(float)
    cosine = flat @ moved / np.linalg.norm(flat) / np.linalg.norm(moved)
    assert all(name in shown for name in ("cosine", "l2", "psnr"))
    assert f"{cosine:.6g}" in shown


@pytest.mark.parametrize(
    ("tool", "argv", "kept"),
    [
        ("convert_fp32_to_bf16", ("--input", "{model}", "--output", "{made}"), 30),
        ("convert_fp32_to_fp16", ("{model}", "{made}", "--keep_io_types"), 50),
        ("convert_fp32_to_fp16", ("{model}", "{made}"), 50),
        ("convert_fp32_to_fp16", ("--input", "{model}", "--output", "{made}", "--disable_shape_infer"), 50),
        ("convert_fp32_to_fp16", ("{model}", "--keep_io_types", "{made}"), 50),
        ("convert_opset_version", ("{model}", "21", "{made}"), 100),
        ("convert_opset_version", ("--input", "{model}", "--output", "{made}", "--target_opset", "21"), 100),
        ("convert_quant_to_float", ("{int8}", "{made}"), 20),
        ("remove_qdq", ("--input_model", "{int8}", "--output_model", "{made}"), 20),
        ("convert_s8s8_to_u8s8", ("{int8}", "{made}"), 10),
        (
            "fix_shapes",
            ("--input_model_path", "{model}", "--output_model_path", "{made}", "--fix_shapes", "input:[4,1,28,28]"),
            100,
        ),
        ("convert_dynamic_to_fixed", ("--fix_shapes", "input:[4,1,28,28]", "{model}", "{made}"), 100),
        ("random_quantize", ("--input_model", "{model}", "--quant_model", "{made}", "--config", "A8W8"), 0),
        ("random_quantize", ("--input_model_path", "{model}", "--quantized_model_path", "{made}"), 0),
    ],
)
def test_converters(tool: str, argv: Sequence[str], kept: float, quantized: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.onnx"
    paths = {"model": jq.zoo.path("fashion_resnet"), "int8": quantized, "made": made}
    run(tool, *(word.format(**paths) for word in argv))
    assert sqnr(made) > kept
    types = {node.op_type for node in onnx.load(made).graph.node}
    assert ("QuantizeLinear" in types) == (tool in ("random_quantize", "convert_s8s8_to_u8s8"))


def test_through_float16_and_back(tmp_path: Path) -> None:
    model, half, back, short = (tmp_path / name for name in ("a.onnx", "half.onnx", "back.onnx", "bf16.onnx"))
    jq.save(jq.load(jq.zoo.path("fashion_resnet")), model)
    run("convert_fp32_to_fp16", model, half, "--save_as_external_data")
    assert Path(f"{half}.data").exists()
    run("convert_fp16_to_fp32", "--input", half, "--output", back)
    run("convert_fp16_to_bf16", "--input", half, "--output", short, "--format", "with_cast")
    assert sqnr(back) > 50
    assert sqnr(short) > 30
    with pytest.raises(jq.ConfigError, match="with_cast, customqdq, bf16"):
        run("convert_fp32_to_bf16", "--input", model, "--output", short, "--format", "with_casts")


def test_channels_last(tmp_path: Path) -> None:
    made = tmp_path / "nhwc.onnx"
    run("convert_nchw_to_nhwc", jq.zoo.path("fashion_resnet"), made)
    assert sqnr(made, np.moveaxis(IMAGES, 1, -1)) > 100


def test_random_quantize_leaves_out_what_it_is_told(tmp_path: Path) -> None:
    made = tmp_path / "made.onnx"
    labels = [n.label for n in jq.load(jq.zoo.path("fashion_resnet")).nodes if n.op_type == "Conv"]
    run(
        "random_quantize", "--input_model_path", jq.zoo.path("fashion_resnet"), "--quantized_model_path", made,
        "--exclude_nodes", f"{labels[0]}; {labels[1]}", "--save_as_external_data",
    )  # fmt: skip
    assert Path(f"{made}.data").exists()
    weights = [n for n in onnx.load(made).graph.node if n.op_type == "Conv"]
    codes = {o for n in onnx.load(made).graph.node if n.op_type == "DequantizeLinear" for o in n.output}
    assert sum(n.input[1] not in codes for n in weights) == 2


def test_infinite_weights(tmp_path: Path) -> None:
    weight = np.array([[1.0, np.inf], [-np.inf, 2.0]], np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "a.onnx")
    run("replace_inf_weights", "--input_model", tmp_path / "a.onnx", "--output_model", tmp_path / "b.onnx")
    (stored,) = onnx.load(tmp_path / "b.onnx").graph.initializer
    assert numpy_helper.to_array(stored).tolist() == [[1, 10000], [-10000, 2]]


@pytest.mark.parametrize("argv", [(), ("a.onnx",), ("a.onnx", "b.onnx", "c.onnx"), ("a.onnx", "b.onnx", "--no_such")])
def test_arguments_that_are_not_two_files(argv: Sequence[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("convert_nchw_to_nhwc", *argv)


def test_a_users_error_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jq.compat.quark.tools.convert_opset_version", "no.onnx", "21", "b.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
