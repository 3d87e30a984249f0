"""The forecast of networks before and after what keeps them whole on the NPU.

    python experiments/npu/whole.py --models FOLDER [--chip stx] [--out ROWS.jsonl] [NAME ...]

FOLDER holds float structures, `NAME.onnx`, such as torchvision's of `logs.py`. Each is forecast in XINT8, in XINT8 with
`whole=0.0`, and in A8W8 with it, on random data, as structure alone decides.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jq
from experiments.common import RESULTS, command, versions

NAMES = ("mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "shufflenet_v2_x1_0")
CONFIGS = {
    "XINT8": jq.presets["XINT8"],
    "XINT8 whole": jq.presets["XINT8"].replace(whole=0.0),
    "A8W8 whole": jq.presets["A8W8"].replace(whole=0.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--chip", default="stx")
    parser.add_argument("--out", type=Path, default=RESULTS / "npu_whole.jsonl")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.names:
        for label, config in CONFIGS.items():
            forecast = jq.npu.forecast(arguments.models / f"{name}.onnx", arguments.chip, config=config)
            row = {"model": name, "config": label, **forecast.counts, "subgraphs": forecast.subgraphs}
            rows.append(row)
            print("{model:20} {config:12} npu {npu:4} cpu {cpu:4} subgraphs {subgraphs:3}".format(**row), flush=True)
    record = {"experiment": "npu_whole", "chip": arguments.chip, **versions(), "command": command(), "counts": rows}
    with arguments.out.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
