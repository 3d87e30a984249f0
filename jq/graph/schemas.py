"""ONNX's own definitions of its operators: schemas, and the defaults of attributes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import helper

from jq.graph.model import Graph, Node


@functools.cache
def _all_schemas() -> dict[tuple[str, str], list[onnx.defs.OpSchema]]:
    schemas: dict[tuple[str, str], list[onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        schemas.setdefault((schema.domain, schema.name), []).append(schema)
    for versions in schemas.values():
        versions.sort(key=lambda s: s.since_version)
    return schemas


def every_schema() -> Iterator[onnx.defs.OpSchema]:
    """All versions of all operators."""
    for versions in _all_schemas().values():
        yield from versions


def schema_versions(name: str, domain: str) -> list[onnx.defs.OpSchema]:
    """All versions of an operator's definition, oldest first; none for custom operators."""
    return _all_schemas().get((domain, name), [])


@functools.cache
def schema(name: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """ONNX's definition of an operator at an opset; None for custom operators."""
    versions = [s for s in schema_versions(name, domain) if s.since_version <= opset]
    return versions[-1] if versions else None


@functools.cache
def defaults(name: str, domain: str, opset: int) -> Mapping[str, Any]:
    """The attribute defaults that ONNX states for an operator at an opset."""
    definition = schema(name, domain, opset)
    if definition is None:
        return {}
    values = {}
    for key, attribute in definition.attributes.items():
        if attribute.default_value.type:
            value = helper.get_attribute_value(attribute.default_value)
            many = isinstance(value, Sequence) and not isinstance(value, bytes)
            values[key] = tuple(map(_text, value)) if many else _text(value)
    return values


def attributes(graph: Graph, node: Node) -> Mapping[str, Any]:
    """A node's attributes, with ONNX's defaults for those that it leaves out."""
    return {**defaults(node.op_type, node.domain, graph.opset(node.domain)), **node.attrs}


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
