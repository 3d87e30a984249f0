"""Export of a graph and its plan as an ONNX model for runtimes and the NPU's compiler.

Tensor names are those of the vendor's tool: `x_QuantizeLinear_Output`, `x_DequantizeLinear_Output`, `w_quantized`,
`x_scale`, `x_zero_point`; an output of the graph keeps its name after its dequantization.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from onnx import ModelProto, TensorProto, helper

from jq.arithmetic.formats import Block, Float, Integer
from jq.config import Pairs, QuantConfig
from jq.errors import ConfigError, check_choice
from jq.exchange.qoperator import to_qoperator
from jq.graph import Graph, Node
from jq.graph.domains import CONTRIB, MICROSOFT, VITIS
from jq.graph.edit import fresh, reading
from jq.graph.unused import remove_unused
from jq.graph.write import finished
from jq.ops.kinds import asks_shape
from jq.passes.explicit import explicit
from jq.passes.opset import with_opset
from jq.plan import Plan, QParams
from jq.readings.fake import as_planned
from jq.util.mapped import like, release

Format = Literal["qdq", "qoperator", "vitis_qdq", "fix_neuron"]
Names = tuple[str, ...]

_TYPED = 21  # the opset whose quantizers name their type


def export(
    graph: Graph,
    plan: Plan,
    *,
    params: Mapping[str, Any] | None = None,
    format: Format = "qdq",
    path: str | os.PathLike[str] | None = None,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
    pairs: Pairs = "shared",
) -> ModelProto:
    """Return the quantized model, and write it to `path`, atomically, if one is given.

    `format` is "qdq"; "qoperator", where onnxruntime has an integer operator for a node and its rounding; or, for
    AMD's older flow, "vitis_qdq" or "fix_neuron". The opset is 17, or the model's own if that is higher, or `opset`.
    `pairs` is the option of `QuantConfig`: which readers of a tensor share its quantizers.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, jq.zoo.calibration_set()[0][:16]))
    >>> sum(n.op_type == "QuantizeLinear" for n in jq.export(graph, plan).graph.node)
    26
    """
    quantized = quantized_graph(graph, plan, params, format, opset, pairs)
    return finished(quantized.replace(metadata={**graph.metadata, **(metadata or {})}), path)


def quantized_graph(
    graph: Graph,
    plan: Plan,
    params: Mapping[str, Any] | None = None,
    format: Format = "qdq",
    opset: int | None = None,
    pairs: Pairs = "shared",
) -> Graph:
    """Return the graph with the plan written out as quantizer nodes."""
    check_format(format)
    arrays = {k: np.asarray(v) for k, v in (params or {}).items()}
    graph = as_planned(graph.with_arrays({**graph.arrays, **arrays}), plan)
    graph = explicit(with_opset(graph, opset))
    plan = _with_moved(graph, plan)
    writer, pairs = _Writer(graph, format), "shared" if format == "qoperator" else pairs
    for name in plan.weights:
        if name in graph.params:
            writer.weight(name, plan[name])
    for name in plan.activations:
        writer.activation(name, plan[name], _apart(graph, plan, name, pairs))
    quantized = remove_unused(writer.finish())
    return remove_unused(to_qoperator(quantized)) if format == "qoperator" else quantized


def _with_moved(graph: Graph, plan: Plan) -> Plan:
    """Return the plan with int8 tensors quantized once more behind what only moves their values, from opset 21 on.

    onnxruntime puts such quantizers there itself, exact as they are, and then makes uint8 of int8, but for the
    `output_dtype` that it has given them: it refuses its own node. It leaves alone what is quantized already.
    """
    if graph.opset() < _TYPED:
        return plan
    from jq.ops.table import lookup  # not loaded with the package

    activations = dict(plan.activations)
    for node in graph.nodes:
        qparams, entry = (
            activations.get(node.inputs[0]) if node.inputs else None,
            lookup(node, graph.opset(node.domain)),
        )
        if qparams is None or entry is None or entry.moves is None or qparams.axis is not None or qparams.dynamic:
            continue
        if isinstance(qparams.grid, Integer) and qparams.grid.signed and qparams.grid.bits == 8:
            activations |= {node.outputs[0]: activations.get(node.outputs[0], qparams)}
    return dataclasses.replace(plan, activations=activations)


def pairs_of(config: QuantConfig) -> Pairs:
    """Return which readers have quantizers of their own; Quark's readers share one, if they are not asked to have each."""
    return "shared" if config.strict_quark and config.pairs == "edges" else config.pairs


def _apart(graph: Graph, plan: Plan, name: str, pairs: Pairs) -> list[Node]:
    """The readers of a tensor that have quantizers of their own, beside the pair that the others share."""
    readers = list(dict.fromkeys(graph.consumers.get(name, ())))
    floats = [n for n in readers if n.outputs[0] not in plan.nodes and not asks_shape(n)]
    apart: Mapping[Pairs, list[Node]] = {"shared": [], "edges": floats, "each": readers}
    shared = name in graph.output_names or len(apart[pairs]) < len(readers)
    return apart[pairs] if shared else apart[pairs][1:]


def check_format(format: str) -> None:
    """Raise a ConfigError for an unknown format."""
    check_choice("format", format, get_args(Format))


# --- Quantizers as nodes ---


class _Writer:
    """Collects the nodes and arrays of quantizers, and which tensor is read instead of which."""

    def __init__(self, graph: Graph, format: Format) -> None:
        self.graph, self.format = graph, format
        self.taken = set(graph.tensors)
        self.labels = {n.name for n in graph.nodes}
        self.arrays = dict(graph.arrays)
        self.head: list[Node] = []  # of weights and inputs
        self.behind: dict[str, list[Node]] = {}  # of what a node makes, by its name there
        self.readers: dict[str, str] = {}
        self.own: dict[Node, dict[str, str]] = {}  # of readers with quantizers of their own
        self.made: dict[str, str] = {}
        self.domains: dict[str, int] = {}

    def weight(self, name: str, qparams: QParams) -> None:
        """A weight as its codes, dequantized."""
        array, grid = np.asarray(self.arrays[name], np.float32), qparams.grid
        if isinstance(grid, Integer) and self.format != "fix_neuron":
            codes = self._name(f"{name}_quantized")
            self.arrays[codes] = like(qparams.stored(array), array)
            self.head.append(self._dequantize(name, codes, qparams))
            release(array)
        elif isinstance(grid, Float):
            codes = self._name(f"{name}_quantized")
            largest = grid.largest if grid.saturates else np.inf
            self.arrays[codes] = np.clip(array, -largest, largest).astype(grid.dtype)
            self.head.append(self._cast(codes, self._read(name), TensorProto.FLOAT))
        else:
            if isinstance(grid, Integer):  # whose ends FixNeuron does not know
                self.arrays[name] = qparams.given_back(array).astype(np.float32)
            self.head += self._pair(name, name, qparams)

    def activation(self, name: str, qparams: QParams, apart: Sequence[Node] = ()) -> None:
        """A quantizer between what makes a tensor and its readers, of which some have one of their own."""
        if name in self.graph.output_names and name in self.graph.producer:
            source = self.made[name] = self._name(f"{name}_QuantizeLinear_Input")
            self.readers[name] = name
        else:
            source = name
        nodes = self._pair(name, source, qparams)
        plain = isinstance(qparams.grid, Integer) and not qparams.dynamic and len(nodes) == 2
        for reader in apart if plain else ():
            nodes += self._copy(name, nodes[:2], reader)
        if name in self.graph.producer:
            self.behind[name] = nodes
        else:
            self.head += nodes

    def _copy(self, name: str, pair: Sequence[Node], reader: Node) -> Iterator[Node]:
        """Quantizers like a pair, which one reader alone has."""
        codes, result = (self._name(node.outputs[0]) for node in pair)
        self.own.setdefault(reader, {})[name] = result
        for node, inputs, output in zip(pair, ((), (codes,)), (codes, result), strict=True):
            read = (*inputs, *node.inputs[len(inputs) :])
            yield node.replace(inputs=read, outputs=(output,), name=fresh(node.name, self.labels))

    def finish(self) -> Graph:
        """The graph with all of them."""
        nodes, labels = list(self.head), set[str]()
        for node in self.graph.nodes:
            outputs = tuple(self.made.get(o, o) for o in node.outputs)
            # onnxruntime wants different ones.
            name = fresh(node.name, self.labels) if node.name in labels else node.name
            labels |= {name} - {""}
            read = {**self.readers, **self.own.get(node, {})}
            nodes.append(reading(node, read).replace(outputs=outputs, name=name))
            nodes += [made for output in node.outputs for made in self.behind.get(output, ())]
        opsets = {**self.graph.opsets, **self.domains}
        return self.graph.with_arrays(self.arrays, nodes=tuple(nodes), opsets=opsets)

    def _pair(self, name: str, source: str, qparams: QParams) -> list[Node]:
        """Return the nodes that round a tensor: mostly two."""
        grid, result = qparams.grid, self._read(name)
        if isinstance(grid, Block):
            from jq.ops.blocks import node_of  # the op table is not loaded with the package

            op_type, domain, attrs = node_of(grid, -1 if qparams.axis is None else qparams.axis)
            return [self._node(op_type, (source,), (result,), attrs, f"{name}_{op_type}", domain)]
        if isinstance(grid, Float):
            inner, nodes = self._name(f"{name}_QuantizeLinear_Output"), list[Node]()
            if grid.saturates:
                nodes.append(self._saturate(name, source, grid.largest))
                source = nodes[-1].outputs[0]
            kind = helper.np_dtype_to_tensor_dtype(grid.dtype)
            return [*nodes, self._cast(source, inner, kind), self._cast(inner, result, TensorProto.FLOAT)]
        codes = self._name(f"{name}_QuantizeLinear_Output")
        if qparams.dynamic:
            scale, zero_point = (self._name(f"{name}_{part}") for part in ("scale", "zero_point"))
            outputs = (codes, scale, zero_point)
            return [
                self._node("DynamicQuantizeLinear", (source,), outputs, {}, f"{name}_QuantizeLinear"),
                self._node("DequantizeLinear", outputs, (result,), {}, f"{name}_DequantizeLinear"),
            ]
        if self.format == "fix_neuron" and not qparams.is_power_of_two:
            shown = "one per channel" if np.ndim(qparams.scale) else qparams.scale
            raise ConfigError(
                f"format 'fix_neuron' holds one power of two per tensor, but the scale of {name!r} is {shown}; "
                "quantize with scale='power_of_two', or use another format"
            )
        parameters = self._parameters(name, qparams)
        if self.format == "fix_neuron":
            position = {"bit_width": grid.bits, "pos": -int(qparams.exponent)}
            return [self._node("FixNeuron", (source, *parameters), (result,), position, f"{name}_FixNeuron", CONTRIB)]
        quantize = self._quantizer("QuantizeLinear", (source, *parameters), codes, f"{name}_QuantizeLinear", qparams)
        return [quantize, self._dequantize(name, codes, qparams, parameters)]

    def _saturate(self, name: str, source: str, largest: float) -> Node:
        result = self._name(f"{name}_Clip_Output")
        if self.graph.opset() < 11:
            return self._node("Clip", (source,), (result,), {"min": -largest, "max": largest}, f"{name}_Clip")
        ends = (("lowest", -largest), ("largest", largest))
        bounds = (self._constant(f"{name}_{end}", np.float32(value)) for end, value in ends)
        return self._node("Clip", (source, *bounds), (result,), {}, f"{name}_Clip")

    def _dequantize(self, name: str, codes: str, qparams: QParams, parameters: tuple[str, ...] = ()) -> Node:
        parameters = parameters or self._parameters(name, qparams)
        inputs = (codes, *parameters)
        return self._quantizer("DequantizeLinear", inputs, self._read(name), f"{name}_DequantizeLinear", qparams)

    def _quantizer(self, op_type: str, inputs: tuple[str, ...], output: str, name: str, qparams: QParams) -> Node:
        attrs = {} if qparams.axis is None else {"axis": qparams.axis}
        if attrs and inputs[0] in self.arrays:
            attrs["axis"] %= self.arrays[inputs[0]].ndim
        domain = ""
        assert isinstance(qparams.grid, Integer)
        if self.format == "vitis_qdq":
            op_type, domain = f"Vitis{op_type}", VITIS
        elif qparams.grid.bits not in (8, 32) and self.graph.opset() < 21:
            domain = MICROSOFT
        return self._node(op_type, inputs, (output,), attrs, name, domain)

    def _parameters(self, name: str, qparams: QParams) -> tuple[str, str]:
        assert isinstance(qparams.grid, Integer)
        scale = self._constant(f"{name}_scale", np.asarray(qparams.scale, np.float32))
        return scale, self._constant(f"{name}_zero_point", np.asarray(qparams.zero_point).astype(qparams.grid.dtype))

    def _cast(self, source: str, result: str, kind: int) -> Node:
        return self._node("Cast", (source,), (result,), {"to": kind}, f"{result}_Cast")

    def _node(
        self, op_type: str, inputs: Names, outputs: Names, attrs: Mapping[str, Any], name: str, domain: str = ""
    ) -> Node:
        if domain:
            self.domains[domain] = 1
        return Node(op_type, inputs, outputs, attrs, fresh(name, self.labels), domain)

    def _constant(self, name: str, array: np.ndarray | np.generic) -> str:
        name = self._name(name)
        self.arrays[name] = np.asarray(array)
        return name

    def _read(self, name: str) -> str:
        """The tensor that readers of this one get."""
        if name not in self.readers:
            self.readers[name] = self._name(f"{name}_DequantizeLinear_Output")
        return self.readers[name]

    def _name(self, name: str) -> str:
        return fresh(name, self.taken)
