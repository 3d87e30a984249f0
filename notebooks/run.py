"""Execute the notebooks, and write them with what they show to build/notebooks/, from where `docs/build.py` takes them.

    python notebooks/run.py [NAME ...]      # all of them without names

Each runs from its script in a kernel of its own, in an empty folder. A cell that fails ends the run with its error.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import jupytext
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
EXECUTED = HERE.parent / "build" / "notebooks"
TIMEOUT = 240  # seconds of a cell


def main() -> None:
    """Run the notebooks that are named, or all."""
    paths = [HERE / f"{Path(name).stem}.py" for name in sys.argv[1:]]
    EXECUTED.mkdir(parents=True, exist_ok=True)
    for path in paths or sorted(set(HERE.glob("*.py")) - {Path(__file__).resolve()}):
        start, notebook = time.perf_counter(), jupytext.read(path)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=resources).execute()
        jupytext.write(notebook, EXECUTED / f"{path.stem}.ipynb")
        print(f"{time.perf_counter() - start:6.1f} s  {path.name}", flush=True)


if __name__ == "__main__":
    main()
