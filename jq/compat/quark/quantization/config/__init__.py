"""Configs, by the paths that Quark's users import them from."""

from jq.compat.quark.quantization.config.config import Config, QConfig, QuantizationConfig
from jq.compat.quark.quantization.config.custom_config import get_default_config, get_default_config_mapping

__all__ = ["Config", "QConfig", "QuantizationConfig", "get_default_config", "get_default_config_mapping"]
