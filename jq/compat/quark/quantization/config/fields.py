"""The base of all configs: fields that may be set but not misspelled, and a readable text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, Self

from jq.compat.quark.quantization.config.data_type import DataType
from jq.errors import ConfigError, suggest

_INDENT = "    "


class Fields:
    """A dataclass of options. Users of Quark change its fields after it is made, so it is not frozen.

    >>> @dataclasses.dataclass
    ... class Options(Fields):
    ...     per_channel: bool = False
    >>> Options().per_chanel = True
    Traceback (most recent call last):
    jq.errors.ConfigError: Options has no field 'per_chanel'. Did you mean 'per_channel'?
    """

    def __new__(cls, *args: Any, **given: Any) -> Self:  # noqa: D102  checks names before __init__ does
        for name in given:
            _check_field(cls, name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        _check_field(type(self), name)
        super().__setattr__(name, value)

    def __str__(self) -> str:
        return readable(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None for JSON and YAML; an enumeration member is `Kind.Name`."""
        return {name: plain(value) for name, value in self._values() if value is not None}

    def _values(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]


def _check_field(cls: type, name: str) -> None:
    known = [f.name for f in dataclasses.fields(cls)]  # each subclass is a dataclass
    if name not in known:
        raise ConfigError(f"{cls.__name__} has no field {name!r}.{suggest(name, known)}")


def plain(value: Any) -> Any:
    """Return a config's value for JSON and YAML.

    >>> from jq.compat.quark import Int8, PowerOfTwoMethod
    >>> plain({"method": PowerOfTwoMethod.MinMSE, "types": (Int8, None)})
    {'method': 'PowerOfTwoMethod.MinMSE', 'types': ['Int8', None]}
    """
    if isinstance(value, DataType):
        return value.name
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Fields):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def readable(value: Any, indent: str = "") -> str:
    """Return a config as text, each field and each option on a line of its own.

    >>> print(readable({"Percentile": 99.99, "FastFinetune": {"BatchSize": 2}}))
    {
        Percentile: 99.99
        FastFinetune: {
            BatchSize: 2
        }
    }
    """
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Fields):
        lines = [f"{indent}{_INDENT}{n} = {readable(v, indent + _INDENT)}" for n, v in value._values()]
        return "\n".join([f"{type(value).__name__}(", *lines, f"{indent})"])
    if isinstance(value, Mapping) and value:
        inner = indent + _INDENT
        lines = [f"{inner}{readable(k, inner)}: {readable(v, inner)}" for k, v in value.items()]
        return "\n".join(["{", *lines, f"{indent}}}"])
    if isinstance(value, (list, tuple)) and value:
        return "[" + ", ".join(readable(v, indent) for v in value) + "]"
    return value if isinstance(value, str) else repr(value)
