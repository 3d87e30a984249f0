"""Everything known of the chips: facts, targets, support, rewrites, forms and constraints; where nodes will run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jq.npu.forecasting import Advice, Break, Forecast, forecast
    from jq.npu.provider import ProviderConfig, check_config, provider_config
    from jq.npu.provider_report import Comparison, ProviderReport, compare_with_report, read_console, read_report

__all__ = [
    "Advice", "Break", "Comparison", "Forecast", "ProviderConfig", "ProviderReport", "check_config", "compare_with_report",
    "forecast", "provider_config", "read_console", "read_report",
]  # fmt: skip

# The facts stand above operators and readings, which import this package; a forecast needs the whole flow.
_HOMES = {
    "forecasting": ("Advice", "Break", "Forecast", "forecast"),
    "provider": ("ProviderConfig", "check_config", "provider_config"),
    "provider_report": ("Comparison", "ProviderReport", "compare_with_report", "read_console", "read_report"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jq.npu.{module}"), name)
    raise AttributeError(f"module 'jq.npu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
