"""A model in another opset.

python -m jq.compat.quark.tools.convert_opset_version model.onnx 21 model_opset21.onnx
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.exchange.conversion import convert


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("convert_opset_version")
    parser.add_argument("--target_opset", type=int)
    words = list(sys.argv[1:] if argv is None else argv)
    numbers = [word for word in words if word.isdigit() and "--target_opset" not in words]
    args = parsed(parser, [word for word in words if word not in numbers])
    opset = int(numbers[0]) if numbers else args.target_opset
    if opset is None:
        parser.error("expected an opset")
    convert(args.input, args.output, opset=opset)
    written(args)


if __name__ == "__main__":
    run(main)
