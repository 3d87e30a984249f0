"""Detectors: their outputs as boxes, the truth in COCO's format, and how both meet in the pixels of the model's input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jq.data.images import letterbox
from jq.data.sources import as_trained, open_source
from jq.errors import DataError, suggest
from jq.evaluation.detection import Boxes, Matches, matched_boxes, mean_average_precision
from jq.evaluation.infer import samples
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.readings.named import AnyReading
from jq.util import files

_LEAST, _OVERLAP, _MOST = 0.001, 0.7, 300  # score, IoU and count of the boxes that are kept, as COCO is evaluated
_LARGEST = 1 << 30  # bytes of a truth: COCO's largest is half of that
_MOST_PIXELS = 1 << 20  # of an image, along one side
_CORNERS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class TrueImage:
    """An image of the truth: its name without the ending, its height and width, and its boxes."""

    name: str
    sizes: tuple[int, int]
    boxes: Boxes


@dataclasses.dataclass(frozen=True, eq=False)
class CocoTruth:
    """The truth of a COCO file; classes are its categories, in the order of their ids."""

    images: tuple[TrueImage, ...]
    categories: tuple[str, ...]

    def image(self, name: str, number: int) -> TrueImage:
        """Return an image by its name or, where samples have only numbers, by its place."""
        known = {image.name: image for image in self.images}
        if name in known:
            return known[name]
        if not name.isdecimal() or number >= len(self.images):
            raise DataError(f"the truth has no image {name!r}.{suggest(name, known)}")
        return self.images[number]


@dataclasses.dataclass(frozen=True)
class BoxAccuracy:
    """The mean average precision of a detector."""

    mean: float  # over IoU from 0.5 to 0.95
    at_half: float  # at IoU 0.5
    images: int
    matches: Matches = dataclasses.field(
        compare=False, repr=False
    )  # which boxes are right, to hold models side by side

    def __str__(self) -> str:
        return f"mAP {self.mean:.2%}, at IoU 0.5 {self.at_half:.2%}, {self.images:,} images"


def read_coco(path: Path) -> CocoTruth:
    """Return the truth in a COCO file of instances: images, categories, and annotations whose bbox is x, y, width, height.

    Crowds, which are no single objects, are left out.
    """
    try:
        document = files.parsed(files.text(path, largest=_LARGEST))
        categories = sorted(document["categories"], key=lambda c: int(c["id"]))
        numbers = {c["id"]: i for i, c in enumerate(categories)}
        of_image: dict[Any, list[tuple[int, Sequence[float]]]] = {image["id"]: [] for image in document["images"]}
        for a in document["annotations"]:
            if not a.get("iscrowd"):
                of_image[a["image_id"]].append((numbers[a["category_id"]], a["bbox"]))
        images = [
            TrueImage(Path(image["file_name"]).stem, _sizes_of(image), _true_boxes(of_image[image["id"]]))
            for image in document["images"]
        ]
        return CocoTruth(tuple(images), tuple(str(c["name"]) for c in categories))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not a COCO file of instances ({type(error).__name__}: {error}); expected a JSON object with images (id, "
            "file_name, height, width), categories (id, name) and annotations (image_id, category_id, bbox)"
        ) from error


def _sizes_of(image: Mapping[str, Any]) -> tuple[int, int]:
    height, width = int(image["height"]), int(image["width"])
    if not (0 < height < _MOST_PIXELS and 0 < width < _MOST_PIXELS):
        raise ValueError(f"an image of {height} x {width} pixels")
    return height, width


def _true_boxes(pairs: Sequence[tuple[int, Sequence[float]]]) -> Boxes:
    corners = np.array([b for _, b in pairs], np.float64).reshape(len(pairs), _CORNERS)
    if not np.isfinite(corners).all():
        raise ValueError("a bbox that is not finite")
    corners[:, 2:] += corners[:, :2]
    return Boxes(corners, np.array([c for c, _ in pairs], np.int64))


def box_accuracy(model: ModelLike, data: Any, truth: CocoTruth, *, reading: AnyReading = "onnxruntime") -> BoxAccuracy:
    """Return a detector's mean average precision on data, of which one sample is in memory at a time.

    Samples are the truth's images by their files' names or, without names, in their order, whole in the middle of the
    model's input (a letterbox, as `resize='letterbox'` makes it of files).
    """
    graph = model if isinstance(model, Graph) else load(model)
    source = open_source(as_trained(data, graph.metadata), graph.inputs)
    into = _sizes(graph, source.head)
    made, right = [], []
    for number, (name, outputs) in enumerate(samples(graph, source, reading=reading, original=model)):
        image = truth.image(name, number)
        (height, width), (top, left) = letterbox(image.sizes, into)
        boxes = decoded(outputs, len(truth.categories), into)
        scale = np.array([image.sizes[1] / width, image.sizes[0] / height] * 2)
        corners = (boxes.corners - np.array([left, top] * 2)) * scale
        inside = np.clip(corners, 0, np.array([image.sizes[1], image.sizes[0]] * 2))
        made.append(dataclasses.replace(boxes, corners=inside))
        right.append(image.boxes)
    matches = matched_boxes(made, right)
    return BoxAccuracy(matches.mean(), mean_average_precision(made, right, (0.5,)), len(made), matches)


def _sizes(graph: Graph, sample: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Height and width of the first input of rank 4."""
    for value in graph.inputs:
        shape = np.shape(sample[value.name])
        if len(shape) == _CORNERS:
            return (shape[1], shape[2]) if shape[-1] in (1, 3) else (shape[2], shape[3])
    raise DataError("boxes need a model with an image input of rank 4")


# --- Outputs as boxes ---


def decoded(outputs: Mapping[str, np.ndarray], classes: int, sizes: tuple[int, int]) -> Boxes:
    """Return the boxes that a detector's outputs for one image stand for, in pixels of its input.

    The outputs are, of one image and told apart by their shapes: [4 + classes, places] or its transpose, centres and sizes
    with a score for each class (YOLOv8 and later); [places, 5 + classes], with the score of any object behind the box
    (YOLOv5); [boxes, 6], corners, score and class, of a model that suppresses overlaps itself; boxes [boxes, 4], scores and
    classes [boxes] (torchvision); or boxes [queries, 4] as shares of the image and logits [queries, classes or one more]
    (DETR).
    """
    values = [
        np.asarray(v, np.float32)[0] if np.ndim(v) > 1 and np.shape(v)[0] == 1 else np.asarray(v)
        for v in outputs.values()
    ]
    if len(values) == 1 and values[0].ndim == 2:
        (value,) = values
        if value.shape[0] == _CORNERS + classes:
            value = value.T
        if value.shape[1] == _CORNERS + classes:
            return suppressed(_from_centres(value[:, :4]), value[:, 4:])
        if value.shape[1] == _CORNERS + 1 + classes:
            return suppressed(_from_centres(value[:, :4]), value[:, 5:] * value[:, 4:5])
        if value.shape[1] == _CORNERS + 2:
            kept = value[value[:, 4] > _LEAST]
            return Boxes(kept[:, :4], np.rint(kept[:, 5]).astype(np.int64), kept[:, 4])
    corners = next((v for v in values if v.ndim == 2 and v.shape[1] == _CORNERS), None)
    if corners is not None:
        rest = [v for v in values if v is not corners and len(v) == len(corners)]
        logits = next((v for v in rest if v.ndim == 2 and v.shape[1] in (classes, classes + 1)), None)
        if logits is not None:
            scores = 1 / (1 + np.exp(-logits)) if logits.shape[1] == classes else _softmax(logits)[:, :classes]
            return suppressed(_from_centres(corners) * np.array([sizes[1], sizes[0]] * 2), scores)
        flat = [v for v in rest if v.ndim == 1]
        numbers = [v for v in flat if v.size and not np.array_equal(v, np.rint(v))]
        if len(flat) == 2 and (numbers or not len(corners)):
            scores = numbers[0] if numbers else flat[0]
            label = next(v for v in flat if v is not scores)
            return Boxes(corners, label.astype(np.int64), scores)
    shown = ", ".join(f"{k}{list(np.shape(v))}" for k, v in outputs.items())
    raise DataError(
        f"outputs {shown} are not in a known format for boxes of {classes} classes; use --metric FILE.py:FUNCTION for your own"
    )


def suppressed(corners: np.ndarray, scores: np.ndarray) -> Boxes:
    """Return boxes [places, 4] with scores [places, classes] after suppressing those that overlap a better one of their class."""
    place, label = np.nonzero(scores > _LEAST)
    kept = list(_kept(corners[place], label, scores[place, label]))
    return Boxes(corners[place][kept], label[kept], scores[place, label][kept])


def _kept(corners: np.ndarray, label: np.ndarray, score: np.ndarray) -> Iterator[int]:
    """Yield the places of boxes, best first, that no better one of the same class overlaps."""
    area = np.prod(corners[:, 2:] - corners[:, :2], axis=1)
    order, count = np.argsort(-score, kind="stable"), 0
    while order.size and count < _MOST:
        best, order = int(order[0]), order[1:]
        yield best
        count += 1
        low, high = np.maximum(corners[best, :2], corners[order, :2]), np.minimum(corners[best, 2:], corners[order, 2:])
        both = np.prod(np.maximum(high - low, 0), axis=1)
        near = both > _OVERLAP * (area[best] + area[order] - both)
        order = order[~(near & (label[order] == label[best]))]


def _from_centres(boxes: np.ndarray) -> np.ndarray:
    """Boxes of a centre, width and height as corners."""
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: np.ndarray = raised / raised.sum(axis=-1, keepdims=True)
    return shares
