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
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from calibrate import bundled, fresh, setup, write_data
from quantize import evaluation, logits

RESULTS = Path(__file__).parents[1] / "results" / "joint_search.jsonl"
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


def measured(path: str, reference: np.ndarray, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of each image."""
    y, best = logits(path, x), reference.argmax(1)

    def log_softmax(v: np.ndarray) -> np.ndarray:
        v = v.astype(np.float64) - v.max(1, keepdims=True)
        return v - np.log(np.exp(v).sum(1, keepdims=True))

    want, have = log_softmax(reference), log_softmax(y)
    noise = np.square(reference.astype(np.float64) - y).sum(1)
    return {
        "kl": (np.exp(want) * (want - have)).sum(1),
        "sqnr": 10 * np.log10(np.square(reference, dtype=np.float64).sum(1) / np.maximum(noise, 1e-30)),
        "top1": 100.0 * (y.argmax(1) == labels),
        "agreement": 100.0 * (y.argmax(1) == best),
    }


def compared(
    cores: Sequence[int], path: str, names: Sequence[str], prep: str, offset: int, args: Any
) -> dict[str, Any]:
    """Means of every model's metrics, and differences to the first with half of their 95 % intervals."""
    os.sched_setaffinity(0, cores)
    if prep:
        x, labels = evaluation(args.eval, prep)
    else:
        import jq

        x, labels = jq.zoo.evaluation_set()
    reference = logits(path, x)
    seen = {name: measured(f"{args.folder}/{name}.onnx", reference, x, labels + offset) for name in names}
    base, found = seen[names[0]], {"float": round(100 * float(np.mean(reference.argmax(1) == labels + offset)), 2)}
    found |= {"images": len(x)}
    for name, metrics in seen.items():
        found[name] = {}
        for k, v in metrics.items():
            off = v - base[k]
            half = 1.96 * off.std(ddof=1) / np.sqrt(len(off))
            found[name][k] = {"mean": float(v.mean()), "difference": float(off.mean()), "half": float(half)}
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
    print(f"  {'':24}{'moves':>6}{'CPU, s':>8}" + "".join(f"{k:>28}" for k in METRICS))
    rows = []
    for name, facts in ran.items():
        metrics = found[name]
        text = "".join(
            f"{m['mean']:11.{d}f}{m['difference']:+9.{d}f} +-{m['half']:5.{d}f}"
            for m, d in ((metrics[k], 4 if k == "kl" else 2) for k in METRICS)
        )
        print(f"  {name:24}{facts.get('moves', 0):6}{facts.get('cpu', 0.0):8.1f} {text}", flush=True)
        row = {"model": model, "method": name, "count": args.count, "images": found["images"], "float": found["float"]}
        rows.append(row | facts | metrics)
    return rows


def parser_of(text: str | None, out: Path) -> argparse.ArgumentParser:
    """Arguments that say which models, and what they see."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:PREP[:LABELS], after the bundled ones")
    parser.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`, for models")
    parser.add_argument("--eval", type=Path, help="folder of labelled JPEGs, for models")
    parser.add_argument("--only", action="store_true", help="these models without the bundled ones")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=out)
    return parser


def entries(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Models, each with its preparation and what is added to its labels."""
    if args.models and (args.images is None or args.eval is None):
        parser.error("models need --images and --eval")
    found = [] if args.only else [(path, "", 0) for path in fresh(bundled)]
    for entry in args.models:
        path, prep, offset = (*entry.split(":"), "0")[:3]
        found.append((path, prep, int(offset)))
    return found


def beside(parser: argparse.ArgumentParser, args: argparse.Namespace, experiment: str, make: Any, *given: Any) -> None:
    """Of each model, what `make` puts into a folder beside each other: printed, and a line of JSON for each."""
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    for path, prep, offset in entries(parser, args):
        with tempfile.TemporaryDirectory() as args.folder:
            data = f"{args.folder}/images.npy"
            fresh(write_data, path, prep, args.images, args.count, data)
            ran = fresh(make, cores, path, data, *given, args.folder)
            found = fresh(compared, cores, path, list(ran), prep, offset, args)
        print(f"{Path(path).stem}: {args.count} images, {found['images']} others; float {found['float']:.2f}")
        for name, facts in ran.items():
            told = [f"{k} {v:.4g}" for k, v in facts.items()]
            told += [f"{k} {m['mean']:.4f} {m['difference']:+.4f} +-{m['half']:.4f}" for k, m in found[name].items()]
            print(f"  {name:15} {'  '.join(told)}", flush=True)
            row = {"experiment": experiment, "model": Path(path).stem, "variant": name, "count": args.count}
            row |= {"images": found["images"], **facts, **found[name], "threads": len(cores), "command": command()}
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def command() -> str:
    """What is run, without the folders of this machine."""
    return shlex.join(["python", *(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)])


def main() -> None:
    parser = parser_of(__doc__, RESULTS)
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
