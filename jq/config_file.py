"""Config files: a `QuantConfig` as TOML or JSON."""

from __future__ import annotations

import json
import os
import textwrap
from typing import Any

from jq.config import QuantConfig, presets
from jq.errors import ConfigError
from jq.util import files
from jq.util.fields import Declared, declared

SUFFIXES = (".toml", ".json")


def read_config(path: str | os.PathLike[str]) -> QuantConfig:
    """Return the config that a .toml or .json file describes.

    Its keys are the options of `QuantConfig`; missing ones come from the `preset` it names, otherwise from
    `QuantConfig`'s defaults. TOML has no null: `op_types = "all"` selects all operators.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "mine.toml"
    ...     _ = path.write_text('preset = "A8W8"\\nmethod = "percentile"\\n[overrides."stem*"]\\nactivation = "int16"')
    ...     config = read_config(path)
    >>> config.scale, config.method, dict(config.overrides)
    ('float', 'percentile', {'stem*': (('activation', int16),)})
    """
    options = read_table(path)
    try:
        base = presets[options.pop("preset")] if "preset" in options else QuantConfig()
        return base.replace(**{option: QuantConfig.read(option, value) for option, value in options.items()})
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the document of a .toml or .json file."""
    document = files.document(path, error=ConfigError)
    if not isinstance(document, dict):
        raise ConfigError(f"{os.fspath(path)} needs options by name; got a {type(document).__name__}")
    return document


def as_toml(config: QuantConfig) -> str:
    """Return the config as TOML, all options that are not None, as `read_config` reads it.

    >>> as_toml(presets["XINT8"].replace(overrides={"Gemm": {"symmetric": True}})).splitlines()[-4:]
    ['seed = 0', '', '[overrides."Gemm"]', 'symmetric = true']
    """
    options = config.to_dict()
    overrides = options.pop("overrides")
    if options["op_types"] is None:
        options["op_types"] = "all"
    lines = [f"{name} = {_value(value)}" for name, value in options.items() if value is not None]
    for pattern, changed in overrides.items():
        lines += ["", f"[overrides.{_value(pattern)}]", *(f"{k} = {_value(v)}" for k, v in changed.items())]
    return "\n".join(lines) + "\n"


def explained(config: QuantConfig) -> str:
    """Return `as_toml` with a comment above each option, and those that are None as comments alone.

    >>> print("\\n".join(explained(presets["XINT8"]).splitlines()[:2]))
    # the scales that are allowed: one of power_of_two, float
    scale = "power_of_two"
    """
    text, lines = as_toml(config), list[str]()
    fields, values = declared(QuantConfig), config.to_dict()
    unset = [name for name, value in values.items() if value is None and name != "op_types"]
    for line in text.partition("\n[overrides")[0].splitlines():
        name = line.partition(" = ")[0]
        lines += _comment(*fields[name]) if name in fields else []
        lines.append(line)
    for name in unset:
        lines += [*_comment(*fields[name]), f"# {name} is not set"]
    _, heading, overrides = text.partition("\n[overrides")
    return "\n".join(lines) + "\n" + heading + overrides


def _comment(kind: Any, own: Declared) -> list[str]:
    wrap = textwrap.TextWrapper(100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    return wrap.wrap(f"{own.text}: {own.words(kind)}")


def _value(value: Any) -> str:
    """A value as TOML writes it: as JSON, except for the character DEL."""
    if isinstance(value, list):
        parts = [_value(v) for v in value]
        line = f"[{', '.join(parts)}]"
        return line if len(line) < 100 else "[\n" + "".join(f"    {part},\n" for part in parts) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
