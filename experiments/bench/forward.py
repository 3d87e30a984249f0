"""Float forward pass: jq against onnxruntime, interleaved in one run on the same cores.

    python experiments/bench/forward.py [MODEL.onnx ...] [--batch 8 32] [--threads 2] [--rounds 10]

Without models it takes the bundled ones. Prints per model and batch the best wall time of each over
the rounds and the ratio of speeds (above 1 jq is faster), then the geometric mean; appends one JSON
line to `--out`. Both are held to `--threads` cores. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="float ONNX classifiers with one image input")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=None, help="images per chunk; by default jq decides")
    parser.add_argument("--out", type=Path, default=Path("forward.jsonl"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)  # before jax makes its thread pool, which takes a thread per core

    import jax
    import numpy as np
    import onnxruntime as ort

    import jq

    options = ort.SessionOptions()
    options.intra_op_num_threads = args.threads
    # Else its idle threads spin on the cores that jq is being timed on.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")

    rows = []
    for path in args.models or [jq.zoo.path(name) for name in jq.zoo.models()]:
        graph = jq.prepare(jq.load(path))
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        params, forward = jq.pack(graph), jax.jit(jq.chunked(jq.trace(graph), args.chunk))
        (value,) = graph.inputs
        for batch in args.batch:
            shape = (batch, *(d if isinstance(d, int) else 224 for d in (value.shape or ())[1:]))
            image = np.random.default_rng(0).standard_normal(shape, np.float32)
            placed = jax.device_put(image)

            def ours(placed=placed):  # noqa: ANN001, ANN202
                return jax.block_until_ready(forward(params, {value.name: placed}))

            def theirs(image=image):  # noqa: ANN001, ANN202
                return session.run(None, {value.name: image})

            got, want = np.asarray(ours()[graph.outputs[0].name]), theirs()[0]
            error = float(np.abs(got - want).max() / np.abs(want).max())
            assert error < 1e-4, f"{path}: relative error {error}"
            best = {ours: math.inf, theirs: math.inf}
            for _ in range(args.rounds):
                for run in best:
                    start = time.perf_counter()
                    run()
                    best[run] = min(best[run], time.perf_counter() - start)
            row = {
                "model": path.stem,
                "batch": batch,
                "jq_ms": round(best[ours] * 1e3, 2),
                "onnxruntime_ms": round(best[theirs] * 1e3, 2),
                "ratio": round(best[theirs] / best[ours], 3),
                "max_relative_error": error,
            }
            rows.append(row)
            print("{model:24} batch {batch:3}  jq {jq_ms:8.2f} ms  onnxruntime {onnxruntime_ms:8.2f} ms  ratio {ratio:.2f}".format(**row))
    mean = math.exp(sum(math.log(r["ratio"]) for r in rows) / len(rows))
    print(f"geometric mean of the ratios {mean:.3f}, worst {min(r['ratio'] for r in rows):.3f}, on {args.threads} threads")
    versions = {"jax": jax.__version__, "onnxruntime": ort.__version__, "threads": args.threads}
    with args.out.open("a") as file:
        file.write(json.dumps({"bench": "forward", "geometric_mean": round(mean, 3), **versions, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
