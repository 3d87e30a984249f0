"""Tools that are run as modules, by Quark's paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.parametrize("spelled", [("--baseline_results_folder", "--quantized_results_folder"), ()])
def test_evaluate(tmp_path: Path, rng: np.random.Generator, spelled: tuple[str, ...]) -> None:
    pytest.importorskip("jq.evaluate", reason="this tree has no `jq-quant evaluate`")
    folders = [str(tmp_path / name) for name in ("float", "quantized")]
    logits = rng.normal(size=(4, 10)).astype(np.float32)
    for folder, array in zip(folders, (logits, logits + 0.1), strict=True):
        Path(folder).mkdir()
        np.save(Path(folder) / "results.npy", array)
    argv = [word for pair in zip(spelled, folders, strict=True) for word in pair] if spelled else folders
    done = subprocess.run(
        [sys.executable, "-m", "jq.compat.quark.tools.evaluate", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.lower()
    flat, moved = logits.ravel().astype(float), (logits + 0.1).ravel().astype(float)
    cosine = flat @ moved / np.linalg.norm(flat) / np.linalg.norm(moved)
    assert all(name in shown for name in ("cosine", "l2", "psnr"))
    assert f"{cosine:.6g}" in shown
