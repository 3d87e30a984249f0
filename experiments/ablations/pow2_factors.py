"""Equalization by powers of two alone, found by an integer program, beside none and beside `jq.equalize`, in XINT8.

    python experiments/ablations/pow2_factors.py [MODEL.onnx:PREP[:LABELS] ...] [--images NPZ] [--eval FOLDER] [--only]
        [--count 100]

Models, data and metrics are those of experiments/ablations/joint_search.py; differences are to no equalization. All
three are calibrated and have their biases corrected. `float` is the largest difference of the float network's outputs
before and after equalization, relative to the largest output, on 16 of the images: zero is bit equality.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from calibrate import fresh, setup, write_data
from joint_search import command, compared, entries, parser_of

RESULTS = Path(__file__).parents[1] / "results" / "pow2_factors.jsonl"


def variants(cores: Sequence[int], path: str, data: str, folder: str) -> dict[str, dict[str, Any]]:
    """The quantized models in a folder, and seconds of equalization."""
    setup(cores, 1)
    import jq

    x, config, found = np.load(data), jq.presets["XINT8"], {}
    prepared = jq.prepare(jq.load(path), config)
    feed = {prepared.inputs[0].name: x[:16]}
    before = jq.trace(prepared)(prepared.params, feed)
    ways = {"none": lambda *_: prepared, "equalize": jq.equalize, "pow2": jq.research.equalize_pow2}
    for name, equalize in ways.items():
        start = time.perf_counter()
        graph = equalize(prepared, config, x)
        seconds = time.perf_counter() - start
        after = jq.trace(graph)(graph.params, feed)
        off = max(float(np.abs(np.asarray(after[k]) - before[k]).max() / np.abs(before[k]).max()) for k in before)
        stats = jq.calibrate(graph, x, config)
        graph = jq.correct_biases(graph, jq.make_plan(graph, stats, config), stats)
        jq.export(graph, jq.make_plan(graph, stats, config), path=f"{folder}/{name}.onnx")
        found[name] = {"wall": round(seconds, 1), "float_off": off}
    return found


def main() -> None:
    parser = parser_of(__doc__, RESULTS)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    common = {"threads": len(cores), "command": command()}
    for path, prep, offset in entries(parser, args):
        with tempfile.TemporaryDirectory() as args.folder:
            data = f"{args.folder}/images.npy"
            fresh(write_data, path, prep, args.images, args.count, data)
            ran = fresh(variants, cores, path, data, args.folder)
            found = fresh(compared, cores, path, list(ran), prep, offset, args)
        print(f"{Path(path).stem}: {args.count} images, {found['images']} others; float {found['float']:.2f}")
        for name, facts in ran.items():
            text = "".join(
                f"{k:>10} {m['mean']:.4f} {m['difference']:+.4f} +-{m['half']:.4f}" for k, m in found[name].items()
            )
            print(f"  {name:10}{facts['wall']:7.1f} s  float {facts['float_off']:.1e}{text}", flush=True)
            row = {"model": Path(path).stem, "variant": name, "count": args.count, "images": found["images"]}
            with args.out.open("a") as file:
                file.write(json.dumps({"experiment": "pow2_factors", **row, **facts, **found[name], **common}) + "\n")


if __name__ == "__main__":
    main()
