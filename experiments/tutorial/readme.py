"""README's commands on models of your own: what they show against README's table of figures.

    python experiments/tutorial/readme.py [MODEL.onnx:NAME ...] [--calibration NPZ] [--images FOLDER]
        [--commands lint quantize evaluate] [--points 2]

NAME is the model's row in README's table; `PREPARED` has the options that say how it was trained, which stand where
README has `--prep imagenet`. NPZ holds `images`, bytes of 224 x 224 pixels with channels last, and FOLDER JPEGs whose
names begin with the label. Without models it takes the bundled ones with their images, as bytes, always; for those
quantizing may cost 2 points. Exits with 1 if a figure is further from README's than `--points`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
IMAGENET = "--prep imagenet"  # in README
PREPARED = {
    "MobileNetV2": IMAGENET,
    "EfficientNet-Lite0": "--scale 1 --mean 127 --std 128 --resize 256",
    "ResNet-50": "--prep keras-caffe",
    "MobileNetV1": "--prep tf",
    "bundled": "--mean 0.286 --std 0.353",
}
OFFSETS = {"MobileNetV1": 1}  # it has a class for the background in front


def readme_commands(wanted: list[str]) -> list[str]:
    """The lines of README's first block of commands for a model of your own."""
    text = (ROOT / "README.md").read_text()
    blocks = (part.split("```")[0] for part in text.split("```sh\n")[1:])
    block = next(b for b in blocks if "jq-quant quantize model.onnx" in b)
    lines = [line.partition("#")[0].strip() for line in block.splitlines()]
    return [line for line in lines if line.split()[1] in wanted]


def readme_figures() -> dict[str, tuple[float, float]]:
    """Float and XINT8 top-1 of each model in README's table."""
    rows = [
        line.strip("|").split("|") for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")
    ]
    cells = [[cell.strip() for cell in row] for row in rows]
    head = next(i for i, row in enumerate(cells) if "jq XINT8" in row)
    columns = cells[head].index("float"), cells[head].index("jq XINT8")
    four = cells[head + 2 : head + 6]
    numbers = [[float(row[c].split()[0].strip("*")) for c in columns] for row in four]  # without bold and intervals
    return {row[0]: (floats, quantized) for row, (floats, quantized) in zip(four, numbers, strict=True)}


def write_bundled(folder: Path) -> tuple[Path, Path, Path]:
    """The bundled images as bytes: to calibrate, to evaluate, and the labels of these."""
    import jq

    paths = folder / "calibration.npz", folder / "images.npz", folder / "labels.npy"
    for path, (images, labels) in zip(paths[:2], (jq.zoo.calibration_set(), jq.zoo.evaluation_set()), strict=True):
        pixels = np.rint((images * 0.353 + 0.286) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
        np.savez(path, images=pixels)
        np.save(paths[2], labels)
    return paths


def write_labels(images: Path, path: Path) -> Path:
    """The names and labels of a folder of JPEGs."""
    names = sorted(p.name for p in images.iterdir() if p.suffix.lower() in (".jpeg", ".jpg"))
    path.write_text("image,label\n" + "".join(f"{name},{int(name.split('_')[0])}\n" for name in names))
    return path


def top1(
    model: Path, name: str, files: tuple[Path, Path, Path], folder: Path, wanted: list[str]
) -> tuple[float, float]:
    """Float and XINT8 top-1 in percent, as README's commands show them."""
    calibration, images, labels = files
    places = {"model.onnx": model, "model_xint8.onnx": folder / "x.onnx", "calib/": calibration, "images/": images,
              "labels.csv": labels}  # fmt: skip
    shown = ""
    for line in readme_commands(wanted):
        words = [str(places.get(word, word)) for word in shlex.split(line.replace(IMAGENET, PREPARED[name]))[1:]]
        if words[0] == "evaluate":
            words += ["--json", "--label-offset", str(OFFSETS.get(name, 0))]
        print("$ jq-quant", shlex.join(words), flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "jq", *words], stdout=subprocess.PIPE, text=True, check=words[0] != "lint"
        )
        shown = done.stdout if words[0] == "evaluate" else shown
    models = list(json.loads(shown)["classification"]["models"].values())
    return 100 * models[0]["top1"], 100 * models[1]["top1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--commands", nargs="+", default=["lint", "quantize", "evaluate"])
    parser.add_argument("--points", type=float, default=2.0)
    args = parser.parse_args()
    figures, apart = readme_figures(), False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.models:
            if args.calibration is None or args.images is None:
                parser.error("models need --calibration and --images")
            files = args.calibration, args.images, write_labels(args.images, folder / "labels.csv")
            runs = [(Path(path), row) for path, _, row in (entry.rpartition(":") for entry in args.models)]
        else:
            import jq

            files = write_bundled(folder)
            runs = [(jq.zoo.path(model), "bundled") for model in jq.zoo.models()]
        for model, row in runs:
            floats, quantized = top1(model, row, files, folder, args.commands)
            known = figures.get(row, (floats, floats))
            apart |= max(abs(floats - known[0]), abs(quantized - known[1])) > args.points
            print(f"{model.name}: float {floats:.1f} (README {known[0]:.1f}), XINT8 {quantized:.1f} (README {known[1]:.1f})",
                  flush=True)  # fmt: skip
    raise SystemExit(apart)


if __name__ == "__main__":
    main()
