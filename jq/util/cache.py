"""Compilations on disk: compile time is the user's time."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import jax

LIMIT = 4 << 30  # bytes of compilations; a network's have some ten million


def folder() -> Path:
    """Where compilations are kept: `$XDG_CACHE_HOME/jq`, by default `~/.cache/jq`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jq" / "xla"


def enabled() -> bool:
    """Whether anything may be kept on disk: the user did not say `JQ_CACHE=off`."""
    return os.environ.get("JQ_CACHE") != "off"


@functools.cache
def enable() -> None:
    """Turn JAX's persistent cache on, unless the user chose a place or said `JQ_CACHE=off`.

    JAX's default threshold of one second would skip most programs compiled here, all those of finetuning among them.
    """
    if not enabled() or getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home is no reason to fail
        return
    trim(folder(), LIMIT)
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)


def trim(where: Path, limit: int) -> int:
    """Remove the files of a folder that were not used for the longest time, as far as all have more bytes than a limit.

    Return the bytes that are left.
    """
    left = 0
    for _, size, path in sorted(_files(where), reverse=True):
        if left + size > limit:
            with contextlib.suppress(OSError):  # others remove, too
                os.unlink(path)
        else:
            left += size
    return left


def _files(where: Path) -> Iterator[tuple[float, int, str]]:
    """Yield when each file was last used, its bytes and its path."""
    with contextlib.suppress(OSError), os.scandir(where) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                stat = entry.stat()
                yield max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path
