"""The command line: `python -m jq`, or `jq-quant`.

A subcommand is one function here. It imports what `jq` itself does not, so that `--help` is quick, and
prints when its work is done, so that a failure leaves standard output empty.
"""

from __future__ import annotations

import contextlib
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
from jq.config import resolve
from jq.errors import ConfigError, Error, UnsupportedOp

if TYPE_CHECKING:
    import numpy as np

    from jq.inspect import Inspection

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_DEMO_BATCH = 250


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
    model: Annotated[Path, typer.Argument(help="A float ONNX file.", show_default=False)],
    data: Annotated[
        Path | None,
        typer.Option(help="An .npz or .npy file, or a folder of images or arrays; without it, random data."),
    ] = None,
    config: Annotated[str, typer.Option(help="A preset.")] = "XINT8",
    method: Annotated[str | None, typer.Option(help="How scales are found, if not as in the preset.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the statistics here; a stopped run goes on from there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the range and the scale of every tensor of a model on calibration data."""
    _use_all_cores()
    options = resolve(config).replace(**({"method": method} if method else {}))
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
    exponent = int(found.exponent)
    return f"2^{exponent}" if float(found.scale) == 2.0**exponent else f"{float(found.scale):.5g}"


def _use_all_cores() -> None:
    """One JAX device per core: a batch is split over them."""
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(RuntimeError):  # JAX runs already: then this is not the command line
        jax.config.update("jax_num_cpu_devices", cores)


@app.command()
def demo() -> None:
    """Run the bundled models, by jq and by onnxruntime."""
    from rich.console import Console
    from rich.progress import track

    _use_all_cores()
    images, labels = jq.zoo.evaluation_set()
    names, console = jq.zoo.models(), Console(stderr=True)
    progress = track(names, "running", console=console, transient=True) if console.is_terminal else names
    columns = [_demo(name, images, labels) for name in progress]
    rows = [(measure, *(c[measure] for c in columns)) for measure in columns[0]]
    _print(
        _table(("", *names), rows, f"Float models on {len(images)} images"),
        "The quantized half of this demo arrives with XINT8.",
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


def _demo(name: str, images: np.ndarray, labels: np.ndarray) -> dict[str, str]:
    """One model's accuracy and speed. Both runtimes take turns, so that other load meets both."""
    import jax
    import numpy as np
    import onnxruntime

    path = jq.zoo.path(name)
    batches = [images[i : i + _DEMO_BATCH] for i in range(0, len(images), _DEMO_BATCH)]
    start = time.perf_counter()
    graph = jq.prepare(jq.load(path))
    mesh = jax.make_mesh((jax.local_device_count(),), ("batch",))
    fn, params = jax.jit(jq.chunked(jq.trace(graph), mesh=mesh)), jq.pack(graph, mesh=mesh)
    for size in {len(b) for b in batches}:
        fn(params, {"input": images[:size]})["logits"].block_until_ready()
    ready = time.perf_counter() - start
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # on the cores that jq is timed on
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    session.run(None, {"input": batches[0]})
    ours, theirs, seconds = [], [], [0.0, 0.0]
    for batch in batches:
        start = time.perf_counter()
        ours.append(np.asarray(fn(params, {"input": batch})["logits"]))
        middle = time.perf_counter()
        theirs.append(session.run(None, {"input": batch})[0])
        seconds[0] += middle - start
        seconds[1] += time.perf_counter() - middle
    a, b = np.concatenate(ours), np.concatenate(theirs)
    guess, expected = a.argmax(-1), b.argmax(-1)
    return {
        "top-1": f"{np.mean(guess == labels):.2%}",
        "top-1 by onnxruntime": f"{np.mean(expected == labels):.2%}",
        "same top-1": f"{np.mean(guess == expected):.2%}",
        "largest difference / largest logit": f"{np.max(np.abs(a - b)) / np.max(np.abs(b)):.1e}",
        "images/s": f"{len(images) / seconds[0]:,.0f}",
        "images/s by onnxruntime": f"{len(images) / seconds[1]:,.0f}",
        "load, prepare, trace and compile": f"{ready:.2f} s",
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
