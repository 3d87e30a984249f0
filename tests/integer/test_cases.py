"""Worked cases: the script that runs them, on a file of its own and on the reference file where that is at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SHARED
from tests.integer.run_cases import mismatches

SCRIPT = Path(__file__).with_name("run_cases.py")
# By hand: -78 / 2**4 is -4.875, of which a slope of 26/256 leaves -0.495; (3 + 2) / 2 is a tie; 49 * 124.49 is 6100.
CASES = [
    {"id": "leaky", "op": "conv_dot", "target": "all", "formula": "C1+A", "inputs": {"x": [-78], "w": [1], "b": None},
     "params": {"px": 4, "pw": 4, "pb": None, "po": 4, "act": "leaky"},
     "expected": {"dpu": 0, "aie2_x1": 0, "aie2_even": 0, "ort": 0}},
    {"id": "tie", "op": "eltwise_add", "target": "all", "formula": "E1", "inputs": {"v": [3, 2]},
     "params": {"p": [5, 5], "po": 4, "relu": False},
     "expected": {"dpu": 3, "aie2_x1": 3, "aie2_even": 2, "ort": 2}},
    {"id": "factor", "op": "avgpool", "target": "all", "formula": "P1", "inputs": {"sum": 6100},
     "params": {"kernel": [7, 7], "pi": 4, "po": 4},
     "expected": {"dpu": 125, "aie2_x1": 125, "aie2_even": 125, "ort": 124}},
]  # fmt: skip


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, timeout=300)


def test_the_script_names_each_mismatch_and_fails(tmp_path):
    wrong = {**CASES[1], "expected": {**CASES[1]["expected"], "dpu": 4}}
    (tmp_path / "cases.json").write_text(json.dumps({"vectors": [CASES[0], wrong]}))
    found = run(tmp_path / "cases.json")
    assert found.returncode == 1, found.stderr
    assert "tie (eltwise_add, E1, dpu): expected 4, found 3" in found.stdout
    assert "2 cases, 8 expectations, 1 mismatches" in found.stdout


def test_cases_worked_by_hand():
    assert list(mismatches(CASES)) == []


@pytest.mark.skipif(SHARED is None, reason="the reference cases are not part of this repository")
def test_every_reference_case():
    cases = json.loads((SHARED / "npu_vectors.json").read_text())["vectors"]
    assert len(cases) > 50
    assert list(mismatches(cases)) == []
