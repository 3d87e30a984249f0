"""`jq-quant` infer and evaluate: a model's outputs."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jq
from jq.cli.application import command
from jq.cli.options import (
    AnyModel,
    Benchmark,
    Context,
    Data,
    Embed,
    LabelOffset,
    Limit,
    ProviderOption,
    Reading,
    beginning,
    reading_of,
)
from jq.cli.pixels import function_in
from jq.cli.show import answer, table
from jq.data.sources import as_trained
from jq.errors import ConfigError
from jq.evaluation.boxes import box_accuracy, read_coco
from jq.evaluation.estimates import Estimate
from jq.evaluation.plausible import implausible
from jq.evaluation.tasks import METRICS, SampleMetric, metric_named, model_outputs, read_truth
from jq.util import files

if TYPE_CHECKING:
    from jq.readings.named import AnyReading

_BOXES = "boxes"  # the metric whose truth is a COCO file


@command(writes=("output", "ep_context"))
def infer(
    model: AnyModel,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for the outputs.", show_default=False)],
    data: Data = None,
    reading: Reading = "onnxruntime",
    provider_option: ProviderOption = None,
    ep_context: Context = None,
    ep_context_embed: Embed = False,
    benchmark: Benchmark = False,
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as one JSON document.")] = False,
) -> None:
    """Write a model's outputs on data to a new folder.

    There is one .npy file for each sample and output, and a manifest.

    Example: jq-quant infer model_xint8.onnx --data images/ -o quantized/

    Example: jq-quant infer model_xint8.onnx --data images/ -o npu/ --reading vitisai --provider-option target=X2
    """
    asked = reading_of(reading, provider_option, ep_context, ep_context_embed)
    graph = jq.load(model)
    run = jq.open_reading(graph, asked, original=model) if benchmark else asked
    summary = jq.infer(model, data, output, reading=run, limit=limit)
    timing = jq.benchmark(model, data, run) if benchmark else None
    outputs = ", ".join(f"{o['name']} ({o['dtype']}) in {o['folder']}" for o in summary["outputs"])
    lines = (f"{summary['samples']} samples: {outputs}", *([str(timing)] if timing else []), f"written: {output}")
    answer(as_json, summary | ({"benchmark": timing.to_dict()} if timing else {}), *lines)


@command(writes=("csv", "ep_context"))
def evaluate(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="BASELINE QUANTIZED", help="Two folders of results.")
    ] = None,
    baseline_results_folder: Annotated[
        Path | None,
        typer.Option("--baseline_results_folder", "--baseline-results-folder", help="Results of the float model."),
    ] = None,
    quantized_results_folder: Annotated[
        Path | None,
        typer.Option(
            "--quantized_results_folder", "--quantized-results-folder", help="Results of the quantized model."
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="The true classes: .npy, .npz, .txt, or .csv of label or name,label; adds top-1 and top-5."),
    ] = None,
    label_offset: LabelOffset = 0,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run this model on --data, instead of reading a folder; may be repeated, the float one first."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The data for --model: an .npz or .npy file, a folder of images or arrays, or FILE.py:FUNCTION."
        ),
    ] = None,
    reading: Reading = "onnxruntime",
    provider_option: ProviderOption = None,
    ep_context: Context = None,
    ep_context_embed: Embed = False,
    benchmark: Benchmark = False,
    output: Annotated[
        str | None, typer.Option(help="The output with the scores of the classes, if there are several outputs.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help=f"What to measure with --model, instead of top-1: {_BOXES}, with COCO's .json of instances as --labels; "
            f"{', '.join(METRICS)}; or FILE.py:FUNCTION, which gets the outputs by name and the truth in --labels.",
            show_default=False,
            autocompletion=beginning(lambda: (_BOXES, *METRICS)),
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a line for each pair of results to this .csv file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare the results or the accuracy of a float and a quantized model.

    Give models and data, or two folders of results, as `infer` writes them: images, .npy or .npz files, paired by their
    names without the ending. Each model after the first is compared with the first on the same samples: agreement, KL
    divergence, SQNR and the change of top-1, with 95 % intervals, and McNemar's exact test. The exit code is 1 if some
    results could not be compared.

    Example: jq-quant evaluate --baseline_results_folder float/ --quantized_results_folder quantized/

    Example: jq-quant evaluate --model model.onnx --model model_xint8.onnx --model other.onnx --data images/ --labels labels.csv

    Example: jq-quant evaluate --model model.onnx --data images/ --labels masks.npy --metric masks

    Example: jq-quant evaluate --model yolo.onnx --data val2017/ --resize letterbox --labels instances_val2017.json --metric boxes
    """
    models = model or []
    if metric is not None:
        if not models or data is None or results_of(baseline_results_folder, quantized_results_folder, folders):
            raise ConfigError("--metric needs --model and --data, and no folders of results")
        asked = reading_of(reading, provider_option, ep_context, ep_context_embed)
        _answer_metric(models, data, metric, labels, asked, as_json)
        return
    results = results_of(baseline_results_folder, quantized_results_folder, folders)
    if models and (results or labels is None):
        raise ConfigError("--model needs --labels, and no folders of results; give either models or folders")
    if not models and (len(results) != 2 if labels is None else len(results) not in (1, 2)):
        raise ConfigError(
            f"evaluate needs two folders of results, a baseline's and a quantized model's, or one and --labels; got {len(results)}"
        )
    if bool(models) != (data is not None):
        raise ConfigError("--model needs --data, and --data needs --model; got one without the other")
    if len(set(models)) < len(models):
        twice = next(m for m in models if models.count(m) > 1)
        raise ConfigError(f"--model needs two different models; got {twice} twice")
    if benchmark and not models:
        raise ConfigError("--benchmark times the models that --model names; got no --model")
    if ep_context is not None and len(models) > 1:
        raise ConfigError("--ep-context saves one compiled model; give --model once")
    asked = reading_of(reading, provider_option, ep_context, ep_context_embed)
    if csv is not None and len(results) != 2:
        raise ConfigError(f"--csv needs two folders of results; got {len(results)}")
    files.check_writable(csv)
    right = None if labels is None else jq.evaluate.read_labels(labels, label_offset)
    comparison = jq.evaluate.compare_folders(*results) if len(results) == 2 else None
    classes, timings = None, dict[str, jq.Timing]()
    if right is not None:
        runs = {m: jq.open_reading(m, asked) if benchmark else asked for m in models}
        for metadata in (jq.load(m).metadata for m in models):  # the float model has none, and gets the other's
            data = as_trained(data, metadata)
        scores = {str(m): jq.evaluate.model_scores(m, data, output, reading=runs[m]) for m in models}
        for sentence in implausible(models[0], data, right, scores[str(models[0])], output) if models else ():
            warnings.warn(sentence, stacklevel=2)
        timings = {str(m): jq.benchmark(m, data, runs[m]) for m in models} if benchmark else {}
        scores |= {str(f): jq.evaluate.folder_scores(f, output) for f in results}
        classes = jq.evaluate.classify(scores, right)
    if comparison is not None and csv is not None:
        comparison.to_csv(csv)
    document: dict[str, Any] = comparison.to_dict() if comparison is not None else {}
    parts = (
        *_parts(comparison),
        *(classes.summary().splitlines() if classes else ()),
        *(f"{m}: {timing}" for m, timing in timings.items()),
        *([f"written: {csv}"] if csv else ()),
    )
    document |= {"classification": classes.to_dict()} if classes else {}
    document |= {"benchmark": {m: timing.to_dict() for m, timing in timings.items()}} if timings else {}
    answer(as_json, document, *parts)
    if comparison is not None and not comparison.complete:
        raise typer.Exit(1)


def results_of(baseline: Path | None, quantized: Path | None, folders: list[Path] | None) -> list[Path]:
    """The folders of results, by option or as arguments."""
    return [*(f for f in (baseline, quantized) if f is not None), *(folders or [])]


def _answer_metric(
    models: list[Path], data: Any, name: str, labels: Path | None, reading: AnyReading, as_json: bool
) -> None:
    """Show a metric of each model's outputs; without a truth, the first model's outputs are it."""
    if name == _BOXES:
        _answer_boxes(models, data, labels, reading, as_json)
        return
    file, colon, function = name.rpartition(":")
    measure = function_in(Path(file), function) if colon and file.endswith(".py") else metric_named(name)
    truth = None if labels is None else read_truth(labels)
    for metadata in (jq.load(m).metadata for m in models):
        data = as_trained(data, metadata)
    values, changes, first = dict[str, float](), dict[str, Estimate](), None
    for m in models:
        outputs = model_outputs(m, data, reading=reading)
        truth = next(iter(outputs.values())) if truth is None and len(models) > 1 else truth
        if not isinstance(measure, SampleMetric):
            values[str(m)] = float(measure(outputs, truth))
            continue
        rows = measure.each(outputs, truth)
        values[str(m)] = measure.of(rows)
        if first is None:
            first = rows
        else:
            changes[str(m)] = measure.change(first, rows)
    lines = [f"{m}: {name} {value:.6g}{_beside(changes.get(m), models[0])}" for m, value in values.items()]
    document = {"name": name, "values": values, "changes": {m: dataclasses.asdict(c) for m, c in changes.items()}}
    answer(as_json, {"metric": document}, *lines)


def _beside(change: Estimate | None, first: Path) -> str:
    """The change from the first model with its 95 % interval, of any other."""
    return "" if change is None else f", {change:+.4f} compared with {first}"


def _answer_boxes(models: list[Path], data: Any, labels: Path | None, reading: AnyReading, as_json: bool) -> None:
    """Show the mean average precision of each model, a detector."""
    if labels is None:
        raise ConfigError("--metric boxes needs --labels with a COCO file of instances, such as instances_val2017.json")
    truth = read_coco(labels)
    for metadata in (jq.load(m).metadata for m in models):
        data = as_trained(data, metadata)
    made = {str(m): box_accuracy(m, data, truth, reading=reading) for m in models}
    first = next(iter(made.values()))
    changes = {m: first.matches.change(a.matches) for m, a in made.items() if a is not first}
    values = {m: {"mean": a.mean, "at_half": a.at_half, "images": a.images} for m, a in made.items()}
    document = {"name": _BOXES, "values": values, "changes": {m: dataclasses.asdict(c) for m, c in changes.items()}}
    answer(as_json, {"metric": document}, *(f"{m}: {a}{_beside(changes.get(m), models[0])}" for m, a in made.items()))


def _parts(comparison: jq.evaluate.Evaluation | None) -> tuple[Any, ...]:
    if comparison is None:
        return ()
    columns = ("result", "shape", *jq.evaluate.METRICS)
    rows = [
        (row.key, "x".join(map(str, row.shape)), *(_number(getattr(row, m)) for m in jq.evaluate.METRICS))
        for row in comparison.rows
    ]
    totals = comparison.totals.values()
    rows += [("mean", "", *(_number(t.mean) for t in totals)), ("worst", "", *(_number(t.worst) for t in totals))]
    return (
        table(columns, rows, f"{comparison.quantized} against {comparison.baseline}"),
        *(str(f) for f in comparison.findings),
        f"{len(comparison.rows)} results compared, {comparison.identical} of them identical; {len(comparison.findings)} finding(s)",
    )


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.6g}"
