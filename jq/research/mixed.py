"""Which format each layer gets, where a budget does not allow the best one everywhere.

What a layer costs at the outputs is measured for each format, alone; what it costs on the chip is counted. That losses
add up is the assumption that makes it a knapsack problem, solved by an integer program (HAWQ-V3: Yao et al.,
arXiv:2011.10680) or greedily; the loss of the plan that comes out is measured, and stands beside the predicted one.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from jax.sharding import Mesh

from jq.arithmetic.formats import BFLOAT16, INT16
from jq.calibration.calibrate import calibrate
from jq.calibration.stats import Stats
from jq.config import QuantConfig, resolve
from jq.data.sources import readable_again
from jq.errors import ConfigError, check_choice
from jq.evidence.plots import front_plot
from jq.graph import Graph, Node
from jq.plan import Plan
from jq.plan.planning import make_plan
from jq.plan.scales import channel_axes
from jq.research.executors import Executor
from jq.research.islands import bits, products
from jq.research.losses import CURVED, Loss
from jq.research.sensitivities import grouped, sensitivity
from jq.util import files, markup
from jq.util.sparse import for_solver

Cost = Literal["bitops", "size"]
Solver = Literal["milp", "greedy"]
Options = Mapping[str, Mapping[str, Any]]
FORMATS: Options = {
    "int8": {},  # the config's own
    "int16": {"activation": INT16, "weight": INT16},
    "bf16": {"activation": BFLOAT16, "weight": BFLOAT16},
}
_FRONT = 24  # budgets of the front
_SCALE = 1e4  # of losses in the integer program, whose solver stops at differences of 1e-6


@dataclasses.dataclass(frozen=True)
class LayerFormat:
    """A layer, and what was chosen for it."""

    name: str
    format: str
    losses: Mapping[str, float]  # of each format, alone
    costs: Mapping[str, float]  # of each format: bit operations, or bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """Formats for the layers of a network. `config` and `plan` are those of `jq.quantize` and `jq.export`."""

    config: QuantConfig
    plan: Plan
    loss: Loss
    cost: Cost
    budget: float  # at most this many times the cost of the cheapest formats
    solver: Solver
    layers: tuple[LayerFormat, ...]
    spent: float  # in the same unit
    predicted: float  # the layers' losses, added up
    measured: float  # end to end, all of the plan
    uniform: Mapping[str, tuple[float, float, float]]  # cost, predicted and measured loss of one format for all
    front: tuple[tuple[float, float], ...]  # cost and predicted loss of the best choice at rising budgets

    def summary(self, count: int = 20) -> str:
        """The choice, its cost and its loss, and the layers that differ from the cheapest, as lines of text."""
        lines = [f"{self.cost} {self.spent:.3f} of {self.budget:g} ({self.solver})"]
        lines.append(f"  {self.loss} {self.measured:.4g} (predicted {self.predicted:.4g})")
        for name, (cost, predicted, measured) in self.uniform.items():
            losses = f"{self.loss} {measured:.4g} (predicted {predicted:.4g})"
            lines.append(f"  all in {name}: {self.cost} {cost:.3f}, {losses}")
        cheapest = {layer.name: min(layer.costs, key=layer.costs.__getitem__) for layer in self.layers}
        raised = [layer for layer in self.layers if layer.format != cheapest[layer.name]]
        lines += [f"  {layer.format:<6} {layer.name}" for layer in raised[:count]]
        if len(raised) > count:
            lines.append(f"  and {len(raised) - count} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers; the config as its own `to_dict` has it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("plan", "layers")}
        fields |= {"config": self.config.to_dict(), "layers": [dataclasses.asdict(layer) for layer in self.layers]}
        return fields

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, atomically."""
        files.write(path, json.dumps(self.to_dict(), indent=2, allow_nan=False))

    def plot(self) -> str:
        """The Pareto front, the choice and one format for all, as SVG."""
        marks = [("chosen", self.spent, self.predicted), *((k, c, p) for k, (c, p, _) in self.uniform.items())]
        return front_plot(f"{self.loss} against {self.cost}", self.cost, f"{self.loss}, predicted", self.front, marks)

    def _repr_html_(self) -> str:
        rows = [(n.name, n.format, *(f"{n.losses[k]:.4g}" for k in n.losses)) for n in self.layers]
        columns = ("layer", "format", *(f"{self.loss} in {k}" for k in self.layers[0].losses))
        return markup.preview(self.summary(0).splitlines()[0], columns, rows) + self.plot()


@dataclasses.dataclass(frozen=True, eq=False)
class FormatTable:
    """The cost of every layer in every format, on the chip and at the outputs: `choose` takes it for any budget."""

    graph: Graph
    config: QuantConfig
    stats: Stats | None
    cost: Cost
    formats: Options
    nodes: Mapping[str, Sequence[Node]]  # of each layer
    losses: np.ndarray  # [layers, formats], of each alone
    prices: np.ndarray  # [layers, formats], bit operations or bytes
    whole: tuple[float, ...]  # the loss with one format for all
    data: Any
    measure: Mapping[str, Any]  # options with which `sensitivity` measured

    def choose(self, budget: float, solver: Solver = "milp") -> Mixed:
        """The formats whose losses add up to the least within a budget, and the loss that they have together."""
        _check_budget(budget, solver)
        kinds, rows, least = list(self.formats), np.arange(len(self.nodes)), self.prices.min(axis=1).sum()
        solve = milp_choice if solver == "milp" else greedy_choice
        chosen = solve(self.losses, self.prices, budget * least)
        formats = [kinds[i] for i in chosen]
        losses, prices = (
            [dict(zip(kinds, row, strict=True)) for row in t.tolist()] for t in (self.losses, self.prices)
        )
        layers = tuple(map(LayerFormat, self.nodes, formats, losses, prices))
        mixed = overridden(self.config, self.nodes, {layer.name: self.formats[layer.format] for layer in layers})
        plan, loss = make_plan(self.graph, self.stats, mixed), self.measure["loss"]
        measured = sensitivity(self.graph, plan, self.data, by={"all": list(plan)}, **self.measure).whole[loss]
        uniform = {
            k: (float(self.prices[:, i].sum() / least), float(self.losses[:, i].sum()), self.whole[i])
            for i, k in enumerate(kinds)
        }
        spent, predicted = float(self.prices[rows, chosen].sum() / least), float(self.losses[rows, chosen].sum())
        front = pareto_front(self.losses, self.prices, solver)
        result = spent, predicted, measured, uniform, front
        return Mixed(mixed, plan, loss, self.cost, float(budget), solver, layers, *result)


def mixed_precision(
    graph: Graph,
    data: Any,
    config: QuantConfig | str = "XINT8",
    *,
    budget: float,
    solver: Solver = "milp",
    **options: Any,
) -> Mixed:
    """Return formats for the layers of a prepared graph such that the loss is least within a budget.

    `budget` is in units of the cheapest choice: 1.5 allows half as much again. The options are those of `format_table`,
    which measures once for many budgets.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> mixed = mixed_precision(graph, images[:16], budget=1.5, limit=4, cost="size")
    >>> mixed.spent <= 1.5, mixed.predicted <= mixed.uniform["int8"][1]
    (True, True)
    """
    _check_budget(budget, solver)
    return format_table(graph, data, config, **options).choose(budget, solver)


def format_table(
    graph: Graph,
    data: Any,
    config: QuantConfig | str = "XINT8",
    *,
    cost: Cost = "bitops",
    formats: Options = FORMATS,
    loss: Loss = "kl",
    stats: Stats | None = None,
    screen: int | None = None,
    limit: int | None = None,
    mesh: Mesh | None = None,
    executor: Executor | None = None,
) -> FormatTable:
    """Return what each layer of a prepared graph costs in each format, measured alone.

    `cost` counts products times the bits of both factors, an activation having those of the layer that makes it in
    (bitops), or bytes of weights (size). `formats` are options of `QuantConfig.overrides` by name. Layers are the nodes
    with weights and their activations; what has no weights stays as `config` has it. `screen`, `limit` and `executor` are
    those of `jq.research.sensitivity`.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> table = format_table(graph, images[:16], formats={"int8": {}, "wide": {"activation": INT16}}, limit=4)
    >>> [round(float(price), 1) for price in table.prices.sum(0) / table.prices.sum(0)[0]]
    [1.0, 2.0]
    """
    config = resolve(config)
    check_choice("loss", loss, CURVED)
    check_choice("cost", cost, get_args(Cost))
    if len(formats) < 2:
        raise ConfigError(f"formats has {len(formats)}; expected at least two to choose from")
    data = readable_again(data, graph.inputs, config.seed)
    stats = calibrate(graph, data, config, mesh=mesh) if stats is None and config.calibrates else stats
    nodes = _layers(graph, make_plan(graph, stats, config))
    measure: dict[str, Any] = {"loss": loss, "limit": limit, "seed": config.seed, "mesh": mesh}
    losses, prices = (np.zeros((len(nodes), len(formats))) for _ in range(2))
    whole = []
    for i, options in enumerate(formats.values()):
        plan = make_plan(graph, stats, overridden(config, nodes, dict.fromkeys(nodes, options)))
        groups = {k: sorted(v) for k, v in grouped(graph, plan, "layer").items() if k in nodes}
        measured = sensitivity(graph, plan, data, by=groups, screen=screen, executor=executor, **measure)
        whole.append(measured.whole[loss] if measured.whole else math.nan)
        losses[:, i] = [max(0.0, measured[layer].loss) if layer in groups else 0.0 for layer in nodes]
        prices[:, i] = [_cost(graph, n, config.replace(overrides=(), **options), cost) for n in nodes.values()]
    return FormatTable(graph, config, stats, cost, formats, nodes, losses, prices, tuple(whole), data, measure)


def _check_budget(budget: float, solver: str) -> None:
    check_choice("solver", solver, get_args(Solver))
    if not (isinstance(budget, (int, float)) and math.isfinite(budget) and budget >= 1):
        raise ConfigError(f"budget is {budget!r}; expected at least 1, which is the cost of the cheapest formats")


def overridden(
    config: QuantConfig, nodes: Mapping[str, Sequence[Node]], options: Mapping[str, Mapping[str, Any]]
) -> QuantConfig:
    """The config with options for all nodes of some layers, after overrides that it has."""
    own = {pattern: dict(values) for pattern, values in config.overrides}
    for layer, values in options.items():
        for node in nodes[layer] if values else ():
            pattern = glob.escape(node.label)
            own[pattern] = own.pop(pattern, {}) | dict(values)
    return config.replace(overrides=own)


def milp_choice(losses: np.ndarray, costs: np.ndarray, limit: float) -> np.ndarray:
    """Return for each layer (a row) the format (a column) such that the losses' sum is least and the costs' within a limit.

    >>> milp_choice(np.array([[3.0, 0], [2, 0]]), np.array([[1.0, 4], [1, 2]]), 5)
    array([1, 0])
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import block_array, csr_array

    rows, columns = losses.shape
    each = csr_array(np.kron(np.eye(rows), np.ones(columns)))
    scaled = losses / max(float(losses.max()), 1e-300) * _SCALE
    weights = block_array([[each], [csr_array(costs.reshape(1, -1) / limit)]])
    within = LinearConstraint(for_solver(weights), [*np.ones(rows), -np.inf], [*np.ones(rows), 1 + 1e-9])
    solution = milp(scaled.reshape(-1), integrality=np.ones(losses.size), bounds=Bounds(0, 1), constraints=within,
                 options={"mip_rel_gap": 0})  # fmt: skip
    if solution.x is None:
        raise ConfigError(f"no choice costs at most {limit:g}; the cheapest costs {costs.min(axis=1).sum():g}")
    return np.asarray(solution.x).reshape(losses.shape).argmax(axis=1)


def greedy_choice(losses: np.ndarray, costs: np.ndarray, limit: float) -> np.ndarray:
    """Return what `milp_choice` does, not always the best: from the cheapest, what gains most for its price at each step.

    >>> greedy_choice(np.array([[3.0, 0], [2, 0]]), np.array([[1.0, 4], [1, 2]]), 5)
    array([0, 1])
    """
    rows = np.arange(len(losses))
    chosen = np.lexsort((losses, costs), axis=1)[:, 0]
    if costs[rows, chosen].sum() > limit * (1 + 1e-9):
        raise ConfigError(f"no choice costs at most {limit:g}; the cheapest costs {costs[rows, chosen].sum():g}")
    while True:
        gain = losses[rows, chosen][:, None] - losses
        price = costs - costs[rows, chosen][:, None]
        room = limit * (1 + 1e-9) - costs[rows, chosen].sum()
        worth = np.where((gain > 0) & (price <= room), gain / np.maximum(price, 1e-12 * limit), -np.inf)
        row, column = np.unravel_index(worth.argmax(), worth.shape)
        if worth[row, column] == -np.inf:
            return chosen
        chosen[row] = column


def pareto_front(losses: np.ndarray, costs: np.ndarray, solver: Solver = "milp") -> tuple[tuple[float, float], ...]:
    """Return cost, in units of the least, and loss of the best choice at budgets up to that of the least loss."""
    rows, least = np.arange(len(losses)), costs.min(axis=1).sum()
    solve = milp_choice if solver == "milp" else greedy_choice
    most = costs[rows, np.lexsort((costs, losses), axis=1)[:, 0]].sum()
    front: dict[float, float] = {}
    for limit in np.linspace(least, max(most, least), _FRONT):
        chosen = solve(losses, costs, float(limit))
        spent, loss = float(costs[rows, chosen].sum() / least), float(losses[rows, chosen].sum())
        if not front or loss < min(front.values()):
            front[spent] = loss
    return tuple(sorted(front.items()))


def _layers(graph: Graph, plan: Plan) -> dict[str, list[Node]]:
    """The nodes of each layer that has weights: the one that reads them, and what makes its activation."""
    layers: dict[str, list[Node]] = {}
    for name, tensors in grouped(graph, plan, "layer").items():
        if any(t in plan.weights for t in tensors):
            layers[name] = [n for n in graph.nodes if n.label == name or not tensors.isdisjoint(n.outputs)]
    if not layers:
        raise ConfigError("the config quantizes no weights, so there are no layers to choose formats for")
    return layers


def _cost(graph: Graph, nodes: Sequence[Node], options: QuantConfig, cost: Cost) -> float:
    weights = {k for n in nodes for k in n.reads() if k in graph.params}
    if cost == "size":
        return sum(graph.params[k].size for k in weights) * bits(options.weight) / 8
    axes = channel_axes(graph)
    return sum(products(graph, n, axes) for n in nodes) * bits(options.weight) * bits(options.activation)
