"""What is kept on disk is bounded, and the longest unused goes first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jq.util import cache


def test_the_longest_unused_is_removed_beyond_the_limit(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        path = tmp_path / name
        path.write_bytes(b"0" * 10)
        os.utime(path, (1e9 - age, 1e9 - age))
    assert cache.trim(tmp_path, 25) == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    assert cache.trim(tmp_path, 0) == 0 and not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert cache.trim(tmp_path / "none", 100) == 0


def test_the_folder_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "jq" / "xla"
