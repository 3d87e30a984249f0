"""The time that each stage takes of graphs of odd forms, by their size: where it grows with the square, a file can be a bomb.

    python experiments/robustness/growth.py [--size 250] [--form concat] [--stage lint]

A form is a graph of so many nodes that no network has in such numbers: one chain, many outputs, one tensor that all read, wide
joins, branches, quantizers behind quantizers. Each stage runs on it at a size and at four times that. Prints what takes more
than a second and grows with a power above 1.5 of the size, and all of it with `--all`; exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

LONGEST = 10  # seconds of a stage
STEEP = 1.5
SHORT = 1.0  # seconds, below which growth is not judged

node = helper.make_node


def model(
    nodes: list[NodeProto], outputs: list[str], arrays: dict[str, np.ndarray] | None = None, inputs: int = 1
) -> ModelProto:
    names = ["x"] if inputs == 1 else [f"x{i}" for i in range(inputs)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4, 8]) for n in names],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [numpy_helper.from_array(a, k) for k, a in (arrays or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def chain(*operators: str, **arrays: np.ndarray) -> Callable[[int], ModelProto]:
    """Nodes one behind the other; those of two operands take the arrays."""

    def form(n: int) -> ModelProto:
        names = ["x", *(f"t{i}" for i in range(n))]
        nodes = [
            node(operators[i % len(operators)], [names[i], *arrays], [names[i + 1]], name="same") for i in range(n)
        ]
        return model(nodes, [names[-1]], arrays)

    return form


def outputs(operator: str) -> Callable[[int], ModelProto]:
    def form(n: int) -> ModelProto:
        return model([node(operator, ["x"], [f"t{i}"]) for i in range(n)], [f"t{i}" for i in range(n)])

    return form


def fan(operator: str, join: str, **attrs: Any) -> Callable[[int], ModelProto]:
    """One tensor that all read, and one node that reads all."""

    def form(n: int) -> ModelProto:
        nodes = [node(operator, ["x"], [f"t{i}"]) for i in range(n)]
        return model([*nodes, node(join, [f"t{i}" for i in range(n)], ["y"], **attrs)], ["y"])

    return form


def residual(n: int) -> ModelProto:
    """Sums, each of two tensors that all those before went into."""
    names = ["x", *(f"t{i}" for i in range(n))]
    nodes = [node("Add", [names[i], names[max(0, i - 1)]], [names[i + 1]]) for i in range(n)]
    return model(nodes, [names[-1]])


def dense(n: int) -> ModelProto:
    """Each Concat reads the one before and a new tensor: DenseNet without end."""
    nodes, last = [], "x"
    for i in range(n):
        nodes += [node("Sigmoid", ["x"], [f"s{i}"]), node("Concat", [last, f"s{i}"], [f"t{i}"], axis=1)]
        last = f"t{i}"
    return model(nodes, [last])


def quantizers(n: int) -> ModelProto:
    nodes, last = [], "x"
    for i in range(n):
        nodes += [
            node("QuantizeLinear", [last, "s", "z"], [f"q{i}"]),
            node("DequantizeLinear", [f"q{i}", "s", "z"], [f"d{i}"]),
        ]
        last = f"d{i}"
    return model([*nodes, node("Relu", [last], ["y"])], ["y"], {"s": np.float32(0.5), "z": np.int8(0)})


def quantized(n: int) -> ModelProto:
    nodes, last = [], "x"
    for i in range(n):
        nodes += [
            node("Relu", [last], [f"r{i}"]), node("QuantizeLinear", [f"r{i}", "s", "z"], [f"q{i}"]),
            node("DequantizeLinear", [f"q{i}", "s", "z"], [f"d{i}"]),
        ]  # fmt: skip
        last = f"d{i}"
    return model(nodes, [last], {"s": np.float32(0.5), "z": np.int8(0)})


def branches(n: int) -> ModelProto:
    def branch(name: str, operator: str) -> GraphProto:
        value = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph([node(operator, ["x"], [name])], "b", [], [value])

    nodes = [
        node("If", ["c"], [f"t{i}"], then_branch=branch(f"a{i}", "Relu"), else_branch=branch(f"b{i}", "Neg"))
        for i in range(n)
    ]
    return model([*nodes, node("Sum", [f"t{i}" for i in range(n)], ["y"])], ["y"], {"c": np.bool_(True)})


def layers(n: int) -> ModelProto:
    weights = {f"w{i}": np.full((8, 8), 0.125, np.float32) for i in range(n)}
    names = ["x", *(f"t{i}" for i in range(n))]
    nodes = [node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(n)]
    return model(nodes, [names[-1]], weights)


def heads(n: int) -> ModelProto:
    """Layers side by side, each behind a Sigmoid an output."""
    weights = {f"w{i}": np.full((8, 4), 0.3 + i, np.float32) for i in range(n)}
    nodes = [
        m for i in range(n) for m in (node("MatMul", ["x", f"w{i}"], [f"h{i}"]), node("Sigmoid", [f"h{i}"], [f"t{i}"]))
    ]
    return model(nodes, [f"t{i}" for i in range(n)], weights)


def shapes(n: int) -> ModelProto:
    """Arithmetic of shapes, as exporters write it."""
    nodes, last = [], "x"
    for i in range(n):
        nodes += [node("Shape", [last], [f"s{i}"]), node("Reshape", [last, f"s{i}"], [f"t{i}"])]
        last = f"t{i}"
    return model(nodes, [last])


def constants(n: int) -> ModelProto:
    nodes = [node("Constant", [], [f"c{i}"], value_float=float(i)) for i in range(n)]
    return model([*nodes, node("Sum", ["x", *(f"c{i}" for i in range(n))], ["y"])], ["y"])


def inputs(n: int) -> ModelProto:
    return model([node("Sum", [f"x{i}" for i in range(n)], ["y"])], ["y"], inputs=n)


FORMS: dict[str, Callable[[int], ModelProto]] = {
    "identities": chain("Identity"), "relus": chain("Relu"), "sums": chain("Add", c=np.ones((1, 4, 8), np.float32)),
    "products": chain("Mul", c=np.full((1, 4, 8), 1.5, np.float32)), "mixed": chain("Relu", "Sigmoid", "Exp", "Neg"),
    "outputs": outputs("Identity"), "sigmoids": outputs("Sigmoid"), "fan": fan("Relu", "Sum"),
    "concat": fan("Sigmoid", "Concat", axis=1), "residual": residual, "dense": dense, "quantizers": quantizers,
    "quantized": quantized, "branches": branches, "layers": layers, "heads": heads, "shapes": shapes, "constants": constants,
    "inputs": inputs,
}  # fmt: skip


def stages() -> dict[str, Callable[[ModelProto], object]]:
    import jq
    from jq.npu.placing import place
    from jq.recovery.equalization.groups import find_groups

    return {
        "load": jq.load,
        "prepare": lambda m: jq.prepare(jq.load(m), "XINT8"),
        "lint": lambda m: jq.lint(m, "XINT8"),
        "inspect": lambda m: str(jq.inspect(jq.load(m))),
        "weights": lambda m: jq.quantize(m, None, jq.presets["A8W8"].replace(weights_only=True, cle=False, guard=None)),
        "groups": lambda m: find_groups(jq.prepare(jq.load(m), "XINT8")),
        "dynamic": lambda m: jq.quantize(m, None, "UINT8_DYNAMIC_QUANT"),
        "convert": lambda m: jq.convert(m, to="bf16", form="native"),
        "split": lambda m: jq.split_quantizers(jq.load(m)),
        "integer": lambda m: jq.integer.load(m, target="ort"),
        "place": lambda m: place(jq.load(m), "X2"),
    }


class _Late(BaseException):
    pass


def seconds_of(stage: Callable[[ModelProto], object], made: ModelProto) -> tuple[float, str]:
    import jq

    def late(*_: object) -> None:
        raise _Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(4 * LONGEST)  # of wall time: other processes may run
    start, said = time.process_time(), "ok"
    try:
        stage(made)
    except jq.Error as error:
        said = f"{type(error).__name__}: {error}"[:80]
    except _Late:
        said = "no answer"
    except Exception as error:
        said = f"DEFECT: {type(error).__name__}: {error}"[:120]
    finally:
        signal.alarm(0)
    return time.process_time() - start, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=250)
    parser.add_argument("--form", action="append", choices=[*FORMS], default=[])
    parser.add_argument("--stage", action="append", default=[])
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    steep = 0
    for form in args.form or FORMS:
        small, large = FORMS[form](args.size), FORMS[form](4 * args.size)
        for name, stage in stages().items():
            if args.stage and name not in args.stage:
                continue
            seconds_of(stage, FORMS[form](2))  # what is imported and compiled
            (before, _), (after, said) = (seconds_of(stage, made) for made in (small, large))
            power = math.log(max(after, 1e-3) / max(before, 1e-3), 4)
            bad = said.startswith(("DEFECT", "no answer")) or after > LONGEST or (after > SHORT and power > STEEP)
            steep += bad
            if bad or args.all:
                print(f"{form:11} {name:8} {before:6.2f} s {after:6.2f} s, power {power:4.1f}  {said}", flush=True)
    print(f"{steep} steep")
    sys.exit(steep > 0)


if __name__ == "__main__":
    main()
