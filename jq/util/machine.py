"""The machine that this process runs on: how many cores, and which instructions they have."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def processor() -> str:
    """The model of the processors and their instructions; where these are not told, this host."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return f"{platform.machine()} {platform.processor()} {platform.node()}"
