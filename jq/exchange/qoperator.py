"""Integer operators of onnxruntime in place of dequantize, operator, quantize.

The grids stay, and all that rounds stays in its place, so that the function does not change by more than what
float32 sums lose: by one step of an output that lies near a tie, and not at all where scales are powers of two and
zero points are even (com.microsoft's elementwise operators round after they add the zero point).

The table is of what onnxruntime's CPU provider has kernels for. QLinearReduceMean is documented, but has none. On
x86 without VNNI its products of uint8 with int8 saturate at 16 bits, which is no matter of the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jq.arithmetic.formats import UINT8, Integer
from jq.exchange.quantized import parameters
from jq.graph import Graph, Node
from jq.graph.domains import MICROSOFT
from jq.graph.edit import fresh
from jq.graph.schemas import attributes
from jq.plan import QParams, QTensor

_LEAST_OPSET = 10  # that has QLinearConv and QLinearMatMul
_UINT8, _INT8 = np.dtype(np.uint8), np.dtype(np.int8)
_BYTES = frozenset({_UINT8, _INT8})
_WORDS = _BYTES | {np.dtype(np.uint16), np.dtype(np.int16)}
_SAME_SCALE = 2.0**-22  # a bias's float32 scale is that of its products, itself rounded
_SOFTMAX_LOSS = 1 / 8  # of a step at most, by QLinearSoftmax's whole number of steps in one


def to_qoperator(graph: Graph) -> Graph:
    """Return the graph with integer operators where onnxruntime has one between dequantization and quantization.

    Other nodes stay between DequantizeLinear and QuantizeLinear. DequantizeLinear nodes and arrays
    without readers are left to `remove_unused`.

    >>> import jq
    >>> from jq.exchange.export import quantized_graph
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "INT8_CNN_DEFAULT")
    >>> stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:8], "INT8_CNN_DEFAULT")
    >>> quantized = quantized_graph(graph, jq.make_plan(graph, stats, "INT8_CNN_DEFAULT"))
    >>> [n.op_type for n in to_qoperator(quantized).nodes if n.name == "stage1.0.add"]
    ['QLinearAdd']
    """
    if graph.opset() < _LEAST_OPSET:
        return graph
    read = {n.outputs[0]: c for n in graph.nodes if _is(n, "DequantizeLinear") and (c := _codes(graph, n, n.inputs[0]))}
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        rule = None if node.domain else _RULES.get(node.op_type)
        site = None if rule is None else _site(graph, node, read)
        made = None if rule is None or site is None else rule(site)
        if site is None or made is None:
            continue
        inputs = []
        for operand in made.inputs:
            if not isinstance(operand, str):
                name = fresh(f"{node.label}_quantized", taken)
                arrays[name] = operand
                operand = name
            inputs.append(operand)
        outputs = tuple(c.tensor or (o and fresh(o, taken)) for o, c in zip(node.outputs, site.outputs, strict=True))
        nodes |= dict.fromkeys(site.replaced)
        nodes[node] = Node(made.op_type, tuple(inputs), outputs, made.attrs, node.name, made.domain)
    if not nodes:
        return graph
    used = {n.domain: 1 for n in nodes.values() if n is not None and n.domain}
    return graph.edit(nodes, arrays).replace(opsets={**used, **graph.opsets})


# --- What stands around an operator ---

Operand = str | np.ndarray  # a tensor of the graph, or an array to add


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Quantized(QParams):
    """A tensor of codes and how they are read, with scale and zero point as operands."""

    tensor: str
    written: tuple[Operand, Operand]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Tensor, scale and zero point, as most integer operators take them."""
        return (self.tensor, *self.written)

    @property
    def dtype(self) -> np.dtype:
        """The type of the codes."""
        return self.grid.dtype  # type: ignore[union-attr]

    def shares(self, other: _Quantized) -> bool:
        """Whether two tensors have one scale and zero point for all their elements, and the same ones."""
        numbers = [(c.axis, c.grid, c.scale.item(), c.zero_point.item()) for c in (self, other) if c.axis is None]
        return len(numbers) == 2 and numbers[0] == numbers[1]

    def of(self, value: float) -> int:
        """The code of a number, as QuantizeLinear makes it."""
        limits = np.iinfo(self.dtype)
        with np.errstate(all="ignore"):
            code = float(np.rint(np.float32(value) / np.float32(self.scale.item()))) + int(self.zero_point.item())
        return limits.min if math.isnan(code) else int(min(max(code, limits.min), limits.max))


@dataclasses.dataclass(frozen=True, eq=False)
class _Operator:
    """An operator between dequantization and quantization."""

    node: Node
    opset: int
    attrs: Mapping[str, Any]  # defaults included
    inputs: tuple[_Quantized | None, ...]  # what each input is read from; None if it is no dequantized tensor
    outputs: tuple[_Quantized, ...]  # what each output becomes, with one scale; nameless if nothing reads it
    replaced: tuple[Node, ...]  # quantizers behind it, and the activations before them
    arrays: Mapping[str, np.ndarray]

    def read(self, *indices: int, types: frozenset[np.dtype] = _BYTES) -> list[_Quantized] | None:
        """Return the quantized sources of these inputs if they and the output have one type and one scale each."""
        sources = [c for i in indices if i < len(self.inputs) and (c := self.inputs[i]) and c.axis is None]
        one_type = {c.dtype for c in (*sources, *self.outputs)}
        return sources if len(sources) == len(indices) and len(one_type) == 1 and one_type <= types else None

    def operands(self, *indices: int) -> tuple[Operand, ...] | None:
        """Return tensor, scale and zero point of each of these inputs, if `read` has them."""
        sources = self.read(*indices)
        return None if sources is None else tuple(o for c in sources for o in c.operands)

    def given(self, index: int) -> str:
        """The tensor of an optional input; empty if there is none."""
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def value(self, index: int) -> np.ndarray | None:
        """The numbers of an input that is a constant, quantized or not."""
        codes = self.inputs[index]
        if codes is None:
            return self.arrays.get(self.node.inputs[index])
        array = self.arrays.get(codes.tensor)
        if array is None or codes.axis is not None:
            return None
        return QTensor(array, codes).value()


@dataclasses.dataclass(frozen=True, eq=False)
class _Made:
    """The integer operator for a site."""

    op_type: str
    inputs: tuple[Operand, ...]
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    domain: str = MICROSOFT


def _is(node: Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and node.domain in ("", MICROSOFT)


def _site(graph: Graph, node: Node, read: Mapping[str, _Quantized]) -> _Operator | None:
    outputs: list[_Quantized] = []
    replaced: list[Node] = []
    for name in node.outputs:
        if (written := _written(graph, name)) is None:
            return None
        outputs.append(written[0])
        replaced += written[1]
    named = [c for c in outputs if c.tensor]
    if not named:
        return None
    outputs = [c if c.tensor else dataclasses.replace(named[0], tensor="") for c in outputs]
    inputs, attrs = tuple(read.get(i) for i in node.inputs), attributes(graph, node)
    return _Operator(node, graph.opset(), attrs, inputs, tuple(outputs), tuple(replaced), graph.arrays)


_UNREAD = _Quantized(np.zeros(()), np.zeros(()), UINT8, tensor="", written=("", ""))


def _written(graph: Graph, tensor: str) -> tuple[_Quantized, list[Node]] | None:
    """Return the codes of a tensor that is only read by its quantizer, and the nodes that quantize it."""
    if not tensor or (tensor not in graph.output_names and tensor not in graph.consumers):
        return _UNREAD, []
    passed: list[Node] = []
    node = graph.sole_reader(tensor)
    while node is not None and node.inputs[0] == tensor and node.op_type in ("Relu", "Clip") and not node.domain:
        passed.append(node)
        tensor = node.outputs[0]
        node = graph.sole_reader(tensor)
    if node is None or not _is(node, "QuantizeLinear") or node.inputs[0] != tensor:
        return None
    codes = _codes(graph, node, node.outputs[0])
    if codes is None or codes.axis is not None or not all(_saturates(graph, n, codes) for n in passed):
        return None
    return codes, [*passed, node]


def _saturates(graph: Graph, node: Node, codes: _Quantized) -> bool:
    """Whether the grid ends where an activation cuts, so that quantization alone does the same."""
    if codes.dtype not in _WORDS:
        return False
    low, high = 0.0, np.inf
    if node.op_type == "Clip":
        bounds = [node.attrs.get("min", -np.inf), node.attrs.get("max", np.inf)]
        for i, name in enumerate(node.inputs[1:]):
            array = graph.arrays.get(name) if name else None
            if name and (array is None or array.size != 1):
                return False
            bounds[i] = bounds[i] if array is None else array.item()
        low, high = bounds
    limits = np.iinfo(codes.dtype)
    return codes.of(low) == limits.min and codes.of(high) == limits.max


def _codes(graph: Graph, node: Node, tensor: str) -> _Quantized | None:
    """The integer side of a QuantizeLinear or DequantizeLinear, if its parameters are float32 constants."""
    value, given = graph.values.get(tensor), node.inputs[2] if len(node.inputs) > 2 else ""
    dtype = _UINT8 if _is(node, "QuantizeLinear") else None if value is None else value.dtype
    qparams = parameters(graph, node, dtype or _UINT8) if dtype is not None or given else None
    if qparams is None or not isinstance(qparams.grid, Integer):
        return None
    axis = None if np.size(qparams.scale) == 1 else qparams.axis
    if axis is not None and axis < 0:
        if tensor not in graph.arrays:
            return None
        axis %= graph.arrays[tensor].ndim
    written = node.inputs[1], given or np.asarray(qparams.zero_point, qparams.grid.dtype)
    return _Quantized(qparams.scale, qparams.zero_point, qparams.grid, axis, tensor=tensor, written=written)


# --- Products ---


def _conv(site: _Operator) -> _Made | None:
    if (factors := _factors(site, columns=0)) is None:
        return None
    x, w = factors
    # onnxruntime's kernel wants one zero point even where each channel has its scale.
    if w.tensor not in site.arrays or np.ptp(w.zero_point.astype(np.int32)):
        return None
    bias = _bias(site, x.scale.astype(np.float64) * w.scale)
    if bias is None or not _fits(site, x, w, bias, range(1, site.arrays[w.tensor].ndim)):
        return None
    return _Made("QLinearConv", (*x.operands, *w.operands, *site.outputs[0].written, *bias), site.node.attrs, "")


def _matmul(site: _Operator) -> _Made | None:
    if (factors := _factors(site, columns=1)) is None:
        return None
    a, b = factors
    vector = b.tensor in site.arrays and site.arrays[b.tensor].ndim == 1
    if not _fits(site, a, b, (), [-1 if vector else -2]):
        return None
    return _Made("QLinearMatMul", (*a.operands, *b.operands, *site.outputs[0].written), domain="")


def _gemm(site: _Operator) -> _Made | None:
    columns = 0 if site.attrs["transB"] else 1
    if (factors := _factors(site, columns)) is None:
        return None
    a, b = factors
    alpha, beta = np.float64(np.float32(site.attrs["alpha"])), np.float64(np.float32(site.attrs["beta"]))
    bias = _bias(site, alpha * a.scale * b.scale, beta)
    if bias is None or not _fits(site, a, b, bias, [1 - columns]):
        return None
    attrs = {k: site.attrs[k] for k in ("alpha", "transA", "transB")}
    return _Made("QGemm", (*a.operands, *b.operands, *(bias or ("",)), *site.outputs[0].written), attrs)


def _factors(site: _Operator, columns: int) -> tuple[_Quantized, _Quantized] | None:
    """Return the two factors if kernels exist for their types; the second may have a scale per output channel."""
    first, second = site.read(0), site.inputs[1]
    if first is None or second is None or second.dtype not in ({_INT8} if first[0].dtype == _INT8 else _BYTES):
        return None
    if second.axis is not None:
        array = site.arrays.get(second.tensor)
        if second.axis != columns or array is None or (site.node.op_type != "Conv" and array.ndim != 2):
            return None
    return first[0], second


def _bias(site: _Operator, products: np.ndarray, beta: float = 1.0) -> tuple[np.ndarray, ...] | None:
    """The third input in int32 at the scale of the products; empty if there is none, None if it is not exact there."""
    if not site.given(2):
        return ()
    codes = site.inputs[2]
    array = None if codes is None else site.arrays.get(codes.tensor)
    if codes is None or array is None or (codes.axis is not None and (array.ndim != 1 or codes.axis)):
        return None
    with np.errstate(all="ignore"):
        ratio = codes.scale.astype(np.float64) * beta / products
        ratio = np.where(np.abs(ratio - 1) <= _SAME_SCALE, 1, ratio)
        exact = (array.astype(np.float64) - codes.zero_point.astype(np.float64)) * ratio
        if not np.all((exact == np.rint(exact)) & (np.abs(exact) < 2.0**31)):
            return None
    bias = exact.astype(np.int32)
    return (bias.reshape(array.shape) if bias.size == array.size else bias,)  # a scale of shape [1] adds no dim


def _fits(site: _Operator, x: _Quantized, w: _Quantized, bias: Sequence[np.ndarray], summed: Sequence[int]) -> bool:
    """Whether no sum of products overflows int32, for constant weights; computed weights would need very long sums."""
    weight = site.arrays.get(w.tensor)
    if weight is None:
        return True
    limits, zero_point = np.iinfo(x.dtype), int(x.zero_point.item())
    largest = max(limits.max - zero_point, zero_point - limits.min)
    along = () if w.zero_point.size == 1 else [-1 if i == w.axis else 1 for i in range(weight.ndim)]
    sums = np.abs(weight.astype(np.int64) - w.zero_point.astype(np.int64).reshape(along)).sum(tuple(summed))
    added = max((int(np.abs(b.astype(np.int64)).max(initial=0)) for b in bias), default=0)
    return int(sums.max(initial=0)) * largest + added < 2**31


# --- Elementwise operators, pools and the rest of com.microsoft ---


def _elementwise(site: _Operator, op_type: str, attrs: Sequence[str] = ()) -> _Made | None:
    """Convert an elementwise operator whose inputs are all quantized, in ONNX's order."""
    inputs = site.operands(*range(len(site.node.inputs)))
    if inputs is None:
        return None
    return _Made(op_type, (*inputs, *site.outputs[0].written), {k: site.attrs[k] for k in attrs})


def _average_pool(site: _Operator) -> _Made | None:
    if any(d != 1 for d in site.attrs.get("dilations", ())):
        return None
    known = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    return _elementwise(site, "QLinearAveragePool", [k for k in known if k in site.attrs])


def _softmax(site: _Operator) -> _Made | None:
    """The kernel takes the floor of the steps in one, 254 for a scale of 1/255: a scale that gives the right number."""
    made = _elementwise(site, "QLinearSoftmax", ["axis"])
    one, scale = np.float32(1), site.outputs[0].scale.reshape(())
    if made is None or not np.isfinite(one / scale):
        return None
    steps = np.rint(one / scale)
    if abs(one / scale - steps) > _SOFTMAX_LOSS or not steps:
        return None
    while one / scale < steps:
        scale = np.nextafter(scale, np.float32(0))
    *source, zero_point = (*made.inputs[:3], made.inputs[4])
    written = made.inputs[3] if scale == site.outputs[0].scale.item() else np.asarray(scale)
    return dataclasses.replace(made, inputs=(*source, written, zero_point), attrs={**made.attrs, "opset": site.opset})


def _concat(site: _Operator) -> _Made | None:
    inputs = site.operands(*range(len(site.node.inputs)))
    if inputs is None:
        return None
    return _Made("QLinearConcat", (*site.outputs[0].written, *inputs), {"axis": site.attrs["axis"]})


def _where(site: _Operator) -> _Made | None:
    inputs = site.operands(1, 2)
    return None if inputs is None else _Made("QLinearWhere", (site.node.inputs[0], *inputs, *site.outputs[0].written))


# --- Data movement ---


def _move(site: _Operator, since: int = 1, types: frozenset[np.dtype] = _WORDS) -> _Made | None:
    """The operator itself, on codes: where its outputs have the grid of its input."""
    source = site.read(0, types=types)
    if source is None or site.opset < since or not all(source[0].shares(c) for c in site.outputs):
        return None
    return _Made(site.node.op_type, (source[0].tensor, *site.node.inputs[1:]), site.node.attrs, "")


def _max_pool(site: _Operator) -> _Made | None:
    return None if any(site.node.outputs[1:]) else _move(site, since=12, types=_BYTES)


def _pad(site: _Operator) -> _Made | None:
    made = _move(site, since=11, types=_BYTES)
    if made is None or site.attrs["mode"] != "constant":
        return made
    value = site.value(2) if site.given(2) else np.zeros((), np.float32)
    if value is None or value.size != 1:
        return None
    code = np.asarray(site.outputs[0].of(value.item()), site.outputs[0].dtype)
    return dataclasses.replace(made, inputs=(*made.inputs[:2], code, *made.inputs[3:]))


def _resize(site: _Operator) -> _Made | None:
    cuts = site.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"  # and fills in a float
    return None if cuts or site.attrs["mode"] != "nearest" else _move(site, since=10, types=_BYTES)


_RULES: Mapping[str, Callable[[_Operator], _Made | None]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Add": functools.partial(_elementwise, op_type="QLinearAdd"),
    "Mul": functools.partial(_elementwise, op_type="QLinearMul"),
    "LeakyRelu": functools.partial(_elementwise, op_type="QLinearLeakyRelu", attrs=("alpha",)),
    "Sigmoid": functools.partial(_elementwise, op_type="QLinearSigmoid"),
    "GlobalAveragePool": functools.partial(_elementwise, op_type="QLinearGlobalAveragePool"),
    "AveragePool": _average_pool,
    "Softmax": _softmax,
    "Concat": _concat,
    "Where": _where,
    "MaxPool": _max_pool,
    "Pad": _pad,
    "Resize": _resize,
    "DepthToSpace": functools.partial(_move, since=11, types=frozenset({_UINT8})),  # int8 came after onnxruntime 1.26
    **dict.fromkeys(("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Gather", "Slice", "Split"), _move),
}
