"""Preprocessing as in onnxruntime: shape inference for all tensors, and basic graph optimizations.

The steps, their order and their options are those of onnxruntime's `quant_pre_process`, and onnxruntime itself does
the work. It gets models without weights, or files with external weights, so that no
step is limited by protobuf's 2 GB.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from pathlib import Path

import onnx
from onnx import ModelProto

from jq.errors import ConfigError, ModelError
from jq.graph import Graph, Value
from jq.graph.read import load, read_value
from jq.graph.write import External, infer_types, save, to_model
from jq.passes.opset import with_opset
from jq.util import files

_LEAST = 11  # the first opset without Upsample, which quantizers cannot do with
_MARK = {"onnx.quant.pre_process": "onnxruntime.quant"}  # by which onnxruntime's quantizers know such a model
_OUTSIDE = 1024  # bytes: what onnxruntime writes beside an optimized model


def preprocess(
    input_model_path: str | os.PathLike[str] | bytes | ModelProto | Graph,
    output_model_path: str | os.PathLike[str] | None = None,
    skip_optimization: bool = False,
    skip_onnx_shape: bool = False,
    skip_symbolic_shape: bool = False,
    auto_merge: bool = False,
    int_max: int = 2**31 - 1,
    guess_output_rank: bool = False,
    verbose: int = 0,
    save_as_external_data: bool = False,
    all_tensors_to_one_file: bool = False,
    external_data_location: str | None = None,
    external_data_size_threshold: int = 1024,
) -> ModelProto:
    """Return the model with inferred types and onnxruntime's basic optimizations; write it to `output_model_path`.

    Symbolic shape inference, an optimization by onnxruntime, and ONNX's shape inference can each be left out;
    `auto_merge`, `int_max`, `guess_output_rank` and `verbose` belong to the first. The model may also be bytes, a
    ModelProto or a Graph. Weights above 2 GB go to `<name>.data` beside the model, and others of at least
    `external_data_size_threshold` bytes where `save_as_external_data` says so. If onnxruntime cannot run the model,
    it is not optimized, and a warning says why; so it is with symbolic shape inference without sympy, which it needs.

    >>> import jq
    >>> model = preprocess(jq.zoo.path("fashion_resnet"))
    >>> len(jq.load(jq.zoo.path("fashion_resnet")).nodes), len(model.graph.node), len(model.graph.value_info)
    (53, 38, 38)
    """
    files.check_writable(output_model_path, input_model_path)
    path = None if output_model_path is None else Path(output_model_path)
    source = input_model_path if isinstance(input_model_path, Graph) else load(input_model_path)
    external = None
    if save_as_external_data:
        if path is None:
            raise ConfigError("save_as_external_data writes beside the output file; give output_model_path")
        # The folder itself, onnxruntime's older default, names no file.
        location = None if external_data_location in (None, ".", "./") else external_data_location
        external = External(location=location, one_file=all_tensors_to_one_file, threshold=external_data_size_threshold)
    if path is not None:
        (external or External()).check(source, path)
        path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=None if path is None else path.parent, prefix=".preprocess.") as folder:
        graph = with_opset(source, _LEAST) if source.opset() < _LEAST else source
        if not skip_symbolic_shape:
            try:
                graph = infer_symbolic_types(
                    graph, int_max=int_max, auto_merge=auto_merge, guess_output_rank=guess_output_rank, verbose=verbose
                )
            except ConfigError as error:
                warnings.warn(str(error), stacklevel=2)
        if not skip_optimization:
            graph = _optimized(graph, Path(folder))
        if not skip_onnx_shape:
            graph = _declaring(graph, infer_types(graph))
        graph = graph.replace(metadata={**_MARK, **graph.metadata})
        if path is None:
            return to_model(graph)
        save(graph, path, external=external)
    return onnx.load(path)


def infer_symbolic_types(
    graph: Graph, *, int_max: int = 2**31 - 1, auto_merge: bool = False, guess_output_rank: bool = False,
    verbose: int = 0,
) -> Graph:  # fmt: skip
    """The graph with the types that onnxruntime's symbolic shape inference finds.

    >>> import jq
    >>> graph = infer_symbolic_types(jq.load(jq.zoo.path("fashion_resnet")))
    >>> str(graph.declared["pool"])
    'pool: float32[N,72]'
    """
    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
    except ImportError as error:
        raise ConfigError(
            f"symbolic shape inference needs a package that is not installed ({error}); "
            "`pip install sympy`, or skip it with skip_symbolic_shape"
        ) from error
    model = to_model(graph, skeleton=True)
    # Where it fails it leaves the model in the working directory.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            inferred = SymbolicShapeInference.infer_shapes(model, int_max, auto_merge, guess_output_rank, verbose)
        except Exception as error:  # its own, sympy's and onnx's exceptions have many types
            raise ModelError(
                f"onnxruntime's symbolic shape inference fails: {_line(error)}; try auto_merge or "
                "guess_output_rank, or skip it with skip_symbolic_shape"
            ) from error
    return _declaring(graph, {v.name: read_value(v) for v in (*inferred.graph.value_info, *inferred.graph.output)})


def _optimized(graph: Graph, folder: Path) -> Graph:
    """Return the graph after onnxruntime's basic optimizations, with weights mapped to a file in the folder."""
    import onnxruntime as ort

    given, made = folder / "given.onnx", folder / "optimized.onnx"
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it says is in the exception
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(made)
    for key, value in (("file_name", f"{made.name}.data"), ("min_size_in_bytes", str(_OUTSIDE))):
        options.add_session_config_entry(f"session.optimized_model_external_initializers_{key}", value)
    save(graph, given, external=External(threshold=_OUTSIDE))
    try:
        ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises many kinds
        reason = f"onnxruntime does not run the model: {_line(error)}"
        warnings.warn(f"the model is not optimized; skip this step with skip_optimization. {reason}", stacklevel=3)
        return graph
    optimized = load(made)
    # onnxruntime names every operator set that it knows, and forgets what the model says of its origin.
    used = {n.domain for n in optimized.walk()} | graph.opsets.keys()
    opsets = {domain: version for domain, version in optimized.opsets.items() if domain in used}
    return optimized.replace(opsets=opsets, metadata={**graph.metadata, **optimized.metadata}, name=graph.name)


def _declaring(graph: Graph, types: dict[str, Value]) -> Graph:
    """Return the graph with these types wherever they are more specific than its own."""
    known = {k: v for k, v in types.items() if v.dtype is not None}
    shaped = {k: v for k, v in known.items() if v.shape is not None}
    outputs = tuple(shaped.get(v.name, v) for v in graph.outputs)
    return graph.replace(declared={**graph.declared, **known}, outputs=outputs)


def _line(error: Exception) -> str:
    """Return an exception's message, or its type, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
