"""A float32 model whose tensors are rounded to a smaller floating-point type, by nodes that say so."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from onnx import helper

from jq.arithmetic.formats import BFLOAT16, FLOAT16, Float
from jq.config import presets
from jq.errors import ModelError
from jq.exchange.conversion.precision import check_patterns, narrowed, with_casts_defined
from jq.exchange.export import quantized_graph
from jq.graph import Graph, Node
from jq.graph.domains import QUARK
from jq.graph.edit import fresh
from jq.graph.quantizers import quantizes
from jq.graph.unused import remove_unused
from jq.ops.kinds import is_cast
from jq.plan.planning import make_plan

_PRESETS = {FLOAT16: "FP16", BFLOAT16: "BF16"}


def with_casts(graph: Graph, format: Float, *, exclude: Collection[str] = (), saturate: bool = False) -> Graph:
    """Return the graph with weights stored in float16 or bfloat16, and activations cast to it and back.

    Tensors are those that the presets BF16 and FP16 round, of all operators but those that `exclude` names; nodes
    inside If, Loop and Scan compute on as they did. Activations beyond float16 saturate, as in the presets; a weight
    beyond the type is an error, or saturates too. Opsets below 13 become 13.

    >>> import jq
    >>> graph = with_casts(jq.load(jq.zoo.path("fashion_resnet")), BFLOAT16)
    >>> graph.params["stem.weight_quantized"].dtype.name, str(graph.inputs[0])
    ('bfloat16', 'input: float32[N,1,28,28]')
    """
    check_patterns(graph, exclude)
    quantizer = next((n for n in graph.walk() if quantizes(n)), None)
    if quantizer is not None:
        raise ModelError(
            f"the model is quantized: node {quantizer.label!r} is a {quantizer.qualified}. Dequantize it first, or convert "
            "it in the native form, which leaves quantizers as they are"
        )
    graph = with_casts_defined(graph)
    config = presets[_PRESETS[format]].replace(op_types=None, rewrites=(), exclude=tuple(exclude))
    plan = make_plan(graph, None, config)
    for name in plan.weights:
        codes = narrowed(name, graph.arrays[name], format, saturate)
        if format.saturates and not saturate and np.isinf(codes.astype(np.float32)).any():
            raise ModelError(
                f"tensor {name!r} holds infinite values, which this form would clip to {format.largest:.6g}, the end of "
                f"{format.name}. Exclude the nodes that read it, saturate, or convert the model in the native form"
            )
    return quantized_graph(graph, plan, opset=graph.opset())


def with_quantizers(graph: Graph, format: Float, *, exclude: Collection[str] = (), saturate: bool = False) -> Graph:
    """Return `with_casts`, with AMD Quark's quantizers, of scale 1, in place of the Casts.

    onnxruntime runs them with Quark's library of custom operators only; `jq.trace` does.

    >>> import jq
    >>> graph = with_quantizers(jq.load(jq.zoo.path("fashion_resnet")), BFLOAT16)
    >>> sorted({n.qualified for n in graph.nodes if n.domain})
    ['com.amd.quark::ExtendedDequantizeLinear', 'com.amd.quark::ExtendedQuantizeLinear']
    """
    own = {n.outputs[0] for n in graph.nodes}
    graph = with_casts(graph, format, exclude=exclude, saturate=saturate)
    taken = set(graph.tensors)
    scale, zero_point = (fresh(f"{format.name}_{part}", taken) for part in ("scale", "zero_point"))
    kinds = {
        helper.np_dtype_to_tensor_dtype(format.dtype): "ExtendedQuantizeLinear",
        helper.np_dtype_to_tensor_dtype(np.dtype(np.float32)): "ExtendedDequantizeLinear",
    }
    nodes: dict[Node, Node | None] = {}
    for node in graph.nodes:
        if is_cast(node) and node.outputs[0] not in own and node.attrs["to"] in kinds:
            inputs = (node.inputs[0], scale, zero_point)
            nodes[node] = Node(kinds[node.attrs["to"]], inputs, node.outputs, {}, node.name, QUARK)
    arrays = {scale: np.ones((), np.float32), zero_point: np.zeros((), format.dtype)}
    return remove_unused(graph.edit(nodes, arrays).replace(opsets={**graph.opsets, QUARK: 1}))
