"""Facts of AMD's chips: their constants, their limits, and the operators that the vendor lists for them.

Sources: the vendor's public reference emulators and amd/ryzen-ai-documentation; nothing here is measured on silicon.
A chip cannot divide: 1/n is `multiplier / 2**shift`, with a multiplier of seven bits. A *factor* is what the chip
computes over what the operator means, a number near one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

# --- Activations ---

HARD_SIGMOID: Mapping[str, float] = MappingProxyType({"alpha": float(np.float32(1 / 6)), "beta": 0.5})
SIXTH = (2731, 14)  # 1/6 as a multiplier and a shift
SIXTH_FACTOR = SIXTH[0] / 2 ** SIXTH[1] * 6
_NEAR = 1e-4  # of alpha and beta: exporters write 1/6 with as few as four digits

RELU6, RELU6_POSITION = 96, 4  # the constant that stands for 6, and the finest position at which it is applied
SLOPE_BITS = 8  # a LeakyRelu's slope is a whole number of 2**-8
SLOPE = 26  # of these, the only slope that the DPU has


def is_hard_sigmoid(attrs: Mapping[str, Any]) -> bool:
    """Whether a HardSigmoid with these attributes is the chip's, max(0, min(1, x / 6 + 1 / 2)).

    >>> is_hard_sigmoid({"alpha": 0.1667}), is_hard_sigmoid({})  # ONNX's alpha is 0.2
    (True, False)
    """
    return abs(attrs.get("alpha", 0.2) - 1 / 6) < _NEAR and abs(attrs.get("beta", 0.5) - 0.5) < _NEAR


def leaky_slope(alpha: float) -> float:
    """The chip's slope nearest to a finite alpha.

    >>> leaky_slope(0.1) * 256
    26.0
    """
    return round(alpha * 2**SLOPE_BITS) / 2**SLOPE_BITS


# --- Means ---

LARGEST_WINDOW = 512  # pixels of a pool
LARGEST_SIDE = 255  # of the largest square for which the vendor's tool knows a multiplier
_SQUARE = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}  # wired in, and partly not the nearest


def reciprocal(count: int) -> tuple[int, int]:
    """The multiplier and the shift that come nearest to 1/count; ties go to the smaller shift.

    >>> reciprocal(6)
    (85, 9)
    """
    shifts = range(7 + (count - 1).bit_length())
    # |k / 2**s - 1/n| in integers: times n * 2**(the largest shift)
    shift = min(shifts, key=lambda s: abs(_nearest(s, count) * count - (1 << s)) << (shifts.stop - s))
    return _nearest(shift, count), shift


def _nearest(shift: int, count: int) -> int:
    return ((1 << shift + 1) + count - 1) // (2 * count)  # a half goes down: it is 1/2 only, and 1 is no better


def pool_multiplier(window: Sequence[int]) -> tuple[int, int]:
    """The multiplier and the shift of an average over a window.

    >>> pool_multiplier((7, 7)), pool_multiplier((2, 3))
    ((21, 10), (85, 9))
    """
    square = len(window) == 2 and window[0] == window[1]
    return _SQUARE[window[0]] if square and window[0] in _SQUARE else reciprocal(math.prod(window))


def pool_factor(height: int, width: int) -> float:
    """The factor of an average over a window.

    >>> pool_factor(3, 3), pool_factor(7, 7), pool_factor(8, 8)
    (0.984375, 1.0048828125, 1.0)
    """
    if height == width and height > LARGEST_SIDE:
        return 1.0
    multiplier, shift = pool_multiplier((height, width))
    return multiplier * height * width / 2**shift


def mean_factor(count: int) -> float:
    """The factor of a mean over `count` numbers.

    The chip multiplies once for each axis; as in the vendor's tool, this is one multiplier for their product.
    """
    multiplier, shift = reciprocal(count)
    return multiplier * count / 2**shift


def is_too_large(window: Sequence[int]) -> bool:
    """Whether the chip has no multiplier for a pool over this window."""
    return math.prod(window) > LARGEST_WINDOW or max(window) > LARGEST_SIDE


# --- Shifts, in bits, between the positions of an operator's tensors: the least and the largest ---

READ_SHIFT = 7  # between the operands of a sum, at most
SUM_SHIFT = (-7, 25)
PRODUCT_SHIFT = (0, 32)
SWISH_SHIFT = (0, 15)  # of x * hard_sigmoid(x)
CUT_SHIFT = (0, 16)  # of a linear operator's accumulator
BIAS_SHIFT = 15  # to the left, at most; to the right, what the accumulator has to spare
ACCUMULATOR_BITS = 24
GATE_POSITIONS = (0, 15)  # that a HardSigmoid reads
GATE_POSITION = 7  # that it writes, at least


# --- Operators ---

# What Quark quantizes for CNNs: the fewer ones with onnxruntime's own scheme, the more on the NPU.
CNN_OPS = (
    "Add", "ArgMax", "AveragePool", "Clip", "Concat", "Conv", "ConvTranspose", "EmbedLayerNormalization", "Gather",
    "Gelu", "Gemm", "GlobalAveragePool", "InstanceNormalization", "LayerNormalization", "LeakyRelu", "MatMul",
    "MaxPool", "Mul", "Pad", "Relu", "Reshape", "Resize", "Sigmoid", "Softmax", "Split", "Squeeze", "Tanh",
    "Transpose", "Unsqueeze", "Where",
)  # fmt: skip
NPU_OPS = tuple(sorted((
    *CNN_OPS, "BatchNormalization", "DepthToSpace", "Div", "Erf", "HardSigmoid", "LpNormalization", "Max", "Min",
    "PRelu", "ReduceMean", "Slice", "SpaceToDepth", "Sub",
)))  # fmt: skip
DYNAMIC_OPS = ("Conv", "EmbedLayerNormalization", "Gather", "MatMul", "Transpose")  # of onnxruntime's dynamic scheme

# Which formats list an operator for the NPU. Source: amd/ryzen-ai-documentation, docs/ops_support.rst, the table
# of Ryzen AI 1.5.0 (what we know of 1.8's agrees). "Listed" is broad coverage, not every configuration.
NPU_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        op: tuple(formats.split())
        for formats, ops in {
            "XINT8 A8W8 A16W8 BF16": "Add AveragePool BatchNormalization Concat Constant ConstantOfShape Conv "
            "DepthToSpace Div Expand Flatten Gemm GlobalAveragePool Identity InstanceNormalization MatMul Max MaxPool "
            "Min Mul Pad Reciprocal ReduceMax Reshape Shape Slice Sqrt Squeeze Sub Transpose Unsqueeze",
            "XINT8 A8W8 A16W8": "Clip DequantizeLinear Gelu GlobalMaxPool GroupNormalization LeakyRelu Relu Softmax "
            "Upsample",
            "XINT8 A8W8 BF16": "ReduceMean ReduceMin ReduceSum Resize",
            "XINT8 A16W8 BF16": "Tanh Where",
            "A8W8 A16W8 BF16": "ConvTranspose Sigmoid Sin",
            "XINT8 A8W8": "HardSwish",
            "XINT8 A16W8": "Elu TopK",
            "XINT8 BF16": "Abs And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil CumSum "
            "Equal Erf Floor Greater Less Log Neg Or Pow Round Sign Tile",
            "A8W8 A16W8": "Cos QLinearConv QuantizeLinear",
            "A16W8 BF16": "Exp GatherElements Split",
            "XINT8": "Celu GreaterOrEqual LayerNormalization LessOrEqual Mish Range STFT Shrink Softsign "
            "ThresholdedRelu",
            "A8W8": "HardSigmoid QLinearMatMul",
            "BF16": "Einsum Gather GridSample GroupConv LSTM Mod Not ScatterND Size Xor",
        }.items()
        for op in ops.split()
    }
)
