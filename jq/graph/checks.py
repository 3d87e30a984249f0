"""Checks of a model file, which is untrusted input, against ONNX's own definitions of its operators."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

from onnx import AttributeProto, GraphProto, NodeProto

from jq.errors import ModelError
from jq.graph.schemas import every_schema, schema, schema_versions

_KINDS = {kind: name for name, kind in AttributeProto.AttributeType.items()}
# Of vendors' operators, whose schemas onnx does not have, those attributes that no operator of ONNX has.
_VENDORS = {
    "pos": "INT", "bit_width": "INT", "opset": "INT", "channels_last": "INT", "element_dtype": "STRING",
    "bfp_method": "STRING", "sub_block_size": "INT", "sub_block_shift_bits": "INT", "convert_to_bfloat_before_bfp": "INT",
    "use_compiler_version_cpu_kernel": "INT", "rounding_mode": "INT",
}  # fmt: skip
# Attributes that ONNX defines for 0 and 1 alone: of another number each runtime makes what it likes.
_SWITCHES = frozenset((
    "align_corners", "allowzero", "antialias", "broadcast", "ceil_mode", "center_point_box", "count_include_pad",
    "exclude_outside", "exclusive", "fmod", "inverse", "is_causal", "keepdims", "largest", "layout", "linear_before_reset",
    "new_axis", "noop_with_empty_axes", "onesided", "output_sequence", "periodic", "reverse", "saturate", "select_last_index",
    "sorted", "storage_order", "training_mode", "transA", "transB", "upper",
))  # fmt: skip


def check_names(graph: GraphProto) -> None:
    """Raise a ModelError for a name that is no UTF-8, and for an operator's that cannot be printed."""
    values = (*graph.input, *graph.output, *graph.value_info)
    names = itertools.chain(
        [graph.name],
        *((n.name, n.op_type, n.domain, *n.input, *n.output, *(a.name for a in n.attribute)) for n in graph.node),
        *((v.name, *(d.dim_param for d in v.type.tensor_type.shape.dim)) for v in values),
        (t.name for t in graph.initializer),
        (t.values.name for t in graph.sparse_initializer),
    )
    check_text("name", names)
    for node in graph.node:
        if not f"{node.domain}{node.op_type}".isprintable():
            operator = f"the operator {node.op_type!r} of {node.domain!r}"
            raise ModelError(f"node {node.name!r} has {operator}; the file is damaged")


def check_text(kind: str, texts: itertools.chain[str] | list[str]) -> None:
    """Raise a ModelError for a text that is no UTF-8, which protobuf gives as bytes."""
    if (odd := next((text for text in texts if isinstance(text, bytes)), None)) is not None:
        raise ModelError(f"the {kind} {odd!r} is not UTF-8; the file is damaged")


def check_node(node: NodeProto, opset: int) -> None:
    """Raise a ModelError for operands or attributes that the operator does not have, so that no later code has to check."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    _check_attributes(node, domain, opset)
    definition = schema(node.op_type, domain, opset)
    if definition is None:  # a custom operator, or one of a vendor
        return
    limits = (definition.min_input, definition.max_input), (0, definition.max_output)  # outputs may be left unnamed
    for names, (least, most), kind in ((node.input, limits[0], "inputs"), (node.output, limits[1], "outputs")):
        count = max((i + 1 for i, name in enumerate(names) if name), default=0)  # trailing ones may be left empty
        if not least <= max(count, min(len(names), least)) <= most:
            expected = str(least) if least == most else f"at most {most}" if len(names) > most else f"at least {least}"
            raise ModelError(f"{_where(node, opset)} has {len(names)} {kind}; the operator has {expected}")


def _check_attributes(node: NodeProto, domain: str, opset: int) -> None:
    kinds = _attribute_kinds(node.op_type, domain, opset)
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            raise ModelError(
                f"{_where(node, opset)}: attribute {attribute.name!r} refers to the attribute {attribute.ref_attr_name!r} of "
                "a function, but the node is not in a function"
            )
        expected, given = kinds.get(attribute.name), _KINDS.get(attribute.type, str(attribute.type))
        alike = {expected, "UNDEFINED"}
        if expected is not None and not schema_versions(node.op_type, domain):
            alike |= {expected.removesuffix("S"), f"{expected}S"}  # one or a list: that of others tells no vendor's
        if expected is not None and given not in alike:
            raise ModelError(
                f"{_where(node, opset)}: attribute {attribute.name!r} is of type {given}; expected {expected}"
            )
        if expected == "INT" and attribute.name in _SWITCHES and attribute.i not in (0, 1):
            raise ModelError(f"{_where(node, opset)}: attribute {attribute.name!r} is {attribute.i}; expected 0 or 1")


@functools.cache
def _attribute_kinds(op_type: str, domain: str, opset: int) -> Mapping[str, str]:
    """The types of attributes by name: of this version of the operator, else of any; else of any operator."""
    versions = schema_versions(op_type, domain)
    if not versions:
        return _usual_kinds()
    known = {name: a.type.name for version in versions for name, a in version.attributes.items()}
    definition = schema(op_type, domain, opset)
    return known | {name: a.type.name for name, a in (definition.attributes if definition else {}).items()}


@functools.cache
def _usual_kinds() -> Mapping[str, str]:
    """The types of those attributes that are of one type in all operators that have them."""
    kinds: dict[str, set[str]] = {}
    for definition in every_schema():
        for name, attribute in definition.attributes.items():
            kinds.setdefault(name, set()).add(attribute.type.name)
    return {name: next(iter(kind)) for name, kind in kinds.items() if len(kind) == 1} | _VENDORS


def _where(node: NodeProto, opset: int) -> str:
    label = node.name or next((o for o in node.output if o), "?")
    qualified = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    return f"node {label!r} ({qualified}, opset {opset})"
