"""Kill commands at random moments and let disks run full, start them again, and compare what they leave.

    python experiments/robustness/kill.py [calibrate finetune ...] [--kills 5] [--full 2] [--seed 0] [--short]
    python experiments/robustness/kill.py --kills 34 --full 4 --short     # more than 200 and 20, in minutes

One run goes through undisturbed; of the others each is killed (SIGKILL) several times, or is allowed files of some bytes
only, as on a full disk, before it may end. After each disturbance the output is not there or is whole, and no run fails
with more than one line; in the end it has the bytes of the undisturbed run. Exits non-zero otherwise. Appends one JSON
line to `--out`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import jq
from experiments.common import RESULTS
from jq.config_file import as_toml

_GIVEN = {  # the command, the model and how often the evaluation set is repeated
    "calibrate": (["calibrate", "--method", "minmse"], "fashion_mobilenet", 4),
    "histograms": (["calibrate", "--method", "minmse_hist"], "fashion_mobilenet", 4),
    "auto": (["auto", "--target", "sqnr 200"], "fashion_resnet", 0),
    "quantize": (["quantize"], "fashion_mobilenet", 0),
    "finetune": (["quantize", "--config", "XINT8_ADAROUND"], "fashion_resnet", 0),
    "ablate": (["ablate"], "fashion_resnet", 0),
}
_ABLATION = (
    'models = ["fashion_resnet"]\nsamples = 16\nseeds = [0]\n[grid]\nmethod = ["minmax", "minmse", "percentile"]\n'
)
_VARYING = ("seconds", "added_seconds", "megabytes")  # columns of a table of runs


def run_of(name: str, folder: Path, short: bool) -> tuple[list[str], str]:
    """The command without the name of its output, and how that ends; a short one reads few samples, once."""
    (verb, *options), model, times = _GIVEN[name]
    times, samples = (0, 16) if short else (times, 64)
    if name == "ablate":
        (folder / "ablation.toml").write_text(_ABLATION.replace(', "percentile"', "") if short else _ABLATION)
        return [sys.executable, "-m", "jq", verb, str(folder / "ablation.toml"), "-o"], ".jsonl"
    if short and name == "auto":
        options = ["--target", "sqnr 10"]  # which the first rung reaches
    if short and name == "finetune":
        (folder / "finetune.toml").write_text(as_toml(jq.presets["XINT8_ADAROUND"].replace(finetune_steps=20)))
        options = ["--config", str(folder / "finetune.toml")]
    data = folder / f"{name}.npz"
    images = jq.zoo.evaluation_set()[0] if times else jq.zoo.calibration_set()[0][:samples]
    np.savez(data, input=np.concatenate([images] * max(times, 1)))
    if name == "finetune":
        options += ["--checkpoint", str(folder / "checkpoint.safetensors")]
    command = [sys.executable, "-m", "jq", verb, str(jq.zoo.path(model)), "--data", str(data), *options, "-o"]
    return command, ".safetensors" if verb == "calibrate" else ".onnx"


def finished(command: Sequence[str], timeout: float | None = None, largest: int | None = None) -> tuple[int, str]:
    """Run to the end, with files of at most so many bytes; the exit code, and what was said in the end."""

    def limited() -> None:
        if largest is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=limited
    )
    try:
        said = process.communicate(timeout=timeout)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, said


def content(path: Path) -> object:
    """What a file says that has to be the same in each run."""
    if path.suffix != ".jsonl":
        return path.read_bytes()
    return [{k: v for k, v in json.loads(line).items() if k not in _VARYING} for line in path.read_text().splitlines()]


def disturbed(name: str, folder: Path, args: argparse.Namespace, moments: random.Random) -> dict[str, object]:
    command, suffix = run_of(name, folder, args.short)
    whole, again = folder / f"{name}_whole{suffix}", folder / f"{name}_again{suffix}"
    code, said = finished([*command, str(whole)])  # which fills the caches of compiled programs
    if code not in (0, 1):  # 1 is the exit code of a target that is not reached
        raise SystemExit(f"{command}: exit code {code}: {said}")
    start = time.perf_counter()
    finished([*command, str(folder / f"{name}_timed{suffix}")])
    seconds, kills, full, wrong = time.perf_counter() - start, 0, 0, list[str]()

    def look() -> None:
        if again.exists() and suffix != ".jsonl" and content(again) != content(whole):
            wrong.append(f"torn after {kills} kills and {full} full disks")

    anew = True
    while kills < args.kills:
        start = time.perf_counter()
        try:
            finished([*command, str(again)], moments.uniform(0.2, 0.95) * seconds)
            again.unlink()  # what was left took less, or the machine is faster now; the next one begins anew
            seconds, anew = min(seconds, time.perf_counter() - start) if anew else seconds, True
        except subprocess.TimeoutExpired:
            kills, anew = kills + 1, False
        look()
    while full < args.full:
        again.unlink(missing_ok=True)
        code, said = finished([*command, str(again)], largest=int(moments.uniform(0.05, 0.95) * whole.stat().st_size))
        full += 1
        lines = [line for line in said.splitlines() if not line.startswith("warning: ")]
        if code != 2 or len(lines) != 1 or not any(words in lines[0] for words in ("too large", "No space left")):
            wrong.append(f"exit code {code} on a full disk: {lines[-1:]}")
        look()
    finished([*command, str(again)])
    if content(again) != content(whole):
        wrong.append("other bytes in the end")
    left = [p.name for p in folder.iterdir() if p.name.startswith(f".{again.name}")] if not kills else []
    return {"command": name, "seconds": round(seconds, 1), "kills": kills, "full": full, "wrong": [*wrong, *left]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", choices=[*_GIVEN, []], default=[*_GIVEN])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--full", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="few samples, read once")
    parser.add_argument("--out", type=Path, default=RESULTS / "kill.jsonl")
    args = parser.parse_args()
    moments, rows = random.Random(args.seed), []  # noqa: S311  no secret
    for name in args.commands:
        with tempfile.TemporaryDirectory() as folder:
            row = disturbed(name, Path(folder), args, moments)
        wrong = row["wrong"]
        print(
            f"{name:12} {row['kills']} kills and {row['full']} full disks, {row['seconds']} s: {wrong or 'same bytes'}",
            flush=True,
        )
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps({"experiment": "kill", "seed": args.seed, "short": args.short, "rows": [row]}) + "\n")
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
