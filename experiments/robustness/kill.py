"""Kill a calibration at random moments, start it again with the same command, and compare the bytes.

    python experiments/robustness/kill.py [--kills 5] [--seed 0]

One run goes through undisturbed; of the others each is killed (SIGKILL) several times before it may end. Exits
non-zero if a file differs. Appends one JSON line to `--out`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import jq
from experiments.common import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "kill.jsonl")
    args = parser.parse_args()
    moments, rows = random.Random(args.seed), []  # noqa: S311  no secret
    with tempfile.TemporaryDirectory() as folder:
        images, _ = jq.zoo.evaluation_set()
        np.savez(f"{folder}/data.npz", input=np.concatenate([images] * 4))
        for method in ("minmse", "minmse_hist"):
            command = [sys.executable, "-m", "jq", "calibrate", str(jq.zoo.path("fashion_mobilenet"))]
            command += ["--data", f"{folder}/data.npz", "--method", method, "-o"]
            whole, resumed = Path(folder) / f"{method}.whole", Path(folder) / f"{method}.resumed"
            start = time.perf_counter()
            subprocess.run([*command, str(whole)], check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - start
            kills = 0
            while kills < args.kills:
                run = subprocess.Popen([*command, str(resumed)], stdout=subprocess.DEVNULL)
                try:
                    run.wait(timeout=moments.uniform(0.2, 0.7) * seconds)
                    break  # what was left took less
                except subprocess.TimeoutExpired:
                    run.kill()
                    run.wait()
                    kills += 1
            subprocess.run([*command, str(resumed)], check=True, stdout=subprocess.DEVNULL)
            same = whole.read_bytes() == resumed.read_bytes()
            print(f"{method:12} {kills} kills of a run of {seconds:.1f} s: {'same bytes' if same else 'DIFFERENT'}")
            rows.append({"method": method, "kills": kills, "same": same})
    with args.out.open("a") as file:
        file.write(json.dumps({"experiment": "kill", "seed": args.seed, "rows": rows}) + "\n")
    sys.exit(not all(row["same"] for row in rows))


if __name__ == "__main__":
    main()
