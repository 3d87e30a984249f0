"""What the vendor's documents say of operators."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
