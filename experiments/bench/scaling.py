"""Weak scaling of calibration: as many more images as devices, and the same result on any number of them.

    python experiments/bench/scaling.py [MODEL.onnx:PREP] [--images NPZ] [--devices 1 2 4 8] [--per-device 32]

Each number of virtual CPU devices is a process of its own, held to as many cores as it has devices, so that
one device has one core; beyond the number of cores, devices share them, and at best the samples per second
stay what they are: `per core` is the efficiency against one device times the cores in use, `efficiency`
against one device times the devices. A step takes 8 images per device. The best of `--rounds` calls is taken
after one that compiles; they are given the candidates' places with `like=`, as the look at the first 32 images
that else finds them does not grow with the data. Then two processes with one device and one core each do the
same over `jax.distributed` on the loopback interface. Ranges and exponents of all tensors on the same 64 images
must be what one device finds. MODEL:PREP and NPZ are as in experiments/bench/calibrate.py; by default a bundled
model. Prints a table and appends one JSON line to `--out`. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.common import RESULTS, bundled, elapsed, fresh, read_images, setup, versions

STEP = 8  # images per device and step
SAME = 64  # images whose result must not depend on the devices


def worker(
    args: argparse.Namespace, cores: Sequence[int], devices: int, process: int = 0, address: str | None = None
) -> dict[str, Any]:
    """One number of devices; with an address, one of as many processes, each with one of the devices."""
    setup(cores, 1 if address else devices)
    import jax

    if address:
        jax.distributed.initialize(address, devices, process)
    assert jax.device_count() == devices, f"{jax.device_count()} devices, expected {devices}"
    import jq

    path, _, prep = args.model.partition(":")
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    config = jq.presets["XINT8"].replace(batch=STEP * devices)
    x, graph = read_images(prep, args.images, max(SAME, args.per_device * devices)), jq.prepare(jq.load(path))
    same = jq.calibrate(graph, x[:SAME], config, mesh=mesh)
    x = x[: args.per_device * devices]
    first = jq.calibrate(graph, x, config, mesh=mesh)

    def run() -> None:
        assert jq.calibrate(graph, x, config, mesh=mesh, like=first).samples == len(x)

    run()
    seconds = min(elapsed(run) for _ in range(args.rounds))
    return {
        "images": len(x),
        "seconds": seconds,
        "samples_per_second": len(x) / seconds,
        "ranges": {tensor: same.range(tensor) for tensor in same.tensors},
        "exponents": {tensor: same.best_exponent(tensor) for tensor in same.tensors},
    }


def two_processes(args: argparse.Namespace, cores: Sequence[int]) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "127.0.0.1:{1}".format(*probe.getsockname())
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(worker, args, [cores[i % len(cores)]], 2, i, address) for i in range(2)]
        return [run.result() for run in runs]


def compare(kind: str, found: dict[str, Any], one: dict[str, Any]) -> None:
    """The results on the same images must be those of one device on as many cores, to the last bit.

    On another number of cores XLA divides a matrix product otherwise, which changes a last bit.
    """
    for what in ("ranges", "exponents"):
        others = [f"{t}: {found[what].get(t)}, {v}" for t, v in one[what].items() if found[what].get(t) != v]
        assert found[what].keys() == one[what].keys() and not others, f"{kind}: other {what}: {'; '.join(others[:5])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="MODEL.onnx:PREP; without PREP it sees the bundled images")
    parser.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--per-device", type=int, default=32, help="images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "calibrate_scaling.jsonl")
    args = parser.parse_args()
    args.model = args.model or fresh(bundled)[0]
    cores = sorted(os.sched_getaffinity(0))
    plan = dict.fromkeys([1, *args.devices])  # the first is what the others are compared with
    found = [("", count, fresh(worker, args, cores[:count], count)) for count in plan]
    both = two_processes(args, cores)
    compare("process 1", both[1], both[0])
    one, rows = found[0][2], []
    like = {1: one, len(cores): fresh(worker, args, cores, 1)}  # by cores of the process
    print(f"{Path(args.model.partition(':')[0]).stem} on {len(cores)} cores")
    for kind, devices, result in [*found, ("2 processes", 2, both[0])]:
        own = 1 if kind else min(devices, len(cores))
        if own in like:
            compare(kind or f"{devices} devices", result, like[own])
        row: dict[str, Any] = {"devices": devices, "processes": 2 if kind else 1, "images": result["images"]}
        faster = result["samples_per_second"] / one["samples_per_second"]
        row |= {"seconds": round(result["seconds"], 4), "samples_per_second": round(result["samples_per_second"], 2)}
        row |= {"efficiency": round(faster / devices, 3), "per_core": round(faster / min(devices, len(cores)), 3)}
        rows.append(row)
        print(
            "{devices:2} devices, {processes} processes: {images:4} images {seconds:8.3f} s {samples_per_second:9.1f} "
            "samples/s, efficiency {efficiency:.2f}, per core {per_core:.2f}".format(**row)
        )
    exponents = [v for v in one["exponents"].values() if v is not None]
    assert len(exponents) == len(one["exponents"]) and all(math.isfinite(v) for r in one["ranges"].values() for v in r)
    print(f"ranges and exponents of {len(exponents)} tensors on the same {SAME} images: equal in all of them")
    line = {"bench": "calibrate_scaling", "model": Path(args.model.partition(":")[0]).stem, "cores": len(cores)}
    line |= {"step_per_device": STEP, "same_images": SAME, "tensors_equal": len(exponents), **fresh(versions)}
    with args.out.open("a") as file:
        file.write(json.dumps(line | {"rows": rows}) + "\n")


if __name__ == "__main__":
    main()
