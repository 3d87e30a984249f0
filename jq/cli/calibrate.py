"""`jq-quant calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Config, Data, FloatModel, config_of, use_all_cores
from jq.cli.show import answer, table


@command()
def calibrate(
    model: FloatModel,
    data: Data = None,
    config: Config = "XINT8",
    method: Annotated[str | None, typer.Option(help="How scales are found, if not as in the preset.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the statistics here; an interrupted run resumes from it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the range and the scale of every tensor of a model on calibration data.

    Example: jq-quant calibrate model.onnx --data calib/ -o stats.safetensors

    Example: jq-quant calibrate model.onnx --data calib.npz --config A8W8 --method percentile --json
    """
    use_all_cores()
    options = config_of(config).replace(**({"method": method} if method else {}))
    graph = jq.prepare(jq.load(model))
    checkpoint = output and output.with_name(f"{output.name}.partial")
    stats = jq.calibrate(graph, data, options, checkpoint=checkpoint)
    if output:
        stats.save(output)
    qparams = jq.activation_qparams(graph, stats)
    tensors = {t: (*stats.range(t), qparams[t]) for t in stats.tensors}
    rows = {
        t: {"low": low, "high": high, "scale": float(q.scale), "zero_point": int(q.zero_point)}
        for t, (low, high, q) in tensors.items()
    }
    columns = ("tensor", "low", "high", "scale", "zero point")
    cells = [(t, f"{low:.5g}", f"{high:.5g}", _scale(q), int(q.zero_point)) for t, (low, high, q) in tensors.items()]
    document = {"samples": stats.samples, "config": options.to_dict(), "tensors": rows}
    answer(as_json, document, table(columns, cells, f"{model.name}: {options.method} on {stats.samples} samples"))


def _scale(qparams: jq.QParams) -> str:
    return f"2^{int(qparams.exponent)}" if qparams.is_power_of_two else f"{float(qparams.scale):.5g}"
