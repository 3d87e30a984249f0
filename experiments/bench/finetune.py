"""Finetuning: iterations per second beside torch's AdaRound, whole runs from file to file, and the cost of depth.

    python experiments/bench/finetune.py iterations [LAYER ...] [--steps 150] [--batch 32] [--images 128]
        [--torch-python PYTHON]
    python experiments/bench/finetune.py model [MODEL.onnx:PREP[:LABELS] ...] [--images NPZ] [--count 100]
        [--eval FOLDER] [--presets XINT8_ADAROUND ...]
    python experiments/bench/finetune.py depth [--lengths 100 200 400] [--images 32]

All take `--threads 2` and `--rounds`, and append one JSON line to `--out`. Run it on an idle machine.

`iterations`: one convolution of seeded random weights, on images of correlated channels after a ReLU, which are
rounded to the codes of an XINT8 plan; the bias is in floats and the output is not rounded. Three ways, each for the
same number of iterations:

* gram: `AdaRound` on the quadratic form of the error, of all images in every iteration. The form is made once:
  its seconds, with and without compilation, stand beside the iterations.
* data: `tune_unit` on batches. It learns weights through their rounding (straight-through, as AdaQuant) and the bias,
  not AdaRound's up or down. An iteration is what more of them cost: those of all steps less those of one.
* torch: AdaRound as AMD Quark 0.13 does it: rectified sigmoid, Adam at 0.1, regularizer 0.01 after a fifth of the
  iterations, a random batch in each, on operands that are rounded already; on one thread or on all, what is faster.
  It runs in the interpreter of `--torch-python`, by default this one, and is skipped where that has no torch.

The error is the mean square of how far the outputs are from the float layer's, of all images, by one function for all,
over that of rounding to nearest: once with the bias that the method leaves, once with the best one. `whole` is all
seconds of a layer: form and iterations, warm and (cold) with what is compiled first, against torch's iterations.

`model`: wall and CPU seconds and peak memory of `jq.quantize` from a file to a file as in bench/quantize.py, whose
arguments these are, with an empty compilation cache (cold) and with the one that this left (warm); then top-1,
agreement with the float model and signal-to-noise ratio of the logits by onnxruntime, on FOLDER. Without models it
takes the bundled ones with their images.

`depth`: seconds of `jq.finetune` with stage adaround on chains of 3x3 convolutions of 16 channels, each followed by a
ReLU, on images of 16 x 16: the first call in a process with an empty compilation cache, and the best one after it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import (
    RESULTS,
    all_versions,
    bundled,
    command,
    elapsed,
    fresh,
    machine,
    quantize,
    read_entry,
    score,
    setup,
    write_data,
)

OUT = RESULTS / "finetune.jsonl"


@dataclass(frozen=True)
class Layer:
    """A convolution with padding that keeps the size of its image."""

    inputs: int
    outputs: int
    kernel: int
    side: int
    groups: int = 1

    def __str__(self) -> str:
        if self.groups > 1:
            return f"depthwise {self.groups} {self.kernel}x{self.kernel} {self.side}"
        return f"{self.inputs}->{self.outputs} {self.kernel}x{self.kernel} {self.side}"


LAYERS = {
    "c64": Layer(64, 64, 3, 28),
    "c128": Layer(128, 128, 3, 28),
    "c256": Layer(256, 256, 3, 14),
    "expand": Layer(256, 1024, 1, 14),
    "c512": Layer(512, 512, 3, 7),
    "depthwise": Layer(144, 144, 3, 28, 144),
}

# The loop of quark/onnx/algorithm/finetuning/train_torch, without logs; no early stop, so that steps are equal.
TORCH_SCRIPT = """
import json, sys, time
import numpy as np
import torch

folder, threads, steps, batch, rounds, groups = sys.argv[1], *map(int, sys.argv[2:])
with np.load(folder + "/layer.npz") as file:
    images, targets = ([torch.from_numpy(a[None]) for a in file[k]] for k in ("codes", "targets"))
    w, b, scale = (torch.from_numpy(file[k]) for k in ("w", "b", "scale"))
    qmin, qmax = float(file["qmin"]), float(file["qmax"])
floor = torch.floor(w / scale)

def rectified(alpha):
    return torch.clamp(torch.sigmoid(alpha) * 1.2 - 0.1, 0, 1)

def optimized(steps):
    torch.manual_seed(0)
    alpha = torch.nn.Parameter(-torch.log(1.2 / (w / scale - floor + 0.1) - 1))
    adam = torch.optim.Adam([alpha], lr=0.1)
    for i in range(steps):
        chosen = torch.randperm(len(images))[:batch].tolist()
        x, y = (torch.cat([part[j] for j in chosen]) for part in (images, targets))
        adam.zero_grad()
        weight = torch.clamp(floor + rectified(alpha), qmin, qmax) * scale
        z = torch.nn.functional.conv2d(x, weight, b, padding=w.shape[-1] // 2, groups=groups)
        loss = (torch.norm(z - y, p="fro", dim=1) ** 2).mean()
        if i >= 0.2 * steps:
            beta = 2 + 9 * (1 + np.cos((i - 0.2 * steps) / (0.8 * steps) * np.pi))
            loss = loss + 0.01 * (1 - (2 * rectified(alpha) - 1).abs().pow(beta)).sum()
        loss.backward()
        adam.step()
    return torch.clamp(floor + (alpha >= 0), qmin, qmax) * scale

def seconds(steps):
    start = time.perf_counter()
    np.savez(folder + "/torch.npz", w=optimized(steps).numpy(), b=b.numpy())
    return time.perf_counter() - start

probed = {}
for count in {1, threads}:
    torch.set_num_threads(count)
    optimized(2)
    probed[count] = min(seconds(5), seconds(5))
fastest = min(probed, key=probed.get)
torch.set_num_threads(fastest)
found = min(seconds(steps) for _ in range(rounds))
print(json.dumps({"seconds": found, "threads": fastest, "version": torch.__version__}))
"""


def images_of(layer: Layer, count: int) -> np.ndarray:
    """What a layer reads after a ReLU: smooth, with channels that mix a quarter as many causes."""
    rng, causes = np.random.default_rng(1), max(4, layer.inputs // 4)
    found = rng.standard_normal((count, causes, layer.side, layer.side), np.float32)
    for axis in (2, 3):
        found = found + np.roll(found, 1, axis) + np.roll(found, -1, axis)
    mixed = np.einsum("oc,nchw->nohw", rng.standard_normal((layer.inputs, causes), np.float32), found, optimize=True)
    size = np.exp(0.5 * rng.standard_normal((1, layer.inputs, 1, 1)))
    return np.maximum(mixed / mixed.std() * size, 0).astype(np.float32)


def model_of(layer: Layer) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    rng, fan = np.random.default_rng(0), layer.inputs // layer.groups * layer.kernel**2
    w = rng.standard_normal((layer.outputs, layer.inputs // layer.groups, layer.kernel, layer.kernel), np.float32)
    b = 0.1 * rng.standard_normal(layer.outputs, np.float32)
    arrays = {"w": w / np.float32(math.sqrt(fan)), "b": b}
    pads, sides = [layer.kernel // 2] * 4, [layer.side, layer.side]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], "conv", pads=pads, group=layer.groups)],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", layer.inputs, *sides])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", layer.outputs, *sides])],
        [numpy_helper.from_array(a, name) for name, a in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def best(run: Callable[[], Any], rounds: int) -> float:
    return min(elapsed(run) for _ in range(rounds))


def ours(cores: Sequence[int], layer: Layer, args: argparse.Namespace, folder: str) -> dict[str, float]:
    """Seconds of both of our ways; what the layer is and what they find is left in the folder."""
    setup(cores, 1, f"{folder}/cache")
    import jax

    import jq
    from jq.data.sources import open_source
    from jq.data.stream import concurrently
    from jq.ops.linear import linear_layer
    from jq.recovery.adaround import AdaRound
    from jq.recovery.descent import CoordinateDescent
    from jq.recovery.finetuning import Reconstruction, Site, tune_unit
    from jq.recovery.layers import _sums
    from jq.recovery.parts import units
    from jq.recovery.quadratic_form import Form
    from jq.recovery.rounding import Then
    from jq.recovery.walk import added, store_of, walk

    config, x = jq.presets["XINT8"].replace(bias="float"), images_of(layer, args.images)
    graph = jq.prepare(jq.load(model_of(layer)), config)
    plan = jq.make_plan(graph, jq.calibrate(graph, x, config), config).replace({"y": None})
    arrays = {k: np.asarray(graph.params[k]) for k in ("w", "b")}
    np.savez(
        f"{folder}/layer.npz", **arrays, codes=np.asarray(plan["x"].fake_quant(x)), targets=forward(layer, x, **arrays),
        scale=plan["w"].scale, qmin=plan["w"].grid.qmin, qmax=plan["w"].grid.qmax,
    )  # fmt: skip
    np.savez(f"{folder}/nearest.npz", w=np.asarray(plan["w"].fake_quant(arrays["w"])), b=arrays["b"])
    parts, store, sites = units(graph, plan, "layer"), store_of(graph, plan, open_source(x, graph.inputs), None), []

    def kept(site: Site) -> tuple[Site, float, float]:
        sites.append(site)
        return site, 0.0, 0.0

    walk(graph, graph.params, plan, parts, store, kept)
    (site,), (unit,) = sites, parts
    (node,), seconds = unit.pattern.graph.nodes, {}
    view, qparams = linear_layer(unit.pattern.graph, node), site.plan.weights[unit.names["w"]]
    assert view is not None and view.product is not None
    linear = view.product
    step = functools.partial(_sums, unit.pattern, 0, site.samples, site.given)

    formed = jax.jit(Form.of)

    def form() -> Form:
        return jax.block_until_ready(formed(added(concurrently(step, site.floats, site.codes, site.valid))))

    seconds["form_cold"] = elapsed(form)
    seconds["form"], quadratic = best(form, args.rounds), form()
    columns = linear.columns(site.given[unit.names["w"]], node.attrs)
    rounding = jax.jit(Then(AdaRound(steps=args.steps), CoordinateDescent()))

    def rounded() -> Any:
        return jax.block_until_ready(rounding(columns, qparams, quadratic))

    seconds["gram_cold"] = elapsed(rounded)
    seconds["gram"] = best(rounded, args.rounds)
    w = linear.weights(rounded(), arrays["w"].shape, node.attrs)
    shift = quadratic.shift(rounded() - columns)
    np.savez(f"{folder}/gram.npz", w=np.asarray(w), b=arrays["b"] + np.asarray(shift).reshape(-1))

    def tuned(steps: int) -> Site:
        how, key = Reconstruction(steps=steps, batch=args.batch), jax.random.key(0)
        return jax.block_until_ready(tune_unit(site, how, (), lambda moved: True, {}, key)[0])

    seconds["data_cold"] = elapsed(lambda: tuned(args.steps))
    tuned(1)
    seconds["data"], once = best(lambda: tuned(args.steps), args.rounds), best(lambda: tuned(1), args.rounds)
    seconds["data_step"] = (seconds["data"] - once) / (args.steps - 1)
    params = tuned(args.steps).params
    w = qparams.fake_quant(params[unit.names["w"]])
    np.savez(f"{folder}/data.npz", w=np.asarray(w), b=np.asarray(params[unit.names["b"]]))
    return seconds


def forward(layer: Layer, x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What the layer gives in floats, 16 images at a time."""
    import jax

    import jq

    fn = jax.jit(jq.trace(jq.prepare(jq.load(model_of(layer)))))
    return np.concatenate([fn({"w": w, "b": b}, {"x": x[i : i + 16]})["y"] for i in range(0, len(x), 16)])


def errors(cores: Sequence[int], layer: Layer, folder: str) -> dict[str, dict[str, float]]:
    """The mean squared error that each way leaves over that of nearest rounding, with its bias and with the best."""
    setup(cores, 1)
    with np.load(f"{folder}/layer.npz") as file:
        codes, targets = file["codes"], file["targets"]
    left: dict[str, dict[str, float]] = {}
    for kind in ("nearest", "gram", "data", "torch"):
        path = Path(folder) / f"{kind}.npz"
        if path.exists():
            with np.load(path) as file:
                off = (targets - forward(layer, codes, **file)).astype(np.float64)
            own = float(np.mean(off**2))
            left[kind] = {"own": own, "best": own - float(np.mean(off.mean((0, 2, 3)) ** 2))}
    plain = left.pop("nearest")
    return {kind: {k: round(v / plain[k], 4) for k, v in found.items()} for kind, found in left.items()}


def has_torch(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return Path(python).exists() and subprocess.run([python, "-c", code]).returncode == 0


def torch_seconds(layer: Layer, args: argparse.Namespace, cores: Sequence[int], folder: str) -> dict[str, Any]:
    numbers = (len(cores), args.steps, args.batch, args.rounds, layer.groups)
    torch = [args.torch_python, "-c", TORCH_SCRIPT, folder, *map(str, numbers)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
    done = subprocess.run(torch, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"torch failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def iterations(args: argparse.Namespace, cores: Sequence[int]) -> dict[str, Any]:
    rows, found_torch = [], has_torch(args.torch_python)
    if not found_torch:
        print(f"torch skipped: {args.torch_python} has none; name an interpreter that does with --torch-python")
    print(f"{args.steps} iterations, batches of {args.batch} from {args.images} images; gram sees all of them")
    print(f"{'':22}{'iterations per second':^27}  {'form, s':^13}  {'whole, s':^13}  {'times torch':^13}", end="")
    print(f"  {'error over nearest: own bias / best':^41}")
    print(f"{'':22}{'gram':>9}{'data STE':>9}{'torch':>9}  {'warm':>6} {'cold':>6}  {'warm':>6} {'cold':>6}", end="")
    print(f"  {'warm':>6} {'cold':>6}  {'gram':>13} {'data STE':>13} {'torch':>13}")
    for name in args.layers or LAYERS:
        layer = LAYERS[name]
        with tempfile.TemporaryDirectory() as folder:
            seconds = fresh(ours, cores, layer, args, folder)
            theirs = torch_seconds(layer, args, cores, folder) if found_torch else None
            error = fresh(errors, cores, layer, folder)
        whole = {"warm": seconds["form"] + seconds["gram"], "cold": seconds["form_cold"] + seconds["gram_cold"]}
        rate = {"gram": args.steps / seconds["gram"], "data": 1 / seconds["data_step"]}
        ratio = {}
        if theirs:
            rate["torch"] = args.steps / theirs["seconds"]
            ratio = {k: theirs["seconds"] / v for k, v in whole.items()}
        print(
            f"{layer!s:22}{rate['gram']:9.1f}{rate['data']:9.1f}{rate.get('torch', math.nan):9.1f}"
            f"  {seconds['form']:6.2f} {seconds['form_cold']:6.2f}  {whole['warm']:6.2f} {whole['cold']:6.2f}"
            f"  {ratio.get('warm', math.nan):6.1f} {ratio.get('cold', math.nan):6.1f}  "
            + " ".join("{own:6.3f}/{best:6.3f}".format(**error[k]) if k in error else f"{'-':>13}" for k in
                       ("gram", "data", "torch")),
            flush=True,
        )  # fmt: skip
        row: dict[str, Any] = {"layer": str(layer), "iterations_per_second": rounded(rate), "seconds": rounded(seconds)}
        row |= {"whole": rounded(whole), "torch_over_whole": rounded(ratio), "error_over_nearest": error}
        rows.append(row | ({"torch": {k: theirs[k] for k in ("version", "threads")}} if theirs else {}))
    options = {k: getattr(args, k) for k in ("steps", "batch", "images")}
    return {**options, "torch_skipped": not found_torch, "rows": rows}


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {k: float(f"{v:.4g}") for k, v in numbers.items()}


def model(args: argparse.Namespace, cores: Sequence[int]) -> dict[str, Any]:
    rows = []
    for entry in args.models or fresh(bundled):
        path, prep, offset = read_entry(entry, args)
        with tempfile.TemporaryDirectory() as folder:
            data, files = f"{folder}/images.npy", {}
            fresh(write_data, path, prep, args.images, args.count, data)
            for preset in args.presets:
                row = {"model": Path(path).stem, "prep": prep, "preset": preset}
                files[preset] = f"{folder}/{preset}.onnx"
                for kind in ("cold", "warm"):
                    cache = f"{folder}/cache_{preset}"
                    row[kind] = fresh(quantize, cores, path, data, preset, files[preset], cache)
                    text = "wall {wall:8.2f} s  cpu {cpu:8.2f} s  peak {megabytes:7.0f} MB".format(**row[kind])
                    print(f"{row['model']:20} {preset:16} {kind}  {text}", flush=True)
                rows.append(row)
            if args.eval or not prep:
                found = fresh(score, cores, path, files, prep, offset, args.eval)
                print(f"  top-1 of the float model {found['float']:.2f} % on {found['images']} images")
                for row in rows[-len(args.presets) :]:
                    row |= {"images": found["images"], "float": found["float"], "accuracy": found[row["preset"]]}
                    text = "top-1 {top1:6.2f} %  agreement {agreement:6.2f} %  KL {kl:.4f}  {sqnr:6.2f} dB  95 %: {intervals}"
                    print(f"  {row['preset']:16} {text.format(**row['accuracy'])}", flush=True)
    return {"count": args.count, "rows": rows}


def chain_of(length: int, x: np.ndarray) -> bytes:
    """Convolutions and ReLUs, each convolution scaled so that what it gives of x varies by 1."""
    from onnx import TensorProto, helper, numpy_helper

    rng, nodes, arrays, channels, name = np.random.default_rng(0), [], [], x.shape[1], "x"
    for i in range(length):
        w, b = rng.standard_normal((channels, channels, 3, 3), np.float32), rng.standard_normal(channels, np.float32)
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        shifted = [padded[:, :, j : j + x.shape[2], k : k + x.shape[3]] for j in range(3) for k in range(3)]
        y = np.tensordot(w.transpose(0, 2, 3, 1).reshape(channels, -1), np.concatenate(shifted, 1), (1, 1))
        scale, b = np.float32(1) / y.std(), np.float32(0.1) * b
        x = np.maximum(y.swapaxes(0, 1) * scale + b[:, None, None], 0)
        arrays += [numpy_helper.from_array(w * scale, f"w{i}"), numpy_helper.from_array(b, f"b{i}")]
        nodes += [
            helper.make_node("Conv", [name, f"w{i}", f"b{i}"], [f"c{i}"], f"conv{i}", pads=[1] * 4),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"], f"relu{i}"),
        ]
        name = f"r{i}"
    values = [helper.make_tensor_value_info(v, TensorProto.FLOAT, ["N", *x.shape[1:]]) for v in ("x", name)]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def chain_seconds(cores: Sequence[int], length: int, args: argparse.Namespace, cache: str) -> dict[str, float]:
    setup(cores, 1, cache)
    import jq

    x = np.random.default_rng(1).standard_normal((args.images, 16, 16, 16), np.float32)
    config = jq.presets["XINT8"].replace(cle=False, finetune="adaround", finetune_steps=args.steps)
    graph = jq.prepare(jq.load(chain_of(length, x)), config)
    plan = jq.make_plan(graph, jq.calibrate(graph, x, config), config)

    def run() -> None:
        params, _ = jq.finetune(graph, plan, x, config)
        assert any(not np.array_equal(params[k], graph.params[k]) for k in graph.params)

    return {"first": elapsed(run), "warm": best(run, args.rounds)}


def depth(args: argparse.Namespace, cores: Sequence[int]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    print(f"{'layers':>6} {'first, s':>10} {'warm, s':>10} {'ms per layer':>13} {'times the one before':>21}")
    for length in args.lengths:
        with tempfile.TemporaryDirectory() as cache:
            row = {"layers": length, **rounded(fresh(chain_seconds, cores, length, args, cache))}
        row |= {"ratio": round(row["warm"] / rows[-1]["warm"], 3)} if rows else {}
        rows.append(row)
        text = f"{length:6} {row['first']:10.2f} {row['warm']:10.2f} {1e3 * row['warm'] / length:13.1f}"
        print(f"{text} {row['ratio']:21.2f}" if "ratio" in row else text, flush=True)
    return {"images": args.images, "steps": args.steps, "rows": rows}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    part = kinds.add_parser("iterations", help="of one layer, beside torch's")
    part.add_argument("layers", nargs="*", metavar="LAYER", choices=[[], *LAYERS], help=f"{', '.join(LAYERS)} [all]")
    part.add_argument("--steps", type=int, default=150)
    part.add_argument("--batch", type=int, default=32)
    part.add_argument("--images", type=int, default=128)
    part.add_argument("--torch-python", metavar="PYTHON", default=sys.executable, help="an interpreter with torch")
    part.set_defaults(run=iterations)
    part = kinds.add_parser("model", help="whole runs, cold and warm")
    part.add_argument("models", nargs="*", help="MODEL.onnx:PREP[:LABELS]; without PREP it sees the bundled images")
    part.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`")
    part.add_argument("--count", type=int, default=100, help="images for calibration")
    part.add_argument("--eval", type=Path, help="folder of labelled JPEGs")
    part.add_argument("--presets", nargs="+", default=["XINT8", "XINT8_ADAROUND", "XINT8_ADAQUANT", "XINT8_ACCURATE"])
    part.set_defaults(run=model)
    part = kinds.add_parser("depth", help="chains of layers")
    part.add_argument("--lengths", type=int, nargs="+", default=[100, 200, 400])
    part.add_argument("--images", type=int, default=32)
    part.add_argument("--steps", type=int, help="of each layer [the method's own]")
    part.set_defaults(run=depth)
    for part in kinds.choices.values():
        part.add_argument("--threads", type=int, default=2)
        part.add_argument("--rounds", type=int, default=2, help="of which the best is taken; not of `model`")
        part.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.kind == "iterations" and (args.steps < 2 or args.images < args.batch):
        parser.error("iterations needs two --steps or more, and as many --images as a --batch has")
    return args


def main() -> None:
    args = arguments()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)
    found, line = args.run(args, cores), {"bench": "finetune", "kind": args.kind, "threads": len(cores)}
    line |= {**fresh(all_versions), "machine": machine(), "command": command(), **found}
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
