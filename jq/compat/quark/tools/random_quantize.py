"""A model quantized on random data: a quick look at a config, whose accuracy means nothing.

python -m jq.compat.quark.tools.random_quantize --input_model_path model.onnx --quantized_model_path model_xint8.onnx
"""

from __future__ import annotations

from collections.abc import Sequence

from jq.compat.quark.calibration import PowerOfTwoMethod
from jq.compat.quark.draft import parse_subgraphs_list
from jq.compat.quark.quantization.api import ModelQuantizer
from jq.compat.quark.quantization.config.config import Config
from jq.compat.quark.quantization.config.custom_config import get_default_config
from jq.compat.quark.tools.shell import parsed, parser_of, run


def main(argv: Sequence[str] | None = None) -> None:
    """Quantize the model that the arguments name."""
    parser = parser_of("random_quantize")
    parser.add_argument("--config", default="XINT8")
    parser.add_argument("--exclude_nodes", default="", help="names, separated by ;")
    parser.add_argument("--exclude_subgraphs", default="", help="[first nodes], [last nodes]; ...")
    parser.add_argument("--save_as_external_data", action="store_true")
    args = parsed(parser, argv)
    config = get_default_config(args.config)
    if isinstance(config.calibrate_method, PowerOfTwoMethod):
        config.calibrate_method = PowerOfTwoMethod.NonOverflow  # errors on random data say nothing
    config.extra_options["UseRandomData"] = True
    config.nodes_to_exclude = [name.strip() for name in args.exclude_nodes.split(";") if name.strip()]
    config.subgraphs_to_exclude = parse_subgraphs_list(args.exclude_subgraphs) if args.exclude_subgraphs else []
    config.use_external_data_format = args.save_as_external_data
    ModelQuantizer(Config(config)).quantize_model(args.input, args.output)
    print(f"written: {args.output}")


if __name__ == "__main__":
    run(main)
