"""`jq-quant device-report`: a model on a device, in one file that is sent to those who have none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import Backend, Chip, Context, Data, Embed, ProviderOption, check_output, reading_of
from jq.cli.show import answer
from jq.errors import ConfigError
from jq.readings.provider import RUNTIME


@command(writes=("output", "ep_context"))
def device_report(
    model: Annotated[Path | None, typer.Argument(help="An ONNX file, quantized or float.", show_default=False)] = None,
    data: Data = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The report [MODEL_device_report.json].", show_default=False)
    ] = None,
    reading: Annotated[
        str | None,
        typer.Option(
            help="The provider of onnxruntime that runs the model [vitisai, or cpu if there is no vitisai].",
            show_default=False,
        ),
    ] = None,
    provider_option: ProviderOption = None,
    ep_context: Context = None,
    ep_context_embed: Embed = False,
    chip: Chip = "stx",
    backend: Backend = None,
    report: Annotated[
        Path | None,
        typer.Option(help="The vitisai_ep_report.json of an earlier run, if this run writes none.", show_default=False),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="The true classes, as `evaluate` reads them.", show_default=False)
    ] = None,
    scores: Annotated[
        str | None, typer.Option(help="The output with the scores of the classes, if there are several outputs.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Use at most this many samples.")] = 32,
    with_inputs: Annotated[
        bool, typer.Option("--with-inputs", help="Include the samples, and outputs that are pictures.")
    ] = False,
    benchmark: Annotated[bool, typer.Option(help="Time 100 runs, for at most 20 seconds.")] = True,
    read: Annotated[
        Path | None, typer.Option(help="Show a report that you received, but run nothing.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a model on your NPU or CPU, and record what happened in one file to send.

    The file holds versions, where each node ran, the codes of the outputs, how far they agree with the integers of
    `simulate`, and the time. It holds no samples unless you ask for them, and no paths or names of your machine.

    Example: jq-quant device-report model_xint8.onnx --data images/ -o report.json

    Example: jq-quant device-report model_xint8.onnx --data images/ --reading vitisai --provider-option target=X2

    Example: jq-quant device-report --read report.json
    """
    if (read is None) == (model is None):
        raise ConfigError("device-report needs a model to run, or --read with a report to show; give one of them")
    if read is not None:
        shown = jq.npu.read_device_report(read)
        answer(as_json, shown.to_dict(), *shown.lines())
        return
    assert model is not None
    path = output or Path(f"{model.stem}_device_report.json")
    check_output("--output", path, (".json",))
    given = provider_option or ep_context is not None or ep_context_embed
    asked = reading_of(
        reading or "vitisai" if given else reading or RUNTIME, provider_option, ep_context, ep_context_embed
    )
    made = jq.npu.device_report(
        model,
        data,
        reading=None if reading is None and not given else asked,
        chip=chip,
        backend=backend,
        report=report,
        labels=labels,
        output=scores,
        limit=limit,
        with_inputs=with_inputs,
        benchmark=benchmark,
    )
    made.to_json(path)
    answer(as_json, made.to_dict(), *made.lines(), f"written: {path}; look at it, then send it")
