"""The file that a user with a device sends: what ran where, the codes of the outputs, agreement and time.

It is JSON with a checksum, and holds no path, no name of the machine and, unless asked for, no sample.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jq.errors import DataError
from jq.util import files

KIND = "jq device report"
VERSION = 1
_HOW = "ask for the file that `jq-quant device-report MODEL --data D -o report.json` writes, as an attachment"
_DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
_BINS = 64
_LARGEST = 1 << 31  # elements of an array in a file
_MOST_DIMS = 32


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A tensor on all samples: its codes or values where the file has them, and else their hashes and a histogram."""

    name: str
    dtype: str  # of the codes, where the tensor has a scale, and else of the values
    shape: tuple[int, ...] | None  # of all samples, stacked; None where samples differ in it
    scale: float | None
    zero_point: int | None
    sha256: tuple[str, ...]  # of each sample's bytes, lowest first
    histogram: Mapping[str, Any] | None
    data: str | None  # base64 of zlib of the bytes

    @classmethod
    def of(
        cls,
        name: str,
        arrays: Sequence[np.ndarray],
        scale: float | None = None,
        zero_point: int | None = None,
        *,
        whole: bool = True,
    ) -> Recorded:
        """The record of a tensor; with `whole`, its contents too.

        >>> Recorded.of("y", [np.int8([1, 2]), np.int8([3, 4])], 0.5, 0).array()
        array([[1, 2],
               [3, 4]], dtype=int8)
        """
        arrays = [np.ascontiguousarray(a, a.dtype.newbyteorder("<")) for a in arrays]
        alike = len({(a.shape, a.dtype) for a in arrays}) == 1
        stacked = np.stack(arrays) if alike else None
        kept = stacked is not None and whole and str(stacked.dtype) in _DTYPES
        data = base64.b64encode(zlib.compress(stacked.tobytes(), 9)).decode() if kept and stacked is not None else None
        return cls(
            name,
            str(arrays[0].dtype),
            None if stacked is None else stacked.shape,
            scale,
            zero_point,
            tuple(hashlib.sha256(a.tobytes()).hexdigest() for a in arrays),
            None if kept else _histogram(np.concatenate([a.reshape(-1) for a in arrays])),
            data,
        )

    def array(self) -> np.ndarray | None:
        """The codes, or the values of what has no scale, of all samples; None where the file has hashes alone."""
        if self.data is None or self.shape is None:
            return None
        wanted = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        try:
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(base64.b64decode(self.data, validate=True), wanted + 1)
        except (binascii.Error, zlib.error, ValueError) as error:
            raise DataError(f"tensor {self.name!r} is damaged: {error}; {_HOW}") from None
        if len(content) != wanted:
            size = f"{wanted:,} bytes for its shape {list(self.shape)} of {self.dtype}; got {len(content):,}"
            raise DataError(f"tensor {self.name!r} needs {size}; {_HOW}")
        array = np.frombuffer(content, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)
        if tuple(hashlib.sha256(a.tobytes()).hexdigest() for a in array) != self.sha256:
            raise DataError(f"tensor {self.name!r} does not match its hashes in the file; {_HOW}")
        return array.astype(self.dtype)

    def values(self) -> np.ndarray | None:
        """The values of all samples, as the device gave them."""
        array = self.array()
        if array is None or self.scale is None:
            return array
        return ((array.astype(np.int64) - (self.zero_point or 0)) * np.float64(self.scale)).astype(np.float32)


def _histogram(array: np.ndarray) -> dict[str, Any]:
    """The counts of values: one bin for each code of 8 bits, 64 equal ones for others."""
    finite = array[np.isfinite(array)].astype(np.float64)
    if not finite.size:
        return {"low": None, "high": None, "counts": [], "not_finite": int(array.size)}
    low, high = float(finite.min()), float(finite.max())
    each = array.dtype.kind in "biu" and high - low < 256
    edges = np.arange(low - 0.5, high + 1) if each else _BINS
    counts = np.histogram(finite, edges)[0] if each or high > low else np.array([finite.size])
    return {"low": low, "high": high, "counts": counts.tolist(), "not_finite": int(array.size - finite.size)}


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceReport:
    """The results of a device on a model: `document` is the file's content, without the tensors."""

    document: Mapping[str, Any]
    outputs: Mapping[str, Recorded]
    inputs: Mapping[str, Recorded]  # hashes alone, unless they were asked for

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON holds it, with its checksum."""
        tensors = {k: [dataclasses.asdict(r) for r in getattr(self, k).values()] for k in ("outputs", "inputs")}
        whole = json.loads(json.dumps({**self.document, **tensors}))
        return {**whole, "checksum": _checksum(whole)}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the file, atomically."""
        files.write(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def __str__(self) -> str:
        """The report as text."""
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The lines of the text."""
        d = self.document
        run, placement = d["run"], d["placement"]
        yield f"{d['model']['name']}, {d['model']['nodes']} nodes, on {d['samples']} samples of {d['data']} data, {d['created']}"
        yield ", ".join(f"{name} {version}" for name, version in d["versions"].items())
        yield f"{d['machine']['os']}, {d['machine']['processor']}; onnxruntime has {', '.join(d['providers'])}"
        taken = "" if run["taken"] is None else ": " + ", ".join(f"{p} {n} nodes" for p, n in run["taken"].items())
        options = "".join(f" {k}={v}" for k, v in run["options"].items())
        yield f"run by {run['provider']}{options}; the session has {', '.join(run['session'])}{taken}"
        yield from (f"warning: {text}" for text in run["warnings"])
        if placement["counts"] is None:
            yield f"no placement: {placement['absent']}"
        else:
            counts = "  ".join(f"{place} {count}" for place, count in placement["counts"].items())
            yield f"placement by the {placement['source']}: {counts}; subgraphs {placement['subgraphs']}"
            yield from (f"  {line}" for line in placement["lines"])
        for r in self.outputs.values():
            kind = f"codes of {r.dtype}, scale {r.scale:g}" if r.scale is not None else f"values of {r.dtype}"
            yield f"output {r.name} {_dims(r.shape)}: {kind if r.data is not None else 'hashes and a histogram'}"
        for reading, result in d["agreement"].items():
            for a in result["outputs"]:
                parts = [f"{a['equal']:.2%} equal", f"largest difference {_number(a['largest'])}"]
                parts += [] if a["steps"] is None else [f"{a['steps']:g} steps"]
                parts += [] if a["top1"] is None else [f"same class for {a['top1']:.2%}"]
                yield f"{a['output']} against {reading}: {', '.join(parts)}"
            if result["absent"] is not None:
                yield f"not compared with {reading}: {result['absent']}"
        for reading, a in (d["accuracy"] or {}).items():
            yield f"accuracy by {reading}: top-1 {a['top1']:.2%} +- {a['top1_error']:.2%}, {a['samples']} samples"
        if d["timing"] is not None:
            t = d["timing"]
            yield (
                f"latency: mean {t['mean_ms']:.3f} ms, p50 {t['p50_ms']:.3f}, p90 {t['p90_ms']:.3f}, p99 {t['p99_ms']:.3f} in "
                f"{t['runs']} runs; {t['throughput']:,.1f}/s; first run {t['first_ms']:.3f} ms"
            )
        if any(r.data is not None for r in self.inputs.values()):
            yield "the samples themselves are in the file"


def _dims(shape: tuple[int, ...] | None) -> str:
    return "of several shapes" if shape is None else f"[{','.join(map(str, shape))}]"


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.5g}"


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- Reading files of unknown origin ---

_TEXT, _COUNT = (str, None), (int, None)
_RECORDED = {
    "name": str, "dtype": str, "shape": ([int], None), "scale": (float, None), "zero_point": _COUNT, "sha256": [str],
    "histogram": (dict, None), "data": _TEXT,
}  # fmt: skip
_AGREEMENT = {"output": str, "equal": float, "largest": (float, None), "steps": (float, None), "top1": (float, None)}
_TIMING = dict.fromkeys(("mean_ms", "p50_ms", "p90_ms", "p99_ms", "first_ms", "throughput"), float) | {"runs": int}
_PLACEMENT = {
    "source": str, "chip": str, "counts": ({str: int}, None), "subgraphs": _COUNT, "subgraphs_run": _COUNT,
    "nodes": {str: str}, "lines": [str], "absent": _TEXT,
}  # fmt: skip
_RUN = {"provider": str, "options": {str: str}, "session": [str], "taken": ({str: int}, None), "warnings": [str]}
_SCHEMA = {
    "created": str, "versions": {str: str}, "machine": {"os": str, "processor": str}, "providers": [str],
    "model": {"name": str, "sha256": str, "nodes": int, "quantized": bool}, "run": _RUN, "samples": int, "data": str,
    "placement": _PLACEMENT, "agreement": {str: {"outputs": [_AGREEMENT], "absent": _TEXT}},
    "accuracy": ({str: {"top1": float, "top1_error": float, "samples": int}}, None), "timing": (_TIMING, None),
    "outputs": [_RECORDED], "inputs": [_RECORDED],
}  # fmt: skip


def read_device_report(path: str | os.PathLike[str]) -> DeviceReport:
    """Return the report in a file; a DataError where it is none, was cut off or was changed."""
    try:
        document = files.document(path, form="JSON")
    except DataError as error:
        raise DataError(f"{error}; {_HOW}") from None
    if isinstance(document, dict) and "deviceStat" in document:
        raise DataError(
            f"{path} is the provider's own report, which `jq-quant npu MODEL --report {path}` reads; {_HOW}"
        )
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise DataError(f"{path} is not a device report: expected an object with the kind {KIND!r}; {_HOW}")
    if document.get("version") != VERSION:
        raise DataError(
            f"{path} has version {document.get('version')!r}, and this jq reads {VERSION}; use the version of jq that wrote it"
        )
    checksum = document.pop("checksum", None)
    _check(f"{path}", document, _SCHEMA)
    if checksum != _checksum(document):
        raise DataError(f"{path} was changed after it was written: its checksum does not match; {_HOW}")
    tensors = {k: {r["name"]: _recorded(path, r) for r in document.pop(k)} for k in ("outputs", "inputs")}
    return DeviceReport(document, **tensors)


def _check(where: str, value: Any, wanted: Any) -> None:
    """Raise a DataError where a value does not have the form: a type, [of each], {of each key}, or (one of these)."""
    if isinstance(wanted, tuple):
        if value is None:
            return
        wanted = wanted[0]
    if isinstance(wanted, type):
        numeric = (int, float) if wanted is float else wanted
        if not isinstance(value, numeric) or (isinstance(value, bool) and wanted is not bool):
            raise DataError(f"{where} needs {_FORMS[wanted]}; got {_short(value)}; {_HOW}")
        return
    if not isinstance(value, type(wanted)):
        raise DataError(f"{where} needs {_FORMS[type(wanted)]}; got {_short(value)}; {_HOW}")
    if isinstance(wanted, list):
        for i, item in enumerate(value):
            _check(f"{where}[{i}]", item, wanted[0])
        return
    for key in value if str in wanted else wanted:
        if key not in value:
            raise DataError(f"{where} has no {key!r}; {_HOW}")
        _check(f"{where}: {key}", value[key], wanted.get(str, wanted.get(key)))


_FORMS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _recorded(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> Recorded:
    names = [f.name for f in dataclasses.fields(Recorded)]
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items() if k in names}
    record = Recorded(**given)
    shape = record.shape
    if record.data is not None and (
        record.dtype not in _DTYPES
        or not shape
        or min(shape) < 0
        or math.prod(d or 1 for d in shape) > _LARGEST
        or len(shape) > _MOST_DIMS
    ):
        raise DataError(f"{path}: tensor {record.name!r} cannot be {record.dtype}{list(shape or ())}; {_HOW}")
    record.array()  # damage shows now
    return record


def _short(value: Any) -> str:
    words = json.dumps(value, default=str)
    return words if len(words) <= 60 else f"{words[:57]}..."
