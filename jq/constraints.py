"""The position constraints of the NPU, as AMD's compilers have them, brought about on a plan.

The chip has shifters of so many bits between the positions of what an operator reads and writes (position p:
value = code * 2**-p). Each rule looks at one node and, where a shift is out of its range, names ways to bring it
back; the first is the one that the vendor's tool takes. Sweeps over all rules and nodes go on until nothing moves.

Two things are done otherwise than there, but for `strict_quark`. Which way is taken is decided by what it costs:
the squared error that calibration measured at each exponent, relative to the tensor's power. And tensors that must
have one position, as around a Concat, get it together, the one that costs all of them least, not the coarsest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jq.calibrate import cuts_alone
from jq.config import QuantConfig
from jq.formats import Integer
from jq.graph import Graph, Node
from jq.numerics import power_of_two
from jq.placement import absorbed, rule_of, shared
from jq.plan import Plan, QParams
from jq.stats import Stats

Positions = dict[str, int]
Ways = list[dict[str, int]]  # alternatives, each of new positions

_SWEEPS_OF_QUARK, _SWEEPS = 5, 20


@dataclasses.dataclass(frozen=True)
class Move:
    """A position that a constraint changed, and the relative squared error of the tensor before and after."""

    rule: str
    node: str
    tensor: str
    before: int
    after: int
    error_before: float
    error_after: float

    def __str__(self) -> str:
        error = f"{self.error_before:.2e} -> {self.error_after:.2e}"
        return f"{self.rule} of {self.node!r} moved {self.tensor!r} from 2^{-self.before} to 2^{-self.after} (error {error})"


def constrain(
    graph: Graph,
    plan: Plan,
    stats: Stats | None,
    config: QuantConfig,
    params: Mapping[str, Any] | None = None,
) -> tuple[Plan, tuple[Move, ...]]:
    """Return the plan with positions that the NPU can compute with, and what was moved for that."""
    if not config.constraints:
        return plan, ()
    links, strict = _Links.of(graph, plan), config.strict_quark
    error = Errors(graph, plan, stats, {**graph.params, **(params or {})}, keeps_codes=strict)
    start = {name: -int(plan[name].exponent) for name in plan if _has_position(plan[name])}
    moves: list[Move] = []
    if not strict:
        links, moves = _united(links, config, error, start)
    groups: dict[str, list[str]] = {}
    for name in start:
        groups.setdefault(links.group(name), []).append(name)
    cost = _Cost(error, groups, links)
    positions = {group: start[group] for group in groups}
    if not strict:
        positions = {group: cost.best(group, [start[m] for m in members]) for group, members in groups.items()}
    moves += (_sweeps_of_quark if strict else _sweeps_at_least_cost)(config, cost, positions)
    changed: dict[str, QParams | None] = {}
    for name, before in start.items():
        if (after := positions[links.group(name)]) != before:
            coded = plan[name].scale if strict and name in plan.weights else None
            changed[name] = dataclasses.replace(plan[name], scale=power_of_two(-after), coded=coded)
    return plan.replace(changed), tuple(moves)


def violations(graph: Graph, plan: Plan, config: QuantConfig) -> list[str]:
    """Return what the NPU's compiler would object to: rule and node of each shift that is out of range."""
    links = _Links.of(graph, plan)
    positions = {links.group(k): -int(plan[k].exponent) for k in plan if _has_position(plan[k])}
    return [
        f"{rule} of {site.node.label!r}"
        for rule in config.constraints
        for site in links.sites
        if _RULES[rule](site, _At(positions, links))
    ]


def _has_position(found: QParams) -> bool:
    return isinstance(found.grid, Integer) and found.axis is None and found.grid.bits <= 16


# ---------------------------------------------------------------------------------------------
# What a rule sees
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Site:
    """A node with the tensors whose positions meet in it; None for those that are not quantized."""

    node: Node
    inputs: tuple[str | None, ...]
    output: str | None
    leaky: bool = False  # a LeakyRelu follows
    swish: bool = False  # x * hard_sigmoid(x)


@dataclasses.dataclass(frozen=True, eq=False)
class _Links:
    """How the tensors of a plan hang together."""

    sites: tuple[_Site, ...]
    leader: Mapping[str, str]  # of tensors that have another's position, that one

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> _Links:
        """The links of a graph under a plan."""
        inner = absorbed(graph)
        gated = {n.inputs[0] for n in graph.nodes if n.op_type == "HardSigmoid" and rule_of(graph, n) is not None}

        def read(node: Node, name: str) -> str | None:
            if name in plan:
                return name
            made = graph.producer.get(name)  # a Pad that is part of the pool, as a rule
            through = made is not None and node.op_type in _POOLS[1:] and made.inputs and made.inputs[0] in plan
            return made.inputs[0] if through and made is not None else None

        def written(node: Node) -> str | None:
            name = node.outputs[0]
            while name not in plan and name in inner and not _pads(graph.producer[name]):
                name = inner[name].outputs[0]
            return name if name in plan else None

        sites = tuple(
            _Site(
                node,
                tuple(read(node, name) for name in node.inputs),
                written(node),
                leaky=node.outputs[0] in inner and inner[node.outputs[0]].op_type == "LeakyRelu",
                swish=len(node.inputs) == 2 and any(name in gated for name in node.inputs),
            )
            for node in graph.nodes
            if node.outputs and node.outputs[0]
        )
        return cls(sites, shared(graph, plan.nodes, plan))

    def group(self, tensor: str) -> str:
        """The tensor that stands for all those that have this one's position."""
        while tensor in self.leader:
            tensor = self.leader[tensor]
        return tensor

    def unite(self, tensors: Sequence[str]) -> _Links:
        """The links with these tensors moving together."""
        first, *rest = dict.fromkeys(map(self.group, tensors))
        return dataclasses.replace(self, leader={**self.leader, **dict.fromkeys(rest, first)})


def _pads(node: Node) -> bool:
    return node.op_type == "Pad"


@dataclasses.dataclass(frozen=True)
class _At:
    """The positions of the moment, by tensor."""

    positions: Positions
    links: _Links

    def __call__(self, tensor: str | None) -> int | None:
        return None if tensor is None else self.positions.get(self.links.group(tensor))

    def all(self, *tensors: str | None) -> list[tuple[str, int]] | None:
        """Tensors with their positions, or None if one has none."""
        found = [(t, p) for t in tensors if t is not None and (p := self(t)) is not None]
        return found if len(found) == len(tensors) else None


# ---------------------------------------------------------------------------------------------
# The rules: where a shift is out of range, the ways to bring it back, the vendor's first
# ---------------------------------------------------------------------------------------------

Rule = Callable[[_Site, _At], Ways]


_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
_ALIGNED = {"align_concat": ("Concat",), "align_pool": _POOLS, "align_pad": ("Pad",), "align_slice": ("Slice",)}


def _alike(rule: str, site: _Site, at: _At) -> list[str]:
    """The tensors at a node whose positions must be equal by one of the aligning rules."""
    if site.node.op_type not in _ALIGNED[rule] or at(site.output) is None:
        return []
    inputs = site.inputs if rule == "align_concat" else site.inputs[:1]
    return [t for t in (site.output, *inputs) if t is not None and at(t) is not None]


def _align(rule: str, site: _Site, at: _At) -> Ways:
    """All have the coarsest position."""
    positions = {t: p for t in _alike(rule, site, at) if (p := at(t)) is not None}
    way = {t: min(positions.values()) for t, p in positions.items() if p > min(positions.values())}
    return [way] if way else []


def _shift_read(site: _Site, at: _At) -> Ways:
    """What is added is aligned by a shift of at most 7 bits."""
    found = at.all(*site.inputs)
    if site.node.op_type not in ("Add", "Sub") or not found:
        return []
    (finest, high), (coarsest, low) = max(found, key=lambda f: f[1]), min(found, key=lambda f: f[1])
    return [{finest: low + 7}, {coarsest: high - 7}] if high - low > 7 else []


def _shift_write(site: _Site, at: _At) -> Ways:
    """The sum is shifted by -7 to 25 bits, the product by 0 to 32."""
    found, output = at.all(*site.inputs), at(site.output)
    if site.node.op_type not in ("Add", "Mul") or not found or output is None:
        return []
    positions = [p for _, p in found]
    inner, low, high = (min(positions), -7, 25) if site.node.op_type == "Add" else (sum(positions), 0, 32)
    shift = min(max(inner - output, low), high)
    return [{str(site.output): inner - shift}] if inner - shift != output else []


def _shift_cut(site: _Site, at: _At) -> Ways:
    """The accumulator is shifted by 0 to 16 bits."""
    found = at.all(*site.inputs[:2], site.output)
    if site.node.op_type not in ("Conv", "Gemm") or not found or len(found) < 3:
        return []
    (_, x), (weight, w), (output, y) = found
    shift = min(max(w + x - y, 0), 16)
    return [{weight: shift + y - x}, {output: w + x - shift}] if w + x - y != shift else []


def _shift_bias(site: _Site, at: _At) -> Ways:
    """The bias is shifted by up to 15 bits to the left, and to the right by what the accumulator has to spare."""
    found = at.all(*site.inputs[:3], site.output)
    if site.node.op_type not in ("Conv", "Gemm") or not found or len(found) < 4:
        return []
    (_, x), (weight, w), (bias, b), (_, y) = found
    least = 0 if site.leaky else min(0, -(24 - (8 + w + x - y)))
    shift = min(max(w + x - b, least), 15)
    return [{bias: w + x - shift}, {weight: b + shift - x}] if w + x - b != shift else []


def _hard_sigmoid(site: _Site, at: _At) -> Ways:
    """The gate reads positions 0 to 15 and writes 7 or more, by a shift that is positive."""
    found = at.all(site.inputs[0] if site.inputs else None, site.output)
    if site.node.op_type != "HardSigmoid" or not found:
        return []
    (source, x), (output, y) = found
    new_x, new_y = min(max(x, 0), 15), max(y, 7)
    new_y = new_y if 14 + new_x - new_y > 0 else 14 + new_x
    way = {t: new for t, old, new in ((source, x, new_x), (output, y, new_y)) if old != new}
    return [way] if way else []


def _shift_swish(site: _Site, at: _At) -> Ways:
    """The product of x and its gate is shifted by 0 to 15 bits."""
    found, output = at.all(*site.inputs), at(site.output)
    if site.node.op_type != "Mul" or not site.swish or not found or output is None:
        return []
    total = sum(p for _, p in found)
    shift = min(max(total - output, 0), 15)
    return [{str(site.output): total - shift}] if total - shift != output else []


_RULES: dict[str, Rule] = {  # in the order of a sweep
    **{name: functools.partial(_align, name) for name in _ALIGNED},
    "shift_read": _shift_read,
    "shift_write": _shift_write,
    "shift_cut": _shift_cut,
    "shift_bias": _shift_bias,
    "hard_sigmoid": _hard_sigmoid,
    "shift_swish": _shift_swish,
}


# ---------------------------------------------------------------------------------------------
# What a position costs
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Errors:
    """The squared error of a tensor at a position, relative to its power, as calibration measured it."""

    graph: Graph
    plan: Plan
    stats: Stats | None
    params: Mapping[str, Any]
    keeps_codes: bool
    known: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)

    def __call__(self, tensor: str, position: int) -> float:
        """The error, at most about 1 where everything is rounded away."""
        if (tensor, position) not in self.known:
            found = self._of_weight if tensor in self.plan.weights else self._of_activation
            self.known[tensor, position] = found(tensor, position)
        return self.known[tensor, position]

    def _of_weight(self, tensor: str, position: int) -> float:
        array = np.asarray(self.params[tensor], np.float32)
        power = float(np.square(array, dtype=np.float64).sum())
        return self._squared(tensor, array, position) / power if power else 0.0

    def _squared(self, tensor: str, array: np.ndarray, position: int) -> float:
        found, scale = self.plan[tensor], power_of_two(-position)
        assert isinstance(found.grid, Integer)
        coded = np.asarray(found.scale) if self.keeps_codes else scale
        low, high = (int(bound - found.zero_point) for bound in (found.grid.qmin, found.grid.qmax))
        back = np.clip(np.rint(array / coded), low, high) * scale
        return float(np.square((array - back).astype(np.float64)).sum())

    def of_bias(self, bias: str, output: str, position: int) -> float:
        """A bias's error relative to the power of what it is added into."""
        array, power = np.asarray(self.params[bias], np.float32), self._mean_square(output)
        return self._squared(bias, array, position) / array.size / power if power else self(bias, position)

    def _of_activation(self, tensor: str, position: int) -> float:
        name, exponent = self._measured(tensor), -position
        if self.stats is None or name is None:
            return 0.0
        if "errors" in self.stats.observers:
            table = self.stats.errors(name)
            if not table["power"]:
                return 0.0
            beyond = int(max(exponent - table["exponent"][0], table["exponent"][-1] - exponent, 0))
            at = int(np.abs(table["exponent"] - exponent).argmin())
            # Beyond the table, rounding grows fourfold with each exponent, and clipping is as bad as that or worse.
            return float(min(1.0, table["total"][at] / table["power"] * 4.0**beyond))
        grid = self.plan[tensor].grid
        assert isinstance(grid, Integer)
        reach, limit = max(map(abs, self.stats.range(name))), (grid.qmax - grid.middle) * 2.0**exponent
        clipped = max(0.0, 1 - limit / reach) ** 2 if reach else 0.0
        return min(1.0, clipped + 4.0**exponent / 12 / (reach / 3) ** 2) if reach else 0.0

    def _measured(self, tensor: str) -> str | None:
        """The tensor whose statistics tell of this one: its own, or those of the Relu that alone reads it."""
        while self.stats is not None and tensor not in self.stats.tensors:
            reader = next((n for n in self.graph.consumers.get(tensor, ()) if cuts_alone(self.graph, n)), None)
            if reader is None:
                return None
            tensor = reader.outputs[0]
        return tensor

    def _mean_square(self, tensor: str) -> float:
        """What calibration measured of a tensor's power, per element; 0 where that is not known."""
        name, value = self._measured(tensor), self.graph.values.get(tensor)
        if self.stats is None or name is None or "errors" not in self.stats.observers or value is None:
            return 0.0
        sizes = [d for d in (value.shape or ())[1:] if isinstance(d, int)]
        whole = value.shape is not None and len(sizes) == len(value.shape) - 1 and self.stats.feeds
        return float(self.stats.errors(name)["power"]) / (math.prod(sizes) * self.stats.feeds) if whole else 0.0


def errors_of(graph: Graph, plan: Plan, stats: Stats | None) -> Callable[[str], float | None]:
    """Return what tells of each tensor the squared error that a plan makes, relative to its power, if it is known."""
    measured = Errors(graph, plan, stats, graph.params, keeps_codes=False)

    def error(tensor: str) -> float | None:
        found = plan[tensor]
        if tensor in plan.weights:
            array = np.asarray(graph.params[tensor], np.float64)
            lost, power = np.square(array - given_back(found, graph.params[tensor])).sum(), np.square(array).sum()
            return float(lost / power) if power else None
        known = stats is not None and "errors" in stats.observers and _has_position(found) and not found.dynamic
        return measured(tensor, -int(found.exponent)) if known and _is_power(found) else None

    return error


def given_back(found: QParams, array: np.ndarray) -> np.ndarray:
    """A weight as its codes give it back."""
    if not isinstance(found.grid, Integer) or found.axis is not None:
        return np.asarray(found.fake_quant(np.asarray(array, np.float32)), np.float64)
    codes = found.stored(np.asarray(array, np.float32)).astype(np.float64)
    return np.asarray((codes - found.zero_point) * np.float64(found.scale))


def _is_power(found: QParams) -> bool:
    return float(found.scale) == math.ldexp(1.0, int(found.exponent))


@dataclasses.dataclass(frozen=True, eq=False)
class _Cost:
    """What moving groups of tensors costs."""

    error: Errors
    groups: Mapping[str, Sequence[str]]
    links: _Links

    def best(self, group: str, positions: Sequence[int]) -> int:
        """The position of least error for all of a group, between those that they have; of equals the coarsest."""
        between = range(min(positions), max(positions) + 1)
        if len(between) == 1:
            return between[0]
        return min(between, key=lambda p: (sum(self.error(m, p) for m in self.groups[group]), p))

    def of_way(self, site: _Site, way: Mapping[str, int], positions: Positions) -> float:
        """What a way adds to the errors of all that it moves."""
        return sum(self._added(site, t, positions[self.links.group(t)], after) for t, after in way.items())

    def _added(self, site: _Site, tensor: str, before: int, after: int) -> float:
        is_bias = len(site.inputs) > 2 and site.inputs[2] == tensor and site.output is not None
        if is_bias and tensor in self.error.plan.weights:
            at = functools.partial(self.error.of_bias, tensor, str(site.output))
            return at(after) - at(before)
        members = self.groups[self.links.group(tensor)]
        return sum(self.error(m, after) - self.error(m, before) for m in members)


# ---------------------------------------------------------------------------------------------
# The fixed point
# ---------------------------------------------------------------------------------------------


def _united(links: _Links, config: QuantConfig, error: Errors, start: Positions) -> tuple[_Links, list[Move]]:
    """The links with all that must be alike moving together, and those moves."""
    at, united, because = _At(start, dataclasses.replace(links, leader={})), links, dict[str, tuple[str, str]]()
    for rule in (r for r in _ALIGNED if r in config.constraints):
        for site in links.sites:
            if tensors := _alike(rule, site, at):
                united = united.unite(tensors)
                because = {**dict.fromkeys(tensors, (rule, site.node.label)), **because}
    groups: dict[str, list[str]] = {}
    for name in start:
        groups.setdefault(united.group(name), []).append(name)
    cost, moves = _Cost(error, groups, united), list[Move]()
    for group, members in groups.items():
        after = cost.best(group, [start[m] for m in members])
        moves += [_move(error, *because[m], m, start[m], after) for m in members if m in because and start[m] != after]
    return united, moves


def _sweeps_of_quark(config: QuantConfig, cost: _Cost, positions: Positions) -> Iterator[Move]:
    """Sweeps as the vendor's tool makes them, where the shift of a product asks for no further one."""
    for _ in range(_SWEEPS_OF_QUARK):
        again = False
        for move, site in _sweep(config, cost, positions, lambda site, ways: ways[0]):
            again |= not (move.rule == "shift_write" and site.node.op_type == "Mul")
            yield move
        if not again:
            return


def _sweeps_at_least_cost(config: QuantConfig, cost: _Cost, positions: Positions) -> Iterator[Move]:
    """Sweeps that take the cheapest way. Where two rules undo each other's, the vendor's side ends it."""
    for sweep in range(_SWEEPS):
        moved = False

        def choose(site: _Site, ways: Ways, *, patient: bool = sweep < _SWEEPS // 2) -> dict[str, int]:
            return min(ways, key=lambda way: cost.of_way(site, way, positions)) if patient else ways[0]

        for move, _ in _sweep(config, cost, positions, choose):
            moved = True
            yield move
        if not moved:
            return


def _sweep(
    config: QuantConfig, cost: _Cost, positions: Positions, choose: Callable[[_Site, Ways], dict[str, int]]
) -> Iterator[tuple[Move, _Site]]:
    """One pass of every rule over every node; positions change under way, as in the vendor's tool."""
    for name in (n for n in _RULES if n in config.constraints):
        for site in cost.links.sites:
            ways = _RULES[name](site, _At(positions, cost.links))
            for tensor, after in choose(site, ways).items() if ways else ():
                group = cost.links.group(tensor)
                yield _move(cost.error, name, site.node.label, tensor, positions[group], after), site
                positions[group] = after


def _move(error: Errors, rule: str, node: str, tensor: str, before: int, after: int) -> Move:
    return Move(rule, node, tensor, before, after, error(tensor, before), error(tensor, after))
