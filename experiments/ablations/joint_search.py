"""What searching all exponents together gives beyond least squared error, tensor by tensor, in XINT8.

    python experiments/ablations/joint_search.py [MODEL.onnx:PREP[:LABELS] ...] [--images NPZ] [--eval FOLDER] [--only]
        [--methods joint ...] [--loss mse] [--count 100]

Takes the bundled models with the first `--count` of the bundled calibration images, evaluated on the bundled evaluation
set, and models as in experiments/bench/quantize.py after them (with --only: these alone): NPZ holds their images, FOLDER
the JPEGs that they are evaluated on, of which no search sees any.

The baseline is the preset XINT8: equalized, calibrated, biases corrected. A method changes exponents of its plan by
`jq.research.search_exponents`, and nothing else: the weights of the float network and all constraints are the same
(violations are counted). beam-N has N beams; a method may end in -kl, which is another loss, in -activations, which
leaves weights and biases at their exponents, or in -2, which makes two sweeps.

Both plans are exported and run by onnxruntime. Of each image: the divergence of the softmax of its logits from the
float network's (KL), the signal-to-noise ratio of its logits in dB, top-1, and agreement with the float network. Means
over the images, and their differences to the baseline with 95 % intervals of the paired difference. Prints a table,
appends one JSON line per model and method to `--out`. Deterministic but for the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import RESULTS, command, compared, entries, fresh, parser_of, setup, write_data

OUT = RESULTS / "joint_search.jsonl"
METRICS = ("kl", "sqnr", "top1", "agreement")


def options(method: str) -> dict[str, Any]:
    """The arguments that a method stands for."""
    name, *more = method.split("-")
    found: dict[str, Any] = {"method": name}
    for part in more:
        if part == "kl":
            found["loss"] = "kl"
        elif part == "activations":
            found["weights"] = False
        else:
            found["width" if name == "beam" else "sweeps"] = int(part)
    return found


def search(
    cores: Sequence[int], path: str, data: str, methods: Sequence[str], folder: str
) -> dict[str, dict[str, Any]]:
    """Models in a folder, one per method, and what the searches say of themselves."""
    setup(cores, 1)
    import jq
    from jq import research
    from jq.npu.constraints import violations

    x, config = np.load(data), jq.presets["XINT8"]
    graph = jq.equalize(jq.prepare(jq.load(path), config), config, x)
    stats = jq.calibrate(graph, x, config)
    params = jq.correct_biases(graph, jq.make_plan(graph, stats, config), stats).params
    plan = jq.make_plan(graph, stats, config, params)
    jq.export(graph, plan, params=params, path=f"{folder}/minmse.onnx")
    found: dict[str, dict[str, Any]] = {"minmse": {"violations": len(violations(graph, plan, config))}}
    for method in methods:
        start = np.array([time.perf_counter(), sum(os.times()[:4])])
        result = research.search_exponents(graph, plan, x, config, params=params, **options(method))
        wall, cpu = np.array([time.perf_counter(), sum(os.times()[:4])]) - start
        jq.export(graph, result.plan, params=params, path=f"{folder}/{method}.onnx")
        found[method] = {
            "moves": len(result.steps),
            "held_back": {"before": result.before, "after": result.after},
            "violations": len(violations(graph, result.plan, config)),
            "wall": round(float(wall), 1),
            "cpu": round(float(cpu), 1),
        }
    return found


def measure(args: argparse.Namespace, cores: Sequence[int], path: str, prep: str, offset: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as args.folder:
        data = f"{args.folder}/images.npy"
        fresh(write_data, path, prep, args.images, args.count, data)
        ran = fresh(search, cores, path, data, args.methods, args.folder)
        found = fresh(compared, cores, path, list(ran), prep, offset, args)
    model = Path(path).stem
    print(
        f"{model}: {args.count} images for calibration and search, {found['images']} others; float {found['float']:.2f}"
    )
    print(f"  {'':24}{'moves':>6}{'CPU, s':>8}" + "".join(f"{k:>36}" for k in METRICS))
    rows = []
    for name, facts in ran.items():
        metrics = found[name]
        text = "".join(
            f"{m['mean']:11.{d}f}{m['difference']:+9.{d}f} [{m['low']:+.{d}f}, {m['high']:+.{d}f}]"
            for m, d in ((metrics[k], 4 if k == "kl" else 2) for k in METRICS)
        )
        print(f"  {name:24}{facts.get('moves', 0):6}{facts.get('cpu', 0.0):8.1f} {text}", flush=True)
        row = {"model": model, "method": name, "count": args.count, "images": found["images"], "float": found["float"]}
        rows.append(row | facts | metrics)
    return rows


def main() -> None:
    parser = parser_of(__doc__, OUT)
    parser.add_argument("--methods", nargs="+", default=["joint"])
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    common = {"threads": len(cores), "command": command()}
    for path, prep, offset in entries(parser, args):
        rows = measure(args, cores, path, prep, offset)
        with args.out.open("a") as file:
            file.writelines(json.dumps({"experiment": "joint_search", **row, **common}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
