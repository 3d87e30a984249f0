"""The position constraints of the NPU, as AMD's compilers have them, and a plan made to satisfy them.

The chip has shifters of limited range between the positions of what an operator reads and writes (position p:
value = code * 2**-p). Each rule looks at one node and, where a shift is out of its range, names ways to bring it
back; the first is the one that the vendor's tool takes. Sweeps over all rules and nodes repeat until nothing moves.

Four things are done otherwise than there, but for `strict_quark`. The ranges are known of 8 bits: of wider codes, the
position that counts is the one at which 8 bits have the same reach. Which way is taken is decided by what it costs:
the squared error that calibration measured at each exponent, relative to the tensor's power. Tensors that must have
one position, as around a Concat, get it together, the one that costs all of them least, not the coarsest. And no
shift is left out of its range: where ways undo each other's, positions go towards one at which all rules hold.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jq.arithmetic.formats import Integer
from jq.arithmetic.numerics import power_of_two
from jq.calibration.observed import cuts_alone
from jq.calibration.stats import Stats
from jq.config import QuantConfig
from jq.graph import Graph, Node
from jq.npu.shifts import ALIGNED, LINEAR, RULES, SUMS, At, Links, NodeTensors, Positions, Reason, Rule, Ways, alike
from jq.ops.kinds import is_product
from jq.ops.linear import linear_layer
from jq.plan import Plan, QParams
from jq.util.mapped import BLOCK, release

_SWEEPS_OF_QUARK, _SWEEPS = 5, 100
_PRICE = 0.01  # of moving again what was moved: a relative squared error
_LIMIT = 127  # of positions, as `exponent_of` reads them
_HOME = 7  # if all positions are this one, every shift is in its range


@dataclasses.dataclass(frozen=True)
class Move:
    """A position that constraints changed, the last of them, and the relative squared error before and after."""

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
    graph: Graph, plan: Plan, stats: Stats | None, config: QuantConfig, params: Mapping[str, Any] | None = None
) -> tuple[Plan, tuple[Move, ...]]:
    """Return the plan with positions that the NPU can compute with, and what was moved for that."""
    if not config.constraints:
        return plan, ()
    links, strict, start = _links(graph, plan, config), config.strict_quark, _positions(plan, config)
    spare = {name: _spare(plan[name], config) for name in start}
    error = Errors(graph, plan, stats, {**graph.params, **(params or {})}, keeps_codes=strict, spare=spare)
    links, because = (links, {}) if strict else _united(links, config, start)
    groups: dict[str, list[str]] = {}
    for name in start:
        groups.setdefault(links.group(name), []).append(name)
    cost = _Cost(error, groups, links)
    positions = {group: cost.best(group, [start[m] for m in members]) for group, members in groups.items()}
    last = dict((_sweeps_of_quark if strict else _sweeps_at_least_cost)(config, cost, positions))
    changed: dict[str, QParams | None] = {}
    moves = []
    for name, before in start.items():
        group = links.group(name)
        if (after := positions[group]) != before:
            coded = plan[name].scale if strict and name in plan.weights else None
            changed[name] = dataclasses.replace(plan[name], scale=power_of_two(-after - spare[name]), coded=coded)
            rule, site = last.get(group) or because.get(name) or because[group]
            real = before + spare[name], after + spare[name]
            moves.append(Move(rule, site.node.label, name, *real, error(name, before), error(name, after)))
    return plan.replace(changed), tuple(moves)


def violations(graph: Graph, plan: Plan, config: QuantConfig) -> list[str]:
    """Return what the NPU's compiler would object to: rule and node of each shift that is out of range."""
    links = _links(graph, plan, config)
    positions = {links.group(k): p for k, p in _positions(plan, config).items()}
    return [
        f"{rule} of {site.node.label!r}"
        for rule in config.constraints
        for site in links.sites
        if RULES[rule](site, At(positions, links))
    ]


def moving_together(graph: Graph, plan: Plan, config: QuantConfig) -> list[tuple[str, ...]]:
    """Return the tensors with positions, each with those that must have the same one as it."""
    start = _positions(plan, config)
    links, _ = _united(_links(graph, plan, config), config, start)
    groups: dict[str, tuple[str, ...]] = {}
    for name in start:
        groups[links.group(name)] = (*groups.get(links.group(name), ()), name)
    return list(groups.values())


def _links(graph: Graph, plan: Plan, config: QuantConfig) -> Links:
    """The links of the nodes that the chip computes; the vendor's tool counts those that run in float, too."""
    links = Links.of(graph, plan)
    return links if config.strict_quark else links.computed()


def _has_position(qparams: QParams) -> bool:
    short = isinstance(qparams.grid, Integer) and qparams.grid.bits <= 16
    return short and qparams.is_power_of_two and qparams.axis is None and not qparams.dynamic


def _positions(plan: Plan, config: QuantConfig) -> Positions:
    """The positions of all tensors that have one, as the rules count them."""
    having = [name for name in plan if _has_position(plan[name])]
    return {name: -int(plan[name].exponent) - _spare(plan[name], config) for name in having}


def _spare(qparams: QParams, config: QuantConfig) -> int:
    """How many bits codes have beyond the 8 of which the rules are."""
    assert isinstance(qparams.grid, Integer)
    return 0 if config.strict_quark else max(0, qparams.grid.bits - 8)


# --- What a position costs ---


@dataclasses.dataclass(frozen=True, eq=False)
class Errors:
    """The squared error of a tensor at a position, relative to its power, as calibration measured it."""

    graph: Graph
    plan: Plan
    stats: Stats | None
    params: Mapping[str, Any]
    keeps_codes: bool
    spare: Mapping[str, int] = dataclasses.field(default_factory=dict)  # bits that positions do not count
    known: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)

    def __call__(self, tensor: str, position: int) -> float:
        """The error, at most about 1 where everything is rounded away."""
        if (tensor, position) not in self.known:
            measure = self._of_weight if tensor in self.plan.weights else self._of_activation
            self.known[tensor, position] = measure(tensor, position + self.spare.get(tensor, 0))
        return self.known[tensor, position]

    def _of_weight(self, tensor: str, position: int) -> float:
        array, qparams, scale = np.asarray(self.params[tensor], np.float32), self.plan[tensor], power_of_two(-position)
        assert isinstance(qparams.grid, Integer)
        coded = np.asarray(qparams.scale) if self.keeps_codes else scale
        low, high = (int(bound - qparams.zero_point) for bound in (qparams.grid.qmin, qparams.grid.qmax))
        lost = array - np.clip(np.rint(array / coded), low, high) * scale
        power = float(np.square(array, dtype=np.float64).sum())
        release(array)
        return float(np.square(lost.astype(np.float64)).sum()) / power if power else 0.0

    def share(self, node: Node, tensor: str) -> float:
        """A tensor's part of the power of the sum that it enters at a node, or at another that reads it, the largest.

        It is 1 where it is not known. Errors of weights come independently of what they multiply, so each adds its
        square times that of the input.
        """
        readers = self.graph.consumers.get(tensor, ())
        if node not in readers or tensor in self.graph.output_names:
            return 1.0
        return max(self._share(reader, tensor) for reader in readers)

    def _share(self, node: Node, tensor: str) -> float:
        if node.inputs.count(tensor) != 1:  # read twice, or by a subgraph
            return 1.0
        index, part = node.inputs.index(tensor), 0.0
        if node.op_type in SUMS or (node.op_type in LINEAR and index == 2):
            part = self._mean_square(tensor)
        elif node.op_type in LINEAR and index == 1 and tensor in self.params:
            array, layer = self.params[tensor], linear_layer(self.graph, node)
            outputs = 1 if layer is None else array.shape[layer.axis]
            part = self._mean_square(tensor) * array.size / outputs * self._mean_square(node.inputs[0])
        whole = self._mean_square(node.outputs[0]) if part else 0.0
        return part / whole if whole else 1.0

    def _of_activation(self, tensor: str, position: int) -> float:
        name, exponent = self.measured(tensor), -position
        grid = self.plan[tensor].grid
        assert isinstance(grid, Integer)
        limit = float(grid.qmax - grid.middle)
        if self.stats is None or name is None:  # taken to fill the codes that it has
            return _at_reach(limit * 2.0 ** int(self.plan[tensor].exponent), limit, exponent)
        reach = max(map(abs, self.stats.range(name)))
        measured = self.stats.config.activation_grid
        if "errors" not in self.stats.observers or not reach or limit != measured.qmax - measured.middle:
            return _at_reach(reach, limit, exponent)
        table = self.stats.errors(name)
        at = int(np.abs(table["exponent"] - exponent).argmin())
        beyond = abs(exponent - int(table["exponent"][at]))
        if not table["power"] or (beyond and not table["total"][at]):  # the values are multiples of the coarsest scale
            return _at_reach(reach, limit, exponent)
        # Beyond the table, rounding grows fourfold with each exponent, and clipping is as bad as that or worse.
        return min(1.0, float(table["total"][at] / table["power"]) * 4.0**beyond)

    def measured(self, tensor: str) -> str | None:
        """The tensor whose statistics tell of this one: its own, or those of the Relu that alone reads it."""
        while self.stats is not None and tensor not in self.stats.tensors:
            reader = next((n for n in self.graph.consumers.get(tensor, ()) if cuts_alone(self.graph, n)), None)
            if reader is None:
                return None
            tensor = reader.outputs[0]
        return tensor

    def _mean_square(self, tensor: str) -> float:
        """The power of a tensor per element; 0 where that is not known."""
        if tensor in self.params:
            mean = float(np.square(np.asarray(self.params[tensor], np.float64)).mean())
            release(self.params[tensor])
            return mean
        name = self.measured(tensor)
        return (0.0 if self.stats is None or name is None else self.stats.mean_square(name)) or 0.0


def _at_reach(reach: float, limit: float, exponent: int) -> float:
    """The relative error, about, of values that spread to `reach`, in codes up to `limit`."""
    if not reach:
        return 0.0
    clipped = max(0.0, 1 - limit * 2.0**exponent / reach) ** 2
    return float(min(1.0, clipped + 4.0**exponent / 12 / (reach / 3) ** 2))


def errors_of(graph: Graph, plan: Plan, stats: Stats | None) -> Callable[[str], float | None]:
    """Return what tells of each tensor the squared error that a plan makes, relative to its power, if it is known."""
    measured = Errors(graph, plan, stats, graph.params, keeps_codes=False)

    def error(tensor: str) -> float | None:
        qparams = plan[tensor]
        if tensor in plan.weights:
            lost, power = squares_of(graph.params[tensor], qparams)
            return float(lost / power) if power else None
        known = stats is not None and "errors" in stats.observers and measured.measured(tensor) is not None
        return measured(tensor, -int(qparams.exponent)) if known and _has_position(qparams) else None

    return error


def squares_of(weight: np.ndarray, qparams: QParams) -> tuple[float, float]:
    """Return the sums of squares of a weight's rounding errors and of the weight."""
    large = weight.size > BLOCK and isinstance(qparams.grid, Integer)
    sums = np.zeros(2)
    for part, own in qparams.parts(weight) if large else [(..., qparams)]:
        array = np.asarray(weight[part], np.float64)
        sums += np.square(array - own.given_back(array)).sum(), np.square(array).sum()
    release(weight)
    return float(sums[0]), float(sums[1])


@dataclasses.dataclass(frozen=True, eq=False)
class _Cost:
    """The errors that moving groups of tensors adds."""

    error: Errors
    groups: Mapping[str, Sequence[str]]
    links: Links

    def best(self, group: str, positions: Sequence[int]) -> int:
        """The position of least error for all of a group, between those that they have; ties go to the coarser."""
        between = range(min(positions), max(positions) + 1)
        if len(between) == 1:
            return between[0]
        return min(between, key=lambda p: (sum(self.error(m, p) for m in self.groups[group]), p))

    def of_way(self, site: NodeTensors, way: Mapping[str, int], at: At) -> float:
        """The error that a way adds over all that it moves; undoing another rule's move is no gain."""
        added = sum(
            (self.error(m, after) - self.error(m, before)) * self.error.share(site.node, m)
            for tensor, after in way.items()
            if (before := at(tensor)) is not None
            for m in self.groups[self.links.group(tensor)]
        )
        return max(0.0, added)

    def moves_activations(self, way: Mapping[str, int]) -> bool:
        """Whether a way moves more than constants."""
        moved = (m for tensor in way for m in self.groups[self.links.group(tensor)])
        return any(m in self.error.plan.activations for m in moved)


# --- The fixed point ---


def _united(links: Links, config: QuantConfig, start: Positions) -> tuple[Links, dict[str, Reason]]:
    """The links with all that must be alike moving together, and why each tensor and each group does."""
    at, because = At(start, dataclasses.replace(links, leader={})), dict[str, Reason]()
    for rule in (r for r in ALIGNED if r in config.constraints):
        for site in at.links.sites:
            if tensors := alike(rule, site, at):
                links = links.unite(tensors)
                because = {**dict.fromkeys(tensors, (rule, site)), **because}
    return links, {**{links.group(t): reason for t, reason in because.items()}, **because}


def _sweeps_of_quark(config: QuantConfig, cost: _Cost, positions: Positions) -> Iterator[tuple[str, Reason]]:
    """Sweeps as the vendor's tool makes them, where the shift of a product asks for no further one."""
    for _ in range(_SWEEPS_OF_QUARK):
        again = False
        for group, (rule, site) in _sweep(config, cost.links, positions, lambda *seen: _ways(*seen)[0]):
            again |= not (rule == "shift_write" and is_product(site.node))
            yield group, (rule, site)
        if not again:
            return


def _sweeps_at_least_cost(config: QuantConfig, cost: _Cost, positions: Positions) -> Iterator[tuple[str, Reason]]:
    """Sweeps that take the cheapest way that mends the shift, of equal ones that of constants, until all are mended.

    Each time that something is moved, moving it costs more: so ways that undo each other's give in where that is
    cheapest. If they do not for long, or no way mends a shift, all goes homeward, which comes to an end.
    """
    times: Counter[str] = Counter()

    def price(site: NodeTensors, way: Mapping[str, int], at: At) -> tuple[float, bool]:
        again = _PRICE * sum(times[cost.links.group(t)] for t in way)
        return cost.of_way(site, way, at) + again, cost.moves_activations(way)

    for sweep in itertools.count():

        def choose(rule: Rule, site: NodeTensors, at: At, *, patient: bool = sweep < _SWEEPS) -> dict[str, int]:
            ways = [way for way in _ways(rule, site, at) if not rule(site, at.moved(way))] if patient else []
            return min(ways, key=lambda way: price(site, way, at)) if ways else _homeward(rule, site, at)

        before = times.total()
        for group, reason in _sweep(config, cost.links, positions, choose):
            times[group] += 1
            yield group, reason
        if times.total() == before:
            return


def _homeward(rule: Rule, site: NodeTensors, at: At) -> dict[str, int]:
    """All positions at a node as many steps nearer to `_HOME` as the rule takes."""
    here = {t: p for t in (*site.inputs, site.output) if t is not None and (p := at(t)) is not None}
    ways = ({t: p + min(max(_HOME - p, -n), n) for t, p in here.items()} for n in itertools.count(1))
    return next(way for way in ways if not rule(site, at.moved(way)))


def _ways(rule: Rule, site: NodeTensors, at: At) -> Ways:
    """The ways of a rule, within the positions that there are."""
    return [{t: min(max(p, -_LIMIT), _LIMIT) for t, p in way.items()} for way in rule(site, at)]


def _sweep(
    config: QuantConfig, links: Links, positions: Positions, choose: Callable[[Rule, NodeTensors, At], dict[str, int]]
) -> Iterator[tuple[str, Reason]]:
    """The moves of one pass of every rule over every node; positions change under way, as in the vendor's tool."""
    at = At(positions, links)
    for name, rule in ((n, r) for n, r in RULES.items() if n in config.constraints):
        for site in (site for site in links.sites if rule(site, at)):
            for tensor, after in choose(rule, site, at).items():
                group = links.group(tensor)
                if positions[group] != after:
                    positions[group] = after
                    yield group, (name, site)
