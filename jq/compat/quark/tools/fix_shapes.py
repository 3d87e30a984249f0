"""A model whose inputs have fixed shapes, with the shapes of all tensors that follow from them.

python -m jq.compat.quark.tools.fix_shapes --input_model_path model.onnx --output_model_path fixed.onnx \\
    --fix_shapes "input:[1,3,224,224];output:[1,1000]"
"""

from __future__ import annotations

from collections.abc import Sequence

from jq.compat.quark.inputs import converted
from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.graph.read import load
from jq.graph.write import finished


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("fix_shapes")
    parser.add_argument("--fix_shapes", help="shapes by name: input_1:[1,224,224,3];output_1:[1,1000]")
    parser.add_argument("--save_as_external_data", action="store_true")
    args = parsed(parser, argv)
    graph, _ = converted(load(args.input), float32=False, shapes=args.fix_shapes, channels_last=False)
    finished(graph, args.output)
    written(args)


if __name__ == "__main__":
    run(main)
