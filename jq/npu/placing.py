"""Where a quantized graph's nodes run: the provider's rules, applied to units, and the subgraphs that they make.

The rules are those of `jq.npu.facts.PLACE_RULES`, each under its name. A unit runs as one: where one node of it has to
leave the NPU, all of it does.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from jq.graph import Graph, Node
from jq.graph.quantizers import computes_on_codes, is_dequantize
from jq.graph.schemas import attributes
from jq.npu.facts import BACKEND_FORMATS, FEWEST_CONVS, NPU_FORMATS, NPU_RANK
from jq.npu.facts import is_hard_sigmoid as has_the_chips_slope
from jq.npu.pieces import pieces
from jq.npu.units import ComputeUnit, Units, constant, is_quantizer, units_of
from jq.npu.xir import becomes_xir
from jq.ops.kinds import (
    adds,
    averages,
    divides,
    is_clip,
    is_concat,
    is_conv,
    is_hard_sigmoid,
    is_layer,
    is_matmul,
    is_mean,
    is_product,
    is_reshape,
    is_resize,
    is_sum,
    is_transpose,
    pools_average,
    rectifies,
)

NPU, CPU, EP_CPU = PLACES = ("npu", "cpu", "vitis_ep_cpu")


class Place(NamedTuple):
    """Where a node runs, by which rule, and in which subgraph of the NPU."""

    place: str
    rule: str
    op: str
    output: str  # the node's first, by which the provider's report names it
    subgraph: int | None = None


@dataclasses.dataclass(frozen=True)
class UnitPlace:
    """Where a unit runs, by which rule, and the units that it reads: what a drawing of the graph needs."""

    name: str
    ops: tuple[str, ...]
    place: str
    rule: str
    sources: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """The places of a graph's nodes by name, and how its units stand."""

    format: str
    nodes: Mapping[str, Place]
    subgraphs: int
    running: int  # subgraphs that are run on the NPU
    broken: tuple[tuple[ComputeUnit, str], ...]  # units on the CPU, with the rule
    units: tuple[UnitPlace, ...]
    copies: Mapping[str, int]  # quantizers that the runtime adds, one for each further reader, by place

    @property
    def counts(self) -> dict[str, int]:
        """The number of nodes in each place."""
        counts = Counter(p.place for p in self.nodes.values())
        return {place: counts[place] for place in PLACES}


def place(graph: Graph, backend: str, format: str | None = None, floats: Collection[str] = ()) -> Placed:
    """Return where each node of a quantized graph runs on a backend, in its own format or in one assumed.

    `floats` are nodes, by label, that would be left in float: the units that hold them.
    """
    units = units_of(graph)
    assumed = format or format_of(units)
    whole = _whole(units, backend, assumed)
    rules = [
        (False, "not-quantized")
        if any(n.label in floats for n in unit.nodes)
        else whole or _rule(graph, unit, backend, format or _format(unit, assumed))
        for unit in units.units
    ]
    subgraph = pieces(units.units, [on_npu for on_npu, _ in rules])
    idle = _idle(units, subgraph) if backend == "X2" else set()
    rules = [
        (False, "concat-from-outside") if piece in idle else rule for rule, piece in zip(rules, subgraph, strict=True)
    ]
    numbers = {piece: n for n, piece in enumerate(dict.fromkeys(p for p in subgraph if p is not None))}
    subgraphs = [None if piece is None else numbers[piece] for piece in subgraph]
    nodes = {name: _place(units, node, rules, subgraphs) for name, node in names(graph).items()}
    broken = tuple((u, rule) for u, (on_npu, rule) in zip(units.units, rules, strict=True) if not on_npu)
    drawn = tuple(
        UnitPlace(u.layer.label, tuple(n.op_type for n in u.nodes), NPU if on else CPU, rule, tuple(sorted(u.sources)))
        for u, (on, rule) in zip(units.units, rules, strict=True)
    )
    return Placed(assumed, nodes, len(numbers), len(numbers) - len(idle), broken, drawn, _copies(units, nodes, rules))


def names(graph: Graph) -> dict[str, Node]:
    """A graph's nodes by name, by first output where the name is missing or taken."""
    named: dict[str, Node] = {}
    for node in graph.nodes:
        name = node.label if node.label not in named else next((o for o in node.outputs if o), "?")
        while name in named:
            name += "'"
        named[name] = node
    return named


def format_of(units: Units) -> str:
    """The vendor's name of the format that most units have, or an empty string."""
    formats = Counter(f for f in (format_of_unit(u) for u in units.units if u.activations) if f)
    if "XINT8" in formats and "A8W8" in formats:  # a float scale may happen to be a power of two
        return "A8W8" if "A16W8" not in formats or formats["A8W8"] >= formats["A16W8"] else "A16W8"
    return formats.most_common(1)[0][0] if formats else ""


def format_of_unit(unit: ComputeUnit) -> str:
    """The vendor's name of a unit's format; empty for others."""
    bits = max((c.bits for c in unit.activations), default=0)
    if any(c.bits != 8 for c in unit.weights if c.bits < 32):
        return ""
    exact = all(c.power_of_two for c in unit.activations)
    return {8: "XINT8" if exact else "A8W8", 16: "A16W8"}.get(bits, "")


def _format(unit: ComputeUnit, model: str) -> str:
    """A unit's format, in which scales that happen to be powers of two are those of the model."""
    own = format_of_unit(unit)
    return model if own in ("XINT8", "A8W8") and model in ("XINT8", "A8W8") else own


# --- Rules ---

_Ruling = tuple[bool, str]  # whether on the NPU, and the rule


def _whole(units: Units, backend: str, format: str) -> _Ruling | None:
    """The rule that keeps the whole graph from the NPU, if there is one."""
    nodes = [n for u in units.units for n in u.nodes]
    if format and format not in BACKEND_FORMATS[backend]:
        return False, "backend-format"
    if not any(_is_layer(n) for n in nodes):
        return False, "no-layer"
    convs = sum(is_conv(n) or computes_on_codes(n) for n in nodes)
    return (False, "few-convs") if backend == "X1" and convs < FEWEST_CONVS else None


def _rule(graph: Graph, unit: ComputeUnit, backend: str, format: str) -> _Ruling:
    """Whether a unit runs on the NPU, and the rule that says so."""
    if not unit.between or not (unit.activations or _on_codes(unit)):
        return False, "not-quantized"
    if not format and not _on_codes(unit):
        return False, "format"
    if backend == "X1" and format not in BACKEND_FORMATS["X1"]:
        return False, "backend-format"
    if backend == "X1" and not all(c.centred and c.scales == 1 for c in (*unit.activations, *unit.weights)):
        return False, "x1-zero-point"
    if any(n.domain for n in unit.nodes) and not _on_codes(unit):
        return False, "foreign-domain"
    if any(_rank(graph, n) > NPU_RANK for n in unit.nodes):
        return False, "rank"
    if len(unit.nodes) == 1 and _has_float_operand(graph, unit.layer):
        return False, "not-quantized"
    if backend == "X1" and not all(becomes_xir(graph, n) for n in unit.nodes):
        return False, "x1-setting"
    if len(unit.nodes) > 1:
        return _pair(graph, unit, backend, format)
    return _single(graph, unit.layer, backend, format or "A8W8")


def _pair(graph: Graph, unit: ComputeUnit, backend: str, format: str) -> _Ruling:
    """The rule for operators with no quantizer between."""
    first, second = unit.nodes[:2]
    if len(unit.nodes) > 2 or graph.sole_reader(first.outputs[0]) is not second:
        return False, "float-chain"
    if (_is_layer(first) or adds(first)) and rectifies(second):
        alone = _single(graph, first, backend, format)
        if not alone[0]:
            return alone
        if backend == "X2" and format != "A16W8" and _is_layer(first) and cuts_above(graph, second):
            return (True, "fused-activation") if is_depthwise(graph, first) else (False, "clip-after-conv")
        return True, "fused-activation"
    if is_product(second) and any(constant(graph, i) is not None for i in second.inputs):
        alone = _single(graph, first, backend, format)
        if pools_average(first):
            return alone[0], "pool-factor" if alone[0] else alone[1]
        return alone if not alone[0] or alone[1] == "hard-sigmoid-x1" else (False, "float-chain")
    biased = is_sum(second) and any(constant(graph, i) is not None for i in second.inputs)
    return (True, "matmul-bias") if biased and is_matmul(first) else (False, "float-chain")


def _single(graph: Graph, node: Node, backend: str, format: str) -> _Ruling:
    """The rule for one operator."""
    if backend == "X2" and is_depthwise(graph, node) and _is_pointwise(graph, node):
        return False, "depthwise-1x1"
    if backend == "X1" and _is_the_chips(graph, node):
        return True, "hard-sigmoid-x1"
    if is_resize(node) and node.attrs.get("mode", "nearest") != "nearest":
        return False, "resize-mode"
    if format in NPU_FORMATS.get(node.op_type, ()):
        return True, "listed"
    return (True, "mean-as-pool") if averages(node) and means_image(graph, node) else (False, "not-listed")


def _is_layer(node: Node) -> bool:
    return is_layer(node) or computes_on_codes(node)


def _has_float_operand(graph: Graph, node: Node) -> bool:
    return (adds(node) or is_product(node) or divides(node)) and any(name in graph.params for name in node.inputs)


def _on_codes(unit: ComputeUnit) -> bool:
    return computes_on_codes(unit.layer)


def _is_the_chips(graph: Graph, node: Node) -> bool:
    return is_hard_sigmoid(node) and has_the_chips_slope(attributes(graph, node))


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether a node is a convolution of each channel by itself."""
    weight = constant(graph, node.inputs[1]) if is_conv(node) and len(node.inputs) > 1 else None
    return weight is not None and weight.ndim > 2 and weight.shape[1] == 1 and node.attrs.get("group", 1) > 1


def _is_pointwise(graph: Graph, node: Node) -> bool:
    weight = constant(graph, node.inputs[1])
    return weight is not None and all(side == 1 for side in weight.shape[2:])


def cuts_above(graph: Graph, node: Node) -> bool:
    """Whether a node is a Clip with an upper bound, which a Relu has not."""
    if not is_clip(node):
        return False
    bound = node.inputs[2] if len(node.inputs) > 2 else ""
    return bool(bound) or node.attrs.get("max", float("inf")) < 1e30


def means_image(graph: Graph, node: Node) -> bool:
    """Whether a ReduceMean is over height and width."""
    if not is_mean(node):
        return False
    axes = node.attrs.get("axes")
    if axes is None and len(node.inputs) > 1:
        known = constant(graph, node.inputs[1])
        axes = None if known is None else known.ravel().tolist()
    rank = len(value.shape) if (value := graph.values.get(node.inputs[0])) and value.shape else 4
    return axes is not None and sorted(a % rank for a in axes) == [2, 3] and rank == 4


def _rank(graph: Graph, node: Node) -> int:
    """The largest rank among the tensors that a node reads and writes, as far as ranks are known."""
    ranks = [len(v.shape) for name in (*node.inputs, *node.outputs) if (v := graph.values.get(name)) and v.shape]
    if is_transpose(node):
        ranks.append(len(node.attrs.get("perm", ())))
    if is_reshape(node) and (shape := constant(graph, node.inputs[1])) is not None:
        ranks.append(shape.size)
    producer = graph.producer.get(node.inputs[0]) if node.inputs else None
    for _ in range(2):  # quantizers keep the rank
        if producer is not None and is_quantizer(producer):
            producer = graph.producer.get(producer.inputs[0])
    if producer is not None and (is_transpose(producer) or is_reshape(producer)):
        ranks.append(_made(graph, producer))
    return max(ranks, default=0)


def _made(graph: Graph, node: Node) -> int:
    """The dims of what a Transpose or Reshape writes, where they are stated."""
    if is_transpose(node):
        return len(node.attrs.get("perm", ()))
    shape = constant(graph, node.inputs[1])
    return 0 if shape is None else shape.size


# --- Subgraphs, and the quantizers ---


def _idle(units: Units, subgraph: Sequence[int | None]) -> set[int]:
    """The subgraphs that are compiled and not run."""
    idle = set()
    for unit, piece in zip(units.units, subgraph, strict=True):
        if piece is not None and is_concat(unit.layer) and any(subgraph[s] != piece for s in unit.sources):
            idle.add(piece)
    return idle


def _place(units: Units, node: Node, rules: Sequence[_Ruling], subgraph: Sequence[int | None]) -> Place:
    output = next((o for o in node.outputs if o), "")
    if node in units.of_node:
        number = units.of_node[node]
        on_npu, rule = rules[number]
        return Place(NPU if on_npu else CPU, rule, node.qualified, output, subgraph[number] if on_npu else None)
    near = [n for n in _near(units, node) if rules[n][0]]
    return Place(NPU if near else EP_CPU, "quantizer", node.qualified, output, subgraph[near[0]] if near else None)


def _copies(units: Units, nodes: Mapping[str, Place], rules: Sequence[_Ruling]) -> Mapping[str, int]:
    """The quantizers that onnxruntime adds before the provider sees the graph, so that no two nodes share one."""
    graph, copies, places = units.graph, Counter[str](), {p.output: p.place for p in nodes.values()}
    for node in filter(is_dequantize, graph.nodes):
        readers = [units.of_node.get(r) for r in graph.consumers.get(node.outputs[0], ())]
        readers += [None] * (node.outputs[0] in graph.output_names)
        if len(readers) > 1:
            copies.update(NPU if r is not None and rules[r][0] else EP_CPU for r in readers)
            copies[places[node.outputs[0]]] -= 1
    return {place: copies[place] for place in (NPU, EP_CPU)}


def _near(units: Units, quantizer: Node) -> Iterator[int]:
    """The units that a quantizer runs with: those that make or read its tensor; for a weight, its readers."""
    yield from units.quantizers[quantizer]
    if constant(units.graph, quantizer.inputs[0]) is not None:
        for output in quantizer.outputs:
            for reader in units.graph.consumers.get(output, ()):
                yield from units.quantizers.get(reader, ())
