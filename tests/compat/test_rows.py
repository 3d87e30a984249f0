"""The page of Quark's options: a row for each one in the list of Quark 0.13's, and none that says nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jq.compat import quark
from jq.compat.quark import ABSENT
from jq.compat.quark.quantization.config import algorithm
from jq.compat.quark.rows import NAMES, TOOLS, rows
from jq.errors import ConfigError

pytestmark = pytest.mark.every_case

LISTED = json.loads((Path(__file__).parent / "quark_options.json").read_text())
ROWS = rows()
TITLES = {
    "QuantizationConfig": "Fields of `QuantizationConfig`",
    "extra_options": "`extra_options`",
    "QConfig": "`QConfig`, `QLayerConfig` and the specs",
    "CLEConfig": "`CLEConfig`",
    "AdaRoundConfig": "`AdaRoundConfig` and `AdaQuantConfig`",
    "AdaQuantConfig": "`AdaRoundConfig` and `AdaQuantConfig`",
    "AutoMixprecisionConfig": "`AutoMixprecisionConfig`",
}


@pytest.mark.parametrize("place", TITLES)
def test_every_option_has_a_row(place: str) -> None:
    assert [name for name in LISTED[place] if not ROWS[TITLES[place]].get(name)] == []


def test_no_row_is_empty_or_for_what_is_not_there() -> None:
    assert [name for table in ROWS.values() for name, text in table.items() if len(text.split()) < 2] == []
    assert TOOLS.keys() == {*LISTED["tools"]}


@pytest.mark.parametrize("name", ["SmoothQuantConfig", "GPTQConfig", "QuarotConfig"])
def test_algorithms_that_are_refused_have_quarks_parameters(name: str) -> None:
    assert [f.name for f in dataclasses.fields(getattr(algorithm, name))] == LISTED[name]


@pytest.mark.parametrize("name", LISTED["names"])
def test_every_public_name_is_here_or_says_what_to_take(name: str) -> None:
    if name in ("_COP_DOMAIN", "_COP_VERSION"):  # of the library of operators
        return
    if name in ABSENT:
        with pytest.raises(ConfigError, match=name):
            getattr(quark, name)
        assert NAMES[name]
    else:
        assert getattr(quark, name) is not None


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_are_here_are_those_that_the_page_says(tool: str) -> None:
    there = Path(quark.__file__).parent / "tools"
    exists = (there / f"{tool}.py").exists() or (there / tool / "__main__.py").exists()
    assert exists == (not TOOLS[tool].startswith("not here"))
