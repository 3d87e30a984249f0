"""`jq-quant cache` shows what is kept on disk, and removes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jq.cli import main
from jq.util import cache, programs


def shown(capfd: pytest.CaptureFixture[str], *argv: str) -> dict[str, int]:
    with pytest.raises(SystemExit) as ended:
        main(["cache", "--json", *argv])
    assert not ended.value.code
    return {row["kind"]: row["bytes"] for row in json.loads(capfd.readouterr().out)}


def test_it_counts_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert shown(capfd) == {"compilations": 0, "programs": 0}
    for size, folder in ((30, cache.folder()), (12, programs.folder())):
        folder.mkdir(parents=True)
        (folder / "kept").write_bytes(b"0" * size)
    assert shown(capfd) == {"compilations": 30, "programs": 12}
    assert shown(capfd, "--clear") == shown(capfd) == {"compilations": 0, "programs": 0}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
