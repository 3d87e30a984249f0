"""Images as the tutorial's models take them, as .npy files that an experiment names.

    python experiments/tutorial/prepare.py FOLDER --images NPZ --eval JPEGS [--count 100] [P1 P2 P3 P4]

NPZ holds uint8 NHWC `images` for calibration; JPEGS are called LABEL_*.jpg, and are cropped to the middle. P1 to P4 are
the preparations of experiments/bench/forward.py. Writes P1_calibration.npy, P1_evaluation.npy and labels.npy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from experiments.common import PREPARE, evaluation, read_images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("preparations", nargs="*", default=list(PREPARE), metavar="PREP")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for prep in args.preparations:
        np.save(args.folder / f"{prep}_calibration.npy", read_images(prep, args.images, args.count))
        images, labels = evaluation(args.eval, prep)
        np.save(args.folder / f"{prep}_evaluation.npy", images)
        np.save(args.folder / "labels.npy", labels)


if __name__ == "__main__":
    main()
