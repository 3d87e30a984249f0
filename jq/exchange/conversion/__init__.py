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
from jq.exchange.conversion.interface import nhwc_inputs
from jq.exchange.conversion.overflow import overflowing
from jq.exchange.conversion.precision import FLOAT32, inputs_and_outputs, to_float32, to_narrow, with_interface
from jq.exchange.conversion.quantizers import unsigned_activations, without_quantizers
from jq.graph import Graph
from jq.graph.read import load
from jq.graph.shapes import fix_shapes
from jq.graph.write import External, finished
from jq.passes.opset import check_opset, with_opset
from jq.readings.diagnosis import blames_model
from jq.util import files

__all__ = [
    "convert", "fix_shapes", "nhwc_inputs", "overflowing", "to_float32", "to_narrow", "unsigned_activations",
    "with_casts", "with_interface", "with_opset", "with_quantizers", "without_quantizers",
]  # fmt: skip

Precision = Literal["fp32", "fp16", "bf16"]
Form = Literal["cast", "qdq", "native"]

_NARROW = {"fp16": FLOAT16, "bf16": BFLOAT16}


@blames_model
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

    Conversions happen in the order of the parameters: remove quantizers (`without_quantizers`), or turn their int8
    activations into uint8 (`unsigned_activations`); change the opset (`with_opset`); fix the shapes of inputs
    (`fix_shapes`); put inputs into channels-last order (`nhwc_inputs`); and change the type of float tensors.

    `to="fp32"` removes float16 and bfloat16 (`to_float32`). "fp16" and "bf16" have three forms. In the form "cast",
    operators compute in float32 on tensors that Casts round, and weights are stored in the type (`with_casts`);
    onnxruntime runs both types. "qdq" does the same with AMD Quark's quantizers (`with_quantizers`), which onnxruntime
    runs only with Quark's library. In the form "native", operators compute in the type (`to_narrow`): onnxruntime's CPU
    runs float16, but lacks bfloat16 kernels such as those of Add and Relu (`jq.trace` runs them). ONNX allows bfloat16
    for a Conv from opset 22 on. `keep_io=False` also changes the type of inputs and outputs. A weight beyond the type is an
    error that names the tensor, and so is an activation if `data` is given (what `jq.calibrate` takes). `exclude` keeps
    nodes in float32; `saturate` replaces such weights by the largest number, and turns the error on activations into a
    warning.

    >>> import jq
    >>> model = jq.convert(jq.zoo.path("fashion_resnet"), to="fp16", form="native", shapes={"input": (1, 1, 28, 28)})
    >>> model.ByteSize() / jq.to_model(jq.load(jq.zoo.path("fashion_resnet"))).ByteSize() < 0.6
    True
    """
    if to is not None:
        check_choice("to", to, get_args(Precision))
    check_choice("form", form, get_args(Form))
    if dequantize and uint8_activations:
        raise ConfigError("dequantize leaves no codes for uint8_activations to convert; use one of the two")
    if to not in _NARROW and (exclude or saturate or not keep_io or data is not None):
        raise ConfigError("exclude, saturate, keep_io and data apply only to conversions to fp16 and bf16")
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
        f"{len(largest)} activations exceed the range of {format.name}, which ends at {format.largest:.6g}: "
        f"{', '.join(f'{name!r} reaches {largest:.6g}' for name, largest in worst)}"
    )
    if not saturate:
        raise ModelError(f"{text}. Exclude the nodes that write and read them")
    warnings.warn(text, stacklevel=3)
