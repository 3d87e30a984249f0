"""Nothing outlives its use: a graph and its weights are freed with the last reference that the caller holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jq
from jq.graph import Graph
from tests.passes.models import build, node, normal

X = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)


def prepared() -> Graph:
    nodes = [
        node("Conv", ["x", "w", "b"], ["z"]),
        node("LeakyRelu", ["z"], ["a"], alpha=0.1),
        node("GlobalAveragePool", ["a"], ["y"]),
    ]
    model = build(nodes, {"w": normal(8, 3, 3, 3), "b": normal(8)}, x=("n", 3, 8, 8))
    return jq.prepare(jq.load(model), "XINT8")


def planned() -> tuple[Graph, jq.Plan]:
    graph = prepared()
    return graph, jq.make_plan(graph, jq.calibrate(graph, X), "XINT8")


def traced() -> Any:
    graph = prepared()
    return graph, jq.trace(graph)(graph.params, {"x": X})


def jitted() -> Any:
    graph = prepared()
    return graph, jax.jit(jq.trace(graph))(jq.pack(graph), {"x": X})


def fake_quantized() -> Any:
    graph, plan = planned()
    return graph, jq.fake_quant(graph)(graph.params, plan, {"x": X})


def tuned() -> Any:
    graph, plan = planned()
    return graph, jq.finetune(graph, plan, X, jq.presets["XINT8_ADAROUND"].replace(finetune_steps=2))


def loaded() -> Any:
    chip = jq.integer.load(jq.export(*planned()), "aie2_x1")
    return chip.graph, chip({"x": X}), chip.floats({"x": X}), chip.explain({"x": X})


@pytest.mark.parametrize("use", [planned, traced, jitted, fake_quantized, tuned, loaded])
def test_a_graph_and_its_weights_are_freed(use: Callable[[], Any]) -> None:
    graph, *results = use()
    living = [weakref.ref(graph), *(weakref.ref(array) for array in graph.params.values())]
    assert len(living) > 2
    del graph, results
    gc.collect()
    assert [ref() for ref in living if ref() is not None] == []
