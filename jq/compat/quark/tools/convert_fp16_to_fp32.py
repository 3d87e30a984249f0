"""A float16 or bfloat16 model in float32.

python -m jq.compat.quark.tools.convert_fp16_to_fp32 --input model_fp16.onnx --output model.onnx
"""

from __future__ import annotations

from collections.abc import Sequence

from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.errors import ConfigError
from jq.exchange.conversion import convert


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("convert_fp16_to_fp32")
    parser.add_argument("--save_as_external_data", action="store_true")
    parser.add_argument("--subgraphs_to_include", nargs="*", help="refused: the whole model is converted")
    args = parsed(parser, argv)
    if args.subgraphs_to_include:
        raise ConfigError("--subgraphs_to_include is not supported: jq converts the whole model")
    convert(args.input, args.output, to="fp32")
    written(args)


if __name__ == "__main__":
    run(main)
