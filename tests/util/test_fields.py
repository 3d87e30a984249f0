"""Fields of a config: what a declaration refuses, in which words, and where it is shown."""

from __future__ import annotations

import dataclasses
import pydoc
from typing import Literal

import pytest

import jq
from jq.util.fields import check, declared, documented, field


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class Oven:
    """An oven."""

    mode: bool | Literal["grill"] = field(True, "whether it heats")
    degrees: float = field(180.0, "its heat", above=0, most=250)
    minutes: int | None = field(None, "its time", least=1)
    trays: tuple[str, ...] = field((), "its trays", among=("low", "middle", "high"))
    pairs: tuple[tuple[str, str], ...] = field((), "what goes together")

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": 1}, "mode needs True or False, or grill; got 1."),
        ({"mode": "gril"}, "mode needs True or False, or grill; got 'gril'. Did you mean 'grill'?"),
        ({"degrees": 0}, "degrees needs a number above 0, at most 250; got 0."),
        ({"degrees": float("nan")}, "degrees needs a number above 0, at most 250; got nan."),
        ({"degrees": True}, "degrees needs a number above 0, at most 250; got True."),
        ({"minutes": 0}, "minutes needs a whole number at least 1, or None; got 0."),
        ({"minutes": 1.5}, "minutes needs a whole number at least 1, or None; got 1.5."),
        ({"trays": ("hihg",)}, "trays needs a tuple of low, middle, high; got ('hihg',). Did you mean 'high'?"),
        ({"trays": ["high"]}, "trays needs a tuple of low, middle, high; got ['high']."),
        ({"pairs": (("a",),)}, "pairs needs a tuple of pairs of names; got (('a',),)."),
    ],
    ids=str,
)
def test_refuses(options, message):
    with pytest.raises(jq.ConfigError) as error:
        Oven(**options)
    assert str(error.value) == message


def test_takes_all_that_is_declared():
    Oven(mode="grill", degrees=250, minutes=1, trays=("low", "high"), pairs=(("a", "b"), ("c", "d")))


@pytest.mark.parametrize("config", [Oven, jq.QuantConfig])
def test_help_shows_each_field_with_what_it_may_hold(config):
    shown = pydoc.render_doc(config, renderer=pydoc.plaintext)
    for name, (kind, own) in declared(config).items():
        (line,) = [line for line in shown.splitlines() if f"- `{name}` = " in line]
        assert own.text in line and own.words(kind).replace("*", "\\*") in line
    assert declared(config).keys() == {f.name for f in dataclasses.fields(config)}
