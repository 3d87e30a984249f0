"""A Pad as numbers: how much it adds at each end of each axis, and of what."""

from __future__ import annotations

import dataclasses

import numpy as np

from jq.graph import Graph, Node
from jq.graph.schemas import schema


@dataclasses.dataclass(frozen=True)
class Padding:
    """The elements that a Pad adds in front and behind, for each axis; `value` is what a constant one adds."""

    mode: str
    front: tuple[int, ...]
    behind: tuple[int, ...]
    value: float

    @property
    def zeros_around(self) -> tuple[int, ...] | None:
        """The pads of the spatial axes, as a Conv has them, of a Pad that puts zeros there and nowhere else."""
        pads = (*self.front, *self.behind)
        if self.mode != "constant" or self.value or len(self.front) < 3 or min(pads) < 0:
            return None
        return None if any(self.front[:2]) or any(self.behind[:2]) else (*self.front[2:], *self.behind[2:])


def padding(graph: Graph, node: Node) -> Padding | None:
    """Return the pads of all axes of a Pad; None for another operator, or if a pad is computed."""
    if node.op_type != "Pad" or node.domain:
        return None
    names = [i.name for i in definition.inputs] if (definition := schema("Pad", "", graph.opset())) else []
    given = {name: graph.arrays.get(i) for name, i in zip(names, node.inputs, strict=False) if i and name != "data"}
    if "axes" in given or any(v is None for v in given.values()):
        return None
    value = given.get("constant_value", np.asarray(node.attrs.get("value", 0.0)))
    pads = given.get("pads", np.asarray(node.attrs.get("pads", node.attrs.get("paddings", ()))))
    if value is None or value.size != 1 or pads is None or pads.ndim != 1 or not pads.size or pads.size % 2:
        return None
    front, behind = (tuple(map(int, part)) for part in np.split(pads, 2))
    return Padding(node.attrs.get("mode", "constant"), front, behind, float(value.reshape(())))
