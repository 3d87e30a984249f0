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
    agrees(result.model, feed)
    yield "finetune"
    steps = config.replace(finetune=config.finetune or "adaround", finetune_steps=2, finetune_batch=2)
    params, plan = jq.finetune(result.graph, result.plan, data, steps)
    yield "export what was tuned"
    session_of(jq.export(result.graph, plan, params=params, opset=opset), whole=True)
    yield "compare"
    jq.compare(model, result.model, data, limit=2).summary()
    yield "sensitivity"
    jq.research.sensitivity(result.graph, result.plan, data, limit=2, screen=3)


def agrees(model: onnx.ModelProto, feed: Arrays) -> None:
    """Every integer tensor of `target="ort"`, where it reads onnxruntime's codes before it, has onnxruntime's codes."""
    chip = jq.integer.load(model, target="ort")
    chip(feed)
    made = {o for n in chip.graph.nodes if n.op_type == "QuantizeLinear" for o in n.outputs}
    known = {o.name for o in model.graph.output}
    names = tuple(o for n in model.graph.node for o in n.output if o in made - known)
    if not names:
        return
    want = dict(zip(names, session_of(model, whole=False, names=names).run(list(names), dict(feed)), strict=True))
    got = chip.codes(feed, want)
    assert want.keys() <= got.keys(), f"no codes of {sorted(want.keys() - got.keys())}"
    for name, codes in want.items():
        ours = np.asarray(got[name])
        assert ours.shape == codes.shape, f"{name}: {ours.shape} is no {codes.shape}"
        apart = np.abs(ours.astype(np.int64) - codes.astype(np.int64))
        assert apart.max(initial=0) <= 1 and (apart > 0).mean() <= 1e-3, f"{name}: {np.count_nonzero(apart)} differ"
