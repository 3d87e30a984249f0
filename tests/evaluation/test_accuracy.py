"""Accuracy from folders and models: against numpy's argmax, with labels in every form and many that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import jq
from jq.errors import ConfigError, DataError
from jq.evaluation.evaluate import Labels, Scores, classify, folder_scores, model_scores, read_labels
from tests.cli.test_commands import run

IMAGES, LABELS = (array[::30] for array in jq.zoo.evaluation_set())  # of all classes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, labels, a quantized model and the results of both."""
    found = tmp_path_factory.mktemp("accuracy")
    np.savez(found / "data.npz", input=IMAGES)
    np.save(found / "labels.npy", LABELS)
    jq.quantize(jq.zoo.path("fashion_mobilenet"), jq.zoo.calibration_set()[0][:8], "XINT8", output=found / "q.onnx")
    jq.infer(jq.zoo.path("fashion_mobilenet"), IMAGES, found / "float")
    jq.infer(found / "q.onnx", IMAGES, found / "quantized")
    return found


def test_folders_and_models_give_what_numpy_counts(folder: Path) -> None:
    scores = {name: folder_scores(folder / name) for name in ("float", "quantized")}
    found = classify(scores, read_labels(folder / "labels.npy"))
    right = {name: s.values.argmax(1) == LABELS for name, s in scores.items()}
    five = np.any(np.argsort(-scores["float"].values, axis=1)[:, :5] == LABELS[:, None], axis=1)
    assert {name: a.top1 for name, a in found.models.items()} == {name: r.mean() for name, r in right.items()}
    assert found.models["float"].top5 == five.mean()
    assert found.models["float"].top1_error == pytest.approx(np.std(right["float"]) / np.sqrt(len(LABELS)))
    assert found.other_class == (scores["float"].values.argmax(1) != scores["quantized"].values.argmax(1)).sum()
    assert found.only_first == (right["float"] > right["quantized"]).sum()
    assert found.only_second == (right["float"] < right["quantized"]).sum()
    assert found.p == jq.metrics.sign_test(found.only_first, found.only_second)
    models = {"float": jq.zoo.path("fashion_mobilenet"), "quantized": folder / "q.onnx"}
    again = classify({k: model_scores(m, folder / "data.npz") for k, m in models.items()}, Labels(LABELS))
    assert again == found
    assert "top-1" in found.summary() and "p = " in found.summary()


def test_the_command(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    labels = ("--labels", str(folder / "labels.npy"))
    code, out, _ = run(capfd, "evaluate", str(folder / "float"), str(folder / "quantized"), *labels, "--json")
    document = json.loads(out)
    assert code == 0 and document["compared"] == 100
    top1 = [m["top1"] for m in document["classification"]["models"].values()]
    code, out, _ = run(capfd, "evaluate", str(folder / "quantized"), *labels)
    assert code == 0 and f"top-1 {top1[1]:.2%}" in out and "compared" not in out
    models = ("--model", str(jq.zoo.path("fashion_mobilenet")), "--model", str(folder / "q.onnx"))
    code, out, _ = run(capfd, "evaluate", *models, "--data", str(folder / "data.npz"), *labels)
    assert code == 0 and all(f"top-1 {t:.2%}" in out for t in top1) and "p = " in out
    data, results = ("--data", str(folder / "data.npz")), str(folder / "float")
    for wrong, match in (
        ((*models, *labels), "got one without the other"),
        ((results, *labels, *data), "got one without the other"),
        ((*models, *data), "--labels"),
        ((*models, *data, *labels, results), "no folders"),
        ((*models[:2] * 2, *data, *labels), "needs two different models"),
    ):
        code, out, err = run(capfd, "evaluate", *wrong)
        assert (code, out) == (2, "") and match in err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.txt", "3\n1\n-0\n\n"),
        ("l.csv", "3\n1\n0"),
        ("l.csv", "label\n3\n1\n0\n"),
        ("l.csv", '\ufeffname,label\r\n"a,b.png",3\r\nc.JPEG, 1\r\nd/e,0\r\n'),
    ],
)
def test_labels_in_words(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = read_labels(tmp_path / name, offset=1)
    assert found.values.tolist() == [4, 2, 1]
    assert found.names == (("a,b", "c", "d/e") if "d/e" in text else None)


def test_labels_in_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", images=np.zeros((2, 3)), y=np.uint8([7, 8]))
    np.savez(tmp_path / "two.npz", index=np.arange(2), labels=np.int32([7, 8]))
    for name in ("one", "two"):
        assert read_labels(tmp_path / f"{name}.npz").values.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("l.json", b"[1]", "expected a file of labels"),
        ("l.txt", b"", "0 lines"),
        ("l.txt", b"1\nx\n", "'x'"),
        ("l.txt", b"1.0\n", "'1.0'"),
        ("l.txt", b"99999999999999999999\n", "whole number"),
        ("l.txt", b"1,2\n", "columns"),
        ("l.csv", b"a,1\n2\n", "columns"),
        ("l.csv", b"a,b,1\n", "columns"),
        ("l.csv", b"a.png,1\na.jpg,2\n", "'a' more than once"),
        ("l.csv", b"\xff\xfe\x00", "cannot read"),
        ("l.npy", b"", "cannot read"),
        ("l.npz", b"PK", "cannot read"),
    ],
)
def test_labels_that_cannot_be_read(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match):
        read_labels(tmp_path / name)


def test_labels_of_other_kinds(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "hot.npy", np.eye(3, dtype=int))
    np.savez(tmp_path / "many.npz", a=np.arange(3), b=np.arange(3))
    (tmp_path / "folder.txt").mkdir()
    for name in ("float.npy", "hot.npy", "many.npz", "folder.txt", "nowhere.csv"):
        with pytest.raises(DataError):
            read_labels(tmp_path / name)


def test_labels_by_name() -> None:
    scores = Scores(np.eye(3), ("b", "a", "c"))
    labels = Labels(np.array([9, 1, 0, 2]), ("unused", "a", "b", "c"))
    assert classify({"m": scores}, labels).models["m"].top1 == 1
    with pytest.raises(DataError, match="1 samples have no label; the first is 'c'"):
        classify({"m": scores}, Labels(np.array([1, 0]), ("a", "b")))
    with pytest.raises(DataError, match="samples have none"):
        classify({"m": Scores(np.eye(3))}, labels)
    with pytest.raises(DataError, match="2 labels for 3 samples"):
        classify({"m": scores}, Labels(np.array([1, 0])))
    with pytest.raises(DataError, match="start at different numbers"):
        classify({"m": scores}, Labels(np.array([1, 2, 3])))
    with pytest.raises(DataError, match="different samples"):
        classify({"m": scores, "n": Scores(np.eye(3), ("a", "b", "c"))}, labels)


def test_scores_in_folders_of_many_forms(tmp_path: Path) -> None:
    for name, shape in (("row", (5,)), ("one", (1, 5)), ("head", (1, 5, 1, 1))):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.arange(5).reshape(shape))
        found = folder_scores(tmp_path / name)
        assert found.values.tolist() == [[0, 1, 2, 3, 4]] and found.names == ("x",)
    (tmp_path / "stacked").mkdir()
    np.save(tmp_path / "stacked/all.npy", np.eye(5))
    assert (
        folder_scores(tmp_path / "stacked").values.shape == (5, 5) and folder_scores(tmp_path / "stacked").names is None
    )


def test_several_outputs_are_told_apart(tmp_path: Path) -> None:
    for output, classes in (("logits", 4), ("features", 9)):
        (tmp_path / output).mkdir()
        np.save(tmp_path / output / "0.npy", np.arange(classes))
    assert folder_scores(tmp_path, "logits").values.shape == (1, 4)
    with pytest.raises(DataError, match="name the one with the scores"):
        folder_scores(tmp_path)
    with pytest.raises(DataError, match="no output 'probabilities'"):
        folder_scores(tmp_path, "probabilities")
    with pytest.raises(ConfigError, match="outputs logits"):
        model_scores(jq.zoo.path("fashion_resnet"), IMAGES[:2], "probabilities")


def test_results_lie_in_the_order_of_their_data(tmp_path: Path) -> None:
    """Labels without names fit both the data and the results, whatever files are called."""
    image = pytest.importorskip("PIL.Image")
    for i, name in enumerate(("a", "a-b", "a.o", "a b", "A", "a/z", "a-/c", "b")):
        path = tmp_path / f"data/{name}.{('png', 'bmp')[i % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("L", (28, 28), i * 30).save(path)
    model = jq.zoo.path("fashion_resnet")
    data = jq.data.images.ImageFolder(tmp_path / "data")
    jq.infer(model, data, tmp_path / "found")
    scores, again = model_scores(model, data), folder_scores(tmp_path / "found")
    assert scores.names == again.names and len(set(scores.names or ())) == 8
    np.testing.assert_array_equal(scores.values, again.values)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4), (0, 4)])
def test_results_that_are_no_scores(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(shape))
    with pytest.raises(DataError, match="scores are"):
        folder_scores(tmp_path)
