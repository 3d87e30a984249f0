"""`jq-quant sensitivity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Config, Data, FloatModel, Limit, config_of, use_all_cores
from jq.cli.show import answer
from jq.errors import ConfigError
from jq.util import files


@command()
def sensitivity(
    model: FloatModel,
    data: Data = None,
    config: Config = "XINT8",
    loss: Annotated[str, typer.Option(help="Loss that ranks: kl, mse, cosine or top1.")] = "kl",
    by: Annotated[str, typer.Option(help="Each tensor or each layer.")] = "tensor",
    mode: Annotated[str, typer.Option(help="Each quantized alone, or all_but_one.")] = "alone",
    kind: Annotated[str, typer.Option(help="Which tensors: activations, weights or both.")] = "both",
    screen: Annotated[
        int | None, typer.Option(help="Measure at most this many, estimate the others to second order [all].")
    ] = None,
    limit: Limit = None,
    rows: Annotated[int, typer.Option(help="Show at most this many.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the loss at the outputs of quantizing each tensor or layer by itself, the largest first.

    The model is prepared, equalized and calibrated on the same data first.

    Example: jq-quant sensitivity model.onnx --data calib/ --by layer --limit 64
    """
    use_all_cores()
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot needs a name that ends with .svg; got {plot}")
    files.check_writable(plot)
    options = config_of(config)
    graph = jq.prepare(jq.load(model), options)
    graph = jq.equalize(graph, options, data) if options.cle else graph
    plan = jq.make_plan(graph, jq.calibrate(graph, data, options) if options.calibrates else None, options)
    wanted: dict[str, Any] = {"loss": loss, "by": by, "mode": mode, "kind": kind, "screen": screen, "limit": limit}
    result = jq.research.sensitivity(graph, plan, data, seed=options.seed, **wanted)
    if plot is not None:
        files.write(plot, result.plot())
    answer(as_json, result.to_dict(), *result.summary(rows).splitlines(), *([f"plot: {plot}"] if plot else []))
