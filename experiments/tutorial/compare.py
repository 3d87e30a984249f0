"""Points of top-1 that each step loses, beside what is published of power-of-two scales.

    python experiments/tutorial/compare.py [experiments/results/tutorial.jsonl] [--out experiments/results/tutorial.md]

Only losses can be set side by side: float models, images and their number differ (the published ones are of the 50,000
of ImageNet's validation set). Of ours, the 95 % interval is of the difference of two models on the same images.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from experiments.common import RESULTS

# Source, float top-1, quantized top-1, and how. All W8A8 with power-of-two scales, per tensor unless said.
PUBLISHED = {
    "mobilenetv2": [
        ("vendor's tutorial, XINT8", 71.3, 64.0),
        ("vendor's tutorial, CLE", 71.3, 62.7),
        ("vendor's tutorial, fast finetuning (float scales)", 71.3, 70.5),
        ("Vitis AI 3.5 model zoo (DPU)", 70.13, 67.67),
        ("brevitas, 1,000 images, biases of 16 or 32 bits", 71.90, 71.33),
        ("HPTQ (arXiv:2109.09113), weights per channel", 71.81, 71.46),
        ("TQT (arXiv:1903.08066), trained with labels", 70.1, 71.8),
        ("esp-dl, TQT without labels", 71.878, 71.775),
        ("TI edgeai (torchvision's weights)", 72.00, 67.64),
    ],
    "resnet50": [
        ("vendor's tutorial, XINT8", 80.0, 77.3),
        ("vendor's tutorial, CLE", 80.0, 77.7),
        ("vendor's tutorial, fast finetuning", 80.0, 79.3),
        ("Vitis AI 3.5 model zoo (DPU)", 75.13, 74.37),
        ("TQT, static", 75.2, 74.3),
        ("TQT, trained with labels", 75.2, 75.4),
    ],
    "mobilenet_v1": [
        ("Vitis AI 3.5 model zoo (DPU)", 71.02, 67.79),
        ("TQT, static", 71.0, 0.6),
        ("TQT, trained with labels", 71.0, 71.1),
        ("TI edgeai", 71.83, 70.51),
    ],
    "efficientnet_lite0": [("Vitis AI 3.5 model zoo (DPU)", 75.01, 74.44)],
}


def interval(row: dict[str, Any]) -> float:
    """Half of a 95 % interval of the loss, if all samples with another class changed from right to wrong or back."""
    return 196 * math.sqrt((1 - row["agreement"]) / row["samples"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", type=Path, default=RESULTS / "tutorial.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "tutorial.md")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    lines = ["| model | how | float | quantized | lost |", "| --- | --- | --- | --- | --- |"]
    for model in dict.fromkeys(r["model"] for r in rows):
        for row in (r for r in rows if r["model"] == model):
            one, two = 100 * row["float_top1"], 100 * row["top1"]
            cells = f"{one:.1f} | {two:.1f} | {one - two:.1f} ± {interval(row):.1f}"
            lines.append(f"| {model} | jq, {row['config']}, {row['samples']} images | {cells} |")
        for source, one, two in PUBLISHED.get(model, []):
            lines.append(f"| {model} | {source} | {one:.1f} | {two:.1f} | {one - two:.1f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    args.out.write_text(text)


if __name__ == "__main__":
    main()
