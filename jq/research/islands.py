"""Islands: the regions of a network that are not in its 8-bit format. What costs on the chip is the region, not a layer.

At each edge of a region values leave the NPU's 8-bit kernels and come back, so that ten layers in a row cost little more
than one, and ten apart cost ten times as much. `choose` is the integer program that bounds both: work, and regions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jq.arithmetic.formats import Float, Format
from jq.config import QuantConfig
from jq.errors import ConfigError
from jq.graph import Graph, Node
from jq.ops.table import lookup
from jq.plan import Plan
from jq.plan.placement import absorbed
from jq.plan.scales import channel_axes
from jq.util.sparse import for_solver

FLOAT_BITS = 16.0  # as which the compiler runs what is float in the file: bfloat16


def bits(grid: Format) -> float:
    """The bits of a format's values."""
    return 8.0 * grid.dtype.itemsize if isinstance(grid, Float) else float(grid.bits)


def price(config: QuantConfig) -> float:
    """The cost of a network that is all in a config's own format, in units of 8 bits."""
    return bits(config.activation) * bits(config.weight) / 64


def products(graph: Graph, node: Node, axes: Mapping[str, int]) -> float:
    """The products of weights of a node for one sample; `axes` are those of the weights' output channels."""
    total = 0.0
    for name in set(node.reads()) & axes.keys():
        weight, output = graph.params[name], graph.values[node.outputs[0]].shape or ()
        places = math.prod(d for d in output if isinstance(d, int)) / weight.shape[axes[name]]
        total += weight.size * places
    return total


def work(graph: Graph, plan: Plan) -> tuple[float, float]:
    """Return the bit operations of a plan, in units of those with 8 bits everywhere, and the share of products in 8 bits.

    A product counts the bits of both of its factors; those of a layer that is left in float count as bfloat16.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> work(graph, jq.make_plan(graph, jq.calibrate(graph, jq.zoo.calibration_set()[0][:4])))
    (1.0, 1.0)
    """
    axes, spent, narrow, whole = channel_axes(graph), 0.0, 0.0, 0.0
    for node in graph.nodes:
        if count := products(graph, node, axes):
            weights = [plan.weights[k] for k in node.reads() if k in axes and k in plan.weights]
            inputs = [plan.activations[k] for k in node.inputs if k in plan.activations]
            quantized = node.outputs[0] in plan.nodes
            factors = [bits(qs[0].grid) if qs and quantized else FLOAT_BITS for qs in (weights, inputs)]
            spent += count * math.prod(factors)
            narrow += count * (max(factors) <= 8)
            whole += 64 * count
    return (spent / whole, narrow * 64 / whole) if whole else (1.0, 1.0)


def apart(graph: Graph, plan: Plan, config: QuantConfig) -> frozenset[str]:
    """Return the first output of each node that does not compute in the config's own format."""
    base, inside = bits(config.activation), absorbed(graph)
    names = set()
    for node in graph.nodes:
        output = next(iter(node.outputs), "")
        value = graph.values.get(output)
        if value is None or value.dtype is None or value.dtype.kind != "f" or output in graph.arrays:
            continue
        taker = node
        while taker.outputs[0] not in plan.activations and taker.outputs[0] in inside:
            taker = inside[taker.outputs[0]]  # whose result is this one's, rounded
        own = plan.activations.get(taker.outputs[0])
        kept = output in plan.nodes and own is not None and bits(own.grid) == base
        if not kept and node.inputs:  # else it makes a constant
            names.add(output)
    return frozenset(names)


def islands(graph: Graph, outputs: frozenset[str]) -> list[frozenset[str]]:
    """Return the connected regions of some nodes, given by their first outputs; those that move values only are none.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> first, second, *_, last = [n.outputs[0] for n in graph.nodes]
    >>> len(islands(graph, frozenset([first, second, last])))
    2
    """
    root = {name: name for name in outputs}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    nodes = {node.outputs[0]: node for node in graph.nodes if node.outputs and node.outputs[0] in outputs}
    for name, node in nodes.items():
        for source in node.reads():
            made = graph.producer.get(source)
            if made is not None and made.outputs[0] in nodes:
                root[find(name)] = find(made.outputs[0])
    regions: dict[str, set[str]] = {}
    for name in nodes:
        regions.setdefault(find(name), set()).add(name)
    return [frozenset(r) for r in regions.values() if any(not _moves(graph, nodes[name]) for name in r)]


def _moves(graph: Graph, node: Node) -> bool:
    entry = lookup(node, graph.opset(node.domain))
    return entry is not None and bool(entry.moves)


def choose(
    gains: Sequence[float],
    costs: Sequence[float],
    sources: Sequence[Sequence[int]],
    limit: float,
    most: int,
    own: Sequence[float] | None = None,
    held: Mapping[int, bool] = MappingProxyType({}),
) -> np.ndarray:
    """Return which nodes to take: the most gain with costs within a limit, in at most so many regions.

    `sources` are the nodes that each one reads. A region begins at a node none of whose sources is taken, so that the
    number of such beginnings bounds that of the regions; as a region may have several, what is left of the limit goes to
    neighbours, those of the most gain for their cost first. Nodes in `held` are taken, as part of regions that are there
    already, or are not, whatever they gain.

    With `own`, what each node gains alone, its other gain counts only where all nodes that read it are taken too: else its
    result is rounded for these. Then no neighbours are added.

    >>> choose([5, 0, 4, 3], [1, 0, 1, 1], [[], [0], [1], []], limit=2, most=1).tolist()
    [True, True, True, False]
    >>> choose([5, 0, 4, 3], [1, 1, 1, 1], [[], [0], [1], []], limit=1, most=1, own=[0, 0, 0, 2]).tolist()
    [False, False, False, True]
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, hstack, identity, vstack

    count, one = len(gains), identity(len(gains))
    edges = [(i, j) for i, before in enumerate(sources) for j in set(before)]
    readers, read = [i for i, _ in edges], [j for _, j in edges]
    none = csr_array((count, count))

    def at(rows: Sequence[int], columns: Sequence[int], height: int) -> Any:
        return csr_array((np.ones(len(rows)), (list(rows), list(columns))), shape=(height, count))

    # Variables: taken, begins, kept (a result that is not rounded), each for all nodes.
    begins = hstack([one - at(readers, read, count), -one, none])  # taken - sources taken - begins <= 0
    kept = hstack([-one, none, one])  # kept <= taken
    each = range(len(edges))
    inside = hstack([-at(each, readers, len(edges)), csr_array((len(edges), count)), at(each, read, len(edges))])
    zero = np.zeros(count)
    lowest, highest = zero.copy(), np.ones(count)
    for node, inside_already in held.items():
        lowest[node] = highest[node] = inside_already
    sums = csr_array(np.vstack([np.r_[np.asarray(costs, float), zero, zero], np.r_[zero, 1 - lowest, zero]]))
    rows = [begins, kept, *([] if own is None else [inside]), sums]  # kept <= reader taken, where results are rounded
    above = np.r_[np.zeros(sum(r.shape[0] for r in rows) - 2), limit, most]
    values = np.asarray([gains, zero if own is None else own], float)
    values /= max(values.max(initial=0.0), 1e-300)
    small = np.full(count, 1e-6)  # of two choices that gain alike, the one of fewer nodes
    bounds = Bounds(np.r_[lowest, zero, zero], np.r_[highest, np.ones(2 * count)])
    answer = milp(np.r_[small - values[1], zero, -values[0]], integrality=np.ones(3 * count), bounds=bounds,
                  constraints=LinearConstraint(for_solver(vstack(rows)), -np.inf, above), options={"time_limit": 10.0})  # fmt: skip
    if answer.x is None:
        raise ConfigError(f"no choice of nodes costs at most {limit:g} in {most} regions")
    taken = np.asarray(answer.x[:count] > 0.5)
    return taken if own is not None else _grown(taken, gains, costs, edges, limit, highest > 0)


def _grown(
    taken: np.ndarray,
    gains: Sequence[float],
    costs: Sequence[float],
    edges: Sequence[tuple[int, int]],
    limit: float,
    allowed: np.ndarray,
) -> np.ndarray:
    """The nodes with neighbours that gain most for their cost, as far as the limit allows."""
    taken, price, gain = taken.copy(), np.asarray(costs, float), np.asarray(gains, float)
    while True:
        near = np.zeros(len(taken), bool)
        for i, j in edges:
            near[i] |= taken[j]
            near[j] |= taken[i]
        open_ = near & ~taken & allowed & (gain > 0) & (price <= limit - price[taken].sum())
        if not open_.any():
            return taken
        worth = np.where(open_, gain / np.maximum(price, 1e-12), -np.inf)
        taken[worth.argmax()] = True
