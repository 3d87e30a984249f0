"""Islands: the regions of a network that are not in its 8-bit format. What costs on the chip is the region, not a layer.

At each edge of a region values leave the NPU's 8-bit kernels and come back, so that ten layers in a row cost little more
than one, and ten apart cost ten times as much. `choose` is the integer program that bounds both: work, and regions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jq.arithmetic.formats import Float, Format
from jq.config import QuantConfig
from jq.errors import ConfigError
from jq.graph import Graph, Node
from jq.ops.table import lookup
from jq.plan import Plan
from jq.plan.placement import absorbed
from jq.plan.scales import channel_axes

FLOAT_BITS = 16.0  # as which the compiler runs what is float in the file: bfloat16


def bits(grid: Format) -> float:
    """The bits of a format's values."""
    return 8.0 * grid.dtype.itemsize if isinstance(grid, Float) else float(grid.bits)


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
        own = plan.activations.get(output)
        alike = own is not None and bits(own.grid) == base
        kept = output in plan.nodes and (alike or (own is None and output in inside))
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
    gains: Sequence[float], costs: Sequence[float], sources: Sequence[Sequence[int]], limit: float, most: int
) -> np.ndarray:
    """Return which nodes to take: the most gain with costs within a limit, in at most so many regions.

    `sources` are the nodes that each one reads. A region begins at a node none of whose sources is taken, so that the
    number of such beginnings bounds that of the regions.

    >>> choose([5, 0, 4, 3], [1, 0, 1, 1], [[], [0], [1], []], limit=2, most=1).tolist()
    [True, True, True, False]
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, hstack, identity, vstack

    count = len(gains)
    edges = [(i, j) for i, before in enumerate(sources) for j in set(before)]
    reads = csr_array(
        (np.ones(len(edges)), ([i for i, _ in edges], [j for _, j in edges])) if edges else (count, count),
        shape=(count, count),
    )
    # taken - sources taken - begins <= 0; costs within the limit; beginnings within their number.
    begins = hstack([identity(count) - reads, -identity(count)])
    rows = csr_array(
        np.vstack([np.r_[np.asarray(costs, float), np.zeros(count)], np.r_[np.zeros(count), np.ones(count)]])
    )
    within = LinearConstraint(vstack([begins, rows]), -np.inf, np.r_[np.zeros(count), limit, most])
    gain = np.asarray(gains, float) / max(max(gains, default=0.0), 1e-300)
    small = np.full(count, 1e-6)  # of two choices that gain alike, the one of fewer nodes
    answer = milp(np.r_[small - gain, np.zeros(count)], integrality=np.ones(2 * count), bounds=Bounds(0, 1),
                  constraints=within, options={"time_limit": 10.0})  # fmt: skip
    if answer.x is None:
        raise ConfigError(f"no choice of nodes costs at most {limit:g} in {most} regions")
    return np.asarray(answer.x[:count] > 0.5)
