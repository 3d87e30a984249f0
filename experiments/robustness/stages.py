"""Everything that `jq` does with a file of unknown origin, by the kind of the file: each a call of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

RUN_ELEMENTS = 1 << 24  # inputs above this are not run
THEIR_BYTES = 512 << 20  # onnxruntime is not what is tried: it runs what it can within this

Stage = Callable[[Path], object]


def imported() -> None:
    """Import all that the stages need, so that a fork starts with it."""
    import jq
    import jq.compat.quark
    import jq.device.provider_report
    import jq.device.report_file
    import jq.evaluation.accuracy
    import jq.evidence.page
    import jq.ops.families
    import jq.readings.runtime
    import jq.recovery.checkpoint
    import jq.research.ablation

    assert jq.quantize and jq.infer


def blanks(values: Any, samples: int = 0) -> dict[str, np.ndarray] | None:
    """Zeros for the inputs of a graph, free dims as 1, or as many samples; None if they are too large to be run."""
    found = {}
    for value in values:
        shape = [d if isinstance(d, int) else 1 for d in value.shape or ()]
        if samples and value.shape and not isinstance(value.shape[0], int):
            shape[0] = samples
        dtype = value.dtype or np.dtype(np.float32)
        if np.prod(shape, dtype=float) > RUN_ELEMENTS:
            return None
        found[value.name] = np.full(shape, "", object) if dtype.hasobject else np.zeros(shape, dtype)
    return found


def drawn(values: Any) -> dict[str, np.ndarray] | None:
    """Random numbers in place of the zeros: normal ones, and small integers."""
    found, rng = blanks(values), np.random.default_rng(0)
    for name, array in (found or {}).items():
        if array.dtype.kind == "f":
            found[name] = rng.normal(size=array.shape).astype(array.dtype)  # type: ignore[index]
        elif array.dtype.kind in "iu":
            found[name] = rng.integers(0, 4, array.shape).astype(array.dtype)  # type: ignore[index]
    return found


def _quiet(stage: Stage) -> Stage:
    @functools.wraps(stage)
    def run(path: Path) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return stage(path)

    return run


@_quiet
def reading(path: Path) -> object:
    """Load, inspect, trace, run on zeros."""
    import jax

    import jq

    graph = jq.load(path)
    jq.inspect(graph)
    inputs = blanks(graph.inputs)
    return "too large to run" if inputs is None else bool(jax.block_until_ready(jq.trace(graph)(graph.params, inputs)))


@_quiet
def preparing(path: Path) -> object:
    """The same after all passes and the rewrites for the NPU, with lint in front."""
    import jax

    import jq

    jq.lint(path, "XINT8")
    graph = jq.prepare(jq.load(path), "XINT8")
    inputs = blanks(graph.inputs)
    return "too large to run" if inputs is None else bool(jax.block_until_ready(jq.trace(graph)(graph.params, inputs)))


@_quiet
def writing(path: Path) -> object:
    """Load, write."""
    import jq

    with tempfile.TemporaryDirectory() as folder:
        graph = jq.load(path)
        jq.save(graph, Path(folder) / "again.onnx")
        return jq.to_model(graph).ByteSize()


@_quiet
def beside(path: Path) -> object:
    """The outputs beside onnxruntime's, where both compute the model: as loaded, and after all passes."""
    import onnxruntime

    import jq

    graph = jq.load(path)
    inputs = drawn(graph.inputs)
    if inputs is None:
        return "too large to run"
    ours = [jq.trace(g)(g.params, inputs) for g in (graph, jq.prepare(graph))]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        with more_memory(THEIR_BYTES):
            session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
            theirs = session.run(None, inputs)
    except Exception as error:  # onnxruntime refuses what it refuses
        return f"not in onnxruntime: {str(error)[:60]!r}"
    for value, want in zip(session.get_outputs(), theirs, strict=True):
        for found in (made[value.name] for made in ours):
            if isinstance(want, np.ndarray) and want.dtype.kind in "fiub":
                assert alike(np.asarray(found), want), f"output {value.name!r} is unlike onnxruntime's"
    return "alike"


@contextlib.contextmanager
def more_memory(most: int) -> Iterator[None]:
    """Let the process take so many bytes more; beyond, allocations fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def alike(found: np.ndarray, want: np.ndarray) -> bool:
    """Whether two results are one, but for rounding and for a hundredth of the elements, which may lie on an edge."""
    if found.shape != want.shape:
        return False
    if not want.size:
        return True
    a, b = (np.nan_to_num(v.astype(np.float64), nan=1e30, posinf=1e30, neginf=-1e30) for v in (found, want))
    off = np.abs(a - b) > 1e-3 * max(1.0, float(np.abs(b[np.abs(b) < 1e30]).max(initial=0)))
    return float(off.mean()) <= 0.01


@_quiet
def quantizing(path: Path) -> object:
    import jq

    data = blanks(jq.load(path).inputs, 2)
    if data is None:
        return "too large to calibrate"
    return jq.quantize(path, [data], "XINT8").model.ByteSize()


@_quiet
def dynamic(path: Path) -> object:
    import jq

    data = blanks(jq.load(path).inputs, 2)
    if data is None:
        return "too large to calibrate"
    return jq.quantize(path, [data], "UINT8_DYNAMIC_QUANT").model.ByteSize()


def _converting(**options: Any) -> Stage:
    @_quiet
    def convert(path: Path) -> object:
        import jq

        return jq.convert(path, **options).ByteSize()

    return convert


@_quiet
def splitting(path: Path) -> object:
    import jq

    return len(jq.split_quantizers(jq.load(path))[1])


@_quiet
def integers(path: Path) -> object:
    import jax

    import jq

    chip = jq.integer.load(path, target="ort")
    inputs = blanks(chip.graph.inputs)
    if inputs is None:
        return "too large to run"
    jax.block_until_ready(chip(inputs))
    return len(chip.explain(inputs)[0])


@_quiet
def forecasting(path: Path) -> object:
    import jq

    return str(jq.npu.forecast(path, chip="stx"))[:100]


MODEL: dict[str, Stage] = {
    "run": reading,
    "prepare": preparing,
    "beside": beside,
    "write": writing,
    "quantize": quantizing,
    "dynamic": dynamic,
    "qdq": _converting(to="bf16", form="qdq"),
    "native": _converting(to="fp16", form="native"),
    "split": splitting,
    "integer": integers,
    "forecast": forecasting,
}


@_quiet
def _config(path: Path) -> object:
    from jq.config_file import read_config

    return bool(read_config(path))


@_quiet
def _experiment(path: Path) -> object:
    import jq

    return len(jq.research.read_experiment(path).configs)


@_quiet
def _preprocessing(path: Path) -> object:
    from jq.data.preprocessing import read_preprocessing

    return bool(read_preprocessing(path))


@_quiet
def _device(path: Path) -> object:
    from jq.device.report_file import _checksum, read_device_report

    with contextlib.suppress(LookupError, TypeError, ValueError, RecursionError):  # who changes a file may sign it, too
        document = json.loads(path.read_bytes())
        del document["checksum"]
        path.write_text(json.dumps({**document, "checksum": _checksum(document)}))
    report = read_device_report(path)
    for recorded in (*report.outputs.values(), *report.inputs.values()):
        recorded.values()
    return len(str(report))


@_quiet
def _provider(path: Path) -> object:
    from jq.device.provider_report import read_report

    return bool(read_report(path))


@_quiet
def _truth(path: Path) -> object:
    from jq.evaluation.tasks import read_truth

    return bool(read_truth(path))


@_quiet
def _coco(path: Path) -> object:
    from jq.evaluation.boxes import read_coco

    return len(read_coco(path).images)


@_quiet
def _labels(path: Path) -> object:
    from jq.evaluation.accuracy import read_labels

    return len(read_labels(path).values)


@_quiet
def _data(path: Path) -> object:
    import jq

    graph = jq.load(jq.zoo.path("fashion_resnet"))
    return jq.calibrate(graph, path, "XINT8").samples


def _picture(path: Path) -> object:
    return _data(path.parent)


@_quiet
def _stats(path: Path) -> object:
    import jq

    graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    return len(jq.make_plan(graph, jq.Stats.load(path), "XINT8"))


@_quiet
def _ledger(path: Path) -> object:
    from jq.research.ablation import COLUMNS
    from jq.research.ledger import Ledger

    return len(Ledger.open(path, COLUMNS).rows)


@_quiet
def _search(path: Path) -> object:
    import jq
    from jq.research.ledger import Ledger
    from jq.research.recorded import COLUMNS, read_row, rows_of

    rows = rows_of(Ledger.open(path, COLUMNS), "").values()
    return len([read_row(row, str(row["rung"]), jq.presets["XINT8"]) for row in rows])


def tuned_before(path: Path) -> Any:
    """The progress of a finetuning of weights alone that is in a file, if any."""
    import jq
    from jq.recovery.checkpoint import Progress

    config = jq.presets["A8W8"].replace(weights_only=True)  # whose scales need no compiled search
    graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), config)
    data = np.zeros((2, 1, 28, 28), np.float32)
    return Progress.open(path, graph, jq.make_plan(graph, None, config), graph.params, data, config)


@_quiet
def _checkpoint(path: Path) -> object:
    progress = tuned_before(path)
    return sum(len(progress.done(stage)) for stage in range(3))


TABLE: dict[str, Stage] = {"config": _config, "experiment": _experiment, "prep": _preprocessing}
DOCUMENT: dict[str, Stage] = {**TABLE, "device": _device, "provider": _provider, "truth": _truth, "coco": _coco}

BY_SUFFIX: dict[str, dict[str, Stage]] = {
    ".onnx": MODEL,
    ".toml": TABLE,
    ".json": DOCUMENT,
    ".npz": {"data": _data, "labels": _labels},
    ".npy": {"data": _data, "labels": _labels},
    ".safetensors": {"stats": _stats, "checkpoint": _checkpoint},
    ".csv": {"labels": _labels, "ledger": _ledger},
    ".jsonl": {"ledger": _ledger, "search": _search},
    ".txt": {"labels": _labels},
    **{suffix: {"data": _picture} for suffix in (".png", ".jpg", ".bmp", ".gif", ".tif", ".webp", ".ppm")},
}


def stages_of(path: Path) -> Iterator[tuple[str, Stage]]:
    """The stages of a file by name; none of a file of another kind."""
    yield from BY_SUFFIX.get(path.suffix, {}).items()
