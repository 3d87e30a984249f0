"""Defects planted into small networks: is each healed, or reported? One row each, with the guard and forms and without.

    python experiments/robustness/planted.py

A Concat of unlike ranges, masks, an epsilon that several sums share, and a LayerNormalization in eight spellings, in XINT8
and A8W8. Healed: the worst part of the output keeps 12 dB. Exits with 1 if a case is neither healed nor reported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.readings.runtime import onnxruntime_reading

ENOUGH = 12.0  # dB
RNG = np.random.default_rng(0)
node = helper.make_node


def model_of(nodes: Sequence[onnx.NodeProto], arrays: dict[str, np.ndarray], shape: Sequence[int]) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", *shape))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    initializers = [numpy_helper.from_array(np.asarray(a, np.asarray(a).dtype), k) for k, a in arrays.items()]
    graph = helper.make_graph(list(nodes), "planted", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def weight(*shape: int, gain: float = 1.0) -> np.ndarray:
    return (RNG.standard_normal(shape) * gain / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def joined(ratio: float) -> onnx.ModelProto:
    pads = [1, 1, 1, 1]
    nodes = [node("Conv", ["x", "a"], ["u"], pads=pads), node("Conv", ["x", "b"], ["v"], pads=pads)]
    arrays = {"a": weight(4, 3, 3, 3), "b": weight(4, 3, 3, 3, gain=ratio)}
    return model_of([*nodes, node("Concat", ["u", "v"], ["y"], axis=1)], arrays, (3, 8, 8))


def masked(value: float) -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", f"w{k}"], [k]) for k in "qkv"]
    nodes += [node("Transpose", ["k"], ["t"], perm=[0, 2, 1]), node("MatMul", ["q", "t"], ["s"])]
    nodes += [
        node("Add", ["s", "mask"], ["m"]),
        node("Softmax", ["m"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["y"]),
    ]
    arrays = {f"w{k}": weight(8, 8) for k in "qkv"}
    return model_of(nodes, arrays | {"mask": np.float32([0, 0, 0, value, value, value]).reshape(1, 1, 6)}, (6, 8))


def divided(readers: int) -> onnx.ModelProto:
    """x / sqrt(mean x^2 + epsilon) of several products, which share their epsilon."""
    nodes, arrays, sums = [], {"eps": np.float32(1e-5), "two": np.float32(2)}, []
    for i in range(readers):
        arrays[f"w{i}"] = weight(16, 16)
        nodes += [node("MatMul", ["x", f"w{i}"], [f"h{i}"]), node("Pow", [f"h{i}", "two"], [f"s{i}"])]
        nodes += [node("ReduceMean", [f"s{i}"], [f"m{i}"], axes=[-1]), node("Add", [f"m{i}", "eps"], [f"e{i}"])]
        nodes += [node("Sqrt", [f"e{i}"], [f"r{i}"]), node("Div", [f"h{i}", f"r{i}"], [f"n{i}"])]
        sums.append(f"n{i}")
    return model_of([*nodes, node("Sum", sums, ["y"])], arrays, (16,))


def normalized(spelling: int) -> onnx.ModelProto:
    """LayerNormalization of a product, with another behind it, in one of eight spellings."""
    power = node("Mul", ["c", "c"], ["q"]) if spelling & 1 else node("Pow", ["c", "two"], ["q"])
    add = node("Add", ["eps", "v"] if spelling & 2 else ["v", "eps"], ["e"])
    divide = [node("Sqrt", ["e"], ["r"]), node("Div", ["c", "r"], ["n"])]
    if spelling & 4:
        divide = [node("Sqrt", ["e"], ["r"]), node("Reciprocal", ["r"], ["i"]), node("Mul", ["i", "c"], ["n"])]
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("ReduceMean", ["h"], ["m"], axes=[-1]), node("Sub", ["h", "m"], ["c"]), power,
        node("ReduceMean", ["q"], ["v"], axes=[-1]), add, *divide, node("Mul", ["n", "g"], ["s"]),
        node("Add", ["s", "b"], ["z"]), node("MatMul", ["z", "w2"], ["y"]),
    ]  # fmt: skip
    wide = weight(16, 16) * np.float32([1] * 15 + [10])  # an outlier channel
    arrays = {"w": wide, "w2": weight(16, 16), "g": np.float32(RNG.uniform(0.5, 2, 16)), "b": weight(16, 1).reshape(-1)}
    return model_of(nodes, arrays | {"eps": np.float32(1e-5), "two": np.float32(2)}, (16,))


def cases() -> Iterator[tuple[str, onnx.ModelProto, np.ndarray]]:
    images, words = RNG.standard_normal((16, 3, 8, 8)), RNG.standard_normal((64, 16))
    for ratio in (50, 1000, 30000):
        yield f"Concat of ranges 1 : {ratio}", joined(ratio), images.astype(np.float32)
    for value in (-1e4, -1e9, -3.4e38):
        yield f"mask of {value:g}", masked(value), RNG.standard_normal((16, 6, 8)).astype(np.float32)
    for readers in (1, 2, 3):
        yield f"epsilon of 1e-5 in {readers} sums", divided(readers), words.astype(np.float32)
    for spelling in range(8):
        yield f"LayerNormalization, spelling {spelling}", normalized(spelling), words.astype(np.float32)


def worst_part(x: np.ndarray, y: np.ndarray) -> float:
    """The SQNR of the half of the channels that keeps less, in dB."""
    halves = (slice(0, x.shape[1] // 2), slice(x.shape[1] // 2, None)) if x.ndim == 4 else (slice(None),)
    errors = [(np.square(x[:, h]).sum(), np.square(x[:, h] - y[:, h]).sum()) for h in halves]
    return min(float(10 * np.log10(p / max(e, 1e-30))) if np.isfinite(e) else -np.inf for p, e in errors)


def main() -> None:
    missed, count = 0, 0
    print(f"{'case':<34}{'config':<8}{'plain':>8}{'default':>9}  mended")
    for name, model, data in cases():
        for config in ("XINT8", "A8W8"):
            options, kept = jq.presets[config], list[float]()
            for own in (options.replace(guard=None, canonical=()), options):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = jq.quantize(model, data, own)
                (x,), (y,) = (onnxruntime_reading(m)({"x": data}).values() for m in (model, result.model))
                kept.append(worst_part(x, y))
            count, healed = count + 1, kept[1] >= ENOUGH
            missed += not healed and not result.guard
            verdict = "" if healed else "  NOT HEALED" + ("" if result.guard else ", NOT REPORTED")
            print(f"{name:<34}{config:<8}{kept[0]:>8.1f}{kept[1]:>9.1f}  {len(result.guard)}{verdict}", flush=True)
    print(f"{count - missed} of {count} cases healed or reported")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
