"""The same graph in another version of ONNX's operator set."""

from __future__ import annotations

import onnx
from onnx import version_converter

from jq.errors import ConfigError
from jq.graph import Graph
from jq.onnx_read import load
from jq.onnx_write import to_model

LEAST = 10  # which has QuantizeLinear
USUAL = 17  # what compilers are tested with


def with_opset(graph: Graph, version: int | None) -> Graph:
    """Return the graph at an opset version, converted by onnx; without one, at 17 where that is higher and can be.

    Tensor names stay. What onnx's converter cannot do is a ConfigError if the version was asked for.

    >>> import jq
    >>> with_opset(jq.load(jq.zoo.path("fashion_resnet")), 21).opset()
    21
    """
    newest = onnx.defs.onnx_opset_version()
    if version is not None and not LEAST <= version <= newest:
        raise ConfigError(
            f"opset {version}: quantizers exist from {LEAST} on, and this onnx knows opsets up to {newest}"
        )
    wanted = max(USUAL, graph.opset()) if version is None else version
    if graph.opset() == wanted:
        return graph
    try:
        return _converted(graph, wanted)
    except Exception as error:  # onnx's converter raises several kinds
        if version is None and graph.opset() >= LEAST:
            return graph
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise ConfigError(
            f"the model, of opset {graph.opset()}, cannot be converted to opset {wanted}: {reason[0]}"
        ) from error


def _converted(graph: Graph, version: int) -> Graph:
    model = version_converter.convert_version(to_model(graph, skeleton=True), version)
    found = load(model)
    own = {v.name for v in graph.inputs}
    lost = (graph.producer.keys() - found.producer.keys()) - {""}
    if lost:
        raise ConfigError(f"the converter drops tensor {min(lost)!r}")
    inputs = tuple(v for v in found.inputs if v.name in own)
    return found.with_arrays({**found.arrays, **graph.arrays}, inputs=inputs, metadata=graph.metadata)
