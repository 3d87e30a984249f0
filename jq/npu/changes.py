"""Changes that bring more of a quantized graph to the NPU, made to its structure to see where nodes would run then.

A change is a function from a graph to one with the same interface, in which places can be counted. Weights that it
needs have placeholders, so the result is not for running. Where a change alters the function, its sentence says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.quantizers import is_quantize
from jq.graph.unused import remove_unused
from jq.npu.facts import NPU_FORMATS, NPU_RANK, Backend, Evidence
from jq.npu.placing import cuts_above, is_depthwise, means_image
from jq.npu.units import constant, is_quantizer
from jq.ops.kinds import (
    is_hard_sigmoid,
    is_layer,
    is_product,
    is_reshape,
    is_resize,
    is_sigmoid,
    is_transpose,
    pools_average,
)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change to a model, and the function whose graph shows where nodes run then."""

    name: str
    what: str
    evidence: Evidence  # that it helps
    apply: Callable[[Graph], Graph]
    backend: Backend | None = None  # the only one that it is for
    makes: str = ""  # an operator that the format has to list

    def suits(self, backend: str, format: str) -> bool:
        """Whether a model of this format may gain by it on this backend."""
        return self.backend in (None, backend) and (not self.makes or format in NPU_FORMATS[self.makes])


def _relu_for_clip(graph: Graph) -> Graph:
    clips = [n for n in graph.nodes if cuts_above(graph, n)]
    return graph.edit({n: n.replace(op_type="Relu", inputs=n.inputs[:1], attrs={}) for n in clips})


def _convolution_for_shuffle(graph: Graph) -> Graph:
    """The graph with a 1x1 convolution for each Reshape, Transpose and Reshape through more than 4 dims."""
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    taken, weights = set(graph.tensors), list[Node]()
    for node in graph.nodes:
        if not is_transpose(node) or len(node.attrs.get("perm", ())) <= NPU_RANK:
            continue
        before = _beyond(graph, node.inputs[0])
        after = next((r for r in _readers(graph, node.outputs[0]) if is_reshape(r)), None)
        shapes = [constant(graph, n.inputs[1]) for n in (before, after) if n is not None and is_reshape(n)]
        if before is None or after is None or [0 if s is None else s.size for s in shapes] != [NPU_RANK + 1, NPU_RANK]:
            continue
        assert shapes[0] is not None
        channels = int(np.prod(shapes[0][1:3]))
        codes, scale, weight = (fresh(f"{node.label}_{k}", taken) for k in ("permutation", "scale", "weight"))
        arrays |= {codes: np.broadcast_to(np.int8(0), (channels, channels, 1, 1)), scale: np.array(0.5, np.float32)}
        weights.append(Node("DequantizeLinear", (codes, scale), (weight,)))
        nodes[after] = Node("Conv", (before.inputs[0], weight), after.outputs, {}, after.name)
        nodes |= {before: None, node: None}
    return remove_unused(_pruned(graph.replace(nodes=(*weights, *graph.nodes)), nodes, arrays))


def _pool_for_mean(graph: Graph) -> Graph:
    """The graph with a GlobalAveragePool, and a Flatten where dims went, for each mean over height and width."""
    nodes: dict[Node, Node | None] = {}
    added: dict[Node, tuple[Node, ...]] = {}
    taken = set(graph.tensors)
    for node in (n for n in graph.nodes if means_image(graph, n)):
        nodes[node] = node.replace(op_type="GlobalAveragePool", inputs=node.inputs[:1], attrs={})
        name, quantize = node.outputs[0], None
        for _ in range(2):  # past a factor
            quantize = graph.sole_reader(name)
            if quantize is None or is_quantize(quantize):
                break
            name = quantize.outputs[0]
        if node.attrs.get("keepdims", 1) or quantize is None or not is_quantize(quantize):
            continue
        pair = [fresh(f"{name}_{k}", taken) for k in ("codes", "dequantized", "flat")]
        added[quantize] = (
            quantize.replace(outputs=(pair[0],), name=f"{quantize.label}_pool"),
            Node("DequantizeLinear", (pair[0], *quantize.inputs[1:]), (pair[1],), {}, "", quantize.domain),
            Node("Flatten", (pair[1],), (pair[2],), {}, f"{node.label}_flatten"),
            quantize.replace(inputs=(pair[2], *quantize.inputs[1:])),
        )
    changed = graph.edit(nodes)
    return changed.replace(nodes=tuple(m for n in changed.nodes for m in added.get(n, (n,))))


def _products_for_resize(graph: Graph) -> Graph:
    """The graph with a MatMul for each Resize that interpolates: one for both axes, as those between stand alike."""
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    taken, weights = set(graph.tensors), list[Node]()
    for node in (n for n in graph.nodes if is_resize(n) and n.attrs.get("mode", "nearest") != "nearest"):
        codes, scale, weight = (fresh(f"{node.label}_{k}", taken) for k in ("product", "scale", "weight"))
        arrays |= {codes: np.zeros((1, 1), np.int8), scale: np.array(0.5, np.float32)}
        weights.append(Node("DequantizeLinear", (codes, scale), (weight,)))
        nodes[node] = Node("MatMul", (node.inputs[0], weight), node.outputs, {}, node.name)
    return graph.replace(nodes=(*weights, *graph.nodes)).edit(nodes, arrays) if nodes else graph


def _depth_for_resize(graph: Graph) -> Graph:
    """The graph with a DepthToSpace, of copies of channels, for each Resize of mode nearest."""
    nearest = (n for n in graph.nodes if is_resize(n) and n.attrs.get("mode", "nearest") == "nearest")
    return graph.edit({n: Node("DepthToSpace", n.inputs[:1], n.outputs, {"blocksize": 2}, n.name) for n in nearest})


def _dense_for_depthwise(graph: Graph) -> Graph:
    """The graph with ordinary 1x1 convolutions for depthwise ones."""
    nodes: dict[Node, Node | None] = {}
    arrays: dict[str, np.ndarray] = {}
    for node in (n for n in graph.nodes if is_depthwise(graph, n)):
        weight = constant(graph, node.inputs[1])
        assert weight is not None
        if any(side != 1 for side in weight.shape[2:]):
            continue
        name = _stored(graph, node.inputs[1])
        arrays[name] = np.broadcast_to(weight.ravel()[:1].reshape(()), (weight.shape[0],) * 2 + weight.shape[2:])
        nodes[node] = node.replace(attrs={**node.attrs, "group": 1})
    return graph.edit(nodes, arrays)


def _hard_swish(graph: Graph) -> Graph:
    """The graph with one HardSwish for each gate, Sigmoid or HardSigmoid, that multiplies its own input."""
    nodes: dict[Node, Node | None] = {}
    for gate, last in _gates(graph):
        for product in _readers(graph, last.outputs[0]):
            others = [i for i in product.inputs if _beyond(graph, i) is not last]
            if is_product(product) and len(others) == 1 and _codes(graph, others[0]) == _codes(graph, gate.inputs[0]):
                nodes[product] = Node("HardSwish", (others[0],), product.outputs, {}, product.name)
    return remove_unused(graph.edit(nodes))


def _relu_for_gate(graph: Graph) -> Graph:
    """The graph with a Relu for each HardSigmoid, with its factor, that alone reads a layer."""
    nodes: dict[Node, Node | None] = {}
    for gate, last in _gates(graph):
        layer = _beyond(graph, gate.inputs[0])
        if is_hard_sigmoid(gate) and layer is not None and is_layer(layer):
            name = layer.outputs[0]
            if [gate] == list(_readers(graph, name)) and name not in graph.output_names:
                nodes[gate] = Node("Relu", (name,), last.outputs, {}, gate.name)
                nodes |= {last: None} if last is not gate else {}
    return remove_unused(graph.edit(nodes)) if nodes else graph


def in_format(graph: Graph, format: str) -> Graph:
    """The graph as another format has it: forms of XINT8 are made, or taken back."""
    if format == "XINT8":
        gates = {n: n.replace(op_type="HardSigmoid", attrs={"alpha": 1 / 6}) for n in graph.nodes if is_sigmoid(n)}
        return graph.edit(gates)
    nodes: dict[Node, Node | None] = {}
    for gate, last in _gates(graph):
        if is_hard_sigmoid(gate):
            nodes[gate] = Node("Sigmoid", gate.inputs, last.outputs, {}, gate.name)
            nodes |= {last: None} if last is not gate else {}
    for pool in filter(pools_average, graph.nodes):
        factor = graph.sole_reader(pool.outputs[0])
        if factor is not None and _scales(graph, factor):
            nodes |= {pool: pool.replace(outputs=factor.outputs), factor: None}
    return remove_unused(graph.edit(nodes))


CHANGES = (
    Change(
        "relu6_to_relu",
        "replace Clip(0, 6) behind layers by Relu: whole=0 in the config does so where rounding then clips at the bound, so that "
        "all codes stay, and whole=0.001 also where the measured loss is at most that; otherwise train with Relu",
        "log",
        _relu_for_clip,
    ),
    Change(
        "shuffle_to_conv",
        "replace each Reshape, Transpose and Reshape by a 1x1 convolution that permutes channels, or by reordered weights of the "
        "neighbours, which cost nothing; exact: whole=0 in the config, or shuffle_to_weights and shuffle_to_conv in rewrites",
        "log",
        _convolution_for_shuffle,
    ),
    Change(
        "mean_to_pool",
        "replace each mean over height and width by GlobalAveragePool; exact: whole=0 in the config, or "
        "reduce_mean_to_flat_pool in rewrites",
        "log",
        _pool_for_mean,
    ),
    Change(
        "resize_to_matmul",
        "replace each Resize that interpolates by products with constant matrices along height and width; exact, at the cost of "
        "multiplications: whole=0 in the config, or resize_to_matmul in rewrites; otherwise train with mode nearest",
        "guess",
        _products_for_resize,
    ),
    Change(
        "resize_to_depth_to_space",
        "replace each Resize that repeats pixels by copies of channels and DepthToSpace, the only form listed for 16 bits; exact: "
        "whole=0 in the config, or resize_to_depth_to_space in rewrites",
        "documented",
        _depth_for_resize,
    ),
    Change(
        "depthwise_to_dense",
        "replace each depthwise 1x1 convolution that a BatchNormalization became by an ordinary one with a diagonal weight; "
        "exact, at the cost of its multiplications: whole=0 in the config, or depthwise_to_dense in rewrites",
        "guess",
        _dense_for_depthwise,
    ),
    Change(
        "hard_sigmoid",
        "replace each Sigmoid by HardSigmoid, which X1 runs with its factor: form_loss=None in the config; the report gives the "
        "loss, for which finetuning can compensate",
        "log",
        lambda graph: in_format(graph, "XINT8"),
        backend="X1",
    ),
    Change(
        "hard_sigmoid_to_clip",
        "fold slope and shift of a HardSigmoid that alone reads a layer into the layer's weights, with a Relu, as the largest code "
        "clips: whole=0 in the config does so for the network's own; for Sigmoid, train with HardSigmoid",
        "log",
        _relu_for_gate,
        makes="HardSwish",
    ),
    Change(
        "hard_swish",
        "replace each Sigmoid or HardSigmoid that gates its own input by HardSwish, which XINT8 lists: whole=0 in the config keeps "
        "the network's own; for SiLU, train with HardSwish",
        "documented",
        _hard_swish,
        makes="HardSwish",
    ),
)


# --- Parts ---


def _scales(graph: Graph, node: Node) -> bool:
    return is_product(node) and any(constant(graph, i) is not None for i in node.inputs)


def _gates(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Sigmoids and HardSigmoids, with the factor that follows, or themselves."""
    for node in graph.nodes:
        if is_sigmoid(node) or is_hard_sigmoid(node):
            factor = graph.sole_reader(node.outputs[0])
            yield node, factor if factor is not None and _scales(graph, factor) else node


def _beyond(graph: Graph, name: str) -> Node | None:
    """The node that computes a tensor, quantizers passed over."""
    node = graph.producer.get(name)
    while node is not None and is_quantizer(node):
        node = graph.producer.get(node.inputs[0])
    return node


def _codes(graph: Graph, name: str) -> str:
    """The tensor behind quantizers, by its float name."""
    node = graph.producer.get(name)
    while node is not None and is_quantizer(node):
        name = node.inputs[0]
        node = graph.producer.get(name)
    return name


def _readers(graph: Graph, name: str) -> Iterator[Node]:
    """The nodes that compute with a tensor, quantizers passed over."""
    for reader in graph.consumers.get(name, ()):
        if is_quantizer(reader):
            yield from _readers(graph, reader.outputs[0])
        else:
            yield reader


def _stored(graph: Graph, name: str) -> str:
    while name not in graph.arrays:
        name = graph.producer[name].inputs[0]
    return name


def _pruned(graph: Graph, nodes: Mapping[Node, Node | None], arrays: Mapping[str, np.ndarray]) -> Graph:
    """An edit after which quantizers of tensors that nobody makes are gone."""
    changed = graph.edit(nodes, arrays)
    known = {v.name for v in changed.inputs} | changed.arrays.keys() | {""}
    kept = []
    for node in changed.nodes:
        if all(name in known for name in node.reads()):
            known.update(node.outputs)
            kept.append(node)
    return changed.replace(nodes=tuple(kept))
