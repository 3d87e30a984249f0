"""The position constraints: each rule by the vendor's table, all of them together on random graphs, and their cost."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from onnx import helper

import jq
from jq.formats import INT8, UINT8
from jq.observers import ErrorTable
from jq.plan import Plan, QParams
from jq.stats import Stats
from tests.test_calibrate import built

XINT8 = jq.presets["XINT8"]
STRICT = XINT8.replace(strict_quark=True)
SIXTH = 1 / 6
node = helper.make_node


def qparams(position, grid=UINT8.narrow):
    return QParams(np.float32(2.0**-position), np.int32(grid.middle), grid)


def plan_of(graph, positions):
    """A plan of these tensors at these positions."""
    parts = [{}, {}]
    for name, position in positions.items():
        weight = name in graph.params
        parts[weight][name] = qparams(position, INT8.narrow if weight else UINT8.narrow)
    return Plan(*parts, nodes=frozenset(n.outputs[0] for n in graph.nodes))


def positions_of(plan):
    return {name: -int(plan[name].exponent) for name in plan}


# ---------------------------------------------------------------------------------------------
# Random graphs
# ---------------------------------------------------------------------------------------------

SHAPE = (4, 2, 2)
ARRAYS = {
    "low": np.zeros(4, np.int64),
    "high": np.array([1, 4, 2, 2]),
    "pads": np.zeros(8, np.int64),
    "flat": np.array([1, 16]),
    "image": np.array([1, *SHAPE]),
}


@st.composite
def graphs(draw):
    """A DAG of operators that all keep the shape; some results stay unread."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    nodes, arrays, made = [], dict(ARRAYS), ["x"]

    def new(op, *inputs, name=None, **attrs):
        name = name or f"t{len(nodes)}"
        nodes.append(node(op, list(inputs), [name], name=f"n_{name}", **attrs))
        return name

    def weight(*shape):
        name = f"w{len(arrays)}"
        arrays[name] = (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 8)).astype(np.float32)
        return name

    def conv(x, channels=4):
        more = [weight(4)] if draw(st.booleans()) else []
        y = new("Conv", x, weight(4, channels, 1, 1), *more)
        after = draw(st.sampled_from(["", "Relu", "LeakyRelu"]))
        return new(after, y, **({"alpha": 0.1} if after == "LeakyRelu" else {})) if after else y

    def gemm(x):
        y = new("Gemm", new("Reshape", x, "flat"), weight(16, 16), weight(16), transB=1)
        return new("Reshape", y, "image")

    def pool(x):
        op = draw(st.sampled_from(["MaxPool", "AveragePool"]))
        return new(op, x, kernel_shape=[3, 3], pads=[1] * 4)

    def gate(x):
        return new("HardSigmoid", x, alpha=SIXTH, beta=0.5)

    unary = {
        "conv": conv,
        "gemm": gemm,
        "pool": pool,
        "gate": gate,
        "swish": lambda x: new("Mul", x, gate(x)),
        "pad": lambda x: new("Pad", x, "pads"),
        "slice": lambda x: new("Slice", x, "low", "high"),
    }
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from([*unary, "Add", "Sub", "Mul", "Concat"]))
        x = draw(st.sampled_from(made))
        if kind in unary:
            made.append(unary[kind](x))
            continue
        y = draw(st.sampled_from(made))
        z = new(kind, x, y, **({"axis": 1} if kind == "Concat" else {}))
        made.append(conv(z, 8) if kind == "Concat" else z)
    read = {i for n in nodes for i in n.input}
    outputs = [o for n in nodes for o in n.output if o not in read]
    return jq.load(built(nodes, [1, *SHAPE], outputs, arrays))


def stats_of(arrays, config=XINT8):
    """What calibration would say of these tensors, each of one sample: computed by numpy."""
    observer = ErrorTable(grid=config.activation_grid, candidates=6)
    low, high = (np.array([f(a) for a in arrays.values()]) for f in (np.min, np.max))
    place = observer.place(low, high)
    sums = []
    for row, array in enumerate(arrays.values()):
        scaled = np.float64(array).reshape(-1) * place["inverse"][row][:, None]
        clipped = np.clip(scaled, place["least"][row][:, None], place["most"][row][:, None])
        sums.append(np.square(scaled - np.rint(clipped)).sum(1))
    state = {"low": low, "high": high, "sums": np.array(sums)}
    return Stats(
        config, {k: {"errors": 1} for k in arrays}, {"errors": observer}, {"errors": place}, {"errors": state}, 1
    )


@st.composite
def planned(draw):
    """A random graph with random positions; those that hold others' values have theirs."""
    graph = draw(graphs())
    placement = jq.placement.place(graph, XINT8, {k for k, v in graph.values.items() if v.dtype == np.float32})
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    wide = draw(st.sampled_from([3, 8, 20]))
    positions = {k: int(rng.integers(-wide, wide + 8)) for k in [*placement.activations, *placement.weights]}
    plan = plan_of(graph, positions)
    for k, source in jq.placement.shared(graph, plan.nodes, plan).items():
        plan = plan.replace({k: plan[source]})
    kind = draw(st.sampled_from(["none", "tables", "some"]))
    if kind == "none":
        return graph, plan, None
    names = [k for k in placement.activations if kind == "tables" or rng.random() < 0.5] or ["x"]
    reach = {k: 127 * 2.0 ** -(positions_of(plan)[k] if k in plan else 7) for k in names}
    return graph, plan, stats_of({k: rng.standard_normal((1, 4, 2, 2)) * r / 3 for k, r in reach.items()})
