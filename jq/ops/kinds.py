"""Kinds of operators by name, for code that asks about a node and does not evaluate it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jq.graph import Node

Shape = tuple[int, ...]


def _kind(*op_types: str) -> Callable[[Node], bool]:
    """A predicate: whether a node is one of these operators of ONNX's own domain."""
    return lambda node: node.op_type in op_types and not node.domain


is_cast = _kind("Cast")
is_clip = _kind("Clip")
is_conv = _kind("Conv")
is_transposed_conv = _kind("ConvTranspose")
is_product = _kind("Mul")
is_sum = _kind("Add")
is_matmul = _kind("MatMul")
is_transpose = _kind("Transpose")
is_reshape = _kind("Reshape")
asks_shape = _kind("Shape", "Size")
regroups = _kind("Reshape", "Flatten", "Squeeze", "Unsqueeze")  # dims, and moves nothing
is_gather = _kind("Gather")
is_sigmoid = _kind("Sigmoid")
is_hard_sigmoid = _kind("HardSigmoid")
is_mean = _kind("ReduceMean")
is_resize = _kind("Resize")
is_lstm = _kind("LSTM")
branches = _kind("If")
is_layer = _kind("Conv", "ConvTranspose", "Gemm", "MatMul")  # whatever its operands
rectifies = _kind("Relu", "LeakyRelu", "PRelu", "Clip")
is_softmax = _kind("Softmax")
is_split = _kind("Split")
is_concat = _kind("Concat")
cuts = _kind("Relu", "Clip")  # to an interval
saturates = _kind("Sigmoid", "HardSigmoid", "Softmax", "Tanh")  # far from zero, or far below the largest
suppresses = _kind("NonMaxSuppression")
recurs = _kind("LSTM", "GRU", "RNN")
reshapes = _kind("Reshape", "Flatten")
adds = _kind("Add", "Sub", "Sum")
pools_average = _kind("AveragePool", "GlobalAveragePool")
averages = _kind("AveragePool", "GlobalAveragePool", "ReduceMean")
controls = _kind("If", "Loop", "Scan")
combines = _kind("Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "PRelu")  # elementwise, often with a constant
keeps_range = _kind("Add", "Sub", "Where", "Max", "Min")  # the range of each operand shows in the output's
keeps_channels = _kind(  # by one rule for all, with operands that are alike for all
    "Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "MaxPool", "AveragePool",
    "GlobalAveragePool", "GlobalMaxPool",
)  # fmt: skip
keeps_sign = _kind(
    "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Reshape", "Flatten", "Transpose", "Identity"
)
guards = _kind("Add", "Max")  # with an epsilon, against zero
breaks_at_zero = _kind("Sqrt", "Reciprocal", "Log", "Pow")
divides = _kind("Div")
outgrows = _kind(  # whole numbers beyond those it is computed from
    "Mul", "Add", "Sub", "Pow", "ReduceProd", "ReduceSum", "ReduceSumSquare", "MatMul", "CumSum", "BitShift"
)


# --- Multiply-accumulates, from the shapes of a node's inputs and of its output ---


def macs(node: Node, inputs: Sequence[Shape], output: Shape) -> int | None:
    """The multiply-accumulates of a node, whatever its domain; None for operators that are not counted."""
    count = _MACS.get(node.op_type)
    return None if count is None else count(node, inputs, output)


def multiplies(node: Node) -> bool:
    """Whether `macs` counts a node's operator."""
    return node.op_type in _MACS


def _convolution(weight: int) -> Callable[[Node, Sequence[Shape], Shape], int]:
    # Each output element sums over a filter: weights are (out, in / group, *kernel).
    return lambda node, inputs, output: math.prod(output) * math.prod(inputs[weight][1:])


def _transposed(node: Node, inputs: Sequence[Shape], output: Shape) -> int:
    # Each input element is scattered through a filter: weights are (in, out / group, *kernel).
    return math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _product(node: Node, inputs: Sequence[Shape], output: Shape) -> int:
    # Each output element sums over the common axis of the left operand.
    rows = len(inputs[0]) > 1 and node.attrs.get("transA", 0)
    return math.prod(output) * inputs[0][-2 if rows else -1]


def _recurrence(node: Node, inputs: Sequence[Shape], output: Shape) -> int:
    # W and R (directions, gates * hidden, in) are applied at every step to every sequence of the batch.
    return math.prod(inputs[0][:2]) * (math.prod(inputs[1]) + math.prod(inputs[2]))


_MACS: dict[str, Callable[[Node, Sequence[Shape], Shape], int]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "FusedConv", "DeformConv"), _convolution(1)),
    "QLinearConv": _convolution(3),
    "ConvTranspose": _transposed,
    **dict.fromkeys(
        ("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "QGemm", "FusedMatMul", "FusedGemm"), _product
    ),
    **dict.fromkeys(("MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _product),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrence),
}
