"""Bars are for terminals; the log has what they showed."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import pytest

from jq.util.progress import log, progress_bar, unit_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work() -> None:
    with progress_bar("calibrate", 8) as advance:
        advance(8)
    with unit_bar("finetune", 1) as told:
        told("conv", 2.0, 1.0)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[io.StringIO, int], str]:
    """What standard error shows of the work, and that the log says the same at each level."""

    def shown(stream: io.StringIO, level: int) -> str:
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(log, "handlers", [logging.StreamHandler(stream)])
        monkeypatch.setattr(log, "propagate", False)
        before = log.level
        log.setLevel(level)
        try:
            work()
        finally:
            log.setLevel(before)
        return stream.getvalue()

    return shown


def test_a_bar_is_on_a_terminal_only(at: Callable[[io.StringIO, int], str]) -> None:
    assert "calibrate" in (found := at(Terminal(), logging.WARNING)) and "finetune" in found and "8/8" in found
    assert at(io.StringIO(), logging.WARNING) == ""


def test_the_quiet_have_no_bars(at: Callable[[io.StringIO, int], str]) -> None:
    assert at(Terminal(), logging.ERROR) == ""


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_the_log_has_lines_instead(at: Callable[[io.StringIO, int], str], stream: type[io.StringIO]) -> None:
    first, second = at(stream(), logging.INFO).splitlines()
    assert first.startswith("calibrate: 8 in 0.") and second == "finetune conv: error 2 -> 1"
