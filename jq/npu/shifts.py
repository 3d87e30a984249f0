"""Shifts between the positions of what an operator reads and writes: the chip's ranges, and ways back into them.

Each rule looks at one node, and yields the ways to bring a shift that is out of its range back, the vendor's first.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from jq.graph import Graph, Node
from jq.npu import facts
from jq.npu.rewrites import FUNCTIONS
from jq.plan import Plan
from jq.plan.placement import absorbed, rule_of, shared
from jq.readings.fake import as_planned

Positions = dict[str, int]
Ways = list[dict[str, int]]  # alternatives, each of new positions


@dataclasses.dataclass(frozen=True, eq=False)
class NodeTensors:
    """A node with the tensors whose positions meet in it; None for those that are not quantized."""

    node: Node
    inputs: tuple[str | None, ...]
    output: str | None
    leaky: bool = False  # a LeakyRelu follows
    gate: bool = False  # a HardSigmoid that the NPU has
    swish: bool = False  # x * hard_sigmoid(x)


@dataclasses.dataclass(frozen=True, eq=False)
class Links:
    """Which tensors of a plan meet in a node, and which must have one position."""

    sites: tuple[NodeTensors, ...]
    leader: Mapping[str, str]  # of tensors that have another's position, that one

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> Links:
        """The links of a graph under a plan, in which a Sigmoid that becomes a HardSigmoid is one.

        The last ones are kept, as searches ask about many plans of one graph.
        """
        key = plan.nodes, frozenset(plan), plan.forms
        if graph not in _last or _last[graph][0] != key:
            _last[graph] = key, cls._among(as_planned(graph, plan, FUNCTIONS), *key[:2])
        return _last[graph][1]

    @classmethod
    def _among(cls, graph: Graph, nodes: frozenset[str], plan: frozenset[str]) -> Links:
        """The links between these tensors."""
        inner = {name: reader for name, reader in absorbed(graph).items() if name not in plan}
        gates = {n for n in graph.nodes if n.op_type == "HardSigmoid" and rule_of(graph, n) is not None}
        gated = {gate.inputs[0] for gate in gates}

        def read(node: Node, name: str) -> str | None:
            made = graph.producer.get(name)
            if name not in plan and made is not None and made.inputs and node.op_type in POOLS[1:]:
                name = made.inputs[0]  # of a Pad that is part of the pool, as a rule
            return name if name in plan else None

        def written(node: Node) -> str | None:
            name = node.outputs[0]
            while name in inner and not _pads(graph, graph.producer[name]):
                name = inner[name].outputs[0]
            return name if name in plan else None

        sites = tuple(
            NodeTensors(
                node,
                tuple(read(node, name) for name in node.inputs),
                written(node),
                leaky=node.outputs[0] in inner and inner[node.outputs[0]].op_type == "LeakyRelu",
                gate=node in gates,
                swish=len(node.inputs) == 2 and any(name in gated for name in node.inputs),
            )
            for node in graph.nodes
            if node.outputs and node.outputs[0] and not node.domain
        )
        return cls(sites, shared(graph, nodes, plan))

    def group(self, tensor: str) -> str:
        """The tensor that stands for all those that have this one's position."""
        while tensor in self.leader:
            tensor = self.leader[tensor]
        return tensor

    def computed(self) -> Links:
        """The links without nodes whose output is not quantized: these run in float, where nothing is shifted."""
        return dataclasses.replace(self, sites=tuple(s for s in self.sites if s.output is not None))

    def unite(self, tensors: Sequence[str]) -> Links:
        """The links with these tensors moving together."""
        first, *rest = dict.fromkeys(map(self.group, tensors))
        return dataclasses.replace(self, leader={**self.leader, **dict.fromkeys(rest, first)})


_last: weakref.WeakKeyDictionary[Graph, tuple[object, Links]] = weakref.WeakKeyDictionary()


def _pads(graph: Graph, node: Node) -> bool:
    rule = rule_of(graph, node)
    return rule is not None and rule.pads


@dataclasses.dataclass(frozen=True)
class At:
    """The positions of the moment, by tensor."""

    positions: Positions
    links: Links

    def __call__(self, tensor: str | None) -> int | None:
        """The position of a tensor; None if it has none."""
        return None if tensor is None else self.positions.get(self.links.group(tensor))

    def all(self, *tensors: str | None) -> list[tuple[str, int]] | None:
        """Tensors with their positions, or None if one has none."""
        known = [(t, p) for t in tensors if t is not None and (p := self(t)) is not None]
        return known if len(known) == len(tensors) else None

    def moved(self, way: Mapping[str, int]) -> At:
        """The positions after a way is taken."""
        return At({**self.positions, **{self.links.group(t): p for t, p in way.items()}}, self.links)


Rule = Callable[[NodeTensors, At], Ways]
Reason = tuple[str, NodeTensors]  # the rule that moves something, and where

LINEAR, SUMS, POOLS = ("Conv", "Gemm"), ("Add", "Sub"), ("MaxPool", "AveragePool", "GlobalAveragePool")
ALIGNED = {"align_concat": ("Concat",), "align_pool": POOLS, "align_pad": ("Pad",), "align_slice": ("Slice",)}


def alike(rule: str, site: NodeTensors, at: At) -> list[str]:
    """The tensors at a node whose positions must be equal by one of the aligning rules."""
    if site.node.op_type not in ALIGNED[rule] or at(site.output) is None:
        return []
    inputs = site.inputs if rule == "align_concat" else site.inputs[:1]
    return [t for t in (site.output, *inputs) if t is not None and at(t) is not None]


def _align(rule: str, site: NodeTensors, at: At) -> Ways:
    """All have the coarsest position."""
    positions = {t: p for t in alike(rule, site, at) if (p := at(t)) is not None}
    way = {t: min(positions.values()) for t, p in positions.items() if p > min(positions.values())}
    return [way] if way else []


def _within(number: int, least: int, most: int) -> int:
    return min(max(number, least), most)


def _shift_read(site: NodeTensors, at: At) -> Ways:
    """Operands of a sum are aligned by a shift of at most 7 bits."""
    operands = at.all(*site.inputs)
    if site.node.op_type not in SUMS or not operands:
        return []
    (finest, high), (coarsest, low) = max(operands, key=lambda f: f[1]), min(operands, key=lambda f: f[1])
    most = facts.READ_SHIFT
    return [{finest: low + most}, {coarsest: high - most}] if high - low > most else []


def _written(site: NodeTensors, at: At, combine: Callable[[Iterable[int]], int], limits: tuple[int, int]) -> Ways:
    """The shift from the position that the operands combine to, to that of the output, is within the limits."""
    operands, output = at.all(*site.inputs), at(site.output)
    if not operands or output is None:
        return []
    inner = combine(p for _, p in operands)
    shift = _within(inner - output, *limits)
    return [{str(site.output): inner - shift}] if inner - shift != output else []


def _shift_write(site: NodeTensors, at: At) -> Ways:
    """The sum is shifted by -7 to 25 bits, the product by 0 to 32."""
    if site.node.op_type == "Add":
        return _written(site, at, min, facts.SUM_SHIFT)
    return _written(site, at, sum, facts.PRODUCT_SHIFT) if site.node.op_type == "Mul" else []


def _shift_cut(site: NodeTensors, at: At) -> Ways:
    """The accumulator is shifted by 0 to 16 bits."""
    operands = at.all(*site.inputs[:2], site.output)
    if site.node.op_type not in LINEAR or not operands or len(operands) < 3:
        return []
    (_, x), (weight, w), (output, y) = operands
    shift = _within(w + x - y, *facts.CUT_SHIFT)
    return [{weight: shift + y - x}, {output: w + x - shift}] if w + x - y != shift else []


def _shift_bias(site: NodeTensors, at: At) -> Ways:
    """The bias is shifted by up to 15 bits to the left, and to the right by what the accumulator has to spare."""
    operands = at.all(*site.inputs[:3], site.output)
    if site.node.op_type not in LINEAR or not operands or len(operands) < 4:
        return []
    (_, x), (weight, w), (bias, b), (_, y) = operands
    least = 0 if site.leaky else min(0, 8 + w + x - y - facts.ACCUMULATOR_BITS)
    shift = _within(w + x - b, least, facts.BIAS_SHIFT)
    return [{bias: w + x - shift}, {weight: b + shift - x}] if w + x - b != shift else []


def _hard_sigmoid(site: NodeTensors, at: At) -> Ways:
    """The gate reads positions 0 to 15 and writes 7 or more, by a shift that is positive."""
    operands = at.all(site.inputs[0] if site.inputs else None, site.output)
    if not site.gate or not operands:
        return []
    (source, x), (output, y) = operands
    new_x = _within(x, *facts.GATE_POSITIONS)
    new_y, accumulated = max(y, facts.GATE_POSITION), facts.SIXTH[1] + new_x
    new_y = new_y if accumulated - new_y > 0 else accumulated
    way = {t: new for t, old, new in ((source, x, new_x), (output, y, new_y)) if old != new}
    return [way] if way else []


def _shift_swish(site: NodeTensors, at: At) -> Ways:
    """The product of x and its gate is shifted by 0 to 15 bits."""
    return _written(site, at, sum, facts.SWISH_SHIFT) if site.node.op_type == "Mul" and site.swish else []


RULES: dict[str, Rule] = {  # in the order of a sweep
    **{name: functools.partial(_align, name) for name in ALIGNED},
    "shift_read": _shift_read,
    "shift_write": _shift_write,
    "shift_cut": _shift_cut,
    "shift_bias": _shift_bias,
    "hard_sigmoid": _hard_sigmoid,
    "shift_swish": _shift_swish,
}
