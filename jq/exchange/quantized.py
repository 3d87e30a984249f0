"""Import of quantized models: the float graph and the plan of a quantized graph, the inverse of `export`.

A plan says how a tensor is rounded for all of its readers. Quantizers that say more than that, or that would not
come back with the same codes, stay nodes of the graph, which is then as right as without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

import numpy as np
from onnx import TensorProto, helper

from jq.arithmetic.formats import FLOATS, INTEGERS, Block, Float, Integer
from jq.errors import Error
from jq.graph import Graph, Node, Value
from jq.graph.domains import CONTRIB, MICROSOFT, QUARK, VITIS
from jq.graph.edit import fresh, rename
from jq.graph.quantizers import is_block_quantizer, is_dequantize, is_dynamic, is_fix_neuron, is_quantize
from jq.graph.unused import remove_unused
from jq.ops.kinds import is_cast, is_clip
from jq.ops.table import demanded
from jq.plan import Plan, QParams, QTensor
from jq.readings.diagnosis import blames_model

_DOMAINS = (MICROSOFT, VITIS, CONTRIB, QUARK)
_TARGETS = {helper.np_dtype_to_tensor_dtype(d): d for d in (np.dtype(np.float32), *(f.dtype for f in FLOATS.values()))}
_ONE, _ZERO = np.float32(1), np.int32(0)
_TINY = np.finfo(np.float32).tiny  # devices flush smaller scales to zero
_WIDEST = 16  # bits of codes that float32 arithmetic makes of any value without error


@dataclasses.dataclass(frozen=True, eq=False)
class _Quantizer:
    """Nodes that round a tensor, and the names of their results."""

    source: str  # the tensor, or the codes of a weight
    qparams: QParams
    nodes: tuple[Node, ...]
    results: tuple[str, ...]
    weight: np.ndarray | None = None  # what the codes stand for
    stored: bool = False  # the source is an array of codes


@blames_model
def split_quantizers(graph: Graph) -> tuple[Graph, Plan]:
    """Return the float graph of a quantized one, and the plan that quantizes it.

    Tensors get the names that they had before `export`, and weights the values that their codes stand for. The plan has no
    forms: nodes that an export added for the NPU remain nodes. Whatever a plan cannot express stays in the graph.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, jq.zoo.calibration_set()[0][:16]))
    >>> floats, again = split_quantizers(jq.load(jq.export(graph, plan)))
    >>> again, again["stem.weight"]
    (Plan(26 activations, 32 weights), QParams(scale=0.03125, zero_point=0, int8))
    >>> set(graph.params) <= set(floats.params)
    True
    """
    graph = remove_unused(graph)  # as `export` does: what nobody needs is no reader
    refused: set[Node] = set()
    while True:
        quantizers = _accepted(graph, refused)
        names = _names(graph, quantizers)
        floats = _without(graph, quantizers, names)
        wrong = _misplaced(floats, quantizers, names)
        if not wrong:
            return floats, _plan(graph, floats, quantizers, names)
        refused |= wrong


# --- Which quantizers there are ---


def _accepted(graph: Graph, refused: Set[Node]) -> list[_Quantizer]:
    """The quantizers that a plan can express, in the order of their nodes; the first of two in a row."""
    accepted: list[_Quantizer] = []
    hidden: set[str] = set()  # tensors that the float graph does not have
    tensors = [*graph.arrays, *(v.name for v in graph.inputs), *(o for n in graph.nodes for o in n.outputs if o)]
    for name in tensors:
        if name in hidden:
            continue
        for quantizer in _of_codes(graph, name) if name in graph.arrays else ():
            if refused.isdisjoint(quantizer.nodes):
                accepted.append(quantizer)
                hidden.update(quantizer.results)
        whole = _of_tensor(graph, name)
        if whole is not None and refused.isdisjoint(whole.nodes):
            accepted.append(whole)
            hidden.update(o for n in whole.nodes for o in n.outputs)
    place = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(accepted, key=lambda q: min(place[n] for n in q.nodes))


def _of_tensor(graph: Graph, name: str) -> _Quantizer | None:
    """Return the quantizer of a float tensor that serves all of its readers."""
    if name in graph.output_names:
        return None
    parts = [_reader(graph, node, name) for node in graph.consumers.get(name, ())]
    merged = _merged([p for p in parts if p is not None])
    if merged is None or None in parts:
        return None
    public = graph.output_names.intersection(merged.results)
    if len(public) > 1 or (public and name not in graph.producer):
        return None  # one tensor has one name, and that of an input or array is taken
    qparams, weight = merged.qparams, graph.arrays.get(name)
    if weight is None and isinstance(qparams.grid, Integer):
        # `export` cannot write the axis of an activation's channels.
        return merged if qparams.axis is None and qparams.grid.bits <= _WIDEST else None
    if weight is None:
        return merged
    if weight.dtype != np.float32 or qparams.dynamic:
        return None
    grid = qparams.grid
    if isinstance(grid, Block) or is_fix_neuron(merged.nodes[0]):
        return merged  # `export` writes these of weights too, which so keep what rounding takes from them
    counted = _counted(qparams, weight.shape)
    if counted is None or not np.isfinite(weight).all():
        return None
    if isinstance(grid, Float):
        codes = np.clip(weight, -grid.largest, grid.largest).astype(grid.dtype)
        return dataclasses.replace(merged, weight=_meant(codes, counted))
    meant = _meant(counted.stored(weight), counted)
    return None if meant is None else dataclasses.replace(merged, qparams=counted, weight=meant)


def _of_codes(graph: Graph, name: str) -> Iterator[_Quantizer]:
    """The weights that an array of codes is read as: mostly one, of several scales several."""
    parts = [_weight(graph, node, name) for node in graph.consumers.get(name, ())]
    left = [p for p in parts if p is not None]
    while left:
        same = [p for p in left if _same(p.qparams, left[0].qparams)]
        left = [p for p in left if p not in same]
        yield _joined(same)


def _merged(parts: Sequence[_Quantizer]) -> _Quantizer | None:
    """Quantizers of one tensor as one; None if they differ, or if there are none."""
    if not parts or not all(_same(p.qparams, parts[0].qparams) for p in parts):
        return None
    return _joined(parts)


def _joined(parts: Sequence[_Quantizer]) -> _Quantizer:
    nodes, results = (n for p in parts for n in p.nodes), (r for p in parts for r in p.results)
    return dataclasses.replace(parts[0], nodes=tuple(nodes), results=tuple(results))


def _same(one: QParams, other: QParams) -> bool:
    kinds = [(q.grid, q.axis, q.dynamic, np.shape(q.scale)) for q in (one, other)]
    pairs = ((one.scale, other.scale), (one.zero_point, other.zero_point))
    return kinds[0] == kinds[1] and all(np.array_equal(a, b) for a, b in pairs)


# --- One quantizer ---


def _reader(graph: Graph, node: Node, name: str) -> _Quantizer | None:
    """The quantizer that begins with this reader of a tensor."""
    if not node.inputs or node.inputs[0] != name or node.inputs.count(name) > 1 or not node.outputs:
        return None
    if is_block_quantizer(node) or is_fix_neuron(node):
        whole = _block(node) if is_block_quantizer(node) else _fix_neuron(graph, node)
        return None if whole is None else _Quantizer(name, whole, (node,), node.outputs)
    if is_dynamic(node):
        qparams = QParams(_ONE, _ZERO, INTEGERS["uint8"], dynamic=True)
        ends = _readers(graph, node.outputs[0])
        others = {r for o in node.outputs[1:] for r in _readers(graph, o)}
        if not all(is_dequantize(e) and e.inputs == node.outputs for e in ends) or not others <= {*ends}:
            return None
        return _closed(graph, name, qparams, (node,), ends)
    if is_quantize(node):
        stated = parameters(graph, node, np.dtype(np.uint8))
        ends = _readers(graph, node.outputs[0])
        if stated is None or not all(is_dequantize(e) for e in ends):
            return None
        assert not isinstance(stated.grid, Block)
        back = [parameters(graph, e, stated.grid.dtype) for e in ends]
        if not all(b is not None and _same(b, stated) for b in back):
            return None
        return _closed(graph, name, stated, (node,), ends)
    return _casts(graph, node, name)


def _casts(graph: Graph, node: Node, name: str) -> _Quantizer | None:
    """Casts there and back; where the type saturates, behind a Clip that makes them do so."""
    clips: tuple[Node, ...] = ()
    heads: tuple[Node, ...] = (node,)
    if is_clip(node):
        clips, heads = (node,), _readers(graph, node.outputs[0])
    kinds = {_target(head) for head in heads}
    grid = next((f for f in FLOATS.values() if kinds == {f.dtype}), None)
    if grid is None or grid.saturates != bool(clips):
        return None
    if clips:
        bounds = [graph.arrays.get(i) for i in node.inputs[1:]]
        limits = [[float(b.reshape(()))] if b is not None and b.size == 1 else [] for b in bounds]
        if limits != [[-grid.largest], [grid.largest]]:
            return None
    ends = tuple(e for head in heads for e in _readers(graph, head.outputs[0]))
    inner = [o for n in (*clips, *heads) for o in n.outputs]
    if not all(_target(e) == np.float32 for e in ends) or not all(_readers(graph, o) for o in inner):
        return None
    return _closed(graph, name, QParams(_ONE, _ZERO, grid), (*clips, *heads), ends)


def _closed(
    graph: Graph, name: str, qparams: QParams, heads: tuple[Node, ...], ends: tuple[Node, ...]
) -> _Quantizer | None:
    """The quantizer that these nodes form, if nothing else reads the tensors between them."""
    inner = {o for n in heads for o in n.outputs if o}
    if not ends or not graph.output_names.isdisjoint(inner):
        return None
    return _Quantizer(name, qparams, (*heads, *ends), tuple(e.outputs[0] for e in ends))


def _weight(graph: Graph, node: Node, name: str) -> _Quantizer | None:
    """The weight that a node makes of an array of codes, if it comes back from what they stand for."""
    codes = graph.arrays[name]
    if not node.inputs or node.inputs[0] != name or node.inputs.count(name) > 1:
        return None
    qparams: QParams | None = None
    if is_dequantize(node):
        qparams = parameters(graph, node, codes.dtype)
    elif _target(node) == np.float32 and str(codes.dtype) in FLOATS:
        qparams = QParams(_ONE, _ZERO, FLOATS[str(codes.dtype)])
    if qparams is None or isinstance(qparams.grid, Block) or codes.dtype != qparams.grid.dtype:
        return None
    if not graph.output_names.isdisjoint(node.outputs):
        return None
    qparams = _counted(qparams, codes.shape)
    weight = None if qparams is None else _meant(codes, qparams)
    if qparams is None or weight is None:
        return None
    return _Quantizer(name, qparams, (node,), node.outputs[:1], weight, stored=True)


def _counted(qparams: QParams, shape: tuple[int, ...]) -> QParams | None:
    """The same with an axis that counts from the first one; None if a tensor of this shape has no such channels."""
    if qparams.axis is None:
        return qparams
    if not -len(shape) <= qparams.axis < len(shape) or np.size(qparams.scale) not in (1, shape[qparams.axis]):
        return None
    return dataclasses.replace(qparams, axis=qparams.axis % len(shape))


def _meant(codes: np.ndarray, qparams: QParams) -> np.ndarray | None:
    """Return the dequantized float32 values of codes; None if quantizing them does not give the codes back."""
    grid = qparams.grid
    if isinstance(grid, Float):
        floats = codes.astype(np.float32)
        fits = not grid.saturates or bool(np.isfinite(floats).all())
        return floats if fits and floats.astype(grid.dtype).tobytes() == codes.tobytes() else None
    assert isinstance(grid, Integer)
    with np.errstate(over="ignore"):
        floats, wide = QTensor(codes, qparams).value(), codes.astype(np.int64)
        if not np.isfinite(floats).all() or not np.array_equal(qparams.stored(floats).astype(np.int64), wide):
            return None
    # Fake-quant has codes and zero points as float32.
    exact = (np.array_equal(v.astype(np.float32).astype(np.int64), v) for v in (wide, np.asarray(qparams.zero_point)))
    return floats if all(exact) else None


# --- What nodes say ---


def _readers(graph: Graph, name: str) -> tuple[Node, ...]:
    return graph.consumers.get(name, ()) if name else ()


def _target(node: Node) -> np.dtype | None:
    """The type that a Cast is to."""
    if not is_cast(node) or not node.attrs.keys() <= {"to", "saturate"}:
        return None
    return _TARGETS.get(node.attrs.get("to", TensorProto.UNDEFINED))


def parameters(graph: Graph, node: Node, dtype: np.dtype) -> QParams | None:
    """Return the constant parameters of a QuantizeLinear or DequantizeLinear; `dtype` is the type of codes if it states none."""
    attrs = {k: v for k, v in node.attrs.items() if v}
    if not attrs.keys() <= {"axis", "saturate", "output_dtype"}:
        return None  # blocks of an axis, or arithmetic in another precision
    if "output_dtype" in attrs and not is_dequantize(node):
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(attrs["output_dtype"]))
    elif attrs.get("output_dtype", TensorProto.FLOAT) != TensorProto.FLOAT:
        return None
    scale = graph.arrays.get(node.inputs[1])
    if scale is None or scale.dtype != np.float32:
        return None
    given = len(node.inputs) > 2 and bool(node.inputs[2])
    zero_point = graph.arrays.get(node.inputs[2]) if given else np.zeros(scale.shape, dtype)
    if zero_point is None:
        return None
    if not (np.isfinite(scale).all() and (scale >= _TINY).all()):
        return None
    kind = str(zero_point.dtype)
    if kind in FLOATS:
        trivial = bool((scale == 1).all() and (zero_point == 0).all())
        return QParams(_ONE, _ZERO, FLOATS[kind]) if trivial and node.domain == QUARK else None
    if kind not in INTEGERS:
        return None
    zero_point = zero_point.astype(np.int32)
    # One number may have any shape; of one channel it is if the node says which axis has the channels.
    if scale.size == zero_point.size == 1 and not (scale.ndim == zero_point.ndim == 1 and "axis" in node.attrs):
        return QParams(scale.reshape(()), zero_point.reshape(()), INTEGERS[kind])
    if scale.ndim != 1 or scale.shape != zero_point.shape:
        return None
    return QParams(scale, zero_point, INTEGERS[kind], node.attrs.get("axis", 1))


def _block(node: Node) -> QParams | None:
    """The block format of a node of Quark's, if `export` would write a node of the same meaning for it."""
    from jq.ops.blocks import block_of, node_of  # the op table is not loaded with the package

    try:
        block, axis = block_of(node.op_type, node.attrs)
    except Error:  # whoever evaluates the node says what is wrong
        return None
    op_type, _, attrs = node_of(block, axis)
    return QParams(_ONE, _ZERO, block, axis) if block_of(op_type, attrs) == (block, axis) else None


def _fix_neuron(graph: Graph, node: Node) -> QParams | None:
    """The same of the operator that quantizes and dequantizes at once."""
    if len(node.inputs) < 3 or not node.inputs[2]:
        return None  # the zero point's type is that of the codes
    qparams = parameters(graph, node.replace(attrs={}), np.dtype(np.uint8))
    if qparams is None or qparams.axis is not None or not isinstance(qparams.grid, Integer):
        return None
    stated = node.attrs.get("bit_width"), np.ldexp(np.float32(1), -int(node.attrs.get("pos", 0)))
    return qparams if stated == (qparams.grid.bits, qparams.scale) else None


# --- The float graph and its plan ---


def _names(graph: Graph, quantizers: Sequence[_Quantizer]) -> dict[_Quantizer, str]:
    """The name of each quantized tensor in the float graph."""
    removed = {n for q in quantizers for n in q.nodes}
    taken = set(graph.tensors) - {o for n in removed for o in n.outputs} - _unread(graph, removed)
    taken |= graph.output_names
    names: dict[_Quantizer, str] = {}
    for quantizer in quantizers:
        public = graph.output_names.intersection(quantizer.results)
        if not quantizer.stored:
            names[quantizer] = next(iter(public), quantizer.source)
            taken.add(names[quantizer])
    for quantizer in quantizers:
        if quantizer.stored:
            candidates = _weight_names(quantizer)
            names[quantizer] = fresh(next((c for c in candidates if c not in taken), candidates[0]), taken)
    return names


def _weight_names(quantizer: _Quantizer) -> list[str]:
    """Return possible original names of a weight: the vendor's tool and `export` only append to its name."""
    codes, node, result = quantizer.source, quantizer.nodes[0], quantizer.results[0]
    names = [codes.removesuffix("_quantized")] if codes.endswith("_quantized") else []
    stem = node.name.removesuffix("_DequantizeLinear")
    if stem != node.name and codes.startswith(f"{stem}_quantized"):
        names.insert(0, stem)
    return [*filter(None, (*names, result.removesuffix("_DequantizeLinear_Output"))), result]


def _without(graph: Graph, quantizers: Sequence[_Quantizer], names: Mapping[_Quantizer, str]) -> Graph:
    """The graph without these quantizers."""
    removed = {n for q in quantizers for n in q.nodes}
    sources = {q.source for q in quantizers if not q.stored}
    unread = _unread(graph, removed) - sources
    arrays = {k: a for k, a in graph.arrays.items() if k not in unread}
    arrays |= {names[q]: q.weight for q in quantizers if q.weight is not None}
    renamed = {result: names[q] for q in quantizers for result in q.results}
    renamed |= {q.source: names[q] for q in quantizers if not q.stored}
    nodes = tuple(n for n in graph.nodes if n not in removed)
    floats = rename(graph.with_arrays(arrays, nodes=nodes), {k: v for k, v in renamed.items() if k != v})
    used = {n.domain for n in floats.walk()}
    return floats.replace(
        opsets={k: v for k, v in graph.opsets.items() if k in used or k not in _DOMAINS},
        declared={k: v for k, v in graph.declared.items() if k in floats.producer and k in graph.producer},
    )


def _unread(graph: Graph, removed: Collection[Node]) -> set[str]:
    """The arrays that nothing but these nodes reads."""
    read = graph.output_names.union(*(n.reads() for n in graph.nodes if n not in removed))
    return {i for n in removed for i in n.reads() if i in graph.arrays} - read


def _misplaced(floats: Graph, quantizers: Sequence[_Quantizer], names: Mapping[_Quantizer, str]) -> set[Node]:
    """Nodes of the quantizers whose tensors turn out, now that types are known, to be none for a plan.

    Custom operators hide the types of what follows them, so that the quantized graph does not tell.
    """
    static = demanded(floats)  # rules need their values while tracing, which those of a plan are not
    return {
        node
        for quantizer in quantizers
        if names[quantizer] in static or not _fits(quantizer.qparams, floats.values.get(names[quantizer]))
        for node in quantizer.nodes
    }


def _fits(qparams: QParams, value: Value | None) -> bool:
    """Whether a tensor of this type can be quantized so."""
    if value is None or value.dtype is None:
        return not isinstance(qparams.grid, Float)  # a Cast takes any type
    if value.dtype != np.float32 or value.containers:
        return False
    # The vendor's operators leave a single element as it is.
    return not isinstance(qparams.grid, Block) or value.shape is None or any(d != 1 for d in value.shape)


def _plan(graph: Graph, floats: Graph, quantizers: Sequence[_Quantizer], names: Mapping[_Quantizer, str]) -> Plan:
    """The plan of these quantizers."""
    every = {names[q]: q.qparams for q in quantizers}
    nodes = (n for n in floats.nodes if n.outputs and not every.keys().isdisjoint((*n.reads(), *n.outputs)))
    return Plan(
        activations={k: q for k, q in every.items() if k not in floats.arrays},
        weights={k: q for k, q in every.items() if k in floats.arrays},
        nodes=frozenset(n.outputs[0] for n in nodes),
    )
