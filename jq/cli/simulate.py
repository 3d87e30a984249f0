"""`jq-quant simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Data, Limit, beginning
from jq.cli.show import answer, table
from jq.util import files


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

    This models AMD's public reference emulators, not silicon. Each row is one place where the chip rounds:
    `differs` compares the node on the same inputs, `diverged` the whole run; `bits` are those of its accumulator, and a
    percentage after a mean is the error of the chip's reciprocal.

    Example: jq-quant simulate model_xint8.onnx --target aie2_x1 --data images/ -o simulation.json
    """
    files.check_writable(output)
    chip = jq.integer.load(model, target)
    simulation = jq.integer.simulate(chip, data, limit=limit, dump=dump)
    if output is not None:
        simulation.to_json(output)
    columns = ("tensor", "operators", "bits", "ties", "saturated", "differs", "cause", "diverged")
    rows = [_simulated(row) for row in simulation.log.rows]
    answer(
        as_json,
        simulation.to_dict(),
        table(columns, rows, f"{model.name} on {target}"),
        *simulation.log.summary().splitlines(),
        *(_agreed(a) for a in simulation.agreements),
        *([simulation.without] if simulation.without else []),
        *(f"written: {path}" for path in (output, dump) if path is not None),
    )


def _simulated(row: jq.integer.RoundingRow) -> tuple[Any, ...]:
    name = row.tensor.removesuffix("_QuantizeLinear_Output")
    operators = f"{row.operators} {row.factor_error:+.2%}" if row.factor_error else row.operators
    ties, saturated, differs = (f"{count:,}" for count in (row.ties, row.saturated, row.differs))
    return name, operators, row.bits, ties, saturated, differs, ", ".join(row.causes), f"{row.diverged:,}"


def _agreed(agreement: jq.integer.Agreement) -> str:
    apart = "not a number" if agreement.largest is None else f"{agreement.largest:.5g}"
    same = f"{agreement.output}: {agreement.equal:.2%} equal to onnxruntime's, largest difference {apart}"
    return same if agreement.top1 is None else f"{same}, same class for {agreement.top1:.2%} of the samples"
