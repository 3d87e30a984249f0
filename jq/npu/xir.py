"""Operators in the settings that X1's compiler takes: those that become one of XIR's; others stay on the CPU.

Source: zmaychek84/vaip, vaip_pass_to_xir_ops, of 2024-11: facts read in the provider's published sources.
"""

from __future__ import annotations

from jq.graph import Graph, Node
from jq.graph.schemas import attributes
from jq.npu.facts import NPU_RANK
from jq.ops.kinds import is_clip, is_resize, is_transposed_conv

_COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
_OF_NEAREST = (*_COORDINATES, "tf_half_pixel_for_nn")


def becomes_xir(graph: Graph, node: Node) -> bool:
    """Whether X1's compiler has an operator for a node with these attributes, operands and outputs."""
    if sum(map(bool, node.outputs)) > 1:
        return False
    attrs = attributes(graph, node)
    if is_clip(node):
        return all(k in node.attrs for k in ("min", "max")) or (len(node.inputs) > 2 and all(node.inputs[1:3]))
    if is_transposed_conv(node):
        return not any(attrs.get("output_padding", ()))
    if not is_resize(node):
        return True
    known = {"nearest": _OF_NEAREST, "linear": _COORDINATES}.get(attrs["mode"], ())
    value = graph.values.get(node.inputs[0])
    rank = len(value.shape) if value is not None and value.shape is not None else NPU_RANK
    return attrs.get("coordinate_transformation_mode", "asymmetric") in known and rank == NPU_RANK
