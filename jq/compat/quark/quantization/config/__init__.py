"""Configs, by the paths that Quark's users import them from."""

from jq.compat.quark.quantization.config.config import Config, QConfig
from jq.compat.quark.quantization.config.custom_config import get_default_config, get_default_config_mapping
from jq.compat.quark.quantization.config.legacy import QuantizationConfig

__all__ = ["Config", "QConfig", "QuantizationConfig", "get_default_config", "get_default_config_mapping"]
