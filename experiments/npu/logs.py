"""The forecast beside the vendor's own logs: nodes on the NPU, on the CPU and in the provider, and subgraphs.

    python experiments/npu/logs.py --models FOLDER [--logs npu_logs.json] [--config strict|default] [--out ROWS.jsonl]

FOLDER holds the float structures of torchvision's networks, `NAME.onnx`; the logs are rows of model, format and counts. Each
model is quantized on two random images, as structure alone decides. Counts are with the copies that the runtime makes of a
quantizer for each further reader, as the provider counts. Without the logs there is nothing to do, and it says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jq
from experiments.common import RESULTS, command, versions

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("npu", "cpu", "vitis_ep_cpu")


def row_of(path: Path, logged: dict, strict: bool) -> dict:
    """The logged counts and the forecast ones of a model."""
    config = jq.presets[logged["format"]].replace(strict_quark=strict)
    forecast = jq.npu.forecast(path, config=config)
    return {
        "model": logged["model"],
        "format": logged["format"],
        "logged": [*(logged[p] for p in PLACES), logged["subgraphs"], logged["subgraphs_run"]],
        "forecast": [
            *(forecast.counts[p] + forecast.copies.get(p, 0) for p in PLACES), forecast.subgraphs, forecast.subgraphs_run
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=ROOT.parent / "shared" / "spec" / "npu_logs.json")
    parser.add_argument("--config", choices=("strict", "default"), default="strict")
    parser.add_argument("--out", type=Path, default=RESULTS / "npu_logs.jsonl")
    arguments = parser.parse_args()
    if not arguments.logs.is_file():
        sys.exit(f"skipped: no logs at {arguments.logs}")
    rows = []
    print("model, format; log, then forecast: npu/cpu/provider, subgraphs (of which run)")
    for logged in json.loads(arguments.logs.read_text())["rows"]:
        path = arguments.models / f"{logged['model']}.onnx"
        if not path.is_file():
            print(f"{logged['model']} {logged['format']}: no {path.name}")
            continue
        rows.append(row := row_of(path, logged, arguments.config == "strict"))
        told = ["{:>4}/{:>3}/{:>4} {:>2} ({})".format(*row[k]) for k in ("logged", "forecast")]
        print(f"{row['model']:20} {row['format']:6} {told[0]}; {told[1]}", flush=True)
    pairs = [(row["logged"], row["forecast"]) for row in rows]
    summary = {
        "rows": len(rows),
        "CPU nodes within 5 %": sum(abs(f[1] - log[1]) <= 0.05 * log[1] for log, f in pairs),
        "whole or broken as logged": sum((f[3] == 1) == (log[3] == 1) for log, f in pairs),
        "subgraphs within 10 %": sum(abs(f[3] - log[3]) <= 0.1 * log[3] for log, f in pairs),
    }
    print(summary)
    record = {"experiment": "npu_logs", "config": arguments.config, **versions(), "command": command(), **summary}
    with arguments.out.open("a") as file:
        file.write(json.dumps(record | {"counts": rows}) + "\n")


if __name__ == "__main__":
    main()
