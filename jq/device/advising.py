"""Proposals of what to change so that more of a quantized graph runs on the NPU, each with the places after it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from jq.device.remade import REMADE, with_listed
from jq.graph import Graph
from jq.npu.changes import CHANGES, Change, in_format
from jq.npu.facts import BACKEND_FORMATS, CHIPS, NPU_FORMATS, Evidence
from jq.npu.placing import Placed, place
from jq.npu.placing import names as named
from jq.npu.units import is_quantizer
from jq.ops.kinds import is_hard_sigmoid, is_layer


@dataclasses.dataclass(frozen=True, eq=False)
class Proposal:
    """A change, how sure it is that it helps, and where nodes run after it."""

    name: str
    what: str
    evidence: Evidence
    after: Placed


def proposals(graph: Graph, chip: str, backend: str, placed: Placed) -> Iterator[Proposal]:
    """Yield the changes after which less is on the CPU, or the same in fewer subgraphs; none where nothing is broken."""
    if not placed.broken:
        return
    changes = list(_changes(graph, backend, placed))
    best = min((p.after for p in changes), key=_cost, default=placed)
    yield from changes
    yield from _quantizers(graph, backend, placed)
    yield from _formats(graph, backend, placed, best)
    yield from _smaller(graph, backend, placed)
    yield from _backends(graph, chip, backend, placed, best)


def unmoved(placed: Placed, proposed: Sequence[Proposal]) -> dict[str, int]:
    """Return the operators that no proposal brings to the NPU, with the number of their nodes on the CPU.

    Nodes that are float by choice are not among them.
    """

    if not placed.subgraphs:
        return {}

    def left(placed: Placed) -> Counter[str]:
        units = (unit for unit, rule in placed.broken if rule != "not-quantized")
        return Counter(n.qualified for unit in units for n in unit.nodes)

    now, after = left(placed), [left(p.after) for p in proposed]
    return {op: count for op, count in now.items() if all(counts[op] >= count for counts in after)}


def _changes(graph: Graph, backend: str, placed: Placed) -> Iterator[Proposal]:
    """Each change that helps alone, then all that help together."""
    alone: list[Proposal] = []
    for change in _suiting(backend, placed.format):
        after = place(change.apply(graph), backend)
        if _helps(after, placed):
            alone.append(Proposal(change.name, change.what, change.evidence, after))
    yield from alone
    together = _together(Proposal("", "apply these together", "log", placed), graph, backend, placed.format)
    if together.name.count(" + ") and all(_helps(together.after, one.after) for one in alone):
        told = {one.name for one in alone}
        yield dataclasses.replace(together, what="; ".join(_words(together, backend, placed.format, told)))


def _suiting(backend: str, format: str) -> Iterator[Change]:
    return (c for c in (*CHANGES, *REMADE) if c.suits(backend, format))


def _together(start: Proposal, graph: Graph, backend: str, format: str) -> Proposal:
    """A proposal with each change behind it that helps then: one may help behind another alone."""
    for change in _suiting(backend, format):
        made = change.apply(graph)
        after = place(made, backend, format)
        if _helps(after, start.after):
            evidence: Evidence = "guess" if "guess" in (change.evidence, start.evidence) else "log"
            name = f"{start.name} + {change.name}" if start.name else change.name
            graph, start = made, Proposal(name, start.what, evidence, after)
    return start


def _words(made: Proposal, backend: str, format: str, told: Collection[str] = ()) -> Iterator[str]:
    """Yield the words of a proposal, and those of its changes that were not told yet."""
    names = made.name.split(" + ")
    yield made.what
    yield from (f"{c.name}: {c.what}" for c in _suiting(backend, format) if c.name in names and c.name not in told)


def _quantizers(graph: Graph, backend: str, placed: Placed) -> Iterator[Proposal]:
    more, ops = with_listed(graph, placed.format)
    if ops and _helps(after := place(more, backend), placed) and after.subgraphs <= placed.subgraphs:
        what = f"also quantize {', '.join(ops)}, which {placed.format} lists: add them to op_types in the config, or set it to all"
        yield Proposal("quantize_listed", what, "documented", after)


def _formats(graph: Graph, backend: str, placed: Placed, best: Placed) -> Iterator[Proposal]:
    listed = (*NPU_FORMATS["HardSigmoid"], "XINT8")  # XINT8 makes it of Sigmoid
    gated = any(is_hard_sigmoid(n) for n in graph.nodes)
    for format in (f for f in BACKEND_FORMATS[backend] if f != placed.format):
        made = in_format(graph, format)
        stands = ", if each HardSigmoid replaces a Sigmoid" if gated and format not in listed else ""
        evidence: Evidence = "guess" if stands else "log"
        what = f"quantize to {format} instead{stands}"
        start = Proposal(f"format {format}", what, evidence, place(made, backend, format))
        yield from _and_more(start, made, backend, placed, best)


def _and_more(start: Proposal, graph: Graph, backend: str, placed: Placed, best: Placed) -> Iterator[Proposal]:
    """A proposal, if it helps, and with the changes that help behind it, if these do more than they do without it."""
    if _helps(start.after, placed):
        yield start
    more = _together(start, graph, backend, start.after.format)
    if more is not start and _helps(more.after, best):
        yield dataclasses.replace(more, what="; ".join(_words(more, backend, start.after.format)))


def _smaller(graph: Graph, backend: str, placed: Placed) -> Iterator[Proposal]:
    if names := _small_pieces(graph, placed):
        after = place(graph, backend, None, names)
        what = f"leave these in float, as they contain no layer: exclude={json.dumps(names)}"
        yield Proposal("exclude", what, "guess", after)


def _backends(graph: Graph, chip: str, backend: str, placed: Placed, best: Placed) -> Iterator[Proposal]:
    for other in CHIPS[chip].backends:
        if other != backend and placed.format in BACKEND_FORMATS[other]:
            start = Proposal(f"backend {other}", f"compile with target {other}", "guess", place(graph, other))
            yield from _and_more(start, graph, other, placed, best)


def _small_pieces(graph: Graph, placed: Placed) -> list[str]:
    """The nodes of subgraphs without a layer, by label: a transfer each way for what the CPU does as quickly."""
    pieces: dict[int, list[str]] = {}
    layers = {placed.nodes[name].subgraph for name, node in named(graph).items() if is_layer(node)}
    for name, node in named(graph).items():
        piece = placed.nodes[name].subgraph
        if piece is not None and piece not in layers and not is_quantizer(node):
            pieces.setdefault(piece, []).append(node.label)
    fewest = placed.subgraphs - len(pieces)
    return [label for labels in pieces.values() for label in labels] if fewest else []


def _helps(after: Placed, before: Placed) -> bool:
    """Whether less is on the CPU, or the same in fewer subgraphs."""
    return after.subgraphs > 0 and _cost(after) < _cost(before)


def _cost(placed: Placed) -> tuple[int, int]:
    return placed.counts["cpu"], placed.subgraphs
