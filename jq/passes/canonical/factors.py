"""Scales and shifts by constants go into the weights and biases of the linear operators around them.

`jq.passes.affine` does so right behind Conv and Gemm. Here a scale also goes forward, into all that read it, and back
through a product with other activations into the projection that one of them comes from; on its way, through operators
that commute with it. A shift goes forward too; zeros around an image, which it would not reach, become a Pad of the
number that stands for zero before the shift.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import bypass, fresh, rename
from jq.npu.rewrites.edits import Applies, everywhere, substitute
from jq.ops.linear import linear_layer
from jq.passes.affine import LINEAR, absorb, is_float, own_name

_ROUNDS = 20  # a chain of scales and shifts is a few nodes long
_MOVES = frozenset({"Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_AVERAGES = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"})
_ORDERED = frozenset({"GlobalMaxPool", "LeakyRelu", "MaxPool", "Relu"})  # commute with positive factors
_BY_CHANNEL = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LeakyRelu", "MaxPool", "Relu"})


@dataclasses.dataclass(frozen=True, eq=False)
class Edits:
    """Nodes with what they become, new arrays, and new names for tensors that hold other values then."""

    nodes: Mapping[Node, Sequence[Node]]
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __or__(self, other: Edits) -> Edits:
        return Edits({**self.nodes, **other.nodes}, {**self.arrays, **other.arrays}, {**self.names, **other.names})


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """An elementwise node with a constant, scale * source + shift, whose result has the shape of its source."""

    node: Node
    source: str
    scale: np.ndarray
    shift: np.ndarray


def fold_factors(graph: Graph, applies: Applies = everywhere) -> tuple[Graph, tuple[Node, ...]]:
    """The graph with scales and shifts by constants folded into linear operators, and the nodes that these were."""
    folded, chosen = list[Node](), {n.label for n in graph.nodes if applies(n)}  # labels stay, tensors are renamed
    for _ in range(_ROUNDS):
        edits, gone = _edits(graph, lambda node: node.label in chosen)
        if not gone:
            break
        folded += gone
        graph = bypass(
            substitute(graph, edits.nodes, edits.arrays), {node.outputs[0]: source for node, source in gone.items()}
        )
        graph = rename(graph, edits.names)
    return graph, tuple(folded)


def _edits(graph: Graph, applies: Applies) -> tuple[Edits, dict[Node, str]]:
    """The edits of one sweep, and the nodes that they make superfluous, each with what it read."""
    taken, touched = set(graph.tensors), set[Node]()
    every, gone = Edits({}), dict[Node, str]()
    for node in graph.nodes:
        if not applies(node) or (factor := factor_of(graph, node)) is None:
            continue
        edits = _forward(graph, factor, taken) or _back(graph, factor, taken)
        if edits is None or not touched.isdisjoint((node, *edits.nodes)):
            continue
        if all(np.isfinite(a).all() for a in edits.arrays.values()):
            touched.update((node, *edits.nodes))
            every |= edits
            gone[node] = factor.source
    return every, gone


def factor_of(graph: Graph, node: Node) -> Factor | None:
    """A node as a scale and a shift by constants; None if it is neither."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or node.domain or graph.opset() < 7 or len(node.inputs) != 2:
        return None
    first = node.inputs[1] in graph.params
    source, name = node.inputs if first else node.inputs[::-1]
    constant, value = graph.params.get(name), graph.values.get(source)
    if constant is None or source in graph.arrays or value is None or not value.shape or constant.dtype != np.float32:
        return None
    aligned = (1,) * (len(value.shape) - constant.ndim) + constant.shape
    if value.dtype != constant.dtype or any(n not in (1, d) for n, d in zip(aligned, value.shape, strict=False)):
        return None
    if len(aligned) > len(value.shape) or not np.isfinite(held := constant.reshape(aligned).astype(np.float64)).all():
        return None
    one, zero = np.ones_like(held), np.zeros_like(held)
    match node.op_type:
        case "Add":
            return Factor(node, source, one, held)
        case "Sub":
            return Factor(node, source, one, -held) if first else Factor(node, source, -one, held)
        case "Mul":
            return Factor(node, source, held, zero) if held.all() else None
    return Factor(node, source, 1 / held, zero) if first and held.all() else None


# --- Forward ---


def _forward(graph: Graph, factor: Factor, taken: set[str]) -> Edits | None:
    """The edits by which all readers take a factor in; None if one cannot."""
    tensor, scale, edits = factor.node.outputs[0], factor.scale, Edits({})
    while not factor.shift.any() and (reader := graph.sole_reader(tensor)) and reader.inputs[0] == tensor:
        if (passed := _passed(graph, reader, tensor, 1 / scale, taken)) is None:
            break
        tensor, scale = reader.outputs[0], scale.reshape(()) if scale.size == 1 else scale
        edits |= passed
        edits |= Edits({}, {}, {tensor: fresh(f"{tensor}_unscaled", taken)})
    readers = graph.consumers.get(tensor, ())
    if not readers or tensor in graph.output_names:
        return None
    for reader in readers:
        if (taken_in := _taken_in(graph, reader, tensor, scale, factor.shift, taken)) is None:
            return None
        edits |= taken_in
    return edits


def _passed(graph: Graph, node: Node, tensor: str, scale: np.ndarray, taken: set[str]) -> Edits | None:
    """The edits by which a node's output is scaled as a tensor that it reads; None where that is not exact."""
    added = factor_of(graph, node)
    if (
        added is not None
        and added.source == tensor
        and added.shift.any()
        and (added.scale == 1).all()
        and scale.size == 1
    ):
        name = fresh(f"{node.label}.shift", taken)
        summed = node.replace(op_type="Add", inputs=(tensor, name), name=node.label)
        return Edits({node: [summed]}, {name: (added.shift * scale).astype(np.float32)})
    commutes = node.op_type in (_MOVES | _AVERAGES | _ORDERED if scale.size == 1 else _BY_CHANNEL) and not node.domain
    if commutes and (node.op_type not in _ORDERED or bool((scale > 0).all())):
        return Edits({node: [node.replace(name=node.label)]})
    return None


def _taken_in(
    graph: Graph, node: Node, tensor: str, scale: np.ndarray, shift: np.ndarray, taken: set[str]
) -> Edits | None:
    """The edits by which a linear operator reads the tensor as it was before a scale and a shift."""
    layer = linear_layer(graph, node)
    if layer is None or node.inputs[0] != tensor or node.inputs.count(tensor) > 1 or node.attrs.get("transA"):
        return None
    weight = graph.params[layer.weight]
    unfolded = layer.unfolded(weight) if is_float(weight.dtype) else None
    if unfolded is None or node.op_type not in (*LINEAR, "MatMul"):
        return None
    channels, axis = int(unfolded.reads.max()) + 1, -1 if node.op_type in ("Gemm", "MatMul") else 1
    scales, shifts = (by_channel(a, axis, channels) for a in (scale, shift))
    if scales is None or shifts is None:
        return None
    factors = np.broadcast_to(scales[unfolded.reads][:, :, None], unfolded.weight.shape)
    arrays = {own_name(graph, node, 1, "weight", taken): (weight * unfolded.folded(factors)).astype(weight.dtype)}
    scaled = node.replace(inputs=(tensor, *arrays, *node.inputs[2:]))
    if not shift.any():
        return Edits({node: [scaled]}, arrays)
    added = (unfolded.weight.sum(-1, dtype=np.float64) * shifts[unfolded.reads]).sum(-1)
    biased = _biased(graph, node, scaled, node.attrs.get("alpha", 1.0) * added, -shift / scale, taken)
    return None if biased is None else Edits({}, arrays) | biased


def by_channel(array: np.ndarray, axis: int, channels: int) -> np.ndarray | None:
    """An array of one number, or of one per channel, as a vector; None for other arrays."""
    if array.size == 1:
        return np.full(channels, array.item())
    along = array.ndim > axis and array.shape[axis] == array.size == channels
    return array.reshape(-1) if along else None


def _biased(
    graph: Graph, node: Node, scaled: Node, added: np.ndarray, around: np.ndarray, taken: set[str]
) -> Edits | None:
    """The edits by which a linear operator, `scaled` from now on, adds more to each output channel; None if it cannot.

    A convolution that pads gets a Pad in front, of the numbers that stand for zero now: one for all channels.
    """
    if node.op_type == "MatMul":
        (product,), reader = node.outputs, graph.sole_reader(node.outputs[0])
        bias = None if reader is None else factor_of(graph, reader)
        if reader is None or bias is None or not (bias.scale == 1).all():
            return None
        name = fresh(f"{reader.label}.bias", taken)
        summed = reader.replace(op_type="Add", inputs=(product, name), name=reader.label)
        nodes = {node: [scaled.replace(name=node.label)], reader: [summed]}
        names = {product: fresh(f"{product}_unshifted", taken)}
        return Edits(nodes, {name: (bias.shift + added).astype(np.float32)}, names)
    given = node.inputs[2] if len(node.inputs) > 2 else ""
    held = graph.params.get(given, None if given else np.zeros(1, np.float32))
    if node.op_type == "ConvTranspose" or held is None or held.shape not in ((), (1,), added.shape):
        return None
    name = own_name(graph, node, 2, "bias", taken)
    arrays = {name: (held * node.attrs.get("beta", 1.0) + added).astype(np.float32)}
    attrs = {k: v for k, v in node.attrs.items() if k != "beta"}
    biased = scaled.replace(inputs=(*scaled.inputs[:2], name), attrs=attrs)
    pads, by_itself = node.attrs.get("pads", ()), node.attrs.get("auto_pad", "NOTSET")
    if not np.any(pads) and by_itself in ("NOTSET", "VALID"):
        return Edits({node: [biased]}, arrays)
    if around.size > 1 or by_itself != "NOTSET" or graph.opset() < 11:
        return None
    half, source = len(pads) // 2, biased.inputs[0]
    widths, value, padded = (fresh(f"{node.label}.{part}", taken) for part in ("pads", "padding", "padded"))
    arrays |= {widths: np.array([0, 0, *pads[:half], 0, 0, *pads[half:]]), value: np.float32(around).reshape(())}
    pad = Node("Pad", (source, widths, value), (padded,), {}, padded)
    unpadded = biased.replace(inputs=(padded, *biased.inputs[1:]), attrs={**attrs, "pads": (0,) * len(pads)})
    return Edits({node: [pad, unpadded]}, arrays)


# --- Back ---


def _back(graph: Graph, factor: Factor, taken: set[str]) -> Edits | None:
    """The edits by which the linear operator that a factor's source comes from takes it in; None if there is none."""
    if factor.shift.any():
        return None
    tensor, scale = factor.source, factor.scale
    edits = Edits({}, {}, {tensor: factor.node.outputs[0]})  # whose value it has from now on
    while graph.sole_reader(tensor) is not None and (node := graph.producer.get(tensor)) is not None:
        if (scaled := _scaled(graph, node, scale, taken)) is not None:
            return edits | scaled
        added = factor_of(graph, node)
        before = node.inputs[0] if added is None else added.source
        if node.op_type == "MatMul" and not node.domain and scale.size == 1:
            passed: Edits | None = Edits({node: [node.replace(name=node.label)]})
        else:
            passed = _passed(graph, node, before, scale, taken)
        if passed is None:
            return None
        edits |= passed
        edits |= Edits({}, {}, {before: fresh(f"{before}_scaled", taken)})
        tensor, scale = before, scale.reshape(()) if scale.size == 1 else scale
    return None


def _scaled(graph: Graph, node: Node, scale: np.ndarray, taken: set[str]) -> Edits | None:
    """The edits by which a linear operator's output is multiplied by a scale; None if it is none or cannot be."""
    if node.domain:
        return None
    if node.op_type in LINEAR and scale.size == 1:
        factor, zero = np.full(1, scale.item(), np.float32), np.zeros(1, np.float32)
        absorbed = absorb(graph, node, factor, zero, zero, taken)
        return None if absorbed is None else Edits({node: [absorbed[0].replace(name=node.label)]}, absorbed[1])
    weight = graph.params.get(node.inputs[1]) if node.op_type == "MatMul" else None
    vector = None if weight is None or weight.ndim != 2 else by_channel(scale, -1, weight.shape[1])
    if weight is None or vector is None or not is_float(weight.dtype):
        return None
    name = own_name(graph, node, 1, "weight", taken)
    scaled = node.replace(inputs=(node.inputs[0], name), name=node.label)
    return Edits({node: [scaled]}, {name: (weight * vector).astype(weight.dtype)})
