"""A compilation cache on disk: compile time is the user's time."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax


def folder() -> Path:
    """Where compilations are kept: `$XDG_CACHE_HOME/jq`, by default `~/.cache/jq`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jq" / "xla"


@functools.cache
def enable() -> None:
    """Turn JAX's persistent cache on, unless the user chose a place or said `JQ_CACHE=off`.

    JAX's default threshold of one second would skip most programs compiled here, all those of finetuning among them.
    """
    if os.environ.get("JQ_CACHE") == "off" or getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home is no reason to fail
        return
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
