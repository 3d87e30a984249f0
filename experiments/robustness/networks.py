"""Take random networks of twenty operators through every stage, and count what goes wrong where.

    python experiments/robustness/networks.py [--count 200] [--first 0] [--until finetune] [--size 20]

Each seed is one network (`tests/networks.py`) and, in turn, one preset; it is quantized and exported at its own opset,
loaded by onnxruntime with default optimizations, compared with it in integers, finetuned, compared and ranked
(`tests/flow.py`). An exception is a defect, but for a `jq.Error`, which is counted apart: read them, as a user would
have to act on them. Exits with 1 if there is a defect. Appends one JSON line to `--out`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import jax

import jq
from experiments.common import RESULTS
from tests.flow import stages
from tests.networks import network

PRESETS = ("XINT8", "A8W8", "A16W8", "BF16", "INT8_CNN_DEFAULT", "S8S8_AAWS")


def outcome(seed: int, size: int, until: str, spent: Counter[str]) -> tuple[str, str]:
    """What became of a network: "ok", "refused" or "defect", and the error."""
    case, stage, start = network(seed, size), "float", time.process_time()
    opset = case.model.opset_import[0].version
    try:
        for following in stages(case.model, case.data, PRESETS[seed % len(PRESETS)], opset=opset):
            spent[stage] += time.process_time() - start
            stage, start = following, time.process_time()
            if stage == until:
                break
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{stage}, opset {opset}: {type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
        return "refused" if isinstance(error, jq.Error) else "defect", text.splitlines()[0]
    return "ok", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--size", type=int, default=20, help="operators")
    parser.add_argument("--until", default="", help="stop before this stage")
    parser.add_argument("--out", type=Path, default=RESULTS / "networks.jsonl")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    counts, spent = Counter[str](), Counter[str]()
    wrong = []
    for seed in range(args.first, args.first + args.count):
        kind, text = outcome(seed, args.size, args.until, spent)
        counts[kind] += 1
        if text:
            wrong.append({"seed": seed, "preset": PRESETS[seed % len(PRESETS)], "kind": kind, "error": text})
            print(json.dumps(wrong[-1]), flush=True)
        if seed % 10 == 9:  # programs of XLA
            jax.clear_caches()
            gc.collect()
    seconds = {stage: round(s, 1) for stage, s in spent.items()}
    print(dict(counts), seconds)
    line = {"experiment": "networks", "first": args.first, "count": args.count, "size": args.size, "until": args.until}
    with args.out.open("a") as file:
        file.write(json.dumps({**line, "outcomes": dict(counts), "cpu_seconds": seconds, "wrong": wrong}) + "\n")
    sys.exit(counts["defect"] > 0)


if __name__ == "__main__":
    main()
