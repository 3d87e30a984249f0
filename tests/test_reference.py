"""The reference: a page for every public name, a text for every one of them and for every field of every config."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import jq
from jq.cli import app
from jq.data.preprocessing import Preprocessing
from jq.util.fields import declared

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import reference  # noqa: E402  docs/ is no package

pytestmark = pytest.mark.every_case

PUBLIC = [name for name in jq.__all__ if not name.startswith("_")]
CONFIGS = (jq.QuantConfig, jq.integer.Target, Preprocessing, jq.Provider, jq.research.Experiment)


def members(module: Any) -> list[str]:
    return [n for n in getattr(module, "__all__", dir(module)) if not n.startswith("_")]


def test_every_public_name_has_its_page() -> None:
    listed = [name for names in reference.PAGES.values() for name in names] + list(reference.MODULES)
    assert sorted(listed) == sorted(PUBLIC)
    assert {f"api_{name}" for name in (*reference.PAGES, *reference.MODULES)} <= reference.pages().keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_text(name: str) -> None:
    value = getattr(jq, name)
    assert inspect.getdoc(value)
    if inspect.ismodule(value):
        for inner in members(value):
            made = getattr(value, inner)
            if inspect.isfunction(made) or inspect.isclass(made):
                assert made.__module__.startswith("jq") is False or made.__doc__, f"jq.{name}.{inner}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_every_field_of_every_config_has_a_text(config: Any) -> None:
    source, without = inspect.getsource(config), []
    for field in dataclasses.fields(config):
        if "declared" in field.metadata:
            continue
        line = re.search(rf"^    {field.name}: .*$", source, re.MULTILINE)
        above = re.search(rf"^    # .+\n(?:    # .+\n)*    {field.name}: ", source, re.MULTILINE)
        if line is None or ("  # " not in line[0] and above is None):
            without.append(field.name)
    assert without == []


def test_help_shows_every_option_of_the_config() -> None:
    text = inspect.getdoc(jq.QuantConfig) or ""
    fields = declared(jq.QuantConfig)
    assert len(fields) >= 39 and next(iter(fields)) in reference.SECTIONS and reference.SECTIONS.keys() <= fields.keys()
    for name, (kind, own) in fields.items():
        assert len(own.text.split()) > 1, name
        assert f"`{name}` =" in text and own.text in text, name
        assert f"### `{name}`" in reference.options()
        assert own.words(kind)


def test_every_command_and_preset_is_in_the_reference() -> None:
    commands, presets = reference.commands(), reference.presets()
    for command in app.registered_commands:
        name = (command.name or getattr(command.callback, "__name__", "")).replace("_", "-")
        assert f"### `jq-quant {name}`" in commands
    assert all(f"| `{name}` |" in presets for name in jq.presets)
    assert "\n| --- |" not in commands.replace("\n| --- | --- |", "")  # each argument has its meaning


def test_the_menu_reaches_every_page() -> None:
    menu = set(re.findall(r":? (?:[^:\n]*: )?([\w/]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    import build

    found = [ROOT / name for name in build.ELSEWHERE]
    found += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.py")]
    pages = {place.as_posix() for p in found if (place := build.placed(p)) is not None}
    pages |= {f"reference/{name}.md" for name in reference.pages()}
    assert pages == menu
