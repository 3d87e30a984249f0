"""The application that commands register with: start-up, verbosity and errors."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import jq
from jq.cli.show import printable
from jq.errors import Error
from jq.util.progress import log


def dashed(word: str) -> str:
    """Return an option's name with dashes: Quark and onnxruntime use underscores.

    >>> dashed("skip_optimization")
    'skip-optimization'
    """
    return word.replace("_", "-")


app = typer.Typer(
    context_settings={"token_normalize_func": dashed},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Results are on standard output, and all else on standard error. Exit codes: 0, done; 1, done, and something "
    "is not as it should be (lint, evaluate), or a defect of jq, with its traceback; 2, an error of the user's, on one "
    "line; 130, interrupted.",
)


_QUIET = "Print errors, and what --json asks for, and nothing else."
_VERBOSE = "Print what is done and how long it takes, and tracebacks of errors."


def _sets(level: int) -> Callable[[bool], None]:
    return lambda asked: log.setLevel(level) if asked else None


_Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_sets(logging.ERROR), help=_QUIET)]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", callback=_sets(logging.INFO), help=_VERBOSE)]


def command(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what makes a function a command, which takes --quiet and --verbose too, as stand before commands' names."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        # `preprocess` has onnxruntime's --verbose.
        more = {k: v for k, v in (("quiet", _Quiet), ("verbose", _Verbose)) if k not in signature.parameters}

        @functools.wraps(function)
        def run(**given: Any) -> None:
            function(**{name: value for name, value in given.items() if name not in more})

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [inspect.Parameter(name, keyword, default=False, annotation=option) for name, option in more.items()]
        parameters = [*signature.parameters.values(), *own]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(**settings)(run)
        return function

    return register


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and raise SystemExit: 0, 1 for a defect, 2 for a user's error, 130 for ctrl-C.

    A user's error prints one line on stderr and nothing else.

    >>> main(["inspect", "no_such_file.onnx"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names in a model may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    log.handlers[:] = [_Lines(sys.stderr)]
    log.setLevel(logging.WARNING)
    try:
        app(args=argv, prog_name="jq-quant")
    except Error as error:
        if log.isEnabledFor(logging.INFO):
            traceback.print_exc()
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None


class _Lines(logging.StreamHandler):
    """Format log records as lines with the seconds since the start."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.relativeCreated / 1000:8.1f} s  {printable(record.getMessage())}"


def _show_warning(message: Warning | str, *where: Any) -> None:
    if log.isEnabledFor(logging.WARNING):
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
    quiet: _Quiet = False,
    verbose: _Verbose = False,
) -> None:
    """Quantization research in JAX: an ONNX model, read in float, in fake-quant and in integers."""
