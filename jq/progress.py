"""A bar for what takes more than two seconds, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(title: str, total: int | None, unit: str = "samples") -> Iterator[Callable[[int], None]]:
    """A bar with a rate on a terminal, and nothing elsewhere: yields what is called with each count."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
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


@contextlib.contextmanager
def unit_bar(title: str, total: int) -> Iterator[Callable[[str, float, float], None]]:
    """A bar over the units of a network on a terminal: yields what is called with each one's error before and after."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    last = TextColumn("{task.fields[unit]}")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), last)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, unit="")
        yield lambda unit, before, after: bar.update(task, advance=1, unit=f"{unit}: error {before:.3g} -> {after:.3g}")
