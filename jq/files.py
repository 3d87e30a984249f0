"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from jq.errors import DataError


def write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file, creating its folder; what was there stays until all of the new content is on the disk.

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
