"""Quantized models of any dialect as one: QuantizeLinear and DequantizeLinear around float operators.

The tensors of integers keep their names, so that what a chip computes can be compared with the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jq.arithmetic.formats import INTEGERS
from jq.errors import ModelError
from jq.graph import Graph, Node
from jq.graph.domains import MICROSOFT
from jq.graph.edit import fresh
from jq.graph.quantizers import is_dequantize, is_fix_neuron, is_pair, is_quantize
from jq.npu.rewrites.edits import substitute
from jq.npu.rewrites.factors import without_factors
from jq.npu.targets import Target
from jq.ops.integer.fixed import Grid, exact, is_power_of_two
from jq.ops.table import lookup
from jq.readings.walk import evaluate

Triple = tuple[str, str, str]  # integers, scale and zero point
Parts = tuple[str, list[Triple], Triple, list[str]]  # a float operator, quantized operands, the result, other operands

_ONE_OPERAND = {
    f"QLinear{name}": name
    for name in ("LeakyRelu", "Sigmoid", "AveragePool", "GlobalAveragePool", "ReduceMean", "Softmax")
}
_TWO_OPERANDS = {"QLinearAdd": "Add", "QLinearMul": "Mul", "QLinearMatMul": "MatMul", "QGemm": "Gemm"}
# For these, onnxruntime multiplies the accumulator by a factor in float32; all others it computes in float32 throughout.
_PRODUCTS = frozenset({"QLinearConv", "QLinearMatMul", "QGemm"})
_NEWEST = 1 << 10  # opset: the newest rule


def recognize(graph: Graph, target: Target) -> Graph:
    """Return the graph in the one dialect, without what it only holds to simulate a chip that the target is."""
    graph = _quantizers(graph)
    for node in graph.nodes:
        _check(graph, node)
    graph = _constants(_operators(graph, target))
    if target.requantize == "shift":
        _refuse_scales(graph)
    return without_factors(graph) if target.reciprocals else graph


# --- Quantizers ---


def _quantizers(graph: Graph) -> Graph:
    """Vendors' operators of integers as ONNX's."""
    taken = set(graph.tensors)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        if is_fix_neuron(node):
            nodes[node] = _fix_neuron(node, taken, arrays)
        elif node.domain and (is_quantize(node) or is_dequantize(node)):
            zero_point = graph.arrays.get(node.inputs[2]) if len(node.inputs) > 2 else None
            if zero_point is not None and str(zero_point.dtype) in INTEGERS:
                op_type = "QuantizeLinear" if is_quantize(node) else "DequantizeLinear"
                nodes[node] = (node.replace(op_type=op_type, domain=""),)
    return substitute(graph, nodes, arrays)


def _fix_neuron(node: Node, taken: set[str], arrays: dict[str, np.ndarray]) -> Sequence[Node]:
    """AMD's compiler reads the attributes alone."""
    bits, position = node.attrs.get("bit_width", 8), node.attrs.get("pos", 0)
    grid = next((f for f in INTEGERS.values() if f.signed and f.bits == bits), None)
    if grid is None or abs(position) > 126:
        raise ModelError(f"node {node.label!r} (FixNeuron): bit_width {bits} with pos {position} is not supported")
    codes, scale, zero = (fresh(f"{node.outputs[0]}_{part}", taken) for part in ("codes", "scale", "zero_point"))
    arrays[scale], arrays[zero] = np.array(2.0**-position, np.float32), np.zeros((), grid.dtype)
    return (
        Node("QuantizeLinear", (node.inputs[0], scale, zero), (codes,), {}, node.name),
        Node("DequantizeLinear", (codes, scale, zero), node.outputs),
    )


def _constants(graph: Graph) -> Graph:
    """Weights that are quantized in the graph, as the integers that they become."""
    arrays: dict[str, np.ndarray] = {}
    nodes: dict[Node, Node | None] = {}
    for node in graph.nodes:
        if node.op_type == "QuantizeLinear" and not node.domain and all(i in graph.arrays for i in node.inputs if i):
            inputs = {i: graph.arrays[i] for i in node.inputs if i}
            (arrays[node.outputs[0]],) = evaluate(node, graph.opset(), inputs)
            nodes[node] = None
    return graph.edit(nodes, arrays) if nodes else graph


def _check(graph: Graph, node: Node) -> None:
    """Raise a ModelError for a quantizer that has no meaning."""
    read = _read(node)
    if is_pair(node):
        triples = [(*node.inputs, "", "")[:3]]
    elif read is not None:
        triples = [*read[1], read[2]]
    else:
        return
    for codes, scale, zero_point in triples:
        array, zeros = graph.arrays.get(scale), graph.arrays.get(zero_point)
        where = f"node {node.label!r} ({node.qualified}): the scale of {codes or node.outputs[0]!r}"
        if array is None:
            continue
        if not np.issubdtype(array.dtype, np.floating) and array.dtype.kind != "V":
            raise ModelError(f"{where} is of type {array.dtype}; expected a float")
        values = array.astype(np.float32)
        if not values.size:
            raise ModelError(f"{where} has no values")
        if (wrong := values[~(np.isfinite(values) & (values > 0))]).size:
            raise ModelError(f"{where} is {wrong[0]:g}; it must be positive and finite")
        if zeros is not None and zeros.size not in (1, values.size):
            raise ModelError(f"{where} has {values.size} values, but its zero point has {zeros.size}")
        held = graph.arrays.get(codes)
        if held is None or node.op_type == "QuantizeLinear":
            continue
        if zeros is not None and zeros.dtype != held.dtype:
            raise ModelError(f"{where}: its zero point is {zeros.dtype}, but its integers are {held.dtype}")
        channels = held.shape[node.attrs.get("axis", 1)] if _has_axis(node, held) else values.size
        if node.op_type == "DequantizeLinear" and values.size not in (1, channels) and values.ndim == 1:
            raise ModelError(f"{where} has {values.size} values for {channels} channels")


def _has_axis(node: Node, array: np.ndarray) -> bool:
    return -array.ndim <= node.attrs.get("axis", 1) < array.ndim


def _refuse_scales(graph: Graph) -> None:
    """Raise a ModelError for the first scale that is no power of two."""
    for node in graph.nodes:
        if not is_pair(node):
            continue
        scale = graph.arrays.get(node.inputs[1])
        if scale is None:
            raise ModelError(
                f"the scale of tensor {node.inputs[0]!r} is not a constant; a target that shifts needs one"
            )
        products = node.op_type == "DequantizeLinear" and graph.arrays.get(node.inputs[0], scale).dtype == np.int32
        wrong = [float(s) for s in scale.reshape(-1) if not (np.isfinite(s) and s > 0 and is_power_of_two(exact(s)))]
        if wrong and not products:
            raise ModelError(
                f"a target that shifts needs scales that are powers of two; the scale of tensor {node.inputs[0]!r} is "
                f"{wrong[0]:g}; quantize with an XINT8 preset, or use target='ort', 'aie2_x1' or 'aie2_even'"
            )


# --- Integer operators ---


def _operators(graph: Graph, target: Target) -> Graph:
    """onnxruntime's integer operators as float ones between quantizers."""
    taken = set(graph.tensors)
    nodes: dict[Node, Sequence[Node]] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        read = _read(node)
        # A softmax over all axes from one on is another operator than that of a newer graph.
        if read is None or (node.op_type == "QLinearSoftmax" and node.attrs.get("opset", 13) < 13):
            continue
        _, triples, result, _ = read
        scales = [graph.arrays.get(t[1]) for t in (*triples, result)]
        shifts = all(s is not None and all(is_power_of_two(exact(v)) for v in s.reshape(-1)) for s in scales)
        # In float scales the rest is no integer arithmetic anywhere, and onnxruntime's own operators round otherwise.
        if shifts or node.op_type in _PRODUCTS or target.requantize != "float32":
            nodes[node] = tuple(_between(graph, node, read, taken, arrays))
    return substitute(graph, nodes, arrays)


def _read(node: Node) -> Parts | None:
    """The parts of one of onnxruntime's integer operators; None for any other node."""
    names = [*node.inputs, *[""] * 9]

    def triple(start: int) -> Triple:
        return names[start], names[start + 1], names[start + 2]

    if node.attrs.get("channels_last"):
        return None
    if node.op_type == "QLinearConv":
        return "Conv", [triple(0), triple(3)], ("", names[6], names[7]), [names[8]]
    if node.op_type == "QLinearMatMul" or (node.domain == MICROSOFT and node.op_type in ("QLinearAdd", "QLinearMul")):
        return _TWO_OPERANDS[node.op_type], [triple(0), triple(3)], ("", names[6], names[7]), []
    if node.domain != MICROSOFT:
        return None
    if node.op_type == "QGemm" and names[7]:
        return "Gemm", [triple(0), triple(3)], ("", names[7], names[8]), [names[6]]
    if node.op_type in _ONE_OPERAND:
        return _ONE_OPERAND[node.op_type], [triple(0)], ("", names[3], names[4]), []
    if node.op_type == "QLinearConcat":
        return "Concat", [triple(i) for i in range(2, len(node.inputs), 3)], ("", names[0], names[1]), []
    return None


def rounded_grid(graph: Graph, node: Node) -> Grid | None:
    """The grid of the output of a quantizer or an integer operator; None for any other node, or if the grid is computed."""
    read = _read(node)
    names: Sequence[str] = ("", "") if read is None else read[2][1:]
    if node.op_type == "QuantizeLinear":
        names = (*node.inputs, "")[1:3]
    scale, zero_point = (graph.arrays.get(name) for name in names)
    if scale is None or scale.size != 1:
        return None
    kind = zero_point if zero_point is not None else graph.values.get(node.outputs[0])
    zero = 0 if zero_point is None else int(zero_point.reshape(()))
    codes = None if kind is None else INTEGERS.get(str(kind.dtype))
    return None if codes is None else Grid(exact(scale.reshape(())), zero, codes)


def _between(graph: Graph, node: Node, parts: Parts, taken: set[str], arrays: dict[str, np.ndarray]) -> Iterator[Node]:
    """The float operator of an integer one, between the quantizers that it has."""
    op_type, triples, result, others = parts
    operands = []
    for index, (codes, scale, zero) in enumerate(triples):
        operands.append(fresh(f"{codes}_{node.outputs[0]}_{index}", taken))
        several = index == 1 and graph.arrays.get(scale, np.zeros(1)).size > 1
        axis = {"axis": _channels(op_type, node)} if several else {}
        yield Node("DequantizeLinear", tuple(n for n in (codes, scale, zero) if n), (operands[-1],), axis)
    for bias in filter(None, others):
        x_scale, w_scale = (graph.arrays.get(t[1]) for t in triples)
        if x_scale is None or w_scale is None or x_scale.size != 1:
            raise ModelError(
                f"node {node.label!r} ({node.qualified}) has a bias: its operands need constant scales, the first a single one"
            )
        scale = fresh(f"{bias}_{node.outputs[0]}_scale", taken)
        arrays[scale] = np.asarray(x_scale.reshape(()) * w_scale, np.float32)
        operands.append(fresh(f"{bias}_{node.outputs[0]}", taken))
        yield Node("DequantizeLinear", (bias, scale), (operands[-1],), {"axis": 0} if arrays[scale].size > 1 else {})
    made = fresh(f"{node.outputs[0]}_real", taken)
    attrs = {k: v for k, v in node.attrs.items() if k not in ("channels_last", "opset")}
    yield Node(op_type, tuple(operands), (made,), attrs, node.name)
    yield Node("QuantizeLinear", tuple(n for n in (made, *result[1:]) if n), node.outputs)


def _channels(op_type: str, node: Node) -> int:
    """The axis of a weight's outputs."""
    entry = lookup(Node(op_type, (), ()), _NEWEST)
    if entry is None or entry.linear is None:
        raise ModelError(f"node {node.label!r} ({node.qualified}) needs one scale for each operand; got several")
    return entry.linear.axis(node.attrs)
