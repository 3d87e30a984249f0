"""Conversion of a graph to another version of ONNX's operator set."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import version_converter

from jq.errors import ConfigError
from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.read import load
from jq.graph.schemas import schema
from jq.graph.write import to_model
from jq.passes.spelled import spelled_out

LEAST = 10  # which has QuantizeLinear
USUAL = 17  # what compilers are tested with
_SIGNED = 13
# Versions from 13 on that changed an operator without a sign of it: what is left out or a shape means another thing ...
_REDEFINED = {("DFT", 20), ("GridSample", 20), ("GroupNormalization", 21), ("RoiAlign", 16)}
# ... or an attribute may have values that it could not have before.
_NEW_VALUES = {
    ("Pad", 19): ("mode", {"wrap"}),
    ("Resize", 19): ("coordinate_transformation_mode", {"half_pixel_symmetric"}),
    ("ScatterElements", 18): ("reduction", {"max", "min"}),
    ("ScatterND", 18): ("reduction", {"max", "min"}),
}

_RESIZE = 11  # the first opset whose Resize says where it takes values from
_ASIDE = "jq.aside"  # a domain that onnx's converter leaves alone


def with_opset(graph: Graph, version: int | None) -> Graph:
    """Return the graph at an opset version, converted by onnx; without one, at 17 where that is higher and can be.

    Operators that an older one lacks are spelled out. Tensor names stay. If onnx's converter cannot reach a requested
    version, that is a ConfigError.

    >>> import jq
    >>> with_opset(jq.load(jq.zoo.path("fashion_resnet")), 21).opset()
    21
    """
    check_opset(version)
    wanted = max(USUAL, graph.opset()) if version is None else version
    if graph.opset() == wanted:
        return graph
    if _SIGNED <= wanted < graph.opset():
        graph = spelled_out(graph, wanted)
    if all(keeps(node, graph.opset(), wanted) for node in graph.walk()):
        return graph.replace(opsets={**graph.opsets, "": wanted})
    try:
        converted = _converted(_resizes_aside(graph, wanted), wanted)
    except Exception as error:  # onnx's converter raises several kinds
        if version is None and graph.opset() >= LEAST:
            return graph
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise ConfigError(
            f"the model, of opset {graph.opset()}, cannot be converted to opset {wanted}: {reason[0]}"
        ) from error
    opsets = {domain: version for domain, version in converted.opsets.items() if domain != _ASIDE}
    nodes = tuple(n.replace(domain="") if n.domain == _ASIDE else n for n in converted.nodes)
    return converted.replace(nodes=nodes, opsets=opsets)


def check_opset(version: int | None) -> None:
    """Raise a ConfigError for an opset that quantized models do not support."""
    newest = onnx.defs.onnx_opset_version()
    if version is not None and not (isinstance(version, int) and LEAST <= version <= newest):
        raise ConfigError(
            f"opset {version!r}: quantizers exist from {LEAST} on, and the installed onnx supports opsets up to {newest}"
        )


def keeps(node: Node, before: int, after: int) -> bool:
    """Whether a node has the same meaning at another version, which is common, downwards too."""
    if node.domain:
        return True
    old, new = schema(node.op_type, "", before), schema(node.op_type, "", after)
    if old is None or new is None or old.since_version == new.since_version:
        return old is not None and new is not None
    if not before > after >= _SIGNED:
        return False
    # From 13 on what a version changed of an operator shows in its signature, or is a type more, or is listed above.
    used = slice(0, len(node.inputs))
    same_inputs = [i.name for i in old.inputs][used] == [i.name for i in new.inputs][used]
    crossed = [(node.op_type, version) for version in range(after + 1, before + 1)]
    listed = any(key in _REDEFINED for key in crossed)
    values = [_NEW_VALUES[key] for key in crossed if key in _NEW_VALUES]
    new_value = any(node.attrs.get(name) in values_added for name, values_added in values)
    return same_inputs and node.attrs.keys() <= new.attributes.keys() and not listed and not new_value


def _converted(graph: Graph, version: int) -> Graph:
    model = version_converter.convert_version(to_model(graph, skeleton=True), version)
    converted = load(model)
    own = {v.name for v in graph.inputs}
    lost = (graph.producer.keys() - converted.producer.keys()) - {""}
    if lost:
        raise ConfigError(f"the converter drops tensor {min(lost)!r}")
    inputs = tuple(v for v in converted.inputs if v.name in own)
    return converted.with_arrays({**converted.arrays, **graph.arrays}, inputs=inputs, metadata=graph.metadata)


def _resizes_aside(graph: Graph, version: int) -> Graph:
    """Return the graph with Upsample, and Resize of opset 10, as the equivalent Resize of opset 11.

    It stays in a domain of its own until the rest is converted: onnx's converter would turn it into half-pixel mode.
    """
    if not 7 <= graph.opset() < _RESIZE <= version:
        return graph
    taken, arrays = set(graph.tensors), dict[str, np.ndarray]()
    nodes: dict[Node, Node | None] = {}
    for node in graph.nodes:
        if node.op_type not in ("Upsample", "Resize") or node.domain:
            continue
        given = node.attrs.get("scales") if graph.opset() < 9 else graph.arrays.get(node.inputs[1])
        if given is None or (scales := np.asarray(given, np.float32)).min(initial=1) < 1:
            continue  # not known, or smaller, of which opset 10 does not say where values come from
        roi, name = fresh(f"{node.label}_roi", taken), fresh(f"{node.label}_scales", taken)
        arrays |= {roi: np.zeros(0, np.float32), name: scales}
        attrs = {"mode": node.attrs.get("mode", "nearest"), "coordinate_transformation_mode": "asymmetric"}
        attrs |= {"nearest_mode": "floor"} if attrs["mode"] == "nearest" else {}
        nodes[node] = Node("Resize", (node.inputs[0], roi, name), node.outputs, attrs, node.name, _ASIDE)
    return graph.edit(nodes, arrays).replace(opsets={**graph.opsets, _ASIDE: 1}) if nodes else graph
