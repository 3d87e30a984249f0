"""A QDQ model without its quantizers: `convert_quant_to_float` with other arguments.

python -m jq.compat.quark.tools.remove_qdq --input_model model_int8.onnx --output_model model_float.onnx
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto

from jq.compat.quark.tools.convert_quant_to_float import convert_quant_to_float
from jq.compat.quark.tools.shell import parsed, parser_of, run, written


def remove_qdq(model: ModelProto) -> ModelProto:
    """Return the model without QuantizeLinear and DequantizeLinear nodes."""
    return convert_quant_to_float(model)


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("remove_qdq")
    args = parsed(parser, argv)
    convert_quant_to_float(args.input, args.output)
    written(args)


if __name__ == "__main__":
    run(main)
