"""What each way to recover accuracy gives, alone and together, in XINT8.

    python experiments/ablations/finetune.py [MODEL.onnx:PREP[:LABELS] ...] [--images NPZ] [--eval FOLDER]
        [--variants none cle ... cle+adaround+block] [--count 128] [--seeds 0]

Takes the bundled models, calibrated on the first `--count` of the bundled calibration images and evaluated on the
bundled evaluation set, and models as in experiments/bench/quantize.py after them: NPZ holds their images for
calibration, FOLDER the JPEGs that they are evaluated on.

A variant is a sum of cle (cross-layer equalization), bc (bias correction) and stages of finetuning: bias, adaround,
adaquant, block, network, exponents. With a stage, biases are the stage's, and bc changes nothing. cle+bc is the preset XINT8,
cle+adaround XINT8_ADAROUND, cle+adaround+exponents XINT8_ACCURATE.

Every run is a process of its own with an empty compilation cache, so its seconds do not depend on the others: wall and
CPU seconds of `jq.quantize` from a file to a file. Top-1, agreement with the float model and the signal-to-noise
ratio of the logits are onnxruntime's on the file that it wrote. Prints a table and appends one JSON line per run to
`--out`. Deterministic but for the seconds; run it on an idle machine for those.
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

from experiments.common import (
    RESULTS,
    all_versions,
    bundled,
    command,
    fresh,
    machine,
    read_entry,
    score,
    setup,
    write_data,
)

VARIANTS = (
    "none", "cle", "bc", "cle+bc", "bias", "adaround", "adaquant", "block", "network", "cle+bias", "cle+adaround",
    "cle+adaquant", "cle+block", "cle+network", "cle+adaround+block", "cle+adaquant+block", "cle+adaround+network",
    "cle+adaround+block+network", "cle+adaround+exponents",
)  # fmt: skip
STAGES = ("bias", "adaround", "adaquant", "block", "network", "exponents")


def changes(variant: str, seed: int) -> dict[str, Any]:
    """What a variant changes in XINT8."""
    parts = [] if variant == "none" else variant.split("+")
    unknown = [p for p in parts if p not in ("cle", "bc", *STAGES)]
    if unknown:
        raise SystemExit(f"{variant}: no {', '.join(unknown)}; there are none, cle, bc, {', '.join(STAGES)}")
    stages = "+".join(p for p in parts if p in STAGES)
    return {"cle": "cle" in parts, "bias_correction": "bc" in parts, "finetune": stages or None, "seed": seed}


def quantize(
    cores: Sequence[int], path: str, data: str, options: dict[str, Any], output: str, cache: str
) -> dict[str, float]:
    setup(cores, 1, cache)
    import jq

    x, start = np.load(data), np.array([time.perf_counter(), sum(os.times()[:4])])
    jq.quantize(path, x, jq.presets["XINT8"].replace(**options), output=output)
    wall, cpu = np.array([time.perf_counter(), sum(os.times()[:4])]) - start
    return {"wall": round(float(wall), 2), "cpu": round(float(cpu), 2)}


def measure(args: argparse.Namespace, cores: Sequence[int], path: str, prep: str, offset: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data, output = f"{folder}/images.npy", f"{folder}/quantized.onnx"
        fresh(write_data, path, prep, args.images, args.count, data)
        print(f"{Path(path).stem}, {args.count} images for calibration")
        print(f"  {'':28}{'top-1':>8}{'agreement':>11}{'KL':>9}{'SQNR, dB':>10}{'wall, s':>9}{'CPU, s':>9}", flush=True)
        for seed in args.seeds:
            for variant in args.variants:
                options = changes(variant, seed)
                with tempfile.TemporaryDirectory() as cache:
                    seconds = fresh(quantize, cores, path, data, options, output, cache)
                found = fresh(score, cores, path, {"jq": output}, prep, offset, args.eval)
                row: dict[str, Any] = {"model": Path(path).stem, "variant": variant, "preset": "XINT8"}
                row |= {"config": options, "seed": seed, "count": args.count, "images": found["images"]}
                row |= {"float": found["float"], **found["jq"], **seconds}
                if not rows:
                    print(f"  {'float':28}{row['float']:8.2f}")
                name = variant if len(args.seeds) == 1 else f"{variant}, seed {seed}"
                text = "{top1:8.2f}{agreement:11.2f}{kl:9.4f}{sqnr:10.2f}{wall:9.1f}{cpu:9.1f}".format(**row)
                print(f"  {name:28}{text}", flush=True)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:PREP[:LABELS], after the bundled ones")
    parser.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`, for models")
    parser.add_argument("--eval", type=Path, help="folder of labelled JPEGs, for models")
    parser.add_argument("--only", action="store_true", help="these models without the bundled ones")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--count", type=int, default=128, help="images for calibration")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "finetune_ablation.jsonl")
    args = parser.parse_args()
    for variant in args.variants:
        changes(variant, 0)
    models = [read_entry(entry, args) for entry in args.models]
    if any(prep for _, prep, _ in models) and args.eval is None:
        parser.error("models with a PREP need --eval")
    if not args.only:
        models = [(path, "", 0) for path in fresh(bundled)] + models
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)
    common = {"threads": len(cores), **fresh(all_versions)}
    common |= {"machine": machine(), "command": command()}
    for path, prep, offset in models:
        rows = measure(args, cores, path, prep, offset)
        with args.out.open("a") as file:
            file.writelines(json.dumps({"experiment": "finetune_ablation", **row, **common}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
