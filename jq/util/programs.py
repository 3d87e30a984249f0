"""Programs kept on disk as `jax.export` writes them, by all that they are made of: no process traces them again.

A key names the structure that a program computes; with it count the shapes and types of its arguments, the versions of
JAX and of this package, byte for byte, and what JAX is set to. A file begins with its own SHA-256, and appears whole: what
another process reads meanwhile, or what is damaged, is a program that is not there. XLA's executables are kept by JAX's
own cache (see `cache`); these are the same on all processors of a kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
from jax import export

from jq.errors import Error
from jq.util import cache, files
from jq.util.digest import digest

LIMIT = 256 << 20  # bytes of all files; a program has some ten or hundred thousand
_HEADER = 32  # bytes of a SHA-256
_BYTES = {"int2": np.int8, "int4": np.int8, "uint2": np.uint8, "uint4": np.uint8, "float4_e2m1fn": np.float32}
_shelves: list[dict[str, tuple[Executable, Any]]] = []  # what was compiled ahead and not asked for yet
_here = threading.local()  # the shelf that this thread compiles for
# Python runs one thread at a time: two that trace by turns would both keep the compiler waiting to the end.
_turn = threading.RLock()
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A program that is being compiled: a call waits for it."""

    compiled: Future[Any]

    def __call__(self, *given: Any) -> Any:
        """The results, which may still be under way."""
        arrays = (v if v.dtype == _wider(v) else v.astype(_wider(v)) for v in jax.tree.leaves(given))
        return self.compiled.result()(*arrays)

    @property
    def text(self) -> str:
        """The operations that XLA made of it."""
        return str(self.compiled.result().as_text())


def compiled(
    key: str | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    pool: ThreadPoolExecutor,
    options: dict[str, Any] | None,
) -> tuple[Executable, Any]:
    """Return the program of a function of trees of arrays, which the pool compiles, and the shapes of its results.

    `arguments` are its arguments or the like of them, `options` are for XLA. Without a key, and where JAX does not export
    it, as it does not the call of a library whose name it may change, the function is traced by every process.
    """
    leaves, tree = jax.tree.flatten(arguments)
    types = [v.dtype for v in leaves]
    like = [jax.ShapeDtypeStruct(v.shape, _wider(v), sharding=getattr(v, "sharding", None)) for v in leaves]

    def traced(*given: Any) -> Any:
        own = (g if g.dtype == t else g.astype(t) for g, t in zip(given, types, strict=True))
        return function(*jax.tree.unflatten(tree, own))

    exported, name = None, "" if key is None else digest(key, kinds(arguments), options, _circumstances())
    if (ready := next(filter(None, (shelf.pop(name, None) for shelf in _shelves)), None)) is not None:
        return ready

    def program(*given: Any) -> Any:  # so it is called in JAX's log
        return exported.call(*given) if exported else traced(*given)

    with _turn:
        if name and cache.enabled() and jax.process_count() == 1:
            exported = _read(name) or _exported(name, traced, like)
        lowered = jax.jit(program, compiler_options=options).lower(*like)
    made = Executable(pool.submit(lowered.compile)), lowered.out_info
    if name and (shelf := getattr(_here, "shelf", None)) is not None:
        shelf[name] = made
    return made


@contextlib.contextmanager
def meanwhile(compiling: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Run what compiles programs in another thread, for whoever asks for one of them in this block.

    Yields a function that waits for the thread. Its failure says nothing: who asks for the program meets it again.
    """
    shelf: dict[str, tuple[Executable, Any]] = {}

    def run() -> None:
        _here.shelf = shelf
        with contextlib.suppress(Exception):
            compiling()

    thread = threading.Thread(target=run, name="jq-ahead", daemon=True)
    thread.start()
    _shelves.append(shelf)
    try:
        yield thread.join
    finally:
        thread.join()  # a process that ends while a thread of it compiles may abort
        _shelves[:] = [other for other in _shelves if other is not shelf]


def _wider(array: Any) -> Any:
    """The type in which a compiled program takes an array: JAX refuses to give it those of less than a byte."""
    return _BYTES.get(str(array.dtype), array.dtype)


def kinds(arguments: Any) -> tuple[Any, ...]:
    """A tree of arrays without their values: what decides which program takes them."""
    leaves, tree = jax.tree.flatten(arguments)
    return str(tree), [(v.shape, str(v.dtype), str(getattr(v, "sharding", None))) for v in leaves]


def _exported(name: str, function: Callable[..., Any], like: list[jax.ShapeDtypeStruct]) -> export.Exported | None:
    """The function as JAX exports it, which is kept; None where JAX does not."""
    try:
        exported = export.export(jax.jit(function))(*like)
        content = exported.serialize()
    except (ValueError, NotImplementedError):  # JAX's own refusals
        return None
    with contextlib.suppress(Error):  # a full disk is no reason to fail
        files.write(folder() / name, hashlib.sha256(content).digest() + content)
        cache.trim(folder(), LIMIT)
    return exported


def _read(name: str) -> export.Exported | None:
    """A program from the disk, or None where there is none that is whole."""
    path = folder() / name
    try:
        content = files.content(path, largest=LIMIT)
        if hashlib.sha256(content[_HEADER:]).digest() != content[:_HEADER]:
            return None
        os.utime(path)  # used: the last to go
        return export.deserialize(bytearray(content[_HEADER:]))
    except (Error, OSError, ValueError):
        return None


def folder() -> Path:
    """Where programs are kept."""
    return cache.folder().with_name("programs")


@functools.cache
def _package() -> str:
    """A digest of this package's own source."""
    root = Path(__file__).parents[1]
    return digest({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")})


def _circumstances() -> tuple[Any, ...]:
    """All that a traced function depends on besides its own arguments."""
    settings = [jax.config.values[k] for k in _SETTINGS]
    return jax.__version__, version("jaxlib"), onnx.__version__, jax.default_backend(), settings, _package()
