"""Rules of `lint` on a model as such: its operators, types, shapes and structure."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator

import numpy as np

from jq.config import QuantConfig
from jq.evidence.lint_rules import Found, Rule, bits_of, counted, float_params, listed, rule, types
from jq.graph import Graph, Node
from jq.graph.quantizers import is_quantized
from jq.ops.kinds import is_clip, is_conv
from jq.ops.linear import is_linear
from jq.ops.masks import masks
from jq.passes.prepare import canonical
from jq.plan.heads import heads
from jq.plan.planning import weights_to_quantize
from jq.plan.selection import float_heads
from jq.readings.tracing import unsupported
from jq.util.mapped import is_finite

RULES: list[Rule] = []
_rule = functools.partial(rule, RULES)


@_rule("already-quantized", "error", loaded=True)
def _already_quantized(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    quantizers = [n for n in graph.walk() if is_quantized(n)]
    if quantizers:
        yield Found(
            quantizers[0].label,
            f"{counted(len(quantizers), 'node')} of a quantized model ({listed(types(quantizers))}); expected a float "
            "model: quantize the model from which this one was made",
        )


@_rule("unsupported-op", "error")
def _unsupported(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    for line in unsupported(graph):
        yield Found("graph", f"{line}; jq cannot run the model: replace or cut it off")


@_rule("non-finite", "error")
def _non_finite(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    # A Clip may well be open on one side.
    bounds = {k for k, nodes in graph.consumers.items() if all(is_clip(n) for n in nodes)}
    bounds |= masks(graph) if not config.strict_quark else set()  # which stay in float
    odd = ((k, a) for k, a in float_params(graph) if k not in bounds and not is_finite(a))
    bad = {k: int(a.size - np.count_nonzero(np.isfinite(a))) for k, a in odd}
    if bad:
        yield Found(
            next(iter(bad)),
            f"NaN or Inf in {counted(len(bad), 'constant tensor')} ({listed(f'{k}: {n}' for k, n in bad.items())}); "
            "integers cannot represent them: set a mask of -Inf to a finite number such as -100, and export anything else again",
        )


@_rule("canonical-form", "note", decomposed=True)
def _canonical(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    if config.strict_quark:
        return
    made = canonical(graph, config)
    for form in dict.fromkeys(m.form for m in made.matches):
        matches = [m for m in made.matches if m.form == form]
        sizes = sorted({len(m.region.nodes) for m in matches})
        span = "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
        yield Found(
            matches[0].region.end.label,
            f"{counted(len(matches), 'region')} of {span} nodes that compute {form}, ending at "
            f"{listed(m.region.end.label for m in matches)}: each becomes one operator of opset {matches[0].since} "
            f"before quantization, decomposed again if exported at an older opset; remove {form!r} from `canonical` to keep them",
        )
    if made.folded:
        yield Found(
            made.folded[0].label,
            f"{counted(len(made.folded), 'scale or shift', 'scales and shifts')} by constants "
            f"({listed(n.label for n in made.folded)}) {'goes' if len(made.folded) == 1 else 'go'} into the weights of "
            "linear layers; remove 'factors' from `canonical` to keep them",
        )


@_rule("float-type")
def _float_type(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    refused = {name for name, _ in weights_to_quantize(graph, config)}
    for dtype in ("float64", "float16", "bfloat16"):
        names = [k for k, a in graph.params.items() if a.dtype.name == dtype and a.size > 1]
        names += [v.name for v in graph.inputs if v.dtype is not None and v.dtype.name == dtype]
        if names:
            yield Found(
                names[0],
                f"{dtype} in {counted(len(names), 'weight or input', 'weights or inputs')} ({listed(names)}); expected "
                "float32, which Q/DQ and the NPU's provider take: export the model in float32",
                "error" if not refused.isdisjoint(names) else None,
            )


@_rule("opset", "note", loaded=True)
def _opset(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    if "" not in graph.opsets:
        return
    opset = graph.opset()
    if opset < 7:
        text = "below 7, the oldest supported: convert it with onnx.version_converter, or export again at 17"
    elif opset > 21:
        text = "but the NPU's compilers are tested with 17 to 21: export at one of these"
    elif 16 in (bits_of(config.activation), bits_of(config.weight)) and opset < 21:
        text = "16-bit Q/DQ need 21; below it, those of com.microsoft are written"
    elif opset < 17:
        text = "the NPU's compilers are tested with 17 to 21: the result gets 17 if onnx can convert the model"
    else:
        return
    yield Found("graph", f"opset {opset}; {text}", "warning" if opset < 7 or opset > 21 else None)


@_rule("dynamic-shape", loaded=True)
def _dynamic_shape(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    free = [v for v in graph.inputs if v.shape is None or any(not isinstance(d, int) for d in v.shape[1:])]
    if free:
        yield Found(
            free[0].name,
            f"unknown dims in {counted(len(free), 'input')} ({listed(map(str, free))}); the NPU's compiler "
            "needs numbers: fix them with onnxruntime.tools.make_dynamic_shape_fixed",
        )


@_rule("dynamic-batch", "note", loaded=True)
def _dynamic_batch(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    batch = [v for v in graph.inputs if v.shape and [i for i, d in enumerate(v.shape) if not isinstance(d, int)] == [0]]
    if batch:
        yield Found(
            batch[0].name,
            f"free batch dim ({listed(map(str, batch))}); good for calibration, but fix it (usually to 1) before the "
            "NPU's compiler sees the model",
        )


@_rule("no-linear-op", "note")
def _no_linear(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    if not _linear(graph, graph.walk()):
        weights = sum(a.size for _, a in float_params(graph))
        yield Found(
            "graph",
            f"no Conv, ConvTranspose, Gemm or MatMul and {weights:,} weights: quantization will make little of "
            "it smaller or faster",
        )


@_rule("few-convs")
def _few_convs(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    count = sum(is_conv(n) for n in graph.nodes)
    if count < 2 and _linear(graph, graph.walk()):
        yield Found(
            "graph",
            f"{count} Conv in the main graph; the NPU's provider leaves a model with fewer than 2 on the CPU: lower "
            "minimum_num_of_conv in its configuration",
        )


@_rule("detection-head", "note")
def _detection_head(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    every = heads(graph) if config.calibrates else ()
    if not every:
        return
    exclude = f"exclude_subgraphs={json.dumps([head.ends for head in every])}"
    nodes = counted(sum(len(head.nodes) for head in every), "node")
    if float_heads(graph, config):
        yield Found(
            every[0].nodes[0].label, f"{nodes} decode boxes and scores and stay in float; the same by {exclude}"
        )
    else:
        yield Found(
            every[0].nodes[0].label,
            f"{nodes} decode boxes and scores, which one scale cannot represent: with head='int8' or strict_quark most "
            f"detectors find nothing; use head='float', or {exclude}",
            "warning",
        )


@_rule("subgraph")
def _subgraphs(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    nodes = [n for n in graph.nodes if n.subgraphs]
    if nodes:
        inner = [m for n in nodes for g in n.subgraphs.values() for m in g.walk()]
        linear = _linear(graph, inner)
        yield Found(
            nodes[0].label,
            f"{listed(types(nodes))} with {counted(len(inner), 'node')} in subgraphs, {len(linear)} of them Conv, Gemm or "
            "MatMul; these stay in float on the CPU: export without control flow (fixed shapes and conditions)",
        )


def _linear(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    return [n for n in nodes if is_linear(graph, n)]
