"""`jq-quant simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import jq
from jq import files
from jq.cli.application import command
from jq.cli.options import Data, Limit, beginning
from jq.cli.show import show, table


@command()
def simulate(
    model: Annotated[Path, typer.Argument(help="A quantized ONNX file, of any tool.", show_default=False)],
    data: Data = None,
    target: Annotated[
        str,
        typer.Option(help="ort, dpu, aie2_x1 or aie2_even.", autocompletion=beginning(lambda: jq.integer.TARGETS)),
    ] = "aie2_x1",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write everything to this .json file.")] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write every tensor's integers to this new folder, with a manifest.")
    ] = None,
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a quantized model in the integers of a chip, and show where and why it differs from onnxruntime.

    What is modelled is AMD's public reference emulators, not silicon. Each row is one place where the chip rounds:
    `differs` compares the node on the same inputs, `diverged` the whole run; `bits` are those of its accumulator, and a
    percentage behind a mean is by how much the chip's factor is off.

    Example: jq-quant simulate model_xint8.onnx --target aie2_x1 --data images/ -o simulation.json
    """
    files.check_writable(output)
    chip = jq.integer.load(model, target)
    found = jq.integer.simulate(chip, data, limit=limit, dump=dump)
    if output is not None:
        found.to_json(output)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    columns = ("tensor", "operators", "bits", "ties", "saturated", "differs", "cause", "diverged")
    rows = [_simulated(row) for row in found.log.rows]
    show(
        table(columns, rows, f"{model.name} on {target}"),
        *found.log.summary().splitlines(),
        *(_agreed(a) for a in found.agreements),
        *([found.without] if found.without else []),
        *(f"written: {path}" for path in (output, dump) if path is not None),
    )


def _simulated(row: jq.integer.Row) -> tuple[Any, ...]:
    name = row.tensor.removesuffix("_QuantizeLinear_Output")
    operators = f"{row.operators} {row.factor_error:+.2%}" if row.factor_error else row.operators
    ties, saturated, differs = (f"{count:,}" for count in (row.ties, row.saturated, row.differs))
    return name, operators, row.bits, ties, saturated, differs, ", ".join(row.causes), f"{row.diverged:,}"


def _agreed(found: jq.integer.Agreement) -> str:
    apart = "not a number" if found.largest is None else f"{found.largest:.5g}"
    same = f"{found.output}: {found.equal:.2%} equal to onnxruntime's, largest difference {apart}"
    return same if found.top1 is None else f"{same}, same class for {found.top1:.2%} of the samples"
