"""Progress of long work: a bar on a terminal after two seconds, and a line in the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

_MINUTE = 60.0  # seconds
log = logging.getLogger("jq")  # steps and their seconds are its infos; below warnings, bars go too


@contextlib.contextmanager
def progress_bar(title: str, total: int | None, unit: str = "samples") -> Iterator[Callable[[int], None]]:
    """Show a progress bar with a rate on a terminal; yield the function that advances it by a count."""
    start = time.perf_counter()
    if not _bars():
        yield _by_the_minute(title, total, unit)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), rate)
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total, rate="")

            def advance(count: int) -> None:
                speed = bar.tasks[0].speed
                bar.update(task, advance=count, rate=f"{speed:,.{0 if speed > 9 else 2}f} {unit}/s" if speed else "")

            yield advance
    log.info("%s: %s in %.1f s", title, "all data" if total is None else f"{total:,}", time.perf_counter() - start)


@contextlib.contextmanager
def unit_bar(title: str, total: int) -> Iterator[Callable[[str, float, float], None]]:
    """Show a progress bar over the units of a network; yield the function that reports a unit's error before and after."""

    def told(unit: str, before: float, after: float) -> None:
        log.info("%s %s: error %.3g -> %.3g", title, unit, before, after)

    if not _bars():
        advance = _by_the_minute(title, total, "units")

        def finished(unit: str, before: float, after: float) -> None:
            told(unit, before, after)
            advance(1)

        yield finished
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    last = TextColumn("{task.fields[unit]}")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), last)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, unit="")
        yield lambda unit, before, after: bar.update(task, advance=1, unit=f"{unit}: error {before:.3g} -> {after:.3g}")


def _by_the_minute(title: str, total: int | None, unit: str) -> Callable[[int], None]:
    """Return the function that counts, and tells the count on the command line once a minute."""
    start = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= _MINUTE and log.handlers:  # those of the command line; a library is silent
            last, of = now, "" if total is None else f" of {total:,}"
            log.warning("%s: %s%s %s after %.0f min", title, f"{done:,}", of, unit, (now - start) / 60)

    return advance


def _bars() -> bool:
    """Whether stderr is a terminal and neither --quiet nor --verbose is on."""
    return sys.stderr.isatty() and log.getEffectiveLevel() == logging.WARNING
