"""Parts that Quark's tools share: the files in their arguments, how they end, and how they write models."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from jq.compat.quark.external import store_outside
from jq.errors import Error

_INPUTS = ("--input", "--input_model", "--input_model_path")
_OUTPUTS = ("--output", "--output_model", "--output_model_path", "--quantized_model_path", "--quant_model")


def parser_of(tool: str) -> ArgumentParser:
    """Return a parser for the two files of a tool, as options or in their order: Quark's guides spell them both ways."""
    parser = ArgumentParser(tool)
    parser.add_argument("files", nargs="*", metavar="FILE", help="the input, then the output")
    parser.add_argument(*_INPUTS, dest="input", help="the model to read")
    parser.add_argument(*_OUTPUTS, dest="output", help="the model to write")
    return parser


def parsed(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Return the arguments with `input` and `output`, wherever they were given; exit with 2 if one of them is missing.

    >>> args = parsed(parser_of("tool"), ["a.onnx", "--output", "b.onnx"])
    >>> args.input, args.output
    ('a.onnx', 'b.onnx')
    """
    args = parser.parse_intermixed_args(argv)
    rest = list(args.files)
    for name in ("input", "output"):
        if getattr(args, name) is None and rest:
            setattr(args, name, rest.pop(0))
    if rest or args.input is None or args.output is None:
        parser.error("expected an input and an output")
    return args


def run(main: Callable[[], None]) -> None:
    """Run a tool; an error of the user's is one line on stderr and exit code 2."""
    try:
        main()
    except Error as error:
        from jq.cli import printable  # whose commands need parts of this package

        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None


def written(args: Namespace) -> None:
    """Report the model that was written, after moving its weights to a file of their own if that is asked for."""
    if getattr(args, "save_as_external_data", False):
        store_outside(args.output)
    print(f"written: {args.output}")
