"""GroupNormalization as exporters write it: groups become the channels of an InstanceNormalization, and come back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jq.graph import Graph, Node
from jq.graph.schemas import attributes
from jq.npu.rewrites.edits import Applies, everywhere
from jq.passes.canonical.factors import by_channel, factor_of
from jq.passes.canonical.forms import Match, Names, Written
from jq.passes.canonical.regions import Region


def group_norms(graph: Graph, applies: Applies = everywhere) -> Iterator[Match]:
    """The regions of a Reshape, an InstanceNormalization, a Reshape, and the scales and shifts of channels after them."""
    for norm in graph.nodes:
        if norm.op_type != "InstanceNormalization" or norm.domain or not _is_of_groups(graph, norm):
            continue
        held = [graph.params.get(i) for i in norm.inputs[1:3]]
        before, after = graph.producer[norm.inputs[0]], graph.consumers[norm.outputs[0]][0]
        channels, nodes = _shape(graph, before.inputs[0])[1], [before, norm, after]
        if not isinstance(channels, int) or any(a is None or a.size == 0 or channels % a.size for a in held):
            continue
        scale, bias = (np.repeat(a.astype(np.float64), channels // a.size) for a in held if a is not None)
        while (reader := graph.sole_reader(nodes[-1].outputs[0])) and (factor := factor_of(graph, reader)):
            scales, shifts = (by_channel(a, 1, channels) for a in (factor.scale, factor.shift))
            if scales is None or shifts is None:
                break
            scale, bias = scale * scales, bias * scales + shifts
            nodes.append(reader)
        region = Region(graph, before.inputs[0], tuple(nodes))
        if all(map(applies, nodes[:-1])):
            yield Match("group_norm", 21, region, functools.partial(_written, region, norm, scale, bias))


def _is_of_groups(graph: Graph, norm: Node) -> bool:
    """Whether a normalization stands between Reshapes from an image to groups of its channels, and back."""
    before, after = graph.producer.get(norm.inputs[0]), graph.sole_reader(norm.outputs[0])
    if (
        before is None
        or after is None
        or {before.op_type, after.op_type} != {"Reshape"}
        or before.domain
        or after.domain
    ):
        return False
    image, groups, back = (_shape(graph, t) for t in (before.inputs[0], norm.inputs[0], after.outputs[0]))
    target, shape = graph.arrays.get(before.inputs[1]), graph.producer.get(after.inputs[1])
    restored = shape is not None and shape.op_type == "Shape" and shape.inputs == before.inputs[:1] and not shape.attrs
    kept = len(groups) > 2 and groups[0] is not None and groups[0] == image[0]
    copied = (
        target is not None
        and target.ndim == 1
        and target.size > 2
        and target[0] == 0
        and not before.attrs.get("allowzero")
    )
    same = len(image) > 2 and (restored or (image == back and None not in image))
    return same and (kept or copied) and graph.sole_reader(norm.inputs[0]) is norm


def _shape(graph: Graph, name: str) -> tuple[Any, ...]:
    value = graph.values.get(name)
    return () if value is None or value.shape is None or value.dtype != np.float32 else value.shape


def _written(region: Region, norm: Node, scale: np.ndarray, bias: np.ndarray, name: Names) -> Written:
    arrays = {name("scale"): scale.astype(np.float32), name("bias"): bias.astype(np.float32)}
    groups = region.graph.params[norm.inputs[1]].size
    attrs = {"num_groups": groups, "epsilon": attributes(region.graph, norm)["epsilon"]}
    node = Node("GroupNormalization", (region.source, *arrays), region.end.outputs, attrs, region.end.name)
    return [node], arrays
