"""`jq-quant convert`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import shapes_of
from jq.cli.show import answer
from jq.errors import ConfigError


@command()
def convert(
    model: Annotated[Path, typer.Argument(help="An ONNX file, float or quantized.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The result [MODEL_converted.onnx].", show_default=False)
    ] = None,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Take quantizers out of a QDQ model.")] = False,
    uint8_activations: Annotated[
        bool, typer.Option("--uint8-activations", help="int8 activations of a QDQ model as uint8, same values.")
    ] = False,
    opset: Annotated[int | None, typer.Option(help="Convert to this opset.", show_default=False)] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=1,3,224,224", help="Fix the shape of an input; may be repeated."),
    ] = None,
    nhwc: Annotated[bool, typer.Option("--nhwc", help="Take images in channels-last order.")] = False,
    to: Annotated[str | None, typer.Option(help="Float tensors to fp32, fp16 or bf16.", show_default=False)] = None,
    form: Annotated[
        str,
        typer.Option(
            help="Of fp16 and bf16: cast (float32 operators, tensors rounded by Casts), qdq (by AMD Quark's quantizers) "
            "or native (operators compute in the type)."
        ),
    ] = "cast",
    keep_io: Annotated[bool, typer.Option(help="Of fp16 and bf16: inputs and outputs stay float32.")] = True,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="Of fp16 and bf16: a node or operator left as it is; may be repeated."),
    ] = None,
    saturate: Annotated[
        bool, typer.Option("--saturate", help="Of fp16 and bf16: a weight beyond the type becomes its largest number.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Of fp16 and bf16: data on which activations must fit the type.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Convert a model: number format, opset, shapes and layout of its inputs, codes of its activations.

    Conversions are applied in the order of the options. onnxruntime runs the results, except bf16 in the native form, where
    its CPU lacks kernels such as those of Add and Relu, and for the qdq form, which needs Quark's library of custom
    operators.

    Example: jq-quant convert model.onnx --to fp16 --form native -o model_fp16.onnx

    Example: jq-quant convert model.onnx --shape input=1,3,224,224 --nhwc --opset 17

    Example: jq-quant convert model_int8.onnx --uint8-activations
    """
    shapes = shapes_of(shape or ())
    if not (dequantize or uint8_activations or opset is not None or shapes or nhwc or to):
        raise ConfigError(
            "convert needs one or more of --dequantize, --uint8-activations, --opset, --shape, --nhwc, --to; got none"
        )
    output = output or model.parent / f"{model.stem}_converted.onnx"
    made = jq.convert(
        model,
        output,
        dequantize=dequantize,
        uint8_activations=uint8_activations,
        opset=opset,
        shapes=shapes,
        nhwc=nhwc,
        to=to,  # type: ignore[arg-type]
        form=form,  # type: ignore[arg-type]
        keep_io=keep_io,
        exclude=exclude or (),
        saturate=saturate,
        data=data,
    )
    graph = jq.load(output)
    values = {"inputs": [*map(str, graph.inputs)], "outputs": [*map(str, graph.outputs)]}
    weights = Counter[str]()
    for array in graph.arrays.values():
        weights[str(array.dtype)] += array.nbytes
    facts = {"output": str(output), **values, "opset": graph.opset(), "nodes": len(graph.nodes)}
    answer(
        as_json,
        facts | {"weight_bytes": dict(sorted(weights.items()))},
        *(f"{side.removesuffix('s')} {value}" for side, interface in values.items() for value in interface),
        f"opset {graph.opset()}, {len(graph.nodes)} nodes, {made.ByteSize():,} bytes",
        f"written: {output}",
    )
