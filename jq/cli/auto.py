"""`jq-quant auto`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Chip, Data, FloatModel, LabelOffset, check_output, use_all_cores
from jq.cli.show import answer, table
from jq.util import files


@command(writes=("output", "ledger"))
def auto(
    model: FloatModel,
    data: Data = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="'top1 -0.5' (points below float), 'agreement 98' (percent), 'kl 0.02', 'sqnr 25' (dB), or "
            "'metric.py:function 0.98' [the best trade-off between accuracy and cost].",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="The class of each sample, for top1: .npy, .npz, .txt or .csv.", show_default=False),
    ] = None,
    label_offset: LabelOffset = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The quantized model, with its config as .toml and the report as .html beside it [MODEL_auto.onnx].",
            show_default=False,
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(
            metavar="5m", help="Stop after this long and keep the best model so far [when everything has been tried]."
        ),
    ] = None,
    chip: Chip = "stx",
    float_islands: Annotated[
        int,
        typer.Option(
            help="Add at most this many regions in a wider format; those added for heads and by the guard do not count."
        ),
    ] = 1,
    wide: Annotated[
        str | None,
        typer.Option(
            help="Format of these regions: float (the compiler runs it in BF16), bf16 or int16 [int16 if scales are floats and "
            "the chip has A16W8, otherwise float].",
            show_default=False,
        ),
    ] = None,
    max_cost: Annotated[
        float, typer.Option(help="The maximum of bit operations, relative to 8 bits everywhere.")
    ] = 1.15,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="Record what was tried in this .jsonl file, from which an interrupted search resumes [OUTPUT.jsonl].",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the outcome and the rungs as one JSON document.")
    ] = False,
) -> None:
    """Try methods from cheap to costly until a target holds on unseen samples.

    One sample in four decides whether it holds; the others calibrate and tune. Exit code 1 means that the target was not
    shown to hold; the best model is written anyway.

    Example: jq-quant auto model.onnx --data calib/ --target "agreement 98" --time-budget 5m -o model_npu.onnx
    """
    use_all_cores()
    output = output or model.parent / f"{model.stem}_auto.onnx"
    files.check_writable(output, model)
    ledger = ledger or output.with_suffix(".jsonl")
    check_output("--ledger", ledger, (".jsonl",))
    known = None if labels is None else jq.evaluate.read_labels(labels, label_offset)
    result = jq.auto(
        model, data, target=target, chip=chip, budget=time_budget, labels=known, float_islands=float_islands,
        wide=wide, max_cost=max_cost, ledger=ledger,  # type: ignore[arg-type]
    )  # fmt: skip
    written = result.save(output)
    lines = (result.outcome, *(f"written: {path}" for path in written))
    answer(as_json, result.to_dict(), table(*result.cells()), *lines)
    if result.goal.bound is not None and not result.reached:
        raise typer.Exit(1)
