"""Where factors may go: which channels of which tensors share one, and which must stay as they are; and the graph
multiplied by them.

A positive factor of a channel passes through what is positively homogeneous, f(s x) = s f(x), and stops at layers,
whose weights take it in: those that make the channel are multiplied, those that read it divided. So the channels of
all tensors fall into classes with one factor each: the members of a residual sum are one class, the inputs of a
Concat each keep theirs. All else that touches a channel fixes its class at one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.schemas import attributes
from jq.graph.unused import remove_unused
from jq.ops.linear import linear_layer
from jq.passes.affine import is_float
from jq.util.mapped import is_finite, like, release

FIXED = 0  # the class of all channels that have no factor


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A node with a constant weight, seen as (outputs, inputs of each, kernel)."""

    node: Node
    weight: np.ndarray  # float32 [O, J, K]
    bias: np.ndarray | None  # float32 [O]
    reads: np.ndarray  # int [O or 1, J]: the channel of the input that an element of the weight multiplies
    turned: Callable[[np.ndarray], np.ndarray]  # the view of an array in the shape of the node's own weight

    @property
    def x(self) -> str:
        """The tensor that it reads."""
        return self.node.inputs[0]

    @property
    def y(self) -> str:
        """The tensor that it makes."""
        return self.node.outputs[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """Layers, and the class of every channel of every tensor that has channels."""

    layers: tuple[Layer, ...]
    channels: Mapping[str, np.ndarray]  # tensor -> classes [C], `FIXED` among them
    group: np.ndarray  # class -> group: classes that are of the same tensor
    clips: tuple[tuple[Node, float], ...]  # Clips from zero to a bound that factors pass

    @property
    def count(self) -> int:
        """The number of classes."""
        return len(self.group)


def find_groups(graph: Graph, *, clips: bool = True) -> Groups:
    """Return where factors may go in a prepared graph; past Clips from zero to a bound only with `clips`.

    A Clip lets factors through as long as its bound does not matter: a channel with the factor s is cut at bound / s.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> groups = find_groups(graph)
    >>> len(groups.layers), groups.channels["input"]
    (16, array([0]))
    """
    finder = _Finder(graph, clips)
    for node in graph.nodes:
        finder.visit(node)
    return finder.result()


class _Finder:
    """Collects ties between channels; each channel of each tensor begins as a class of its own."""

    def __init__(self, graph: Graph, through_clips: bool) -> None:
        self.graph = graph
        self.through_clips = through_clips
        self.channels: dict[str, np.ndarray] = {}
        self.ties: list[tuple[np.ndarray, np.ndarray]] = []
        self.layers: list[Layer] = []
        self.clips: list[tuple[Node, float]] = []
        self.total = 1
        interface = (*graph.inputs, *graph.outputs)
        made = (o for n in graph.nodes for o in n.outputs if o)
        for name in dict.fromkeys((*(v.name for v in interface), *made)):
            value = graph.values.get(name)
            if name in graph.arrays or value is None or value.shape is None or len(value.shape) < 2:
                continue
            count = value.shape[1]
            if value.dtype in (np.float32, np.float16, np.float64) and isinstance(count, int) and 0 < count <= _MANY:
                self.channels[name] = np.arange(self.total, self.total + count)
                self.total += count
        for value in interface:
            self.fix(value.name)

    def fix(self, *names: str) -> None:
        """No factors for these tensors."""
        for name in names:
            if name in self.channels:
                self.ties.append((self.channels[name], np.zeros_like(self.channels[name])))

    def tie(self, a: str, b: str, repeat: int = 1) -> bool:
        """The same factors for both tensors; of `repeat` channels of b for each one of a."""
        left, right = self.channels.get(a), self.channels.get(b)
        if left is None or right is None or len(left) * repeat != len(right):
            return False
        self.ties.append((np.repeat(left, repeat), right))
        return True

    def visit(self, node: Node) -> None:
        layer = layer_of(self.graph, node)
        if layer is not None and layer.x in self.channels and layer.y in self.channels:
            counts = len(self.channels[layer.x]), len(self.channels[layer.y])
            if layer.reads.max() < counts[0] and len(layer.weight) == counts[1]:
                order = _permutation(layer)
                if order is None:
                    self.layers.append(layer)
                else:  # exact as it is
                    self.ties.append((self.channels[layer.x][order], self.channels[layer.y]))
                return
        if node.domain or node.subgraphs or not self._passes(node):
            self.fix(*node.reads(), *node.outputs)

    def _passes(self, node: Node) -> bool:
        """Whether factors of what the node reads are factors of what it makes; ties them if so."""
        graph, inputs, outputs = self.graph, node.inputs, [o for o in node.outputs if o]
        if not inputs:
            return True
        x, y = inputs[0], outputs[0]
        if any(i in self.channels for i in inputs[1:]) and node.op_type not in ("Add", "Sub", "Sum", "Concat"):
            return False
        match node.op_type:
            case "Clip":
                bound = upper_bound(graph, node) if self.through_clips and graph.sole_reader(x) is node else None
                if passes := bound is not None and self.tie(x, y):
                    self.clips.append((node, bound))
                return passes
            case "Split":
                return self._split(node)
            case "Concat":
                return self._concat(node)
            case "Add" | "Sub" | "Sum":
                shapes = {_rank(graph, i) for i in inputs}
                return len(shapes) == 1 and all(self.tie(i, y) for i in inputs)
        if len(outputs) != 1 or not _is_homogeneous(graph, node):
            return False
        return self.tie(x, y, _repeats(graph, node))

    def _concat(self, node: Node) -> bool:
        y = self.channels.get(node.outputs[0])
        rank = _rank(self.graph, node.outputs[0])
        if y is None or attributes(self.graph, node).get("axis", 1) % (rank or 1) != 1:
            return False
        parts = [self.channels.get(i) for i in node.inputs]
        shapes = [_shape(self.graph, i) or () for i in node.inputs]
        counts = [s[1] for s in shapes if len(s) > 1 and isinstance(s[1], int)]
        if len(counts) < len(parts) or sum(counts) != len(y):
            return False
        for part, count, end in zip(parts, counts, np.cumsum(counts), strict=True):
            if count:  # of an array, the factors are fixed
                own = y[end - count : end]
                self.ties.append((own, np.zeros_like(own) if part is None else part))
        return True

    def _split(self, node: Node) -> bool:
        x, rank = self.channels.get(node.inputs[0]), _rank(self.graph, node.inputs[0])
        parts = [self.channels[o] for o in node.outputs if o in self.channels]
        joined = np.concatenate(parts or [np.zeros(0, np.int64)])
        if (
            x is None
            or attributes(self.graph, node).get("axis", 0) % (rank or 1) != 1
            or len(parts) < len(node.outputs)
        ):
            return False
        if len(joined) == len(x):
            self.ties.append((joined, x))
        return len(joined) == len(x)

    def result(self) -> Groups:
        """The classes, numbered anew in the order in which the graph makes them."""
        a, b = (np.concatenate([t[i] for t in self.ties] or [np.zeros(0, np.int64)]) for i in (0, 1))
        root = _components(self.total, a, b)
        kept, number = np.unique(root, return_inverse=True)
        channels = {k: number[v] for k, v in self.channels.items()}
        group = np.full(len(kept), -1)
        group[FIXED] = FIXED
        for index, classes in enumerate(channels.values()):
            new = classes[group[classes] < 0]
            group[new] = index + 1
        _, group = np.unique(group, return_inverse=True)
        return Groups(tuple(self.layers), channels, group, tuple(self.clips))


def _components(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The least member of the connected component of each number."""
    root = np.arange(count)
    while True:
        least = np.minimum(root[a], root[b])
        before = root.copy()
        np.minimum.at(root, a, least)
        np.minimum.at(root, b, least)
        np.minimum.at(root, before, root)  # what it was tied to goes along
        root = root[root]
        if np.array_equal(root, before):
            return root


def layer_of(graph: Graph, node: Node) -> Layer | None:
    """The node as a layer, or None where its arrays are not constant or not of a value per channel."""
    linear = linear_layer(graph, node)
    if linear is None or node.attrs.get("transA", 0):
        return None
    weight, name = graph.params[linear.weight], node.inputs[2] if len(node.inputs) > 2 else ""
    bias, by_output = graph.params.get(name), linear.unfolded(weight)
    if by_output is None or not is_float(weight.dtype) or (name and bias is None):
        return None
    if weight.ndim == 2 and _rank(graph, node.inputs[0]) != 2:
        return None
    outputs = len(by_output.weight)
    if bias is not None and (bias.size not in (1, outputs) or (bias.size > 1 and bias.shape[-1] != outputs)):
        return None
    flat = None if bias is None else np.broadcast_to(bias.reshape(-1), outputs).astype(np.float32)
    return Layer(node, by_output.weight.astype(np.float32, copy=False), flat, by_output.reads, by_output.folded)


def _permutation(layer: Layer) -> np.ndarray | None:
    """The channels that a layer reads, in the order in which it makes them, if that is all that it does."""
    outputs, inputs, kernel = layer.weight.shape
    if outputs != inputs or kernel != 1 or layer.bias is not None or outputs == 1 or len(layer.reads) != 1:
        return None
    matrix = layer.weight[:, :, 0]
    order = matrix.argmax(1)
    release(matrix)
    permutes = np.array_equal(np.sort(order), np.arange(inputs)) and np.array_equal(matrix, np.eye(inputs)[order])
    return order if permutes else None


def scaled(graph: Graph, groups: Groups, factors: np.ndarray) -> Graph:
    """Return the graph with every channel multiplied by the factor of its class, and its readers' weights divided.

    Factors that are powers of two change no output by a bit. The graph itself if an array would not be finite.
    """
    changed: dict[Node, dict[int, np.ndarray]] = {}
    for layer in groups.layers:
        up, down = factors[groups.channels[layer.y]], factors[groups.channels[layer.x][layer.reads]]
        weight = graph.params[layer.node.inputs[1]]
        factor = np.broadcast_to((up[:, None] / down)[:, :, None], layer.weight.shape)
        with np.errstate(over="ignore"):
            made = (weight * layer.turned(factor)).astype(weight.dtype, copy=False)
        arrays = {1: like(made, weight)}
        if layer.bias is not None:
            bias = graph.params[layer.node.inputs[2]]
            with np.errstate(over="ignore"):
                own = (np.broadcast_to(bias.reshape(-1), up.shape) * up).astype(bias.dtype)
            own = own[:1] if (own == own[0]).all() and bias.size == 1 else own  # one number for all channels stays one
            arrays[2] = own.reshape(bias.shape) if bias.size == own.size else own
        if not all(map(is_finite, arrays.values())):
            return graph
        changed[layer.node] = arrays
        release(weight)
        release(arrays[1])
    return rewritten(graph, changed)


def rewritten(graph: Graph, arrays: Mapping[Node, Mapping[int, np.ndarray | None]]) -> Graph:
    """Return the graph with other arrays at these inputs of these nodes; an array that others read too is not touched."""
    taken = set(graph.tensors)
    nodes: dict[Node, Node | None] = {}
    changed: dict[str, np.ndarray] = {}
    for node, of_node in arrays.items():
        inputs = list(node.inputs)
        for index, array in of_node.items():
            if array is None or np.array_equal(array, graph.params[inputs[index]]):
                continue
            release(array)
            release(graph.params[inputs[index]])
            if graph.sole_reader(inputs[index]) is None:
                inputs[index] = fresh(f"{node.label}.{inputs[index]}", taken)
            changed[inputs[index]] = array
        nodes[node] = node.replace(inputs=tuple(inputs))
    return remove_unused(graph.edit(nodes, changed)) if changed else graph


_MANY = 1 << 20  # channels of a tensor: more are an axis of something else
_HOMOGENEOUS = frozenset({
    "Relu", "LeakyRelu", "PRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Identity", "Dropout",
    "Pad", "ReduceMean", "ReduceMax", "ReduceSum", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Resize", "Upsample",
})  # fmt: skip


def _is_homogeneous(graph: Graph, node: Node) -> bool:
    """Whether f(s x) = s f(x) for any positive factors of the channels, apart from how they are laid out."""
    if node.op_type not in _HOMOGENEOUS:
        return False
    if node.op_type == "Pad":
        rank = _rank(graph, node.inputs[0])
        padded = None if rank is None else padded_axes(graph, node, rank)
        return padded is not None and padded.isdisjoint((0, 1)) and pads_homogeneously(graph, node)
    if node.op_type == "Resize":  # where what lies outside has a value of its own
        return node.attrs.get("coordinate_transformation_mode") != "tf_crop_and_resize"
    return True


def pads_homogeneously(graph: Graph, node: Node) -> bool:
    """Whether a Pad puts zeros, or values of its input, around it."""
    value = graph.arrays.get(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else node.attrs.get("value", 0)
    return node.attrs.get("mode", "constant") != "constant" or (value is not None and not np.any(value))


def padded_axes(graph: Graph, node: Node, rank: int) -> set[int] | None:
    """The axes that a Pad makes longer or shorter; None if they are not known."""
    pads, axes = known_ints(graph, node, "pads"), known_ints(graph, node, "axes", 3)
    if pads is None or (axes is None and len(node.inputs) > 3 and node.inputs[3]):
        return None
    places = list(range(rank)) if axes is None else [a % rank for a in axes]
    return {axis for axis, pad in zip(places * 2, pads, strict=False) if pad}


def _repeats(graph: Graph, node: Node) -> int:
    """How many channels of the output, one after the other, hold what is one of the input; 0 if it is not so."""
    before, after = _shape(graph, node.inputs[0]), _shape(graph, node.outputs[0])
    if before is None or after is None or min(len(before), len(after)) < 2:
        return 0
    if node.op_type in ("ReduceMean", "ReduceMax", "ReduceSum"):
        if (given := known_ints(graph, node, "axes")) is None:
            return 0
        axes, kept = {a % len(before) for a in given}, len(after) == len(before)
        spatial = axes == set(range(2, len(before))) or (kept and axes.isdisjoint((0, 1)))
        return int(spatial and before[1] == after[1])
    if node.op_type in ("Flatten", "Reshape", "Squeeze", "Unsqueeze"):
        if node.op_type == "Flatten" and attributes(graph, node).get("axis", 1) != 1:
            return 0
        if not all(isinstance(d, int) for d in (*before[1:], *after[1:])):
            return 0
        size, channels = math.prod(map(int, before[1:])), int(before[1])  # type: ignore[arg-type]
        if math.prod(map(int, after[1:])) != size:  # type: ignore[arg-type]
            return 0
        if after[1] == channels:
            return 1
        return size // channels if len(after) == 2 or all(d == 1 for d in after[2:]) else 0
    if node.op_type == "PRelu":
        return int(node.inputs[1] in graph.arrays)
    return int(before[:2] == after[:2] and len(before) == len(after))


def upper_bound(graph: Graph, node: Node) -> float | None:
    """The upper bound of a Clip from zero, or None."""
    low, high = (node.attrs.get(k) for k in ("min", "max"))
    if len(node.inputs) > 1 or (low is None and high is None):
        arrays = [graph.arrays.get(i) for i in node.inputs[1:]]
        if len(arrays) != 2 or any(a is None or a.size != 1 for a in arrays):
            return None
        low, high = (float(a.reshape(())) for a in arrays if a is not None)
    if low is None or high is None or float(low) != 0 or not 0 < float(high) < np.inf:
        return None
    return float(high)


def known_ints(graph: Graph, node: Node, attribute: str, index: int = 1) -> Sequence[int] | None:
    """Numbers that are an attribute in old operator sets and a constant input in new ones."""
    if attribute in node.attrs:
        return [int(i) for i in node.attrs[attribute]]
    name = node.inputs[index] if index < len(node.inputs) else ""
    return [int(i) for i in graph.constants[name].reshape(-1)] if name in graph.constants else None


def _shape(graph: Graph, name: str) -> tuple[int | str | None, ...] | None:
    value = graph.values.get(name)
    return None if value is None else value.shape


def _rank(graph: Graph, name: str) -> int | None:
    shape = _shape(graph, name)
    return None if shape is None else len(shape)
