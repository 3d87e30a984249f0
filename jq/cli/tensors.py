"""`jq-quant` calibrate, compare, sensitivity and simulate: what quantization does to each tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jq
from jq.cli.application import command
from jq.cli.options import (
    Benchmark,
    Config,
    Context,
    Data,
    Embed,
    FloatModel,
    LabelOffset,
    Limit,
    ProviderOption,
    Report,
    Stats,
    Workers,
    beginning,
    check_output,
    config_of,
    executor_of,
    reading_of,
    use_all_cores,
    write_report,
)
from jq.cli.show import answer, table
from jq.data.sources import as_trained, calibration_samples
from jq.errors import ConfigError
from jq.evidence.compare import side_by_side
from jq.pipeline import equalized_and_measured, save_stats
from jq.util import files

if TYPE_CHECKING:
    from jq.readings.named import AnyReading


@command(writes=("output",))
def calibrate(
    model: FloatModel,
    data: Data = None,
    config: Config = "XINT8",
    method: Annotated[str | None, typer.Option(help="The calibration method [as in the config].")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the statistics here; an interrupted run resumes from it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the range and scale of every tensor on calibration data.

    The model is prepared and equalized as the config says, as in `quantize`. `quantize --stats` and `sensitivity --stats`
    reuse the file that -o writes.

    Example: jq-quant calibrate model.onnx --data calib/ -o stats.safetensors

    Example: jq-quant calibrate model.onnx --data calib.npz --config A8W8 --method percentile --json
    """
    use_all_cores()
    options = config_of(config, model).replace(**({"method": method} if method else {}))
    if not options.calibrates:
        raise ConfigError(
            f"activations of {options.activation} need no calibration, so there are no statistics to show"
        )
    prepared = jq.prepare(jq.load(model), options)
    data = calibration_samples(data, prepared.inputs, options.held_out, options.seed)
    checkpoint = output and output.with_name(f"{output.name}.partial")
    graph, stats = equalized_and_measured(prepared, data, options, checkpoint=checkpoint)
    assert stats is not None
    if output:
        save_stats(output, stats, graph, options)
    qparams = jq.activation_qparams(graph, stats)
    tensors = {t: (*stats.range(t), qparams[t]) for t in stats.tensors}
    rows = {
        t: {"low": low, "high": high, "scale": float(q.scale), "zero_point": int(q.zero_point)}
        for t, (low, high, q) in tensors.items()
    }
    columns = ("tensor", "low", "high", "scale", "zero point")
    cells = [(t, f"{low:.5g}", f"{high:.5g}", _scale(q), int(q.zero_point)) for t, (low, high, q) in tensors.items()]
    document = {"samples": stats.samples, "config": options.to_dict(), "tensors": rows}
    answer(as_json, document, table(columns, cells, f"{model.name}: {options.method} on {stats.samples} samples"))


def _scale(qparams: jq.QParams) -> str:
    return f"2^{int(qparams.exponent)}" if qparams.is_power_of_two else f"{float(qparams.scale):.5g}"


@command(writes=("report", "ep_context"))
def compare(
    model: FloatModel,
    quantized: Annotated[
        list[Path],
        typer.Argument(
            help="The quantized ONNX file, made by any tool; several are shown side by side.", show_default=False
        ),
    ],
    data: Data = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="The true classes: .npy, .npz, .txt, or .csv of label or name,label; adds top-1 to the verdict.",
            show_default=False,
        ),
    ] = None,
    label_offset: LabelOffset = 0,
    report: Report = None,
    reading: Annotated[
        str | None,
        typer.Option(
            help="Also compare the outputs of a provider (cpu, vitisai), of a target or of jq.", show_default=False
        ),
    ] = None,
    provider_option: ProviderOption = None,
    ep_context: Context = None,
    ep_context_embed: Embed = False,
    benchmark: Benchmark = False,
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what a quantized model's outputs lost, which layers caused it, and what to do.

    Layers are ranked by their share of the outputs' error. Then come the tensors, worst first, each with the reason for its
    loss. Several quantized models are shown side by side, the first one in full.

    With --reading, the outputs of a device are compared too.

    Example: jq-quant compare model.onnx model_xint8.onnx --data images/ --labels labels.csv --report report.html

    Example: jq-quant compare model.onnx model_xint8.onnx model_a8w8.onnx --data images/ --report report.html

    Example: jq-quant compare model.onnx model_xint8.onnx --data images/ --reading vitisai --benchmark
    """
    use_all_cores()
    check_output("--report", report, (".html", ".json"))
    if len(quantized) > 1 and (reading is not None or benchmark):
        raise ConfigError("--reading and --benchmark work with one quantized model; give one, or leave them out")
    right = None if labels is None else jq.evaluate.read_labels(labels, label_offset)
    asked = reading_of(reading or "onnxruntime", provider_option, ep_context, ep_context_embed)
    run, timing = _opened(quantized[0], data, asked, benchmark) if reading is not None or benchmark else (None, None)
    device = run if reading is not None else None
    made = [jq.compare(model, q, data, limit=limit, reading=device, labels=right) for q in quantized]
    comparison = side_by_side(made)
    document = comparison.to_dict() | ({"benchmark": timing.to_dict()} if timing else {})
    others = (f"{other.subject}: {line}" for other in comparison.beside for line in other.verdict.lines())
    lines = (*comparison.summary().splitlines(), *others, *([str(timing)] if timing else []))
    answer(as_json, document, *lines, *write_report(comparison, report))


def _opened(
    model: Path, data: Path | None, reading: AnyReading, benchmark: bool
) -> tuple[AnyReading, jq.Timing | None]:
    """The reading that is asked for, opened once, and its timing."""
    run = jq.open_reading(model, reading)
    return run, jq.benchmark(model, data, run) if benchmark else None


@command(writes=("plot",))
def sensitivity(
    model: FloatModel,
    data: Data = None,
    config: Config = "XINT8",
    stats: Stats = None,
    loss: Annotated[str, typer.Option(help="The loss to rank by: kl, mse, cosine or top1.")] = "kl",
    by: Annotated[str, typer.Option(help="Rank each tensor or each layer: tensor or layer.")] = "tensor",
    mode: Annotated[str, typer.Option(help="Quantize each one alone, or all but one: alone or all_but_one.")] = "alone",
    kind: Annotated[str, typer.Option(help="Which tensors: activations, weights or both.")] = "both",
    screen: Annotated[
        int | None, typer.Option(help="Measure this many, and keep the second-order estimate for the others [all].")
    ] = None,
    limit: Limit = None,
    workers: Workers = None,
    rows: Annotated[int, typer.Option(help="Show at most this many.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw the ranking in this .svg file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what quantizing each tensor or layer alone costs at the outputs.

    The costliest come first.

    The model is prepared, equalized and calibrated on the same data first.

    Example: jq-quant sensitivity model.onnx --data calib/ --by layer --limit 64
    """
    use_all_cores()
    check_output("--plot", plot, (".svg",))
    options = config_of(config, model)
    original = jq.load(model)
    data = as_trained(data, original.metadata)
    prepared = jq.prepare(original, options)
    samples = calibration_samples(data, prepared.inputs, options.held_out, options.seed)
    graph, measured = equalized_and_measured(prepared, samples, options, saved=stats)
    plan = jq.make_plan(graph, measured, options)
    wanted: dict[str, Any] = {"loss": loss, "by": by, "mode": mode, "kind": kind, "screen": screen, "limit": limit}
    with executor_of(workers) as executor:
        result = jq.research.sensitivity(graph, plan, data, seed=options.seed, executor=executor, **wanted)
    if plot is not None:
        files.write(plot, result.plot())
    answer(as_json, result.to_dict(), *result.summary(rows).splitlines(), *([f"plot: {plot}"] if plot else []))


@command(writes=("output", "dump", "ep_context"))
def simulate(
    model: Annotated[Path, typer.Argument(help="A quantized ONNX file, made by any tool.", show_default=False)],
    data: Data = None,
    target: Annotated[
        str,
        typer.Option(
            help="The chip's arithmetic: ort, dpu, aie2_x1 or aie2_even.",
            autocompletion=beginning(lambda: jq.integer.TARGETS),
        ),
    ] = "aie2_x1",
    reading: Annotated[
        str, typer.Option(help="What to compare with: onnxruntime, or one of its providers (cpu, vitisai, ...).")
    ] = "onnxruntime",
    provider_option: ProviderOption = None,
    ep_context: Context = None,
    ep_context_embed: Embed = False,
    benchmark: Benchmark = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write everything to this .json file.")] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write every tensor's integers to this new folder, with a manifest.")
    ] = None,
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compute a model in the integers of a chip, and explain where it differs.

    The results are compared with onnxruntime or a device. The integers are those of AMD's public reference emulators, not
    of silicon. Each row is one place where the chip rounds: `differs` compares the node on the same inputs, `diverged` the
    whole run; `bits` is the width of its accumulator, and a percentage after a mean is the error of the chip's reciprocal.

    Example: jq-quant simulate model_xint8.onnx --target aie2_x1 --data images/ -o simulation.json

    Example: jq-quant simulate model_xint8.onnx --data images/ --reading vitisai --provider-option target=X1
    """
    files.check_writable(output)
    chip = jq.integer.load(model, target)
    asked: AnyReading = reading_of(reading, provider_option, ep_context, ep_context_embed)
    timing = None
    if benchmark:
        asked, timing = _opened(model, data, asked, benchmark)
    simulation = jq.integer.simulate(chip, data, limit=limit, dump=dump, reading=asked)
    if output is not None:
        simulation.to_json(output)
    columns = ("tensor", "operators", "bits", "ties", "saturated", "differs", "cause", "diverged")
    rows = [_simulated(row) for row in simulation.log.rows]
    answer(
        as_json,
        simulation.to_dict() | ({"benchmark": timing.to_dict()} if timing else {}),
        table(columns, rows, f"{model.name} on {target}"),
        *simulation.log.summary().splitlines(),
        *(_agreed(a, simulation.reading) for a in simulation.agreements),
        *([simulation.without] if simulation.without else []),
        *([str(timing)] if timing else []),
        *(f"written: {path}" for path in (output, dump) if path is not None),
    )


def _simulated(row: jq.integer.RoundingRow) -> tuple[Any, ...]:
    name = row.tensor.removesuffix("_QuantizeLinear_Output")
    operators = f"{row.operators} {row.factor_error:+.2%}" if row.factor_error else row.operators
    ties, saturated, differs = (f"{count:,}" for count in (row.ties, row.saturated, row.differs))
    return name, operators, row.bits, ties, saturated, differs, ", ".join(row.causes), f"{row.diverged:,}"


def _agreed(agreement: jq.integer.Agreement, reading: str) -> str:
    apart = "not a number" if agreement.largest is None else f"{agreement.largest:.5g}"
    other = "onnxruntime" if reading == "cpu" else reading
    same = f"{agreement.output}: {agreement.equal:.2%} equal to {other}'s, largest difference {apart}"
    return same if agreement.top1 is None else f"{same}, same class for {agreement.top1:.2%} of the samples"
