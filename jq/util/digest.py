"""The identity of a run: one hash of all that its result depends on."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jq.errors import ConfigError


def digest(*values: Any) -> str:
    """Return the SHA-256 of values: equal values have equal digests, in every process.

    Arrays count whole, with dtype and shape; dataclasses by their class and by the fields that are compared; mappings
    and sets in any order; functions by their code, defaults and closure, but not by the globals that they read.
    Everything is written with its kind and its length, so that nothing runs together.

    >>> digest("ab", "c") == digest("a", "bc"), digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    (False, True)
    >>> one, other = np.zeros(2000), np.zeros(2000)
    >>> other[1000] = 1
    >>> digest(one) == digest(other)
    False
    """
    result = hashlib.sha256()
    for part in _written(values):
        result.update(part)
    return result.hexdigest()


def _written(value: Any) -> Iterator[Any]:
    """A value as bytes, no two values alike: no value's are the beginning of another's."""
    kind = type(value)
    match value:
        case None | bool() | int() | float() | complex() | types.EllipsisType() if not isinstance(value, enum.Enum):
            yield from _leaf(kind.__name__, repr(value).encode())
        case bytes() | memoryview():
            yield from _leaf("bytes", value)
        case enum.Enum():
            yield from _leaf("enum", f"{_name(kind)}.{value.name}".encode())
        case str():
            yield from _leaf("str", value.encode("utf-8", "surrogatepass"))
        case np.dtype():
            yield from _leaf("dtype", repr(value).encode())
        case types.ModuleType() | types.BuiltinFunctionType() | type():
            yield from _leaf("name", _name(value).encode())
        case Mapping():
            yield from _group("mapping", [part for key in sorted(value, key=str) for part in (key, value[key])])
        case Set():
            yield from _group("set", sorted(map(digest, value)))
        case Sequence():
            yield from _group("sequence", value)
        case functools.partial():
            yield from _group("partial", (value.func, value.args, value.keywords))
        case types.MethodType():
            yield from _group("method", (value.__self__, value.__func__))
        case types.CodeType():
            yield from _group("code", (value.co_code, value.co_consts, value.co_names, value.co_freevars))
        case types.FunctionType():
            cells = [c.cell_contents for c in value.__closure__ or () if c.cell_contents is not value]
            yield from _group("function", (value.__code__, value.__defaults__, value.__kwdefaults__, cells))
        case _ if hasattr(value, "__array__"):
            array = np.asarray(value)
            whole = array.dtype.hasobject  # its bytes are addresses
            content = array.tolist() if whole else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            yield from _group("array", (array.dtype, array.shape, content))
        case _ if hasattr(value, "SerializeToString"):  # of protobuf
            yield from _leaf(_name(kind), value.SerializeToString(deterministic=True))
        case _ if hasattr(value, "__wrapped__"):  # a function that jax.jit compiles, say
            yield from _written(value.__wrapped__)
        case _ if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}
            yield from _group("dataclass", (kind, _call(kind), fields))
        case _ if _call(kind) is not None:
            yield from _group("callable", (kind, _call(kind), vars(value)))
        case _ if callable(value) and hasattr(value, "__name__"):  # of a library written in C
            yield from _leaf("name", f"{_name(kind)} {value.__name__}".encode())
        case _:
            needs = "a digest needs values, arrays, dataclasses or functions"
            raise ConfigError(f"{needs}; got a {_name(kind)}; make it a dataclass")


def _leaf(kind: str, content: Any) -> Iterator[Any]:
    yield f"{kind} {len(content)} ".encode()
    yield content


def _group(kind: str, parts: Sequence[Any]) -> Iterator[Any]:
    yield f"{kind} {len(parts)} ".encode()
    for part in parts:
        yield from _written(part)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value.__name__)}"


def _call(kind: type) -> Any:
    """The function that calls a value of a class."""
    call = getattr(kind, "__call__", None)  # noqa: B004  of the class, not of the value
    return call if isinstance(call, types.FunctionType) else None
