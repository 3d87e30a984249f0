"""The words of code and pages: docstrings name their result, names say what they hold, and prose is idiomatic."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import jq
from jq.cli import app
from jq.util.fields import declared

pytestmark = pytest.mark.every_case

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


# Phrases that are correct word by word, and that nobody writes.
UNIDIOMATIC = re.compile(
    r"\bas it is\b|\bso many\b|\bgo(?:es)? on\b|\bhold against\b|\bat hand\b|\bno one here\b", re.IGNORECASE
)
PAGES = [ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").rglob("*.md")), ROOT.parent / "notebooks/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT.parent).as_posix())
def test_pages_are_idiomatic(page: Path) -> None:
    assert [match[0] for match in UNIDIOMATIC.finditer(page.read_text())] == []


@pytest.mark.parametrize("name", [name for name in jq.__all__ if callable(getattr(jq, name))])
def test_docstrings_of_public_names_are_idiomatic(name: str) -> None:
    value = getattr(jq, name)
    made = [value, *(m for n, m in vars(value).items() if not n.startswith("_"))] if inspect.isclass(value) else [value]
    assert [match[0] for m in made for match in UNIDIOMATIC.finditer(inspect.getdoc(m) or "")] == []


def test_texts_of_options_and_commands_are_idiomatic_and_name_no_thing_first() -> None:
    texts = {name: own.text for name, (_, own) in declared(jq.QuantConfig).items()}
    for command in app.registered_commands:
        texts[str(command.name or command.callback)] = inspect.getdoc(command.callback) or ""
    wrong = {name: text for name, text in texts.items() if UNIDIOMATIC.search(text) or text.lower().startswith("of ")}
    assert wrong == {}
