"""Docstrings for the site: examples become blocks of code, and the comment beside a field is its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> |\s*$).+\n?)*)+", re.MULTILINE)


def fenced(text: str) -> str:
    r"""A docstring with each run of examples in a fence.

    >>> fenced("Sum.\n\n>>> 1 + 1\n2")
    'Sum.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    text = re.sub(r"  # doctest: .*", "", text)
    return _EXAMPLE.sub(
        lambda example: f"```pycon\n{example[0].rstrip()}\n```" + "\n" * example[0].endswith("\n"), text
    )


class Doctests(griffe.Extension):
    """Fence the examples of every docstring that is loaded, and find those of fields."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **given: Any) -> None:
        """Take the comment behind a dataclass's field as its docstring."""
        if attr.docstring is None and attr.lineno is not None and isinstance(attr.filepath, Path):
            lines = attr.filepath.read_text().splitlines()[: attr.lineno]
            code, mark, comment = lines[-1].partition("  # ")
            if not mark and lines[-2].startswith("    # "):  # the comment stands above a field that is long
                code, comment = ":", lines[-2].removeprefix("    # ")
            if comment and ":" in code:
                attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)

    def on_object(self, *, obj: griffe.Object, **given: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
