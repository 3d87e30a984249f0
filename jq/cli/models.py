"""`jq-quant` inspect, lint, preprocess and convert: a model without data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Config, FloatModel, beginning, config_of, shapes_of
from jq.cli.show import answer, table
from jq.errors import ConfigError, UnsupportedOp
from jq.npu.facts import CHIPS

if TYPE_CHECKING:
    from jq.evidence.inspection import Inspection


@command()
def inspect(
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=1,3,224,224",
            help="The shape of an input with free dims [1 for each free dim]; may be repeated.",
        ),
    ] = None,
) -> None:
    """Show a model's interface, operators, parameters and MACs.

    MACs (multiply-accumulates) depend on the input shapes. Operators without a rule in jq are listed,
    and the command then exits with an error.

    Example: jq-quant inspect model.onnx --shape input=8,3,224,224

    Example: jq-quant inspect model_xint8.onnx --json
    """
    inspection = jq.inspect(jq.load(model), shapes_of(shape or ()))
    answer(as_json, inspection.to_dict(), *_parts(inspection, model.name))
    if inspection.unsupported:
        raise UnsupportedOp("; ".join(inspection.unsupported))


def _parts(inspection: Inspection, title: str) -> tuple[Any, ...]:
    macs: Mapping[str, int] = inspection.macs or {}
    sides = (("input", inspection.inputs), ("output", inspection.outputs))
    interface = [
        (side, v.name, " ".join([*v.containers, str(v.dtype or "?")]), _dims(v.shape))
        for side, values in sides
        for v in values
    ]
    ops = [(op, f"{count:,}", f"{macs[op]:,}" if op in macs else "") for op, count in inspection.ops.items()]
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in inspection.opsets.items())
    at = ", ".join(f"{name}={_dims(shape)}" for name, shape in inspection.shapes.items())
    total = f"unknown: {inspection.reason}" if inspection.total_macs is None else f"{inspection.total_macs:,} at {at}"
    return (
        table(("", "name", "type", "shape"), interface, title),
        table(("operator", "nodes", "MACs"), ops),
        f"opsets: {opsets}",
        f"parameters: {inspection.parameters:,} ({inspection.parameter_bytes:,} bytes)",
        f"MACs: {total}",
        *(f"unsupported: {line}" for line in inspection.unsupported),
    )


def _dims(shape: Sequence[int | str | None] | None) -> str:
    return "?" if shape is None else "[" + ",".join("?" if d is None else str(d) for d in shape) + "]"


@command()
def lint(
    model: FloatModel,
    config: Config = "XINT8",
    chip: Annotated[
        str | None,
        typer.Option(
            help="The chip that the model is for: phx, hpt, stx or krk [any].", autocompletion=beginning(lambda: CHIPS)
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find problems before you quantize.

    The exit code is 1 if one of them is an error.

    Example: jq-quant lint model.onnx --config XINT8
    """
    findings = jq.lint(model, config_of(config, model), chip)
    lines = (*map(str, findings), f"{model.name}: {len(findings)} finding(s)")
    answer(as_json, [dataclasses.asdict(f) for f in findings], *lines)
    if any(f.severity == "error" for f in findings):
        raise typer.Exit(1)


@command(writes=("output_model_path",))
def preprocess(
    input_model_path: FloatModel,
    output_model_path: Annotated[
        Path | None, typer.Option("--output", "-o", help="The result [MODEL_preprocessed.onnx].", show_default=False)
    ] = None,
    skip_optimization: Annotated[
        bool, typer.Option("--skip-optimization", help="Do not let onnxruntime optimize the model.")
    ] = False,
    skip_onnx_shape: Annotated[
        bool, typer.Option("--skip-onnx-shape", help="Do not run onnx's shape inference.")
    ] = False,
    skip_symbolic_shape: Annotated[
        bool, typer.Option("--skip-symbolic-shape", help="Do not run symbolic shape inference.")
    ] = False,
    auto_merge: Annotated[
        bool, typer.Option("--auto-merge", help="In symbolic shape inference, merge dims that conflict.")
    ] = False,
    int_max: Annotated[
        int, typer.Option(help="In symbolic shape inference, treat the end of a Slice as unbounded from this value on.")
    ] = 2**31 - 1,
    guess_output_rank: Annotated[
        bool,
        typer.Option(
            "--guess-output-rank",
            help="In symbolic shape inference, give outputs of unknown operators the rank of their first input.",
        ),
    ] = False,
    verbose: Annotated[int, typer.Option(help="In symbolic shape inference, 1 logs warnings and 3 everything.")] = 0,
    save_as_external_data: Annotated[
        bool, typer.Option("--save-as-external-data", help="Write weights to files beside the model.")
    ] = False,
    all_tensors_to_one_file: Annotated[
        bool, typer.Option("--all-tensors-to-one-file", help="Write all weights to one external file.")
    ] = False,
    external_data_location: Annotated[
        str | None, typer.Option(help="The name of that file [OUTPUT.data].", show_default=False)
    ] = None,
    external_data_size_threshold: Annotated[
        int, typer.Option(help="Keep weights with fewer bytes than this in the model.")
    ] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Infer all shapes of a float model, and let onnxruntime optimize it.

    This does what onnxruntime's `quant_pre_process` does, without its size limit.

    Example: jq-quant preprocess model.onnx -o ready.onnx

    Example: jq-quant preprocess large.onnx --save-as-external-data --all-tensors-to-one-file
    """
    output = output_model_path or input_model_path.parent / f"{input_model_path.stem}_preprocessed.onnx"
    model = jq.preprocess(
        input_model_path,
        output,
        skip_optimization,
        skip_onnx_shape,
        skip_symbolic_shape,
        auto_merge,
        int_max,
        guess_output_rank,
        verbose,
        save_as_external_data,
        all_tensors_to_one_file,
        external_data_location,
        external_data_size_threshold,
    )
    made = [name for node in model.graph.node for name in node.output if name]
    known = {v.name for v in (*model.graph.value_info, *model.graph.output) if v.type.tensor_type.HasField("shape")}
    summary = {
        "output": str(output),
        "nodes": len(model.graph.node),
        "tensors": len(made),
        "shapes": sum(name in known for name in made),
    }
    answer(
        as_json,
        summary,
        f"{summary['nodes']} nodes; shapes known for {summary['shapes']} of {summary['tensors']} tensors",
        f"written: {output}",
    )


@command(writes=("output",))
def convert(
    model: Annotated[Path, typer.Argument(help="An ONNX file, float or quantized.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The result [MODEL_converted.onnx].", show_default=False)
    ] = None,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Remove the quantizers of a QDQ model.")] = False,
    uint8_activations: Annotated[
        bool,
        typer.Option(
            "--uint8-activations", help="Write int8 activations of a QDQ model as uint8, with the same values."
        ),
    ] = False,
    opset: Annotated[int | None, typer.Option(help="Convert to this opset.", show_default=False)] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=1,3,224,224", help="Fix the shape of an input; may be repeated."),
    ] = None,
    nhwc: Annotated[bool, typer.Option("--nhwc", help="Make the inputs channels-last.")] = False,
    to: Annotated[
        str | None, typer.Option(help="Convert float tensors to fp32, fp16 or bf16.", show_default=False)
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            help="For fp16 and bf16: cast (float32 operators, tensors rounded by Casts), qdq (by AMD Quark's quantizers) "
            "or native (operators compute in the type)."
        ),
    ] = "cast",
    keep_io: Annotated[bool, typer.Option(help="For fp16 and bf16: keep inputs and outputs in float32.")] = True,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE", help="For fp16 and bf16: leave this node or operator in float32; may be repeated."
        ),
    ] = None,
    saturate: Annotated[
        bool, typer.Option("--saturate", help="For fp16 and bf16: clip weights beyond the range of the type.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="For fp16 and bf16: check on these data that activations fit the type.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Convert a model: number format, opset, input shapes and layout, codes of activations.

    Conversions are applied in the order of the options. onnxruntime runs all results but two: its CPU provider lacks bf16
    kernels, such as those of Add and Relu, for the native form, and the qdq form needs Quark's library of custom operators.

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
