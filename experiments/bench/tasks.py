"""What models are for: data to calibrate and evaluate on, and what outputs are worth, sample by sample, with intervals.

A kind is how a classifier was trained to see images (P1 to P4 of experiments/common.py, labels from the names of files),
or `boxes`, `words`, `sentences`: detectors on COCO images in a letterbox, with YOLO's text files as labels; CTC recognizers
on rendered words, whose symbols are the model's metadata `character`; encoders on pairs of sentences. Their data lie in one
folder: `coco64/images`, `coco64/labels`, `coco64/calib`, `ocr_words.npz`, `sts.npz`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import BATCH, PREPARE, evaluation, read_images

MEASURES = {"boxes": "mAP", "words": "words", "sentences": "Spearman"}  # of classes: top-1
_CLASSES = 80  # of COCO

Sample = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the data of all kinds lie."""

    images: Path | None  # npz with uint8 NHWC `images`, to calibrate classifiers
    evaluation: Path | None  # folder of labelled JPEGs
    tasks: Path | None  # folder of the other kinds
    count: int  # samples to calibrate with

    def calibration(self, kind: str, inputs: list[str]) -> Sample:
        """Stacked samples of each input."""
        if kind in PREPARE:
            return {inputs[0]: read_images(kind, self.images, self.count)}
        assert self.tasks is not None, "boxes, words and sentences need --tasks"
        if kind == "boxes":
            return {inputs[0]: np.concatenate([s[inputs[0]] for s, _ in self._letterboxed("calib", inputs[0])])}
        if kind == "words":
            with np.load(self.tasks / "ocr_words.npz") as file:
                return {inputs[0]: _words_seen(file["calib"])}
        with np.load(self.tasks / "sts.npz") as file:
            return {name: file[f"calib_{name}"].astype(np.int64) for name in inputs}

    def evaluated(self, kind: str, inputs: list[str], offset: int) -> Iterator[tuple[Sample, Any]]:
        """Batches of samples, each with its truth."""
        if kind in PREPARE:
            assert self.evaluation is not None, "classifiers need --eval"
            x, labels = evaluation(self.evaluation, kind)
            for i in range(0, len(x), BATCH):
                yield {inputs[0]: x[i : i + BATCH]}, labels[i : i + BATCH] + offset
        elif kind == "boxes":
            yield from self._letterboxed("images", inputs[0])
        elif kind == "words":
            with np.load(self.tasks / "ocr_words.npz") as file:
                images, words = file["images"], file["words"]
            for image, word in zip(images, words, strict=True):
                yield {inputs[0]: _words_seen(image[None])}, str(word)
        else:
            with np.load(self.tasks / "sts.npz") as file:
                ids, mask, scores = (file[f"headlines_{k}"] for k in "imy")
            for k, score in enumerate(scores):
                for side in (0, 1):
                    values = (ids[side, k][None].astype(np.int64), mask[side, k][None].astype(np.int64))
                    yield dict(zip(inputs, values, strict=True)), score

    def _letterboxed(self, folder: str, name: str) -> Iterator[tuple[Sample, Any]]:
        """Images as YOLO sees them, each with [class, left, top, right, bottom] in the frame."""
        from PIL import Image

        from jq.data.images import letterbox

        for path in sorted((self.tasks / "coco64" / folder).glob("*.jpg")):
            image = Image.open(path).convert("RGB")
            (height, width), (top, left) = letterbox((image.height, image.width), (640, 640))
            frame = np.full((640, 640, 3), 114, np.uint8)
            frame[top : top + height, left : left + width] = image.resize((width, height), Image.BILINEAR)
            labels = self.tasks / "coco64/labels" / f"{path.stem}.txt"
            rows = []
            for line in labels.read_text().splitlines() if labels.exists() else ():
                kind, x, y, w, h = map(float, line.split()[:5])
                corners = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
                rows.append([kind, corners[0] + left, corners[1] + top, corners[2] + left, corners[3] + top])
            truth = np.array(rows).reshape(-1, 5)
            yield {name: frame.transpose(2, 0, 1)[None].astype(np.float32) / 255}, truth


def _words_seen(images: np.ndarray) -> np.ndarray:
    return (images.astype(np.float32) / 255 - 0.5) / 0.5


def outputs_of(path: str, kind: str, data: Data, offset: int) -> tuple[list[np.ndarray], list[Any]]:
    """The first output of each batch by onnxruntime, and its truth."""
    import onnxruntime as ort

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    pairs = [(session.run(None, sample)[0], truth) for sample, truth in data.evaluated(kind, names, offset)]
    return [y for y, _ in pairs], [truth for _, truth in pairs]


def compared(
    kind: str, reference: list[np.ndarray], outputs: list[np.ndarray], truth: list[Any], symbols: list[str]
) -> dict[str, Any]:
    """The measure of both, and all that says how far the second is from the first: [value, low, high] where it varies."""
    from jq.evaluation.estimates import bootstrap
    from jq.evaluation.metrics import sign_test
    from jq.evaluation.paired import measures, paired, summarized

    one, two = (np.concatenate(v) for v in (reference, outputs))
    if kind in PREPARE:
        one, two = (v.reshape(len(v), -1) for v in (one, two))
        labels = np.concatenate(truth)
        found = paired([one], [two], labels)
        right = [float(np.mean(v.argmax(1) == labels)) for v in (one, two)]
        return _row(found, right, found.top1, found.agreement, found.kl) | {"p": found.p}
    if kind == "words":
        read = [[_read(y, symbols) for y in rows] for rows in (one, two)]
        right = np.array([[a == w for a, w in zip(texts, truth, strict=True)] for texts in read], float)
        same = np.array([a == b for a, b in zip(*read, strict=True)], float)
        parts = [measures([a[None]], [b[None]]) for a, b in zip(one, two, strict=True)]  # all at once takes gigabytes
        found = summarized({k: np.concatenate([part[k] for part in parts]) for k in parts[0]})
        p = sign_test(int((right[0] > right[1]).sum()), int((right[1] > right[0]).sum()))
        change, agreement = (_mean(v, bootstrap(v[:, None])) for v in (right[1] - right[0], same))
        return _row(found, [float(v.mean()) for v in right], change, agreement, found.kl) | {"p": p}
    if kind == "sentences":
        pairs = [v.reshape(-1, 2, v.shape[-1]) for v in (one, two)]
        values, change = _spearman(pairs, np.array(truth[::2]))
        return _row(_apart(*pairs), values, change)
    values, change = _mean_precision([one, two], truth)
    return _row(_apart(one[:, 4:], two[:, 4:]), values, change)  # of the scores: boxes are in pixels


def _apart(one: np.ndarray, two: np.ndarray) -> Any:
    """Signal to noise of what has no classes."""
    from jq.evaluation.paired import paired

    return paired(*([v.reshape(len(v), -1, 1)] for v in (one, two)))


def _row(found: Any, values: list[float], change: Any, agreement: Any = None, kl: Any = None) -> dict[str, Any]:
    measures = {"change": change, "agreement": agreement, "kl": kl, "sqnr": found.sqnr}
    row: dict[str, Any] = {"samples": found.samples, "float": values[0], "value": values[1], "p": None}
    return row | {k: None if v is None else list(dataclasses.astuple(v)) for k, v in measures.items()}


def _mean(values: np.ndarray, ends: np.ndarray) -> Any:
    from jq.evaluation.estimates import Estimate

    return Estimate(float(values.mean()), float(ends[0, 0]), float(ends[1, 0]))


def _read(steps: np.ndarray, symbols: list[str]) -> str:
    """The text of one sample's scores [steps, symbols], of which 0 is CTC's blank."""
    best = steps.argmax(-1)
    codes = best[(best != 0) & (np.diff(best, prepend=-1) != 0)]
    return "".join(symbols[c - 1] for c in codes if c - 1 < len(symbols)).replace(" ", "")


def _spearman(embedded: list[np.ndarray], scores: np.ndarray) -> tuple[list[float], Any]:
    """The rank correlations of both models' cosines with the scores, and the change with its interval over pairs."""
    from jq.evaluation.tasks import METRICS

    metric = METRICS["spearman"]
    one, two = (metric.each({"y": list(pairs.reshape(-1, pairs.shape[-1]))}, scores) for pairs in embedded)
    return [metric.of(one), metric.of(two)], metric.change(one, two)


def _mean_precision(outputs: list[np.ndarray], truth: list[np.ndarray]) -> tuple[list[float], Any]:
    """COCO's mean average precision of both models, and the change with its interval over images."""
    from jq.evaluation.boxes import decoded
    from jq.evaluation.detection import Boxes, matched_boxes

    true = [Boxes(rows[:, 1:], rows[:, 0].astype(int)) for rows in truth]
    one, two = (matched_boxes([decoded({"y": y[None]}, _CLASSES, (640, 640)) for y in ys], true) for ys in outputs)
    return [one.mean(), two.mean()], one.change(two)
