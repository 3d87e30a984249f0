"""Folders that a command writes to: a typo in a path is an error, not a new tree."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jq.errors import ConfigError, suggest


def check_folder(option: str, paths: Path | Iterable[Path] | None) -> None:
    """Raise a ConfigError, before any work, if the folder of a file that an option names is not there.

    >>> check_folder("--output", Path("no_such_folder/model.onnx"))
    Traceback (most recent call last):
    jq.errors.ConfigError: --output no_such_folder/model.onnx: there is no folder no_such_folder; add --make-dirs to create it
    """
    for path in [paths] if isinstance(paths, Path) else paths or ():
        folder = path.parent
        if folder.exists():
            continue
        parent = next(p for p in folder.parents if p.exists())
        missing = folder.relative_to(parent).parts[0]
        near = suggest(missing, (p.name for p in parent.iterdir() if p.is_dir())) if parent.is_dir() else ""
        raise ConfigError(
            f"{option} {path}: there is no folder {folder}; add --make-dirs to create it.{near}".removesuffix(".")
        )
