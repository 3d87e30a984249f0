"""Damage files of every kind at random, and see that `jq` takes them or says in one line why not.

    python experiments/robustness/mutate.py --seconds 60            # as in CI; appends to ../results/mutate.jsonl
    python experiments/robustness/mutate.py --seconds 3600 --seed 7
    python experiments/robustness/mutate.py --seed 7 --only 17      # one case again

A case is one source (`sources.py`: models float and quantized, of onnx's suite and random ones, configs, statistics,
tables, arrays, images), one change (`mutations.py`), and one of the stages that read such a file (`stages.py`), in a
process of its own with limits on time and memory (`isolation.py`). It ends in a result, in a `jq.Error` of one short line,
or in a defect: any other exception, a long message, a crash, more than 10 s or 2 GB, or outputs unlike onnxruntime's.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import pickle
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from experiments.common import RESULTS
from experiments.robustness import mutations, sources, stages
from experiments.robustness.isolation import isolated, judged, own_cache

BATCH = 200  # cases that are made at once
MODELS = 0.7  # the share of models among the cases
SUITE = 0.6  # that of onnx's cases, which have every operator, among the models


def case(files: dict[str, bytes], seed: int, index: int) -> tuple[str, str, str, bytes]:
    """The source, the change, the stage and the damaged bytes: of nothing else but seed and index."""
    rng = np.random.default_rng((seed, index))
    models, suite = rng.random() < MODELS, rng.random() < SUITE
    names = [n for n in files if n.endswith(".onnx") == models and (n.startswith(sources.SUITE) == suite or not models)]
    name = names[rng.integers(len(names))]
    suffix = Path(name).suffix
    known = (
        mutations.MODEL
        if models
        else mutations.TEXT
        if suffix in (".toml", ".json", ".csv", ".jsonl", ".txt")
        else mutations.BYTES
    )
    weights = np.array([mutations.WEIGHTS[k] for k in known], float)
    kind = list(known)[rng.choice(len(known), p=weights / weights.sum())]
    reads = list(stages.BY_SUFFIX[suffix])
    stage = reads[rng.integers(len(reads))]
    return name, kind, stage, known[kind](files[name], rng)


def attempt(name: str, stage: str, data: bytes) -> object:
    """The stage on a file of these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        return stages.BY_SUFFIX[path.suffix][stage](path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=1 << 30, help="at most so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case in this process")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs of defects")
    parser.add_argument(
        "--sources", type=Path, help="a file that keeps the sound files for the next run: they take a minute"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "mutate.jsonl")
    args = parser.parse_args()
    files = pickle.loads(args.sources.read_bytes()) if args.sources and args.sources.exists() else sources.sources()  # noqa: S301  ours
    if args.sources:
        args.sources.write_bytes(pickle.dumps(files))
    stages.imported()
    if args.only is not None:
        name, kind, stage, data = case(files, args.seed, args.only)
        print(
            f"case {args.only} of seed {args.seed}: {kind} of {name}, {stage}: {judged(lambda: attempt(name, stage, data))}"
        )
        return
    counts: collections.Counter[str] = collections.Counter()
    defects, start, first = [], time.perf_counter(), 0
    with own_cache():
        while first < args.cases and time.perf_counter() - start < args.seconds:
            made = [case(files, args.seed, first + i) for i in range(min(BATCH, args.cases - first))]
            calls = [functools.partial(attempt, name, stage, data) for name, _, stage, data in made]
            for index, outcome in isolated(calls, args.jobs):
                name, kind, stage, data = made[index]
                counts["defect" if outcome.defect else outcome.text.partition("\t")[0]] += 1
                if outcome.defect:
                    row = {
                        "case": first + index,
                        "source": name,
                        "mutation": kind,
                        "stage": stage,
                        "outcome": outcome.text,
                    }
                    defects.append(row)
                    print(json.dumps(row), flush=True)
                    if args.keep is not None:
                        args.keep.mkdir(parents=True, exist_ok=True)
                        (args.keep / f"{args.seed}_{first + index}{Path(name).suffix}").write_bytes(data)
            first += len(made)
    seconds = time.perf_counter() - start
    print(f"{first} cases of seed {args.seed} in {seconds:.0f} s: {dict(counts)}")
    line = {
        "experiment": "mutate",
        "seed": args.seed,
        "cases": first,
        "seconds": round(seconds),
        "outcomes": dict(counts),
    }
    with args.out.open("a") as file:
        file.write(json.dumps({**line, "defects": defects}) + "\n")
    sys.exit(bool(defects))


if __name__ == "__main__":
    main()
