"""Random valid graphs of every operator, each beside onnxruntime: as they are, quantized, and in integers.

    python experiments/robustness/operators.py --seconds 170 [--seed 0] [--only 17] [--config XINT8]

A graph joins some of onnx's own cases of single operators, of which every operator has one: what a case reads becomes a
constant, an input of the graph, or elements of what another case made, behind a Sigmoid or not. Each graph that onnxruntime
runs, and runs alike twice, has to pass three stages: loaded and prepared, with the outputs of onnxruntime; quantized, to a
model that onnxruntime runs with its default optimizations; and in integers, with its codes. An exception other than a
`jq.Error` is a defect, and so is a `jq.Error` in the first stage, or one that is long. Counts refusals of later stages by
their words; appends a JSON line to `--out`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from experiments.common import RESULTS
from experiments.robustness.isolation import isolated, judged, own_cache
from experiments.robustness.stages import alike, imported

CONFIGS = ("XINT8", "A8W8", "INT8_CNN_DEFAULT", "A16W8")
PIECES = (2, 6)  # cases of a graph
LARGEST = 1 << 16  # elements of a case's arrays
SECONDS = 60  # of a stage: what is compiled here is no measure of time


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One of onnx's cases: a model, and values for its inputs."""

    name: str
    model: ModelProto
    inputs: Mapping[str, np.ndarray]


def cases() -> dict[int, list[Case]]:
    """The cases whose inputs and outputs are arrays of numbers, by opset."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_model_tests(kind="node")
    found: dict[int, list[Case]] = {}
    for case in loaded:
        opsets = {o.domain: o.version for o in case.model.opset_import}
        if set(opsets) != {""} or not case.data_sets:
            continue
        values = case.data_sets[0][0]
        names = [v.name for v in case.model.graph.input]
        if len(values) == len(names) and all(
            isinstance(v, np.ndarray) and v.dtype != object and v.size <= LARGEST for v in values
        ):
            made = Case(case.name, case.model, dict(zip(names, values, strict=True)))
            found.setdefault(opsets[""], []).append(made)
    return found


class _Graph:
    """Joins cases, one after the other."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[NodeProto] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.inputs: dict[str, np.ndarray] = {}
        self.floats: dict[str, int] = {}  # elements of the tensors of floats that were made
        self.read: set[str] = set()
        self.outputs: list[str] = []

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.arrays)}"
        self.arrays[name] = array
        return name

    def node(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attrs))
        return name

    def operand(self, array: np.ndarray) -> str:
        """A tensor in place of a case's input."""
        if array.dtype != np.float32:
            return self.constant(array) if self.rng.random() < 0.8 else self.input(array)
        fitting = [name for name, size in self.floats.items() if size >= array.size > 0]
        if fitting and self.rng.random() < 0.7:
            return self.elements(fitting[self.rng.integers(len(fitting))], array.shape)
        return self.constant(array) if self.rng.random() < 0.5 else self.input(array)

    def input(self, array: np.ndarray) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = array
        return name

    def elements(self, name: str, shape: tuple[int, ...]) -> str:
        """As many elements of a tensor as the shape has, in that shape."""
        self.read.add(name)
        count = int(np.prod(shape))
        if self.rng.random() < 0.5:
            name = self.node("Sigmoid", name)
        if count < self.floats.get(name, count + 1):
            name = self.node("Reshape", name, self.constant(np.array([-1])))
            name = self.node("Slice", name, self.constant(np.array([0])), self.constant(np.array([count])))
        return self.node("Reshape", name, self.constant(np.array(shape, np.int64)))

    def join(self, case: Case, sizes: Mapping[str, int]) -> None:
        """The case's nodes, with names of their own."""
        prefix = f"p{len(self.nodes)}_"
        own = {name: self.operand(array) for name, array in case.inputs.items()}
        own |= {t.name: self.constant(numpy_helper.to_array(t)) for t in case.model.graph.initializer}
        for node in case.model.graph.node:
            made = NodeProto()
            made.CopyFrom(node)
            made.name = prefix + (node.name or str(len(self.nodes)))
            for names in (made.input, made.output):
                names[:] = [own.get(n, n and prefix + n) for n in names]
            self.nodes.append(made)
        for value in case.model.graph.output:
            name = own.get(value.name, prefix + value.name)
            self.outputs.append(name)
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name in sizes:
                self.floats[name] = sizes[value.name]

    def model(self, opset: int) -> ModelProto:
        def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

        ends = dict.fromkeys(name for name in self.outputs if name not in self.read or self.rng.random() < 0.2)
        graph = helper.make_graph(
            self.nodes,
            "joined",
            [info(k, a) for k, a in self.inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in ends if name not in self.inputs and name not in self.arrays],
            [numpy_helper.from_array(a, k) for k, a in self.arrays.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        model.ir_version = max(8, helper.find_min_ir_version_for(list(model.opset_import)))
        return model


def drawn(
    known: Mapping[int, list[Case]], seed: int, index: int
) -> tuple[ModelProto, dict[str, np.ndarray], list[str]]:
    """A graph, values for its inputs, and the cases that it is made of; of nothing but seed and index."""
    rng = np.random.default_rng((seed, index))
    opsets = sorted(known)
    weights = np.array([len(known[o]) for o in opsets], float)
    opset = opsets[rng.choice(len(opsets), p=weights / weights.sum())]
    graph, used = _Graph(rng), []
    for _ in range(int(rng.integers(*PIECES, endpoint=True))):
        case = known[opset][rng.integers(len(known[opset]))]
        results = theirs(case.model, case.inputs)
        if results is not None:
            graph.join(case, {k: v.size for k, v in results.items() if isinstance(v, np.ndarray)})
            used.append(case.name)
    return graph.model(opset), graph.inputs, used


def theirs(model: ModelProto, inputs: Mapping[str, np.ndarray], whole: bool = False) -> dict[str, Any] | None:
    """The outputs of onnxruntime; None where it does not run the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if not whole:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return dict(zip([o.name for o in session.get_outputs()], session.run(None, dict(inputs)), strict=True))
    except Exception:  # it has no kernel, or refuses
        return None


def as_they_are(model: ModelProto, inputs: Mapping[str, np.ndarray]) -> object:
    """Loaded, and after all passes, with onnxruntime's outputs."""
    import jq

    want, again = (theirs(model, inputs) for _ in range(2))
    if want is None or again is None:
        return "not in onnxruntime"
    graph = jq.load(model)
    ours = [jq.trace(g)(g.params, inputs) for g in (graph, jq.prepare(graph))]
    for name, value in want.items():
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub" or not alike(again[name], value):
            continue  # it draws random numbers
        for which, found in zip(("loaded", "prepared"), ours, strict=True):
            assert alike(np.asarray(found[name]), value), f"{which}: output {name!r} is unlike onnxruntime's"
    return "alike"


def quantized(config: str, model: ModelProto, inputs: Mapping[str, np.ndarray]) -> object:
    """Quantized, run by onnxruntime as a user would, and in integers, code by code."""
    import jq
    from tests.flow import agrees, session_of

    if theirs(model, inputs) is None or not inputs:
        return "not in onnxruntime, or without inputs"
    options = jq.presets[config]
    made = jq.quantize(model, [dict(inputs)] * 2, options).model
    session_of(made, whole=True).run(None, dict(inputs))
    if any(n.op_type == "QuantizeLinear" for n in made.graph.node):
        agrees(made, inputs, exact=options.scale == "power_of_two")
        return "agrees"
    return "nothing is quantized"


def _quietly(call: Callable[[], object]) -> object:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return call()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this graph alone, in this process")
    parser.add_argument("--config", choices=CONFIGS, help="of the second stage; by default in turn")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "operators.jsonl")
    args = parser.parse_args()
    imported()
    known, stage, counts = cases(), list[tuple[int, str]](), collections.Counter[str]()
    defects, used, start, index = [], collections.Counter[str](), time.perf_counter(), args.only or 0
    refusals = collections.Counter[str]()
    with own_cache():
        while args.only is not None or time.perf_counter() - start < args.seconds:
            calls, stage = list[Callable[[], object]](), []
            for i in range(index, index + (1 if args.only is not None else 20)):
                model, inputs, names = drawn(known, args.seed, i)
                config = args.config or CONFIGS[i % len(CONFIGS)]
                calls += [
                    functools.partial(_quietly, functools.partial(as_they_are, model, inputs)),
                    functools.partial(_quietly, functools.partial(quantized, config, model, inputs)),
                ]
                stage += [(i, "float"), (i, config)]
                used.update(names)
            if args.only is not None:
                print([n.op_type for n in model.graph.node], *(judged(call) for call in calls), sep="\n")
                return
            for position, outcome in isolated(calls, args.jobs, SECONDS):
                number, name = stage[position]
                kind = outcome.text.partition("\t")[0]
                wrong = outcome.defect or (name == "float" and kind != "ok")
                counts["defect" if wrong else f"{name}: {kind}"] += 1
                if wrong:
                    defects.append({"graph": number, "stage": name, "outcome": outcome.text[:400]})
                    print(json.dumps(defects[-1]), flush=True)
                elif kind != "ok":
                    refusals[outcome.text[:200]] += 1
            index += 20
    print(f"{index} graphs of {len(used)} cases, seed {args.seed}: {dict(counts)}")
    for text, count in refusals.most_common(30):
        print(f"{count:4}  {text}")
    line = {"experiment": "operators", "seed": args.seed, "graphs": index, "cases": len(used), "outcomes": dict(counts)}
    with args.out.open("a") as file:
        file.write(json.dumps(line | {"defects": defects}) + "\n")
    sys.exit(bool(defects))


if __name__ == "__main__":
    main()
