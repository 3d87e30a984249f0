"""ONNX in: a model file, which is untrusted input, becomes a `Graph` or a `ModelError`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.inliner
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from jq.errors import ModelError
from jq.graph import Dim, Graph, Node, Value
from jq.graph.checks import check_names, check_node, check_text
from jq.graph.order import sorted_nodes
from jq.util import files

OLDEST_OPSET = 1  # opsets below 7 are read, though only 7 and up are promised
# Tensors above this size never travel through onnx's C++ (which serializes, hence the 2 GB limit).
# Shape inference needs the values of shape tensors only, and those are small.
SKELETON_BYTES = 4096
# What a file states in few bytes, repeated values and sparse tensors, is made while it is read up to this sum. Other
# repeated values are made when the function is traced, and more sparse ones are refused.
_MADE_BYTES = 256 << 20
_FILLED_BYTES = 64 << 20  # of one of them
# No machine that runs this holds more in one tensor; a header that says so is damaged or hostile.
_MAX_TENSOR_BYTES = 1 << 38
_LARGEST_FILE = (1 << 31) - 1  # bytes that protobuf, of which ONNX's files are made, reads as one message
# Local functions may double at every level: a few kilobytes can stand for more nodes than memory holds. Exporters write a
# function for each layer, and call it some times: nodes may become so many times more, and so many in any case.
_EXPANSION, _MANY_NODES = 64, 4096
_DEEPEST = 16  # levels of graphs: types are inferred at each level for all below it
Arrays: TypeAlias = dict[str, np.ndarray]
ModelLike: TypeAlias = str | os.PathLike[str] | bytes | ModelProto | Graph  # what functions take as a model


def load(source: str | os.PathLike[str] | bytes | ModelProto) -> Graph:
    """Return the graph of an ONNX model given as a path, its bytes, or a `ModelProto`.

    External data are memory-mapped, and must lie inside the model's folder. Anything wrong with the
    file is a `ModelError` that names the tensor or node.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> [str(v) for v in graph.inputs]
    ['input: float32[N,1,28,28]']
    """
    folder: Path | None = None
    if isinstance(source, ModelProto):
        model = ModelProto()
        model.CopyFrom(source)
    else:
        if not isinstance(source, bytes):
            try:
                path = Path(source)
            except TypeError:
                known = "a path, the bytes of a file or a ModelProto"
                raise ModelError(f"a model of type {type(source).__name__!r}: expected {known}") from None
            folder = path.parent
            with files.reading(path, ModelError, "the model "):
                size = path.stat().st_size
            if size > _LARGEST_FILE:
                raise ModelError(
                    f"the model {path} has {size / 1e9:.1f} GB, and one file of ONNX's format holds at most 2 GB; store its "
                    "weights as external data: onnx.save_model(model, path, save_as_external_data=True)"
                )
            source = files.content(path, error=ModelError, kind="the model ")
        model = ModelProto()
        try:
            model.ParseFromString(source)
        except DecodeError as error:
            raise ModelError(f"not an ONNX model, or a truncated one ({len(source)} bytes): {error}") from error
        del source  # which the model holds once more
    return _Reader(model, folder).read()


class _Reader:
    """The state of one `load`: where external data lie, and the arrays as they are found."""

    def __init__(self, model: ModelProto, folder: Path | None) -> None:
        self.model = model
        self.folder = folder
        # IR versions before 3 state none.
        self.opsets = {_domain(o.domain): o.version for o in model.opset_import} or {"": 1}
        self.arrays: dict[str, np.ndarray] = {}
        self.made = 0  # bytes

    def read(self) -> Graph:
        model = self.model
        if not model.HasField("graph") or not (model.graph.node or model.graph.output):
            raise ModelError("not an ONNX model: it holds no graph")
        self._check_opsets()
        check_text("metadata entry", [text for p in model.metadata_props for text in (p.key, p.value)])
        initializers = self._tensors(model.graph)
        if model.functions:
            model = _inlined(model)
        if (levels := _nesting(model.graph)) > _DEEPEST:
            raise ModelError(f"subgraphs are nested {levels} deep; expected at most {_DEEPEST}")
        graph = self._graph(model.graph, frozenset(), initializers, prefix="", outer={})
        if not all(v.name for v in (*graph.inputs, *graph.outputs)):
            raise ModelError("an input or output of the graph has no name")
        if untyped := next((v.name for v in graph.inputs if v.dtype is None), None):  # onnx's inference may crash on it
            raise ModelError(f"input {untyped!r} of the graph has no type; declare its element type in the file")
        metadata = {p.key: p.value for p in self.model.metadata_props}
        return graph.with_arrays(self.arrays, metadata=metadata)

    def _check_opsets(self) -> None:
        newest = onnx.defs.onnx_opset_version()
        if not OLDEST_OPSET <= self.opsets.get("", newest) <= newest:
            raise ModelError(
                f"opset {self.opsets['']} is outside 7..{newest}, the range of the installed onnx {onnx.__version__}; "
                "update onnx, or convert the model with onnx.version_converter"
            )

    def _tensors(self, graph: GraphProto) -> Arrays:
        """Take the initializers out of a proto: what remains is small enough for onnx's C++."""
        arrays: Arrays = {}
        for tensor in graph.initializer:
            if tensor.name in arrays:
                raise ModelError(f"initializer {tensor.name!r} is defined twice")
            arrays[tensor.name] = self.array(tensor)
        for sparse in graph.sparse_initializer:
            arrays[sparse.values.name] = self.dense(sparse)
        return arrays

    def _graph(
        self, proto: GraphProto, scope: frozenset[str], initializers: Arrays, prefix: str, outer: Mapping[str, str]
    ) -> Graph:
        """A graph or subgraph; `scope` is what the graphs around it define, `outer` their renamings."""
        check_names(proto)
        for node in proto.node:
            check_node(node, self.opsets.get(_domain(node.domain), 1))
        renamed = dict(outer)

        def add_array(name: str, array: np.ndarray) -> None:
            # Branches of an If may each have a "const": arrays are one flat dict, so tell them apart.
            unique = prefix + name
            while prefix and unique in self.arrays:  # nodes need not have different names
                unique += "'"
            if unique in self.arrays:
                raise ModelError(f"tensor {name!r} is defined twice")
            renamed[name] = unique
            self.arrays[unique] = array

        for name, array in initializers.items():
            add_array(name, array)
        inputs = tuple(read_value(v) for v in proto.input if v.name not in initializers)
        for name, count in collections.Counter(v.name for v in inputs).items():
            if count > 1:
                raise ModelError(f"input {name!r} is defined twice")
        for value in inputs:
            _checked_shape(value.name, _ints(value), value.dtype.itemsize if value.dtype else 1)
        nodes: list[Node] = []
        raw: list[NodeProto] = []
        for node in proto.node:
            if node.op_type == "Constant" and _domain(node.domain) == "" and len(node.output) == 1:
                add_array(node.output[0], self._constant(node))
            elif (filled := self._filled(node, renamed)) is not None:
                add_array(node.output[0], filled)
            else:
                raw.append(node)
        made = {o for n in raw for o in n.output}
        defined = {v.name for v in inputs} | {o for n in proto.node for o in n.output} - made
        inside = scope | defined | made
        for index, node in enumerate(raw):
            path = f"{prefix}{node.name or f'node{index}'}/"
            nodes.append(self._node(node, inside, path, renamed))
        declared = {v.name: read_value(v) for v in proto.value_info}
        outputs = tuple(_rename(read_value(v), renamed) for v in proto.output)
        ordered = sorted_nodes(nodes, scope | defined | self.arrays.keys(), outputs)
        return Graph(ordered, inputs, outputs, {}, {}, self.opsets, proto.name or "graph", declared)

    def _node(self, proto: NodeProto, scope: frozenset[str], prefix: str, renamed: Mapping[str, str]) -> Node:
        attrs: dict[str, Any] = {}
        for attribute in proto.attribute:
            try:
                attrs[attribute.name] = self._attribute(attribute, scope, f"{prefix}{attribute.name}/", renamed)
            except ModelError:
                raise
            except Exception as error:
                where = f"node {proto.name!r} ({proto.op_type}): attribute {attribute.name!r}"
                raise ModelError(f"{where}: {error}") from error
        inputs = tuple(renamed.get(i, i) for i in proto.input)
        return Node(proto.op_type, inputs, tuple(proto.output), attrs, proto.name, _domain(proto.domain))

    def _attribute(self, proto: AttributeProto, scope: frozenset[str], prefix: str, outer: Mapping[str, str]) -> Any:
        kind = proto.type
        if kind == AttributeProto.GRAPH:
            return self._graph(proto.g, scope, self._tensors(proto.g), prefix, outer)
        if kind == AttributeProto.TENSOR:
            return self.array(proto.t)
        if kind == AttributeProto.SPARSE_TENSOR:
            return self.dense(proto.sparse_tensor)
        if kind == AttributeProto.STRING:
            return _text(proto.s)
        if kind == AttributeProto.STRINGS:
            return tuple(_text(s) for s in proto.strings)
        value = helper.get_attribute_value(proto)
        if value is None:
            raise ModelError(f"attribute {proto.name!r} has no type and so no value")
        return tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else value

    def _constant(self, node: NodeProto) -> np.ndarray:
        if (count := len(node.attribute)) != 1:
            raise ModelError(f"Constant {node.output[0]!r} has {count} attributes; expected exactly one value")
        attribute = node.attribute[0]
        value = self._attribute(attribute, frozenset(), "", {})
        match attribute.name:
            case "value" | "sparse_value":
                return value
            case "value_float" | "value_floats":
                return np.asarray(value, np.float32)
            case "value_int" | "value_ints":
                return np.asarray(value, np.int64)
            case "value_string" | "value_strings":
                return np.asarray(value, object)
        raise ModelError(f"Constant {node.output[0]!r} has an unknown attribute {attribute.name!r}")

    def _filled(self, node: NodeProto, renamed: Mapping[str, str]) -> np.ndarray | None:
        """Fold ConstantOfShape of a constant shape into an array, which is a weight if it is float.

        (XLA 0.10.2 miscomputes chains of convolutions whose weights are known to repeat one value.)
        """
        if node.op_type != "ConstantOfShape" or node.domain or len(node.input) != 1:
            return None
        shape = self.arrays.get(renamed.get(node.input[0], node.input[0]))
        value = np.zeros(1, np.float32)
        for attribute in node.attribute:
            value = self.array(attribute.t)
        if shape is None or shape.ndim != 1 or value.size != 1 or shape.min(initial=0) < 0:
            return None
        dims = tuple(shape.tolist())
        size = math.prod(dims) * value.itemsize
        if size > min(_FILLED_BYTES, _MADE_BYTES - self.made):
            return None
        try:
            filled = np.full(dims, value.reshape(()))
        except ValueError:  # more dims than numpy has: an error where the node is evaluated
            return None
        self.made += size
        return filled

    def dense(self, sparse: onnx.SparseTensorProto) -> np.ndarray:
        """A sparse tensor as a dense array."""
        values, indices, name = self.array(sparse.values), self.array(sparse.indices), sparse.values.name
        shape = _checked_shape(name, sparse.dims, values.dtype.itemsize)
        self.made += math.prod(shape) * values.dtype.itemsize
        if self.made > _MADE_BYTES:
            raise ModelError(
                f"sparse tensor {name!r} of shape {shape}: as dense arrays, the sparse tensors up to this one would take "
                f"{self.made / 1e9:.1f} GB; store it as a dense tensor"
            )
        try:
            dense = np.zeros(shape, values.dtype)
            if indices.ndim == 1:
                dense.reshape(-1)[indices] = values
            else:
                dense[tuple(indices.T)] = values
        except (IndexError, ValueError, MemoryError) as error:
            raise ModelError(f"sparse tensor {name!r}: {error}") from error
        return dense

    def array(self, tensor: TensorProto) -> np.ndarray:
        """A tensor's values, after its declared size was checked against its bytes."""
        name = tensor.name or "(unnamed)"
        if tensor.data_type == TensorProto.STRING:
            shape = _checked_shape(name, tensor.dims, 1)
            if math.prod(shape) != len(tensor.string_data):
                raise ModelError(f"tensor {name!r}: shape {shape} does not fit {len(tensor.string_data)} strings")
            return np.array([s.decode("utf-8", "replace") for s in tensor.string_data], object).reshape(shape)
        dtype = _dtype(tensor.data_type)
        if dtype is None:
            raise ModelError(f"tensor {name!r} has the unknown element type {tensor.data_type}")
        bits = element_bits(dtype)
        shape = _checked_shape(name, tensor.dims, max(1, bits // 8))
        expected = (math.prod(shape) * bits + 7) // 8
        if tensor.data_location == TensorProto.EXTERNAL:
            raw = self._external(tensor, expected)
            if bits >= 8:
                return raw.view(dtype).reshape(shape)
            tensor = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=raw.tobytes())
        elif tensor.HasField("raw_data") and (held := len(tensor.raw_data)) != expected:
            raise ModelError(f"tensor {name!r}: shape {shape} of {dtype} needs {expected} bytes; the file holds {held}")
        try:
            return numpy_helper.to_array(tensor)
        except Exception as error:  # numpy and onnx raise several kinds here
            raise ModelError(f"tensor {name!r}: shape {shape} of {dtype} does not fit its data: {error}") from error

    def _external(self, tensor: TensorProto, expected: int) -> np.ndarray:
        name = tensor.name
        entries = {e.key: e.value for e in tensor.external_data}
        if self.folder is None:
            raise ModelError(f"tensor {name!r} is stored in an external file; load the model by its path")
        location = entries.get("location", "")
        try:
            path = (self.folder / location).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a null byte, a name too long, a loop of links
            raise ModelError(f"tensor {name!r}: external data {location!r}: {error}") from error
        if not location or not path.is_relative_to(self.folder.resolve()):
            raise ModelError(f"tensor {name!r}: external data path {location!r} is outside the model's folder; refused")
        try:
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
            size = path.stat().st_size
        except (ValueError, OSError) as error:
            raise ModelError(f"tensor {name!r}: external data {location!r}: {error}") from error
        if length != expected or offset < 0 or offset + length > size or not path.is_file():
            raise ModelError(
                f"tensor {name!r} needs {expected} bytes; external data {location!r} declares {length} at offset "
                f"{offset} of {size}"
            )
        if expected == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(path, np.uint8, "r", offset, (expected,))


def _inlined(model: ModelProto) -> ModelProto:
    """The model with its local functions replaced by their bodies."""
    light = ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if tensor.ByteSize() > SKELETON_BYTES:
            _strip(tensor)
    bodies = {_callee(f.domain, f.name, f): f.node for f in model.functions}
    try:
        limit = max(_MANY_NODES, _EXPANSION * (len(model.graph.node) + sum(map(len, bodies.values()))))
        if (count := _expanded(model.graph.node, bodies, {}, ())) > limit:
            raise ModelError(f"its {len(bodies)} functions expand to {count} nodes; expected at most {limit}")
        return onnx.inliner.inline_local_functions(light)
    except Exception as error:
        raise ModelError(f"the model's local functions cannot be inlined: {error}") from error


def _callee(domain: str, name: str, proto: NodeProto | onnx.FunctionProto) -> tuple[str, str, str]:
    return _domain(domain), name, getattr(proto, "overload", "")


def _expanded(
    nodes: Iterable[NodeProto],
    bodies: Mapping[Any, Sequence[NodeProto]],
    sizes: dict[Any, int],
    active: tuple[Any, ...],
) -> int:
    """The number of nodes after local functions are inlined; onnx's inliner sets no limit."""
    total = 0
    for node in nodes:
        key = _callee(node.domain, node.op_type, node)
        if key in active:
            raise ModelError(f"function {node.op_type!r} calls itself")
        if key in bodies:
            if key not in sizes:
                sizes[key] = _expanded(bodies[key], bodies, sizes, (*active, key))
            total += sizes[key]
        else:
            graphs = [g for a in node.attribute for g in (*a.graphs, *([a.g] if a.HasField("g") else []))]
            total += 1 + sum(_expanded(g.node, bodies, sizes, active) for g in graphs)
    return total


def _nesting(graph: GraphProto) -> int:
    """How many levels of graphs there are, this one included."""
    inner = (_nesting(a.g) for n in graph.node for a in n.attribute if a.HasField("g"))
    return 1 + max(inner, default=0)


def _strip(tensor: TensorProto) -> None:
    """Drop a tensor's payload, which `_Reader` has already read."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data"):
        tensor.ClearField(field)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _rename(value: Value, renamed: Mapping[str, str]) -> Value:
    return dataclasses.replace(value, name=renamed.get(value.name, value.name))


def element_bits(dtype: np.dtype) -> int:
    """Bits of one element as ONNX stores it: 4- and 2-bit types are packed."""
    name = dtype.name
    for stem, bits in (("int4", 4), ("int2", 2), ("float4", 4)):
        if name.removeprefix("u").startswith(stem):
            return bits
    return dtype.itemsize * 8


def _checked_shape(name: str, dims: Iterable[int], itemsize: int) -> tuple[int, ...]:
    shape = tuple(int(d) for d in dims)
    if any(d < 0 for d in shape) or math.prod(shape) * itemsize > _MAX_TENSOR_BYTES:
        raise ModelError(f"tensor {name!r} declares the impossible shape {shape}")
    return shape


def _ints(value: Value) -> list[int]:
    return [d for d in value.shape or () if isinstance(d, int)]


@functools.cache
def _dtype(elem_type: int) -> np.dtype | None:
    if elem_type == TensorProto.STRING:
        return np.dtype(object)
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(elem_type))
    except (KeyError, TypeError, ValueError):
        return None


def read_value(proto: onnx.ValueInfoProto) -> Value:
    """The type that a `ValueInfoProto` states."""
    kind, containers = proto.type, []
    while (container := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        containers.append(container.removesuffix("_type"))
        kind = getattr(kind, container).elem_type
    if not kind.HasField("tensor_type"):
        return Value(proto.name)
    tensor = kind.tensor_type
    shape = tuple(map(_dim, tensor.shape.dim)) if tensor.HasField("shape") else None
    return Value(proto.name, _dtype(tensor.elem_type), shape, tuple(containers))


def _dim(proto: onnx.TensorShapeProto.Dimension) -> Dim:
    if proto.HasField("dim_value"):
        return proto.dim_value if proto.dim_value >= 0 else None
    return proto.dim_param.strip("?") or None
