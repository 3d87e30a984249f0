"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from jq.errors import ConfigError, DataError


def write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file, creating its folder; what was there stays until all of the new content is written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/new/note.txt", "words")
    ...     Path(f"{folder}/new/note.txt").read_text()
    'words'
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.draft")  # a killed run's is overwritten by the next
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(draft, target)
    except BaseException as error:  # an interrupt, too, leaves no draft
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DataError(f"cannot write {target}: {error.strerror or error}") from error
        raise


def check_writable(output: str | os.PathLike[str] | None, model: Any = None) -> None:
    """Raise a ConfigError where no file can be written, or where the float model would be lost, before any work."""
    if output is None:
        return
    try:
        path = Path(output)
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, TypeError) as error:  # too long a name, a null byte in it, no name at all
        raise ConfigError(
            f"the output {output!r} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error
    if isinstance(model, (str, os.PathLike)) and path.is_file() and Path(model).exists() and path.samefile(model):
        raise ConfigError(f"the output {path} is the float model itself; give another name")
    if path.is_dir():
        raise ConfigError(f"the output {path} is a folder; give the name of a file in it")
    folder = next(p for p in (path.parent, *path.parent.parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"the output {path} cannot be written: {folder} is no folder that may be written to")
