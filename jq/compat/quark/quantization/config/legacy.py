"""`quark.onnx.quantization.config.legacy`, where Quark 0.13 keeps its older config."""

from jq.compat.quark.quantization.config.config import QuantizationConfig

__all__ = ["QuantizationConfig"]
