"""`jq-quant lint`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Config, FloatModel, config_of
from jq.cli.show import answer


@command()
def lint(
    model: FloatModel,
    config: Config = "XINT8",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find problems before you quantize to a format; exit with 1 if one of them is an error.

    Example: jq-quant lint model.onnx --config XINT8
    """
    findings = jq.lint(model, config_of(config))
    lines = (*map(str, findings), f"{model.name}: {len(findings)} finding(s)")
    answer(as_json, [dataclasses.asdict(f) for f in findings], *lines)
    if any(f.severity == "error" for f in findings):
        raise typer.Exit(1)
