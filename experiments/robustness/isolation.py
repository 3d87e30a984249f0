"""Calls in processes of their own, with limits on time and memory; shared by the experiments of this folder.

A child is a fork of this process, which has imported what is needed, never used JAX, and has one thread. Its peak memory
counts from its parent's, so imports are included.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

SECONDS = 10
RESIDENT = 2 << 30  # bytes; address space is no measure, JAX reserves plenty
ADDRESSES = 24 << 30  # a net under the measurement, so that a defect does not take the machine along
LONGEST = 500  # characters of an error
DEFECT = "DEFECT"

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a call: its result or its `jq.Error` as text, or a line that starts with DEFECT."""

    text: str
    seconds: float
    megabytes: float = 0.0

    @property
    def defect(self) -> bool:
        return self.text.startswith(DEFECT)


def judged(call: Call) -> str:
    """The result of a call as text, its `jq.Error` of one short line, or a defect."""
    from jq.errors import Error

    try:
        return f"ok\t{call()}"
    except Error as error:
        text = str(error)
        if "\n" in text or "\r" in text:
            return f"{DEFECT}: several lines: {text!r:.300}"
        if len(text) > LONGEST:
            return f"{DEFECT}: {len(text)} characters: {text:.300}"
        return f"{type(error).__name__}\t{text}"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "/jq/" in f.filename] or frames
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        return f"{DEFECT}: {type(error).__name__} ({where}): {str(error).strip().partition(chr(10))[0]:.300}"


def _child(call: Call, results: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # XLA logs what it refuses
    start = time.monotonic()
    text = judged(call)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak > RESIDENT:
        text = f"{DEFECT}: {peak / 1e9:.1f} GB resident, then: {text}"
    results.send(Outcome(text, time.monotonic() - start, peak / 1e6))
    results.close()
    os._exit(0)  # XLA's threads need no farewell


def isolated(calls: Sequence[Call], jobs: int = 1, seconds: float = SECONDS) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcome of each call with its index, as they end, or have taken so long."""
    context = multiprocessing.get_context("fork")
    waiting: list[int] = list(range(len(calls)))[::-1]
    running: dict[Any, tuple[int, BaseProcess, float]] = {}
    again: set[int] = set()  # a fork of a Python with libraries hangs once in thousands: what is ours hangs twice
    while waiting or running:
        while waiting and len(running) < jobs:
            index = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(calls[index], sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = index, process, time.monotonic() + seconds
        ready = wait(running, timeout=0.2)
        for receiver, (index, process, deadline) in list(running.items()):
            outcome = _received(receiver, process) if receiver in ready else _checked(process, deadline, seconds)
            if outcome is None:
                continue
            del running[receiver]
            process.kill()
            process.join()
            if outcome.seconds >= seconds and index not in again:
                again.add(index)
                waiting.append(index)
            else:
                yield index, outcome


def _checked(process: BaseProcess, deadline: float, seconds: float) -> Outcome | None:
    """The outcome of a child that is to be ended: it takes too long, or too much memory."""
    try:
        resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        resident = 0
    if resident > 2 * RESIDENT:
        return Outcome(f"{DEFECT}: {resident / 1e9:.1f} GB resident, ended", 0.0, resident / 1e6)
    if time.monotonic() > deadline:
        return Outcome(f"{DEFECT}: no answer after {seconds:g} s", seconds, resident / 1e6)
    return None


def _received(receiver: Connection, process: BaseProcess) -> Outcome:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        return Outcome(f"{DEFECT}: died of {signal.Signals(-code).name if code < 0 else f'exit code {code}'}", 0.0)


@contextmanager
def own_cache() -> Iterator[None]:
    """XLA's compilations kept for this run only: most damage leaves the program as it was."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield
