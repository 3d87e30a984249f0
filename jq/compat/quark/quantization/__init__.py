"""`quark.onnx.quantization`: configs and algorithms."""

from jq.compat.quark.quantization.config.algorithm import *
from jq.compat.quark.quantization.config.config import QConfig

__all__ = [
    "AdaQuantConfig", "AdaRoundConfig", "AlgoConfig", "AutoMixprecisionConfig", "BiasCorrectionConfig", "CLEConfig",
    "GPTQConfig", "QConfig", "QuarotConfig", "SmoothQuantConfig",
]  # fmt: skip
