"""The forecast beside the vendor's own logs: nodes on the NPU, on the CPU and in the provider, and subgraphs.

    python experiments/npu/logs.py --models FOLDER [--logs npu_logs.json] [--config strict|default]

FOLDER holds the float structures of torchvision's networks, `NAME.onnx`; the logs are rows of model, format and counts. Each
model is quantized on two random images, as structure alone decides. Counts are with the copies that the runtime makes of a
quantizer for each further reader, as the provider counts. Without the logs there is nothing to do, and it says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import jq
from jq.graph.read import load

ROOT = Path(__file__).resolve().parents[2]


def quantized(path: Path, format: str, strict: bool) -> jq.Graph:
    config = jq.presets[format].replace(cle=False, strict_quark=strict)
    images = np.random.default_rng(0).normal(size=(2, 3, 224, 224)).astype(np.float32)
    return load(jq.quantize(path, images, config).model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=ROOT.parent / "shared" / "spec" / "npu_logs.json")
    parser.add_argument("--config", choices=("strict", "default"), default="strict")
    arguments = parser.parse_args()
    if not arguments.logs.is_file():
        sys.exit(f"skipped: no logs at {arguments.logs}")
    rows, near, whole, pieces = json.loads(arguments.logs.read_text())["rows"], 0, 0, 0
    print("model, format; log, then forecast: npu/cpu/provider, subgraphs (of which run)")
    for row in rows:
        path = arguments.models / f"{row['model']}.onnx"
        if not path.is_file():
            print(f"{row['model']} {row['format']}: no {path.name}")
            continue
        forecast = jq.npu.forecast(quantized(path, row["format"], arguments.config == "strict"))
        logged = "/".join(str(row[k]) for k in ("npu", "cpu", "vitis_ep_cpu"))
        ours = "/".join(str(count + forecast.copies.get(place, 0)) for place, count in forecast.counts.items())
        near += abs(forecast.counts["cpu"] - row["cpu"]) <= 0.05 * row["cpu"]
        whole += (forecast.subgraphs == 1) == (row["subgraphs"] == 1)
        pieces += abs(forecast.subgraphs - row["subgraphs"]) <= 0.1 * row["subgraphs"]
        print(
            f"{row['model']:20} {row['format']:6} {logged:>13} {row['subgraphs']:>2} ({row['subgraphs_run']}); "
            f"{ours:>13} {forecast.subgraphs:>2} ({forecast.subgraphs_run})",
            flush=True,
        )
    print(
        f"of {len(rows)} rows: CPU nodes within 5 % {near}, whole or broken as logged {whole}, subgraphs within 10 % {pieces}"
    )


if __name__ == "__main__":
    main()
