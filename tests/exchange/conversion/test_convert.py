"""Conversions together: their order, what is refused, and files written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import jq
from jq.cli import main
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node

MODEL = jq.zoo.path("fashion_resnet")
IMAGES = jq.zoo.calibration_set()[0]


def run(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


def test_all_at_once_is_one_after_the_other(tmp_path: Path) -> None:
    model = jq.quantize(MODEL, IMAGES[:16], "A8W8").model
    found = jq.convert(
        model, tmp_path / "new" / "out.onnx", dequantize=True, opset=21, shapes={"input": (2, 1, 28, 28)}, nhwc=True, to="bf16"
    )  # fmt: skip
    assert onnx.load(tmp_path / "new" / "out.onnx") == found
    assert [d.dim_value for d in found.graph.input[0].type.tensor_type.shape.dim] == [2, 28, 28, 1]
    assert found.opset_import[0].version == 21
    steps = model
    for step in (
        {"dequantize": True},
        {"opset": 21},
        {"shapes": {"input": (2, 1, 28, 28)}},
        {"nhwc": True},
        {"to": "bf16"},
    ):
        steps = jq.convert(steps, **step)  # type: ignore[arg-type]
    feeds = {"input": IMAGES[:2].transpose(0, 2, 3, 1)}
    np.testing.assert_array_equal(onnxruntime_outputs(found, feeds)[0], onnxruntime_outputs(steps, feeds)[0])


def test_quantized_models_keep_every_bit() -> None:
    model = jq.quantize(MODEL, IMAGES[:16], "A8W8").model
    found = jq.convert(model, uint8_activations=True, opset=21, shapes={"input": (4, 1, 28, 28)}, nhwc=True)
    (have,) = onnxruntime_outputs(found, {"input": IMAGES[:4].transpose(0, 2, 3, 1)})
    np.testing.assert_array_equal(have, onnxruntime_outputs(model, {"input": IMAGES[:4]})[0])


@pytest.mark.parametrize("opset", [16, 17, 21, 22])
@pytest.mark.parametrize("name", ["fashion_resnet", "fashion_mobilenet"])
def test_another_opset_computes_the_same(name: str, opset: int) -> None:
    model = onnx.load(jq.zoo.path(name))
    found = jq.convert(model, opset=opset)
    assert found.opset_import[0].version == opset
    feeds = {"input": IMAGES[:4]}
    np.testing.assert_array_equal(onnxruntime_outputs(found, feeds)[0], onnxruntime_outputs(model, feeds)[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"to": "fp17"}, "to needs one of fp32, fp16, bf16; got 'fp17'. Did you mean"),
        ({"to": "fp16", "form": "casts"}, "form needs one of .*got 'casts'. Did you mean 'cast'"),
        ({"dequantize": True, "uint8_activations": True}, "use one of the two"),
        ({"to": "fp32", "saturate": True}, "only to conversions to fp16 and bf16"),
        ({"keep_io": False}, "only to conversions to fp16 and bf16"),
        ({"opset": 99}, "opset 99"),
        ({"opset": "17"}, "opset '17'"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(jq.ConfigError, match=match):
        jq.convert(MODEL, tmp_path / "out.onnx", **options)
    assert os.listdir(tmp_path) == []


def test_the_model_itself_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(Path(MODEL).read_bytes())
    with pytest.raises(jq.ConfigError, match="is the float model itself"):
        jq.convert(path, path, nhwc=True)
    assert path.read_bytes() == Path(MODEL).read_bytes()


def test_activations_beyond_the_type_are_named_with_data() -> None:
    nodes = [node("Mul", ["x", "k"], ["big"], name="big"), node("Mul", ["big", "j"], ["y"], name="small")]
    model = build(nodes, {"k": np.float32(1e4), "j": np.float32(1e-4)}, x=("N", 3))
    data = np.float32([[1, 2, 3], [4, -7, 6]])
    with pytest.raises(
        jq.ModelError, match="1 activations exceed the range of float16, which ends at 65504: 'big' reaches 70000"
    ):
        jq.convert(model, to="fp16", data=data)
    with pytest.warns(UserWarning, match="'big' reaches 70000"):
        jq.convert(model, to="fp16", data=data, saturate=True)
    jq.convert(model, to="bf16", data=data)
    found = jq.convert(model, to="fp16", form="native", data=data, exclude=["big", "small"])
    np.testing.assert_allclose(onnxruntime_outputs(found, {"x": data})[0], data, rtol=1e-3)


class TestCommand:
    def test_it_converts_and_says_what(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "out.onnx"
        argv = [
            "convert",
            str(MODEL),
            "-o",
            str(path),
            "--to",
            "fp16",
            "--form",
            "native",
            "--shape",
            "input=1,1,28,28",
        ]
        code, out, err = run(capfd, *argv)
        assert (code, err) == (0, "")
        assert "input input: float32[1,1,28,28]" in out and f"written: {path}" in out
        assert onnx.load(path) == jq.convert(MODEL, to="fp16", form="native", shapes={"input": (1, 1, 28, 28)})

    def test_json(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "out.onnx"
        code, out, _ = run(
            capfd, "convert", str(MODEL), "-o", str(path), "--nhwc", "--no-keep-io", "--to", "bf16", "--json"
        )
        found = json.loads(out)
        assert code == 0 and found["inputs"] == ["input: bfloat16[N,28,28,1]"] and found["output"] == str(path)
        assert found["weight_bytes"]["bfloat16"] > 0

    @pytest.mark.parametrize("argv", [[], ["--shape", "input"], ["--to", "int8"], ["--shape", "input=a"]])
    def test_mistakes_are_one_line(self, argv: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        code, out, err = run(capfd, "convert", str(MODEL), "-o", str(tmp_path / "out.onnx"), *argv)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
        assert os.listdir(tmp_path) == []
