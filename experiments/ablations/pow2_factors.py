"""Equalization by powers of two alone, found by an integer program, beside none and beside `jq.equalize`, in XINT8.

    python experiments/ablations/pow2_factors.py [MODEL.onnx:PREP[:LABELS] ...] [--images NPZ] [--eval FOLDER] [--only]
        [--count 100]

Models, data and metrics are those of experiments/ablations/joint_search.py; differences are to no equalization. All
three are calibrated and have their biases corrected. `float` is the largest difference of the float network's outputs
before and after equalization, relative to the largest output, on 16 of the images: zero is bit equality.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common import RESULTS, beside, parser_of, setup

OUT = RESULTS / "pow2_factors.jsonl"


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
    parser = parser_of(__doc__, OUT)
    args = parser.parse_args()
    beside(parser, args, "pow2_factors", variants)


if __name__ == "__main__":
    main()
