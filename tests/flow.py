"""The whole flow on one model: every stage that a user calls, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import jq
from jq.config import resolve

Arrays = Mapping[str, np.ndarray]


def session_of(model: onnx.ModelProto, *, whole: bool, names: tuple[str, ...] = ()) -> ort.InferenceSession:
    """The model with inner tensors among its outputs; `whole` with all that onnxruntime fuses by default."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    exposed.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not whole:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])


def first(model: onnx.ModelProto, data: Arrays) -> dict[str, np.ndarray]:
    """As many samples as the model takes at once, at most two."""
    graph = jq.load(model)
    fixed = [v.shape[0] for v in graph.inputs if v.shape and isinstance(v.shape[0], int)]
    return {k: a[: fixed[0] if fixed else 2] for k, a in data.items()}


def stages(
    model: onnx.ModelProto, data: Arrays, config: jq.QuantConfig | str, *, opset: int | None = None, feed: Any = None
) -> Iterator[str]:
    """Yield the name of each stage before it runs; what a stage raises is its failure."""
    config = resolve(config)
    feed = first(model, data) if feed is None else feed
    yield "quantize"
    result = jq.quantize(model, data, config, opset=opset)
    yield "load in onnxruntime"
    optimized = session_of(result.model, whole=True)
    yield "run in onnxruntime"
    optimized.run(None, feed)
    yield "integers"
    if any(n.op_type == "QuantizeLinear" for n in result.model.graph.node):
        agrees(result.model, feed, exact=config.scale == "power_of_two")
    yield "finetune"
    steps = config.replace(finetune=config.finetune or "adaround", finetune_steps=2, finetune_batch=2)
    params, plan = jq.finetune(result.graph, result.plan, data, steps)
    yield "export what was tuned"
    session_of(jq.export(result.graph, plan, params=params, opset=opset), whole=True)
    yield "compare"
    jq.compare(model, result.model, data, limit=2).summary()
    yield "sensitivity"
    jq.research.sensitivity(result.graph, result.plan, data, limit=2, screen=3)


def agrees(model: onnx.ModelProto, feed: Arrays, *, exact: bool) -> None:
    """Integer tensors of `target="ort"` have onnxruntime's codes, where they are made of onnxruntime's codes.

    What a node that runs in float makes may be one code apart, next to a tie. So may all else, unless `exact`.
    """
    chip = jq.integer.load(model, target="ort")
    made = {o: n for n in chip.graph.nodes if n.op_type == "QuantizeLinear" for o in n.outputs}
    known = {o.name for o in model.graph.output}
    names = tuple(o for n in model.graph.node for o in n.output if o in made.keys() - known)
    want = dict(zip(names, session_of(model, whole=False, names=names).run(list(names), dict(feed)), strict=True))
    got, floats = chip.codes(feed, want), chip.floats(feed)
    assert want.keys() <= got.keys(), f"no codes of {sorted(want.keys() - got.keys())}"
    for name, codes in want.items():
        ours, source = np.asarray(got[name]), chip.graph.producer.get(made[name].inputs[0])
        assert ours.shape == codes.shape, f"{name}: {ours.shape} is no {codes.shape}"
        apart = np.abs(ours.astype(np.int64) - codes.astype(np.int64))
        in_float = source is None or source.label in floats
        most = (0.05 if in_float else 0.01) * apart.size + 1 if in_float or not exact else 0
        assert apart.max(initial=0) <= 1, f"{name} is {apart.max()} codes from onnxruntime's"
        assert np.count_nonzero(apart) <= most, f"{name}: {np.count_nonzero(apart)} of {apart.size} codes differ"
