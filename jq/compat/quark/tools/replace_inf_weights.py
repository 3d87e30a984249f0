"""A model whose infinite weights are large numbers.

python -m jq.compat.quark.tools.replace_inf_weights --input_model model.onnx --output_model finite.onnx
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from onnx import ModelProto

from jq.compat.quark.tools.shell import parsed, parser_of, run, written
from jq.graph.read import load
from jq.graph.write import finished
from jq.util import files


def replace_inf_in_onnx_weights(
    input_model: str | os.PathLike[str], output_model: str | os.PathLike[str], replace_inf_value: float = 10000.0
) -> ModelProto:
    """Write a model with `replace_inf_value` in place of infinite weights, with their signs, and return it."""
    files.check_writable(output_model, input_model)
    graph = load(input_model)
    finite = {name: _finite(array, replace_inf_value) for name, array in graph.arrays.items()}
    return finished(graph.with_arrays(finite), output_model)


def _finite(array: np.ndarray, largest: float) -> np.ndarray:
    if not np.issubdtype(array.dtype, np.floating) or not np.isinf(array).any():
        return array
    return np.where(np.isinf(array), np.copysign(np.asarray(largest, array.dtype), array), array)


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the model that the arguments name."""
    parser = parser_of("replace_inf_weights")
    parser.add_argument("--replace_inf_value", type=float, default=10000.0)
    args = parsed(parser, argv)
    replace_inf_in_onnx_weights(args.input, args.output, args.replace_inf_value)
    written(args)


if __name__ == "__main__":
    run(main)
