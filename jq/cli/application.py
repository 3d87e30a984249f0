"""The application that commands add themselves to, and how it starts and fails."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import jq
from jq.cli.show import printable
from jq.errors import Error

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


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
