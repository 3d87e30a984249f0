"""Take every file of a folder of hostile inputs through all that reads such files, each stage in a process of its own.

    python experiments/robustness/hostile.py FOLDER [--only PATTERN] [--stage run --stage integer]

A stage has to end in success or in a `jq.Error` of one line below 500 characters, within 10 s and 2 GB (peak resident
memory, imports included). Prints a line for each, and exits with 1 if one does not. Models go through reading, passes,
writing, quantization, conversions and the integer reading (`stages.py`); a folder may hold pipes and devices as well.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from experiments.robustness.isolation import isolated, own_cache
from experiments.robustness.stages import imported, stages_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", help="a pattern of file names")
    parser.add_argument("--stage", action="append", default=[], help="these stages only")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    found = [(path, name, stage) for path in sorted(args.folder.glob(args.only)) for name, stage in stages_of(path)]
    found = [entry for entry in found if not args.stage or entry[1] in args.stage]
    with own_cache():
        imported()
        defects = 0
        for index, outcome in isolated([functools.partial(stage, path) for path, _, stage in found], args.jobs):
            path, name, _ = found[index]
            defects += outcome.defect
            text = outcome.text.replace("\t", ": ")
            print(
                f"{path.name[:40]:40} {name:10} {outcome.seconds:5.1f} s {outcome.megabytes:5.0f} MB  {text}",
                flush=True,
            )
    print(f"{len(found)} stages of {len({path for path, *_ in found})} files: {defects} defects")
    sys.exit(defects > 0)


if __name__ == "__main__":
    main()
