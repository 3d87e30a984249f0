"""Which tensors and layers cost most when they are quantized: end-to-end losses of all of them, in one walk."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from jax.sharding import Mesh

from jq.data.sources import Source, open_source, readable_again
from jq.errors import ConfigError, DataError, check_choice, suggest
from jq.evidence.plots import ranking_plot
from jq.graph import Graph, Node
from jq.graph.shapes import of_data
from jq.plan import Plan
from jq.plan.placement import absorbed
from jq.readings.data_shapes import traceable
from jq.readings.fake import as_planned
from jq.research.curvature import estimate
from jq.research.executors import Executor
from jq.research.losses import CURVED, LOSSES, Loss, score_losses
from jq.research.streaming import sample_bytes, samples_at_once, streamed
from jq.research.walks import MeasureOf, Walk, WalkedNetwork, walked, walked_elsewhere
from jq.util import files, markup

By = Literal["tensor", "layer"]
Mode = Literal["alone", "all_but_one"]
Kind = Literal["activations", "weights", "both"]

_LANES_BYTES = 1 << 30  # of the largest tensor in all lanes, of which several live at once; more take several walks
_LEAST = 8  # lanes of a walk


@dataclasses.dataclass(frozen=True)
class SensitivityRow:
    """One tensor, or the tensors of one layer."""

    name: str
    tensors: tuple[str, ...]
    operator: str  # of the node that makes or reads it
    depth: int  # its place in the order of the graph
    loss: float  # a mean over samples
    error: float | None  # its standard error; None of one sample
    exact: bool  # measured end to end; if not, estimated to second order
    losses: Mapping[str, float]  # all that were measured
    estimate: float | None  # to second order, where that was asked for


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """How much each tensor or layer costs; the rows that matter most are first."""

    loss: Loss
    by: str
    mode: Mode
    kind: Kind
    samples: int
    whole: Mapping[str, float]  # the losses where all are quantized; empty if it was not measured
    rows: tuple[SensitivityRow, ...]

    def __getitem__(self, name: str) -> SensitivityRow:
        row = next((r for r in self.rows if r.name == name), None)
        if row is None:
            raise ConfigError(f"no row {name!r}.{suggest(name, [r.name for r in self.rows])}")
        return row

    @property
    def title(self) -> str:
        """One line: the loss, the samples, and how tensors were quantized."""
        what = self.kind if self.kind != "both" else "weights and activations"
        how = "quantized alone" if self.mode == "alone" else "left in float, all others quantized"
        return f"{self.loss} on {self.samples} samples, each {self.by} {how} ({what})"

    def summary(self, count: int = 10) -> str:
        """The title, the loss of all together, and the rows that matter most, as lines of text."""
        lines = [self.title]
        if self.whole:
            lines.append(f"  {self.whole[self.loss]:<10.4g} all of them quantized")
        for r in self.rows[:count]:
            spread = "" if r.error is None else f" +- {r.error:.1g}"
            lines.append(f"  {r.loss:<10.4g}{'' if r.exact else 'about '}{r.name} ({r.operator}){spread}")
        if len(self.rows) > count:
            lines.append(f"  and {len(self.rows) - count} more")
        if estimated := sum(not r.exact for r in self.rows):
            lines.append(f"{estimated} of {len(self.rows)} are second-order estimates: 'about'")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, atomically."""
        files.write(path, json.dumps(self.to_dict(), indent=2, allow_nan=False))

    def plot(self, count: int = 40) -> str:
        """A picture of the rows that matter most, as SVG."""
        bars = [(r.name, r.loss, r.error or 0.0, r.exact) for r in self.rows[:count]]
        return ranking_plot(self.title, self.loss, bars)

    def _repr_html_(self) -> str:
        columns = (self.by, "operator", self.loss, "standard error", "")
        errors = ["" if r.error is None else f"{r.error:.1g}" for r in self.rows]
        exact = ["" if r.exact else "estimated" for r in self.rows]
        rows = [(r.name, r.operator, f"{r.loss:.4g}", *x) for r, *x in zip(self.rows, errors, exact, strict=True)]
        return markup.preview(self.title, columns, rows) + self.plot()


def sensitivity(
    graph: Graph,
    plan: Plan,
    data: Any,
    *,
    params: Mapping[str, Any] | None = None,
    loss: Loss = "kl",
    by: By | Mapping[str, Sequence[str]] = "tensor",
    mode: Mode = "alone",
    kind: Kind = "both",
    screen: int | None = None,
    probes: int = 1,
    limit: int | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    executor: Executor | None = None,
) -> Sensitivity:
    """Return the loss at the outputs that quantizing each tensor of a plan causes, against the float network, ranked.

    `by` "layer" takes the tensors of a node together, its weights and what it makes, or tensors under names of your own.
    `mode` "alone" quantizes nothing else; "all_but_one" all of `kind` but that. `kind` picks activations, weights or both.
    `loss` ranks; all are measured: kl, mse, cosine (one less the cosine) and top1 (share of samples put into another class).
    `data` is what `jq.calibrate` takes, of which the first `limit` samples count.

    All are exact, from one compiled walk that shares what they have in common. With `screen`, only that many are: those
    that rank highest by a second-order estimate from `probes` backward passes per sample. The others have the estimate.
    An `executor` measures parts of the samples elsewhere, with the same numbers; estimates stay here.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, images[:16]))
    >>> result = sensitivity(graph, plan, images[:8], kind="activations")
    >>> len(result.rows), result.rows[0].exact
    (26, True)
    """
    check_choice("loss", loss, LOSSES)
    check_choice("mode", mode, get_args(Mode))
    check_choice("kind", kind, get_args(Kind))
    if screen is not None:
        _check_screen(screen, loss, mode)
    if executor is not None and mesh is not None:
        raise ConfigError("a mesh has the devices of this process: give a mesh or an executor, not both")
    plan = plan.replace(dict.fromkeys({"activations": plan.weights, "weights": plan.activations, "both": {}}[kind]))
    graph = traceable(as_planned(graph, plan))
    named = grouped(graph, plan, by)
    data = data if screen is None else readable_again(data, graph.inputs, seed)
    source = open_source(data, graph.inputs, seed=seed).limited(limit)
    groups, estimates, chosen = list(named.values()), dict[str, np.ndarray](), named
    if screen is not None:
        each = estimate(graph, params, plan, groups, source, loss=loss, probes=probes, seed=seed, mesh=mesh)
        estimates = dict(zip(named, each.T.astype(np.float64), strict=True))
        ranked = sorted(named, key=lambda n: -estimates[n].mean())[:screen]
        chosen = {n: group for n, group in named.items() if n in ranked}
    measured, whole = dict[str, dict[str, np.ndarray]](), dict[str, float]()
    if chosen:
        measured, whole = group_losses(graph, params, plan, chosen, source, score_losses, mode, mesh, executor)
    rows = []
    for name in named:
        exact = name in measured
        values = measured[name][loss] if exact else estimates[name]
        error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
        mean, of = float(values.mean()), {k: float(v.mean()) for k, v in measured.get(name, {}).items()}
        about = float(estimates[name].mean()) if name in estimates else None
        depth, operator = _place(graph, plan, named[name])
        tensors = tuple(n for n in plan if n in named[name])
        rows.append(SensitivityRow(name, tensors, operator, depth, mean, error, exact, of, about))
    rows.sort(key=lambda r: (-r.loss if mode == "alone" else r.loss, r.depth))
    samples = len(next(iter({**estimates, **{n: v[loss] for n, v in measured.items()}}.values())))
    return Sensitivity(loss, by if isinstance(by, str) else "group", mode, kind, samples, whole, tuple(rows))


def grouped(graph: Graph, plan: Plan, by: By | Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """The tensors of a plan in the groups that are quantized together, in the order of the graph."""
    groups_of: dict[str, set[str]] = {}
    if by == "tensor":
        groups_of = {name: {name} for name in plan}
    elif by == "layer":
        takes = absorbed(graph)
        for name in plan:
            node = _node(graph, plan, name)
            while node is not None and (before := next((i for i in node.inputs[:1] if takes.get(i) is node), None)):
                node = graph.producer[before]  # an activation is part of the operator before it
            groups_of.setdefault(name if node is None else node.label, set()).add(name)
    elif isinstance(by, Mapping):
        groups_of = {name: set(tensors) for name, tensors in by.items()}
        for name, tensor in ((name, tensor) for name, tensors in groups_of.items() for tensor in tensors):
            if tensor not in plan:
                raise ConfigError(f"group {name!r}: tensor {tensor!r} is not quantized.{suggest(tensor, list(plan))}")
    else:
        raise ConfigError(f"by is {by!r}; expected tensor, layer, or tensors by the names of groups")
    if not groups_of:
        raise ConfigError("the plan quantizes nothing of this kind, so there is nothing to compare")
    order = sorted(groups_of, key=lambda n: _place(graph, plan, frozenset(groups_of[n]))[0])
    return {name: frozenset(groups_of[name]) for name in order}


def _check_screen(screen: int, loss: Loss, mode: Mode) -> None:
    if not isinstance(screen, int) or screen < 0:
        raise ConfigError(f"screen is {screen!r}; expected the number to measure, 0 or more")
    if mode != "alone":
        raise ConfigError("screen needs mode='alone', because there is no estimate for all but one")
    check_choice("loss", loss, CURVED)


def _node(graph: Graph, plan: Plan, tensor: str) -> Node | None:
    """The node that makes an activation or first reads a weight; None of an input."""
    if tensor in plan.weights:
        return next(iter(graph.consumers.get(tensor, ())), None)
    return graph.producer.get(tensor)


def _place(graph: Graph, plan: Plan, tensors: frozenset[str]) -> tuple[int, str]:
    """Where in the graph the first of some tensors is, inputs at -1, and the operator."""
    depths = {id(n): i for i, n in enumerate(graph.nodes)}
    nodes = [(-1 if (n := _node(graph, plan, t)) is None else depths[id(n)], n) for t in tensors]
    depth, node = min(nodes, key=lambda pair: pair[0])
    return depth, "input" if node is None else node.op_type


def group_losses(
    graph: Graph, params: Mapping[str, Any] | None, plan: Plan, named: Mapping[str, frozenset[str]], source: Source,
    measure: MeasureOf, mode: Mode = "alone", mesh: Mesh | None = None, executor: Executor | None = None,
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, float]]:  # fmt: skip
    """Return what `measure` gives of each group of tensors on each sample, and the means where all are quantized.

    The graph is in the forms of the plan, see `jq.readings.fake.as_planned`.
    """
    graph = of_data(graph, source.head)
    at_once = samples_at_once(graph)
    most = max(_LEAST, _LANES_BYTES // (at_once * sample_bytes(graph)))
    stream, names = streamed(graph, source, at_once, mesh), list(named)
    network, parts = WalkedNetwork(graph, params, plan, measure), range(0, len(names), most)
    # The last lane is the other end: all quantized, or in `all_but_one` the float network.
    groups = [(*(named[n] for n in names[start : start + most]), frozenset(plan)) for start in parts]
    walks = [Walk(group, mode == "all_but_one") for group in groups]
    results = walked(network, walks, stream) if executor is None else walked_elsewhere(network, walks, stream, executor)
    losses_of: dict[str, dict[str, np.ndarray]] = {}
    whole: dict[str, float] = {}
    for start, made in zip(parts, results, strict=True):
        if not (finite := made.pop("finite")).all():
            raise DataError(f"sample {int(np.argmin(finite))}: the float network's outputs have NaN or Inf")
        made = {k: v.astype(np.float64) for k, v in made.items()}
        here = names[start : start + most]
        losses_of |= {n: {k: v[:, i] for k, v in made.items()} for i, n in enumerate(here)}
        whole = {k: float(v[:, -1].mean()) for k, v in made.items()}
    return losses_of, whole
