"""Seconds before the first answer: import, load, trace and compile, with a cold and a warm cache.

    python experiments/bench/startup.py [MODEL.onnx] [--batch 8] [--rounds 3]

Every round is a fresh process. "cold" starts with an empty compilation cache, "warm" finds the one that
the cold run left. Prints the best of the rounds and appends one JSON line. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.common import RESULTS

COMPILE = """
import json, sys, time
start = time.perf_counter()
import jax, jq
imported = time.perf_counter()
path, batch = sys.argv[1], int(sys.argv[2])
graph = jq.load(path)
loaded = time.perf_counter()
graph = jq.prepare(graph)
params = jq.pack(graph)
(value,) = graph.inputs
image = jax.ShapeDtypeStruct((batch, *(d if isinstance(d, int) else 224 for d in value.shape[1:])), value.dtype)
packed = time.perf_counter()
jax.jit(jq.chunked(jq.trace(graph))).lower(params, {value.name: image}).compile()
done = time.perf_counter()
seconds = {"load": loaded - imported, "prepare_and_pack": packed - loaded, "compile": done - packed}
print(json.dumps(seconds | {"total": done - imported}))
"""


def best_import(module: str, rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def start(path: Path, batch: int, cache: str) -> dict[str, float]:
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", COMPILE, str(path), str(batch)]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    import jq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=jq.zoo.path("fashion_resnet"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.jsonl")
    args = parser.parse_args()
    imports = {m: best_import(m, args.rounds) for m in ("jax", "jq")}
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for found in runs.values():
                found.append(start(args.model, args.batch, cache))
    result = {kind: min(found, key=lambda r: r["total"]) for kind, found in runs.items()}
    for kind, seconds in result.items():
        print(f"{kind}: " + ", ".join(f"{k} {v:.2f} s" for k, v in seconds.items()))
    print(
        f"import jax {imports['jax']:.2f} s, import jq {imports['jq']:.2f} s, ratio {imports['jq'] / imports['jax']:.2f}"
    )
    with args.out.open("a") as file:
        line = {"bench": "startup", "model": args.model.stem, "batch": args.batch, **result, "import_seconds": imports}
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
