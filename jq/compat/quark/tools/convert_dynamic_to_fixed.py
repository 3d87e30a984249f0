"""A model whose inputs have fixed shapes: `fix_shapes` with other arguments.

python -m jq.compat.quark.tools.convert_dynamic_to_fixed --fix_shapes "input:[1,3,224,224]" model.onnx fixed.onnx
"""

from __future__ import annotations

from collections.abc import Sequence

from jq.compat.quark.tools import fix_shapes
from jq.compat.quark.tools.shell import parsed, parser_of, run


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("convert_dynamic_to_fixed")
    parser.add_argument("--fix_shapes", required=True, help="shapes by name: input_1:[1,224,224,3]")
    args = parsed(parser, argv)
    files = ("--input_model_path", args.input, "--output_model_path", args.output)
    fix_shapes.main([*files, "--fix_shapes", args.fix_shapes])


if __name__ == "__main__":
    run(main)
