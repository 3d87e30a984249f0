"""`jq` as a backend of the ONNX test suite: `prepare(model)` returns `run(inputs) -> outputs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import onnx

from jq.graph.read import load
from jq.readings.tracing import trace


def prepare(model: onnx.ModelProto) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function from the inputs, in the order of the graph's inputs, to the outputs as numpy."""
    graph = load(model)
    fn = trace(graph)
    names = [v.name for v in graph.inputs]

    def run(inputs: Sequence[Any]) -> list[Any]:
        outputs = fn(graph.params, dict(zip(names, inputs, strict=False)))
        return [jax.tree.map(np.asarray, outputs[name]) for name in fn.outputs]

    return run
