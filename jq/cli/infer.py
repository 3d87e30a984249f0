"""`jq-quant infer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import AnyModel, Data, Limit, Reading
from jq.cli.show import answer


@command()
def infer(
    model: AnyModel,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for the outputs.", show_default=False)],
    data: Data = None,
    reading: Reading = "onnxruntime",
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as one JSON document.")] = False,
) -> None:
    """Write a model's outputs on data to a new folder: one .npy for each sample and output, and a manifest.

    Example: jq-quant infer model_xint8.onnx --data images/ -o quantized/
    """
    summary = jq.infer(model, data, output, reading=reading, limit=limit)
    outputs = ", ".join(f"{o['name']} ({o['dtype']}) in {o['folder']}" for o in summary["outputs"])
    answer(as_json, summary, f"{summary['samples']} samples: {outputs}", f"written: {output}")
