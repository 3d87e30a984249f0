"""A QDQ model whose int8 activations are uint8, with the same values.

python -m jq.compat.quark.tools.convert_s8s8_to_u8s8 model_s8s8.onnx model_u8s8.onnx
"""

from __future__ import annotations

from collections.abc import Sequence

from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.exchange.conversion import convert


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("convert_s8s8_to_u8s8")
    args = parsed(parser, argv)
    convert(args.input, args.output, uint8_activations=True)
    written(args)


if __name__ == "__main__":
    run(main)
