"""Fields of a config, each declared once: its type, default, text and bounds, from which it is checked and documented."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jq.errors import ConfigError, suggest

C = TypeVar("C", bound=type)
_NAMES = {bool: ("True or False",) * 2, str: ("a name", "names"), int: ("a whole number", "whole numbers"),
          float: ("a number", "numbers"), types.NoneType: ("None",) * 2}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    """The text of a field, and the values that it may hold beyond its type."""

    text: str
    among: Collection[str] = ()  # the names that it may hold; with `valid`, those to suggest
    above: float = -math.inf  # bounds of its numbers
    least: float = -math.inf
    most: float = math.inf
    valid: Callable[[Any], bool] | None = None  # beyond the type
    needs: str = ""  # the words for what `valid` accepts
    local: bool = False  # whether an override of a node may change it

    def holds(self, kind: Any, value: Any) -> bool:
        """Whether a value is of a type and within the bounds.

        >>> Declared(text="", least=1).holds(int | None, 0), Declared(text="").holds(tuple[str, ...], ("a",))
        (False, True)
        """
        origin, parts = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            return any(self.holds(part, value) for part in parts)
        if origin is Literal:
            return value in parts
        if origin is tuple:
            if not isinstance(value, tuple):
                return False
            of_each = parts[:1] * len(value) if parts[1:] == (...,) else parts
            return len(of_each) == len(value) and all(map(self.holds, of_each, value))
        if kind in (int, float):
            number = isinstance(value, (int, kind)) and not isinstance(value, bool)
            return number and self.above < value and self.least <= value <= self.most
        listed = kind is not str or self.valid is not None or not self.among
        return kind is Any or (isinstance(value, kind) and (listed or value in self.among))

    def words(self, kind: Any, many: bool = False) -> str:
        """The values that the field may hold, in words.

        >>> Declared(text="", above=0).words(float | None)
        'a number above 0, or None'
        """
        origin, parts = get_origin(kind), get_args(kind)
        if self.needs and not many:
            return self.needs
        if origin in (Union, types.UnionType):
            return ", or ".join(self.words(part) for part in parts)
        if origin is Literal:
            return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
        if origin is tuple:
            inner = self.words(parts[0], many=True)
            whole = "tuple" if parts[1:] == (...,) else "pair"
            return f"{whole}s of {inner}" if many else f"a {whole} of {inner}"
        if kind is str and self.among:
            return f"{'' if many else 'one of '}{', '.join(self.among)}"
        bounds = (("above", self.above), ("at least", self.least), ("at most", self.most))
        limits = [f" {word} {bound}" for word, bound in bounds if kind in (int, float) and math.isfinite(bound)]
        return _NAMES[kind][many] + ",".join(limits)


def field(default: Any, text: str, **declared: Any) -> Any:
    """Return a dataclass's field with its default, its text and the values that it may hold (`Declared`)."""
    return dataclasses.field(default=default, metadata={"declared": Declared(text=text, **declared)})


@functools.cache
def declared(config: Any) -> dict[str, tuple[Any, Declared]]:
    """The type and the declaration of each field of a config, by name."""
    hints = get_type_hints(config)
    return {f.name: (hints[f.name], f.metadata["declared"]) for f in dataclasses.fields(config)}


def check(config: Any) -> None:
    """Raise a ConfigError for the first field that holds a value which its declaration does not allow."""
    for name, (kind, own) in declared(config.__class__).items():
        value = getattr(config, name)
        if not own.holds(kind, value) or (value is not None and own.valid is not None and not own.valid(value)):
            known = [str(c) for c in (*own.among, *_choices(kind))]
            given = value.split("+") if isinstance(value, str) else value if isinstance(value, tuple) else ()
            near = [suggest(word, known) for word in given if isinstance(word, str) and word not in known]
            raise ConfigError(f"{name} needs {own.words(kind)}; got {value!r}.{''.join(near[:1])}")


def documented(config: C) -> C:
    """Return a config class whose docstring lists its fields: default, text, and the values that each may hold."""
    lines = [
        f"- `{f.name}` = {reprlib.repr(f.default)}: {own.text}. *{own.words(kind).replace('*', chr(92) + '*')}*"
        for f, (kind, own) in zip(dataclasses.fields(config), declared(config).values(), strict=True)
    ]
    config.__doc__ = "\n".join((str(config.__doc__).rstrip(), "", *(f"    {line}" for line in lines), ""))
    return config


def _choices(kind: Any) -> tuple[Any, ...]:
    parts = get_args(kind)
    return parts if get_origin(kind) is Literal else tuple(c for part in parts for c in _choices(part))
