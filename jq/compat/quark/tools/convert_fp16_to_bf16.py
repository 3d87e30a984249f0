"""A float16 model in bfloat16, in the forms of `convert_fp32_to_bf16`.

python -m jq.compat.quark.tools.convert_fp16_to_bf16 --input model_fp16.onnx --output model_bf16.onnx
"""

from __future__ import annotations

from collections.abc import Sequence

from jq.compat.quark.tools.convert_fp32_to_bf16 import arguments, converted
from jq.compat.quark.tools.shell import run
from jq.exchange.conversion import to_float32
from jq.graph.read import load


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    args = arguments("convert_fp16_to_bf16", argv)
    converted(to_float32(load(args.input)), args)


if __name__ == "__main__":
    run(main)
