"""ONNX out: a `Graph` as a model file, and onnx's shape inference on it."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from jq.errors import ConfigError, ModelError
from jq.graph import Graph, Node, Value
from jq.graph.read import SKELETON_BYTES, element_bits, read_value
from jq.util import files
from jq.util.mapped import release

_LONGEST_SHAPE = 1 << 16
_LONGEST_DIM = 1 << 20  # a vector of so many numbers may become a type of as many dims, 140 bytes each
_MOST_PROPAGATED = 1 << 21  # of all such vectors together
_LARGEST_PROTO = (1 << 31) - (1 << 24)  # protobuf's limit, less room for the structure
_LEAST_BESIDE = 1 << 20  # bytes of weights that a runtime is given beside the model
_BESIDE = ("float32", "float16", "int8", "uint8", "int32")
_ALIGNMENT = 4096  # of external tensors, so that they can be mapped


@dataclasses.dataclass(frozen=True, kw_only=True)
class External:
    """How weights are stored in files beside the model."""

    location: str | None = None  # the name of the one file; None for the model's own with .data behind it
    one_file: bool = True  # or one for each weight
    threshold: int = SKELETON_BYTES  # smaller weights stay in the model

    def file(self, model: Path) -> Path:
        """Return the single external file beside a model."""
        return model.with_name(self.location or f"{model.name}.data")

    def check(self, graph: Graph, path: Path) -> None:
        """Raise a ConfigError if weights cannot be stored this way, or would overwrite those of the graph itself."""
        if not self.one_file:
            return
        name = self.file(path).name if self.location is None else self.location
        if name in ("", ".", "..", path.name) or Path(name).name != name or "\0" in name:
            raise ConfigError(f"external data at {name!r}: expected the name of a file beside the model {path}")
        target = self.file(path)
        mapped = {f for a in graph.arrays.values() if (f := getattr(a, "filename", None)) is not None}
        files.check_writable(target)
        if target.exists() and any(Path(f).exists() and target.samefile(f) for f in mapped):
            where = f"external data at {name!r}"
            raise ConfigError(f"{where}: the model's own weights are in this file; give another name")


def to_model(graph: Graph, params: Mapping[str, Any] | None = None, *, skeleton: bool = False) -> ModelProto:
    """Return the graph as an ONNX model, with other weights if given.

    With `skeleton`, large weights become typed inputs. Protobuf's limit is 2 GB; use `save` above it.
    """
    arrays = _arrays(graph, params)
    return _taking(graph, arrays, [k for k, a in arrays.items() if skeleton and a.nbytes > SKELETON_BYTES])


def to_model_taking(graph: Graph, weights: Iterable[str]) -> ModelProto:
    """Return the graph as an ONNX model that has some of its weights as inputs, which whoever runs it gives with the others."""
    return _taking(graph, graph.arrays, weights)


def _taking(graph: Graph, arrays: Mapping[str, np.ndarray], weights: Iterable[str]) -> ModelProto:
    taken = {k: Value(k, arrays[k].dtype, arrays[k].shape) for k in weights}
    kept = {k: a for k, a in arrays.items() if k not in taken}
    if (size := sum(a.nbytes for a in kept.values())) > _LARGEST_PROTO:
        raise ModelError(f"{size / 1e9:.1f} GB of weights do not fit one ONNX message; write the graph with jq.save")
    return _model(graph, (*graph.inputs, *taken.values()), [_tensor(k, a) for k, a in kept.items()])


def large_weights(graph: Graph) -> dict[str, np.ndarray]:
    """Return the weights of which a runtime need not have a copy in the model."""
    return {k: a for k, a in graph.params.items() if a.nbytes >= _LEAST_BESIDE and a.dtype.name in _BESIDE}


def to_model_beside(graph: Graph, weights: Mapping[str, np.ndarray]) -> ModelProto:
    """Return the graph as an ONNX model without some of its weights: their data lie in no file, but beside it."""
    tensors = [_tensor(k, a) for k, a in graph.arrays.items() if k not in weights]
    for name, array in weights.items():
        tensor = _external_tensor(name, array)
        tensor.external_data.add(key="location", value="beside")
        tensors.append(tensor)
    return _model(graph, graph.inputs, tensors)


def save(
    graph: Graph,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    check: bool = False,
    external: External | None = None,
) -> None:
    """Write the graph as an ONNX file, atomically; above protobuf's 2 GB, weights go to `<name>.data` beside it.

    With `check`, the file is replaced only by one that onnx's checker accepts, full shape inference included; of large
    weights it sees the types alone.
    `external` selects weights to store outside the model, and where, at any size.

    >>> import jq, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jq.save(jq.load(jq.zoo.path("fashion_resnet")), f"{folder}/copy.onnx")
    """
    path, arrays = Path(path), _arrays(graph, params)
    files.check_writable(path)
    if external is None and sum(a.nbytes for a in arrays.values()) > _LARGEST_PROTO:
        external = External()
    if external is not None:
        external.check(graph, path)
    if check:
        check_model(to_model(graph.with_arrays(arrays), skeleton=True))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.draft_folder(path) as folder:
            draft = folder / path.name
            if external is not None:
                tensors = _external(arrays, draft, external)
                draft.write_bytes(_model(graph, graph.inputs, tensors).SerializeToString())
            else:
                draft.write_bytes(to_model(graph, params).SerializeToString())
            for data in sorted(folder.iterdir()):
                if data != draft:
                    files.replace(data, path.parent / data.name)
            files.replace(draft, path)  # the model goes last
    except (OSError, ValueError) as error:  # protobuf and numpy raise ValueErrors too
        raise ModelError(f"cannot write the model {path}: {getattr(error, 'strerror', None) or error}") from error


def finished(graph: Graph, path: str | os.PathLike[str] | None = None) -> ModelProto:
    """Return the graph as a model that onnx's checker accepts, with the types of its tensors; write it to `path`."""
    # What the file said of types inside may be another batch's: they follow from the inputs.
    types = {k: v for k, v in infer_types(graph.replace(declared={})).items() if v.dtype is not None}
    outputs = tuple(v if v.dtype is not None and v.shape is not None else types.get(v.name, v) for v in graph.outputs)
    graph = graph.replace(declared=types, outputs=outputs)
    if path is not None:
        save(graph, path, check=True)
        return onnx.load(path)
    check_model(to_model(graph, skeleton=True))
    return to_model(graph)


def check_model(model: ModelProto) -> None:
    """Raise a ModelError unless onnx's checker accepts a model, with full shape inference.

    Outputs of unknown type or rank, which runtimes accept and the checker does not, are hidden from it.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        certain = [v for v in model.graph.output if not _is_uncertain(v)]
        if len(certain) < len(model.graph.output):
            seen = ModelProto()
            seen.CopyFrom(model)
            del seen.graph.output[:]
            seen.graph.output.extend(certain)
            return check_model(seen)
        raise ModelError(f"onnx's checker refuses the model: {str(error).strip().splitlines()[0]}") from error


def _is_uncertain(value: onnx.ValueInfoProto) -> bool:
    kind = value.type
    return kind.WhichOneof("value") is None or (kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape"))


def _arrays(graph: Graph, params: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    return {k: np.asarray(a) for k, a in {**graph.arrays, **(params or {})}.items()}


def _external(arrays: Mapping[str, np.ndarray], model: Path, external: External) -> list[TensorProto]:
    """Write tensors to files beside the model, one after the other."""
    tensors = []
    if external.one_file:
        external.file(model).touch()  # so that an older model's does not stay
    for index, (name, array) in enumerate(arrays.items()):
        inside = array.nbytes < max(external.threshold, 1)
        if inside or array.dtype == object or element_bits(array.dtype) < 8:
            tensors.append(_tensor(name, array))
            continue
        # A tensor's name may hold anything, and is no name of a file.
        path = external.file(model) if external.one_file else model.with_name(f"{model.name}.{index}.data")
        tensor = _external_tensor(name, array)
        with path.open("ab") as file:
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            for key, value in (("location", path.name), ("offset", file.tell()), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        release(array)
        tensors.append(tensor)
    return tensors


def _external_tensor(name: str, array: np.ndarray) -> TensorProto:
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return TensorProto(name=name, data_type=kind, dims=array.shape, data_location=TensorProto.EXTERNAL)


def _model(graph: Graph, inputs: Iterable[Value], initializers: Iterable[TensorProto]) -> ModelProto:
    model = helper.make_model(_graph_proto(graph, inputs, initializers), producer_name="jq")
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(d, v) for d, v in graph.opsets.items())
    # The lowest IR that has the opset: runtimes refuse an IR newer than themselves.
    model.ir_version = _ir_version(graph)
    if graph.metadata:
        helper.set_model_props(model, dict(graph.metadata))
    return model


def _graph_proto(graph: Graph, inputs: Iterable[Value], initializers: Iterable[TensorProto]) -> GraphProto:
    return helper.make_graph(
        [node_proto(n) for n in graph.nodes],
        graph.name,
        [_value_info(v) for v in inputs],
        [_value_info(v) for v in graph.outputs],
        list(initializers),
        value_info=[_value_info(v) for v in graph.declared.values() if v.name in graph.producer],
    )


def node_proto(node: Node) -> NodeProto:
    """One node as ONNX writes it."""
    proto = NodeProto(op_type=node.op_type, domain=node.domain, name=node.name, input=node.inputs, output=node.outputs)
    proto.attribute.extend(attribute_proto(node.op_type, node.domain, k, v) for k, v in node.attrs.items())
    return proto


def attribute_proto(op_type: str, domain: str, name: str, value: Any) -> AttributeProto:
    """One attribute as ONNX writes it."""
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, _tensor("", value))
    if isinstance(value, Graph):
        return AttributeProto(name=name, type=AttributeProto.GRAPH, g=_graph_proto(value, value.inputs, ()))
    if isinstance(value, tuple) and not value:  # an empty list does not show its type
        try:
            kind = onnx.defs.get_schema(op_type, domain=domain).attributes[name].type.value
        except Exception:  # custom operators have no schema
            kind = AttributeProto.INTS
        return AttributeProto(name=name, type=kind)
    return helper.make_attribute(name, value)


def _tensor(name: str, array: np.ndarray) -> TensorProto:
    if array.dtype == object:
        return helper.make_tensor(name, TensorProto.STRING, array.shape, [str(s).encode() for s in array.reshape(-1)])
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def _value_info(value: Value) -> onnx.ValueInfoProto:
    if value.dtype is None:
        return onnx.ValueInfoProto(name=value.name)
    elem = TensorProto.STRING if value.dtype == object else helper.np_dtype_to_tensor_dtype(value.dtype)
    kind = helper.make_tensor_type_proto(elem, value.shape)
    for container in reversed(value.containers):
        make = helper.make_sequence_type_proto if container == "sequence" else helper.make_optional_type_proto
        kind = make(kind)
    return helper.make_value_info(value.name, kind)


def _ir_version(graph: Graph) -> int:
    opsets = [helper.make_opsetid(d, v) for d, v in graph.opsets.items()]
    return max(8, helper.find_min_ir_version_for(opsets, ignore_unknown=True))  # other domains ask for none


def infer_types(graph: Graph) -> dict[str, Value]:
    """The types from ONNX's shape inference; empty, with a warning, if it fails, since such a graph may still run."""
    inputs = tuple(Value(v.name, v.dtype) if _endless(v) else _bounded(v) for v in graph.inputs)
    declared = {k: _bounded(v) for k, v in graph.declared.items() if not _endless(v)}
    try:
        model = to_model(graph.replace(inputs=inputs, declared=declared), skeleton=True)
        inferred = onnx.shape_inference.infer_shapes(model)
        if _propagated(inferred.graph) <= _MOST_PROPAGATED:
            inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # onnx's C++ raises many kinds
        text = f"ONNX's shape inference fails, so passes that need types of tensors do nothing: {error}"
        warnings.warn(text, stacklevel=2)
        return {}
    return {v.name: read_value(v) for v in (*inferred.graph.value_info, *inferred.graph.output)}


def _propagated(graph: GraphProto) -> int:
    """Elements of the vectors that onnx would propagate as shapes, each as a proto: it sets no limit."""
    made = {name for node in graph.node for name in node.output}
    shapes = (v.type.tensor_type.shape.dim for v in (*graph.value_info, *graph.output) if v.name in made)
    own = sum(max(shape[0].dim_value, 0) for shape in shapes if len(shape) == 1)
    return own + sum(_propagated(a.g) for n in graph.node for a in n.attribute if a.HasField("g"))


def _endless(value: Value) -> bool:
    """Whether onnx's inference might take a long vector for a shape, and make a type of that many dims."""
    shape = value.shape or ()
    return value.dtype == np.int64 and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > _LONGEST_SHAPE


def _bounded(value: Value) -> Value:
    """The value without the lengths of very long dims: a reduction may leave such a vector to onnx's inference."""
    if not any(isinstance(d, int) and d > _LONGEST_DIM for d in value.shape or ()):
        return value
    dims = tuple(None if isinstance(d, int) and d > _LONGEST_DIM else d for d in value.shape or ())
    return dataclasses.replace(value, shape=dims)
