"""Memory that is given back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def trim() -> None:
    """Return freed memory to the system: glibc keeps several times the memory in use, as sizes change from stage to stage."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
