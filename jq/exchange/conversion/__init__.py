"""Conversions: a model as another one that computes the same, or the same in another number format.

Each conversion is a function of its own, Graph to Graph; `convert` applies those asked for, in a stated order, and
checks what comes out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from onnx import ModelProto

from jq.arithmetic.formats import BFLOAT16, FLOAT16, Float
from jq.errors import ConfigError, ModelError, check_choice
from jq.exchange.conversion.casts import with_casts, with_quantizers
from jq.exchange.conversion.interface import fix_shapes, nhwc_inputs
from jq.exchange.conversion.overflow import overflowing
from jq.exchange.conversion.precision import FLOAT32, inputs_and_outputs, to_float32, to_narrow, with_interface
from jq.exchange.conversion.quantizers import unsigned_activations, without_quantizers
from jq.graph import Graph
from jq.graph.read import load
from jq.graph.write import External, finished
from jq.passes.opset import check_opset, with_opset
from jq.util import files

__all__ = [
    "convert", "fix_shapes", "nhwc_inputs", "overflowing", "to_float32", "to_narrow", "unsigned_activations",
    "with_casts", "with_interface", "with_opset", "with_quantizers", "without_quantizers",
]  # fmt: skip

Precision = Literal["fp32", "fp16", "bf16"]
Form = Literal["cast", "qdq", "native"]

_NARROW = {"fp16": FLOAT16, "bf16": BFLOAT16}


def convert(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph,
    output: str | os.PathLike[str] | None = None,
    *,
    dequantize: bool = False,
    uint8_activations: bool = False,
    opset: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    nhwc: bool = False,
    to: Precision | None = None,
    form: Form = "cast",
    keep_io: bool = True,
    exclude: Collection[str] = (),
    saturate: bool = False,
    data: Any = None,
) -> ModelProto:
    """Return the converted model, which onnx's checker accepts; write it to `output`, atomically.

    Conversions happen in the order of the parameters: quantizers removed (`without_quantizers`), or their int8
    activations made uint8 (`unsigned_activations`); another opset (`with_opset`); inputs of fixed shapes
    (`fix_shapes`), in channels-last order (`nhwc_inputs`); and float tensors in another type.

    `to="fp32"` takes float16 and bfloat16 out (`to_float32`). Of "fp16" and "bf16" there are three forms. "cast":
    operators compute in float32 on tensors that Casts round, weights are stored in the type (`with_casts`);
    onnxruntime runs both types. "qdq": the same with AMD Quark's quantizers (`with_quantizers`), which onnxruntime
    runs only with Quark's library. "native": operators compute in the type (`to_narrow`); onnxruntime's CPU runs
    float16, and of bfloat16 lacks kernels as those of Add and Relu (`jq.trace` runs it). ONNX allows bfloat16 for a Conv
    from opset 22 on. `keep_io=False` makes inputs and outputs of the type, too. What is beyond the type is an error that
    names the tensor: weights, and with `data` (what `jq.calibrate` takes) activations. `exclude` keeps nodes in
    float32; `saturate` makes such weights the largest number, and the error on activations a warning.

    >>> import jq
    >>> model = jq.convert(jq.zoo.path("fashion_resnet"), to="fp16", form="native", shapes={"input": (1, 1, 28, 28)})
    >>> model.ByteSize() / jq.to_model(jq.load(jq.zoo.path("fashion_resnet"))).ByteSize() < 0.6
    True
    """
    if to is not None:
        check_choice("to", to, get_args(Precision))
    check_choice("form", form, get_args(Form))
    if dequantize and uint8_activations:
        raise ConfigError("dequantize leaves no codes for uint8_activations to change; take one of the two")
    if to not in _NARROW and (exclude or saturate or not keep_io or data is not None):
        raise ConfigError("exclude, saturate, keep_io and data are of conversions to fp16 and bf16")
    check_opset(opset)
    files.check_writable(output, model)
    graph = model if isinstance(model, Graph) else load(model)
    if output is not None:
        External().check(graph, Path(output))  # of what is above protobuf's limit
    if dequantize:
        graph = without_quantizers(graph)
    if uint8_activations:
        graph = unsigned_activations(graph)
    if opset is not None:
        graph = with_opset(graph, opset)
    if shapes:
        graph = fix_shapes(graph, shapes)
    if nhwc:
        graph = nhwc_inputs(graph)
    if to in _NARROW and data is not None:
        _check_activations(graph, _NARROW[to], data, exclude, saturate)
    if to == "fp32":
        graph = to_float32(graph)
    elif to is not None and form == "native":
        graph = to_narrow(graph, _NARROW[to], exclude=exclude, keep_io=keep_io, saturate=saturate)
    elif to is not None:
        rounded = with_casts if form == "cast" else with_quantizers
        graph = rounded(graph, _NARROW[to], exclude=exclude, saturate=saturate)
        graph = graph if keep_io else with_interface(graph, inputs_and_outputs(graph, FLOAT32), _NARROW[to].dtype)
    return finished(graph, output)


def _check_activations(graph: Graph, format: Float, data: Any, exclude: Collection[str], saturate: bool) -> None:
    largest = overflowing(graph, format, data, exclude=exclude)
    if not largest:
        return
    worst = sorted(largest.items(), key=lambda item: -item[1])[:5]
    text = (
        f"{len(largest)} activations are beyond {format.name}, which ends at {format.largest:.6g}: "
        f"{', '.join(f'{name!r} reaches {largest:.6g}' for name, largest in worst)}"
    )
    if not saturate:
        raise ModelError(f"{text}. Exclude the nodes that make and read them")
    warnings.warn(text, stacklevel=3)
