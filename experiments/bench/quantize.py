"""Quantization from file to file: seconds, memory and accuracy, beside AMD Quark's on the same images.

    python experiments/bench/quantize.py MODEL.onnx:PREP[:LABELS] ... --images NPZ [--count 100]
        [--eval FOLDER] [--config XINT8] [--quark PYTHON] [--onnxruntime]

NPZ holds uint8 NHWC `images` for calibration; PREP is as in bench/calibrate.py. FOLDER holds JPEGs of which the
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
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from calibrate import PREPARE, QUARK_SCRIPT, fresh, quark_whole, setup, versions, write_data

SIDE, BATCH, COMPARED = 224, 20, 8
PEERS = {"ort": False, "ort_per_channel": True}


def quantize(cores: Sequence[int], path: str, data: str, config: str, output: str, cache: str) -> dict[str, float]:
    setup(cores, len(cores), cache)
    import jq

    x, start = np.load(data), np.array([time.perf_counter(), sum(os.times()[:4])])
    jq.quantize(path, x, config, output=output)
    return used(start)


def used(start: np.ndarray) -> dict[str, float]:
    """Wall and CPU seconds since then, and this process's peak memory."""
    wall, cpu = np.array([time.perf_counter(), sum(os.times()[:4])]) - start
    return {
        "wall": float(wall),
        "cpu": float(cpu),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


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


def evaluation(folder: Path, prep: str) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    images, labels = [], []
    for path in sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpeg", ".jpg")):
        image = Image.open(path).convert("RGB")
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        pixels = np.asarray(image.crop((left, top, left + SIDE, top + SIDE)), np.float32)
        images.append(PREPARE[prep](pixels).astype(np.float32).transpose(2, 0, 1))
        labels.append(int(path.name.split("_")[0]))
    return np.stack(images), np.array(labels)


def logits(path: str, x: np.ndarray) -> np.ndarray:
    import onnxruntime as ort

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = [session.run(None, {name: x[i : i + BATCH]})[0] for i in range(0, len(x), BATCH)]
    return np.concatenate(parts).reshape(len(x), -1)


def accuracy(float_path: str, paths: dict[str, str], folder: Path, prep: str, offset: int) -> dict[str, Any]:
    x, labels = evaluation(folder, prep)
    labels, reference = labels + offset, logits(float_path, x)
    found: dict[str, Any] = {"images": len(x), "float": round(100 * float(np.mean(reference.argmax(-1) == labels)), 2)}
    for kind, path in paths.items():
        y = logits(path, x)
        found[kind] = {
            "top1": round(100 * float(np.mean(y.argmax(-1) == labels)), 2),
            "agreement": round(100 * float(np.mean(y.argmax(-1) == reference.argmax(-1))), 2),
            "sqnr": round(10 * float(np.log10(np.square(reference).sum() / np.square(reference - y).sum())), 2),
        }
    return found


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
            row["accuracy"] = fresh(accuracy, path, quantized, args.eval, prep, offset)
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
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "quantize.jsonl")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    for model in args.models:
        path, prep, *offset = model.split(":")
        row = measure(args, cores, path, prep, int(offset[0]) if offset else 0)
        with args.out.open("a") as file:
            file.write(json.dumps({**row, **fresh(versions), "threads": len(cores)}) + "\n")


if __name__ == "__main__":
    main()
