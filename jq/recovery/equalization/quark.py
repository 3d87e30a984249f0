"""Cross-layer equalization as AMD Quark 0.13 computes it: channels between layers get like ranges on either side.

After Nagel et al. (arXiv:1906.04721, see `ranges`), with patterns, equations and their order of Quark's, in float32 as
there. Where Quark would change the function, it is left: Pads not of zeros, outputs within a chain, groups that are
not depthwise; and arrays that others read too are copied. `find_chains` says where factors may go, `*_factors` which
ones are good, the rest multiplies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from jq.arithmetic import layout
from jq.graph import Graph, Node
from jq.ops.linear import linear_layer, scale_and_shift
from jq.passes.affine import is_float
from jq.recovery.equalization.groups import known_ints, padded_axes, pads_homogeneously, rewritten

PAIR_OPS = frozenset({"Relu", "LeakyRelu", "Pad", "ReduceMean"})
TRIPLE_OPS = frozenset({"Relu"})
STEM_OPS = frozenset({"Relu", "MaxPool", "AveragePool", "GlobalAveragePool", "Identity", "Pad", "Concat"})

_TINY = 1e-7  # in place of weights that are zero, where a bias is divided by them
_DEAD, _STEM_LIMIT = 1e-6, 16.0  # stem channels that are left alone, and the largest factor of the others
# When an unbounded number of sweeps ends nevertheless: after so many that change as much as the one before, or so many
# altogether. Rounding may go round in circles of several sweeps, where Quark does not end.
_REPEATS, _SWEEPS = 20, 1000


@dataclasses.dataclass(frozen=True)
class ChannelLayer:
    """A Conv or Gemm with constant arrays, and which axes of its weight are its channels."""

    node: Node
    outputs: int
    inputs: int

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is made of one channel."""
        return self.outputs == self.inputs


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """The weight and bias of a layer."""

    weight: np.ndarray
    bias: np.ndarray | None


Chain = tuple[ChannelLayer, ...]


def equalize_as_quark(
    graph: Graph,
    *,
    steps: int = 1,
    threshold: float = 0.5,
    append_bias: bool = True,
    stem: bool = True,
    tolerance: float = 2e-7,
) -> Graph:
    """Return a prepared graph with the same function, whose layers have channels of more even ranges.

    `steps` sweeps are made over all chains; -1: until the weights' mean changes sum to at most `tolerance`. Channels
    whose ranges sum to less than `threshold` stay as they are. `append_bias` lets a bias count as a weight, made
    smaller. `stem` also evens out the first Conv before BatchNormalizations that could not be folded.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> [[layer.node.name for layer in chain] for chain in find_chains(graph)][0]
    ['stage1.0.conv1', 'stage1.0.conv2']
    >>> equalize_as_quark(graph) is graph
    False
    """
    if stem:
        graph = equalize_stem(graph)
    chains = find_chains(graph)
    order = (*chains, *chains[:1])  # Quark's list holds the first chain twice
    arrays = {layer: _arrays(graph, layer.node) for chain in chains for layer in chain}
    change, repeats = math.inf, 0
    for _ in range(steps if steps >= 0 else _SWEEPS):
        previous = dict(arrays)
        for chain in order:
            arrays |= _equalized(chain, arrays, threshold, append_bias)
        moved = [k for k in arrays if arrays[k] is not previous[k]]
        differences = (_wide(previous[k].weight) - _wide(arrays[k].weight) for k in moved)
        latest = sum(float(np.abs(d.astype(np.float64)).mean()) for d in differences)
        change, repeats = (latest, 0) if abs(latest - change) > 1e-9 else (change, repeats + 1)
        if change <= tolerance or repeats == _REPEATS:
            break
    return rewritten(graph, {k.node: {1: a.weight, 2: a.bias} for k, a in arrays.items()})


# Where factors may go


def find_chains(graph: Graph) -> tuple[Chain, ...]:
    """Return pairs of layers, and triples with a depthwise Conv in the middle, in the order they are equalized in.

    A layer's output is read by the next layer alone, through `PAIR_OPS` or, within triples, `TRIPLE_OPS`. Every
    triple's first two layers are a pair before it.
    """
    chains: list[Chain] = []
    for head in filter(None, (_layer(graph, n) for n in graph.nodes)):
        if tail := _next(graph, head, PAIR_OPS):
            chains.append((head, tail))
        middle = _next(graph, head, TRIPLE_OPS)
        if middle and middle.is_depthwise and not head.is_depthwise and head.node.op_type == "Conv":
            tail = _next(graph, middle, TRIPLE_OPS)
            if tail and not tail.is_depthwise:
                chains.append((head, middle, tail))
    return tuple(chains)


def _layer(graph: Graph, node: Node) -> ChannelLayer | None:
    """The node as a layer whose weight and bias may be multiplied by channel, or None."""
    if node.domain or node.op_type not in ("Conv", "Gemm"):
        return None
    weight, bias = graph.params.get(node.inputs[1]), graph.params.get(_bias_name(node))
    if weight is None or not is_float(weight.dtype) or (bias is None and _bias_name(node)):
        return None
    linear = linear_layer(graph, node)
    if linear is None or (linear.groups > 1 and weight.shape[:2] != (linear.groups, 1)):
        return None
    outputs, inputs = linear.axis, 1 - linear.axis if linear.groups == 1 else 0
    count = weight.shape[outputs]  # a bias of a Gemm may have a value for each row, too
    if bias is not None and bias.size != 1 and not bias.size == bias.shape[-1] == count:
        return None
    return ChannelLayer(node, outputs, inputs)


def _next(graph: Graph, layer: ChannelLayer, through: frozenset[str]) -> ChannelLayer | None:
    """The layer that alone reads this one's output through nodes of these types, channel by channel."""
    weight = graph.params[layer.node.inputs[1]]
    name, rank = layer.node.outputs[0], weight.ndim
    while (reader := graph.sole_reader(name)) is not None and reader.inputs[0] == name:
        if (after_it := _layer(graph, reader)) is not None:
            other = graph.params[reader.inputs[1]]
            # Quark knows no Conv of one spatial axis here; a transposed Gemm's channels are not its second axis.
            fits = rank == other.ndim != 3 and weight.shape[layer.outputs] == other.shape[after_it.inputs]
            return after_it if fits and not reader.attrs.get("transA", 0) else None
        after = _rank_after(graph, reader, rank) if reader.op_type in through and not reader.domain else None
        if after is None:
            return None
        name, rank = reader.outputs[0], after
    return None


def _rank_after(graph: Graph, node: Node, rank: int) -> int | None:
    """The rank of the output, or None where channels do not stay apart on axis 1 or are not just multiplied."""
    if node.op_type not in ("Pad", "ReduceMean"):
        return rank
    if node.op_type == "Pad":
        padded = padded_axes(graph, node, rank)
        return None if padded is None or 1 in padded or not pads_homogeneously(graph, node) else rank
    axes = {a % rank for a in known_ints(graph, node, "axes", 1) or ()}
    if not axes or 1 in axes:
        return None
    if node.attrs.get("keepdims", 1):
        return rank
    return None if 0 in axes else rank - len(axes)


# Which factors are good: functions of rows, the weights of one channel each


def pair_factors(
    head: np.ndarray, tail: np.ndarray, bias: np.ndarray | None = None, *, threshold: float = 0.5
) -> np.ndarray:
    """Return s, such that rows s * head and tail / s have the range sqrt(r0 r1) both.

    >>> pair_factors(np.float32([[8, -1], [1, 0]]), np.float32([[2], [4]]))
    array([0.5, 2. ], dtype=float32)
    """
    with np.errstate(all="ignore"):
        if bias is not None:
            head = np.concatenate([head, bias_column(head, bias)[:, None]], axis=1)
        r0, r1 = _ranges(head), _ranges(tail)
        root = np.sqrt(r0 * r1)
        s = np.where(root != 0, r1 / root, 1)
        return np.where(r0 + r1 < threshold, 1, s)


def bias_column(rows: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the bias as another weight: made smaller by a factor that its size beside the weights decides.

    Each zero counts as the smallest weight of its row; rows of zeros have no bias.
    """
    size = np.abs(rows, order="C")
    dead = ~size.any(axis=1)
    kept = np.where(dead, 0, bias)
    least = np.min(size, axis=1, where=size != 0, initial=np.inf)
    size = np.maximum(np.where(size == 0, np.where(dead, 0, least)[:, None], size), _TINY)
    ratio = np.abs(kept)[:, None] / size
    median, mean, largest = np.median(ratio), ratio.mean(), np.abs(bias).max()
    if largest < 10 and largest / size.max() < 20:
        shrink = 5 if median > 100 or mean > 1000 else 2
    elif median > 30 or mean > 500:
        shrink = 20
    else:
        shrink = 10 if median > 15 or mean > 100 else 5
    return kept / shrink


def triple_factors(conv: np.ndarray, depthwise: np.ndarray, pointwise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return s, t, such that rows conv / s, depthwise * s / t and pointwise * t have the range cbrt(r0 r1 r2) all.

    >>> triple_factors(*np.float32([[[8]], [[2]], [[4]]]))
    (array([2.], dtype=float32), array([1.], dtype=float32))
    """
    with np.errstate(all="ignore"):
        r0, r1, r2 = _ranges(conv), _ranges(depthwise), _ranges(pointwise)
        root = np.power(r0 * r1 * r2, 1.0 / 3)
        s, t = r0 / root, root / r2
        return np.where(np.isfinite(s) & (s != 0), s, 1), np.where(np.isfinite(t) & (t != 0), t, 1)


def stem_factors(rows: np.ndarray) -> np.ndarray:
    """Return s, such that rows s * stem have the largest one's range, as far as s <= 16 makes them.

    >>> stem_factors(np.float32([[1, -4], [2, 0], [0, 0], [0.01, 0]]))
    array([ 1.,  2.,  1., 16.], dtype=float32)
    """
    ranges = _ranges(rows)
    live = ranges > _DEAD
    with np.errstate(all="ignore"):
        return np.where(live, np.clip(ranges.max() / np.where(live, ranges, 1), 1.0, _STEM_LIMIT), 1)


def _ranges(rows: np.ndarray) -> np.ndarray:
    return np.abs(rows).max(axis=1, initial=0)


# Multiplying


def _equalized(
    chain: Chain, arrays: Mapping[ChannelLayer, Arrays], threshold: float, append_bias: bool
) -> Mapping[ChannelLayer, Arrays]:
    """The arrays of a chain with the factors that its equations give; none if a value would not be finite."""
    made = [_rows(arrays[layer].weight, layer.outputs) for layer in chain]
    read = [_rows(arrays[layer].weight, layer.inputs) for layer in chain]
    if len(chain) == 2:
        bias = arrays[chain[0]].bias if append_bias else None
        if bias is not None:
            bias = np.broadcast_to(bias.reshape(-1).astype(made[0].dtype), len(made[0]))
        s = pair_factors(made[0], read[1], bias, threshold=threshold)
        with np.errstate(all="ignore"):
            ups, downs = [s], [1 / s]
    else:
        downs = list(triple_factors(made[0], made[1], read[2]))
        ups = [1 / s for s in downs]
    arrays_of = {}
    for layer, down, up in zip(chain, [None, *downs], [*ups, None], strict=True):  # where channels are read, and made
        weight, bias = arrays[layer].weight, arrays[layer].bias
        if down is not None:
            weight = _times(weight, down, layer.inputs)
        if up is not None:
            weight = _times(weight, up, layer.outputs)
            bias = None if bias is None else _times(bias, up, -1)
        arrays_of[layer] = Arrays(weight, bias)
    return arrays_of if all(_is_finite(a.weight, a.bias) for a in arrays_of.values()) else {}


def _rows(weight: np.ndarray, axis: int) -> np.ndarray:
    """The weights by channel: (channels, all others)."""
    return layout.rows(_wide(weight), axis).reshape(weight.shape[axis], -1)


def _times(array: np.ndarray, factors: np.ndarray, axis: int) -> np.ndarray:
    """The array with each channel multiplied."""
    shape = [1] * max(1, array.ndim)
    shape[axis] = -1
    with np.errstate(all="ignore"):
        return (_wide(array) * factors.reshape(shape)).astype(array.dtype)


def _wide(array: np.ndarray) -> np.ndarray:
    """In float32, where half floats are multiplied too."""
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)


def _is_finite(*arrays: np.ndarray | None) -> bool:
    return all(np.isfinite(_wide(a)).all() for a in arrays if a is not None)


def _bias_name(node: Node) -> str:
    return node.inputs[2] if len(node.inputs) > 2 else ""


def _arrays(graph: Graph, node: Node) -> Arrays:
    return Arrays(graph.params[node.inputs[1]], graph.params.get(_bias_name(node)))


# The stem: factors that BatchNormalizations take in, which no layer could


def equalize_stem(graph: Graph) -> Graph:
    """Return the graph with weak channels of its first Conv made up to 16 times larger.

    All that reads them, through `STEM_OPS`, must end in BatchNormalizations, which divide again. This is so where
    they could not be folded: several read one tensor, or they stand after a pool or Concat.
    """
    inputs = {v.name for v in graph.inputs}
    convs = (n for n in graph.nodes if n.op_type == "Conv" and not n.domain and inputs.intersection(n.inputs))
    stem = next((n for n in convs if n.attrs.get("group", 1) == 1), None)
    layer = None if stem is None else _layer(graph, stem)
    if stem is None or layer is None or graph.params[stem.inputs[1]].ndim != 4:
        return graph
    old = _arrays(graph, stem)
    s = stem_factors(_rows(old.weight, 0))
    norms = list(_norms(graph, stem.outputs[0], 0, len(s)))
    if not norms or None in norms:
        return graph
    new = {stem: {1: _times(old.weight, s, 0)} | ({} if old.bias is None else {2: _times(old.bias, s, 0)})}
    for norm, offset in filter(None, norms):
        of_norm = new.setdefault(norm, {i: graph.params[norm.inputs[i]].copy() for i in (1, 3)})
        gamma, mean, span = of_norm[1], of_norm[3], slice(offset, offset + len(s))
        gamma[span], mean[span] = _wide(gamma[span]) / s, _wide(mean[span]) * s
    return rewritten(graph, new) if all(_is_finite(*of_node.values()) for of_node in new.values()) else graph


def _norms(graph: Graph, name: str, offset: int, count: int) -> Iterator[tuple[Node, int] | None]:
    """The BatchNormalizations behind a tensor, with the place of its channels in theirs; None for anything else."""
    if name in graph.output_names:
        yield None
    for node in graph.consumers.get(name, ()):
        if node.op_type == "BatchNormalization" and not node.domain:
            arrays = [graph.params.get(i) for i in node.inputs[1:5]]
            folds = scale_and_shift(graph, node) is not None
            fits = folds and all(a is not None and len(a) >= offset + count for a in arrays)
            yield (node, offset) if fits and node.inputs.count(name) == 1 else None
        elif node.op_type not in STEM_OPS or node.domain or _rank_after(graph, node, 4) is None:
            yield None
        elif node.op_type == "Concat":
            for index in (i for i, n in enumerate(node.inputs) if n == name):
                shapes = [v.shape or () for n in node.inputs[:index] if (v := graph.values.get(n))]
                known = [s[1] for s in shapes if len(s) == 4 and isinstance(s[1], int)]
                if node.attrs.get("axis", 1) != 1 or len(known) < index:
                    yield None
                else:
                    yield from _norms(graph, node.outputs[0], offset + sum(known), count)
        else:
            yield from _norms(graph, node.outputs[0], offset, count)
