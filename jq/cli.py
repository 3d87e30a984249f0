"""The command line: `python -m jq`, or `jq-quant`.

A subcommand is one function here. It imports what `jq` itself does not, so that `--help` is quick, and
prints when its work is done, so that a failure leaves standard output empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jq
from jq import files
from jq.config import resolve
from jq.errors import ConfigError, Error, UnsupportedOp

if TYPE_CHECKING:
    from jq.inspect import Inspection

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_DEMO_BATCH, _DEMO_IMAGES = 250, 256

FloatModel = Annotated[Path, typer.Argument(help="A float ONNX file.", show_default=False)]
Data = Annotated[
    Path | None, typer.Option(help="An .npz or .npy file, or a folder of images or arrays; without it, random data.")
]
Config = Annotated[str, typer.Option(help="A preset, or a .json file as `quantize --show-config` prints it.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and raise SystemExit: 0, 1 for a defect, 2 for a user's error, 130 for ctrl-C.

    An error of the user's is one line on stderr and nothing else.

    >>> main(["inspect", "no_such_file.onnx"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names in a model may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        app(args=argv, prog_name="jq-quant")
    except Error as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None


def printable(text: str) -> str:
    r"""`text` on one line, with what could steer a terminal or break the line escaped.

    >>> printable("conv\x1b[2J\n")
    'conv\\x1b[2J\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _show_warning(message: Warning | str, *where: Any) -> None:
    print(f"warning: {printable(str(message))}", file=sys.stderr)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"jq-quant {jq.__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Quantization research in JAX: an ONNX model, read in float, in fake-quant and in integers."""


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=1,3,224,224", help="Shape of an input with free dims, which are 1 otherwise; may be repeated."
        ),
    ] = None,
) -> None:
    """Show a model's interface, operators, parameters and MACs.

    MACs (multiply-accumulates) hang on shapes, so on those of the inputs. Operators that jq has no rule for are listed,
    and are an error after that.
    """
    found = jq.inspect(jq.load(model), _shapes(shape or ()))
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _show(found, model.name)
    if found.unsupported:
        raise UnsupportedOp("; ".join(found.unsupported))


@app.command()
def calibrate(
    model: FloatModel,
    data: Data = None,
    config: Config = "XINT8",
    method: Annotated[str | None, typer.Option(help="How scales are found, if not as in the preset.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the statistics here; a stopped run goes on from there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the range and the scale of every tensor of a model on calibration data."""
    _use_all_cores()
    options = _config(config).replace(**({"method": method} if method else {}))
    graph = jq.prepare(jq.load(model))
    checkpoint = output and output.with_name(f"{output.name}.partial")
    stats = jq.calibrate(graph, data, options, checkpoint=checkpoint)
    if output:
        stats.save(output)
    found = jq.activation_qparams(graph, stats)
    tensors = {t: (*stats.range(t), found[t]) for t in stats.tensors}
    if as_json:
        rows = {
            t: {"low": low, "high": high, "scale": float(q.scale), "zero_point": int(q.zero_point)}
            for t, (low, high, q) in tensors.items()
        }
        print(json.dumps({"samples": stats.feeds, "config": options.to_dict(), "tensors": rows}, indent=2))
        return
    _print(
        _table(
            ("tensor", "low", "high", "scale", "zero point"),
            ((t, f"{low:.5g}", f"{high:.5g}", _scale(q), int(q.zero_point)) for t, (low, high, q) in tensors.items()),
            f"{model.name}: {options.method} on {stats.feeds} samples",
        )
    )


def _scale(found: jq.QParams) -> str:
    return f"2^{int(found.exponent)}" if found.is_power_of_two else f"{float(found.scale):.5g}"


def _use_all_cores() -> None:
    """One JAX device per core: a batch is split over them."""
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(RuntimeError):  # JAX runs already: then this is not the command line
        jax.config.update("jax_num_cpu_devices", cores)


@app.command()
def quantize(
    model: FloatModel,
    data: Data = None,
    config: Config = "XINT8",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The quantized model [MODEL_CONFIG.onnx].", show_default=False)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change an option of the config; may be repeated."),
    ] = None,
    format: Annotated[str, typer.Option(help="qdq, qoperator, vitis_qdq or fix_neuron.")] = "qdq",
    opset: Annotated[int | None, typer.Option(help="Opset of the result [17, or the model's if higher].")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report, .html or .json.")] = None,
    time_budget: Annotated[
        str | None, typer.Option(metavar="120s", help="After this long, finetuning leaves what is not tuned as it is.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A file from which a finetuning that was stopped goes on.")
    ] = None,
    spill: Annotated[
        Path | None, typer.Option(help="A folder where finetuning keeps activations, instead of in memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    show_config: Annotated[bool, typer.Option(help="Print the config as JSON and end.")] = False,
) -> None:
    """Quantize a model on calibration data: what the NPU runs, and what each tensor lost.

    Example: jq-quant quantize model.onnx --data calib/ --config XINT8_ADAROUND -o model_xint8.onnx --time-budget 120s
    """
    _use_all_cores()
    budget = None if time_budget is None else _seconds(time_budget)
    options = _config(config).replace(**dict(_setting(o) for o in option or ()))
    if show_config:
        print(json.dumps(options.to_dict(), indent=2))
        return
    if report is not None and report.suffix not in (".html", ".json"):
        raise ConfigError(f"--report {report}: expected a name that ends with .html or .json")
    files.check_writable(report)
    stem = Path(config).stem if config.endswith(".json") else config
    output = output or model.parent / f"{model.stem}_{stem.lower()}.onnx"
    keeping = {"time_budget": budget, "checkpoint": checkpoint, "spill": spill}
    result = jq.quantize(model, data, options, output=output, format=format, opset=opset, **keeping)  # type: ignore[arg-type]
    if report is not None:
        (result.report.to_html if report.suffix == ".html" else result.report.to_json)(report)
    if as_json:
        print(json.dumps(result.report.to_dict(), indent=2))
        return
    _print(*result.report.summary().splitlines(), f"written: {output}", *([f"report: {report}"] if report else []))


def _seconds(text: str) -> float:
    """A time as 90, 90s, 2m or 1h."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        found = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ConfigError(f"--time-budget {text!r}: expected a time such as 120s, 2m or 1h")
    return found


def _config(name: str) -> jq.QuantConfig:
    """A preset, or what a JSON file describes."""
    if not name.endswith(".json"):
        return resolve(name)
    try:
        found = json.loads(Path(name).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds a {type(found).__name__}; expected options by name")
    return jq.QuantConfig.from_dict(found)


def _setting(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, with a value in JSON, or else a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: expected the form NAME=VALUE")
    try:
        found = json.loads(value)
    except ValueError:
        found = value
    return name, jq.QuantConfig.read(name, found)


@app.command()
def lint(
    model: FloatModel,
    config: Config = "XINT8",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what will not go well in a format, before quantizing; exit with 1 if something cannot."""
    found = jq.lint(model, _config(config))
    if as_json:
        print(json.dumps([dataclasses.asdict(f) for f in found], indent=2))
    else:
        _print(*(str(f) for f in found), f"{model.name}: {len(found)} finding(s)")
    if any(f.severity == "error" for f in found):
        raise typer.Exit(1)


@app.command()
def simulate(
    model: Annotated[Path, typer.Argument(help="A quantized ONNX file, of any tool.", show_default=False)],
    data: Data = None,
    target: Annotated[str, typer.Option(help="ort, dpu, aie2_x1 or aie2_even.")] = "aie2_x1",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write everything to this .json file.")] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write every tensor's integers to this new folder, with a manifest.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Take so many samples of the data, or batches of a fixed size [all].")
    ] = None,
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
    _print(
        _table(columns, rows, f"{model.name} on {target}"),
        *found.log.summary().splitlines(),
        *(_agreed(a) for a in found.agreements),
        *([f"onnxruntime does not run this model: {found.without}"] if found.without else []),
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


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Where the models and reports go.")] = Path("jq-demo"),
) -> None:
    """Quantize the bundled models for the NPU, and compare them with their float originals."""
    from rich.console import Console
    from rich.progress import track

    _use_all_cores()
    names, console = jq.zoo.models(), Console(stderr=True)
    progress = track(names, "quantizing", console=console, transient=True) if console.is_terminal else names
    columns = [_demo(name, folder) for name in progress]
    rows = [(measure, *(c[measure] for c in columns)) for measure in columns[0]]
    model = folder / f"{names[-1]}_xint8.onnx"
    _print(
        _table(("", *names), rows, "XINT8 on the bundled Fashion-MNIST images"),
        *(f"written: {folder / f'{name}_xint8'}.onnx, .html" for name in names),
        "Next:",
        f"  open {folder / f'{names[-1]}_xint8.html'} in a browser: what each tensor lost",
        f"  jq-quant inspect {model}",
        "  jq-quant lint YOUR_MODEL.onnx",
        "  jq-quant quantize YOUR_MODEL.onnx --data YOUR_IMAGES/ --report report.html",
    )


def _shapes(options: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """`NAME=1,3,224,224` options; the name ends at the last =, and no dims are a scalar."""
    found = {}
    for option in options:
        name, equals, dims = option.rpartition("=")
        try:
            found[name] = tuple(int(d) for d in dims.split(",")) if dims else ()
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ConfigError(f"--shape {option!r}: expected the form NAME=1,3,224,224")
    return found


def _show(found: Inspection, title: str) -> None:
    macs: Mapping[str, int] = found.macs or {}
    sides = (("input", found.inputs), ("output", found.outputs))
    interface = [
        (side, v.name, " ".join([*v.containers, str(v.dtype or "?")]), _dims(v.shape))
        for side, values in sides
        for v in values
    ]
    ops = [(op, f"{count:,}", f"{macs[op]:,}" if op in macs else "") for op, count in found.ops.items()]
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in found.opsets.items())
    at = ", ".join(f"{name}={_dims(shape)}" for name, shape in found.shapes.items())
    total = f"unknown: {found.reason}" if found.total_macs is None else f"{found.total_macs:,} at {at}"
    _print(
        _table(("", "name", "type", "shape"), interface, title),
        _table(("operator", "nodes", "MACs"), ops),
        f"opsets: {opsets}",
        f"parameters: {found.parameters:,} ({found.parameter_bytes:,} bytes)",
        f"MACs: {total}",
        *(f"unsupported: {line}" for line in found.unsupported),
    )


def _dims(shape: Sequence[int | str | None] | None) -> str:
    return "?" if shape is None else "[" + ",".join("?" if d is None else str(d) for d in shape) + "]"


def _demo(name: str, folder: Path) -> dict[str, str]:
    """One model quantized: its accuracy by onnxruntime, and by jq's fake-quant."""
    import jax
    import numpy as np
    import onnxruntime

    images, labels = jq.zoo.evaluation_set()
    path, output = jq.zoo.path(name), folder / f"{name}_xint8.onnx"
    start = time.perf_counter()
    result = jq.quantize(path, jq.zoo.calibration_set()[0][:_DEMO_IMAGES], "XINT8", output=output)
    seconds = time.perf_counter() - start
    result.report.to_html(output.with_suffix(".html"))

    def accuracy(guess: np.ndarray) -> str:
        return f"{np.mean(guess == labels):.2%}"

    def by_onnxruntime(file: str | os.PathLike[str]) -> np.ndarray:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        batches = (images[i : i + _DEMO_BATCH] for i in range(0, len(images), _DEMO_BATCH))
        return np.concatenate([session.run(None, {"input": batch})[0] for batch in batches]).argmax(-1)

    qfn = jq.fake_quant(result.graph)
    forward = jax.jit(jq.chunked(lambda params, inputs: qfn(params, result.plan, inputs)))
    simulated = np.asarray(forward(jq.pack(result.graph), {"input": images})["logits"]).argmax(-1)
    quantized = by_onnxruntime(output)
    return {
        "float top-1": accuracy(by_onnxruntime(path)),
        "XINT8 top-1": accuracy(quantized),
        "XINT8 top-1, simulated by jq": accuracy(simulated),
        "same class, simulated and onnxruntime": f"{np.mean(simulated == quantized):.2%}",
        "float model": f"{path.stat().st_size:,} bytes",
        "XINT8 model": f"{output.stat().st_size:,} bytes",
        "quantized in": f"{seconds:.1f} s",
    }


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Any:
    """A rich table of plain text: what comes from a file is not read as markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title and Text(printable(title)), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table


def _print(*parts: Any) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(printable(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
