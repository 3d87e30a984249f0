"""`jq-quant sensitivity`."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from jq.cli import main
from tests.research.conftest import small_model


def test_the_command_ranks_and_draws(tmp_path, capfd):
    onnx.save(small_model(), tmp_path / "small.onnx")
    np.save(tmp_path / "images.npy", np.random.default_rng(0).standard_normal((6, 3, 9, 9)).astype(np.float32))
    words = ["sensitivity", f"{tmp_path}/small.onnx", "--data", f"{tmp_path}/images.npy", "--kind", "activations"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--limit", "4", "--plot", f"{tmp_path}/found.svg", "--json"])
    assert not caught.value.code
    found = json.loads(capfd.readouterr().out)
    assert found["samples"] == 4
    assert {r["name"] for r in found["rows"]} >= {"x", "stem.relu", "sum", "logits"}
    assert [r["loss"] for r in found["rows"]] == sorted((r["loss"] for r in found["rows"]), reverse=True)
    assert (tmp_path / "found.svg").read_text().startswith("<svg xmlns=")
    with pytest.raises(SystemExit) as caught:
        main([*words, "--by", "block"])
    assert caught.value.code == 2
    assert "expected tensor, layer" in capfd.readouterr().err
