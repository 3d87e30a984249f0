"""Execution providers of onnxruntime, the CPU's or a device's: their names, options and compiled models."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jq.device.provider import PROVIDER_OPTIONS
from jq.errors import ConfigError, DataError, suggest
from jq.util import files

if TYPE_CHECKING:
    from jq.readings.runtime import Reading

CPU = "cpu"
RUNTIME = "onnxruntime"  # the reading's usual name: onnxruntime on the CPU
_ENDING = "ExecutionProvider"
_KIND = "jq: model compiled by a provider of onnxruntime"
# Of each provider, how one comes by it. The wheel `onnxruntime` has the CPU's alone.
_INSTALL = {
    "vitisai": "install Ryzen AI Software, and run jq in the conda environment that it creates, whose onnxruntime has the provider",
    "cuda": "install onnxruntime-gpu instead of onnxruntime",
    "tensorrt": "install onnxruntime-gpu instead of onnxruntime, and TensorRT",
    "dml": "install onnxruntime-directml instead of onnxruntime",
    "openvino": "install onnxruntime-openvino instead of onnxruntime",
    "qnn": "install onnxruntime-qnn instead of onnxruntime",
    "migraphx": "install onnxruntime-migraphx instead of onnxruntime",
}


@dataclasses.dataclass(frozen=True)
class Provider:
    """A provider of onnxruntime as a reading: its name, short or whole, and how a session is opened with it.

    `context` is a file for the compiled model (an EP context model): written when the model is compiled first, and read
    afterwards instead of compiling again, as long as model, provider, options and onnxruntime are the same.

    >>> Provider("vitisai", {"target": "X2"}).whole
    'VitisAIExecutionProvider'
    """

    name: str  # short, such as vitisai, or whole
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the provider's own
    context: str | os.PathLike[str] | None = None  # the file of the compiled model
    embed: bool = False  # the compiled code into that file, and not into one beside it

    def __post_init__(self) -> None:
        if self.short not in provider_names():
            known = (*map(short_name, available()), "vitisai")
            raise ConfigError(
                f"onnxruntime has no provider {self.name!r}; use one of {', '.join(dict.fromkeys(known))}."
                + suggest(self.name, provider_names())
            )
        if self.embed and self.context is None:
            raise ConfigError("embed puts compiled code into the context file; give context too")

    @property
    def short(self) -> str:
        """The name in lower case, without its ending."""
        return short_name(RUNTIME_NAMES.get(self.name, self.name))

    @property
    def whole(self) -> str:
        """The name that onnxruntime has for it."""
        return provider_names()[self.short]

    @property
    def words(self) -> dict[str, str]:
        """The options as onnxruntime takes them: text."""
        return {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in self.options.items()}

    def check(self) -> None:
        """Raise a ConfigError where this onnxruntime lacks the provider, or a file of its options is not there."""
        import onnxruntime

        if self.whole not in available():
            install = _INSTALL.get(self.short, "install the build of onnxruntime that has it")
            raise ConfigError(
                f"this onnxruntime {onnxruntime.__version__} has no provider {self.short} ({self.whole}); it has "
                f"{', '.join(map(short_name, available()))}; {install}"
            )
        if self.short != "vitisai":
            return
        for name in ("config_file", "xclbin"):
            path = self.options.get(name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"provider option {name}: there is no file {path}")
        if unknown := [name for name in self.options if name not in PROVIDER_OPTIONS]:
            near = suggest(unknown[0], PROVIDER_OPTIONS)
            warnings.warn(f"vitisai does not document the option {', '.join(unknown)}.{near}", stacklevel=3)


RUNTIME_NAMES = {RUNTIME: CPU}


def short_name(name: str) -> str:
    """Return a provider's name in lower case, without its ending.

    >>> short_name("VitisAIExecutionProvider")
    'vitisai'
    """
    return (name[: -len(_ENDING)] if name.lower().endswith(_ENDING.lower()) else name).lower()


def available() -> list[str]:
    """Return the whole names of the providers that this onnxruntime has.

    >>> "CPUExecutionProvider" in available()
    True
    """
    import onnxruntime

    return list(onnxruntime.get_available_providers())


def provider_names() -> dict[str, str]:
    """Return the whole names of all providers that onnxruntime knows, there or not, by their short ones."""
    import onnxruntime

    return {short_name(name): name for name in (*onnxruntime.get_all_providers(), *available())}


def provider_of(reading: str | Provider | Reading) -> Provider | None:
    """Return the provider that a reading's name means; None where it means none.

    >>> provider_of("onnxruntime").whole, provider_of("aie2_x1")
    ('CPUExecutionProvider', None)
    """
    if isinstance(reading, Provider):
        return reading
    if isinstance(reading, str) and (reading in RUNTIME_NAMES or short_name(reading) in provider_names()):
        return Provider(reading)
    return None


# --- Compiled models ---


def compiled(provider: Provider, identity: str) -> Path | None:
    """Return the file of the compiled model, if it is there and of this model, provider and onnxruntime.

    A file that jq compiled of something else is removed; one of another tool is used unchanged.
    """
    if provider.context is None:
        return None
    path, note = Path(provider.context), _note(provider)
    files.check_writable(path)
    if not path.exists():
        return None
    if not note.exists():
        return path
    try:
        held = files.document(note, form="JSON")
        ours = isinstance(held, dict) and held.get("kind") == _KIND
    except DataError:
        ours = False
    if not ours:
        raise DataError(f"{note} was not written by jq beside a compiled model; delete it, or give another context")
    if held == _facts(provider, identity):
        return path
    warnings.warn(f"{path} was compiled from another model, or with other options; it is compiled again", stacklevel=4)
    with files.writing(path):
        path.unlink()
        note.unlink()
    return None


def keep_note(provider: Provider, identity: str) -> None:
    """Write beside a compiled model of what it was made; warn where the provider saved none."""
    if provider.context is None:
        return
    if Path(provider.context).is_file():
        files.write(_note(provider), json.dumps(_facts(provider, identity), indent=1) + "\n")
    else:
        warnings.warn(
            f"provider {provider.short} saved no compiled model in {provider.context}: it compiled no part of the model",
            stacklevel=4,
        )


def _note(provider: Provider) -> Path:
    assert provider.context is not None
    return Path(f"{os.fspath(provider.context)}.json")


def _facts(provider: Provider, identity: str) -> dict[str, Any]:
    import onnxruntime

    made = {"provider": provider.whole, "options": provider.words, "embed": provider.embed}
    return {"kind": _KIND, "model": identity, **made, "onnxruntime": onnxruntime.__version__}
