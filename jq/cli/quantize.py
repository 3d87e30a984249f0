"""`jq-quant quantize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import jq
from jq.cli.application import command, dashed
from jq.cli.options import (
    Config,
    Data,
    Report,
    beginning,
    check_output,
    config_of,
    decibels,
    setting,
    use_all_cores,
    write_report,
)
from jq.cli.show import answer
from jq.config_file import SUFFIXES, as_toml
from jq.errors import ConfigError
from jq.util.durations import seconds_of

# Options that AMD's tutorials spell in another way.
_TUTORIAL = {"model-output": "output", "calibration-dataset-path": "data"}


@command(context_settings={"token_normalize_func": lambda word: _TUTORIAL.get(dashed(word), dashed(word))})
def quantize(
    model: Annotated[Path | None, typer.Argument(help="A float ONNX file.", show_default=False)] = None,
    data: Data = None,
    config: Config = "XINT8",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The quantized model [MODEL_CONFIG.onnx].", show_default=False)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change an option of the config; may be repeated."),
    ] = None,
    guard: Annotated[
        str | None,
        typer.Option(
            metavar="DB",
            help="The least SQNR that rounding may leave a tensor unmended; or off [the config's].",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            help="qdq, qoperator, vitis_qdq or fix_neuron.",
            autocompletion=beginning(lambda: ("qdq", "qoperator", "vitis_qdq", "fix_neuron")),
        ),
    ] = "qdq",
    opset: Annotated[
        int | None, typer.Option(help="Opset of the result [17, or higher as the model or a canonical form needs].")
    ] = None,
    report: Report = None,
    time_budget: Annotated[
        str | None, typer.Option(metavar="120s", help="Stop finetuning after this long; the rest stays untuned.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Resume interrupted finetuning from this file.")] = None,
    spill: Annotated[
        Path | None, typer.Option(help="A folder where finetuning keeps activations, instead of in memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the config as TOML, or with --json as JSON, and end.")
    ] = False,
    model_input: Annotated[Path | None, typer.Option("--model_input", hidden=True)] = None,
    equalized: Annotated[bool, typer.Option("--cross_layer_equalization", hidden=True)] = False,
    finetuned: Annotated[bool, typer.Option("--fast_finetune", hidden=True)] = False,
) -> None:
    """Quantize a model on calibration data for the NPU, and show the loss of each tensor.

    Example: jq-quant quantize model.onnx --data calib/ --config XINT8_ADAROUND -o model_xint8.onnx --time-budget 120s

    Example: jq-quant quantize --config A8W8 --show-config > mine.toml; jq-quant quantize model.onnx --config mine.toml

    The options of AMD's tutorials are taken too: --model_input, --model_output, --calibration_dataset_path,
    --cross_layer_equalization and --fast_finetune, which is AdaRound.
    """
    use_all_cores()
    budget = seconds_of(time_budget)
    options = config_of(config).replace(**dict(setting(o) for o in option or ()))
    options = options.replace(**({} if guard is None else {"guard": decibels(guard)}))
    options = options.replace(
        cle=options.cle or equalized, finetune=options.finetune or ("adaround" if finetuned else None)
    )
    if show_config:
        print(json.dumps(options.to_dict(), indent=2) if as_json else as_toml(options), end="\n" if as_json else "")
        return
    given = [m for m in (model, model_input) if m is not None]
    if len(given) != 1:
        raise ConfigError(f"quantize needs one float ONNX file, as an argument or with --model_input; got {len(given)}")
    (model,) = given
    check_output("--report", report, (".html", ".json"))
    stem = Path(config).stem if config.endswith(SUFFIXES) else config
    output = output or model.parent / f"{model.stem}_{stem.lower()}.onnx"
    keeping = {"time_budget": budget, "checkpoint": checkpoint, "spill": spill}
    result = jq.quantize(model, data, options, output=output, format=format, opset=opset, **keeping)  # type: ignore[arg-type]
    lines = (*result.report.summary().splitlines(), f"written: {output}", *write_report(result.report, report))
    answer(as_json, result.report.to_dict(), *lines)
