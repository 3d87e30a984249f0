"""The table of runs: what is read is what was written, and nothing else is taken for it."""

from __future__ import annotations

import json

import pytest

import jq
from jq.research.ledger import NUMBER, Ledger

COLUMNS = {"hash": str, "config": str, "top1": NUMBER}
ROW = {"hash": "h", "config": "a", "top1": 0.5}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "a\nb",
        "a\rb",
        "a\r\nb",
        "a\u2028b",
        "a\x85b",
        "a\x0bb",
        'a,"b',
        '"',
        '"a"',
        "",
        "a\n",
        "\r",
        "1",
        "null",
        "é",
    ],
)
def test_any_name_comes_back(name, suffix, tmp_path):
    written = Ledger.open(tmp_path / f"t{suffix}", COLUMNS)
    for top1 in (0.5, None):
        written.append({**ROW, "config": name, "top1": top1})
    assert [dict(row) for row in Ledger.open(written.path, COLUMNS).rows] == written.rows


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_torn_last_line_is_removed(suffix, tmp_path):
    ledger = Ledger.open(tmp_path / f"t{suffix}", COLUMNS)
    for name in ("a\nb", "c\nd"):
        ledger.append({**ROW, "config": name})
    whole = ledger.path.read_bytes()
    for cut in range(1, 12):
        ledger.path.write_bytes(whole[:-cut])
        assert [row["config"] for row in Ledger.open(ledger.path, COLUMNS).rows] == ["a\nb"]


@pytest.mark.parametrize(
    "change",
    [{"top1": "abc"}, {"top1": [1]}, {"top1": True}, {"config": None}, {"config": 3}, {"hash": [1]}, {"top1": ...}],
)
def test_rows_of_other_values_are_refused(change, tmp_path):
    row = {k: v for k, v in {**ROW, **change}.items() if v is not ...}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    (tmp_path / "t.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(jq.DataError, match="not a table of these runs: a row has"):
        Ledger.open(tmp_path / "t.jsonl", COLUMNS)


@pytest.mark.parametrize(
    "content", ["[" * 5000 + "\n", "[1]\n", "\xff\n", "hash,config,top1\nh,a\n", 'hash,config,top1\nh,"a\n']
)
def test_files_of_something_else_stay_as_they_are(content, tmp_path):
    for suffix in (".csv", ".jsonl"):
        path = tmp_path / f"t{suffix}"
        path.write_text(content + "no line break")
        with pytest.raises(jq.DataError, match="not a table of these runs"):
            Ledger.open(path, COLUMNS)
        assert path.read_text() == content + "no line break"
