"""Float forward pass: jq against onnxruntime, interleaved in one run on the same cores.

    python experiments/bench/forward.py [MODEL.onnx ...] [--batch 8 32] [--threads 2] [--devices 2]

Without models it takes the bundled ones. Prints per model and batch the best wall time of each over
the rounds and the ratio of speeds (above 1 jq is faster), then the geometric mean; appends one JSON
line to `--out`. Both are held to `--threads` cores; onnxruntime runs with its defaults but for that,
jq with one JAX device per core, or with `--devices 1` that spreads every operation over the cores. Run
it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import RESULTS, best


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="float ONNX classifiers with one image input")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--devices", type=int, default=None, help="JAX devices; by default one per thread")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=None, help="images per chunk; by default jq decides")
    parser.add_argument("--out", type=Path, default=RESULTS / "forward.jsonl")
    return parser.parse_args()


def measure(path: Path, batches: Sequence[int], threads: int, rounds: int, chunk: int | None) -> list[dict[str, Any]]:
    import jax
    import numpy as np
    import onnxruntime as ort
    from jax.sharding import NamedSharding, PartitionSpec

    import jq

    graph = jq.prepare(jq.load(path))
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    forward, params = jax.jit(jq.chunked(jq.trace(graph), chunk, mesh)), jq.pack(graph, mesh=mesh)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (value,) = graph.inputs
    rows = []
    for batch in batches:
        shape = (batch, *(d if isinstance(d, int) else 224 for d in (value.shape or ())[1:]))
        image = np.random.default_rng(0).standard_normal(shape, np.float32)
        ours = {value.name: jax.device_put(image, NamedSharding(mesh, PartitionSpec("batch")))}
        got = np.asarray(forward(params, ours)[graph.outputs[0].name])
        want = session.run(None, {value.name: image})[0]
        error = float(np.abs(got - want).max() / np.abs(want).max())
        assert error < 1e-4, f"{path}: relative error {error}"

        def run_jq(inputs: Any = ours) -> None:
            jax.block_until_ready(forward(params, inputs))

        def run_onnxruntime(image: Any = image) -> None:
            session.run(None, {value.name: image})

        jq_ms, ort_ms = best([run_jq, run_onnxruntime], rounds)
        row = {"model": path.stem, "batch": batch, "jq_ms": round(jq_ms, 2), "onnxruntime_ms": round(ort_ms, 2)}
        rows.append(row | {"ratio": round(ort_ms / jq_ms, 3), "max_relative_error": error})
        print(f"{path.stem:22} batch {batch:3}  jq {jq_ms:8.2f} ms  onnxruntime {ort_ms:8.2f} ms  {ort_ms / jq_ms:.2f}")
    return rows


def main() -> None:
    args = arguments()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)  # before jax makes its thread pool, which takes a thread per core
    import jax

    devices = args.devices or args.threads
    jax.config.update("jax_num_cpu_devices", devices)
    import onnxruntime as ort

    import jq

    models = args.models or [jq.zoo.path(name) for name in jq.zoo.models()]
    rows = [row for path in models for row in measure(path, args.batch, args.threads, args.rounds, args.chunk)]
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))
    print(f"speed over onnxruntime's: geometric mean {mean:.3f}, worst {min(row['ratio'] for row in rows):.3f}")
    versions = {"jax": jax.__version__, "onnxruntime": ort.__version__, "threads": args.threads, "devices": devices}
    with args.out.open("a") as file:
        file.write(json.dumps({"bench": "forward", "geometric_mean": round(mean, 3), **versions, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
