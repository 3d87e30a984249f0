"""Operators that ONNX itself defines by a body of simpler ones, for those without a rule here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, NodeProto, TypeProto, helper

from jq.errors import UnsupportedOp
from jq.graph import Graph, Node, read, write
from jq.graph.schemas import defaults, schema


def has_body(node: Node, opset: int) -> bool:
    """Whether ONNX defines this operator by a function body."""
    definition = schema(node.op_type, node.domain, opset)
    return definition is not None and (definition.has_function or definition.has_context_dependent_function)


def inline(node: Node, opset: int, types: Sequence[tuple[Any, tuple[int, ...]] | None]) -> Graph:
    """The body of a function operator as a graph, for inputs of these (dtype, shape)."""
    definition = schema(node.op_type, node.domain, opset)
    if definition is None or not has_body(node, opset):
        raise UnsupportedOp(f"no rule for {node.qualified} (opset {opset})")
    context_free, contextual = definition.function_opset_versions, definition.context_dependent_function_opset_versions
    versions = context_free if definition.has_function else contextual
    version = max(v for v in versions if v <= max(opset, min(versions)))
    if definition.has_function:
        body = definition.get_function_with_opset_version(version)
    else:
        protos = [_type(t).SerializeToString() for t in types]
        proto = write.node_proto(node).SerializeToString()
        body = definition.get_context_dependent_function_with_opset_version(version, proto, protos)
    return _graph(FunctionProto.FromString(body), dict(defaults(node.op_type, node.domain, opset)) | dict(node.attrs))


def _type(value: tuple[Any, tuple[int, ...]] | None) -> TypeProto:
    if value is None:
        return TypeProto()
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.dtype(value[0])), value[1])


def _graph(function: FunctionProto, attributes: Mapping[str, Any]) -> Graph:
    opsets = [onnx.OperatorSetIdProto(domain=o.domain, version=o.version) for o in function.opset_import]
    proto = GraphProto(name=function.name)
    proto.node.extend(_bound(node, attributes) for node in function.node)
    proto.input.extend(onnx.ValueInfoProto(name=n) for n in function.input)
    # A body may leave an optional output unmade: it has no name then, and no value.
    made = {o for node in function.node for o in node.output} | set(function.input)
    proto.output.extend(onnx.ValueInfoProto(name=n if n in made else "") for n in function.output)
    return read.load(helper.make_model(proto, opset_imports=opsets))


def _bound(node: NodeProto, attributes: Mapping[str, Any]) -> NodeProto:
    """A body's node with references to the function's attributes replaced by their values."""
    bound = NodeProto()
    bound.CopyFrom(node)
    del bound.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            value = attributes.get(attribute.ref_attr_name)
            if value is None:
                continue
            bound.attribute.append(write.attribute_proto(node.op_type, node.domain, attribute.name, value))
        elif attribute.HasField("g"):
            copy = bound.attribute.add()
            copy.CopyFrom(attribute)
            inner = [_bound(n, attributes) for n in attribute.g.node]
            del copy.g.node[:]
            copy.g.node.extend(inner)
        else:
            bound.attribute.append(attribute)
    return bound
