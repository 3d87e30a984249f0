"""A model that takes images in channels-last order.

python -m jq.compat.quark.tools.convert_nchw_to_nhwc model.onnx model_nhwc.onnx
"""

from __future__ import annotations

from collections.abc import Sequence

from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.exchange.conversion import convert


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("convert_nchw_to_nhwc")
    args = parsed(parser, argv)
    convert(args.input, args.output, nhwc=True)
    written(args)


if __name__ == "__main__":
    run(main)
