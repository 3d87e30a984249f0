"""Real models: do the answers of jq equal onnxruntime's on real images?

    python experiments/parity/real_models.py --images FOLDER MODEL.onnx:PREP [MODEL.onnx:PREP ...]

FOLDER holds JPEGs. PREP names the model's preprocessing: P1 (RGB / 255, mean and deviation of ImageNet),
P2 (BGR less its mean), P3 (to -1..1), P4 ((x - 127) / 128), each on the centre 224 crop, or BOX
(letterbox to 640, RGB / 255) for a detector. For classifiers top-1 must be the same for every image; for
all, the largest error relative to the largest output must be below 1e-4. Appends one JSON line to --out.
Needs pillow, and skips with a word where a file is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import onnxruntime as ort

import jq
from experiments import common

PREPARE = common.PREPARE | {"BOX": lambda x: x / 255}


def crop(image, size: int = 224):
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def letterbox(image, size: int = 640):
    from PIL import Image

    scale = size / max(image.size)
    resized = image.resize((round(image.width * scale), round(image.height * scale)))
    canvas = Image.new("RGB", (size, size), (114, 114, 114))
    canvas.paste(resized, ((size - resized.width) // 2, (size - resized.height) // 2))
    return canvas


def batches(files: list[Path], prep: str, size: int) -> Iterator[np.ndarray]:
    from PIL import Image

    frame = letterbox if prep == "BOX" else crop
    for start in range(0, len(files) - size + 1, size):
        images = [np.asarray(frame(Image.open(f).convert("RGB")), np.float32) for f in files[start : start + size]]
        yield np.ascontiguousarray(PREPARE[prep](np.stack(images)).astype(np.float32).transpose(0, 3, 1, 2))


def compare(path: Path, prep: str, files: list[Path]) -> dict[str, object]:
    graph = jq.prepare(jq.load(path))
    fn, params = jq.trace(graph), jq.pack(graph)
    forward = jax.jit(fn)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name, batch = graph.inputs[0].name, 1 if prep == "BOX" else 20
    same, count, worst = 0, 0, 0.0
    for images in batches(files, prep, batch):
        ours = forward(params, {name: images})
        for output, want in zip(fn.outputs, session.run(None, {name: images}), strict=True):
            got = np.asarray(ours[output])
            worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
            if prep != "BOX":
                same, count = same + int((got.argmax(1) == want.argmax(1)).sum()), count + batch
    return {"model": path.stem, "images": len(files), "same_top1": f"{same}/{count}", "max_relative_error": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="MODEL.onnx:PREP")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--boxes", type=int, default=20, help="how many images detectors see")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "real_models.jsonl")
    args = parser.parse_args()
    files = sorted(args.images.glob("*.jpg"))
    if not files:
        sys.exit(f"skipped: no JPEG in {args.images}")
    rows = []
    for entry in args.models:
        path, _, prep = entry.rpartition(":")
        if not Path(path).exists():
            print(f"skipped: no file {path}")
            continue
        rows.append(compare(Path(path), prep, files[: args.boxes] if prep == "BOX" else files))
        print(
            "{model:24} {images:4} images, same top-1 {same_top1}, max relative error {max_relative_error:.1e}".format(
                **rows[-1]
            )
        )
    with args.out.open("a") as file:
        file.write(json.dumps({"experiment": "real_models", "onnxruntime": ort.__version__, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
