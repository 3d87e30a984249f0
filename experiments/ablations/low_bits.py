"""What low bits cost and what each method brings back: powers of two of a tensor or of each channel.

    python experiments/ablations/low_bits.py [MODEL.onnx:PREP[:LABELS] ...] [--images NPZ] [--eval FOLDER] [--only]
        [--formats W8A8 W4A8 W4A4 W2A4] [--scales tensor channel] [--methods minmse ... searched] [--count 100]

Models and images are those of experiments/bench/quantize.py. All formats have int32 biases, first and last layers in 8 bits
and no constraints of the NPU, so that rows differ in what their names say. The methods:

* minmse: MinMSE, biases corrected: naive powers of two
* gptq, gpfq, flexround, adaround: weights rounded by that, layer by layer (adaround with coordinate descent behind it)
* adaround_exponents: adaround, with exponents of weights by the error of their layers
* block: then blocks by gradient
* brecq: blocks alone, with each weight between its two codes
* network: then all blocks at once, towards the outputs of the float network
* searched: adaround_exponents, then exponents of activations by the outputs

Prints KL, signal-to-noise ratio, top-1 and agreement with the float network, and differences to the first row with 95 %
intervals, paired by image; appends a JSON line per model and variant to `--out`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common import RESULTS, beside, parser_of, setup

OUT = RESULTS / "low_bits.jsonl"
FORMATS = {"W8A8": {"weight": "int8", "activation": "uint8"}, "W4A8": {}, "W4A4": {}, "W2A4": {}}
METHODS: dict[str, dict[str, Any]] = {
    "minmse": {},
    "gptq": {"finetune": "gptq"},
    "gpfq": {"finetune": "gpfq"},
    "flexround": {"finetune": "flexround"},
    "adaround": {"finetune": "adaround"},
    "adaround_exponents": {"finetune": "adaround", "tune_weight_exponents": True},
    "block": {"finetune": "adaround+block", "tune_weight_exponents": True},
    "brecq": {"finetune": "brecq"},
    "network": {"finetune": "adaround+network", "tune_weight_exponents": True},
    "searched": {"finetune": "adaround+exponents", "tune_weight_exponents": True},
}


def made(
    cores: Sequence[int], path: str, data: str, wanted: Sequence[Sequence[str]], folder: str
) -> dict[str, dict[str, Any]]:
    """The models of all variants in a folder, and the seconds that each took."""
    setup(cores, len(cores))
    import jq
    from jq.arithmetic.formats import format_named

    x, facts = np.load(data), {}
    for format in wanted[0]:
        base = jq.presets["W4A8" if format == "W8A8" else format]
        base = base.replace(**{k: format_named(v) for k, v in FORMATS[format].items()})
        for scale in wanted[1]:
            known: dict[Any, Any] = {}
            for method in wanted[2]:
                config = base.replace(per_channel=scale == "channel", **METHODS[method])
                start, name = time.perf_counter(), f"{format}_{scale}_{method}"
                jq.quantize(path, x, config, output=f"{folder}/{name}.onnx", measured=known)
                facts[name] = {"seconds": time.perf_counter() - start}
    return facts


def main() -> None:
    parser = parser_of(__doc__, OUT)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--scales", nargs="+", choices=["tensor", "channel"], default=["tensor", "channel"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    args = parser.parse_args()
    beside(parser, args, "low_bits", made, [args.formats, args.scales, args.methods])


if __name__ == "__main__":
    main()
