"""A float32 model whose operators compute in float16.

python -m jq.compat.quark.tools.convert_fp32_to_fp16 model.onnx model_fp16.onnx --keep_io_types
"""

from __future__ import annotations

from collections.abc import Sequence

from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.exchange.conversion import convert


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("convert_fp32_to_fp16")
    parser.add_argument("--keep_io_types", action="store_true", help="keep inputs and outputs in float32")
    parser.add_argument("--save_as_external_data", action="store_true")
    for option in ("--disable_shape_infer", "--all_tensors_to_one_file", "--not_simplify"):
        parser.add_argument(option, action="store_true", help="accepted, without effect on the result")
    args = parsed(parser, argv)
    convert(args.input, args.output, to="fp16", form="native", keep_io=args.keep_io_types)
    written(args)


if __name__ == "__main__":
    run(main)
