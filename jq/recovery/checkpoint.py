"""Tuned units on disk, from which a stopped run resumes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jq.config import QuantConfig
from jq.data.sources import fingerprint, open_source
from jq.errors import DataError
from jq.graph import Graph
from jq.plan import Plan, QParams
from jq.util import files
from jq.util.digest import digest

Change = tuple[dict[str, Any], dict[str, QParams]]  # arrays, and how activations are quantized


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """The changes of each unit by stage, in a file; without a path nothing is kept."""

    plan: Plan
    path: Path | None = None
    identity: str = ""
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # "stage/unit/tensor/array or scale"
    complete: bool = True  # whether there was time for all units

    @classmethod
    def open(
        cls, path: str | os.PathLike[str] | None, graph: Graph, plan: Plan, params: Mapping[str, Any], data: Any,
        config: QuantConfig, roundings: Any = None,
    ) -> Progress:  # fmt: skip
        """The progress that an earlier run of the same left, if any; `roundings` are the user's own."""
        if path is None:
            return cls(plan)
        source = fingerprint(open_source(data, graph.inputs, seed=config.seed))
        made = cls(plan, Path(path), digest(config.to_dict(), graph, params, plan, source, roundings or {}))
        if not made.path.exists():  # type: ignore[union-attr]
            return made
        try:
            with files.reading(path), safetensors.safe_open(str(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a mapping
        except safetensors.SafetensorError as error:
            raise DataError(f"{path} is not a checkpoint of finetuning: {error}") from error
        if metadata.get("identity") != made.identity:
            raise DataError(
                f"{path} belongs to another model, data, config or rounding; remove it, or choose another checkpoint"
            )
        if metadata.get("content") != digest(arrays):
            raise DataError(
                f"{path} was changed after it was written, or is damaged; remove it, or choose another checkpoint"
            )
        made.arrays.update(arrays)
        return made

    def done(self, stage: int) -> dict[int, Change]:
        """The changes of the units of a stage that are done."""
        changes: dict[int, Change] = {}
        for key, array in self.arrays.items():
            where, unit, kind, tensor = key.split("/", 3)
            if int(where) == stage:
                arrays, scales = changes.setdefault(int(unit), ({}, {}))
                if kind == "array":
                    arrays[tensor] = array
                elif kind == "scale":
                    scales[tensor] = dataclasses.replace(self.plan[tensor], scale=array[()])
        return changes

    def keep(self, stage: int, unit: int, arrays: Mapping[str, Any], scales: Mapping[str, QParams]) -> None:
        """Add what a unit's tuning changed."""
        if self.path is None:
            return
        changed = {f"array/{k}": a for k, a in arrays.items()} | {f"scale/{k}": q.scale for k, q in scales.items()}
        for key, array in (changed or {"none/": np.zeros(1)}).items():
            self.arrays[f"{stage}/{unit}/{key}"] = np.ascontiguousarray(array)
        metadata = {"identity": self.identity, "content": digest(self.arrays)}
        files.write(self.path, safetensors.numpy.save(self.arrays, metadata))

    def forget(self) -> None:
        """Remove the file: the run has ended."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
