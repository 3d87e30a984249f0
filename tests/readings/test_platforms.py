"""Programs for accelerators: all that the package compiles lowers for CUDA and TPU, on a machine with neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jq

SCRIPT = Path(__file__).with_name("platforms.py")


@pytest.mark.parametrize(
    "flow",
    [
        "calibration",
        "integers",
        "float",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("finetuning", "research")),
    ],
)
def test_every_program_lowers_for_cuda_and_tpu(flow: str) -> None:
    """Without 64-bit floats, callbacks of the host or a CPU's libraries."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JQ_CACHE": "off",
        "PYTHONPATH": str(Path(jq.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), flow], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["programs"] > 3 and not found["faults"], found


@pytest.mark.parametrize("name", jq.zoo.models())
def test_the_native_forms_compute_what_those_for_cpus_do(name: str) -> None:
    graph, images = jq.load(jq.zoo.path(name)), jq.zoo.calibration_set()[0][:4]
    native, cpu = (
        np.asarray(jax.jit(jq.trace(graph, lowering=form))(graph.params, {"input": images})["logits"])
        for form in ("native", "cpu")
    )
    np.testing.assert_allclose(native, cpu, rtol=1e-4, atol=1e-4)
