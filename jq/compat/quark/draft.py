"""A `QuantConfig` under construction from Quark's options, and the values that these hold."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from jq.config import QuantConfig
from jq.errors import ConfigError, suggest
from jq.graph import Graph
from jq.passes.prepare import prepare
from jq.plan.selection import literal


@dataclasses.dataclass
class Draft:
    """A `QuantConfig` under construction, with the other settings of a Quark run."""

    base: QuantConfig
    graph: Graph
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)  # where we do something other than the option says
    opset: int | None = None
    samples: int | None = None
    random: bool = False
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # of random data
    ranges: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)  # of random data
    spill: str | os.PathLike[str] | None = None
    ranges_file: str | None = None  # where calibration is kept
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Quark's own parameters of fine-tuning

    def __getitem__(self, field: str) -> Any:
        return self.changes.get(field, getattr(self.base, field))

    def __setitem__(self, field: str, value: Any) -> None:
        self.changes[field] = value

    @functools.cached_property
    def cleaned(self) -> Graph:
        """The graph that is calibrated, without the NPU's rewrites."""
        return prepare(self.graph)

    def exclude(self, nodes: list[str]) -> None:
        """Exclude nodes by name."""
        self["exclude"] = (*self["exclude"], *(literal(name) for name in nodes))

    def override(self, pattern: str, **options: Any) -> None:
        """Add overrides for a node or an operator to those it already has."""
        overrides = {p: dict(o) for p, o in dict(self.changes.get("overrides", {})).items()}
        overrides[pattern] = {**overrides.get(pattern, {}), **options}
        self["overrides"] = overrides


@dataclasses.dataclass(frozen=True)
class Option:
    """An option's effect, in words and as a function of the draft, the option's name and its value."""

    effect: str
    apply: Callable[[Draft, str, Any], None]


def apply(table: Mapping[str, Option], given: Mapping[str, Any], draft: Draft, where: str) -> None:
    """Apply the given options to the draft, in the order of the table; an unknown one is a ConfigError."""
    for name in given:
        if name not in table:
            raise ConfigError(f"{where} has no option {name!r}.{suggest(str(name), table)}")
    for name, option in table.items():
        if name in given:
            option.apply(draft, name, given[name])


def flag(name: str, value: Any) -> bool:
    """A switch."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; expected True or False")
    return value


def count(name: str, value: Any) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} is {value!r}; expected a whole number, 0 or more")
    return value


def number(name: str, value: Any) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is {value!r}; expected a number")
    return value


def numbers(name: str, value: Any) -> tuple[float, ...]:
    """A list of numbers, as a tuple."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} is {value!r}; expected a list of numbers")
    return tuple(number(name, v) for v in value)


def word(name: str, value: Any) -> str:
    """A word."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; expected a string")
    return value


def names(name: str, value: Any) -> tuple[str, ...]:
    """The names that an option holds, as a tuple; None holds none."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{name} is {value!r}; expected a list of names")
    return tuple(value)


def matching(option: str, given: Any, graph: Graph) -> list[str]:
    """Return the matching node names; a pattern that begins with ^ is a regular expression, as in Quark."""
    labels: list[str] = []
    for name in names(option, given):
        if not name.startswith("^"):
            labels.append(name)
            continue
        try:
            matching = [n.label for n in graph.nodes if re.search(name, n.label)]
        except re.error as error:
            raise ConfigError(f"{option}: {name!r} is not a regular expression: {error}") from error
        if not matching:
            raise ConfigError(f"{option}: {name!r} matches no node")
        labels += matching
    return labels


def parse_subgraphs_list(exclude_subgraphs: str) -> list[tuple[list[str], list[str]]]:
    """Return the subgraphs that a text lists: the first and the last nodes of each in brackets, `;` between them.

    >>> parse_subgraphs_list("[a, b], [c]; [d], [e]")
    [(['a', 'b'], ['c']), (['d'], ['e'])]
    """
    subgraphs = []
    for part in exclude_subgraphs.split(";"):
        ends = [[name.strip() for name in names.split(",")] for names in re.findall(r"\[(.*?)\]", part)]
        if len(ends) != 2:
            raise ConfigError(
                f"exclude_subgraphs: {part.strip()!r} is not a pair of the form [first nodes], [last nodes]"
            )
        subgraphs.append((ends[0], ends[1]))
    return subgraphs
