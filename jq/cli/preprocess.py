"""`jq-quant preprocess`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import FloatModel
from jq.cli.show import answer


@command()
def preprocess(
    input_model_path: FloatModel,
    output_model_path: Annotated[
        Path | None, typer.Option("--output", "-o", help="The result [MODEL_preprocessed.onnx].", show_default=False)
    ] = None,
    skip_optimization: Annotated[
        bool, typer.Option("--skip-optimization", help="No optimization by onnxruntime.")
    ] = False,
    skip_onnx_shape: Annotated[bool, typer.Option("--skip-onnx-shape", help="No shape inference by onnx.")] = False,
    skip_symbolic_shape: Annotated[
        bool, typer.Option("--skip-symbolic-shape", help="No symbolic shape inference.")
    ] = False,
    auto_merge: Annotated[bool, typer.Option("--auto-merge", help="Symbolic: take dims that conflict as one.")] = False,
    int_max: Annotated[int, typer.Option(help="Symbolic: from here on the end of a Slice is none.")] = 2**31 - 1,
    guess_output_rank: Annotated[
        bool,
        typer.Option(
            "--guess-output-rank", help="Symbolic: outputs of unknown operators have the rank of their first input."
        ),
    ] = False,
    verbose: Annotated[int, typer.Option(help="Symbolic: 1 logs warnings, 3 everything.")] = 0,
    save_as_external_data: Annotated[
        bool, typer.Option("--save-as-external-data", help="Write weights to files beside the model.")
    ] = False,
    all_tensors_to_one_file: Annotated[
        bool, typer.Option("--all-tensors-to-one-file", help="One such file, not one for each weight.")
    ] = False,
    external_data_location: Annotated[
        str | None, typer.Option(help="The name of that file [OUTPUT.data].", show_default=False)
    ] = None,
    external_data_size_threshold: Annotated[int, typer.Option(help="Bytes; smaller weights stay inside.")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Infer all shapes of a float model and let onnxruntime optimize it: its `quant_pre_process`, without a size limit.

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
        f"{summary['nodes']} nodes; shapes known of {summary['shapes']} of {summary['tensors']} tensors",
        f"written: {output}",
    )
