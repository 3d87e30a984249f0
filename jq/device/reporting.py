"""The device report: a model on a device, in one file that is sent to those who have none."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import itertools
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jq.data.arrays import Sample
from jq.data.sources import as_trained, open_source
from jq.device.forecasting import forecast
from jq.device.provider_report import REPORT_FILE, REPORT_VARIABLE, compare_with_report, read_report
from jq.device.report_file import KIND, VERSION, DeviceReport, Recorded
from jq.errors import ConfigError, Error
from jq.evaluation.accuracy import Labels, classify, read_labels, stacked_scores
from jq.graph import Graph
from jq.graph.quantizers import is_dequantize, is_quantized
from jq.graph.read import ModelLike, load
from jq.readings.agreement import agreements
from jq.readings.named import open_reading
from jq.readings.provider import CPU, RUNTIME, Provider, available, provider_of, short_name
from jq.readings.runtime import RuntimeReading, onnxruntime_reading
from jq.readings.timing import benchmark as timed
from jq.util.digest import digest
from jq.version import __version__

READ_AS = ("aie2_x1", "aie2_even", "ort")  # the integers that the device's are compared with
_DEVICE = "vitisai"
_LIBRARIES = ("onnxruntime", "onnx", "numpy", "jax")
_ROOM = 8 << 20  # bytes of outputs in a file
_COLOURS, _SIDE = 4, 16  # a picture has at most these channels, and at least such a side


def device_report(
    model: ModelLike,
    data: Any = None,
    *,
    reading: str | Provider | None = None,
    chip: str = "stx",
    backend: str | None = None,
    report: str | os.PathLike[str] | None = None,
    labels: str | os.PathLike[str] | Sequence[int] | np.ndarray | None = None,
    output: str | None = None,
    limit: int | None = 32,
    with_inputs: bool = False,
    benchmark: bool = True,
    seed: int = 0,
) -> DeviceReport:
    """Return what a device makes of a model: who ran which nodes, its outputs, and how far they agree with ours.

    `reading` is the device's provider ("vitisai", or a `Provider` with options); None takes vitisai where this
    onnxruntime has it, and else the CPU, with a warning. Where nodes ran is read from the provider's own report: the one
    given, or the one that vitisai is made to write; and else forecast. The outputs are compared with those of the integer
    readings `aie2_x1`, `aie2_even` and `ort` of `jq.integer`, and with onnxruntime's on the CPU. With `labels` of a
    classifier (a file as `jq.evaluate.read_labels` takes it, or classes in order), each has its accuracy.

    The file holds the codes of all outputs, as far as 8 MB go, and hashes and histograms of others. It holds no samples,
    and no outputs that are pictures, except `with_inputs`; no paths, and no names of the machine or of the samples.

    >>> import jq
    >>> images, labels = jq.zoo.evaluation_set()
    >>> model = jq.quantize(jq.zoo.path("fashion_resnet"), images[:16], "XINT8").model
    >>> made = device_report(model, images[:4], reading="cpu", labels=labels[:4], benchmark=False)
    >>> made.outputs["logits"].array().shape, made.document["placement"]["source"]
    ((4, 1, 10), 'forecast')
    """
    graph = model if isinstance(model, Graph) else load(model)
    source = open_source(as_trained(data, graph.metadata), graph.inputs, seed=seed).limited(limit)
    samples = list(source.samples())
    right = None if labels is None else _labels(labels, limit)
    with warnings.catch_warnings(record=True) as caught, _own_report(_asked(reading)) as (provider, written):
        warnings.simplefilter("always")
        run = onnxruntime_reading(model, provider)
        told = report if report is not None else written()
        placement = _placement(graph, chip, backend, told)
    for warning in caught:
        warnings.warn(str(warning.message), stacklevel=2)
    outputs = [{k: np.asarray(v) for k, v in run(sample).items()} for sample in samples]
    grids = {v.name: _grid(graph, v.name) for v in graph.outputs}
    agreed, others = _agreement(graph, run, samples, outputs, grids)
    document = {
        "kind": KIND,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"jq": __version__, "python": platform.python_version(), **_versions()},
        "machine": {"os": platform.platform(), "processor": f"{platform.machine()} {platform.processor()}".strip()},
        "providers": [short_name(name) for name in available()],
        "model": {
            "name": Path(model).name if isinstance(model, (str, os.PathLike)) else graph.name,
            "sha256": digest(graph),
            "nodes": len(graph.nodes),
            "quantized": any(is_quantized(n) for n in graph.walk()),
        },
        "run": {
            "provider": run.name,
            "options": {k: _without_folder(v) for k, v in run.provider.words.items()},
            "session": list(run.providers),
            "taken": None if run.taken is None else dict(run.taken),
            "warnings": [str(w.message) for w in caught],
        },
        "samples": len(samples),
        "data": "random" if data is None else "given",
        "placement": placement,
        "agreement": agreed,
        "accuracy": None
        if right is None
        else _accuracy({run.name: outputs, **others}, graph, output, right, source.names),
        "timing": timed(model, samples, run).to_dict() if benchmark else None,
    }
    room = itertools.accumulate((sum(o[v.name].nbytes for o in outputs) for v in graph.outputs), initial=0)
    recorded = {}
    for (name, grid), before in zip(grids.items(), list(room)[1:], strict=True):
        arrays = [o[name] for o in outputs]
        whole = with_inputs or (before <= _ROOM and not _is_picture(arrays[0]))
        recorded[name] = Recorded.of(name, *_codes(arrays, grid), whole=whole)
    fed = {
        v.name: Recorded.of(v.name, [np.asarray(s[v.name]) for s in samples], whole=with_inputs) for v in graph.inputs
    }
    if not with_inputs:  # nor how their values are spread
        fed = {k: Recorded(r.name, r.dtype, r.shape, None, None, r.sha256, None, None) for k, r in fed.items()}
    return DeviceReport(document, recorded, fed)


def _asked(reading: str | Provider | None) -> Provider:
    if reading is None:
        there = _DEVICE in map(short_name, available())
        if not there:
            warnings.warn(f"this onnxruntime has no {_DEVICE}, so the model runs on the CPU", stacklevel=3)
        return Provider(_DEVICE if there else CPU)
    provider = provider_of(reading)
    if provider is None:
        raise ConfigError(f"device-report needs a provider of onnxruntime, such as vitisai or cpu; got {reading!r}")
    return provider


@contextlib.contextmanager
def _own_report(provider: Provider) -> Iterator[tuple[Provider, Callable[[], Path | None]]]:
    """Make vitisai write its report; yield the provider with the options for it, and what finds the file."""
    if provider.short != _DEVICE:
        yield provider, lambda: None
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        own = {"enable_cache_file_io_in_mem": 0, "cache_dir": folder, "cache_key": "jq"}
        options = {**own, **provider.options}
        before = os.environ.get(REPORT_VARIABLE)
        os.environ[REPORT_VARIABLE] = REPORT_FILE
        cache = Path(str(options["cache_dir"])) / str(options["cache_key"])
        try:
            asked = Provider(provider.name, options, provider.context, provider.embed)
            yield asked, lambda: next(iter(sorted(cache.rglob(REPORT_FILE))), None)
        finally:
            if before is None:
                del os.environ[REPORT_VARIABLE]
            else:
                os.environ[REPORT_VARIABLE] = before


def _placement(graph: Graph, chip: str, backend: str | None, told: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Where the nodes ran by the provider's report, beside the forecast; without a report, the forecast alone."""
    try:
        expected = forecast(graph, chip, backend)
    except ConfigError:
        raise
    except Error as error:
        return {
            "source": "forecast", "chip": chip, "counts": None, "subgraphs": None, "subgraphs_run": None, "nodes": {},
            "lines": [], "absent": str(error),
        }  # fmt: skip
    if told is None:
        places = {name: p.place for name, p in expected.nodes.items()}
        return {
            "source": "forecast", "chip": chip, "counts": dict(expected.counts), "subgraphs": expected.subgraphs,
            "subgraphs_run": expected.subgraphs_run, "nodes": places, "lines": [], "absent": None,
        }  # fmt: skip
    fact = read_report(told)
    compared = compare_with_report(expected, fact)
    return {
        "source": "provider", "chip": chip, "counts": dict(fact.counts), "subgraphs": fact.subgraphs,
        "subgraphs_run": fact.running, "nodes": dict(fact.nodes), "lines": list(compared.lines()), "absent": None,
    }  # fmt: skip


# --- Outputs ---


def _grid(graph: Graph, output: str) -> tuple[float, int, np.dtype] | None:
    """The scale, zero point and type of the codes behind an output; None for an output computed in float."""
    node = graph.producer.get(output)
    if node is None or not is_dequantize(node) or len(node.inputs) < 3:
        return None
    scale, zero = (graph.arrays.get(name) for name in node.inputs[1:3])
    if scale is None or zero is None or scale.size != 1 or zero.size != 1 or np.dtype(zero.dtype).kind not in "iu":
        return None
    return float(scale.reshape(())), int(zero.reshape(())), np.dtype(zero.dtype)


def _codes(
    arrays: Sequence[np.ndarray], grid: tuple[float, int, np.dtype] | None
) -> tuple[list[np.ndarray], float | None, int | None]:
    """The codes of an output with their scale and zero point; its values where they are not all codes of that grid."""
    if grid is None:
        return list(arrays), None, None
    scale, zero, dtype = grid
    made = []
    for array in arrays:
        with np.errstate(all="ignore"):
            codes = (np.rint(array.astype(np.float64) / scale) + zero).astype(np.float64)
        ends = np.iinfo(dtype)
        inside = (
            np.isfinite(codes).all() and codes.min(initial=zero) >= ends.min and codes.max(initial=zero) <= ends.max
        )
        if not inside or not np.array_equal(((codes - zero) * scale).astype(array.dtype), array):
            return list(arrays), None, None
        made.append(codes.astype(dtype))
    return made, scale, zero


def _is_picture(array: np.ndarray) -> bool:
    """Whether a sample's output may be an image, in whatever order of its axes."""
    shape = [d for d in array.shape if d != 1]
    sides = [d for d in shape if d >= _SIDE]
    return len(array.shape) >= 3 and len(sides) == 2 and all(d in sides or d <= _COLOURS for d in shape)


def _agreement(
    graph: Graph,
    run: RuntimeReading,
    samples: Sequence[Sample],
    outputs: Sequence[Mapping[str, np.ndarray]],
    grids: Mapping[str, tuple[float, int, np.dtype] | None],
) -> tuple[dict[str, Any], dict[str, list[dict[str, np.ndarray]]]]:
    """The device beside each of our readings, and these readings' outputs, of those that read the model."""
    agreed: dict[str, Any] = {}
    others: dict[str, list[dict[str, np.ndarray]]] = {}
    for name in (*READ_AS, *([] if run.name == CPU else [RUNTIME])):
        try:
            other = open_reading(graph, name)
            mine = [{k: np.asarray(v) for k, v in other(sample).items()} for sample in samples]
        except Error as error:
            agreed[name] = {"outputs": [], "absent": str(error)}
            continue
        others[name] = mine
        rows = []
        for a in agreements(outputs, mine):
            grid = grids[a.output]
            steps = None if grid is None or a.largest is None else a.largest / grid[0]
            rows.append({"output": a.output, "equal": a.equal, "largest": a.largest, "steps": steps, "top1": a.top1})
        agreed[name] = {"outputs": rows, "absent": None}
    return agreed, others


# --- Facts ---


def _labels(labels: str | os.PathLike[str] | Sequence[int] | np.ndarray, limit: int | None) -> Labels:
    if isinstance(labels, (str, os.PathLike)):
        right = read_labels(labels)
        return right if right.names is not None else Labels(right.values[:limit])
    return Labels(np.asarray(labels, np.int64)[:limit])


def _accuracy(
    results: Mapping[str, Sequence[Mapping[str, np.ndarray]]],
    graph: Graph,
    output: str | None,
    right: Labels,
    names: tuple[str, ...] | None,
) -> dict[str, Any]:
    outputs = [v.name for v in graph.outputs]
    chosen = outputs[0] if output is None and len(outputs) == 1 else output
    if chosen not in outputs:
        raise ConfigError(
            f"labels need the output with the scores of the classes, one of {', '.join(outputs)}; got {output!r}"
        )
    accuracies = {}
    for name, made in results.items():
        called = names or tuple(f"{i:08}" for i in range(len(made)))
        scores = stacked_scores(zip(called, (o[chosen] for o in made), strict=False), f"output {chosen!r}")
        if names is None:
            scores = type(scores)(scores.values)
        a = classify({name: scores}, right).models[name]
        accuracies[name] = {"top1": a.top1, "top1_error": a.top1_error, "top5": a.top5, "samples": a.samples}
    return accuracies


def _versions() -> dict[str, str]:
    known = {}
    for name in _LIBRARIES:
        try:
            known[name] = str(importlib.import_module(name).__version__)
        except ImportError:
            known[name] = "none"
    ryzen = os.environ.get("RYZEN_AI_INSTALLATION_PATH", "").rstrip("/\\")
    return known | ({"ryzen-ai": _without_folder(ryzen)} if ryzen else {})


def _without_folder(text: str) -> str:
    """The last part of what may be a path: folders name users."""
    return text.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
