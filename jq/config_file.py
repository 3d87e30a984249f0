"""Config files: a `QuantConfig` as TOML or JSON."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from jq.config import QuantConfig, presets
from jq.errors import ConfigError

SUFFIXES = (".toml", ".json")


def read_config(path: str | os.PathLike[str]) -> QuantConfig:
    """Return the config that a .toml or .json file describes.

    Its keys are the options of `QuantConfig`; missing ones come from the `preset` it names, otherwise from
    `QuantConfig`'s defaults. TOML has no null: `op_types = "all"` selects all operators.

    >>> import tempfile
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
    name = os.fspath(path)
    kind, parse = ("JSON", json.loads) if name.endswith(".json") else ("TOML", tomllib.loads)
    try:
        document = parse(Path(path).read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
    except ValueError as error:  # also of bytes that are no text
        raise ConfigError(f"{name} is no {kind}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{name} needs options by name; got a {type(document).__name__}")
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


def _value(value: Any) -> str:
    """A value as TOML writes it: as JSON, except for the character DEL."""
    if isinstance(value, list):
        parts = [_value(v) for v in value]
        line = f"[{', '.join(parts)}]"
        return line if len(line) < 100 else "[\n" + "".join(f"    {part},\n" for part in parts) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
