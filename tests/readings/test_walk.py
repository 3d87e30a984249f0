"""One walk over nodes for all readings, and what they return of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from onnx import TensorProto

import jq
from jq.readings.tracing import trace
from jq.readings.walk import walk
from tests.passes.models import build, node, normal

ROOT = Path(jq.__file__).parent


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Loops and comprehensions, each with the function that it stands in."""
    for child in ast.iter_child_nodes(tree):
        name = child.name if isinstance(child, ast.FunctionDef) else inside
        if isinstance(child, (ast.For, ast.comprehension)):
            yield name, child if isinstance(child, ast.For) else tree
        yield from functions(child, name)


def test_one_loop_evaluates_nodes() -> None:
    """No other calls a `Reader`, a stage or a reading's step for node after node."""
    steps = {"step", "stage", "_rule", "_body", "_in_floats", "_in_integers"}
    walkers = set()
    for path in ROOT.rglob("*.py"):
        for name, loop in functions(ast.parse(path.read_text())):
            calls = (n.func for n in ast.walk(loop) if isinstance(n, ast.Call) and n.args)
            called = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
            reads = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name)} & {"node", "nodes"}
            if called & steps and reads:
                walkers.add((path.relative_to(ROOT).as_posix(), name))
    assert walkers == {("readings/walk.py", "walk")}
    users = {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if "readings.walk import" in p.read_text()}
    assert {"readings/tracing.py", "readings/integer/reading.py", "research/lanes.py"} <= users


def test_stages_follow_each_other_at_each_node() -> None:
    graph = jq.load(build([node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])]))
    seen = []

    def named(node, scope):
        seen.append((node.op_type, sorted(scope)))
        return {node.outputs[0]: scope[node.inputs[0]] + 1}

    def doubled(node, scope):
        return {node.outputs[0]: 2 * scope[node.outputs[0]]}

    given = {"x": 1}
    assert walk(graph.nodes, given, named, doubled) == {"x": 1, "a": 4, "y": 10} and given == {"x": 1}
    assert seen == [("Relu", ["x"]), ("Neg", ["a", "x"])]


class Halved:
    """A rounding of one tensor."""

    def __contains__(self, tensor):
        return tensor == "a"

    def fake_quant(self, name, value):
        return value / 2


def test_a_plan_stands_between_params_and_inputs() -> None:
    graph = jq.load(build([node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])], x=(2, 3)))
    x = normal(2, 3)
    fn = trace(graph)
    wanted = -np.maximum(x, 0)
    np.testing.assert_array_equal(fn(graph.params, {"x": x})["y"], wanted)
    np.testing.assert_array_equal(fn.quantized(graph.params, None, {"x": x})["y"], wanted)
    halved = jax.jit(lambda x: fn.quantized(graph.params, Halved(), {"x": x})["y"])(x)
    np.testing.assert_array_equal(halved, wanted / 2)


def test_the_nodes_in_floats_depend_on_the_inputs_alone() -> None:
    """Means of few integers have a table, those of many are computed in float32, whatever was traced before."""
    nodes = [
        node("DequantizeLinear", ["x", "s", "z"], ["real"]),
        node("GlobalAveragePool", ["real"], ["mean"], name="pool"),
        node("QuantizeLinear", ["mean", "s", "z"], ["y"]),
    ]
    arrays = {"s": np.float32(1), "z": np.int8(0)}
    model = build(nodes, arrays, x=("n", 2, "h", "w"), dtype=TensorProto.INT8)
    few, many = ({"x": np.ones((1, 2, size, size), np.int8)} for size in (3, 70))
    chip = jq.integer.load(model, "ort")
    assert chip.floats(few) == {} and list(chip.floats(many)) == ["pool"]
    chip(many)
    assert chip.floats(few) == {}
    logs = [chip.explain(feeds)[1].floats for feeds in (few, many, few)]
    assert [list(floats) for floats in logs] == [[], ["pool"], []]
