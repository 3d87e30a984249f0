"""Quantization from file to file beside other tools: accuracy with intervals, seconds and memory, row by row, and a page.

    python experiments/bench/quantize.py MODEL.onnx:KIND[:LABELS[:CONFIG+CONFIG[:NAME]]] ... --images NPZ --eval FOLDER
        [--tasks FOLDER] [--configs XINT8 XINT8_ADAROUND] [--quark PYTHON] [--onnxsim PYTHON] [--onnxruntime] [--codes]
        [--folder quantize-bench] [--out ROWS.jsonl] [--page docs/accuracy.md] [--readme README.md]

KIND is P1 to P4, how a classifier sees images (experiments/common.py), or boxes, words or sentences; bench/tasks.py says
which data they are calibrated and evaluated on. LABELS is added to labels of networks that have a class before the
first. CONFIGs after it are this model's, in place of `--configs`, and NAME is what tables call it. NPZ holds uint8 NHWC
`images` for calibration, FOLDER JPEGs of which the centre 224 x 224 pixels are read, the label being the number before
the underscore.

A row is one model by one tool: `jq`, `quark` and `onnxsim` by their XINT8 presets with their own defaults, each in the
Python that is named, and `onnxruntime`'s quant_pre_process and quantize_static (MinMax, uint8 activations, int8 weights,
per tensor and per channel), whose float scales the NPU's XINT8 does not take. It is appended to ROWS as soon as it is
measured. The same command again continues with the rows that are missing: those of this model, these data and, of jq,
this code; a tool that fails has a row that says so. `--folder` keeps quantized models and outputs for that.

A row has the measure (top-1, mAP, exact words, Spearman) of the float model and of the quantized one by onnxruntime; and,
paired with the float model on each sample, with the 95 % interval of a bootstrap: `change` of the measure, `agreement`
(the same class, the same word), KL divergence and SQNR of the outputs; and McNemar's exact p. `wall`, `cpu` and
`megabytes` are the quantization's, in a process of its own and without imports; of jq with an empty compilation cache,
and `warm` with the cache that this left. `--codes` also counts the codes that differ between onnxruntime without
optimizations and `jq.fake_quant` on eight images.

`--page` writes a page with the tables of all rows of ROWS, and `--readme` puts the first of them between the lines
`<!-- accuracy -->` and `<!-- end -->` of another page; both also without models. Run it on an idle machine: on a busy one
only the seconds change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.pages import into, overview, page
from experiments.bench.tasks import Data, compared, outputs_of
from experiments.common import PREPARE, RESULTS, command, fresh, quantize, used, versions

COMPARED = 8  # images whose codes are compared
ROOT = Path(__file__).resolve().parents[2]
FIXED = {"words": {"x": [1, 3, 48, 320]}}  # shapes of inputs that the files leave open
LIMIT = 7200  # seconds of another tool

# Quark and onnxsim, which repeats Quark's interface; each falls back with a word in its log where it cannot do a thing.
PEER = """
import json, os, resource, sys, time
import numpy as np
package, model, data, preset, output, result = sys.argv[1:]
if package == "quark":
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config import Config, get_default_config
else:
    from onnxsim.quark_compat import Config, ModelQuantizer, QConfig
    get_default_config = QConfig.get_default_config

class Reader:
    def __init__(self):
        with np.load(data) as file:
            self.arrays = {k: file[k] for k in file}
        self.rewind()
    def rewind(self):
        self.next = iter(range(len(self)))
    def __len__(self):
        return len(next(iter(self.arrays.values())))
    def get_next(self):
        index = next(self.next, None)
        return None if index is None else {k: v[index : index + 1] for k, v in self.arrays.items()}

if package == "quark":
    from onnxruntime.quantization import CalibrationDataReader
    Reader = type("Reader", (Reader, CalibrationDataReader), {})
config = get_default_config(preset)
config = config if isinstance(config, Config) else Config(global_quant_config=config)
start = time.perf_counter(), sum(os.times()[:4])
ModelQuantizer(config).quantize_model(model, output, Reader())
wall, cpu = time.perf_counter() - start[0], sum(os.times()[:4]) - start[1]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with open(result, "w") as file:
    json.dump({"wall": wall, "cpu": cpu, "megabytes": peak}, file)
"""


def by_onnxruntime(cores: Sequence[int], path: str, data: str, output: str, per_channel: bool) -> dict[str, float]:
    os.sched_setaffinity(0, cores)
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            with np.load(data) as file:
                arrays = {k: file[k] for k in file}
            count = len(next(iter(arrays.values())))
            self.feeds = ({k: v[i : i + 1] for k, v in arrays.items()} for i in range(count))

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    start = np.array([time.perf_counter(), sum(os.times()[:4])])
    quant_pre_process(path, f"{output}.prepared")
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(f"{output}.prepared", output, Reader(), per_channel=per_channel, **types)
    return used(start)


def by_peer(tool: str, python: str, cores: Sequence[int], path: str, data: str, preset: str, output: str) -> Any:
    folder, result = Path(output).parent, Path(f"{output}.json")
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "TMPDIR": str(folder)}
    words = [python, "-c", PEER, tool, str(Path(path).resolve()), data, preset, output, str(result)]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    log = done.stdout + done.stderr
    if done.returncode or "Will automatically set" in log or not result.exists():
        lines = [line for line in log.splitlines() if line.strip()]
        raise RuntimeError(f"{tool} failed, or fell back to another method: {lines[-1] if lines else 'no output'}")
    return json.loads(result.read_text())


def by_jq(cores: Sequence[int], path: str, data: str, config: str, output: str) -> dict[str, Any]:
    """Cold and warm, by the compilation cache."""
    cache = Path(output).with_suffix(".cache")
    cold, warm = (fresh(quantize, cores, path, data, config, output, str(cache)) for _ in range(2))
    return {**cold, "warm": warm}


def codes(path: str, data: str, config: str) -> dict[str, int]:
    """Elements of all quantized tensors, and how many of them jq and onnxruntime code differently."""
    import onnx
    import onnxruntime as ort

    import jq

    with np.load(data) as file:
        x = {k: file[k] for k in file}
    result = jq.quantize(path, x, config)
    model = onnx.ModelProto.FromString(result.model.SerializeToString())
    nodes = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    names = [n.input[0].removesuffix("_QuantizeLinear_Input") for n in nodes]
    model.graph.output.extend(onnx.ValueInfoProto(name=n.output[0]) for n in nodes)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {k: v[:COMPARED] for k, v in x.items()}
    expected = session.run([n.output[0] for n in nodes], feed)
    _, seen = jq.fake_quant(result.graph, taps=names)(result.graph.params, result.plan, feed)
    differ = [
        np.rint(np.asarray(seen[name]) / result.plan[name].scale) + result.plan[name].zero_point != want
        for name, want in zip(names, expected, strict=True)
    ]
    return {"elements": sum(d.size for d in differ), "differ": int(sum(d.sum() for d in differ))}


def furnish(path: str, kind: str, data: Data, folder: Path) -> tuple[str, str]:
    """The model with shapes that are fixed where they must be, and a file with the samples to calibrate on."""
    import onnx
    import onnxruntime as ort

    inputs = [value.name for value in ort.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()]
    np.savez(folder / "calibration.npz", **data.calibration(kind, inputs))
    if kind in FIXED:
        from onnxruntime.tools.onnx_model_utils import fix_output_shapes, make_input_shape_fixed

        model = onnx.load(path)
        for name, shape in FIXED[kind].items():
            make_input_shape_fixed(model.graph, name, shape)
        fix_output_shapes(model)
        path = str(folder / Path(path).name)
        onnx.save(model, path)
    return path, str(folder / "calibration.npz")


def accuracy(path: str, output: str, kind: str, data: Data, offset: int, folder: Path) -> dict[str, Any]:
    """The measures of a quantized model; the float model's outputs are kept."""
    import onnx

    kept = folder / "float.npz"
    if not kept.exists():
        reference, _ = outputs_of(path, kind, data, offset)
        np.savez(folder / "draft.npz", **{f"{i:06}": y for i, y in enumerate(reference)})
        os.replace(folder / "draft.npz", kept)
    with np.load(kept) as file:
        reference = [file[k] for k in sorted(file)]
    outputs, truth = outputs_of(output, kind, data, offset)
    metadata = {p.key: p.value for p in onnx.load(path, load_external_data=False).metadata_props}
    symbols = [*metadata.get("character", "").splitlines(), " "]
    return compared(kind, reference, outputs, truth, symbols)


def tools(args: argparse.Namespace, configs: Sequence[str]) -> Iterable[tuple[str, str]]:
    """The tools that were asked for, each with a preset."""
    yield from (("jq", config) for config in configs)
    for tool in ("quark", "onnxsim"):
        if getattr(args, tool):
            yield from ((tool, config) for config in args.peers)
    if args.onnxruntime:
        yield from (("onnxruntime", kind) for kind in ("per tensor", "per channel"))


def code_of(tool: str) -> str:
    """What a row of jq stands for: all of its code."""
    paths = sorted((ROOT / "jq").rglob("*.py")) if tool == "jq" else []
    return hashlib.sha256(b"".join(p.read_bytes() for p in paths)).hexdigest()[:12] if paths else ""


def measure(args: argparse.Namespace, entry: str, cores: Sequence[int], done: Sequence[dict[str, Any]]) -> None:
    path, kind, offset, own, name = (*entry.split(":"), "", "", "", "")[:5]
    data = Data(args.images, args.eval, args.tasks, args.count)
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    for tool, config in tools(args, own.split("+") if own else args.configs):
        key = {"model": Path(path).stem, "digest": digest, "kind": kind, "tool": tool, "config": config}
        key |= {"count": args.count, "code": code_of(tool)}
        if any(key.items() <= row.items() for row in done):
            print(f"{key['model']}, {tool} {config}: done", flush=True)
            continue
        folder = (args.folder / f"{key['model']}-{digest}-{args.count}").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        fixed, calibration = fresh(furnish, path, kind, data, folder)
        output = str(folder / f"{tool}-{config.replace(' ', '-')}.onnx")
        try:
            if tool == "jq":
                row = by_jq(cores, fixed, calibration, config, output)
            elif tool == "onnxruntime":
                row = fresh(by_onnxruntime, cores, fixed, calibration, output, config == "per channel")
            else:
                row = by_peer(tool, getattr(args, tool), cores, fixed, calibration, config, output)
            row |= fresh(accuracy, fixed, output, kind, data, int(offset or 0), folder)
            if tool == "jq" and args.codes and kind in PREPARE:
                row["codes"] = fresh(codes, fixed, calibration, config)
        except Exception as error:  # whatever a tool raises is its row
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            row = {"failed": re.sub(r"/\S*/", "", text)[:300]}  # without the folders of this machine
        told = ("failed", "float", "value", "change", "agreement", "kl", "sqnr", "p", "wall", "megabytes", "codes")
        print(f"{key['model']}, {tool} {config}: { {k: row[k] for k in told if k in row} }", flush=True)
        line = {
            **key,
            "name": name or key["model"],
            **row,
            **fresh(versions),
            "threads": len(cores),
            "command": command(),
        }
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:KIND[:LABELS[:CONFIG+CONFIG[:NAME]]]")
    parser.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--eval", type=Path, help="folder of labelled JPEGs")
    parser.add_argument("--tasks", type=Path, help="folder with coco64, ocr_words.npz and sts.npz")
    parser.add_argument("--configs", nargs="*", default=["XINT8"], help="presets of jq")
    parser.add_argument("--peers", nargs="+", default=["XINT8"], help="presets of Quark and onnxsim")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quark", help="a Python that has amd-quark")
    parser.add_argument("--onnxsim", help="a Python that has onnxsim")
    parser.add_argument("--onnxruntime", action="store_true", help="its own quantizer too")
    parser.add_argument("--codes", action="store_true", help="count the codes that differ from onnxruntime's")
    parser.add_argument("--folder", type=Path, default=Path("quantize-bench"))
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.jsonl")
    parser.add_argument("--page", type=Path, help="write this page from all rows")
    parser.add_argument("--readme", type=Path, help="put the first table into this page, between its marks")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    for entry in args.models:
        measure(args, entry, cores, rows_of(args.out))
    if args.page:
        args.page.write_text(page(rows_of(args.out)))
    if args.readme:
        args.readme.write_text(into(args.readme.read_text(), overview(rows_of(args.out))))


if __name__ == "__main__":
    main()
