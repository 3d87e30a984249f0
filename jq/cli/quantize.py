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
    Stats,
    beginning,
    check_output,
    config_of,
    decibels,
    node_names,
    overridden,
    setting,
    settings,
    use_all_cores,
    write_report,
)
from jq.cli.show import answer
from jq.cli.tutorials import algorithm_of, as_tutorials
from jq.config_file import SUFFIXES, explained
from jq.errors import ConfigError
from jq.util.durations import seconds_of

# Options that AMD's tutorials spell in another way.
_TUTORIAL = {
    "input-model-path": "model-input",
    **dict.fromkeys(("model-output", "output-model-path", "quantized-model-path"), "output"),
    **dict.fromkeys(("calib-data", "calib-data-path", "calibration-dataset-path"), "data"),
    "cle": "cross-layer-equalization",
}


@command(
    writes=("output", "report", "checkpoint"),
    context_settings={"token_normalize_func": lambda word: _TUTORIAL.get(dashed(word), dashed(word))},
)
def quantize(
    model: Annotated[Path | None, typer.Argument(help="A float ONNX file.", show_default=False)] = None,
    data: Data = None,
    config: Config = "XINT8",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The quantized model [MODEL_CONFIG.onnx].", show_default=False)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change an option of the config; may be repeated.",
            autocompletion=settings,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave nodes in float: a name, a pattern or an operator; may be repeated.",
            autocompletion=node_names,
        ),
    ] = None,
    input_node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE",
            help="Quantize only this node and those after it; may be repeated.",
            autocompletion=node_names,
        ),
    ] = None,
    output_node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE",
            help="Quantize only this node and those before it; may be repeated.",
            autocompletion=node_names,
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN NAME=VALUE",
            help="Change an option for some nodes only; may be repeated.",
            autocompletion=node_names,
        ),
    ] = None,
    guard: Annotated[
        str | None,
        typer.Option(
            metavar="DB",
            help="Repair tensors that would keep a lower SQNR than this after rounding; or off [as in the config].",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            help="Form of the quantized model: qdq, qoperator, vitis_qdq or fix_neuron.",
            autocompletion=beginning(lambda: ("qdq", "qoperator", "vitis_qdq", "fix_neuron")),
        ),
    ] = "qdq",
    opset: Annotated[
        int | None, typer.Option(help="Opset of the result [17, or higher if the model needs it].")
    ] = None,
    report: Report = None,
    stats: Stats = None,
    time_budget: Annotated[
        str | None,
        typer.Option(metavar="120s", help="Stop finetuning after this long, and leave the remaining layers untuned."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Resume interrupted finetuning from this file.")] = None,
    spill: Annotated[
        Path | None, typer.Option(help="Let finetuning keep activations in this folder instead of in memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Print the config as TOML (with --json, as JSON), but quantize nothing."),
    ] = False,
    model_input: Annotated[Path | None, typer.Option("--model_input", hidden=True)] = None,
    equalized: Annotated[bool, typer.Option("--cross_layer_equalization", hidden=True)] = False,
    fast: Annotated[bool, typer.Option("--fast_finetune", hidden=True)] = False,
    adaround: Annotated[bool, typer.Option("--adaround", hidden=True)] = False,
    adaquant: Annotated[bool, typer.Option("--adaquant", hidden=True)] = False,
    iterations: Annotated[int | None, typer.Option("--num_iters", min=1, hidden=True)] = None,
    rate: Annotated[float | None, typer.Option("--learning_rate", hidden=True)] = None,
    excluded: Annotated[str | None, typer.Option("--exclude_nodes", hidden=True)] = None,
    subgraphs: Annotated[str | None, typer.Option("--exclude_subgraphs", hidden=True)] = None,
    external: Annotated[bool, typer.Option("--save_as_external_data", hidden=True)] = False,
) -> None:
    """Quantize a model for the NPU on calibration data, and show what it lost.

    Example: jq-quant quantize model.onnx --data calib/ --config XINT8_ADAROUND -o model_xint8.onnx --time-budget 120s

    Example: jq-quant quantize model.onnx --data calib/ --exclude "head*" --override "conv_5" weight_method=minmax

    Example: jq-quant quantize --config A8W8 --show-config > mine.toml; jq-quant quantize model.onnx --config mine.toml

    The options of AMD's tutorials work too: --model_input, --model_output, --calib_data, --cle,
    --cross_layer_equalization, --fast_finetune and --adaround, --adaquant, --num_iters, --learning_rate, --exclude_nodes,
    --exclude_subgraphs and --save_as_external_data.
    """
    use_all_cores()
    budget = seconds_of(time_budget)
    options = config_of(config, model or model_input).replace(**dict(setting(o) for o in option or ()))
    options = options.replace(
        exclude=(*options.exclude, *(exclude or ())),
        input_nodes=(*options.input_nodes, *(input_node or ())),
        output_nodes=(*options.output_nodes, *(output_node or ())),
        overrides=overridden(options, override or ()),
    )
    options = options.replace(**({} if guard is None else {"guard": decibels(guard)}))
    algorithm = algorithm_of(options, fast, adaround, adaquant)
    options = as_tutorials(options, equalized, algorithm, iterations, rate, excluded, subgraphs)
    if show_config:
        print(json.dumps(options.to_dict(), indent=2) if as_json else explained(options), end="\n" if as_json else "")
        return
    given = [m for m in (model, model_input) if m is not None]
    if len(given) != 1:
        raise ConfigError(f"quantize needs one float ONNX file, as an argument or with --model_input; got {len(given)}")
    (model,) = given
    check_output("--report", report, (".html", ".json"))
    stem = Path(config).stem if config.endswith(SUFFIXES) else config
    output = output or model.parent / f"{model.stem}_{stem.lower()}.onnx"
    keeping = {"time_budget": budget, "checkpoint": checkpoint, "spill": spill}
    result = jq.quantize(
        model,
        data,
        options,
        output=output,
        format=format,  # type: ignore[arg-type]
        opset=opset,
        stats=stats,
        **keeping,  # type: ignore[arg-type]
    )
    if external:
        from jq.compat.quark.external import store_outside  # with which `--help` would take longer

        store_outside(output)
    lines = (*result.report.summary().splitlines(), f"written: {output}", *write_report(result.report, report))
    answer(as_json, result.report.to_dict(), *lines)
