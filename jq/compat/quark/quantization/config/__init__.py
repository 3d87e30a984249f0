"""Configs, by the paths that Quark's users import them from."""

from typing import Any

from jq.compat.quark.quantization.config.config import Config, QConfig, QuantizationConfig
from jq.compat.quark.quantization.config.custom_config import get_default_config, get_default_config_mapping

__all__ = ["Config", "QConfig", "QuantizationConfig", "get_default_config", "get_default_config_mapping"]


def __getattr__(name: str) -> Any:
    """The mapping of all named configs, under the names that versions of Quark have for it."""
    if name in ("DEFAULT_CONFIG_MAPPING", "DefaultConfigMapping"):
        return get_default_config_mapping()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
