"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jq.errors import ConfigError, DataError


def write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file atomically, creating its folder: the old content stays until all of the new is on disk.

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


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the operating system while this file or folder is written into a DataError.

    >>> with writing(Path("a.bin")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    jq.errors.DataError: cannot write a.bin: No space left on device
    """
    try:
        yield
    except (OSError, ValueError) as error:  # a null byte in the name is a ValueError
        raise DataError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], replaces: Callable[[Path], bool], kept: str) -> Iterator[Path]:
    """Yield a draft folder that gets its name when the block ends without an error, and is removed otherwise.

    An existing folder is replaced only if it is empty or `replaces(folder)` is true; `kept` names it in the error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with new_folder(f"{parent}/made", lambda old: False, "is not empty") as draft:
    ...         write(draft / "note.txt", "words")
    ...     os.listdir(f"{parent}/made")
    ['note.txt']
    """
    final = Path(os.path.abspath(path))
    with writing(final):
        taken = final.is_symlink() or (final.exists() and not final.is_dir())
        taken = taken or (final.exists() and any(final.iterdir()) and not replaces(final))
    if taken:
        raise ConfigError(f"{final} {kept}; give the name of a new folder")
    draft = final.with_name(f".{final.name}.draft")
    try:
        with writing(final):
            shutil.rmtree(draft, ignore_errors=True)  # a killed run's
            draft.mkdir(parents=True)
        yield draft
        with writing(final):
            shutil.rmtree(final, ignore_errors=True)
            os.replace(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def safe_name(text: str) -> str:
    """Return a valid file name close to the text: a tensor's name may hold any character.

    >>> safe_name("model/conv:0"), safe_name("../..")
    ('model_conv_0', '_..')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".")[:80]


def check_writable(output: str | os.PathLike[str] | None, model: Any = None) -> None:
    """Raise a ConfigError, before any work, if the file cannot be written or would overwrite the float model."""
    if output is None:
        return
    try:
        path = Path(output)
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, TypeError) as error:  # too long a name, a null byte in it, no name at all
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"the output {output!r} cannot be written: {cause}") from error
    if isinstance(model, (str, os.PathLike)) and path.is_file() and Path(model).exists() and path.samefile(model):
        raise ConfigError(f"the output {path} is the float model itself; give another name")
    if path.is_dir():
        raise ConfigError(f"the output {path} is a folder; give the name of a file in it")
    folder = next(p for p in (path.parent, *path.parent.parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"the output {path} cannot be written: {folder} is no folder that may be written to")
