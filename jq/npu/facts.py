"""Facts of AMD's chips: their constants, their limits, and the operators that the vendor lists for them.

Sources: the vendor's public reference emulators and amd/ryzen-ai-documentation; nothing here is measured on silicon.
A chip cannot divide: 1/n is `multiplier / 2**shift`, with a multiplier of seven bits. A *factor* is what the chip
computes over what the operator means, a number near one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

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

# Which formats list an operator for the NPU. Source: amd/ryzen-ai-documentation, docs/ops_support.rst, the table of
# Ryzen AI 1.8.0 (that of 1.5.0 says the same). "Listed" is broad coverage, not every configuration.
NPU_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        op: tuple(formats.split())
        for formats, ops in {
            "XINT8 A8W8 A16W8 BF16": "Add AveragePool BatchNormalization Concat Constant ConstantOfShape Conv "
            "DepthToSpace Div Expand Flatten Gemm GlobalAveragePool Identity InstanceNormalization MatMul Max MaxPool "
            "Min Mul Pad Reciprocal ReduceMax Reshape Shape Slice Sqrt Squeeze Sub Transpose Unsqueeze Upsample",
            "XINT8 A8W8 A16W8": "Clip DequantizeLinear Gelu GlobalMaxPool GroupNormalization LeakyRelu Relu Softmax",
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


# --- Chips and backends. Source: amd/ryzen-ai-documentation 1.8.0, modelrun.rst and relnotes.rst ---

Backend = Literal["X1", "X2"]  # the provider's `target`, of integer models
BACKENDS: tuple[Backend, ...] = ("X1", "X2")


@dataclasses.dataclass(frozen=True)
class Device:
    """A chip as its provider takes it: the backends, the default first, and the formats of each."""

    name: str
    long: str
    backends: tuple[Backend, ...]
    bfloat16: bool
    xclbin: str = ""  # of X1, where the chip needs one


_LATER: tuple[Backend, ...] = ("X2", "X1")
CHIPS: Mapping[str, Device] = MappingProxyType(
    {
        "phx": Device("phx", "Phoenix", ("X1",), False, "phoenix/4x4.xclbin"),
        "hpt": Device("hpt", "Hawk Point", ("X1",), False, "phoenix/4x4.xclbin"),
        "stx": Device("stx", "Strix", _LATER, True),
        "krk": Device("krk", "Krackan", _LATER, True),
    }
)
BACKEND_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType({"X1": ("XINT8",), "X2": ("XINT8", "A8W8", "A16W8")})


# --- Where nodes run: the rules that `jq.npu.forecast` goes by ---

Evidence = Literal["documented", "log", "guess"]
_AMD_LOGS = "amd/RyzenAI-SW, CNN-examples/quark_quantization/models, logs of Quark 0.10 on X2"
_TABLE = "amd/ryzen-ai-documentation 1.8.0, docs/ops_support.rst"
_BACKENDS = "amd/ryzen-ai-documentation 1.8.0, docs/modelrun.rst"


@dataclasses.dataclass(frozen=True)
class PlaceRule:
    """A rule of the provider's: what it says, who says so, and how sure that is."""

    name: str
    evidence: Evidence  # documented; read off logs; or a guess
    source: str
    date: str
    says: str


PLACE_RULES: Mapping[str, PlaceRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            PlaceRule("listed", "documented", _TABLE, "2026-10", "the operator is listed for the format"),
            PlaceRule("not-listed", "documented", _TABLE, "2026-10", "the operator is not listed for the format"),
            PlaceRule(
                "fused-activation", "log", _AMD_LOGS, "2025-10",
                "an activation right behind a layer or a sum, with no quantizer between them, runs with it",
            ),
            PlaceRule(
                "pool-factor", "log", _AMD_LOGS, "2025-10",
                "an average pool and the factor that the NPU's multiplier makes run together",
            ),
            PlaceRule(
                "matmul-bias", "log", "onnxsim/onnxsim#1404, on Strix Halo", "2026-09",
                "a MatMul and the sum with its bias run together",
            ),
            PlaceRule(
                "mean-as-pool", "log", f"{_AMD_LOGS}: ShuffleNetV2 in A16W8", "2025-10",
                "a mean over height and width runs as an average pool, listed or not",
            ),
            PlaceRule(
                "hard-sigmoid-x1", "log", "a public report of YOLOv8n on Phoenix, Ryzen AI 1.7.1: 922 of 929 nodes, with "
                "HardSigmoid and factor for SiLU; HardSigmoid(1/6, 0.5) is in the vendor's reference code", "2026-09",
                "X1 runs HardSigmoid(1/6, 0.5), with its factor",
            ),
            PlaceRule(
                "clip-after-conv", "log", f"{_AMD_LOGS}: MobileNetV2 in XINT8 and A8W8, whole in A16W8", "2025-10",
                "X2 leaves a layer of 8 bits with a Clip to the CPU, unless the layer is depthwise",
            ),
            PlaceRule(
                "depthwise-1x1", "log", f"{_AMD_LOGS}: DenseNet-121 in XINT8", "2025-10",
                "X2 leaves a depthwise 1x1 convolution, which a separate BatchNormalization becomes, to the CPU",
            ),
            PlaceRule(
                "rank", "log", f"{_AMD_LOGS}: ShuffleNetV2", "2025-10", "tensors with more than 4 dims run on the CPU",
            ),
            PlaceRule(
                "resize-mode", "log", "amd/RyzenAI-SW#318", "2025-12",
                "a Resize that interpolates was seen on the CPU, while others of mode nearest ran on the NPU",
            ),
            PlaceRule(
                "float-chain", "log", f"{_AMD_LOGS}: ShuffleNetV2 in XINT8 (ReduceMean and factor)", "2025-10",
                "operators with no quantizer between them run on the NPU only in a few known pairs",
            ),
            PlaceRule(
                "not-quantized", "log", f"{_AMD_LOGS}: the last Flatten of SqueezeNet", "2025-10",
                "a node runs in integers only if all tensors that it reads and writes are quantized",
            ),
            PlaceRule(
                "concat-from-outside", "guess", f"{_AMD_LOGS}: DenseNet-121 has 63 subgraphs of which 5 run", "2025-10",
                "a subgraph is compiled but not run on the NPU if a Concat reads an input of the subgraph",
            ),
            PlaceRule(
                "quantizer", "log", f"{_AMD_LOGS}; zmaychek84/vaip, vaip/src/stat.cpp", "2025-10",
                "a quantizer runs with the node that reads or writes its tensor, or on the CPU in the provider if that is not "
                "an NPU node",
            ),
            PlaceRule(
                "backend-format", "documented", _BACKENDS, "2026-10",
                "X1 takes only XINT8: integers of 8 bits, scales that are powers of two",
            ),
            PlaceRule(
                "x1-zero-point", "documented", "zmaychek84/vaip, vaip_pass_to_xir_ops", "2024-11",
                "X1 takes zero points of 0 for int8 and 128 for uint8",
            ),
            PlaceRule(
                "x1-setting", "documented", "zmaychek84/vaip, vaip_pass_to_xir_ops", "2024-11",
                "X1 takes one output, both bounds of a Clip, no output_padding, and a Resize of an image that is nearest or "
                "linear by common coordinates",
            ),
            PlaceRule(
                "format", "guess", "no source names such a format", "2026-11",
                "the vendor's formats have activations of 8 or 16 bits and weights of 8",
            ),
            PlaceRule(
                "few-convs", "documented", "amd/RyzenAI-SW#85 and #126", "2024-10",
                "X1 leaves a model with fewer than 2 Convs to the CPU (minimum_num_of_conv)",
            ),
            PlaceRule(
                "no-layer", "documented", "onnxsim/onnxsim#1404", "2026-09",
                "a model without Conv, Gemm or MatMul stays on the CPU",
            ),
            PlaceRule(
                "foreign-domain", "guess", "the vendor's table names operators of ONNX's own domain", "2026-11",
                "an operator of another domain runs on the CPU",
            ),
        )
    }
)  # fmt: skip
NPU_RANK = 4  # dims of a tensor, at most
FEWEST_CONVS = 2  # of X1
