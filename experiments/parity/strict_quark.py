"""`strict_quark` against live AMD Quark: quantizers, scales, codes and outputs, model by model.

    python experiments/parity/strict_quark.py --quark PYTHON [MODEL.onnx:DATA.npy ...] [--networks] [--seed 0]

PYTHON has amd-quark, and torch for `--networks`, which makes the networks of parity/networks.py with random weights.
DATA holds the stacked samples of a model's only input. Quark quantizes to XINT8 without cross-layer equalization, jq
with `strict_quark=True, cle=False`; prints for each model how many quantizers, scales, codes and outputs differ.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

import jq

SCRIPT = """
import sys
import numpy as np
from onnxruntime.quantization import CalibrationDataReader
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config

model, data, name, output = sys.argv[1:]

class Reader(CalibrationDataReader):
    def __init__(self):
        self.samples = np.load(data)
        self.next = iter(range(len(self.samples)))
    def __len__(self):
        return len(self.samples)
    def get_next(self):
        index = next(self.next, None)
        return None if index is None else {name: self.samples[index : index + 1]}

config = get_default_config("XINT8")
config.include_cle = False
ModelQuantizer(Config(global_quant_config=config)).quantize_model(model, output, Reader())
"""


def quantizers(model: onnx.ModelProto) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Scale and zero point of every activation; codes and scale of every constant operand, by what uses it."""
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    made = {o: n for n in model.graph.node for o in n.output}
    activations, weights = {}, {}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            name = node.input[0].removesuffix("_QuantizeLinear_Input")
            activations[name] = float(arrays[node.input[1]]), int(arrays[node.input[2]])
        elif node.op_type != "DequantizeLinear":
            for index, name in enumerate(node.input):
                if name in made and made[name].op_type == "DequantizeLinear" and made[name].input[0] in arrays:
                    codes, scale = (arrays[i] for i in made[name].input[:2])
                    key = node.output[0].removesuffix("_QuantizeLinear_Input"), index
                    weights[key] = codes.shape, codes.tobytes(), float(scale)
    return activations, weights


def outputs(model: onnx.ModelProto, name: str, samples: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = sorted(o.name for o in session.get_outputs())
    return [y for i in range(len(samples)) for y in session.run(names, {name: samples[i : i + 1]})]


def compare(python: str, model: Path, data: Path, folder: Path) -> None:
    samples, name = np.load(data), jq.load(model).inputs[0].name
    output = folder / f"{model.stem}.quark.onnx"
    command = [python, "-c", SCRIPT, str(model.resolve()), str(data.resolve()), name, str(output)]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    config = jq.presets["XINT8"].replace(strict_quark=True, cle=False)
    ours, theirs = jq.quantize(model, {name: samples}, config).model, onnx.load(output)
    counts = []
    for a, b in zip(quantizers(ours), quantizers(theirs), strict=True):
        counts.append(f"{sum(a.get(k) != b.get(k) for k in a.keys() | b.keys())} of {len(a.keys() | b.keys())}")
    pairs = zip(outputs(ours, name, samples), outputs(theirs, name, samples), strict=True)
    differ = sum(not np.array_equal(a, b) for a, b in pairs)
    print(f"{model.stem}: activations {counts[0]} differ, constants {counts[1]}, outputs {differ}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:DATA.npy")
    parser.add_argument("--quark", required=True, help="a Python that has amd-quark")
    parser.add_argument("--networks", action="store_true", help="the networks of parity/networks.py too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [tuple(map(Path, m.rsplit(":", 1))) for m in args.models]
        if args.networks:
            script = Path(__file__).with_name("networks.py")
            command = [args.quark, str(script), str(folder), str(args.seed)]
            subprocess.run(command, capture_output=True, check=True)
            cases += [(path, folder / "samples.npy") for path in sorted(folder.glob("*.onnx"))]
        for model, data in cases:
            compare(args.quark, model, data, folder)


if __name__ == "__main__":
    main()
