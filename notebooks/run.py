"""Execute the notebooks, and write them with what they show to build/notebooks/, from where `docs/build.py` takes them.

    python notebooks/run.py [NAME ...]      # all of them without names

Each runs from its script in a kernel of its own, in an empty folder, two at a time. A cell that fails ends the run with
its error.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import jupytext
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
EXECUTED = HERE.parent / "build" / "notebooks"
TIMEOUT = 240  # seconds of a cell


def run(path: Path) -> str:
    """Execute a notebook and write it; a line with its time."""
    start, notebook = time.perf_counter(), jupytext.read(path)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=resources).execute()
    jupytext.write(notebook, EXECUTED / f"{path.stem}.ipynb")
    return f"{time.perf_counter() - start:6.1f} s  {path.name}"


def main() -> None:
    """Run the notebooks that are named, or all."""
    paths = [HERE / f"{Path(name).stem}.py" for name in sys.argv[1:]]
    paths = paths or sorted(set(HERE.glob("*.py")) - {Path(__file__).resolve()})
    EXECUTED.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        for line in pool.map(run, paths):
            print(line, flush=True)


if __name__ == "__main__":
    main()
