"""The provider's own word: where it put the nodes, as its report and its console say, beside the forecast.

The report is the file that the provider writes where XLNX_ONNX_EP_REPORT_FILE names one and enable_cache_file_io_in_mem
is 0; the console's lines begin with `[Vitis AI EP] No. of`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jq.errors import DataError
from jq.graph.quantizers import QUANTIZERS
from jq.npu.facts import PLACE_RULES
from jq.npu.placing import CPU, EP_CPU, NPU
from jq.util import files

if TYPE_CHECKING:
    from jq.device.forecasting import Forecast

REPORT_VARIABLE, REPORT_FILE = "XLNX_ONNX_EP_REPORT_FILE", "vitisai_ep_report.json"
_DEVICES = {**dict.fromkeys(("NPU", "DPU", "IPU", "DOD", "VAIML"), NPU), "CPU": CPU, "VITIS_EP_CPU": EP_CPU}
_RUNNING = "Actually running on NPU"
_HOW = (
    f"use the {REPORT_FILE} that the provider wrote into its cache folder, with {REPORT_VARIABLE} set and "
    "enable_cache_file_io_in_mem=0"
)
_SHARED = 0.5  # of the nodes, at least, that a report of the same model names
_LINES = re.compile(r"No\. of (Operators|Subgraphs) *:(.*?)(?=\[Vitis AI EP\]|\n *\n|\Z)", re.DOTALL)
_PREFIX = re.compile(r"\[[A-Z]:onnxruntime:[^\]]*\]")
_COUNT = re.compile(rf"({_RUNNING}|[A-Z][A-Z_0-9]*)\s+(\d+)\b(?!\.)")


@dataclasses.dataclass(frozen=True)
class ProviderReport:
    """The counts of nodes by place, the subgraphs, and each node's place by its first output, if the report has them."""

    counts: Mapping[str, int]
    subgraphs: int | None
    running: int | None
    nodes: Mapping[str, str]
    source: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How often a rule was right, and the nodes for which it was wrong."""

    rule: str
    right: int
    wrong: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Forecast and fact side by side: figures, and the rules by their nodes."""

    rows: tuple[tuple[str, int, int | None], ...]  # name, forecast with the runtime's copies of quantizers, fact
    verdicts: tuple[Verdict, ...]  # of rules by which a node was placed that the report names
    unmatched: tuple[str, ...]  # nodes that the report does not name
    others: int  # nodes of the report that are not the model's: copies that the runtime makes

    @property
    def wrong(self) -> tuple[Verdict, ...]:
        """The rules that were wrong about a node, the worst first."""
        return tuple(sorted((v for v in self.verdicts if v.wrong), key=lambda v: -len(v.wrong)))

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON holds it."""
        rows = {name: {"forecast": ours, "fact": theirs} for name, ours, theirs in self.rows}
        return {
            "rows": rows,
            "rules": [{"rule": v.rule, "right": v.right, "wrong": list(v.wrong)} for v in self.verdicts],
            "unmatched": list(self.unmatched),
            "others": self.others,
        }

    def lines(self) -> Iterator[str]:
        """The lines that say which rules were wrong, and of what the report does not tell."""
        for verdict in self.wrong:
            rule, shown = PLACE_RULES[verdict.rule], ", ".join(verdict.wrong[:3])
            more = f" and {len(verdict.wrong) - 3} more" if len(verdict.wrong) > 3 else ""
            yield f"wrong: {rule.says} [{rule.name}; {rule.evidence}, {rule.date}]: {shown}{more}; right for {verdict.right}"
        if self.verdicts and not self.wrong:
            yield f"every rule was right, for {sum(v.right for v in self.verdicts)} nodes"
        if self.unmatched:
            yield f"{len(self.unmatched)} nodes are not in the report, such as {self.unmatched[0]}"
        if self.others:
            yield f"{self.others} nodes of the report are not in the model: the runtime copies quantizers that several nodes read"


def read_report(path: str | os.PathLike[str]) -> ProviderReport:
    """Return what a vitisai_ep_report.json says; a DataError where the file is no such report."""
    document = _read(path, lambda path: files.document(path, form="JSON"))
    devices = _entries(path, document, "deviceStat")
    if not devices:
        raise DataError(f"{path} has no deviceStat, the list of devices with their nodes; {_HOW}")
    counts: Counter[str] = Counter()
    for device in devices:
        name, number = device.get("name"), device.get("nodeNum", 0)
        if not isinstance(name, str) or not _is_count(number):
            raise DataError(f"{path}: an entry of deviceStat needs a name and a nodeNum; got {_short(device)}; {_HOW}")
        if name != "all":
            counts[_place(name)] += int(number)
    nodes = {}
    for node in _entries(path, document, "nodeStat"):
        outputs, kind = node.get("output"), node.get("opType", "")
        if not isinstance(outputs, list) or not all(isinstance(o, str) for o in outputs) or not outputs:
            raise DataError(f"{path}: an entry of nodeStat needs a list of outputs; got {_short(node)}; {_HOW}")
        where = _place(str(node.get("device", "CPU")))
        nodes[outputs[0]] = EP_CPU if where == CPU and str(kind).endswith(QUANTIZERS) else where
    subgraphs = {}
    for entry in _entries(path, document, "subgraphStat"):
        number = entry.get("count")
        if not isinstance(entry.get("device"), str) or not _is_count(number):
            raise DataError(f"{path}: an entry of subgraphStat needs a device and a count; got {_short(entry)}; {_HOW}")
        subgraphs[entry["device"]] = int(number)  # type: ignore[arg-type]
    on_npu = [count for name, count in subgraphs.items() if _DEVICES.get(name) == NPU]
    return ProviderReport(
        _checked(path, counts),
        sum(on_npu) if on_npu else None,
        subgraphs.get(_RUNNING),
        nodes,
        str(path),
    )


def read_console(path: str | os.PathLike[str]) -> ProviderReport:
    """Return the counts in the provider's last lines of a console's output; a DataError if there are none."""
    text = _PREFIX.sub("", _read(path, files.text))
    lines = {kind: dict(_COUNT.findall(rest)) for kind, rest in _LINES.findall(text)}  # the last of each
    if not lines.get("Operators"):
        raise DataError(
            f"{path} has no line '[Vitis AI EP] No. of Operators : ...' with counts; expected a console's output while the "
            "provider compiled: it prints none if it loads a compiled model from its cache"
        )
    counts: Counter[str] = Counter()
    for name, count in lines["Operators"].items():
        counts[_place(name)] += int(count)
    subgraphs = lines.get("Subgraphs", {})
    on_npu = [int(count) for name, count in subgraphs.items() if _DEVICES.get(name) == NPU]
    running = subgraphs.get(_RUNNING)
    return ProviderReport(
        _checked(path, counts),
        sum(on_npu) if on_npu else None,
        None if running is None else int(running),
        {},
        str(path),
    )


def compare_with_report(forecast: Forecast, report: ProviderReport) -> Comparison:
    """Return forecast and fact side by side; a DataError if the report describes another model."""
    outputs = {p.output for p in forecast.nodes.values()}
    known = sum(output in report.nodes for output in outputs)
    if report.nodes and known < _SHARED * len(outputs):
        raise DataError(
            f"{report.source} is a report on another model: it names {known} of the {len(outputs)} nodes of this one; give "
            "the quantized model that the provider compiled"
        )
    total = sum(report.counts.values())
    if not report.nodes and not _SHARED * len(outputs) <= total <= len(outputs) / _SHARED:
        raise DataError(
            f"{report.source} counts {total} nodes, and the model has {len(outputs)}; give the quantized model that the "
            "provider compiled"
        )
    verdicts: dict[str, tuple[list[str], list[str]]] = {}
    unmatched = []
    for name, placed in forecast.nodes.items():
        fact = report.nodes.get(placed.output)
        if fact is None:
            unmatched += [name] if report.nodes else []
        else:
            verdicts.setdefault(placed.rule, ([], []))[fact != placed.place].append(name)
    rows = (
        *((p, forecast.counts.get(p, 0) + forecast.copies.get(p, 0), count) for p, count in report.counts.items()),
        ("subgraphs", forecast.subgraphs, report.subgraphs),
        ("subgraphs that run", forecast.subgraphs_run, report.running),
    )
    judged = tuple(Verdict(rule, len(right), tuple(wrong)) for rule, (right, wrong) in verdicts.items())
    return Comparison(rows, judged, tuple(unmatched), len(report.nodes.keys() - outputs))


# --- Reading files of unknown origin ---


def _read(path: str | os.PathLike[str], reader: Callable[[Any], Any]) -> Any:
    try:
        return reader(path)
    except DataError as error:
        raise DataError(f"{error}; {_HOW}") from None


def _entries(path: str | os.PathLike[str], document: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(document, dict):
        raise DataError(f"{path} holds {_short(document)}, and no object with a deviceStat; {_HOW}")
    entries = document.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise DataError(f"{path}: {name} needs a list of objects; got {_short(entries)}; {_HOW}")
    return entries


def _place(device: str) -> str:
    """The place that a device's name stands for; an undocumented name itself, which no forecast contains."""
    return _DEVICES.get(device, device)


def _checked(path: str | os.PathLike[str], counts: Mapping[str, int]) -> dict[str, int]:
    """The counts by place, and by the names of other devices; a DataError where none of them is the provider's."""
    if not any(place in counts for place in (NPU, CPU, EP_CPU)):
        raise DataError(
            f"{path} counts nodes only for {_short(list(counts))}; expected some of {', '.join(_DEVICES)}; {_HOW}"
        )
    return {**dict.fromkeys((NPU, CPU, EP_CPU), 0), **counts}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _short(value: Any) -> str:
    words = json.dumps(value, default=str)
    return words if len(words) <= 60 else f"{words[:57]}..."
