"""Work on any executor: `concurrent.futures`' own, Dask's, Ray's, MPI's or SLURM's.

An item of work is a function of a module with small arguments that can be pickled. What is large, such as networks and
samples, lies in files that items name by place and digest (`Shipped`): below the folder for temporary files, which
`TMPDIR` puts where all machines see it. An item depends on nothing but its arguments, so that one whose worker dies
is done again elsewhere.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import logging
import multiprocessing
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jq.errors import ConfigError, DataError, Error
from jq.util import files

_TRIES = 3  # workers that an item may lose before it is given up
_PAUSE = 0.2  # seconds between looks at futures that nothing can wait for
# What decides the bits of a result and is JAX's, not an item's.
_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_disable_most_optimizations", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_numpy_dtype_promotion",
)  # fmt: skip
log = logging.getLogger("jq")


class Pending(Protocol):
    """The result of an item, sooner or later: a `concurrent.futures.Future`, or a job of submitit."""

    def done(self) -> bool: ...  # noqa: D102
    def result(self) -> Any: ...  # noqa: D102


class Executor(Protocol):
    """Anything that runs functions elsewhere: each `concurrent.futures.Executor`, and submitit's."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any: ...  # noqa: D102


class Processes(concurrent.futures.Executor):
    """Some processes of this machine, which share nothing with this one; a new one takes the place of one that dies.

    A script that uses it needs `if __name__ == "__main__":`, as each process begins by importing the script.

    >>> with Processes(2) as executor:
    ...     executor.submit(max, 3, 4).result()
    4
    """

    def __init__(self, workers: int) -> None:
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise ConfigError(f"workers is {workers!r}; expected a whole number of processes, at least 1")
        self._threads = ThreadPoolExecutor(workers)  # each holds one process, so that a death takes no other item along
        self._own = threading.local()
        self._pools: list[ProcessPoolExecutor] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Run a function in the next process that is free."""
        return self._threads.submit(self._run, fn, args, kwargs)

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if getattr(self._own, "pool", None) is None:
            self._own.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            self._pools.append(self._own.pool)
        try:
            return self._own.pool.submit(fn, *args, **kwargs).result()
        except concurrent.futures.BrokenExecutor:
            self._own.pool = None
            raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes once they are done with what they have begun."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        for pool in self._pools:
            pool.shutdown(wait=wait)


# --- What is large travels in files ---


@functools.lru_cache(maxsize=4)
def _read(path: str, digest: str) -> Any:
    content = files.content(path, kind="the file sent to this worker, ")
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataError(f"{path} has changed since it was sent to this worker")
    return pickle.loads(content)  # noqa: S301  the digest came with the item, which is a pickle itself


@dataclasses.dataclass(frozen=True)
class Shipped:
    """A value in a file, which a worker reads once."""

    path: str
    digest: str  # SHA-256 of the file

    @property
    def value(self) -> Any:
        """The value, from the file or from memory."""
        try:
            return _read(self.path, self.digest)
        except DataError as error:
            raise DataError(f"{error}; set TMPDIR to a folder that all machines see") from error


class _Pickler(pickle.Pickler):
    """Arrays of JAX travel as arrays of numpy: they lie on devices of this process."""

    def reducer_override(self, value: Any) -> Any:
        return (np.asarray, (np.asarray(value),)) if isinstance(value, jax.Array) else NotImplemented


@contextlib.contextmanager
def shipping() -> Iterator[Callable[[Any], Shipped]]:
    """Yield the function that puts a value into a file; all files are removed in the end."""
    with tempfile.TemporaryDirectory(prefix="jq-", ignore_cleanup_errors=True) as folder:

        def ship(value: Any) -> Shipped:
            made = io.BytesIO()
            _Pickler(made, pickle.HIGHEST_PROTOCOL).dump(value)
            content = made.getvalue()
            digest = hashlib.sha256(content).hexdigest()
            path = Path(folder).absolute() / digest
            if not path.exists():
                files.write(path, content)
            return Shipped(str(path), digest)

        yield ship


# --- Items of work ---


def performed(
    executor: Executor, function: Callable[..., Any], items: Sequence[Sequence[Any]]
) -> Generator[tuple[int, Any], None, None]:
    """Yield the number of each item and what `function(*item)` returns, as they end.

    What the function raises is raised here. What the executor itself raises is a worker that was lost, whose item is
    handed out again.
    """
    settings = {name: jax.config.values[name] for name in _SETTINGS} | {"jax_num_cpu_devices": jax.local_device_count()}
    running: dict[int, Pending] = {}
    lost = collections.Counter[int]()

    def hand_out(number: int) -> None:
        try:
            running[number] = executor.submit(_perform, function, tuple(items[number]), settings)
        except RuntimeError as error:  # a pool that broke, or was shut down
            text = f"the executor takes no more work: {error}; give a new one, or jq.research.Processes, which replaces"
            raise Error(f"{text} workers that die; finished runs are in the table") from error

    try:
        for number in range(len(items)):
            hand_out(number)
        while running:
            for number in _ended(running):
                try:
                    value, raised = running.pop(number).result()
                except Exception as error:
                    lost[number] += 1
                    told = f"item {number + 1} of {len(items)} lost its worker: {type(error).__name__}: {error}"
                    if lost[number] == _TRIES:
                        raise Error(f"{told}, {_TRIES} times; does the machine have enough memory?") from error
                    log.warning("%s; it is repeated", told)
                    hand_out(number)
                    continue
                if raised is not None:
                    raise raised
                yield number, value
    finally:
        for pending in running.values():
            if (cancel := getattr(pending, "cancel", None)) is not None:
                cancel()


def _ended(running: Mapping[int, Pending]) -> list[int]:
    """The numbers of those that are done, at least one."""
    waited = [p for p in running.values() if isinstance(p, concurrent.futures.Future)]
    if len(waited) == len(running):
        concurrent.futures.wait(waited, return_when=concurrent.futures.FIRST_COMPLETED)
    while not (ended := [number for number, pending in running.items() if pending.done()]):
        time.sleep(_PAUSE)
    return ended


def _perform(
    function: Callable[..., Any], args: Sequence[Any], settings: Mapping[str, Any]
) -> tuple[Any, Exception | None]:
    """In a worker: the result, or what was raised, so that whatever the executor raises is the executor's own."""
    for name, value in settings.items():
        if jax.config.values[name] != value:
            with contextlib.suppress(RuntimeError):  # the number of devices, where JAX runs already
                jax.config.update(name, value)
    try:
        return function(*args), None
    except Exception as error:
        error.add_note("In a worker:\n" + traceback.format_exc())
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  made on this line
        except Exception:
            return None, Error(f"a worker raised {type(error).__name__}: {error}")
        return None, error
