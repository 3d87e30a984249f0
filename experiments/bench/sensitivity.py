"""Sensitivity of all activations: one walk of jq, against one plan at a time through onnxruntime.

    python experiments/bench/sensitivity.py [MODEL.onnx:PREP ...] [--images NPZ] [--count 64] [--screen 8] [--batch 1 4 8 16]

NPZ and PREP are as in experiments/common.py; without models it takes the bundled ones. Each model is prepared, equalized
and calibrated in XINT8 on the images first, which is not counted. Then, each in a process of its own, imports aside:

* onnxruntime: for each activation of the plan, and for none, the export of the plan that quantizes it alone, a session,
  and the images in the batches that suit it best; KL against the float outputs.
* jq.research.sensitivity of the same: all measured end to end (exact); `--screen` of them, chosen by the second-order
  estimate, and the estimate of the others; the estimate alone. Each with an empty compilation cache (cold) and with the
  one that this left (warm); a second call in the same process is as warm.

Prints seconds, the part of onnxruntime's time, and how the losses agree with onnxruntime's: the largest and the median
relative difference of exact ones, rank correlation (Spearman) of all, and how many of its ten highest are among the ten
highest. Appends one JSON line per model to `--out`. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import RESULTS, bundled, command, fresh, read_images, setup, versions

TOP = 10


def prepare(cores: Sequence[int], path: str, prep: str, images: Path | None, count: int, folder: str) -> int:
    """Write the prepared graph, its statistics and the images; the number of activations."""
    setup(cores, len(cores))
    import jq

    x = read_images(prep, images, count)
    graph = jq.prepare(jq.load(path), "XINT8")
    graph = jq.equalize(graph, jq.presets["XINT8"], x)
    stats = jq.calibrate(graph, x, "XINT8")
    jq.save(graph, f"{folder}/graph.onnx")
    np.save(f"{folder}/images.npy", x)
    stats.save(f"{folder}/stats.safetensors")
    return len(jq.make_plan(graph, stats, "XINT8").activations)


def inputs(folder: str) -> tuple[Any, Any, np.ndarray]:
    import jq

    graph = jq.load(f"{folder}/graph.onnx")
    plan = jq.make_plan(graph, jq.Stats.load(f"{folder}/stats.safetensors"), "XINT8")
    return graph, plan, np.load(f"{folder}/images.npy")


def one_at_a_time(cores: Sequence[int], folder: str, batches: Sequence[int]) -> dict[str, Any]:
    setup(cores, len(cores))
    import onnxruntime as ort

    import jq

    graph, plan, x = inputs(folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads = len(cores)
    spent, outputs = {"export": 0.0, "session": 0.0, "run": 0.0}, {}
    batch = fastest(f"{folder}/graph.onnx", x, batches, options)
    for tensor in (None, *plan.activations):
        times = [time.perf_counter()]
        jq.export(graph, plan.replace({k: None for k in plan if k != tensor}), path=f"{folder}/one.onnx")
        times.append(time.perf_counter())
        session = ort.InferenceSession(f"{folder}/one.onnx", options, providers=["CPUExecutionProvider"])
        times.append(time.perf_counter())
        name = session.get_inputs()[0].name
        parts = [session.run(None, {name: x[i : i + batch]})[0] for i in range(0, len(x), batch)]
        times.append(time.perf_counter())
        outputs[tensor] = log_softmax(np.concatenate(parts).reshape(len(x), -1).astype(np.float64))
        for key, seconds in zip(spent, np.diff(times), strict=True):
            spent[key] += float(seconds)
    p = outputs.pop(None)
    losses = {k: float(np.mean(np.sum(np.exp(p) * (p - q), axis=1))) for k, q in outputs.items()}
    return {"seconds": sum(spent.values()), **spent, "batch": batch, "losses": losses}


def fastest(path: str, x: np.ndarray, batches: Sequence[int], options: Any) -> int:
    """How many images at once suit onnxruntime best, on the float model; not counted."""
    import onnxruntime as ort

    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name, seconds = session.get_inputs()[0].name, dict.fromkeys(batches, math.inf)
    for _ in range(3):
        for batch in batches:
            start = time.perf_counter()
            for i in range(0, len(x), batch):
                session.run(None, {name: x[i : i + batch]})
            seconds[batch] = min(seconds[batch], time.perf_counter() - start)
    return min(seconds, key=seconds.__getitem__)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def in_one_walk(cores: Sequence[int], folder: str, screen: int | None, cache: str) -> dict[str, Any]:
    setup(cores, len(cores), cache)
    import jq

    graph, plan, x = inputs(folder)
    start = time.perf_counter()
    found = jq.research.sensitivity(graph, plan, x, kind="activations", screen=screen)
    return {"seconds": time.perf_counter() - start, "losses": {r.name: (r.loss, r.exact) for r in found.rows}}


def ranks(values: Sequence[float]) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(np.float64)


def agreement(found: dict[str, tuple[float, bool]], expected: dict[str, float]) -> dict[str, Any]:
    names = list(expected)
    ours, theirs = [found[n][0] for n in names], [expected[n] for n in names]
    off = [abs(found[n][0] - expected[n]) / max(expected[n], 1e-12) for n in names if found[n][1]]
    highest = [set(sorted(names, key=lambda n: -v[n])[:TOP]) for v in ({n: found[n][0] for n in names}, expected)]
    return {
        "exact": len(off),
        "largest_difference": max(off, default=None),
        "median_difference": float(np.median(off)) if off else None,
        "rank_correlation": float(np.corrcoef(ranks(ours), ranks(theirs))[0, 1]),
        f"of_the_{TOP}_highest": len(highest[0] & highest[1]),
    }


def measure(args: argparse.Namespace, cores: Sequence[int], path: str, prep: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tensors = fresh(prepare, cores, path, prep, args.images, args.count, folder)
        theirs = fresh(one_at_a_time, cores, folder, args.batch)
        expected = theirs.pop("losses")
        row: dict[str, Any] = {
            "model": Path(path).stem,
            "tensors": tensors,
            "images": args.count,
            "onnxruntime": theirs,
        }
        parts = ", ".join(f"{k} {theirs[k]:.1f}" for k in ("export", "session", "run"))
        print(f"{row['model']}, {tensors} activations, {args.count} images")
        print(f"  onnxruntime {theirs['seconds']:.1f} s ({parts}, batch {theirs['batch']})")
        for name, screen in (("exact", None), (f"screen={args.screen}", args.screen), ("estimate", 0)):
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = (fresh(in_one_walk, cores, folder, screen, cache) for _ in range(2))
            found = {k: v["seconds"] for k, v in (("cold", cold), ("warm", warm))}
            found |= {f"{k}_part": v / theirs["seconds"] for k, v in found.items()}
            row[name] = found | agreement(warm["losses"], expected)
            parts = ", ".join(f"{k} {v:.4g}" for k, v in row[name].items() if v is not None)
            print(f"  {name}: {parts}", flush=True)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:PREP; by default the bundled ones")
    parser.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`, for models")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--screen", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16], help="images at once of onnxruntime")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "sensitivity.jsonl")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)
    models = [entry.rpartition(":")[::2] for entry in args.models] or [(path, "") for path in fresh(bundled)]
    for path, prep in models:
        row = {"bench": "sensitivity", **measure(args, cores, path, prep), "threads": len(cores)}
        row["command"] = command()
        with args.out.open("a") as file:
            file.write(json.dumps(row | {"versions": fresh(versions)}) + "\n")


if __name__ == "__main__":
    main()
