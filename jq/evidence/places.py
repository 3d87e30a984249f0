"""A forecast as the same page that all reports are: the graph by place, what breaks it, what to change, every node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jq.evidence.drawing import PLACES
from jq.evidence.layers import NetworkLayer
from jq.evidence.report import Report, Section
from jq.evidence.verdict import OutputsVerdict
from jq.npu.facts import PLACE_RULES

if TYPE_CHECKING:
    from jq.device.forecasting import Forecast

_NAMED = 5


def places_report(forecast: Forecast) -> Report:
    """Return a forecast as a report."""
    title, counts, subgraphs, *_ = forecast.lines()
    layers = tuple(
        NetworkLayer(
            unit.name, ", ".join(unit.ops), (unit.name,), unit.sources, "", unit.place, PLACE_RULES[unit.rule].says
        )
        for unit in forecast.units
    )
    sections = (
        *_section(
            "What breaks it",
            ("rule", "evidence", "nodes", "operators", "where", "source"),
            (
                (
                    rule.says,
                    rule.evidence,
                    str(sum(len(b.nodes) for b in breaks)),
                    _each(op for b in breaks for op in b.ops),
                    _each(b.node for b in breaks),
                    rule.source,
                )
                for rule, breaks in forecast.broken.items()
            ),
        ),
        *_section(
            "What to change",
            ("change", "evidence", *PLACES.values(), "subgraphs"),
            ((a.what, a.evidence, *(str(a.counts[p]) for p in PLACES), str(a.subgraphs)) for a in forecast.advice),
        ),
        *_section(
            "Nodes",
            ("node", "operator", "place", "rule", "subgraph"),
            (
                (name, p.op, PLACES[p.place], p.rule, "" if p.subgraph is None else str(p.subgraph))
                for name, p in forecast.nodes.items()
            ),
        ),
    )
    shares = {PLACES[place]: f"{count:,} nodes" for place, count in forecast.counts.items()}
    verdict = OutputsVerdict(sentences=(counts, subgraphs, *forecast.notes))
    return Report(title, shares, (), (), (), sections=sections, layers=layers, verdict=verdict)


def _each(words: Iterable[str]) -> str:
    """Each of some words once, and no more than a line of them."""
    each = list(dict.fromkeys(words))
    return ", ".join(each[:_NAMED]) + (f" and {len(each) - _NAMED} more" if len(each) > _NAMED else "")


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[Section, ...]:
    """A section with a table, or none where there are no rows."""
    cells = list(rows)
    return (Section(title, columns, cells),) if cells else ()
