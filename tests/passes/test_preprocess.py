"""Preprocessing: what onnxruntime's own quant_pre_process makes, and what it cannot do."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization.shape_inference import quant_pre_process

import jq
from jq.cli import main
from jq.graph import write
from jq.graph.read import read_value
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node

MODEL = jq.zoo.path("fashion_resnet")
IMAGES = jq.zoo.calibration_set()[0][:4]


def theirs(model: Any, folder: Path, **options: Any) -> onnx.ModelProto:
    quant_pre_process(model, folder / "theirs.onnx", **options)
    return onnx.load(folder / "theirs.onnx")


def interface(model: onnx.ModelProto) -> tuple[Any, ...]:
    operators = Counter((n.domain, n.op_type) for n in model.graph.node)
    values = {v.name: str(read_value(v)) for v in (*model.graph.value_info, *model.graph.output)}
    return operators, values, model.opset_import[0].version


def transformer() -> onnx.ModelProto:
    """A model of two symbolic dims, with shape arithmetic that only symbolic inference follows."""
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    nodes = [
        node("MatMul", ["x", "w"], ["m"]),
        node("Shape", ["m"], ["s"]),
        node("Slice", ["s", "zero", "two"], ["outer"]),
        node("Concat", ["outer", "heads"], ["to"], axis=0),
        node("Reshape", ["m", "to"], ["r"]),
        node("Transpose", ["r"], ["t"], perm=[0, 2, 1, 3]),
        node("Softmax", ["t"], ["y"], axis=-1),
    ]
    arrays = {"w": w, "zero": np.array([0]), "two": np.array([2]), "heads": np.array([2, 4])}
    return build(nodes, arrays, x=("batch", "length", 8))


@pytest.mark.parametrize(
    "skipped", [(), ("optimization",), ("onnx_shape",), ("symbolic_shape",), ("optimization", "onnx_shape")]
)
@pytest.mark.parametrize("name", ["fashion_resnet", "fashion_mobilenet", "transformer"])
def test_it_is_what_onnxruntime_makes(name: str, skipped: tuple[str, ...], tmp_path: Path) -> None:
    model = transformer() if name == "transformer" else onnx.load(jq.zoo.path(name))
    options = {f"skip_{step}": True for step in skipped}
    onnx.save(model, tmp_path / "model.onnx")
    mine, other = jq.preprocess(model, **options), theirs(tmp_path / "model.onnx", tmp_path, **options)
    if "optimization" in skipped:
        # What lies in Constant nodes is an initializer to jq.
        operators = Counter(n.op_type for n in other.graph.node if n.op_type != "Constant")
        assert Counter(n.op_type for n in mine.graph.node) == operators
    else:
        assert interface(mine)[0] == interface(other)[0]
    have, want = interface(mine)[1], interface(other)[1]
    for tensor in have.keys() & want.keys():
        # Without symbolic inference jq's onnx step still follows shape arithmetic.
        pairs = zip(have[tensor].split(","), want[tensor].split(","), strict=True)
        assert all(a == b or "unk__" in b for a, b in pairs), (have[tensor], want[tensor])
    assert {o for n in other.graph.node for o in n.output if o in want and n.op_type != "Constant"} <= have.keys()
    feeds = {"x": np.ones((2, 3, 8), np.float32)} if name == "transformer" else {"input": IMAGES}
    np.testing.assert_array_equal(onnxruntime_outputs(mine, feeds)[0], onnxruntime_outputs(other, feeds)[0])
    marks = {p.key: p.value for p in mine.metadata_props}
    assert {p.key: p.value for p in other.metadata_props}.items() <= marks.items()


@pytest.mark.parametrize("opset", [8, 9, 10])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_an_upsample_becomes_a_resize(mode: str, opset: int) -> None:
    """onnxruntime's own stops here: no adapter for a Resize of opset 9."""
    scales = np.float32([1, 1, 2, 3])
    attrs = {"scales": scales.tolist()} if opset == 8 else {}
    op = "Resize" if opset == 10 else "Upsample"
    nodes = [node(op, ["x", "s"][: 1 if attrs else 2], ["u"], mode=mode, **attrs), node("Relu", ["u"], ["y"])]
    model = build(nodes, {} if attrs else {"s": scales}, opset=opset)
    found = jq.preprocess(model)
    assert found.opset_import[0].version == 11 and {n.op_type for n in found.graph.node} == {"Resize", "Relu"}
    x = np.random.default_rng(0).standard_normal((2, 4, 5, 6)).astype(np.float32)
    np.testing.assert_array_equal(onnxruntime_outputs(found, {"x": x})[0], onnxruntime_outputs(model, {"x": x})[0])
    later = jq.convert(model, opset=21)
    np.testing.assert_array_equal(onnxruntime_outputs(later, {"x": x})[0], onnxruntime_outputs(model, {"x": x})[0])


@pytest.mark.parametrize("given", ["path", "bytes", "proto", "graph"])
def test_it_takes_what_load_takes(given: str, tmp_path: Path) -> None:
    path = Path(MODEL)
    source = {"path": path, "bytes": path.read_bytes(), "proto": onnx.load(path), "graph": jq.load(path)}[given]
    found = jq.preprocess(source, tmp_path / "new" / "out.onnx")  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "new") == ["out.onnx"] and onnx.load(tmp_path / "new" / "out.onnx") == found
    assert interface(found) == interface(jq.preprocess(path))


class TestExternalData:
    def files(self, folder: Path) -> list[str]:
        return sorted(p.name for p in folder.iterdir())

    @pytest.mark.parametrize("location", [None, "./", "weights.bin"])
    def test_one_file(self, location: str | None, tmp_path: Path) -> None:
        out = tmp_path / "out.onnx"
        options: dict[str, Any] = {"all_tensors_to_one_file": True, "external_data_location": location}
        found = jq.preprocess(MODEL, out, save_as_external_data=True, external_data_size_threshold=256, **options)
        data = "weights.bin" if location == "weights.bin" else "out.onnx.data"
        assert self.files(tmp_path) == sorted(["out.onnx", data])
        outside = {t.name for t in onnx.load(out, load_external_data=False).graph.initializer if t.external_data}
        sizes = {t.name: len(t.raw_data) for t in found.graph.initializer}
        assert outside == {name for name, size in sizes.items() if size >= 256} and len(outside) < len(sizes)
        np.testing.assert_array_equal(
            onnxruntime_outputs(found, {"input": IMAGES})[0],
            onnxruntime_outputs(jq.preprocess(MODEL), {"input": IMAGES})[0],
        )

    def test_a_file_for_each_weight_whatever_its_name(self, tmp_path: Path) -> None:
        w = np.ones((4, 4, 3, 3), np.float32)
        model = build([node("Conv", ["x", "../../w:/\\"], ["y"])], {"../../w:/\\": w})
        found = jq.preprocess(
            model, tmp_path / "out" / "out.onnx", save_as_external_data=True, external_data_size_threshold=1
        )
        assert self.files(tmp_path) == ["out"] and self.files(tmp_path / "out") == ["out.onnx", "out.onnx.0.data"]
        assert jq.load(tmp_path / "out" / "out.onnx").params.keys() == {t.name for t in found.graph.initializer}

    @pytest.mark.parametrize("location", ["../x.bin", "a/b.bin", "out.onnx", "..", "/x.bin", "x\0.bin", ""])
    def test_places_that_are_refused(self, location: str, tmp_path: Path) -> None:
        with pytest.raises(jq.ConfigError, match="expected the name of a file beside the model"):
            jq.preprocess(MODEL, tmp_path / "out.onnx", save_as_external_data=True, all_tensors_to_one_file=True,
                          external_data_location=location)  # fmt: skip
        assert self.files(tmp_path) == []

    def test_the_models_own_weights_are_not_overwritten(self, tmp_path: Path) -> None:
        source = tmp_path / "in.onnx"
        jq.save(jq.load(MODEL), source, external=write.External(location="weights.bin", threshold=64))
        before = (tmp_path / "weights.bin").read_bytes()
        options: dict[str, Any] = {"save_as_external_data": True, "all_tensors_to_one_file": True}
        with pytest.raises(jq.ConfigError, match="the model's own weights"):
            jq.preprocess(source, tmp_path / "out.onnx", external_data_location="weights.bin", **options)
        assert (tmp_path / "weights.bin").read_bytes() == before and self.files(tmp_path) == ["in.onnx", "weights.bin"]
        jq.preprocess(source, tmp_path / "out.onnx", **options)
        assert (tmp_path / "weights.bin").read_bytes() == before

    def test_not_even_where_they_are_called_like_the_outputs(self, tmp_path: Path) -> None:
        source = tmp_path / "in.onnx"
        jq.save(jq.load(MODEL), source, external=write.External(location="out.onnx.data", threshold=64))
        with pytest.raises(jq.ConfigError, match="the model's own weights"):
            jq.preprocess(source, tmp_path / "out.onnx")
        with pytest.raises(jq.ConfigError, match="the model's own weights"):
            jq.convert(source, tmp_path / "out.onnx", to="fp16")
        assert self.files(tmp_path) == ["in.onnx", "out.onnx.data"]

    def test_without_a_file_there_is_no_beside(self) -> None:
        with pytest.raises(jq.ConfigError, match="give output_model_path"):
            jq.preprocess(MODEL, save_as_external_data=True)

    def test_above_protobufs_limit_weights_go_outside(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(write, "_LARGEST_PROTO", 100_000)
        out = tmp_path / "out.onnx"
        found = jq.preprocess(MODEL, out)  # optimized, too: the nodes say so
        assert self.files(tmp_path) == ["out.onnx", "out.onnx.data"] and out.stat().st_size < 100_000
        monkeypatch.undo()
        assert interface(found) == interface(jq.preprocess(MODEL))
        np.testing.assert_array_equal(
            onnxruntime_outputs(found, {"input": IMAGES})[0],
            onnxruntime_outputs(jq.preprocess(MODEL), {"input": IMAGES})[0],
        )
        monkeypatch.setattr(write, "_LARGEST_PROTO", 100_000)
        with pytest.raises(jq.ModelError, match="do not fit one ONNX message"):
            jq.preprocess(MODEL)


class TestFailures:
    def custom(self) -> onnx.ModelProto:
        model = build([node("Relu", ["x"], ["y"])])
        model.graph.node[0].CopyFrom(node("Odd", ["x"], ["y"], name="odd", domain="com.acme"))
        model.opset_import.append(helper.make_opsetid("com.acme", 1))
        return model

    def test_what_onnxruntime_cannot_run_is_not_optimized(self) -> None:
        with pytest.warns(UserWarning, match="not optimized; .*com.acme"):
            found = jq.preprocess(self.custom(), guess_output_rank=True)
        assert [n.op_type for n in found.graph.node] == ["Odd"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jq.preprocess(self.custom(), skip_optimization=True, guess_output_rank=True)

    def test_symbolic_inference_that_fails_leaves_no_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        model = self.custom()
        del model.graph.output[:]
        model.graph.node.append(node("Relu", ["y"], ["z"]))
        model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
        with pytest.raises(jq.ModelError, match=r"symbolic shape inference fails: .*skip_symbolic_shape"):
            jq.preprocess(model, tmp_path / "out.onnx")
        assert os.listdir(tmp_path) == []
        with pytest.warns(UserWarning, match="not optimized"):
            jq.preprocess(model, tmp_path / "out.onnx", skip_symbolic_shape=True)

    def test_a_package_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "onnxruntime.tools.symbolic_shape_infer", None)
        with pytest.warns(UserWarning, match=r"pip install sympy.*skip_symbolic_shape"):
            warned = jq.preprocess(MODEL)
        assert warned == jq.preprocess(MODEL, skip_symbolic_shape=True)

    def test_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "no.onnx").write_bytes(b"no model")
        with pytest.raises(jq.ModelError, match="not an ONNX model"):
            jq.preprocess(tmp_path / "no.onnx", tmp_path / "out.onnx")
        assert os.listdir(tmp_path) == ["no.onnx"]


def run(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


def test_onnxruntimes_spelling_of_options(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--skip_optimization", "--skip-symbolic-shape", "--external_data_size_threshold", "64", "--quiet")
    with pytest.raises(SystemExit) as ended:
        main(["preprocess", str(MODEL), "-o", str(tmp_path / "out.onnx"), *words])
    assert ended.value.code in (0, None) and capfd.readouterr() == ("", "")
    expected = jq.preprocess(MODEL, skip_optimization=True, skip_symbolic_shape=True)
    assert onnx.load(tmp_path / "out.onnx").graph == expected.graph


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model.onnx"
    source.write_bytes(Path(MODEL).read_bytes())
    code, out, err = run(capfd, "preprocess", str(source))
    assert (code, err) == (0, "") and "38 nodes; shapes known for 38 of 38 tensors" in out
    assert interface(onnx.load(tmp_path / "model_preprocessed.onnx")) == interface(jq.preprocess(MODEL))
    code, out, _ = run(
        capfd, "preprocess", str(source), "-o", str(tmp_path / "b.onnx"), "--skip-optimization", "--json"
    )
    assert code == 0 and json.loads(out)["nodes"] == 53
    code, out, err = run(capfd, "preprocess", str(source), "-o", str(source))
    assert (code, out) == (2, "") and "which is read as well; give another name" in err
