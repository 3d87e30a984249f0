"""Quantized models in integers: jq against onnxruntime and its own float pass, interleaved in one run.

    python experiments/bench/integer.py [MODEL.onnx:PREP ...] [--images NPZ] [--target NAME] [--batch 8]
        [--threads 2] [--devices 2]

NPZ holds uint8 NHWC `images`; PREP is as in experiments/common.py. Without models it takes the bundled ones and
their images. Each model is quantized in two ways: XINT8, the power-of-two scales that the NPU wants, of which
onnxruntime runs most in float; and u8s8, float scales with the int32 biases that it needs to fuse integer
convolutions; how many it fuses is printed. Prints per model and way, each in processes of its own that are held to
`--threads` cores, with one JAX device per core:

* the best wall time over the rounds of jq's integer program, of onnxruntime with its defaults but for
  the number of threads, and of jq's float pass of the model before quantization; ratios of speeds, above 1 the
  integers are faster.
* compile: seconds of the integer program's first call, less a later one, with an empty compilation cache.
* how many output values differ between target "ort" and onnxruntime without optimizations, and with them
  (optimized). With float scales its float32 sums may fall on the other side of a tie: see parity/integer.py.

Then the geometric mean and the worst ratio of each way. Appends one JSON line to `--out`. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import PREPARE, RESULTS, best, bundled, elapsed, fresh, read_images, setup, versions

# Each way with what jq computes as: float scales as onnxruntime's integer kernels do, so that both do the same.
CONFIGS = {"XINT8": ("XINT8", "aie2_x1"), "u8s8": ("INT8_CNN_DEFAULT", "ort")}
CALIBRATION = 64  # images; the measured ones come after them


def quantize(cores: Sequence[int], cache: str, entry: tuple[str, str], args: argparse.Namespace, folder: str) -> None:
    """Write the model quantized in each way, and the images that it is measured on."""
    setup(cores, len(cores), cache)
    import jq

    path, prep = entry
    x = read_images(prep, args.images, CALIBRATION + args.batch)
    np.save(f"{folder}/images.npy", x[CALIBRATION:])
    for kind, (config, _) in CONFIGS.items():
        jq.quantize(path, x[:CALIBRATION], config, output=f"{folder}/{kind}.onnx")


def session_of(path: str, threads: int, optimized: str | None = None) -> Any:
    """A session with default optimizations, which leaves the optimized model in a file, or without any."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if optimized is None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    else:
        options.optimized_model_filepath = optimized
        options.log_severity_level = 3  # it warns that the file is of this machine
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def convolutions(path: str, *types: str) -> int:
    import onnx

    return sum(node.op_type in types for node in onnx.load(path).graph.node)


def jitted(fn: Callable[..., Any], params: Any, x: np.ndarray, name: str) -> Callable[[], Any]:
    """A call of the function that has its operands on all devices, and waits for the result."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import jq

    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    run = jax.jit(jq.chunked(fn, None, mesh))
    placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    feed = {name: jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))}
    return lambda: jax.block_until_ready(run(placed, feed))


def differing(path: str, feed: Mapping[str, np.ndarray], sessions: Mapping[str, Any]) -> dict[str, int]:
    """Output values of target "ort", and how many of them are not those of each session."""
    import jq

    got = {name: np.asarray(y) for name, y in jq.integer.load(path, target="ort")(feed).items()}
    found = {"outputs": sum(y.size for y in got.values())}
    for kind, session in sessions.items():
        wanted = session.run(list(got), feed)
        found[kind] = sum(int((y != want).sum()) for y, want in zip(got.values(), wanted, strict=True))
    return found


def speed(
    cores: Sequence[int], cache: str, original: str, kind: str, args: argparse.Namespace, folder: str
) -> dict[str, Any]:
    setup(cores, args.devices, cache)
    import jq

    path, x, threads = f"{folder}/{kind}.onnx", np.load(f"{folder}/images.npy"), len(cores)
    session = session_of(path, threads, f"{folder}/optimized.onnx")
    name = session.get_inputs()[0].name
    try:
        integer = jitted(*jq.integer.load(path, target=args.target or CONFIGS[kind][1]).trace(), x, name)
        first = elapsed(integer)
    except jq.Error as error:  # not every target has float scales
        return {"refused": str(error)}
    graph = jq.prepare(jq.load(original))
    forward = jitted(jq.trace(graph), jq.pack(graph), x, graph.inputs[0].name)
    ours, theirs, floats = best([integer, lambda: session.run(None, {name: x}), forward], args.rounds)
    return {
        "integer_ms": round(ours, 3),
        "onnxruntime_ms": round(theirs, 3),
        "float_ms": round(floats, 3),
        "ratio": round(theirs / ours, 3),
        "ratio_to_float": round(floats / ours, 3),
        "compile_s": round(first - ours / 1e3, 2),
        "convolutions": convolutions(path, "Conv"),
        "fused": convolutions(f"{folder}/optimized.onnx", "QLinearConv"),
        **differing(path, {name: x}, {"differ": session_of(path, threads), "differ_optimized": session}),
    }


def measure(args: argparse.Namespace, cores: Sequence[int], path: str, prep: str) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        fresh(quantize, cores, f"{folder}/cache", (path, prep), args, folder)
        for kind in CONFIGS:
            row = {"model": Path(path).stem, "kind": kind}
            row |= fresh(speed, cores, f"{folder}/cache_{kind}", path, kind, args, folder)
            rows.append(row)
            text = (
                "integer {integer_ms:8.2f} ms  onnxruntime {onnxruntime_ms:8.2f} ms  float {float_ms:8.2f} ms  ratio "
                "{ratio:.2f}, to float {ratio_to_float:.2f}  compile {compile_s:.1f} s  of {outputs} outputs "
                "{differ} differ, optimized {differ_optimized}  onnxruntime fuses {fused} of {convolutions} convolutions"
            )
            found = f"refused: {row['refused']}" if "refused" in row else text.format(**row)
            print(f"{row['model']:20} {kind:5}  {found}", flush=True)
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric mean and worst of the ratios to onnxruntime and to the float pass, for each way to quantize."""
    found: dict[str, dict[str, float]] = {}
    for kind in CONFIGS:
        measured = [row for row in rows if row["kind"] == kind and "ratio" in row]
        for ratio in ("ratio", "ratio_to_float") if measured else ():
            values = [row[ratio] for row in measured]
            mean = math.exp(sum(map(math.log, values)) / len(values))
            found.setdefault(kind, {}).update({ratio: round(mean, 3), f"worst_{ratio}": min(values)})
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:PREP, float; without PREP it sees the bundled images")
    parser.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`")
    parser.add_argument("--target", help="what jq computes as [XINT8 aie2_x1, u8s8 ort]")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--devices", type=int, default=None, help="JAX devices; by default one per thread")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "integer.jsonl")
    args = parser.parse_args()
    args.devices = args.devices or args.threads
    if args.batch % args.devices:
        parser.error(f"--batch {args.batch} is no multiple of the {args.devices} devices")
    for entry in args.models:
        prep = entry.partition(":")[2]
        if prep and (prep not in PREPARE or args.images is None):
            parser.error(f"{entry}: PREP is one of {', '.join(PREPARE)}, and needs --images")
    return args


def main() -> None:
    args = arguments()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)
    rows = []
    for entry in args.models or fresh(bundled):
        path, _, prep = entry.partition(":")
        if Path(path).exists():
            rows += measure(args, cores, path, prep)
        else:
            print(f"skipped: no file {path}")
    found = summary(rows)
    for kind, values in found.items():
        print(
            f"{kind}: speed over onnxruntime's: geometric mean {values['ratio']:.3f}, worst {values['worst_ratio']:.3f}; "
            f"over jq's float pass: {values['ratio_to_float']:.3f}, worst {values['worst_ratio_to_float']:.3f}"
        )
    line = {"bench": "integer", "target": args.target, "batch": args.batch, "threads": len(cores)}
    line |= {"devices": args.devices, "rounds": args.rounds, **fresh(versions), "summary": found, "rows": rows}
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
