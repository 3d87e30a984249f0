"""Calibration: seconds against onnxruntime's float pass and Quark's whole quantization, compile time, memory.

    python experiments/bench/calibrate.py [MODEL.onnx:PREP ...] [--images NPZ] [--count 256] [--threads 2]
        [--memory] [--quark PYTHON]

NPZ holds uint8 NHWC `images`, repeated up to `--count`; PREP is P1, P2, P3 or P4 as in
experiments/common.py. Without models it takes the bundled ones and their calibration set.
Every measurement is a process of its own, held to `--threads` cores, with one JAX device per core.
Prints, and appends as one JSON line to `--out`, per model:

* the best of `--rounds` of `jq.calibrate(graph, x, "XINT8")` after it was compiled; in turn with it,
  onnxruntime's plain pass over the same images, one at a time as calibrators feed it and eight at a time,
  and jq's own plain pass in batches of 32. The ratio is to the faster of onnxruntime's; the observers'
  share is what calibration takes beyond jq's pass, as a part of that pass. In it is the look at the first
  32 images that places the candidates, so it falls with `--count`.
* the first call on 64 images with an empty compilation cache (cold) and with the one that this left (warm);
  compile is the first call less the second in the same process.
* `--memory`: peak resident memory for 16 to 1024 images that are made when they are asked for, so that
  data do not count, with a warm compilation cache; the spread is the largest over the smallest, less one.
* `--quark`: wall and CPU seconds of all of Quark's XINT8 without cross-layer equalization, from a file to
  a file, and of calibration in it, run by an interpreter that has Quark; and of jq from the file to all
  scales, which compiles, with a cold and a warm cache: 100 images, and imports do not count for either.
  Quark's sessions take onnxruntime's default number of threads: leave `--threads` at all cores.

Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import (
    PREPARE,
    RESULTS,
    bundled,
    elapsed,
    fresh,
    quark_whole,
    read_images,
    setup,
    versions,
    write_data,
)

BATCH = 32  # of jq's plain pass, as of calibration
FIRST_CALL = 64  # images of the calls that are compiled
QUARK = 100  # images
MEMORY = (16, 64, 256, 1024)  # images


def speed(cores: Sequence[int], path: str, prep: str, images: Path | None, count: int, rounds: int) -> dict[str, Any]:
    setup(cores, len(cores))
    import jax
    import onnxruntime as ort
    from jax.sharding import NamedSharding, PartitionSpec

    import jq

    x, graph = read_images(prep, images, count), jq.prepare(jq.load(path))
    name, output = graph.inputs[0].name, graph.outputs[0].name
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    forward, params = jax.jit(jq.chunked(jq.trace(graph), mesh=mesh)), jq.pack(graph, mesh=mesh)
    split = NamedSharding(mesh, PartitionSpec("batch"))
    options = ort.SessionOptions()
    options.intra_op_num_threads = len(cores)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run_onnxruntime(size: int) -> list[np.ndarray]:
        return [session.run([output], {name: x[i : i + size]})[0] for i in range(0, count, size)]

    def run_forward() -> None:
        for i in range(0, count, BATCH):
            jax.block_until_ready(forward(params, {name: jax.device_put(x[i : i + BATCH], split)}))

    stats, want = jq.calibrate(graph, x, "XINT8"), run_onnxruntime(8)
    limits = min(y.min() for y in want), max(y.max() for y in want)
    error = float(np.abs(np.subtract(stats.range(output), limits)).max() / np.abs(limits).max())
    assert stats.samples == count and error < 1e-4, f"{path}: range {stats.range(output)}, onnxruntime's {limits}"
    run_forward()
    runs: dict[str, Callable[[], Any]] = {
        "calibrate": lambda: jq.calibrate(graph, x, "XINT8"),
        "onnxruntime_batch_1": lambda: run_onnxruntime(1),
        "onnxruntime_batch_8": lambda: run_onnxruntime(8),
        "forward": run_forward,
    }
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for kind, run in runs.items():
            best[kind] = min(best[kind], elapsed(run))
    fastest = min(best["onnxruntime_batch_1"], best["onnxruntime_batch_8"])
    ratios = {
        "ratio": best["calibrate"] / fastest,
        "ratio_batch_1": best["calibrate"] / best["onnxruntime_batch_1"],
        "observers": best["calibrate"] / best["forward"] - 1,
    }
    rounded = {kind: round(seconds, 4) for kind, seconds in best.items()}
    return rounded | {k: round(v, 3) for k, v in ratios.items()} | {"range_error": error}


def first_call(cores: Sequence[int], path: str, prep: str, images: Path | None, cache: str) -> dict[str, float]:
    setup(cores, len(cores), cache)
    import jq

    x, graph = read_images(prep, images, FIRST_CALL), jq.prepare(jq.load(path))
    first, second = (elapsed(lambda: jq.calibrate(graph, x, "XINT8")) for _ in range(2))
    return {"first": first, "compile": first - second}


class Samples:
    """Seeded random samples, made when they are asked for."""

    def __init__(self, name: str, shape: Sequence[int], count: int) -> None:
        self.name, self.shape, self.count = name, shape, count

    def __iter__(self) -> Iterator[Mapping[str, np.ndarray]]:
        for i in range(self.count):
            yield {self.name: np.random.default_rng(i).standard_normal(self.shape, np.float32)}


def peak_memory(cores: Sequence[int], path: str, cache: str, count: int) -> float:
    """Megabytes; this process began as a copy of one that holds less than it needs itself."""
    setup(cores, len(cores), cache)
    import jq

    graph = jq.prepare(jq.load(path))
    (value,) = graph.inputs
    shape = (1, *(d if isinstance(d, int) else 224 for d in (value.shape or ())[1:]))
    assert jq.calibrate(graph, Samples(value.name, shape, count), "XINT8").samples == count
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def jq_whole(cores: Sequence[int], path: str, data: str, cache: str) -> dict[str, Any]:
    setup(cores, len(cores), cache)
    import jq

    def now() -> np.ndarray:
        return np.array([time.perf_counter(), sum(os.times()[:4])])

    x, times = np.load(data), [now()]
    graph = jq.prepare(jq.load(path))
    times.append(now())
    stats = jq.calibrate(graph, x, "XINT8")
    times.append(now())
    found = jq.activation_qparams(graph, stats) | jq.weight_qparams(graph, "XINT8")
    times.append(now())
    assert found
    whole, calibration = times[-1] - times[0], times[2] - times[1]
    return {
        kind: dict(zip(("wall", "cpu"), v.tolist(), strict=True))
        for kind, v in (("whole", whole), ("calibration", calibration))
    }


def against_quark(args: argparse.Namespace, cores: Sequence[int], path: str, prep: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data, count = f"{folder}/images.npy", min(QUARK, args.count)
        name = fresh(write_data, path, prep, args.images, count, data)
        cold, warm = (fresh(jq_whole, cores, path, data, f"{folder}/cache") for _ in range(2))
        quark = quark_whole(args.quark, args.threads, path, data, name, folder)
    print(f"  {count} images, seconds                whole: wall     cpu   calibration: wall     cpu")
    for kind, row in (("Quark", quark), ("jq, cold compile", cold), ("jq, warm compile", warm)):
        whole, part = row["whole"], row["calibration"]
        print(f"    {kind:30} {whole['wall']:10.2f} {whole['cpu']:7.2f}   {part['wall']:17.2f} {part['cpu']:7.2f}")
    ratio = {k: round(quark["whole"][k] / cold["whole"][k], 2) for k in ("wall", "cpu")}
    print(f"    Quark over jq, cold compile: wall {ratio['wall']:.2f}, cpu {ratio['cpu']:.2f}")
    return {"images": count, "quark": quark, "jq_cold": cold, "jq_warm": warm, "quark_over_jq_cold": ratio}


def measure(args: argparse.Namespace, cores: Sequence[int], path: str, prep: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": Path(path).stem, "prep": prep, "count": args.count}
    found = fresh(speed, cores, path, prep, args.images, args.count, args.rounds)
    print(f"{Path(path).stem}, {args.count} images")
    print(
        "  calibrate {calibrate:.3f} s, onnxruntime {onnxruntime_batch_1:.3f} s by one, {onnxruntime_batch_8:.3f} s by "
        "eight, jq's pass {forward:.3f} s; ratio {ratio:.2f} (by one {ratio_batch_1:.2f}), observers {observers:+.0%}".format(
            **found
        ),
        flush=True,
    )
    row |= found
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            row[kind] = fresh(first_call, cores, path, prep, args.images, cache)
            print(f"  {kind}: first call " + "{first:.2f} s, compile {compile:.2f} s".format(**row[kind]), flush=True)
    if args.memory:
        with tempfile.TemporaryDirectory() as cache:
            for count in MEMORY[:2]:  # compile; more images run the same programs as the second
                fresh(peak_memory, cores, path, cache, count)
            peaks = {count: fresh(peak_memory, cores, path, cache, count) for count in MEMORY}
        spread = max(peaks.values()) / min(peaks.values()) - 1
        megabytes = ", ".join(f"{v:.0f} MB for {k}" for k, v in peaks.items())
        print(f"  peak memory {megabytes} images, spread {spread:.1%}", flush=True)
        row["memory"] = {"megabytes": peaks, "spread": round(spread, 4)}
    if args.quark:
        row["against_quark"] = against_quark(args, cores, path, prep)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:PREP; without PREP it sees the bundled images")
    parser.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`")
    parser.add_argument("--count", type=int, default=256, help=f"images, a multiple of {BATCH}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--quark", metavar="PYTHON", help="interpreter of an environment with amd-quark")
    parser.add_argument("--out", type=Path, default=RESULTS / "calibrate.jsonl")
    args = parser.parse_args()
    if args.count < BATCH or args.count % BATCH:
        parser.error(f"--count {args.count} is no multiple of {BATCH}")
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)
    # This process imports neither jax nor jq: a child's peak memory begins with its parent's.
    rows = []
    for entry in args.models or fresh(bundled):
        path, _, prep = entry.partition(":")
        if prep and (prep not in PREPARE or args.images is None):
            parser.error(f"{entry}: PREP is one of {', '.join(PREPARE)}, and needs --images")
        if not Path(path).exists():
            print(f"skipped: no file {path}")
            continue
        rows.append(measure(args, cores, path, prep))
    if not rows:
        return
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))
    print(f"calibration over onnxruntime's pass: geometric mean {mean:.3f}, worst {max(r['ratio'] for r in rows):.3f}")
    line = {"bench": "calibrate", "geometric_mean": round(mean, 3), "threads": len(cores), **fresh(versions)}
    with args.out.open("a") as file:
        file.write(json.dumps(line | {"rows": rows}) + "\n")


if __name__ == "__main__":
    main()
