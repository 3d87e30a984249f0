"""Cost against size: seconds and memory of XINT8 by the number of nodes, with an empty cache and with the one it left.

    python experiments/bench/nodes.py [--nodes 1000 2000 5000] [--images 32] [--steps]

The network repeats a residual block of five nodes (Conv 3 x 3, Relu, Conv 3 x 3, Add, Relu) of 16 channels on 16 x 16 pixels,
with random weights. Each run is a process of its own, from file to file. Prints a row for each and, at the end,
the exponent p of seconds ~ nodes ** p between the smallest and the largest network; appends a JSON line to `--out`. With
`--steps`, the seconds of each step. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import RESULTS, fresh, setup, used, versions

CHANNELS, SIDE, BLOCK = 16, 16, 5


def network(nodes: int, path: str) -> None:
    """Write a network of about this many nodes."""
    import onnx
    from onnx import helper, numpy_helper

    rng, made, weights, last = np.random.default_rng(0), [], [], "x"
    blocks = max(1, nodes // BLOCK)
    for i in range(blocks):
        for name in ("a", "b"):
            shape = (CHANNELS, CHANNELS, 3, 3)
            size = 3 * CHANNELS**0.5 * (blocks if name == "b" else 1)  # so that values do not grow with the depth
            array = (rng.standard_normal(shape) / size).astype(np.float32)
            weights += [numpy_helper.from_array(array, f"{name}w{i}")]
            bias = rng.standard_normal(CHANNELS) / (10 * blocks)
            weights += [numpy_helper.from_array(bias.astype(np.float32), f"{name}b{i}")]
        made += [
            helper.make_node("Conv", [last, f"aw{i}", f"ab{i}"], [f"a{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"a{i}"], [f"r{i}"]),
            helper.make_node("Conv", [f"r{i}", f"bw{i}", f"bb{i}"], [f"b{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Add", [f"b{i}", last], [f"s{i}"]),
            helper.make_node("Relu", [f"s{i}"], [f"y{i}"]),
        ]
        last = f"y{i}"
    shape = ["N", CHANNELS, SIDE, SIDE]
    ends = [helper.make_tensor_value_info("x", 1, shape)], [helper.make_tensor_value_info(last, 1, shape)]
    graph = helper.make_graph(made, "blocks", *ends, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def run(cores: Sequence[int], path: str, images: int, cache: str, steps: bool) -> dict[str, Any]:
    setup(cores, len(cores), cache)
    import time

    import jq
    import jq.pipeline

    seconds: dict[str, float] = {}

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            made = function(*args, **kwargs)
            seconds[name] = round(seconds.get(name, 0) + time.perf_counter() - begun, 2)
            return made

        return call

    names = (
        "load",
        "prepare",
        "equalized",
        "calibrate",
        "guarded",
        "corrected",
        "export",
        "output_losses",
        "report_of",
    )
    for name in names if steps else ():
        setattr(jq.pipeline, name, timed(name, getattr(jq.pipeline, name)))
    x = np.random.default_rng(1).standard_normal((images, CHANNELS, SIDE, SIDE)).astype(np.float32)
    start = np.array([time.perf_counter(), sum(os.times()[:4])])
    jq.quantize(path, x, "XINT8", output=f"{path}.quantized")
    return used(start) | {"steps": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 2000, 5000])
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "nodes.jsonl")
    args = parser.parse_args()
    cores, rows = sorted(os.sched_getaffinity(0)), []
    for nodes in args.nodes:
        with tempfile.TemporaryDirectory() as folder:
            fresh(network, nodes, f"{folder}/model.onnx")
            for kind in ("cold", "warm"):
                found = fresh(run, cores, f"{folder}/model.onnx", args.images, f"{folder}/cache", args.steps)
                rows.append({"nodes": nodes, "cache": kind, **found})
                print(
                    f"{nodes:6} nodes, {kind}: {found['wall']:7.1f} s {found['megabytes']:6.0f} MB {found['steps']}",
                    flush=True,
                )
    grown = {}
    for kind in ("cold", "warm"):
        of_kind = [r for r in rows if r["cache"] == kind]
        first, last = of_kind[0], of_kind[-1]
        if first["nodes"] < last["nodes"]:
            grown[kind] = round(math.log(last["wall"] / first["wall"]) / math.log(last["nodes"] / first["nodes"]), 2)
    if grown:
        print(f"seconds grow with the power {grown} of the nodes")
    line = {"bench": "nodes", "images": args.images, "threads": len(cores), "power": grown, **fresh(versions)}
    with args.out.open("a") as file:
        file.write(json.dumps(line | {"rows": rows}) + "\n")


if __name__ == "__main__":
    main()
