"""`jq-quant npu`: where a model's nodes will run, the provider's report beside it, and the provider's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jq
from jq.cli.application import command
from jq.cli.options import AnyModel, Backend, Chip, Data, beginning, check_output, config_of
from jq.cli.show import answer, table
from jq.errors import ConfigError

if TYPE_CHECKING:
    from jq.device.forecasting import Forecast
    from jq.device.provider_report import Comparison

_PLACES = {"npu": "NPU", "cpu": "CPU", "vitis_ep_cpu": "CPU, in the provider"}


@command(writes=("html", "provider_config"))
def npu(
    model: AnyModel,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            "--preset",
            help="How a float model would be quantized: a preset, or a .toml or .json file [XINT8].",
            autocompletion=beginning(lambda: jq.presets),
            show_default=False,
        ),
    ] = None,
    chip: Chip = "stx",
    backend: Backend = None,
    data: Data = None,
    report: Annotated[
        Path | None, typer.Option(help="Compare with the provider's vitisai_ep_report.json.", show_default=False)
    ] = None,
    console: Annotated[
        Path | None,
        typer.Option(
            "--log",
            help="Compare with what the provider printed while it compiled, saved in this file.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page that shows the graph, coloured by where each node runs.", show_default=False),
    ] = None,
    provider_config: Annotated[
        Path | None,
        typer.Option(help="Write the provider's vitisai_config.json for this model and chip.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The device in --provider-config, for BF16 and float islands: stx, ve2, ...", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Forecast which nodes will run on the NPU, why the others will not, and what to change.

    This needs no chip and no driver. A float model is quantized first, with scales that are quick to find. Each rule is
    shown with its source, and is documented, read off a log, or a guess. With --report or --log, what the provider did is
    shown beside the forecast.

    Example: jq-quant npu model_xint8.onnx --chip phx

    Example: jq-quant npu model.onnx --config A8W8 --html places.html

    Example: jq-quant npu model_xint8.onnx --report vitisai_ep_report.json
    """
    check_output("--html", html, (".html",))
    check_output("--provider-config", provider_config, (".json",))
    if device is not None and provider_config is None:
        raise ConfigError("--device needs --provider-config; got --device alone")
    reports = [jq.npu.read_report(report)] if report is not None else []
    reports += [jq.npu.read_console(console)] if console is not None else []
    forecast = jq.npu.forecast(
        model, chip, backend, config=None if config is None else config_of(config, model), data=data
    )
    comparisons = [jq.npu.compare_with_report(forecast, r) for r in reports]
    written = []
    if html is not None:
        forecast.to_html(html)
        written.append(f"written: {html}")
    if provider_config is not None:
        made = jq.npu.provider_config(model, chip, backend, device=device, file=provider_config.name)
        made.write(provider_config)
        options = ", ".join(f"{k}={v}" for k, v in made.options.items())
        written += [f"written: {provider_config}, flow {made.flow}; provider options: {options}", *made.notes]
    facts = [{"source": r.source, **c.to_dict()} for r, c in zip(reports, comparisons, strict=True)]
    document = forecast.to_dict() | ({"facts": facts} if facts else {})
    answer(as_json, document, *_parts(forecast, comparisons, [r.source for r in reports]), *written)


def _parts(forecast: Forecast, comparisons: list[Comparison], sources: list[str]) -> list[Any]:
    """The forecast's table and lines, with a column for each report."""
    first, _, _, *lines = forecast.lines()
    told = [{name: fact for name, _, fact in c.rows} for c in comparisons]
    others = dict.fromkeys(name for t in told for name in t if name not in _PLACES and not name.startswith("subgraphs"))
    copies = forecast.copies if comparisons else {}  # the provider counts them
    ours = {place: forecast.counts[place] + copies.get(place, 0) for place in _PLACES} | dict.fromkeys(others, 0)
    ours |= {"subgraphs": forecast.subgraphs, "subgraphs that run": forecast.subgraphs_run}
    rows = [
        (_PLACES.get(name, name), own, *("" if t.get(name) is None else t[name] for t in told))
        for name, own in ours.items()
    ]
    judged = [line for comparison in comparisons for line in comparison.lines()]
    return [table(("nodes", "forecast", *sources), rows, first), *lines, *judged]
