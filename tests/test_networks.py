"""Random networks of twenty operators go through every stage without an exception.

`JQ_SOAK=200 pytest tests/test_networks.py -n0 -s` takes as many other networks, of seeds that it prints;
`experiments/robustness/networks.py` counts what goes wrong where.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.flow import session_of, stages
from tests.networks import network

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SOAK, FIRST = int(os.environ.get("JQ_SOAK", 0)), int(time.time()) % 1_000_000
PRESETS = ("XINT8", "A8W8", "A16W8", "BF16", "INT8_CNN_DEFAULT", "S8S8_AAWS")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SOAK) if SOAK else range(6))
def test_it_is_quantized_and_onnxruntime_runs_it(seed):
    """At its own opset, with onnxruntime's default optimizations, and in integers."""
    case = network(seed)
    reached = []
    for stage in stages(case.model, case.data, PRESETS[seed % len(PRESETS)], opset=case.model.opset_import[0].version):
        if stage == "finetune" and not SOAK:
            break
        reached.append(stage)
    assert "integers" in reached


@pytest.mark.parametrize("seed", [12])
def test_it_is_tuned_compared_and_ranked(seed):
    case = network(seed, size=8)
    assert list(stages(case.model, case.data, "XINT8"))[-1] == "sensitivity"


def test_the_networks_are_valid_and_of_many_operators():
    operators = set()
    for seed in range(60):
        case = network(seed)
        session_of(case.model, whole=False)
        operators |= {n.op_type for n in case.model.graph.node}
    assert len(operators) > 45 and {"Conv", "If", "Loop", "Where", "Resize", "LayerNormalization"} <= operators
