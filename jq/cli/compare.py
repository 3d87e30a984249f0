"""`jq-quant compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Data, FloatModel, Report, check_report, use_all_cores, write_report
from jq.cli.show import show


@command()
def compare(
    model: FloatModel,
    quantized: Annotated[
        Path, typer.Argument(help="What a tool made of it: a quantized ONNX file.", show_default=False)
    ],
    data: Data = None,
    report: Report = None,
    limit: Annotated[int | None, typer.Option(help="Take so many samples of the data [all].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what each tensor of a quantized model lost against the float model, and why, worst first.

    A tensor's reason is `upstream` where the error came with its inputs, else `range`, `rounding`, `constraint` or `bias`.

    Example: jq-quant compare model.onnx model_xint8.onnx --data images/ --report report.html
    """
    use_all_cores()
    check_report(report)
    comparison = jq.compare(model, quantized, data, limit=limit)
    write_report(comparison, report)
    if as_json:
        print(json.dumps(comparison.to_dict(), indent=2, allow_nan=False))
        return
    show(*comparison.summary().splitlines(), *([f"report: {report}"] if report else []))
