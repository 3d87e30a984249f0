"""What it costs to keep a network whole on the NPU: agreement with the float network and KL, with and without `whole`.

    python experiments/npu/kept.py MODEL.onnx:PREP[:LABELS] ... --images NPZ --eval FOLDER [--only] [--chip stx]
        [--whole 0 0.001] [--preset XINT8] [--count 100]

Models, data and metrics are those of experiments/ablations/joint_search.py. The first row is the preset as it is; the others
have `whole` at each of these numbers, and their differences to it, with half of the 95 % interval over the images, are paired.
Each row has the forecast of its model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.common import RESULTS, beside, parser_of, setup


def variants(
    cores: Sequence[int], path: str, data: str, preset: str, losses: Sequence[float], chip: str, folder: str
) -> dict[str, dict[str, float]]:
    """The quantized models in a folder, and the forecasts of them."""
    setup(cores, len(cores))
    import jq

    x, made = np.load(data), {}
    configs = {preset: jq.presets[preset]}
    configs |= {f"{preset} whole={loss:g}": jq.presets[preset].replace(whole=loss) for loss in losses}
    for name, config in configs.items():
        model = jq.quantize(path, x, config, output=f"{folder}/{name}.onnx").model
        forecast = jq.npu.forecast(model, chip)
        made[name] = {**forecast.counts, "subgraphs": forecast.subgraphs}
    return made


def main() -> None:
    parser = parser_of(__doc__, RESULTS / "npu_kept.jsonl")
    parser.add_argument("--whole", type=float, nargs="+", default=[0.0])
    parser.add_argument("--preset", default="XINT8")
    parser.add_argument("--chip", default="stx")
    args = parser.parse_args()
    beside(parser, args, "npu_kept", variants, args.preset, args.whole, args.chip)


if __name__ == "__main__":
    main()
