"""The forecast: which nodes of a model run on the NPU, which do not and why, and what to change."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jq.config import QuantConfig, resolve
from jq.data.sources import open_source
from jq.device.advising import Proposal, proposals, unmoved
from jq.errors import ConfigError, check_choice
from jq.evidence.lint_rules import counted
from jq.evidence.places import places_report
from jq.exchange.export import export, pairs_of
from jq.graph import Graph
from jq.graph.quantizers import is_quantized
from jq.graph.read import ModelLike, load
from jq.npu.facts import BACKENDS, CHIPS, PLACE_RULES, Evidence, PlaceRule
from jq.npu.placing import Place, Placed, UnitPlace, place
from jq.pipeline import calibrated
from jq.readings.diagnosis import blames_model
from jq.recovery.bounds import bound_choice, without_clips
from jq.util import files, markup

_SHOWN = 3  # nodes named in a line
_SAMPLES = 2  # of data, for scales that nobody uses


@dataclasses.dataclass(frozen=True)
class Break:
    """Nodes that leave the NPU together, by which rule."""

    node: str  # the first of them
    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    rule: PlaceRule

    @property
    def source(self) -> str:
        """Who says so."""
        return self.rule.source


@dataclasses.dataclass(frozen=True)
class Advice:
    """A change, and the forecast after it."""

    change: str
    what: str
    evidence: Evidence  # that it helps
    counts: Mapping[str, int]
    subgraphs: int


@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
    """Where a model's nodes run: a forecast by rules, of which each says who says so and how sure that is.

    `counts` are nodes of the quantized model: on the NPU, on the CPU, and on the CPU in the provider, which are quantizers.
    """

    chip: str
    backend: str
    format: str
    counts: Mapping[str, int]
    subgraphs: int
    subgraphs_run: int  # of these, the ones that are run on the NPU
    nodes: Mapping[str, Place]
    breaks: tuple[Break, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    units: tuple[UnitPlace, ...]
    copies: Mapping[str, int]  # quantizers that the runtime adds, and the provider counts: one for each further reader

    @property
    def rules(self) -> tuple[PlaceRule, ...]:
        """The rules that decided, those of most nodes first."""
        used = Counter(p.rule for p in self.nodes.values())
        return tuple(PLACE_RULES[name] for name, _ in used.most_common())

    @property
    def broken(self) -> dict[PlaceRule, list[Break]]:
        """The breaks by rule, those of most first."""
        groups: dict[PlaceRule, list[Break]] = {}
        for one in self.breaks:
            groups.setdefault(one.rule, []).append(one)
        return dict(sorted(groups.items(), key=lambda group: -len(group[1])))

    def to_dict(self) -> dict[str, Any]:
        """The forecast as JSON holds it."""
        whole = {"chip": self.chip, "backend": self.backend, "format": self.format, "counts": dict(self.counts)}
        return {
            **whole,
            "copies": dict(self.copies),
            "subgraphs": self.subgraphs,
            "subgraphs_run": self.subgraphs_run,
            "breaks": [
                {"node": b.node, "nodes": list(b.nodes), "ops": list(b.ops), "rule": b.rule.name, "source": b.source}
                for b in self.breaks
            ],
            "advice": [{**vars(a), "counts": dict(a.counts)} for a in self.advice],
            "rules": [dataclasses.asdict(rule) for rule in self.rules],
            "notes": list(self.notes),
            "nodes": {name: p._asdict() for name, p in self.nodes.items()},
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the forecast to a file."""
        files.write(path, json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the forecast, with the graph in the colours of the places, as a page."""
        places_report(self).to_html(path)

    def __str__(self) -> str:
        """The forecast as text: counts, what breaks the model and by whose word, and what to change."""
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The lines of the text."""
        share = self.counts["npu"] / max(1, sum(self.counts.values()))
        run = "" if self.subgraphs_run == self.subgraphs else f", of which {self.subgraphs_run} run on the NPU"
        yield f"{self.format or 'no format of the NPU'} on {CHIPS[self.chip].long} ({self.chip}), backend {self.backend}"
        yield "  ".join(f"{name} {count}" for name, count in self.counts.items()) + f"  ({share:.1%} on the NPU)"
        yield f"subgraphs {self.subgraphs}{run}"
        if any(self.copies.values()):
            added = ", ".join(f"{place} {count}" for place, count in self.copies.items())
            yield f"the provider will count more quantizers, because the runtime copies those that several nodes read: {added}"
        for rule, breaks in self.broken.items():
            nodes = [n for b in breaks for n in b.nodes]
            shown = ", ".join(b.node for b in breaks[:_SHOWN]) + (", ..." if len(breaks) > _SHOWN else "")
            ops = ", ".join(dict.fromkeys(op for b in breaks for op in b.ops))
            yield f"break: {counted(len(nodes), 'node')} ({ops}) at {shown}"
            yield f"  {rule.says} [{rule.name}; {rule.evidence}, {rule.date}: {rule.source}]"
        for advice in self.advice:
            after = ", ".join(f"{name} {count}" for name, count in advice.counts.items())
            yield f"change: {advice.what} [{advice.change}; {advice.evidence}]"
            yield f"  then {after}; subgraphs {advice.subgraphs}"
        kinds = Counter(PLACE_RULES[p.rule].evidence for p in self.nodes.values())
        if kinds:
            yield "placed by rules that are " + ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
        yield from (f"note: {note}" for note in self.notes)

    def _repr_html_(self) -> str:
        rows = [(b.node, ", ".join(b.ops), b.rule.name, b.rule.says) for b in self.breaks]
        return markup.preview(next(self.lines()), ("node", "operators", "rule", "says"), rows)


@blames_model
def forecast(
    model: ModelLike,
    chip: str = "stx",
    backend: str | None = None,
    *,
    config: QuantConfig | str | None = None,
    data: Any = None,
) -> Forecast:
    """Return where the nodes of a model will run on a chip, why the rest does not, and what to change.

    A quantized model is forecast without changes. A float model is quantized first, by `config` ("XINT8" if None) with scales that
    cost little to find, as places depend on the structure alone; without `data`, on random data. The backend is the
    chip's default if None: X2, or X1 where the chip has no other.

    >>> import jq.zoo
    >>> whole = forecast(jq.zoo.path("fashion_resnet"), "stx", config="A8W8")
    >>> whole.counts["cpu"], whole.subgraphs
    (0, 1)
    """
    backend = checked_backend(chip, backend)
    graph = model if isinstance(model, Graph) else load(model)
    notes: list[str] = []
    if not any(is_quantized(n) for n in graph.walk()):
        graph, notes = _quantized(graph, "XINT8" if config is None else config, data)
    elif config is not None:
        raise ConfigError(
            "the model is quantized already, so it needs no config; leave config out, or give the float model"
        )
    placed = place(graph, backend)
    breaks, proposed = tuple(_breaks(placed)), list(proposals(graph, chip, backend, placed))
    return Forecast(
        chip,
        backend,
        placed.format,
        MappingProxyType(placed.counts),
        placed.subgraphs,
        placed.running,
        MappingProxyType(dict(placed.nodes)),
        breaks,
        tuple(
            Advice(p.name, p.what, p.evidence, MappingProxyType(p.after.counts), p.after.subgraphs) for p in proposed
        ),
        (*notes, *_free_dims(graph), *_notes(placed, chip), *_unmoved(placed, proposed)),
        placed.units,
        MappingProxyType(dict(placed.copies)),
    )


def checked_backend(chip: str, backend: str | None) -> str:
    """Return the backend, or the default of a chip; raise a ConfigError where the chip has no such one."""
    check_choice("chip", chip, CHIPS)
    backends = CHIPS[chip].backends
    if backend is None:
        return backends[0]
    check_choice("backend", backend, BACKENDS)
    if backend not in backends:
        raise ConfigError(f"chip {chip!r} needs backend {' or '.join(backends)}; got {backend!r}")
    return backend


def _quantized(graph: Graph, config: QuantConfig | str, data: Any) -> tuple[Graph, list[str]]:
    """A float graph quantized with what costs little and leaves the structure as it would be."""
    options = resolve(config)
    method = "nonoverflow" if options.scale == "power_of_two" else "minmax"
    cheap = options.replace(method=method, cle=False, bias_correction=False, guard=None, finetune=None)
    notes = ["the model is float: it was quantized for this forecast, with scales from ranges and without tuning"]
    if data is None:
        notes.append(
            "on random data, so Sigmoids whose form depends on its loss (form_loss) may get another on your data; an average pool "
            "at the output is assumed to be quantized (output_ties)"
        )
        cheap = cheap.replace(output_ties=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no data given")  # the note says so
        samples = list(open_source(data, graph.inputs, seed=cheap.seed).limited(_SAMPLES).samples())
    ready = calibrated(graph, samples, cheap)
    plan = ready.guarded.plan
    made = without_clips(ready.graph, bound_choice(ready.graph, plan, cheap, samples, ready.moved))
    return load(export(made, plan, pairs=pairs_of(options))), notes


def _breaks(placed: Placed) -> Iterator[Break]:
    by_output = {p.output: name for name, p in placed.nodes.items()}
    for unit, rule in placed.broken:
        named = tuple(by_output.get(next((o for o in n.outputs if o), ""), n.label) for n in unit.nodes)
        yield Break(named[0], named, tuple(n.op_type for n in unit.nodes), PLACE_RULES[rule])


def _free_dims(graph: Graph) -> Iterator[str]:
    """A note where the shapes of inputs are not fixed, which the provider's documents ask for."""
    free = [v.name for v in graph.inputs if v.shape is None or not all(isinstance(d, int) for d in v.shape)]
    if free:
        yield (
            f"shapes must be fixed (amd/ryzen-ai-documentation 1.8.0, modelrun.rst), and {counted(len(free), 'input')} "
            f"({', '.join(free[:_SHOWN])}) has free dims: this is the forecast for the model with them fixed"
        )


def _notes(placed: Placed, chip: str) -> Iterator[str]:
    floats = sum(p.rule == "not-quantized" for p in placed.nodes.values())
    if floats > 1 and placed.format and CHIPS[chip].bfloat16:
        yield (
            f"{floats} nodes are float; the vendor's newest flow runs such nodes in BF16, with the file that "
            "provider_config(flow='mixed') writes"
        )
    if any(p.rule == "concat-from-outside" for p in placed.nodes.values()):
        yield "the vendor's log counts subgraphs that are compiled but not run; the reason is a guess"
    if not placed.format:
        yield "no integer format is recognised; the provider reads QuantizeLinear and DequantizeLinear"
        if CHIPS[chip].bfloat16:
            yield "for BF16, give the provider the float model and the file that provider_config(flow='BF16') writes"


def _unmoved(placed: Placed, proposed: Sequence[Proposal]) -> Iterator[str]:
    """A note on operators that no change brings to the NPU."""
    if left := unmoved(placed, proposed):
        shown = ", ".join(f"{op} ({count})" for op, count in left.items())
        yield (
            f"no known change moves these to the NPU: {shown}; at the ends of a network they break nothing, so leave them and "
            "everything beyond in float, or train with other operators"
        )
