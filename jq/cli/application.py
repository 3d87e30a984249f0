"""The application that commands register with: start-up, verbosity and errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TextIO

import typer
import typer.core

import jq
from jq.cli.folders import check_folder
from jq.cli.options import paired
from jq.cli.pixels import PIXEL_OPTIONS, data_of
from jq.cli.show import marked, printable, unwritable
from jq.errors import Error
from jq.util import files
from jq.util.progress import log


def dashed(word: str) -> str:
    """Return an option's name with dashes: Quark and onnxruntime use underscores.

    >>> dashed("skip_optimization")
    'skip-optimization'
    """
    return word.replace("_", "-")


GROUPS: Mapping[str, Sequence[str]] = {
    "Start here": ("demo", "presets", "quantize", "auto"),
    "Before quantizing": ("inspect", "lint", "npu", "preprocess", "convert", "calibrate"),
    "What was lost": ("compare", "evaluate", "infer", "sensitivity", "ablate"),
    "The chip": ("simulate", "device-report"),
    "This machine": ("cache",),
}


class _Grouped(typer.core.TyperGroup):
    """A group that lists its commands by purpose."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of commands for each group; a command that none names comes last."""
        rest = [name for name in self.list_commands(ctx) if all(name not in names for names in GROUPS.values())]
        for title, names in ({**GROUPS, "More": rest} if rest else GROUPS).items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(90)) for name in names])


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
SECTIONS: Mapping[str, Sequence[str]] = {
    "Preprocessing of images": tuple(PIXEL_OPTIONS),
    "General options": ("as_json", "quiet", "verbose", "make_dirs", "help"),
}


class _Sectioned(typer.core.TyperCommand):
    """A command whose help has the options that many commands share in sections of their own, behind its own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the command's own options, and the sections."""
        shown: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], **{title: [] for title in SECTIONS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                title = "Arguments" if parameter.param_type_name == "argument" else "Options"
                shown[next((t for t, names in SECTIONS.items() if parameter.name in names), title)].append(record)
        for title, records in shown.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


app = typer.Typer(
    cls=_Grouped,
    context_settings={"token_normalize_func": dashed, **_HELP},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Results go to standard output, everything else to standard error. Exit codes: 0: done; 1: done, but a check "
    "failed (lint, evaluate, auto), or a bug in jq, with its traceback; 2: a mistake in the command or the files, in one "
    "line; 130: interrupted.",
)


_QUIET = "Print only errors and what --json asks for."
_VERBOSE = "Print each step with its time, and tracebacks of errors."
_MAKE_DIRS = "Create missing folders of the files to write."
_MakeDirs = Annotated[bool, typer.Option("--make-dirs", help=_MAKE_DIRS)]


def _sets(level: int) -> Callable[[bool], None]:
    return lambda asked: log.setLevel(level) if asked else None


_Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_sets(logging.ERROR), help=_QUIET)]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", callback=_sets(logging.INFO), help=_VERBOSE)]


def command(writes: Sequence[str] = (), **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what makes a function a command, which takes --quiet and --verbose too, as stand before commands' names.

    A command with --data takes the options of `PIXEL_OPTIONS` beside it, and gets the data that they describe. One that
    writes takes --make-dirs: without it, the folders of the options that `writes` names must be there.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        # `preprocess` has onnxruntime's --verbose.
        more = {k: (v, False) for k, v in (("quiet", _Quiet), ("verbose", _Verbose)) if k not in signature.parameters}
        more |= {"make_dirs": (_MakeDirs, False)} if writes else {}
        pixels = dict.fromkeys(PIXEL_OPTIONS) if "data" in signature.parameters else {}

        @functools.wraps(function)
        def run(**given: Any) -> None:
            own = {name: value for name, value in given.items() if name not in more and name not in pixels}
            for name in () if given.get("make_dirs") else writes:
                check_folder(f"--{dashed(name)}", given[name])
            outputs = {f"--{dashed(name)}": given[name] for name in writes}
            files.check_apart(outputs, [value for name, value in given.items() if name not in writes])
            if pixels:
                own["data"] = data_of(own["data"], {name: given[name] for name in pixels})
            function(**own)

        keyword = inspect.Parameter.KEYWORD_ONLY
        added = more | {name: (PIXEL_OPTIONS[name], None) for name in pixels}
        parameters = [
            *signature.parameters.values(),
            *(inspect.Parameter(k, keyword, default=d, annotation=option) for k, (option, d) in added.items()),
        ]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        context = {**_HELP, **settings.pop("context_settings", {})}
        app.command(cls=_Sectioned, context_settings=context, **settings)(run)
        return function

    return register


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and raise SystemExit: 0, 1 for a defect, 2 for a user's error, 130 for ctrl-C.

    A user's error prints one line on stderr and nothing else.

    >>> main(["inspect", "no_such_file.onnx"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop)  # as for ctrl-C, open files are closed and drafts removed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names in a model may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    log.handlers[:] = [_Lines(sys.stderr)]
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning, append=True)
            warnings.showwarning = _Warnings()  # type: ignore[assignment]
            with _printing():
                app(args=paired(sys.argv[1:] if argv is None else argv), prog_name="jq-quant")
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            print("interrupted", file=sys.stderr)
        raise
    except Error as error:
        if log.isEnabledFor(logging.INFO):
            traceback.print_exc()
        print(marked("error", printable(str(error))), file=sys.stderr)
        raise SystemExit(2) from None


_INTERRUPTED = 130  # the exit code that typer gives ctrl-C


def _stop(number: int, frame: Any) -> None:
    print("terminated", file=sys.stderr)
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Flush the output; at exit, Python would print a traceback if that fails."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the end of the process
    except OSError as error:
        if error.filename is not None:  # of a file
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise unwritable(error) from None


class _Lines(logging.StreamHandler):
    """Format log records as lines with the seconds since the start; a warning is shown once."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.warned: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is no warning that was shown already."""
        message = record.getMessage()
        again = record.levelno == logging.WARNING and message in self.warned
        self.warned |= {message} if record.levelno == logging.WARNING else set()
        return not again

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.relativeCreated / 1000:8.1f} s  {printable(record.getMessage())}"


@dataclasses.dataclass(frozen=True)
class _Warnings:
    """Show each warning of a run once, from wherever in the code it comes."""

    shown: set[str] = dataclasses.field(default_factory=set)

    def __call__(self, message: Warning | str, *where: Any) -> None:
        text = printable(str(message))
        if text not in self.shown and log.isEnabledFor(logging.WARNING):
            self.shown.add(text)
            print(marked("warning", text), file=sys.stderr)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"jq-quant {jq.__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
) -> None:
    """Quantize ONNX models to 8 bits for AMD's NPUs, and show what each tensor lost and why."""
