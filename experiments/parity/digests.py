"""Digests of everything that a change of structure must leave as it was.

    python experiments/parity/digests.py OUT.json [--only presets quark ablate] [--presets NAME ...] [--against BEFORE.json]

* presets: the exported model of every preset on both bundled networks, its bytes and its bytes without metadata;
* quark: strict_quark on the models of `shared/spec/quark_reference`, where that folder is at hand;
* ablate: weights and plan of every run of `experiments/ablations/bundled.toml`.

Writes OUT.json, a name to a digest, and with `--against` prints every name whose digest differs and exits with 1 if
there is one. The worked integer cases and the ONNX backend suite are tests and compare with their own lists.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

import jq
from jq.research import ablate, read_experiment

ROOT = Path(__file__).parents[2]
SAMPLES, STEPS = 32, 20  # of calibration; of each unit's finetuning, where a method has steps of gradients


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def digests_of(model: onnx.ModelProto) -> dict[str, str]:
    whole = sha(model.SerializeToString(deterministic=True))
    del model.metadata_props[:]
    return {"": whole, " without metadata": sha(model.SerializeToString(deterministic=True))}


def of_presets(names: list[str]) -> Iterator[tuple[str, str]]:
    images = jq.zoo.calibration_set()[0][:SAMPLES]
    for network in jq.zoo.models():
        for name in names:
            config = jq.presets[name]
            config = config.replace(finetune_steps=STEPS) if config.finetune else config
            model = jq.quantize(jq.zoo.path(network), images, config).model
            for part, digest in digests_of(model).items():
                yield f"{network} {name}{part}", digest


def of_quark() -> Iterator[tuple[str, str]]:
    folder = next((p / "shared/spec/quark_reference" for p in ROOT.parents if (p / "shared/spec").is_dir()), None)
    for data in sorted(folder.glob("*.calib.npz")) if folder else ():
        name = data.name.removesuffix(".calib.npz")
        for cle in (False, True):
            config = jq.presets["XINT8"].replace(strict_quark=True, cle=cle)
            model = jq.quantize(folder / f"{name}.onnx", dict(np.load(data)), config).model
            for part, digest in digests_of(model).items():
                yield f"{name} cle={cle}{part}", digest


def of_ablate() -> Iterator[tuple[str, str]]:
    for row in ablate(read_experiment(ROOT / "experiments/ablations/bundled.toml")).rows:
        yield f"{row['model']} {row['config']} seed={row['seed']}", row["digest"]


PARTS = {"presets": of_presets, "quark": lambda _: of_quark(), "ablate": lambda _: of_ablate()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--presets", nargs="+", default=list(jq.presets), help="some of them only")
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    digests = {f"{part}: {name}": digest for part in args.only for name, digest in PARTS[part](args.presets)}
    args.out.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(digests)} digests in {args.out}")
    if args.against is None:
        return
    before = {k: v for k, v in json.loads(args.against.read_text()).items() if k.split(": ")[0] in args.only}
    if len(args.presets) < len(jq.presets):
        before = {k: v for k, v in before.items() if not k.startswith("presets") or k in digests}
    different = [name for name in before.keys() | digests.keys() if before.get(name) != digests.get(name)]
    print("\n".join([*sorted(different), f"{len(different)} of {len(before)} differ"]))
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
