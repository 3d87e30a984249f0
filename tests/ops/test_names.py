"""The architecture's first promise: nothing but the op table, and passes that match patterns, knows an operator by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import jq

ROOT = Path(jq.__file__).parent
OPERATORS = {s.name for s in onnx.defs.get_all_schemas_with_history()} | {"FixNeuron", "QGemm", "QLinearAdd"}
MAY = ("ops", "passes", "npu/rewrites", "compat")  # packages whose subject operators are
# Others, each with its reason.
NAMED = {
    "graph/read.py": "constants are nodes in the file, and arrays in the graph",
    "graph/quantizers.py": "the home of what a quantizer is",
    "npu/facts.py": "the home of what the chips have",
    "npu/shifts.py": "the chip's rules are by operator",
    "readings/integer/recognition.py": "dialects of quantized models",
    "exchange/qoperator.py": "onnxruntime's operators, one for each of ONNX's",
    "evidence/lint_npu.py": "advice is by operator",
    "recovery/equalization/groups.py": "through which operators factors pass",
    "recovery/equalization/quark.py": "the same, in Quark's choice",
}


def strings(tree: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)} & OPERATORS


def reads_op_type(tree: ast.AST) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "op_type" for n in ast.walk(tree))


def named(tree: ast.Module) -> Iterator[str]:
    """Operators that a module compares with a node's, and those of its tables of two or more."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and reads_op_type(node):
            yield from strings(node)
        if isinstance(node, ast.Match) and reads_op_type(node.subject):
            yield from (name for case in node.cases for name in strings(case.pattern))
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            names = strings(statement.value)
            if len(names) > 1:
                yield from names


@pytest.mark.every_case
@pytest.mark.parametrize("path", [str(p.relative_to(ROOT)) for p in sorted(ROOT.rglob("*.py"))])
def test_a_module_names_no_operator(path):
    found = set(named(ast.parse((ROOT / path).read_text())))
    if not path.startswith(MAY):
        assert bool(found) is (path in NAMED), found


def test_they_are_few():
    assert len(NAMED) < 10


def test_the_test_sees_names():
    for text in ('x.op_type == "Conv"', 'x.op_type in {"Conv"}', 'T = ("Conv", "Gemm")', "T = {'Conv': 1, 'Gemm': 2}"):
        assert set(named(ast.parse(text)))
    assert set(named(ast.parse('match n.op_type:\n    case "Conv" | "Gemm":\n        pass')))
