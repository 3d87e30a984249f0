"""`jq-quant lint`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Config, FloatModel, config_of
from jq.cli.show import show


@command()
def lint(
    model: FloatModel,
    config: Config = "XINT8",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what will not go well in a format, before quantizing; exit with 1 if something cannot.

    Example: jq-quant lint model.onnx --config XINT8
    """
    found = jq.lint(model, config_of(config))
    if as_json:
        print(json.dumps([dataclasses.asdict(f) for f in found], indent=2))
    else:
        show(*(str(f) for f in found), f"{model.name}: {len(found)} finding(s)")
    if any(f.severity == "error" for f in found):
        raise typer.Exit(1)
