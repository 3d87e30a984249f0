"""What one `jq-quant auto` command reaches on images that it never saw, beside XINT8, paired.

    python experiments/auto/reach.py [MODEL.onnx:PREP[:LABELS] ...] [--images NPZ] [--eval FOLDER] [--only]
        [--target "agreement 98"] [--time-budget 5m] [--count 100]

Models and images are those of experiments/bench/quantize.py. Both calibrate on the same samples, of which one in four
decides. Prints KL, signal-to-noise ratio, top-1 and agreement with the float network, with 95 % intervals of the paired
differences to XINT8, and appends a JSON line per model and variant to `--out`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments.common import RESULTS, beside, parser_of, setup

OUT = RESULTS / "auto_reach.jsonl"


def made(cores: Sequence[int], path: str, data: str, options: Sequence[str], folder: str) -> dict[str, dict[str, Any]]:
    """The models of both variants in a folder, and what the search says of its own."""
    setup(cores, len(cores))
    import jq

    jq.quantize(path, data, jq.presets["XINT8"].replace(held_out=4), output=f"{folder}/XINT8.onnx")
    start = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "jq",
        "auto",
        path,
        "--data",
        data,
        *options,
        "--json",
        "-o",
        f"{folder}/auto.onnx",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: the target is not shown to hold
        raise SystemExit(done.stderr)
    outcome = json.loads(done.stdout[done.stdout.index("{") :])
    chosen = next(rung for rung in outcome["rungs"] if rung["outcome"] == "chosen")
    facts = {k: chosen[k] for k in ("cost", "narrow", "islands")}
    return {"XINT8": {}, "auto": {**facts, "seconds": time.perf_counter() - start}}


def main() -> None:
    parser = parser_of(__doc__, OUT)
    parser.add_argument("--target", default="agreement 98")
    parser.add_argument("--time-budget", default="5m")
    args = parser.parse_args()
    beside(parser, args, "auto_reach", made, ["--target", args.target, "--time-budget", args.time_budget])


if __name__ == "__main__":
    main()
