"""The table that rules of `lint` are in, and the words that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from jq.arithmetic.formats import Integer
from jq.config import QuantConfig
from jq.graph import Graph, Node
from jq.util.mapped import one_by_one

Key = TypeVar("Key", bound=Hashable)
Severity = Literal["error", "warning", "note"]
Check = Callable[[Graph, QuantConfig], Iterable["Found"]]
_SHOWN = 5  # names in one message


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to know before quantizing.

    >>> print(Finding("few-convs", "warning", "graph", "one Conv"))
    warning: graph: one Conv [few-convs]
    """

    rule: str  # kebab-case id
    severity: Severity  # error: will fail or be wrong; warning: slow or inaccurate; note: good to know
    where: str  # the first node or tensor concerned
    message: str  # what was found, what was expected, what to do

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.message} [{self.rule}]"


@dataclasses.dataclass(frozen=True)
class Rule:
    """A check with its name, the usual severity of its findings, and the graph that it reads."""

    name: str
    severity: Severity
    check: Check
    loaded: bool  # look at the graph as loaded; otherwise at the one that is quantized, without the NPU's rewrites
    decomposed: bool  # the graph as simplified, before canonical forms


class Found(NamedTuple):
    """A finding before it has its rule's name and severity."""

    where: str
    message: str
    severity: Severity | None = None  # if not the rule's


def rule(
    table: list[Rule], name: str, severity: Severity = "warning", *, loaded: bool = False, decomposed: bool = False
) -> Callable[[Check], Check]:
    """Append the decorated check to a table."""

    def add(check: Check) -> Check:
        table.append(Rule(name, severity, check, loaded, decomposed))
        return check

    return add


def grouped(nodes: Iterable[Node], key: Callable[[Node], Key]) -> dict[Key, list[Node]]:
    """Nodes by key, in the order of the first of each."""
    groups: dict[Key, list[Node]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return groups


def listed(items: Iterable[str], separator: str = ", ") -> str:
    """At most five of the items, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "node"), counted(2000, "node")
    ('1 node', '2,000 nodes')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def types(nodes: Iterable[Node]) -> Iterable[str]:
    """The operators of nodes, each once."""
    return dict.fromkeys(n.qualified for n in nodes)


def bits_of(format: object) -> int:
    """The bits of an integer format; 0 for other formats."""
    return format.bits if isinstance(format, Integer) else 0


def float_params(graph: Graph) -> Iterator[tuple[str, np.ndarray]]:
    """The float weights by name, as types that numpy computes with."""
    for name, array in one_by_one(graph.params):
        if array.dtype.kind == "f":
            yield name, array
        elif array.dtype.name == "bfloat16":
            yield name, array.astype(np.float32)
