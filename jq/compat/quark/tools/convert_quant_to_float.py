"""The float model that a quantized one stands for: its quantizers removed, its weights as the codes mean them.

python -m jq.compat.quark.tools.convert_quant_to_float model_int8.onnx model_float.onnx
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from onnx import ModelProto

from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.exchange.conversion import convert


def convert_quant_to_float(
    quant_model: str | os.PathLike[str] | ModelProto, float_model: str | os.PathLike[str] | None = None
) -> ModelProto:
    """Return the float model, and write it to `float_model`.

    >>> import jq
    >>> model = jq.quantize(jq.zoo.path("fashion_resnet"), jq.zoo.calibration_set()[0][:8]).model
    >>> {n.op_type for n in convert_quant_to_float(model).graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    set()
    """
    return convert(quant_model, float_model, dequantize=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("convert_quant_to_float")
    args = parsed(parser, argv)
    convert_quant_to_float(args.input, args.output)
    written(args)


if __name__ == "__main__":
    run(main)
