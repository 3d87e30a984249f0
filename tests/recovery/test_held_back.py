"""What blocks learn is judged on samples that they have not seen, by the outputs of the network."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest

import jq
from jq.data.sources import open_source
from jq.recovery import finetuning
from jq.recovery.held_back import HeldBack
from jq.recovery.walk import Site, store_of
from tests.conftest import onnxruntime_outputs
from tests.recovery.test_finetuning import IMAGES, small

CONFIG = jq.presets["XINT8"].replace(cle=False, finetune="block", finetune_steps=20)


def planned() -> tuple[jq.Graph, jq.Plan]:
    graph = jq.prepare(jq.load(small()), CONFIG)
    return graph, jq.make_plan(graph, jq.calibrate(graph, IMAGES, CONFIG), CONFIG)


def test_the_error_is_that_of_the_file_on_every_fourth_sample() -> None:
    graph, plan = planned()
    held = HeldBack.of(graph, graph.params, plan, store_of(graph, plan, open_source(IMAGES, graph.inputs), None))
    assert held is not None
    (want,) = onnxruntime_outputs(onnx.load_from_string(small()), {"x": IMAGES[3::4]})
    (have,) = onnxruntime_outputs(jq.export(graph, plan), {"x": IMAGES[3::4]})
    squares = np.square(want - have).mean(1) / np.square(want).mean(1)
    assert held.before == pytest.approx(squares.mean(), rel=5e-3)  # floats are kept in half precision
    seen = np.concatenate([x["x"] for x in held.others.samples()])
    np.testing.assert_array_equal(seen, IMAGES[np.arange(len(IMAGES)) % 4 != 3])


@pytest.mark.parametrize(("samples", "factor", "kept"), [(24, 1.5, False), (24, 1.0, True), (3, 1.5, True)])
def test_what_makes_the_outputs_worse_is_undone(
    samples: int, factor: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every block says that it is better. Of three samples, none can be held back."""

    def tuned(site: Site, *_: Any) -> tuple[Site, float, float]:
        return site.replace(params={k: factor * v for k, v in site.params.items()}), 1.0, 0.0

    monkeypatch.setattr(finetuning, "tune_unit", tuned)
    graph, plan = planned()
    coarse = dataclasses.replace(plan["x"], scale=np.float32(4 * plan["x"].scale))
    params, _ = jq.finetune(graph, plan.replace({"x": coarse}), IMAGES[:samples], CONFIG)
    same = all(np.array_equal(a, factor * graph.params[k]) for k, a in params.items())
    assert same == kept
    assert kept or all(np.array_equal(a, graph.params[k]) for k, a in params.items())
