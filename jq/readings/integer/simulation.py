"""A whole data set through a chip: the log of all of it, agreement with onnxruntime, every integer on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jq.arithmetic.formats import Integer
from jq.data.arrays import Sample
from jq.data.sources import Source, as_trained, open_source
from jq.data.stream import Batch, Stream
from jq.errors import ConfigError, DataError, ModelError
from jq.ops.integer.fixed import Grid
from jq.readings.agreement import Agreement, Compared, agreement
from jq.readings.integer.chip import Chip
from jq.readings.integer.explain import Log
from jq.readings.provider import CPU, Provider, provider_of
from jq.readings.runtime import Reading, onnxruntime_reading
from jq.util import files
from jq.util.progress import progress_bar

_BATCH = 8
_MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """The results of a chip on a data set."""

    log: Log
    agreements: tuple[Agreement, ...]
    without: str | None  # why onnxruntime was not asked
    reading: str = CPU  # onnxruntime's provider that the chip is compared with

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        compared = [dataclasses.asdict(a) for a in self.agreements]
        document = self.log.to_dict() | {"onnxruntime": compared, "onnxruntime_absent": self.without}
        return document | {"onnxruntime_provider": self.reading}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict`, atomically."""
        files.write(path, json.dumps(self.to_dict(), indent=2) + "\n")


def simulate(
    chip: Chip,
    data: Any,
    *,
    limit: int | None = None,
    dump: str | os.PathLike[str] | None = None,
    seed: int = 0,
    reading: str | Provider | Reading = "onnxruntime",
) -> Simulation:
    """Return the chip's results on the data, or on their first `limit` samples.

    `data` is what `jq.calibrate` takes. With `dump`, a new folder gets the integers of every tensor, one .npy each with
    the samples in front, and a manifest of their names, scales and zero points: to compare with a board's. `reading` is a
    provider of onnxruntime, the CPU's or a device's ("vitisai", or a `Provider` with options), with whose outputs the
    chip's are compared.

    >>> import jq
    >>> images, _ = jq.zoo.calibration_set()
    >>> model = jq.quantize(jq.zoo.path("fashion_resnet"), images[:16], "XINT8").model
    >>> results = simulate(jq.integer.load(model, "aie2_even"), images[:8])
    >>> results.log.unexplained, results.agreements[0].top1
    (0, 1.0)
    """
    source = open_source(as_trained(data, chip.graph.metadata), chip.graph.inputs, seed=seed).limited(limit)
    runner, logs, compared = _OnnxRuntime(chip, reading), list[Log](), list[list[Compared]]()
    with progress_bar("simulate", source.length) as advance, _Dump.to(dump, chip) as dumped:
        alone = dump is not None or runner.name != CPU  # devices take batches of one size
        for batch in Stream.of(source, 1 if alone else _size(chip, source)).batches():
            sample = _joined(batch)
            outputs, log = chip.explain(sample)
            dumped.append(log, batch.count)
            logs.append(dataclasses.replace(log, codes={}))
            wanted = runner.run(sample)
            if wanted is not None:
                compared.append([Compared.of(np.asarray(outputs[k]), v) for k, v in wanted.items()])
            advance(batch.count)
    names = [v.name for v in chip.graph.outputs] if runner.absent is None else []
    agreements = tuple(agreement(n, [c[i] for c in compared]) for i, n in enumerate(names))
    return Simulation(functools.reduce(operator.add, logs), agreements, runner.absent, runner.name)


class _OnnxRuntime:
    """onnxruntime on the model, as long as it runs it: vendors' operators it does not, and some faults show late."""

    def __init__(self, chip: Chip, reading: str | Provider | Reading) -> None:
        self.absent: str | None = None
        provider = None if callable(reading) else provider_of(reading)
        if provider is None and not callable(reading):
            raise ConfigError(
                f"simulate compares with a provider of onnxruntime, such as cpu or vitisai; got {reading!r}"
            )
        self.name = provider.short if provider else str(getattr(reading, "name", "own"))
        try:
            self.session = reading if callable(reading) else onnxruntime_reading(chip.graph, provider)
        except ModelError as error:
            self.absent = str(error)

    def run(self, sample: Sample) -> dict[str, np.ndarray] | None:
        if self.absent is None:
            try:
                return self.session(sample)
            except ModelError as error:
                self.absent = str(error)
        return None


def _size(chip: Chip, source: Source) -> int:
    """The number of samples that the chip takes at once: several, if the model takes any number and none is left over."""
    length = source.length if chip.any_batch and source.length else 1
    return max(d for d in range(1, _BATCH + 1) if length % d == 0)


def _joined(batch: Batch) -> Sample:
    """The samples of a batch as one, along their own leading axes."""
    if batch.count == 1:
        return {k: v[0] for k, v in batch.inputs.items()}
    return {k: v[: batch.count].reshape(-1, *v.shape[2:]) for k, v in batch.inputs.items()}


# --- Every integer on disk ---


class _Dump:
    """A folder that gets its name when all is in it. Names in a model are no file names: files have numbers."""

    def __init__(self, folder: Path | None, chip: Chip) -> None:
        self.folder, self.chip = folder, chip
        self.files: dict[str, Path] = {}
        self.grids: dict[str, Grid] = {}
        self.shapes: dict[str, list[int]] = {}

    @classmethod
    @contextlib.contextmanager
    def to(cls, folder: str | os.PathLike[str] | None, chip: Chip) -> Iterator[_Dump]:
        if folder is None:
            yield cls(None, chip)
            return
        with files.new_folder(folder, _is_dump, "exists and is not an earlier dump") as draft:
            dump = cls(draft, chip)
            yield dump
            with files.writing(draft):
                dump.finish(draft)

    def append(self, log: Log, count: int) -> None:
        """Write the integers of `count` samples after those before, as raw bytes until the total is known."""
        if self.folder is None:
            return
        self.grids |= log.grids
        for index, (name, array) in enumerate(log.codes.items()):
            array = array if array.ndim and len(array) == count else array[None]  # no batch leads it
            if name not in self.files:
                self.files[name] = self.folder / f"{index:04}_{files.safe_name(name)}.npy"
                self.shapes[name] = [0, *array.shape[1:]]
            if list(array.shape[1:]) != self.shapes[name][1:]:
                raise DataError(f"tensor {name!r} has another shape in another sample; dump samples of one shape")
            self.shapes[name][0] += len(array)
            kind = _stored(self.grids[name].grid)
            with files.writing(self.folder), self.files[name].open("ab") as file:
                file.write(np.ascontiguousarray(array.astype(kind)).tobytes())

    def finish(self, folder: Path) -> None:
        """Write headers in front of the bytes, and the manifest."""
        rows = []
        for name, path in self.files.items():
            grid = self.grids[name]
            raw = np.memmap(path, _stored(grid.grid), "r", shape=tuple(self.shapes[name]))
            np.save(path.with_suffix(".tmp.npy"), raw)
            os.replace(path.with_suffix(".tmp.npy"), path)
            row = {"tensor": name, "file": path.name, "dtype": grid.grid.name, "shape": self.shapes[name]}
            rows.append(row | {"scale": float(grid.scale), "zero_point": grid.zero_point})
        manifest = {"target": self.chip.target.name, "tensors": rows}
        files.write(folder / _MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _is_dump(folder: Path) -> bool:
    """Whether nothing is in a folder but what a manifest of ours lists."""
    try:
        listed = {row["file"] for row in files.document(folder / _MANIFEST)["tensors"]}
    except (DataError, KeyError, TypeError):
        return False
    return {path.name for path in folder.iterdir()} <= listed | {_MANIFEST}


def _stored(codes: Integer) -> np.dtype:
    """numpy has no type of four bits that others can read."""
    return np.dtype(f"{'' if codes.signed else 'u'}int{max(8, codes.bits)}")
