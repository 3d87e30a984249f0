"""Run every fenced block of documentation pages, from the top to the bottom of each, as a reader would.

    python docs/walk.py [PAGE.md ...]      # README.md and all of docs/ without arguments

Each page starts in a folder of its own with what pages take for granted: `model.onnx`, a float model; the folder
`calib/` of samples to calibrate on; the folder `images/` of others, and `labels.csv` of their classes. These are the
bundled model and data. Python blocks of a page share one namespace, blocks of `sh` run in bash, and a block of any
other language is an error. Blocks below a mark such as `<!-- test -->` are commands that `.ci/run` runs itself: they
make the environment in which this script runs. The first block that fails ends the walk with 1, and its place.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CALIBRATION, EVALUATION = 64, 100  # samples in the folders


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    mark: str  # `test` where the line above says <!-- test -->
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line} ({self.language})"


def pages() -> list[Path]:
    """README and all pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, above, opened = [], "", None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if opened is None and line.startswith("```"):
            mark = re.fullmatch(r"<!-- (\w+) -->", above)
            opened = (number + 1, line[3:].strip(), mark[1] if mark else "", [])
        elif opened is not None and line == "```":
            found.append(Block(page, *opened[:3], "\n".join(opened[3]) + "\n"))
            opened = None
        elif opened is not None:
            opened[3].append(line)
        above = line
    return found


def furnish(folder: Path) -> None:
    """Put there what pages take for granted."""
    import jq

    shutil.copy(jq.zoo.path("fashion_mobilenet"), folder / "model.onnx")
    (images, labels), (calibration, _) = jq.zoo.evaluation_set(), jq.zoo.calibration_set()
    every = len(images) // EVALUATION
    for name, samples in (("calib", calibration[:CALIBRATION]), ("images", images[::every])):
        (folder / name).mkdir()
        for i, sample in enumerate(samples):
            np.save(folder / name / f"{i:03}.npy", sample)
    rows = [f"{i:03},{label}" for i, label in enumerate(labels[::every])]
    (folder / "labels.csv").write_text("name,label\n" + "\n".join(rows) + "\n")


def run(block: Block, namespace: dict[str, object]) -> None:
    """Run a block in the current folder; an exception if it fails."""
    if block.language == "python":
        code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")  # so that tracebacks have its lines
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, namespace)  # noqa: S102  the pages are ours
    elif block.language == "sh":
        # What the environment has installed, as if it was activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],  # noqa: S607
            env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}\n{done.stdout}")
    else:
        raise RuntimeError(f"no way to run the language {block.language!r}; there are python and sh")


def walk(page: Path) -> tuple[str, bool]:
    """The lines that say what became of a page's blocks, and whether all ran."""
    lines, namespace = [], {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        furnish(Path(folder))
        os.chdir(folder)
        try:
            for block in blocks(page):
                if block.mark:
                    continue
                start = time.perf_counter()
                try:
                    run(block, namespace)
                except Exception:
                    return "\n".join([*lines, f"FAILED {block}", traceback.format_exc()]), False
                lines.append(f"{time.perf_counter() - start:6.1f} s  {block}")
        finally:
            os.chdir(ROOT)
    return "\n".join(lines), True


def main() -> None:
    """Walk the pages, two at a time, each in a process of its own."""
    chosen, complete = [Path(p).resolve() for p in sys.argv[1:]] or pages(), True
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        for text, good in pool.map(walk, chosen):
            print(text, flush=True)
            complete &= good
    raise SystemExit(not complete)


if __name__ == "__main__":
    main()
