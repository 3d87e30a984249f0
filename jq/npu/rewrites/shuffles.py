"""Channel shuffles, which exporters write as Reshape, Transpose and Reshape through five dims: the NPU has four.

A shuffle is a permutation of channels. Where a neighbour's weights can be reordered it costs nothing; elsewhere it is a
1x1 convolution whose weight is a permutation matrix: sums of one value and zeros, exact in float and in integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import bypass, fresh
from jq.graph.unused import remove_unused
from jq.npu.rewrites.edits import Applies, candidates, everywhere
from jq.ops.kinds import is_conv, keeps_channels

_Arrays = Mapping[Node, Mapping[int, np.ndarray]]  # other arrays at the inputs of nodes


@dataclasses.dataclass(frozen=True, eq=False)
class Shuffle:
    """The three nodes of a shuffle, and its order: channel j of what it makes is channel `order[j]` of what it reads."""

    before: Node
    transpose: Node
    after: Node
    order: np.ndarray

    @property
    def x(self) -> str:
        """The tensor that it reads."""
        return self.before.inputs[0]

    @property
    def y(self) -> str:
        """The tensor that it makes."""
        return self.after.outputs[0]


def shuffle_to_weights(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph without the shuffles that reordered weights of a neighbour stand for.

    The layer in front makes its channels in the order that is wanted, or all layers behind read them in the order that
    there is; activations, pools and depthwise layers between are passed. Sums keep their order only in front.
    """
    tried = ((s, _made_in_order(graph, s) or _read_in_order(graph, s)) for s in _shuffles(graph, applies))
    shuffle, arrays = next(((s, a) for s, a in tried if a is not None), (None, None))
    if shuffle is None or arrays is None:
        return graph
    ordered = remove_unused(bypass(_with_arrays(graph, arrays), {shuffle.y: shuffle.x}))
    return shuffle_to_weights(ordered, applies)  # one by one, as the next may change the same weights


def shuffle_to_conv(graph: Graph, applies: Applies = everywhere) -> Graph:
    """The graph with each shuffle as a 1x1 convolution that permutes channels."""
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for shuffle in _shuffles(graph, applies):
        weight = fresh(f"{shuffle.after.label}_permutation", taken)
        dtype = graph.values[shuffle.x].dtype
        arrays[weight] = np.eye(len(shuffle.order), dtype=dtype)[shuffle.order][:, :, None, None]
        attrs = {"kernel_shape": (1, 1), "strides": (1, 1)}
        conv = Node("Conv", (shuffle.x, weight), (shuffle.y,), attrs, name=shuffle.after.name)
        nodes |= {shuffle.before: None, shuffle.transpose: None, shuffle.after: conv}
    return remove_unused(graph.edit(nodes, arrays)) if nodes else graph


def _shuffles(graph: Graph, applies: Applies) -> Iterator[Shuffle]:
    for node in candidates(graph, applies, "Transpose"):
        before, after = graph.producer.get(node.inputs[0]), graph.sole_reader(node.outputs[0])
        ends = [n for n in (before, after) if n is not None and n.op_type == "Reshape" and not n.domain]
        if len(ends) == 2 and all(map(applies, ends)) and graph.sole_reader(node.inputs[0]) is node:
            order = _order(graph, node, ends[0].inputs[0], ends[1].outputs[0])
            if order is not None and ends[1].inputs[0] == node.outputs[0]:
                yield Shuffle(ends[0], node, ends[1], order)


def _order(graph: Graph, transpose: Node, x: str, y: str) -> np.ndarray | None:
    """The order of channels, where a Transpose of five dims swaps the two that an image's channels were taken apart to."""
    values = [graph.values.get(name) for name in (x, transpose.inputs[0], y)]
    read, parted, made = (None if v is None else v.shape for v in values)
    if read is None or parted is None or made is None or values[0] is None or values[0].dtype is None:
        return None
    ranks, perm = (len(read), len(parted), len(made)), tuple(transpose.attrs.get("perm", ()))
    if values[0].dtype.kind != "f" or ranks != (4, 5, 4) or perm != (0, 2, 1, 3, 4):
        return None
    groups, each = parted[1:3]
    if not isinstance(groups, int) or not isinstance(each, int) or read[1] != groups * each or made[1] != read[1]:
        return None
    sizes = (*read[2:], *parted[3:], *made[2:])
    alike = read[2:] == parted[3:] == made[2:] and not any(d is None for d in sizes)
    return np.arange(groups * each).reshape(groups, each).T.ravel() if alike else None


def _made_in_order(graph: Graph, shuffle: Shuffle) -> _Arrays | None:
    """The arrays with which the layer in front makes channels in the order of a shuffle; None where none can."""
    arrays: dict[Node, Mapping[int, np.ndarray]] = {}
    reader, name, order = shuffle.before, shuffle.x, shuffle.order
    while (node := graph.producer.get(name)) is not None and graph.sole_reader(name) is reader:
        if is_conv(node):
            constant = _constants(graph, node)
            depthwise = _is_depthwise(graph, node, len(order))
            if not constant or not (depthwise or node.attrs.get("group", 1) == 1):
                return None
            arrays[node] = {index: array[order] for index, array in constant.items()}
            if not depthwise:
                return arrays
        elif not _keeps_channels(graph, node):
            return None
        reader, name = node, node.inputs[0]
    return None


def _read_in_order(graph: Graph, shuffle: Shuffle) -> _Arrays | None:
    """The arrays with which all layers behind read channels in the order in front of a shuffle; None where one cannot."""
    arrays: dict[Node, Mapping[int, np.ndarray]] = {}
    inverse, waiting = np.argsort(shuffle.order), [shuffle.y]
    while waiting:
        name = waiting.pop()
        if name in graph.output_names:
            return None
        for node in graph.consumers.get(name, ()):
            if is_conv(node) and node.inputs[0] == name and (constant := _constants(graph, node)):
                if _is_depthwise(graph, node, len(inverse)):
                    arrays[node] = {index: array[inverse] for index, array in constant.items()}
                    waiting.append(node.outputs[0])
                elif node.attrs.get("group", 1) == 1:
                    arrays[node] = {1: constant[1][:, inverse]}
                else:
                    return None
            elif _keeps_channels(graph, node) and node.inputs[0] == name:
                waiting.append(node.outputs[0])
            else:
                return None
    return arrays or None


def _constants(graph: Graph, node: Node) -> dict[int, np.ndarray]:
    """The weight and the bias of a convolution by input; none where one is computed."""
    names = {index: name for index, name in enumerate(node.inputs) if index and name}
    return (
        {i: graph.params[name] for i, name in names.items()} if all(n in graph.params for n in names.values()) else {}
    )


def _is_depthwise(graph: Graph, node: Node, channels: int) -> bool:
    weight = graph.params.get(node.inputs[1])
    return weight is not None and weight.shape[:2] == (channels, 1) and node.attrs.get("group", 1) == channels > 1


def _keeps_channels(graph: Graph, node: Node) -> bool:
    """Whether a node makes each channel of one, by one rule for all, and nothing else."""
    others = [graph.arrays.get(name) for name in node.inputs[1:] if name]
    return keeps_channels(node) and len(node.outputs) == 1 and all(a is not None and a.size == 1 for a in others)


def _with_arrays(graph: Graph, arrays: _Arrays) -> Graph:
    """The graph with other arrays at some inputs of nodes; an array that others read too stays for them."""
    taken, nodes, added = set(graph.tensors), dict[Node, Node | None](), dict[str, np.ndarray]()
    for node, changed in arrays.items():
        inputs = list(node.inputs)
        for index, array in changed.items():
            if graph.sole_reader(inputs[index]) is None:
                inputs[index] = fresh(f"{node.label}_{inputs[index]}", taken)
            added[inputs[index]] = np.ascontiguousarray(array)
        nodes[node] = node.replace(inputs=tuple(inputs))
    return graph.edit(nodes, added)
