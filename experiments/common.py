"""Shared by the experiments: processes of their own, images, models, and how good a quantized one is.

Run the experiments in a checkout that is installed with `pip install -e .`, which makes this folder importable.
This module imports neither jax nor jq: a child's peak memory begins with its parent's, and a child sets up JAX itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


PREPARE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "P1": lambda x: (x / 255 - MEAN) / DEVIATION,
    "P2": lambda x: x[..., ::-1] - np.float32([103.939, 116.779, 123.68]),
    "P3": lambda x: (x - 127.5) / 127.5,
    "P4": lambda x: (x - 127) / 128,
}


ARRAYS = "arrays"  # the PREP of images that are prepared already, `images` and `labels` of an npz
SIDE, BATCH = 224, 20  # of images for evaluation


# Quark falls back to a method that does not search when calibration fails, and says so in its log only.
QUARK_SCRIPT = """
import json, os, sys, time
import numpy as np
import quark.onnx.quantization.quantize as steps
from onnxruntime.quantization import CalibrationDataReader
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config

model, data, name, result = sys.argv[1:]

class Reader(CalibrationDataReader):
    def __init__(self):
        self.images = np.load(data)
        self.next = iter(range(len(self.images)))
    def __len__(self):
        return len(self.images)
    def get_next(self):
        index = next(self.next, None)
        return None if index is None else {name: self.images[index : index + 1]}

def now():
    return time.perf_counter(), sum(os.times()[:4])

def timed(run, found):
    def measured(*args, **kwargs):
        start = now()
        out = run(*args, **kwargs)
        found["wall"], found["cpu"] = (b - a for a, b in zip(start, now()))
        return out
    return measured

calibration, whole = {}, {}
steps.run_calibration = timed(steps.run_calibration, calibration)
config = get_default_config("XINT8")
config.include_cle = False
quantizer = ModelQuantizer(Config(global_quant_config=config))
timed(quantizer.quantize_model, whole)(model, "quantized.onnx", Reader())
assert os.path.getsize("quantized.onnx") > 0
with open(result, "w") as file:
    json.dump({"whole": whole, "calibration": calibration}, file)
"""


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that runs in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def setup(cores: Sequence[int], devices: int, cache: str | None = None) -> None:
    """Hold this process to some cores before JAX makes its thread pool; `cache` is where compilations go."""
    os.sched_setaffinity(0, cores)
    if cache is not None:
        for name in ("JQ_CACHE", "JAX_COMPILATION_CACHE_DIR"):
            os.environ.pop(name, None)
        os.environ["XDG_CACHE_HOME"] = cache
    import jax

    jax.config.update("jax_num_cpu_devices", devices)


def elapsed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def best(runs: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The shortest time of each in milliseconds; a few runs of each in turn in every round.

    A few, because the idle threads of the one before spin for some milliseconds on the same cores.
    """
    shortest = [math.inf] * len(runs)
    for _ in range(rounds):
        for index, run in enumerate(runs):
            for _ in range(4):
                start = time.perf_counter()
                run()
                shortest[index] = min(shortest[index], 1e3 * (time.perf_counter() - start))
    return shortest


def versions() -> dict[str, str]:
    import jax
    import onnxruntime as ort

    return {"jax": jax.__version__, "onnxruntime": ort.__version__}


def all_versions() -> dict[str, str]:
    import jq

    return {"jq": jq.__version__, **versions()}


def machine() -> str:
    """The processor, and how many cores this process may use."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def bundled() -> list[str]:
    import jq

    return [str(jq.zoo.path(name)) for name in jq.zoo.models()]


def read_images(prep: str, images: Path | None, count: int) -> np.ndarray:
    """The first `count` images as the model takes them, from the beginning again where there are fewer."""
    if not prep:
        import jq

        found = jq.zoo.calibration_set()[0]
        return found[np.arange(count) % len(found)]
    assert images is not None, "models with a PREP need --images"
    with np.load(images) as file:
        pixels = file["images"]
    pixels = pixels[np.arange(count) % len(pixels)]
    if prep == ARRAYS:
        return pixels
    made = np.empty((count, pixels.shape[3], *pixels.shape[1:3]), np.float32)
    for image, source in zip(made, pixels, strict=True):  # one by one: half the memory
        image[...] = PREPARE[prep](source.astype(np.float32)).transpose(2, 0, 1)
    return made


def write_data(path: str, prep: str, images: Path | None, count: int, data: str) -> str:
    """Write the images for both tools; return the name of the model's input."""
    import jq

    np.save(data, read_images(prep, images, count))
    return jq.load(path).inputs[0].name


def evaluation(folder: Path, prep: str) -> tuple[np.ndarray, np.ndarray]:
    """The images of a folder's JPEGs, or of an npz, and their labels."""
    if prep == ARRAYS:
        with np.load(folder) as file:
            return file["images"], file["labels"]
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
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    if any(t.data_type in (onnx.TensorProto.UINT4, onnx.TensorProto.INT4) for t in onnx.load(path).graph.initializer):
        # onnxruntime's extended optimizations put codes of 4 bits into a MaxPool, which then refuses them.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = [session.run(None, {name: x[i : i + BATCH]})[0] for i in range(0, len(x), BATCH)]
    return np.concatenate(parts).reshape(len(x), -1)


def score(
    cores: Sequence[int], path: str, quantized: dict[str, str], prep: str, offset: int, folder: Path | None
) -> dict[str, Any]:
    """Top-1, agreement, KL and SQNR beside the float model with 95 % intervals, on the bundled images or a folder's JPEGs."""
    setup(cores, 1)
    if prep:
        assert folder is not None
        x, labels = evaluation(folder, prep)
    else:
        import jq

        x, labels = jq.zoo.evaluation_set()
    from jq.evaluation.paired import paired

    reference, labels = logits(path, x), labels + offset
    found: dict[str, Any] = {"images": len(x), "float": round(100 * float(np.mean(reference.argmax(-1) == labels)), 2)}
    for kind, file in quantized.items():
        y = logits(file, x)
        beside = paired([reference], [y], labels)  # of a bootstrap with seed 0
        scaled = {"change": beside.top1, "agreement": beside.agreement, "kl": beside.kl, "sqnr": beside.sqnr}
        shares = {"change": 100, "agreement": 100, "kl": 1, "sqnr": 1}
        rounded = {
            k: [round(shares[k] * part, 5) for part in (e.value, e.low, e.high)]
            for k, e in scaled.items()
            if e is not None
        }
        found[kind] = {
            "top1": round(100 * float(np.mean(y.argmax(-1) == labels)), 2),
            **{k: round(v[0], 5 if k == "kl" else 2) for k, v in rounded.items() if k != "change"},
            "intervals": {k: v[1:] for k, v in rounded.items()}, "p": beside.p,
        }  # fmt: skip
    return found


def quantize(cores: Sequence[int], path: str, data: str, config: str, output: str, cache: str) -> dict[str, float]:
    setup(cores, len(cores), cache)
    import jq

    x = np.load(data)
    x = x if isinstance(x, np.ndarray) else {k: x[k] for k in x}
    start = np.array([time.perf_counter(), sum(os.times()[:4])])
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


def quark_whole(
    python: str, threads: int, path: str, data: str, name: str, folder: str, script: str = QUARK_SCRIPT
) -> dict[str, Any]:
    """Seconds of Quark, which leaves `quantized.onnx` in the folder."""
    result = Path(folder) / "quark.json"
    command = [python, "-c", script, str(Path(path).resolve()), data, name, str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TMPDIR": folder}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode or "Will automatically set" in log or not result.exists():
        raise SystemExit(f"Quark failed, or fell back to another method:\n{log[-4000:]}")
    return json.loads(result.read_text())


def read_entry(entry: str, args: argparse.Namespace) -> tuple[str, str, int]:
    """MODEL.onnx[:PREP[:LABELS]] as a path, a preparation and what is added to labels."""
    path, prep, offset = (*entry.split(":"), "", "")[:3]
    if prep and (prep not in PREPARE or args.images is None):
        raise SystemExit(f"{entry}: PREP is one of {', '.join(PREPARE)}, and needs --images")
    if not Path(path).exists():
        raise SystemExit(f"{entry}: no file {path}")
    return path, prep, int(offset or 0)


def measured(path: str, reference: np.ndarray, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of each image."""
    y, best = logits(path, x), reference.argmax(1)

    def log_softmax(v: np.ndarray) -> np.ndarray:
        v = v.astype(np.float64) - v.max(1, keepdims=True)
        return v - np.log(np.exp(v).sum(1, keepdims=True))

    want, have = log_softmax(reference), log_softmax(y)
    noise = np.square(reference.astype(np.float64) - y).sum(1)
    return {
        "kl": (np.exp(want) * (want - have)).sum(1),
        "sqnr": 10 * np.log10(np.square(reference, dtype=np.float64).sum(1) / np.maximum(noise, 1e-30)),
        "top1": 100.0 * (y.argmax(1) == labels),
        "agreement": 100.0 * (y.argmax(1) == best),
    }


def compared(
    cores: Sequence[int], path: str, names: Sequence[str], prep: str, offset: int, args: Any
) -> dict[str, Any]:
    """Means of every model's metrics, and differences to the first with 95 % intervals of a bootstrap over the images."""
    os.sched_setaffinity(0, cores)
    from jq.evaluation.estimates import bootstrap
    from jq.evaluation.metrics import sign_test

    if prep:
        x, labels = evaluation(args.eval, prep)
    else:
        import jq

        x, labels = jq.zoo.evaluation_set()
    reference = logits(path, x)
    seen = {name: measured(f"{args.folder}/{name}.onnx", reference, x, labels + offset) for name in names}
    base, found = seen[names[0]], {"float": round(100 * float(np.mean(reference.argmax(1) == labels + offset)), 2)}
    found |= {"images": len(x)}
    for name, metrics in seen.items():
        found[name] = {}
        for k, v in metrics.items():
            off = v - base[k]
            low, high = bootstrap(off[:, None])[:, 0].tolist()
            found[name][k] = {"mean": float(v.mean()), "difference": float(off.mean()), "low": low, "high": high}
        gained = np.sign(metrics["top1"] - base["top1"])
        found[name]["top1"]["p"] = sign_test(int((gained < 0).sum()), int((gained > 0).sum()))
    return found


def command() -> str:
    """What is run, without the folders of this machine."""
    return shlex.join(["python", *(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)])


def parser_of(text: str | None, out: Path) -> argparse.ArgumentParser:
    """A parser of models, the data that they see and where rows go."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:PREP[:LABELS], after the bundled ones")
    parser.add_argument(
        "--images", type=Path, help="npz with uint8 NHWC `images`, for models; prepared ones for PREP arrays"
    )
    parser.add_argument("--eval", type=Path, help="folder of labelled JPEGs, for models; for PREP arrays an npz")
    parser.add_argument("--only", action="store_true", help="these models without the bundled ones")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=out)
    return parser


def entries(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Models, each with its preparation and what is added to its labels."""
    if args.models and (args.images is None or args.eval is None):
        parser.error("models need --images and --eval")
    found = [] if args.only else [(path, "", 0) for path in fresh(bundled)]
    for entry in args.models:
        path, prep, offset = (*entry.split(":"), "0")[:3]
        found.append((path, prep, int(offset)))
    return found


def beside(parser: argparse.ArgumentParser, args: argparse.Namespace, experiment: str, make: Any, *given: Any) -> None:
    """Print the variants of each model that `make` writes into a folder side by side, and append a line of JSON for each."""
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    for path, prep, offset in entries(parser, args):
        with tempfile.TemporaryDirectory() as args.folder:
            data = f"{args.folder}/images.npy"
            fresh(write_data, path, prep, args.images, args.count, data)
            ran = fresh(make, cores, path, data, *given, args.folder)
            found = fresh(compared, cores, path, list(ran), prep, offset, args)
        print(f"{Path(path).stem}: {args.count} images, {found['images']} others; float {found['float']:.2f}")
        for name, facts in ran.items():
            told = [f"{k} {v:.4g}" for k, v in facts.items()]
            told += [
                f"{k} {m['mean']:.4f} {m['difference']:+.4f} [{m['low']:+.4f}, {m['high']:+.4f}]"
                for k, m in found[name].items()
            ]
            print(f"  {name:15} {'  '.join(told)}", flush=True)
            row = {"experiment": experiment, "model": Path(path).stem, "variant": name, "count": args.count}
            row |= {"images": found["images"], **facts, **found[name], "threads": len(cores), "command": command()}
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
