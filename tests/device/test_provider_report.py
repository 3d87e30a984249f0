"""The provider's report and console lines, made in the documented format from a forecast that is then wrong on purpose."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

import jq
from tests.npu import structures

DEVICES = {"npu": "NPU", "cpu": "CPU", "vitis_ep_cpu": "VITIS_EP_CPU"}
CONSOLE = """
[I:onnxruntime:, stat.cpp:198 stat.cpp] [Vitis AI EP] No. of Operators :
[I:onnxruntime:, stat.cpp:198 stat.cpp]    NPU   398
[I:onnxruntime:, stat.cpp:198 stat.cpp] VITIS_EP_CPU     2
[I:onnxruntime:, stat.cpp:198 stat.cpp] [Vitis AI EP] No. of Subgraphs :
[I:onnxruntime:, stat.cpp:198 stat.cpp]    NPU     1
[I:onnxruntime:, stat.cpp:198 stat.cpp] Actually running on NPU      1
[I:onnxruntime:, vitisai_compile_model.cpp:1488 vitisai_compile_model.cpp] AVG CPU Usage 4.93969%
"""


@pytest.fixture(scope="module")
def forecast():
    return jq.npu.forecast(structures.inverted_bottleneck(2), config="XINT8")


def report_of(forecast, moved: tuple[str, ...] = ()) -> dict[str, Any]:
    """The report of a provider that agrees, except that it runs some nodes on the NPU."""
    places = {n: "npu" if n in moved else p.place for n, p in forecast.nodes.items()}
    counts = Counter(places.values())
    devices = [{"name": "all", "nodeNum": len(places), "supportedOpType": ["::Conv"]}]
    devices += [{"name": DEVICES[p], "nodeNum": c, "supportedOpType": []} for p, c in counts.items()]
    nodes = [
        # As in the provider's own code: a quantizer on the CPU has the device CPU here, and another one in the counts.
        {"input": [], "output": [p.output], "opType": p.op, "device": "NPU" if places[name] == "npu" else "CPU"}
        for name, p in forecast.nodes.items()
    ]
    nodes.append({"input": [], "output": ["x_copied_for_a_reader"], "opType": "DequantizeLinear", "device": "CPU"})
    subgraphs = [{"device": "NPU", "count": 4}, {"device": "Actually running on NPU", "count": 3}]
    return {"deviceStat": devices, "nodeStat": nodes, "subgraphStat": subgraphs}


def written(folder, content: Any) -> str:
    path = folder / "vitisai_ep_report.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_report_that_agrees(forecast, tmp_path):
    report = jq.npu.read_report(written(tmp_path, report_of(forecast)))
    assert report.counts == dict(forecast.counts) and (report.subgraphs, report.running) == (4, 3)
    compared = jq.npu.compare_with_report(forecast, report)
    assert compared.rows == (
        *((p, forecast.counts[p] + forecast.copies.get(p, 0), forecast.counts[p]) for p in DEVICES),
        ("subgraphs", forecast.subgraphs, 4),
        ("subgraphs that run", forecast.subgraphs_run, 3),
    )
    assert compared.wrong == () and compared.unmatched == () and compared.others == 1
    assert sum(v.right for v in compared.verdicts) == len(forecast.nodes)


def test_a_rule_that_was_wrong_is_named_with_its_nodes(forecast, tmp_path):
    clipped = tuple(n for n, p in forecast.nodes.items() if p.rule == "clip-after-conv")[:2]
    report = jq.npu.read_report(written(tmp_path, report_of(forecast, clipped)))
    compared = jq.npu.compare_with_report(forecast, report)
    assert [(v.rule, v.wrong, v.right) for v in compared.wrong] == [
        ("clip-after-conv", clipped, forecast.counts["cpu"] - 2)
    ]
    assert any(line.startswith("wrong: X2 leaves") and clipped[0] in line for line in compared.lines())
    assert compared.to_dict()["rules"]


def test_the_lines_of_a_console(tmp_path):
    path = tmp_path / "console.txt"
    path.write_text(CONSOLE)
    report = jq.npu.read_console(path)
    assert report.counts == {"npu": 398, "cpu": 0, "vitis_ep_cpu": 2} and (report.subgraphs, report.running) == (1, 1)
    one_line = (
        "[Vitis AI EP] No. of Operators :   CPU    36    NPU   239 VITIS_EP_CPU    74 \n"
        "[Vitis AI EP] No. of Subgraphs :   NPU    18 Actually running on NPU    18 \nTest Passed\n"
    )
    path.write_bytes(one_line.encode("utf-16"))  # as PowerShell redirects
    report = jq.npu.read_console(path)
    assert report.counts == {"npu": 239, "cpu": 36, "vitis_ep_cpu": 74} and (report.subgraphs, report.running) == (
        18,
        18,
    )
    path.write_text(" [Vitis AI EP] No. of Operators :   CPU     8 \n")
    assert jq.npu.read_console(path).counts == {"npu": 0, "cpu": 8, "vitis_ep_cpu": 0}


def test_a_device_that_no_document_names_has_a_row_of_its_own(forecast, tmp_path):
    told = report_of(forecast)
    told["deviceStat"].append({"name": "GQA", "nodeNum": 1})
    told["nodeStat"][0]["device"] = "GQA"
    compared = jq.npu.compare_with_report(forecast, jq.npu.read_report(written(tmp_path, told)))
    assert ("GQA", 0, 1) in compared.rows and len(compared.wrong[0].wrong) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON, or was cut off"),
        ('{"deviceStat": [{"name": "NPU", "nodeN', "is not JSON, or was cut off"),
        ("[" * 100_000, "is not JSON|nests too deep"),
        ([1, 2], "no object with a deviceStat"),
        ({"layers": []}, "has no deviceStat"),
        ({"deviceStat": {"NPU": 3}}, "deviceStat needs a list of objects"),
        ({"deviceStat": [{"name": "NPU", "nodeNum": "many"}]}, "needs a name and a nodeNum"),
        ({"deviceStat": [{"name": "NPU", "nodeNum": True}]}, "needs a name and a nodeNum"),
        ({"deviceStat": [{"name": "GPU", "nodeNum": 3}]}, "expected some of NPU"),
        ({"deviceStat": [{"name": "NPU", "nodeNum": 3}], "nodeStat": [{"output": []}]}, "list of outputs"),
        ({"deviceStat": [{"name": "NPU", "nodeNum": 3}], "subgraphStat": [{"device": "NPU"}]}, "device and a count"),
    ],
)
def test_files_that_are_no_report(content, message, tmp_path):
    with pytest.raises(jq.DataError, match=message) as error:
        jq.npu.read_report(written(tmp_path, content))
    assert "vitisai_ep_report.json" in str(error.value) and "XLNX_ONNX_EP_REPORT_FILE" in str(error.value)


def test_bytes_that_are_no_text_and_files_that_are_not(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x08\xff\xfe\x80")
    for read in (jq.npu.read_report, jq.npu.read_console):
        with pytest.raises(jq.DataError, match="is not text"):
            read(path)
        with pytest.raises(jq.DataError, match="cannot read"):
            read(tmp_path / "missing.json")
    path.write_text("Test Passed\n")
    with pytest.raises(jq.DataError, match="has no line"):
        jq.npu.read_console(path)


def test_the_report_of_another_model(forecast, tmp_path):
    other = jq.npu.forecast(structures.shuffled(1), config="XINT8")
    report = jq.npu.read_report(written(tmp_path, report_of(other)))
    with pytest.raises(jq.DataError, match="is a report on another model"):
        jq.npu.compare_with_report(forecast, report)
    path = tmp_path / "console.txt"
    path.write_text(CONSOLE)
    with pytest.raises(jq.DataError, match="counts 400 nodes"):
        jq.npu.compare_with_report(forecast, jq.npu.read_console(path))
