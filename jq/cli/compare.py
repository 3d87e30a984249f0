"""`jq-quant compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Data, FloatModel, Limit, Report, check_report, use_all_cores, write_report
from jq.cli.show import answer


@command()
def compare(
    model: FloatModel,
    quantized: Annotated[
        Path, typer.Argument(help="The quantized ONNX file that a tool made of it.", show_default=False)
    ],
    data: Data = None,
    report: Report = None,
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the loss of each tensor of a quantized model against the float one, and its reason, worst first.

    A tensor's reason is `upstream` where the error came with its inputs, else `range`, `rounding`, `constraint` or `bias`.

    Example: jq-quant compare model.onnx model_xint8.onnx --data images/ --report report.html
    """
    use_all_cores()
    check_report(report)
    comparison = jq.compare(model, quantized, data, limit=limit)
    write_report(comparison, report)
    answer(
        as_json, comparison.to_dict(), *comparison.summary().splitlines(), *([f"report: {report}"] if report else [])
    )
