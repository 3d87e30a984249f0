"""Time and peak memory where the weights are large: from a file with external data to a quantized file.

    python experiments/bench/weights.py [--gigabytes 4] [--configs XINT8 A8W8] [--folder DIR] [--with-data]

The network is a chain of square MatMuls and Relus of `--width`. Quantizes its weights alone, or with `--with-data`
activations as well, on 8 random samples. Prints, for each config, seconds, the peak of the resident memory (mapped pages
of the model's file included) as a multiple of the weights' bytes, and the step in which it was reached; then loads what was
written in onnxruntime. Needs 1.3 times `--gigabytes` of disk. Appends a JSON line to `--out`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import RESULTS, fresh, setup, used, versions

SAMPLES = 8


def network(path: Path, size: float, width: int) -> int:
    """Write a network of about this many bytes of weights; return how many."""
    from onnx import TensorProto, helper

    rng, nodes, tensors, last = np.random.default_rng(0), [], [], "x"
    bytes_of = 4 * width * width
    layers = max(1, round(size / bytes_of))
    with path.with_name(f"{path.name}.data").open("wb") as file:
        for i in range(layers):
            weight = rng.standard_normal((width, width), np.float32) / np.float32(np.sqrt(width / 2))
            tensor = TensorProto(name=f"w{i}", data_type=1, dims=weight.shape, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", f"{path.name}.data"), ("offset", file.tell()), ("length", weight.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            file.write(weight.data)
            tensors.append(tensor)
            nodes += [
                helper.make_node("MatMul", [last, f"w{i}"], [f"h{i}"]),
                helper.make_node("Relu", [f"h{i}"], [f"y{i}"]),
            ]
            last = f"y{i}"
    ends = [[helper.make_tensor_value_info(name, 1, ["N", width])] for name in ("x", last)]
    graph = helper.make_graph(nodes, "large", *ends, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return layers * bytes_of


class _Watch(logging.Handler):
    """The largest memory seen so far, and the step that ended next."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.since, self.peaks = 0, 0, list[tuple[str, float, int]]()
        self.start = time.perf_counter()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while True:
            self.since = max(self.since, int(Path("/proc/self/statm").read_text().split()[1]) * page)
            time.sleep(0.02)

    def emit(self, record: logging.LogRecord) -> None:
        self.peaks.append((record.getMessage(), time.perf_counter() - self.start, self.since))
        self.since = 0


def run(path: str, name: str, width: int, with_data: bool, cache: str) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    setup(cores, len(cores), cache)
    import jq

    watch = _Watch()
    log = logging.getLogger("jq")
    log.addHandler(watch)
    log.setLevel(logging.INFO)
    config = jq.presets[name] if with_data else jq.presets[name].replace(weights_only=True)
    data = np.random.default_rng(1).standard_normal((SAMPLES, width), np.float32) if with_data else None
    start = np.array([time.perf_counter(), sum(os.times()[:4])])
    jq.quantize(path, data, config, output=f"{path}.{name}")
    log.info("end")
    steps = [{"until": text[:60], "seconds": round(t, 1), "megabytes": round(m / 1e6)} for text, t, m in watch.peaks]
    return used(start) | {"steps": steps}


def runs(path: str, width: int) -> bool:
    """Whether onnxruntime loads a model and computes finite numbers with it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return bool(np.isfinite(session.run(None, {"x": np.ones((1, width), np.float32)})[0]).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--configs", nargs="+", default=["XINT8", "A8W8"])
    parser.add_argument("--folder", help="where the files go: not a disk in memory")
    parser.add_argument("--with-data", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "weights.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "model.onnx"
        size = fresh(network, path, args.gigabytes * 1e9, args.width)
        for name in args.configs:
            found = fresh(run, str(path), name, args.width, args.with_data, f"{folder}/cache")
            share = found["megabytes"] * (1 << 20) / size
            made = sum(p.stat().st_size for p in path.parent.glob(f"{path.name}.{name}*"))
            fine = fresh(runs, f"{path}.{name}", args.width)
            print(
                f"{size / 1e9:.1f} GB, {name}: {found['wall']:.1f} s, peak {share:.2f} of the weights, "
                f"{made / 1e9:.2f} GB written, runs in onnxruntime: {fine}"
            )
            for step in found["steps"]:
                print(f"    {step['seconds']:6.1f} s {step['megabytes']:6d} MB  {step['until']}", flush=True)
            row = {"bench": "weights", "bytes": size, "config": name, "with_data": args.with_data, "share": share}
            with args.out.open("a") as file:
                file.write(json.dumps(row | found | fresh(versions)) + "\n")
            for old in path.parent.glob(f"{path.name}.{name}*"):
                old.unlink()


if __name__ == "__main__":
    main()
