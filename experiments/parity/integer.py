"""Quantized models in integers: does target "ort" have every code that onnxruntime has, in every tensor?

    python experiments/parity/integer.py [MODEL.onnx[:DATA[:PREP]] ...] [--count 64] [--batch 8]

MODELs are quantized, in QDQ or QOperator form. DATA is an npz with one array of stacked samples per input, or for a
model of one input any npz or npy with one array; with PREP, which is as in parity/real_models.py, an npz with uint8
NHWC `images`. Without DATA a model sees seeded noise; without models, the bundled ones are quantized to XINT8 and see
64 of their images. A model with a fixed batch is fed that many samples at a time.

Prints per model how many tensors and elements were compared with onnxruntime without optimizations, how many elements
differ, and how many do where jq reads onnxruntime's codes of the tensors before: with float scales, sums in float32
put some elements next to a tie on its other side, and all that is computed from those may differ too. Then the nodes
that jq computed in float, and which targets of the NPU accept the model, or why not. Appends one JSON line to `--out`,
and exits with 1 if an element differs, a tensor has no codes in jq, or jq fails on a model that it loaded. A model that
jq does not load or onnxruntime refuses is reported, and is no failure: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime as ort

import jq
from experiments.common import PREPARE, RESULTS

TARGETS = ("dpu", "aie2_x1", "aie2_even")
SIDE = 224  # of noise, where a model leaves it open
Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, Sequence[int | str | None]]


def shapes_of(model: onnx.ModelProto) -> Shapes:
    return {value.name: value.shape or () for value in jq.load(model).inputs}


def read(data: str, prep: str, shapes: Shapes, count: int) -> Arrays:
    """Stacked samples for each input."""
    if not data:
        rng = np.random.default_rng(0)
        open_ends = {name: [d if isinstance(d, int) else SIDE for d in shape[1:]] for name, shape in shapes.items()}
        return {name: rng.standard_normal((count, *shape), np.float32) for name, shape in open_ends.items()}
    loaded = np.load(data)
    arrays = {"": loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in loaded.files}
    if prep:
        pixels = PREPARE[prep](arrays["images"][:count].astype(np.float32))
        arrays = {"images": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), np.float32)}
    if len(shapes) == len(arrays) == 1:
        arrays = dict(zip(shapes, arrays.values(), strict=True))
    if missing := shapes.keys() - arrays.keys():
        sys.exit(f"{data}: no array for the input {', '.join(sorted(missing))}; it has {', '.join(arrays)}")
    return {name: arrays[name][:count] for name in shapes}


def feeds(arrays: Arrays, shapes: Shapes, batch: int) -> Iterator[dict[str, np.ndarray]]:
    """The samples as the model takes them: by one if they are whole inputs, else as many as its batch has."""
    count = min(len(a) for a in arrays.values())
    if any(a.ndim > len(shapes[name]) for name, a in arrays.items()):
        yield from ({name: a[i] for name, a in arrays.items()} for i in range(count))
        return
    fixed = [shape[0] for shape in shapes.values() if isinstance(shape[0], int)]
    step = fixed[0] if fixed else batch
    for start in range(0, count - step + 1 if fixed else count, step):
        yield {name: a[start : start + step] for name, a in arrays.items()}


def is_quantizer(op_type: str) -> bool:
    return op_type in ("QuantizeLinear", "QGemm") or op_type.startswith("QLinear")


def exposed(model: onnx.ModelProto, names: Sequence[str]) -> ort.InferenceSession:
    """The model as it is written, with inner tensors among its outputs."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    known = {o.name for o in whole.graph.output}
    whole.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names if n not in known)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3  # it warns of outputs without a shape
    return ort.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])


def differing(got: Mapping[str, Any], want: Arrays) -> Counter[str]:
    found = Counter[str]()
    for name in want.keys() & got.keys():
        ours, theirs = np.asarray(got[name]), want[name]
        assert ours.shape == theirs.shape, f"{name}: shape {ours.shape}, onnxruntime's {theirs.shape}"
        found[name] = int((ours != theirs).sum())
    return found


def opened(model: onnx.ModelProto) -> tuple[jq.integer.Chip, list[str], ort.InferenceSession] | str:
    """Both sides and the names of the quantized tensors, or why there is nothing to compare."""
    try:
        chip = jq.integer.load(model, target="ort")
        names = [n.outputs[0] for n in chip.graph.nodes if is_quantizer(n.op_type)]
        return chip, names, exposed(model, names)
    except jq.Error as error:
        return f"target ort: {error}"
    except Exception as error:  # onnxruntime's have no base of their own
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        return f"onnxruntime: {error}"


def agreement(
    chip: jq.integer.Chip, names: Sequence[str], session: ort.InferenceSession, batches: Sequence[Arrays]
) -> dict[str, Any]:
    elements, differ, local, absent = 0, Counter[str](), Counter[str](), set[str]()
    for feed in batches:
        want = dict(zip(names, session.run(names, dict(feed)), strict=True))
        got = chip.codes(feed)
        absent |= want.keys() - got.keys()
        elements += sum(want[name].size for name in want.keys() & got.keys())
        differ.update(differing(got, want))
        local.update(differing(chip.codes(feed, want), want))
    return {
        "tensors": len(names) - len(absent),
        "elements": elements,
        "differ": differ.total(),
        "differ_locally": local.total(),
        "differ_in": {name: [differ[name], local[name]] for name in names if differ[name] or local[name]},
        "absent": sorted(absent),
        "floats": chip.floats(feed),
    }


def acceptance(model: onnx.ModelProto, target: str, feed: Arrays) -> str:
    """Empty if the target takes the model, else why not; some reasons only show when the model is traced."""
    try:
        jax.eval_shape(*jq.integer.load(model, target=target).trace(), feed)
    except jq.Error as error:
        return str(error)
    return ""


def compare(path: Path, arrays: Arrays, batch: int) -> dict[str, Any]:
    model = onnx.load(path)
    batches = list(feeds(arrays, shapes_of(model), batch))
    row: dict[str, Any] = {"model": path.name, "samples": min(len(a) for a in arrays.values())}
    print(f"{path.name}, {row['samples']} samples")
    sides = opened(model)
    if isinstance(sides, str):
        row["refused"] = sides
    else:
        try:
            row |= agreement(*sides, batches)
        except jq.Error as error:
            row["failed"] = str(error)
    show(row)
    row["targets"] = {target: acceptance(model, target, batches[0]) for target in TARGETS}
    for target, reason in row["targets"].items():
        print(f"  {target}: {f'refused: {reason}' if reason else 'accepted'}", flush=True)
    return row


def show(row: Mapping[str, Any]) -> None:
    """What was compared; tensors and nodes that are not as they should be, by name."""
    if "elements" in row:
        text = "  {tensors} tensors, {elements:,} elements, {differ} differ, {differ_locally} from onnxruntime's codes"
        print(text.format(**row), flush=True)
    for kind in row.keys() & {"refused", "failed"}:
        print(f"  {kind}: {row[kind]}", flush=True)
    for name, (differ, local) in row.get("differ_in", {}).items():
        print(f"    {name}: {differ} differ, {local} from onnxruntime's codes")
    for name in row.get("absent", ()):
        print(f"    {name}: no codes")
    for label, why in row.get("floats", {}).items():
        print(f"    in float: {label}: {why}")


def bundled(folder: Path, count: int) -> Iterator[tuple[Path, Arrays]]:
    images, _ = jq.zoo.calibration_set()
    for name in jq.zoo.models():
        path = folder / f"{name}.onnx"
        result = jq.quantize(jq.zoo.path(name), images[:64], "XINT8", output=path)
        yield path, {result.graph.inputs[0].name: images[64 : 64 + count]}


def given(entries: Sequence[str], count: int) -> Iterator[tuple[Path, Arrays]]:
    for entry in entries:
        path, data, prep = (*entry.split(":"), "", "")[:3]
        missing = [p for p in (path, data) if p and not Path(p).exists()]
        if missing:
            print(f"skipped: no file {missing[0]}")
            continue
        yield Path(path), read(data, prep, shapes_of(onnx.load(path)), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx[:DATA[:PREP]], quantized")
    parser.add_argument("--count", type=int, default=64, help="samples at most")
    parser.add_argument("--batch", type=int, default=8, help="samples at a time, where the model leaves it open")
    parser.add_argument("--out", type=Path, default=RESULTS / "integer_parity.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = given(args.models, args.count) if args.models else bundled(Path(folder), args.count)
        rows = [compare(path, arrays, args.batch) for path, arrays in cases]
    totals = {k: sum(row.get(k, 0) for row in rows) for k in ("elements", "differ", "differ_locally")}
    text = "{} models, {elements:,} elements, {differ} differ, {differ_locally} from onnxruntime's codes"
    print(text.format(len(rows), **totals))
    line = {"experiment": "integer_parity", "jax": jax.__version__, "onnxruntime": ort.__version__}
    with args.out.open("a") as file:
        file.write(json.dumps({**line, **totals, "rows": rows}) + "\n")
    sys.exit(int(any(row.get(k) for row in rows for k in ("differ", "absent", "failed"))))


if __name__ == "__main__":
    main()
