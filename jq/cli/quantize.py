"""`jq-quant quantize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import app
from jq.cli.options import (
    Config,
    Data,
    FloatModel,
    Report,
    check_report,
    config_of,
    seconds,
    setting,
    use_all_cores,
    write_report,
)
from jq.cli.show import show


@app.command()
def quantize(
    model: FloatModel,
    data: Data = None,
    config: Config = "XINT8",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The quantized model [MODEL_CONFIG.onnx].", show_default=False)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change an option of the config; may be repeated."),
    ] = None,
    format: Annotated[str, typer.Option(help="qdq, qoperator, vitis_qdq or fix_neuron.")] = "qdq",
    opset: Annotated[int | None, typer.Option(help="Opset of the result [17, or the model's if higher].")] = None,
    report: Report = None,
    time_budget: Annotated[
        str | None, typer.Option(metavar="120s", help="After this long, finetuning leaves what is not tuned as it is.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A file from which a finetuning that was stopped goes on.")
    ] = None,
    spill: Annotated[
        Path | None, typer.Option(help="A folder where finetuning keeps activations, instead of in memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    show_config: Annotated[bool, typer.Option(help="Print the config as JSON and end.")] = False,
) -> None:
    """Quantize a model on calibration data: what the NPU runs, and what each tensor lost.

    Example: jq-quant quantize model.onnx --data calib/ --config XINT8_ADAROUND -o model_xint8.onnx --time-budget 120s
    """
    use_all_cores()
    budget = None if time_budget is None else seconds(time_budget)
    options = config_of(config).replace(**dict(setting(o) for o in option or ()))
    if show_config:
        print(json.dumps(options.to_dict(), indent=2))
        return
    check_report(report)
    stem = Path(config).stem if config.endswith(".json") else config
    output = output or model.parent / f"{model.stem}_{stem.lower()}.onnx"
    keeping = {"time_budget": budget, "checkpoint": checkpoint, "spill": spill}
    result = jq.quantize(model, data, options, output=output, format=format, opset=opset, **keeping)  # type: ignore[arg-type]
    write_report(result.report, report)
    if as_json:
        print(json.dumps(result.report.to_dict(), indent=2))
        return
    show(*result.report.summary().splitlines(), f"written: {output}", *([f"report: {report}"] if report else []))
