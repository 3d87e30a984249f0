"""Quantization from file to file: seconds, memory and accuracy, beside AMD Quark's on the same images.

    python experiments/bench/quantize.py MODEL.onnx:PREP[:LABELS] ... --images NPZ [--count 100]
        [--eval FOLDER] [--config XINT8] [--quark PYTHON] [--onnxruntime]

NPZ holds uint8 NHWC `images` for calibration; PREP is as in experiments/common.py. FOLDER holds JPEGs of which the
centre 224 x 224 pixels are read, the label being the number before the underscore; LABELS is added to it for
networks that have a class before the first. Prints, and appends as one JSON line to `--out`, per model:

* wall and CPU seconds and peak memory of `jq.quantize` from a file to a file, in a process of its own, with an
  empty compilation cache (cold) and with the one that this left (warm); imports do not count. With `--quark`
  the same of Quark's XINT8 with its defaults, so with cross-layer equalization; with `--onnxruntime`, of its
  `quant_pre_process` and `quantize_static`: MinMax, uint8 activations, int8 weights per tensor and per channel. These
  have float scales, which the NPU's XINT8 does not take.
* top-1 of the float model and of all quantized ones by onnxruntime, agreement with the float model and the
  signal-to-noise ratio of the logits; and how many codes of the quantized tensors differ between onnxruntime
  without optimizations and `jq.fake_quant`, on eight of the images.

Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import QUARK_SCRIPT, RESULTS, fresh, quantize, quark_whole, score, used, versions, write_data

COMPARED = 8  # images whose codes are compared
PEERS = {"ort": False, "ort_per_channel": True}


def by_onnxruntime(cores: Sequence[int], path: str, data: str, output: str, per_channel: bool) -> dict[str, float]:
    os.sched_setaffinity(0, cores)
    import onnxruntime as ort
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self, name: str) -> None:
            self.feeds = ({name: image[None]} for image in np.load(data))

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    name = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()[0].name
    start = np.array([time.perf_counter(), sum(os.times()[:4])])
    quant_pre_process(path, f"{output}.prepared")
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(f"{output}.prepared", output, Reader(name), per_channel=per_channel, **types)
    return used(start)


def codes(path: str, data: str, config: str) -> dict[str, int]:
    """Elements of all quantized tensors, and how many of them jq and onnxruntime code differently."""
    import onnx
    import onnxruntime as ort

    import jq

    x = np.load(data)
    result = jq.quantize(path, x, config)
    model, x = onnx.ModelProto.FromString(result.model.SerializeToString()), x[:COMPARED]
    nodes = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    names = [n.input[0].removesuffix("_QuantizeLinear_Input") for n in nodes]
    model.graph.output.extend(onnx.ValueInfoProto(name=n.output[0]) for n in nodes)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {result.graph.inputs[0].name: x}
    expected = session.run([n.output[0] for n in nodes], feed)
    _, seen = jq.fake_quant(result.graph, taps=names)(result.graph.params, result.plan, feed)
    differ = [
        np.rint(np.asarray(seen[name]) / result.plan[name].scale) + result.plan[name].zero_point != want
        for name, want in zip(names, expected, strict=True)
    ]
    return {"elements": sum(d.size for d in differ), "differ": int(sum(d.sum() for d in differ))}


def measure(args: argparse.Namespace, cores: Sequence[int], path: str, prep: str, offset: int) -> dict[str, Any]:
    row: dict[str, Any] = {"model": Path(path).stem, "prep": prep, "config": args.config, "count": args.count}
    print(f"{row['model']}, {args.config}, {args.count} images", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data, output = f"{folder}/images.npy", f"{folder}/ours.onnx"
        name = fresh(write_data, path, prep, args.images, args.count, data)
        quantized = {"jq": output}
        for kind in ("cold", "warm"):
            row[kind] = fresh(quantize, cores, path, data, args.config, output, f"{folder}/cache")
        if args.quark:
            script = QUARK_SCRIPT.replace("config.include_cle = False\n", "")
            row["quark"] = quark_whole(args.quark, len(cores), path, data, name, folder, script)["whole"]
            quantized["quark"] = f"{folder}/quantized.onnx"
        for kind, per_channel in PEERS.items() if args.onnxruntime else ():
            quantized[kind] = f"{folder}/{kind}.onnx"
            row[kind] = fresh(by_onnxruntime, cores, path, data, quantized[kind], per_channel)
        for kind in ("cold", "warm", "quark", *PEERS):
            if kind in row:
                print(f"  {kind:15}" + "".join(f" {k} {v:8.2f}" for k, v in row[kind].items()), flush=True)
        if args.quark:
            row["quark_over_jq_cold"] = {k: round(row["quark"][k] / row["cold"][k], 2) for k in ("wall", "cpu")}
            print(f"  Quark over jq, cold: {row['quark_over_jq_cold']}", flush=True)
        if args.eval:
            row["accuracy"] = fresh(score, cores, path, quantized, prep, offset, args.eval)
            print(f"  {row['accuracy']}", flush=True)
        row["codes"] = fresh(codes, path, data, args.config)
        print(f"  codes that differ: {row['codes']['differ']} of {row['codes']['elements']:,}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="MODEL.onnx:PREP[:LABELS]")
    parser.add_argument("--images", type=Path, required=True, help="npz with uint8 NHWC `images`")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--eval", type=Path, help="folder of labelled JPEGs")
    parser.add_argument("--config", default="XINT8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quark", help="a Python that has amd-quark")
    parser.add_argument("--onnxruntime", action="store_true", help="its own quantizer too")
    parser.add_argument("--out", type=Path, default=RESULTS / "quantize.jsonl")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    for model in args.models:
        path, prep, *offset = model.split(":")
        row = measure(args, cores, path, prep, int(offset[0]) if offset else 0)
        with args.out.open("a") as file:
            file.write(json.dumps({**row, **fresh(versions), "threads": len(cores)}) + "\n")


if __name__ == "__main__":
    main()
