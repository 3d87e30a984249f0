"""Programs kept on disk as XLA compiled them, by all that they are made of: no process traces or compiles them again.

A key names the structure that a program computes; with it count the shapes, types and devices of its arguments, the
versions of JAX and of this package, byte for byte, what JAX and XLA are set to, and the processor. A file begins with its
own SHA-256, and appears whole: what another process reads meanwhile, or what is damaged, is a program that is not there.
Like those of JAX's own cache (see `cache`), which keeps all other programs, the files are machine code: who may write
into the user's cache folder may run code as the user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pickle
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor, Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
from jax.experimental import serialize_executable

from jq.util import cache, files
from jq.util.digest import digest
from jq.util.machine import cores, processor

LIMIT = 1 << 30  # bytes of all files; the programs of a network have some million
_HEADER = 32  # bytes of a SHA-256
_BYTES = {"int2": np.int8, "int4": np.int8, "uint2": np.uint8, "uint4": np.uint8, "float4_e2m1fn": np.float32}
_shelves: list[dict[str, tuple[Executable, Any]]] = []  # what was compiled ahead and not asked for yet
_here = threading.local()  # the shelf that this thread compiles for
# Python runs one thread at a time: two that trace by turns would both keep the compiler waiting to the end.
_turn = threading.RLock()
_loading = threading.Lock()  # of machine code: two at once take three times as long, as they wait for the same pages
_LASTING = {"jq", "builtins", "collections", "enum", "numpy", "ml_dtypes", "jax", "jaxlib"}
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A program that is being compiled: a call waits for it."""

    compiled: Future[Any]

    def __call__(self, *given: Any) -> Any:
        """The results, which may still be under way."""
        return self.compiled.result()(*map(_bytewise, jax.tree.leaves(given)))

    @property
    def text(self) -> str:
        """The operations that XLA made of it."""
        return str(self.compiled.result().as_text())


def compiled(
    key: str | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    pool: Executor | None,
    options: dict[str, Any] | None,
) -> tuple[Executable, Any]:
    """Return the program of a function of trees of arrays, which the pool compiles, and the shapes of its results.

    `arguments` are its arguments or the like of them, `options` are for XLA; without a pool this thread compiles. Without a
    key, and where arguments have types of others, every process traces the function, and JAX's own cache keeps what is
    compiled. Where the program calls a library or the host, which another process may not have, nothing is kept.
    """
    leaves, tree = jax.tree.flatten(arguments)
    types, like = [_type(v).dtype for v in leaves], [_like(v) for v in leaves]
    name = digest(key, kinds(arguments), options, _circumstances()) if key and _is_lasting(tree) else ""
    if (ready := next(filter(None, (shelf.pop(name, None) for shelf in _shelves)), None)) is not None:
        return ready

    def program(*given: Any) -> Any:
        own = (g if g.dtype == t else g.astype(t) for g, t in zip(given, types, strict=True))
        return function(*jax.tree.unflatten(tree, own))

    keeps = bool(name) and cache.enabled() and jax.process_count() == 1
    if keeps:
        # XLA writes only what it has compiled: a program that JAX's cache had read could be written, and not run again. So
        # its name, which JAX's log tells and which that cache looks at, is new each time.
        program.__name__ = f"program_{os.urandom(4).hex()}"

    def lowered() -> Any:
        with _turn:
            return jax.jit(program, compiler_options=options).lower(*like)

    if keeps and (kept := _read(name)) is not None:
        made = Executable(_done(pool, _loaded, kept, like, lambda: lowered().compile())), kept.results
    else:
        new = lowered()
        made = Executable(_done(pool, _compiled, new, name if keeps else "")), new.out_info
    if name and (shelf := getattr(_here, "shelf", None)) is not None:
        shelf[name] = made
    return made


def _done(pool: Executor | None, function: Callable[..., Any], *given: Any) -> Future[Any]:
    """The future of a function that a pool runs, or that this thread runs at once."""
    if pool is not None:
        return pool.submit(function, *given)
    future: Future[Any] = Future()
    future.set_result(function(*given))
    return future


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


def _type(array: Any) -> Any:
    """The shape and type that a program sees of an array, or of the like of one."""
    return array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)


def _like(array: Any) -> jax.ShapeDtypeStruct:
    """The shape and type that a program is compiled for in place of an array."""
    seen, wider = _type(array), _BYTES.get(str(_type(array).dtype))
    return jax.ShapeDtypeStruct(
        seen.shape, wider or seen.dtype, sharding=_sharding(array), weak_type=wider is None and seen.weak_type
    )


def _bytewise(array: Any) -> Any:
    """An array in the type in which a compiled program takes it: JAX refuses to give it those of less than a byte."""
    wider = _BYTES.get(str(array.dtype)) if hasattr(array, "dtype") else None
    return array if wider is None else array.astype(wider)


def _sharding(array: Any) -> Any:
    """How an array lies on devices; None on the one where JAX computes by default."""
    sharding = getattr(array, "sharding", None)
    alone = sharding is not None and not hasattr(sharding, "mesh") and sharding.device_set == {_default_device()}
    return None if alone else sharding


def kinds(arguments: Any) -> tuple[Any, ...]:
    """A tree of arrays without their values: what decides which program takes them."""
    leaves, tree = jax.tree.flatten(arguments)
    return _nodes(tree), list(map(kind, leaves))


def kind(array: Any) -> tuple[Any, ...]:
    """An array without its values."""
    like = _like(array)
    place = () if like.sharding is None else (str(like.sharding), *sorted(d.id for d in like.sharding.device_set))
    return like.shape, str(_type(array).dtype), like.weak_type, *place


def _nodes(tree: jax.tree_util.PyTreeDef) -> Any:
    """The classes and static fields of a tree, in nested tuples."""
    return tree.node_data(), tuple(map(_nodes, tree.children()))


def _is_lasting(value: Any) -> bool:
    """Whether a value is of this package's or of Python's own types alone: the code of others may change unseen."""
    match value:
        case jax.tree_util.PyTreeDef():
            return _is_lasting(_nodes(value))
        case type() | types.FunctionType():
            return value.__module__.split(".")[0] in _LASTING
        case Mapping():
            return all(map(_is_lasting, (*value, *value.values())))
        case str() | bytes():
            return True
        case Sequence() | Set():
            return all(map(_is_lasting, value))
        case _ if dataclasses.is_dataclass(value):
            return _is_lasting(type(value)) and all(
                _is_lasting(getattr(value, f.name)) for f in dataclasses.fields(value)
            )
    return _is_lasting(type(value))


@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """A program as it lies on the disk."""

    content: tuple[bytes, Any, Any]  # by JAX's own serialization: with the trees of arguments and results
    results: Any  # their shapes and types


def _compiled(lowered: Any, name: str) -> Any:
    """The compiled program, which is kept by this name, if it has one."""
    program = lowered.compile()
    # A file holds no library: of LAPACK's functions the names alone.
    if name and "lapack_" not in program.as_text():
        with contextlib.suppress(Exception):  # a full disk; what JAX or pickle do not write, as calls of the host
            results = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), lowered.out_info)
            content = pickle.dumps((serialize_executable.serialize(program), results))
            files.write(folder() / name, hashlib.sha256(content).digest() + content)
            cache.trim(folder(), LIMIT)
    return program


def _read(name: str) -> _Kept | None:
    """A program from the disk, or None where there is none that is whole."""
    path = folder() / name
    try:
        content = files.content(path, largest=LIMIT)
        if hashlib.sha256(content[_HEADER:]).digest() != content[:_HEADER]:
            return None
        os.utime(path)  # used: the last to go
        return _Kept(*pickle.loads(content[_HEADER:]))  # noqa: S301  machine code lies beside it
    except Exception:  # no file, or one with classes that are not here
        return None


def _loaded(kept: _Kept, like: list[jax.ShapeDtypeStruct], compile: Callable[[], Any]) -> Any:
    """A program from the disk in memory; compiled anew where XLA does not take it."""
    placed = next((v.sharding for v in like if v.sharding is not None), None)
    mesh = getattr(placed, "mesh", None)
    devices = [_default_device()] if placed is None else list(placed.device_set if mesh is None else mesh.devices.flat)
    try:
        with _loading:
            return serialize_executable.deserialize_and_load(*kept.content, execution_devices=devices)
    except Exception:  # of many kinds, by the way in which XLA changed or the file is not XLA's
        return compile()


def folder() -> Path:
    """Where programs are kept."""
    return cache.folder().with_name("programs")


@functools.cache
def _package() -> str:
    """A digest of this package's own source."""
    root = Path(__file__).parents[1]
    return digest({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")})


def _circumstances() -> tuple[Any, ...]:
    """All that a compiled function depends on besides its own arguments."""
    settings = [jax.config.values[k] for k in _SETTINGS], os.environ.get("XLA_FLAGS", "")
    versions = jax.__version__, version("jaxlib"), onnx.__version__, _package()
    device = _default_device()
    return versions, settings, device.client.platform_version, device.device_kind, device.id, processor(), cores()


def _default_device() -> jax.Device:
    """Where JAX computes what nothing places elsewhere."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]
