"""A float32 model in bfloat16: Casts around float32 operators, Quark's quantizers, or operators of the type.

python -m jq.compat.quark.tools.convert_fp32_to_bf16 --input model.onnx --output model_bf16.onnx
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.errors import ConfigError, suggest
from jq.exchange.conversion import Form, convert
from jq.graph import Graph

FORMATS: Mapping[str, Form] = {"with_cast": "cast", "customqdq": "qdq", "bf16": "native"}


def arguments(program: str, argv: Sequence[str] | None = None) -> Namespace:
    """Return the arguments that the two converters to bfloat16 share.

    >>> arguments("tool", ["--input", "a.onnx", "--output", "b.onnx"]).format
    'with_cast'
    """
    parser = parser_of(program)
    parser.add_argument("--format", default="with_cast")
    parser.add_argument("--save_as_external_data", action="store_true")
    return parsed(parser, argv)


def converted(model: str | Graph, args: Namespace) -> None:
    """Write a model of float32 in bfloat16."""
    if args.format not in FORMATS:
        near = suggest(args.format, FORMATS)
        raise ConfigError(f"--format is {args.format!r}; expected one of {', '.join(FORMATS)}.{near}")
    convert(model, args.output, to="bf16", form=FORMATS[args.format])
    written(args)


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    args = arguments("convert_fp32_to_bf16", argv)
    converted(args.input, args)


if __name__ == "__main__":
    run(main)
