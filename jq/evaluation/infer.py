"""Inference on data, with the outputs in a folder that `jq.evaluate` compares."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jq.data.sources import Source, as_trained, open_source
from jq.errors import DataError, ModelError
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.readings.named import AnyReading, open_reading, reading_name
from jq.util import files
from jq.util.progress import progress_bar

MANIFEST = "manifest.json"


def infer(
    model: ModelLike,
    data: Any,
    folder: str | os.PathLike[str],
    *,
    reading: AnyReading = "onnxruntime",
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Write the outputs of a model, float or quantized, on each sample of the data to a new folder; return its manifest.

    The model is run by onnxruntime on the CPU or with another of its providers (`reading="vitisai"`, or a `jq.Provider`
    with options), by jq in float32 ("jq"), or in integers as a target of `jq.integer` computes it ("aie2_x1", ...).
    `data` is what `jq.calibrate` takes. Each sample becomes an .npy file with the model's
    output, including its batch axis; a model with a fixed batch gives one file for each batch. Files are called like
    those of the data, or else by number. With several outputs, each has a folder of its own, named like it as far as
    file names allow; `manifest.json` says which. The folder appears when all is in it.

    >>> import tempfile, jq
    >>> images, _ = jq.zoo.evaluation_set()
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     found = jq.infer(jq.zoo.path("fashion_resnet"), images[:3], f"{parent}/float")
    ...     sorted(os.listdir(f"{parent}/float"))
    ['00000000.npy', '00000001.npy', '00000002.npy', 'manifest.json']
    >>> found["samples"], found["outputs"]
    (3, [{'name': 'logits', 'folder': '.', 'dtype': 'float32'}])
    """
    graph = model if isinstance(model, Graph) else load(model)
    folders, kinds = _folders(graph), dict[str, np.dtype]()
    count, source = 0, open_source(as_trained(data, graph.metadata), graph.inputs, seed=seed)
    with files.new_folder(folder, lambda old: False, "exists and is not empty") as draft:
        for name, outputs in samples(graph, source, reading=reading, limit=limit, original=model):
            for output, array in outputs.items():
                path = draft / folders[output] / f"{name}.npy"
                with files.writing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    np.save(path, array, allow_pickle=False)
                kinds[output] = array.dtype
            count += 1
        manifest = {
            "model": Path(model).name if isinstance(model, (str, os.PathLike)) else graph.name,
            "reading": reading_name(reading),
            "samples": count,
            "outputs": [{"name": k, "folder": v, "dtype": str(kinds[k])} for k, v in folders.items()],
        }
        files.write(draft / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def samples(
    graph: Graph,
    source: Source,
    *,
    reading: AnyReading = "onnxruntime",
    limit: int | None = None,
    original: ModelLike | None = None,
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield a name and the outputs for each sample of the source, as the model gives them.

    `original` is what the graph was loaded from: onnxruntime reads a large model from its file.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> source = open_source(jq.zoo.evaluation_set()[0][:2], graph.inputs)
    >>> [(name, outputs["logits"].shape) for name, outputs in samples(graph, source)]
    [('00000000', (1, 10)), ('00000001', (1, 10))]
    """
    source, run = source.limited(limit), open_reading(graph, reading, original=original)
    # Files that differ in their ending only have one name.
    named = source.names if source.names and len(set(source.names)) == len(source.names) else None
    with progress_bar("infer", source.length) as advance:
        for i, sample in enumerate(source.samples()):
            yield named[i] if named else f"{i:08}", {k: _storable(k, v) for k, v in run(sample).items()}
            advance(1)


def _folders(graph: Graph) -> dict[str, str]:
    """Return a folder name for each output; names come from the model, so they may be no paths or differ only in case."""
    names = [value.name for value in graph.outputs]
    if len(names) == 1:
        return {names[0]: "."}
    folders: dict[str, str] = {}
    taken = {MANIFEST}
    for name in names:
        wanted = files.safe_name(name) or "output"
        tries = itertools.chain([wanted], (f"{wanted}_{i}" for i in itertools.count(2)))
        folders[name] = next(t for t in tries if t.lower() not in taken)
        taken.add(folders[name].lower())
    return folders


def _storable(name: str, output: Any) -> np.ndarray:
    """Return an output as an array that .npy can store."""
    if isinstance(output, (list, dict)):
        raise ModelError(
            f"output {name!r} is a {type(output).__name__}, not a tensor; it cannot be written as an array"
        )
    array = np.asarray(output)
    if array.dtype.kind in "biuf":
        return array
    if np.can_cast(array.dtype, np.float32):  # bfloat16 and smaller, of which numpy knows no name
        return array.astype(np.float32)
    raise DataError(f"output {name!r} holds {array.dtype}; expected numbers")
