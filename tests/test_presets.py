"""Every preset quantizes every bundled model, and the file computes what `fake_quant` does.

onnxruntime is the oracle, or our own evaluator where the file has the vendor's operators. Presets that differ by their
finetuning alone share everything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import jq
from jq.arithmetic.formats import BLOCKS, Block, Float, Integer
from jq.calibration.observed import observers_of
from jq.config import QuantConfig, presets
from jq.graph import Graph
from tests.conftest import onnxruntime_outputs

FEEDS = {"input": jq.zoo.evaluation_set()[0][:8]}


@functools.cache
def prepared(model: str, rewrites: tuple[str, ...], forms: tuple[str, ...], integer_bias: bool, ops: object) -> Graph:
    config = QuantConfig(rewrites=rewrites, forms=forms, bias="int32" if integer_bias else "weight", op_types=ops)  # type: ignore[arg-type]
    return jq.prepare(jq.load(jq.zoo.path(model)), config)


@functools.cache
def function(graph: Graph) -> jq.FakeQuant:
    return jq.fake_quant(graph)


_STATS: dict[object, jq.Stats] = {}


def calibrated(graph: Graph, config: QuantConfig) -> jq.Stats | None:
    if not config.calibrates:
        return None
    key = graph, repr(sorted(observers_of(config).items()))
    if key not in _STATS:
        _STATS[key] = jq.calibrate(graph, jq.zoo.calibration_set()[0][:16], config)
    return _STATS[key]


@functools.cache
def planned(model: str, config: QuantConfig) -> tuple[Graph, jq.Plan]:
    graph = prepared(model, config.rewrites, config.forms, config.bias == "int32", config.op_types)
    return graph, jq.make_plan(graph, calibrated(graph, config), config)


@functools.cache
def expected(model: str, config: QuantConfig) -> np.ndarray:
    graph, plan = planned(model, config)
    return np.asarray(function(graph)(graph.params, plan, FEEDS)["logits"])


def tolerance(plan: jq.Plan, want: np.ndarray) -> np.ndarray | float:
    """One step of the output. Where sums are not exact in float32, their order decides some roundings before it."""
    found = plan.get("logits")
    if found is None or found.dynamic:
        return float(want.std()) / 100
    if isinstance(found.grid, Float):
        return np.maximum(np.abs(want), 1) * 2.0 ** (1 - found.grid.fraction)
    assert isinstance(found.grid, Integer)
    return float(found.scale) * (1.01 if found.grid.bits == 8 else 16)


def cases() -> Iterator[Any]:
    """Each preset on each network; most on one of them, and few block formats, unless slow tests run."""
    for name, config in presets.items():
        for number, model in enumerate(jq.zoo.models()):
            long = isinstance(config.activation, Block) and name not in ("BFP16", "MX6", "MXINT8")
            slow = long or (number > 0 and name not in ("XINT8", "A8W8"))
            if config.finetune is None or name.endswith("ACCURATE"):
                yield pytest.param(name, model, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("name", "model"), list(cases()))
def test_the_file_computes_what_fake_quant_does(model: str, name: str, tmp_path: Path) -> None:
    config = presets[name].replace(finetune=None)
    graph, plan = planned(model, config)
    assert len(plan.weights) > 10 and (len(plan.activations) > 10 or config.dynamic)
    path = tmp_path / f"{name}.onnx"
    file = jq.export(graph, plan, path=path)
    want = expected(model, config)
    assert np.isfinite(want).all() and want.std() > 1
    custom = {n.domain for n in file.graph.node} - {"", "com.microsoft"}
    if custom:
        assert custom == {"com.amd.quark"} and isinstance(config.activation, Block)
        again = jq.load(path)
        np.testing.assert_array_equal(np.asarray(jq.trace(again)(again.params, FEEDS)["logits"]), want)
    else:
        assert not isinstance(config.activation, Block)
        (found,) = onnxruntime_outputs(file, FEEDS)
        assert np.all(np.abs(found - want) <= tolerance(plan, want)), np.abs(found - want).max()


@pytest.mark.parametrize("model", jq.zoo.models())
@pytest.mark.parametrize("name", [n for n in presets if n.endswith(("_ADAROUND", "_ADAQUANT"))])
def test_finetuning_starts_from_the_same_file(model: str, name: str) -> None:
    config = presets[name]
    base = presets[name.rpartition("_")[0]]
    assert config.finetune is not None and config.replace(finetune=None) == base
    graph, plan = planned(model, base)
    assert _written(graph, jq.make_plan(graph, calibrated(graph, config), config)) == _written(graph, plan)


def _written(graph: Graph, plan: jq.Plan) -> bytes:
    model: onnx.ModelProto = jq.export(graph, plan)
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def test_block_formats_are_all_tried() -> None:
    assert set(BLOCKS.values()) == {c.activation for c in presets.values() if isinstance(c.activation, Block)}
