"""The words of the code: docstrings name their result, names say what they hold, and no two classes share one."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import jq

ROOT = Path(jq.__file__).parent
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


@pytest.mark.parametrize("path", TREES)
def test_a_docstring_begins_with_its_result_and_no_name_is_found(path: str) -> None:
    for node in ast.walk(TREES[path]):
        if isinstance(node, DOCUMENTED):
            first = (ast.get_docstring(node) or "").split(" ")[0]
            assert first not in ("What", "Of", "That"), f"line {getattr(node, 'lineno', 1)}"
        name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        assert name != "found", f"line {getattr(node, 'lineno', 1)}"


def test_no_two_classes_share_a_name() -> None:
    names = Counter(n.name for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
