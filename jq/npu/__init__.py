"""Everything known about the chips: facts, targets, support, rewrites, forms and constraints; where nodes will run.

The functions on forecasts, reports and configurations are those of `jq.device`, which users find here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jq.device.forecasting import Advice as Advice
    from jq.device.forecasting import Break as Break
    from jq.device.forecasting import Forecast as Forecast
    from jq.device.forecasting import forecast as forecast
    from jq.device.provider import ProviderConfig as ProviderConfig
    from jq.device.provider import check_config as check_config
    from jq.device.provider import provider_config as provider_config
    from jq.device.provider_report import Comparison as Comparison
    from jq.device.provider_report import ProviderReport as ProviderReport
    from jq.device.provider_report import compare_with_report as compare_with_report
    from jq.device.provider_report import read_console as read_console
    from jq.device.provider_report import read_report as read_report
    from jq.device.report_file import DeviceReport as DeviceReport
    from jq.device.report_file import Recorded as Recorded
    from jq.device.report_file import read_device_report as read_device_report
    from jq.device.reporting import device_report as device_report

# The facts stand above operators and readings, which import this package; a forecast needs the whole flow.
_HOMES = {
    "report_file": ("DeviceReport", "Recorded", "read_device_report"),
    "reporting": ("device_report",),
    "forecasting": ("Advice", "Break", "Forecast", "forecast"),
    "provider": ("ProviderConfig", "check_config", "provider_config"),
    "provider_report": ("Comparison", "ProviderReport", "compare_with_report", "read_console", "read_report"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jq.device.{module}"), name)
    raise AttributeError(f"module 'jq.npu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in _HOMES.values() for name in names)})
