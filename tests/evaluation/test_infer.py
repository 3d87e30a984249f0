"""A model's outputs in a folder: those of onnxruntime, under names that no model can choose, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq
from jq.data.sources import open_source
from jq.errors import ConfigError, DataError, ModelError
from tests.cli.test_commands import run
from tests.conftest import onnxruntime_outputs

MODEL = jq.zoo.path("fashion_resnet")
IMAGES = jq.zoo.evaluation_set()[0][:6]


def several_outputs(*names: str, batch: int | str = "N") -> onnx.ModelProto:
    """Output i is x + i."""
    nodes, constants = [], []
    for i, name in enumerate(names):
        constants.append(helper.make_tensor(f"c{i}", TensorProto.FLOAT, (), [i]))
        nodes.append(helper.make_node("Add", ["x", f"c{i}"], [name]))
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, 3]) for n in ("x", *names)]
    graph = helper.make_graph(nodes, "several", infos[:1], infos[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def held(folder: Path) -> dict[str, np.ndarray]:
    return {p.relative_to(folder).as_posix(): np.load(p) for p in sorted(folder.rglob("*.npy"))}


def test_outputs_are_onnxruntimes(tmp_path: Path) -> None:
    manifest = jq.infer(MODEL, IMAGES, tmp_path / "new/found")
    found = held(tmp_path / "new/found")
    assert list(found) == [f"{i:08}.npy" for i in range(6)]
    (wanted,) = onnxruntime_outputs(onnx.load(MODEL), {"input": IMAGES})
    np.testing.assert_allclose(np.concatenate(list(found.values())), wanted, rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "new/found/manifest.json").read_text()) == manifest
    assert manifest["model"] == "fashion_resnet.onnx" and manifest["samples"] == 6
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["found"]


def test_the_readings(tmp_path: Path) -> None:
    model = jq.quantize(MODEL, IMAGES, "XINT8").model
    for reading in ("onnxruntime", "jq", "ort", "aie2_x1"):
        jq.infer(model, IMAGES, tmp_path / reading, reading=reading, limit=2)
    theirs, mine, same, chip = (held(tmp_path / r) for r in ("onnxruntime", "jq", "ort", "aie2_x1"))
    expected = jq.integer.load(model, "aie2_x1")({"input": IMAGES[:1]})["logits"]
    np.testing.assert_array_equal(chip["00000000.npy"], expected)
    for name, array in theirs.items():
        np.testing.assert_array_equal(same[name], array)
        np.testing.assert_allclose(mine[name], array, atol=0.5)
    with pytest.raises(ConfigError, match=r"reading needs one of .*aie2_x1.*; got 'aie2'"):
        jq.infer(model, IMAGES, tmp_path / "other", reading="aie2")
    assert not (tmp_path / "other").exists()


def test_names_of_outputs_stay_in_the_folder(tmp_path: Path) -> None:
    names = ["../../evil", "/etc/evil", "a/b", "a:b", "A_B", "manifest.json", "...", "é" * 300, "..", "a" * 300]
    manifest = jq.infer(several_outputs(*names), np.zeros((2, 3), np.float32), tmp_path / "in/found")
    folders = [row["folder"] for row in manifest["outputs"]]
    assert [row["name"] for row in manifest["outputs"]] == names
    assert len({f.lower() for f in folders}) == len(names) and "manifest.json" not in folders
    assert sorted(p.name for p in (tmp_path / "in/found").iterdir()) == sorted([*folders, "manifest.json"])
    assert [p.name for p in tmp_path.iterdir()] == ["in"] and [p.name for p in (tmp_path / "in").iterdir()] == ["found"]
    for i, folder in enumerate(folders):
        assert [a.tolist() for a in held(tmp_path / "in/found" / folder).values()] == [[[i] * 3]] * 2


def test_files_are_called_like_those_of_the_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "cats").mkdir(parents=True)
    for i, name in enumerate(("b.c", "a", "cats/d")):
        np.save(data / f"{name}.npy", np.full(3, i, np.float32))
    jq.infer(several_outputs("y"), data, tmp_path / "found")
    assert {k: v[0, 0] for k, v in held(tmp_path / "found").items()} == {"a.npy": 1, "b.c.npy": 0, "cats/d.npy": 2}
    np.savez(data / "a.npz", x=np.zeros(3, np.float32))  # now two samples are called "a"
    jq.infer(several_outputs("y"), data, tmp_path / "numbers")
    assert sorted(held(tmp_path / "numbers")) == [f"{i:08}.npy" for i in range(4)]


def test_images_have_names_if_they_are_samples(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("x.png", "y.jpg"):
        image.new("L", (28, 28)).save(tmp_path / name)
    source = open_source(jq.data.images.ImageFolder(tmp_path), jq.load(MODEL).inputs)
    assert source.names == ("x", "y")


def test_a_fixed_batch_is_one_file(tmp_path: Path) -> None:
    jq.infer(several_outputs("y", batch=2), np.arange(12, dtype=np.float32).reshape(4, 3), tmp_path / "found")
    found = held(tmp_path / "found")
    assert [a.shape for a in found.values()] == [(2, 3)] * 2 and found["00000001.npy"][1, 2] == 11


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    data = [{"x": np.zeros((1, 3), np.float32)}, {"x": np.full((1, 3), np.nan, np.float32)}]
    with pytest.raises(DataError, match="NaN"):
        jq.infer(several_outputs("y"), iter(data), tmp_path / "found")
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("full", "file", "link"):
        with pytest.raises(ConfigError, match="give the name of a new folder"):
            jq.infer(several_outputs("y"), np.zeros((1, 3), np.float32), tmp_path / name)
    assert (tmp_path / "full/mine.txt").read_text() == (tmp_path / "file").read_text() == "keep"
    jq.infer(several_outputs("y"), np.zeros((1, 3), np.float32), tmp_path / "empty")
    assert len(held(tmp_path / "empty")) == 1
    for name in ("file/below", "null\0byte", "long" * 100):
        with pytest.raises(DataError, match="cannot write"):
            jq.infer(several_outputs("y"), np.zeros((1, 3), np.float32), tmp_path / name)


def test_outputs_that_are_no_arrays_of_numbers(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
    text = helper.make_tensor_value_info("y", TensorProto.STRING, ["N", 3])
    listed = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, ["N", 3])
    for node, output, error in (
        (helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING), text, DataError),
        (helper.make_node("SequenceConstruct", ["x"], ["y"]), listed, ModelError),
    ):
        graph = helper.make_graph([node], "odd", [x], [output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        with pytest.raises(error, match="output 'y'"):
            jq.infer(model, np.zeros((1, 3), np.float32), tmp_path / "found")
        assert not (tmp_path / "found").exists()


def test_a_model_that_onnxruntime_does_not_load(tmp_path: Path) -> None:
    model = jq.quantize(MODEL, IMAGES, "XINT8", format="fix_neuron").model
    with pytest.raises(ModelError, match=r"onnxruntime does not load this model: .*FixNeuron"):
        jq.infer(model, IMAGES, tmp_path / "found")
    assert jq.infer(model, IMAGES, tmp_path / "found", reading="dpu", limit=1)["samples"] == 1


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    options = (str(MODEL), "--data", str(tmp_path / "x.npy"), "--limit", "2", "-o", str(tmp_path / "found"))
    code, out, err = run(capfd, "infer", *options)
    assert (code, err) == (0, "") and "2 samples: logits (float32)" in out
    assert run(capfd, "infer", *options)[0] == 2
    code, out, _ = run(capfd, "infer", *options[:-1], str(tmp_path / "other"), "--json")
    assert code == 0 and json.loads(out) == json.loads((tmp_path / "other/manifest.json").read_text())
