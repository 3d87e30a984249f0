"""The graph in fake-quant: floats, rounded wherever the plan says to what their codes stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jq.graph import Graph
from jq.npu.rewrites import FORMS
from jq.plan import Plan
from jq.readings.tracing import Tap, Traced, trace


def fake_quant(graph: Graph, *, taps: Iterable[str] | Mapping[str, Tap] = (), lowering: str | None = None) -> FakeQuant:
    """Return the quantized graph as a pure function `qfn(params, plan, inputs) -> outputs`.

    It computes what the exported model computes. The plan is data: `vmap` over stacked plans evaluates all of them, and
    gradients with respect to params and scales are straight-through estimates.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> images, labels = jq.zoo.calibration_set()
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, images[:64]))
    >>> logits = jq.fake_quant(graph)(graph.params, plan, {"input": images})["logits"]
    >>> float((logits.argmax(-1) == labels).mean()) > 0.9
    True
    """
    return FakeQuant(graph, dict(taps) if isinstance(taps, Mapping) else {t: (lambda x: x) for t in taps}, lowering)


@dataclasses.dataclass(frozen=True, eq=False)
class FakeQuant:
    """A graph read as a function of its params, a plan and its inputs."""

    graph: Graph
    taps: Mapping[str, Tap]
    lowering: str | None
    _traced: dict[Any, Traced] = dataclasses.field(default_factory=dict, repr=False)

    def __call__(self, params: Mapping[str, Any], plan: Plan, inputs: Mapping[str, Any]) -> Any:
        """The outputs by name, and what was tapped if anything is."""
        traced = self.traced(plan)
        return traced.quantized({**traced.graph.params, **params}, plan, inputs)

    def traced(self, plan: Plan) -> Traced:
        """The function of the graph in the forms that a plan wants."""
        key = plan.forms, plan.nodes
        if key not in self._traced:
            self._traced[key] = trace(as_planned(self.graph, plan), taps=self.taps, lowering=self.lowering)
        return self._traced[key]


def as_planned(graph: Graph, plan: Plan, forms: Collection[str] = tuple(FORMS)) -> Graph:
    """Return the graph in the forms of the NPU that a plan wants, or some of them, where its nodes are quantized."""
    for name in (n for n in plan.forms if n in forms):
        graph = FORMS[name](graph, lambda node: node.outputs[0] in plan.nodes)
    return graph
