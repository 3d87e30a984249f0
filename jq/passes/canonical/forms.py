"""Forms: operators that regions are recognised as, and the sweep that puts them in their places."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jq.errors import ConfigError
from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.npu.rewrites.edits import Applies, node_names, substitute
from jq.passes.canonical.regions import MEANING, Region, regions
from jq.passes.opset import keeps, with_opset

Names = Callable[[str], str]  # the name for a new tensor of a region
Written = tuple[Sequence[Node], Mapping[str, np.ndarray]]  # the nodes in place of a region's, and their arrays


@dataclasses.dataclass(frozen=True)
class CanonicalForm:
    """An operator that regions may compute."""

    since: int  # the opset that has it
    recognise: Callable[[Region], Callable[[Names], Written] | None]  # how a region is written in it, if it is one
    also: Collection[tuple[str, ...]] = ()  # operators of regions that are as good


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """A region that is a form."""

    form: str
    since: int  # the opset that has it
    region: Region
    written: Callable[[Names], Written]


def recognised(graph: Graph, forms: Mapping[str, CanonicalForm], applies: Applies) -> Iterator[Match]:
    """The regions that compute one of the forms in other words: from the last end on, of each the largest.

    The form has the label of the end, so that an option for that node is one for the form: only inner nodes are asked for.
    """
    order = {o: i for i, n in enumerate(graph.nodes) for o in n.outputs}
    done = set[Node]()
    for end in reversed(graph.nodes):
        if end in done or end.op_type not in MEANING:
            continue
        for region in reversed(list(regions(graph, end, order))):
            if not done.isdisjoint(region.nodes) or not all(map(applies, region.nodes[:-1])):
                continue
            if (match := _match(region, forms)) is not None:
                done.update(region.nodes)
                if not _is_as_good(match, forms[match.form]):
                    yield match
                break


def _match(region: Region, forms: Mapping[str, CanonicalForm]) -> Match | None:
    tried = ((name, form.recognise(region)) for name, form in forms.items())
    return next(
        (Match(name, forms[name].since, region, written) for name, written in tried if written is not None), None
    )


def _is_as_good(match: Match, form: CanonicalForm) -> bool:
    """Whether a region has the form's own operators already, or ones that are as good."""
    nodes, _ = match.written(lambda name: name)
    spelled = Counter(n.op_type for n in match.region.nodes)
    return any(spelled == Counter(words) for words in ([n.op_type for n in nodes], *form.also))


def put(graph: Graph, find: Callable[[Graph], Iterable[Match]]) -> tuple[Graph, tuple[Match, ...]]:
    """The graph with each region that is recognised in its form, and what was recognised.

    The opset is raised to the newest that a form needs. If the graph cannot reach it, the region stays decomposed.
    """
    matches = tuple(find(graph))
    while matches:
        opset, newest = graph.opset(), max(m.since for m in matches)
        gone = {n for m in matches for n in m.region.nodes}
        if newest <= opset or all(keeps(n, opset, newest) for n in graph.walk() if n not in gone):
            opsets = {**graph.opsets, "": max(opset, newest)}
            return _written(graph, matches).replace(opsets=opsets), matches
        try:
            graph = with_opset(graph, newest)
            matches = tuple(find(graph))
        except ConfigError:
            matches = tuple(m for m in matches if m.since < newest)
    return graph, ()


def _written(graph: Graph, matches: Sequence[Match]) -> Graph:
    taken, named = set(graph.tensors), node_names(graph)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for match in matches:
        end = match.region.end
        new, held = match.written(functools.partial(_name, f"{end.outputs[0]}_", taken))
        nodes |= dict.fromkeys(match.region.nodes, ())
        nodes[end] = [n if n.name == end.name else n.replace(name=fresh(n.outputs[0], named)) for n in new]
        arrays |= held
    return substitute(graph, nodes, arrays)


def _name(prefix: str, taken: set[str], part: str) -> str:
    return fresh(prefix + part, taken)
