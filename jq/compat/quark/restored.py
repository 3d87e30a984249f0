"""Calibration that is kept from run to run: `SaveAndRestore`, and `TensorsRangeFile`, its older name.

The file is JSON that lists the range of every tensor, as Quark's does. Ranges alone do not say which scale loses least, so
the statistics are kept beside it, with the equalized model that they are of: `ranges.json`, `ranges.safetensors` and
`ranges.onnx`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from jq.calibration.stats import Stats
from jq.errors import ConfigError
from jq.graph.read import load
from jq.graph.write import save
from jq.util import files

_OWNER = "jq"  # the key of what Quark's file has not


class Restored(MutableMapping[str, Any]):
    """The dict that `jq.quantize` takes as `measured`; the last statistics that it keeps there are also in files."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._known: dict[str, Any] = {}
        if self._path.exists():
            key = _key_in(self._path)
            self._known[key] = (load(self._beside(".onnx")), Stats.load(self._beside(".safetensors")))

    def _beside(self, suffix: str) -> Path:
        return self._path.with_suffix(suffix)

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def __setitem__(self, key: str, measured: Any) -> None:
        self._known[key] = measured
        graph, stats = measured if isinstance(measured, tuple) else (None, None)
        if isinstance(stats, Stats):  # plans, and what finetuning made, are made anew
            save(graph, self._beside(".onnx"))
            stats.save(self._beside(".safetensors"))
            ranges = {tensor: stats.range(tensor) for tensor in stats.tensors}
            files.write(self._path, json.dumps({"tensors_range": ranges, _OWNER: key}, indent=2))

    def __delitem__(self, key: str) -> None:
        del self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _key_in(path: Path) -> str:
    """Return what the measurements in a file depend on."""
    source = files.text(path)
    try:
        return str(files.parsed(source)[_OWNER])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} is not a calibration written by jq, which needs more than Quark's ranges; give the name of a new file"
        ) from None
