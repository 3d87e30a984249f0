"""Seconds of all steps of a quantization but the two passes over data, by the number of nodes.

    python experiments/bench/steps.py [--nodes 1000 2000 5000 10000]

The network is that of `nodes.py`. Statistics are those of a network of a hundred nodes, repeated, so that what is
measured is what remains of a quantization when nothing is computed with data: the time of these steps should grow with
the nodes, and not with their square. Prints a row for each network and, at the end, the exponent p of seconds ~ nodes ** p
of each step between the smallest and the largest network, of steps that take a tenth of a second. Appends a JSON line
to `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.nodes import BLOCK, CHANNELS, SIDE, network
from experiments.common import RESULTS, fresh, setup, used, versions

SMALL = 100  # nodes of the network that is calibrated


def repeated(stats: Any, graph: Any) -> Any:
    """Statistics for a large network from those of a small one: each tensor's are those of one in its place in a block."""
    blocks, sources = SMALL // BLOCK, dict[str, str]()
    for name in (*(v.name for v in graph.inputs), *graph.producer):
        place = re.sub(r"\d+", lambda number: str(1 + (int(number[0]) - 1) % (blocks - 2)), name)
        source = name if name in stats.tensors else place
        if source in stats.tensors:
            sources[name] = source
    states, places = dict[str, Any](), dict[str, Any]()
    for observer in stats.observers:
        rows = [stats.rows(source, observer) for source in sources.values()]
        states[observer] = {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
        if observer in stats.places:
            offsets = [stats._offsets[source][observer] for source in sources.values()]
            places[observer] = {k: np.concatenate([v[o] for o in offsets]) for k, v in stats.places[observer].items()}
    tensors = {name: stats.tensors[source] for name, source in sources.items()}
    return dataclasses.replace(stats, tensors=tensors, states=states, places=places)


def run(cores: list[int], nodes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        setup(cores, len(cores), f"{folder}/cache")
        import jq
        import jq.pipeline as flow
        from jq.recovery.equalization.groups import find_groups

        network(nodes, f"{folder}/model.onnx")
        network(SMALL, f"{folder}/small.onnx")
        config, seconds = jq.presets["XINT8"], dict[str, float]()
        x = np.random.default_rng(1).standard_normal((4, CHANNELS, SIDE, SIDE)).astype(np.float32)
        small = jq.calibrate(jq.prepare(jq.load(f"{folder}/small.onnx"), config), x, config)

        def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
            begun = time.perf_counter()
            made = call(*args)
            seconds[name] = round(time.perf_counter() - begun, 2)
            return made

        start = np.array([time.perf_counter(), sum(os.times()[:4])])
        original = timed("load", jq.load, f"{folder}/model.onnx")
        prepared = timed("prepare", jq.prepare, original, config)
        timed("groups", find_groups, prepared)
        stats = timed("repeat", repeated, small, prepared)
        made = timed("plan", flow.guarded, prepared, stats, config, x)
        ready = timed("biases", flow.corrected, flow.Calibrated(prepared, stats, x, prepared, made))
        graph, plan = ready.graph, ready.guarded.plan
        whole = timed("quantizers", flow.quantized_graph, graph, plan)
        placed = timed("place", flow.place, whole, "X2").nodes
        model = timed("write", flow.finished, whole, f"{folder}/quantized.onnx")
        reference = timed("float outputs", flow.Reference.of, original, x, 0)
        timed("quantized outputs", flow.output_losses, reference, model)
        findings = timed("lint", flow.lint, original, config)
        report = timed("report", flow.report_of, "", graph, plan, stats, {}, ready.guarded.moves, findings)
        timed("layers", flow.layers_of, graph, plan, placed)
        timed("page", report.to_html, f"{folder}/report.html")
        timed("read back", jq.integer.load, f"{folder}/quantized.onnx")
        return used(start) | {"steps": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 2000, 5000, 10000])
    parser.add_argument("--out", type=Path, default=RESULTS / "steps.jsonl")
    args = parser.parse_args()
    cores, rows = sorted(os.sched_getaffinity(0)), []
    for nodes in args.nodes:
        rows.append({"nodes": nodes, **fresh(run, cores, nodes)})
        row = rows[-1]
        print(f"{nodes:6} nodes: {row['wall']:6.1f} s {row['megabytes']:6.0f} MB {row['steps']}", flush=True)
    first, last, powers = rows[0], rows[-1], {}
    for name, seconds in {**last["steps"], "all": last["wall"]}.items():
        before = {**first["steps"], "all": first["wall"]}[name]
        if first["nodes"] < last["nodes"] and before >= 0.1:
            powers[name] = round(math.log(seconds / before) / math.log(last["nodes"] / first["nodes"]), 2)
    print(f"seconds grow with these powers of the nodes: {powers}")
    line = {"bench": "steps", "threads": len(cores), "powers": powers, **fresh(versions)}
    with args.out.open("a") as file:
        file.write(json.dumps(line | {"rows": rows}) + "\n")


if __name__ == "__main__":
    main()
