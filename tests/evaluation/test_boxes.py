"""Detectors' outputs as boxes, COCO files, and their accuracy on a network that draws its boxes from the picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.data.images import letterbox
from jq.evaluation.boxes import box_accuracy, decoded, read_coco, suppressed

SIDE, CLASSES = 64, 3
# Boxes in the pixels of the input: corners, class, score.
SHOWN = [((8.0, 10.0, 24.0, 30.0), 0, 0.9), ((30.0, 30.0, 50.0, 44.0), 2, 0.8)]


def outputs(kind: str) -> dict[str, np.ndarray]:
    """The boxes as each family of detectors writes them, with a worse box over the first where they do not suppress it."""
    corners = np.float32([c for c, _, _ in SHOWN] + [(9.0, 10.0, 24.0, 30.0)])
    scores = np.zeros((3, CLASSES), np.float32)
    for i, (number, score) in enumerate([(k, s) for _, k, s in SHOWN] + [(0, 0.5)]):
        scores[i, number] = score
    centres = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], axis=1)
    label, best = scores.argmax(1), scores.max(1)
    logits = np.log(np.maximum(scores, 1e-6) / np.maximum(1 - scores, 1e-6))
    return {
        "yolov8": {"y": np.concatenate([centres, scores], 1).T[None]},
        "yolov8, transposed": {"y": np.concatenate([centres, scores], 1)[None]},
        "yolov5": {"y": np.concatenate([centres, np.full((3, 1), 0.5, np.float32), scores * 2], 1)[None]},
        "end to end": {"y": np.concatenate([corners, best[:, None], label[:, None]], 1)[None, :2]},
        "torchvision": {"boxes": corners[:2], "labels": label[:2].astype(np.int64), "scores": best[:2]},
        "detr": {"logits": logits[None], "boxes": (centres / SIDE)[None]},
    }[kind]


@pytest.mark.parametrize("kind", ["yolov8", "yolov8, transposed", "yolov5", "end to end", "torchvision", "detr"])
def test_outputs_are_read_as_boxes(kind: str) -> None:
    boxes = decoded(outputs(kind), CLASSES, (SIDE, SIDE))
    order = np.argsort(-boxes.scores)[:2]
    assert boxes.corners[order] == pytest.approx(np.array([c for c, _, _ in SHOWN]), abs=1e-3)
    assert boxes.classes[order].tolist() == [0, 2] and boxes.scores[order] == pytest.approx([0.9, 0.8], abs=1e-3)
    assert len(boxes.classes[boxes.scores > 0.01]) == 2


def test_boxes_of_other_classes_are_not_suppressed() -> None:
    corners = np.float32([[0, 0, 9, 9], [0, 0, 9, 9]])
    assert len(suppressed(corners, np.float32([[0.9, 0], [0, 0.8]])).classes) == 2
    assert len(suppressed(corners, np.float32([[0.9, 0], [0.8, 0]])).classes) == 1


def test_other_outputs_are_refused() -> None:
    with pytest.raises(
        jq.DataError, match=r"outputs y\[1, 7, 7\] are not in a known format for boxes of 80 classes.*FUNCTION"
    ):
        decoded({"y": np.zeros((1, 7, 7))}, 80, (SIDE, SIDE))


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    """Two images, 128 wide and 64 high: in the input they are 64 by 32, with 16 pixels of gray above."""
    boxes = [[(x1 * 2, (y1 - 16) * 2, (x2 - x1) * 2, (y2 - y1) * 2), k] for (x1, y1, x2, y2), k, _ in SHOWN]
    boxes[0][0] = (16, 0, 32, 28)  # cut off where the picture ends
    annotations = [{"image_id": i, "category_id": 10 * k + 7, "bbox": b} for i in (5, 6) for b, k in boxes]
    annotations.append({"image_id": 5, "category_id": 7, "bbox": (0, 0, 99, 60), "iscrowd": 1})
    document = {
        "images": [{"id": i, "file_name": f"val/{i}.jpg", "height": 64, "width": 128} for i in (5, 6)],
        "categories": [{"id": 10 * k + 7, "name": f"kind {k}"} for k in reversed(range(CLASSES))],
        "annotations": annotations,
    }
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(document))
    return path


def detector() -> onnx.ModelProto:
    """Boxes that do not depend on the picture: a constant of the YOLOv8 kind."""
    value = numpy_helper.from_array(outputs("yolov8")["y"], "boxes")
    zero = numpy_helper.from_array(np.float32(0), "zero")
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Add", ["boxes", "nothing"], ["y"]),
    ]
    sides = [("x", (1, 3, SIDE, SIDE)), ("y", value.dims)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in sides)
    graph = helper.make_graph(nodes, "detector", [x], [y], [value, zero])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_detector_is_judged_in_the_pixels_of_the_images(truth: Path) -> None:
    known = read_coco(truth)
    assert known.categories == ("kind 0", "kind 1", "kind 2") and [len(i.boxes.classes) for i in known.images] == [2, 2]
    data = np.zeros((2, 3, SIDE, SIDE), np.float32)
    assert letterbox((64, 128), (SIDE, SIDE)) == ((32, 64), (16, 0))
    accuracy = box_accuracy(detector(), data, known)
    assert (accuracy.mean, accuracy.at_half, accuracy.images) == (1.0, 1.0, 2)
    moved = json.loads(truth.read_text())
    for annotation in moved["annotations"]:
        x, y, width, height = annotation["bbox"]
        annotation["bbox"] = (x, y, width, height * 0.7)  # IoU 0.7: good for the first five thresholds of ten
    truth.write_text(json.dumps(moved))
    accuracy = box_accuracy(detector(), data, read_coco(truth))
    assert accuracy.at_half == 1.0 and accuracy.mean == pytest.approx(0.45, abs=0.06)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"images": []}'])
def test_files_that_are_no_coco(tmp_path: Path, text: str) -> None:
    path = tmp_path / "truth.json"
    path.write_text(text)
    with pytest.raises(jq.DataError, match=r"truth.json is not a COCO file.*annotations"):
        read_coco(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("annotations", [3]), ("annotations", [[]]), ("categories", [{"id": float("inf"), "name": "a"}]), ("images", [None]),
        ("bbox", [0, 0, 1]), ("bbox", [0] * 8), ("bbox", [0, 0, float("nan"), 1]), ("bbox", [0, 0, 10**400, 1]), ("bbox", "1234"),
        ("height", float("inf")), ("height", 0), ("height", 1 << 40), ("category_id", []), ("image_id", {}), ("file_name", 3),
    ],
)  # fmt: skip
def test_coco_files_with_odd_values(truth: Path, part: str, value: object) -> None:
    document = json.loads(truth.read_text())
    if part in document:
        document[part] = value
    else:
        next(e for entries in ("annotations", "images") for e in document[entries] if part in e)[part] = value
    path = truth.with_name("truth.json")
    path.write_text(json.dumps(document))
    with pytest.raises(jq.DataError, match=r"truth.json is not a COCO file.*annotations"):
        read_coco(path)


def test_letterboxed_files_are_whole_and_gray_around(tmp_path: Path, truth: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    folder = tmp_path / "images"
    folder.mkdir()
    for name in (5, 6):
        image.new("RGB", (128, 64), (255, 0, 0)).save(folder / f"{name}.png")
    how = jq.data.images.ImageFolder(folder, resize="letterbox")
    sample = next(iter(jq.data.sources.open_source(how, jq.load(detector()).inputs).samples()))["x"][0]
    assert sample[0, 16:48].min() == 1 and sample[1, 16:48].max() == 0
    assert np.allclose(sample[:, :16], 114 / 255) and np.allclose(sample[:, 48:], 114 / 255)
    assert box_accuracy(detector(), how, read_coco(truth)).mean == 1.0
