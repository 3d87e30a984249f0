"""Damage small models at random and see that `jq` either runs them or says in one line why not.

Each case reads one model, changes one thing (bits, length, a dim, names, an attribute, a shape value,
an operator), and goes load -> inspect -> prepare -> trace -> run on zeros in a process of its own, with
limits on time and memory. Outcomes: it runs, a `jq.Error` by kind and stage, or a defect: any other
exception, a message of several lines, a crash, more than the time or memory allowed.

    python experiments/robustness/mutate.py                 # 300 cases, appends to ../results/mutate.jsonl
    python experiments/robustness/mutate.py --only 17       # one case again, in this process
"""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import typer
from onnx import ModelProto, numpy_helper

from experiments.common import RESULTS

SECONDS = 10
RESIDENT = 2 << 30  # bytes; address space is no measure, JAX reserves plenty
ADDRESSES = 24 << 30  # a net under the measurement, so that a defect does not take the machine along
RUN_ELEMENTS = 1 << 24  # inputs above this are only traced
LIGHT = ("light_squeezenet", "light_shufflenet", "light_inception_v1")

Rng = np.random.Generator
Slot = tuple[Any, int]  # a repeated field and a place in it


def models(suite: bool) -> dict[str, bytes]:
    """The zoo's models and a few of onnx's own, which compute their weights and shapes by nodes.

    With `suite` instead the small models of onnx's backend suite: of many operators, one or few each.
    """
    import jq.zoo

    data = Path(onnx.__file__).parent / "backend/test/data"
    if suite:
        found = sorted(
            p for kind in ("pytorch-converted", "pytorch-operator", "simple") for p in data.glob(f"{kind}/*/model.onnx")
        )
        return {path.parent.name: path.read_bytes() for path in found}
    paths = [jq.zoo.path(name) for name in jq.zoo.models()] + [data / f"light/{name}.onnx" for name in LIGHT]
    return {path.stem: path.read_bytes() for path in paths if path.exists()}


# ---------------------------------------------------------------------------------------------
# Mutations: bytes or a parsed model in, bytes out
# ---------------------------------------------------------------------------------------------


def flip_bits(data: bytes, rng: Rng) -> bytes:
    """1 to 16 bits, outside of the weights' payload: flipping those only changes a number."""
    payload = np.zeros(len(data), bool)
    for tensor in ModelProto.FromString(data).graph.initializer:
        if len(tensor.raw_data) > 64:
            start = data.find(tensor.raw_data)
            payload[start : start + len(tensor.raw_data)] = True
    damaged = np.frombuffer(data, np.uint8).copy()
    for place in rng.choice(np.flatnonzero(~payload), 2 ** int(rng.integers(5))):
        damaged[place] ^= np.uint8(1 << rng.integers(8))
    return damaged.tobytes()


def truncate(data: bytes, rng: Rng) -> bytes:
    """Any length, often close to the whole."""
    return data[: int(len(data) * (1 - rng.random() ** 4))]


def edit_dim(model: ModelProto, rng: Rng) -> None:
    """One dim of a weight, or of an input, output or intermediate value."""
    weights = [(t.dims, i) for t in model.graph.initializer for i in range(len(t.dims))]
    typed = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    dims = [d for v in typed for d in v.type.tensor_type.shape.dim]
    if dims and (not weights or rng.random() < 0.5):
        dim = dims[rng.integers(len(dims))]
        dim.dim_value = odd_number(dim.dim_value, rng)
    elif weights:
        edit(weights, rng)


def swap_names(model: ModelProto, rng: Rng) -> None:
    """Two tensor names among the nodes' inputs and outputs."""
    slots = [(field, i) for node in model.graph.node for field in (node.input, node.output) for i in range(len(field))]
    (a, i), (b, j) = (slots[k] for k in rng.choice(len(slots), 2, replace=False))
    a[i], b[j] = b[j], a[i]


def edit_attribute(model: ModelProto, rng: Rng) -> None:
    """One integer of an attribute: a stride, a pad, an axis."""
    attributes = [a for node in model.graph.node for a in node.attribute if a.ints or a.HasField("i")]
    if attributes:
        attribute = attributes[rng.integers(len(attributes))]
        if attribute.ints:
            edit([(attribute.ints, i) for i in range(len(attribute.ints))], rng)
        else:
            attribute.i = odd_number(attribute.i, rng)


def edit_value(model: ModelProto, rng: Rng) -> None:
    """One element of an int64 tensor: a shape, a slice's end."""
    tensors = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT64]
    tensors += [
        a.t
        for n in model.graph.node
        for a in n.attribute
        if a.HasField("t") and a.t.data_type == onnx.TensorProto.INT64
    ]
    if tensors:
        tensor = tensors[rng.integers(len(tensors))]
        values = numpy_helper.to_array(tensor).copy()
        if values.size:
            place = rng.integers(values.size)
            values.flat[place] = odd_number(int(values.flat[place]), rng)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def swap_operators(model: ModelProto, rng: Rng) -> None:
    """The operators of two nodes, which keep their inputs and attributes."""
    a, b = (model.graph.node[rng.integers(len(model.graph.node))] for _ in range(2))
    a.op_type, b.op_type = b.op_type, a.op_type


def edit(slots: list[Slot], rng: Rng) -> None:
    field, i = slots[rng.integers(len(slots))]
    field[i] = odd_number(field[i], rng)


def odd_number(number: int, rng: Rng) -> int:
    """A number near this one, or one of the sort that breaks things."""
    choices = [0, -1, 1, number + 1, number - 1, number * 2, -number, int(rng.integers(1, 100))]
    choices += [1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62, -(1 << 62)]
    return int(np.clip(choices[rng.integers(len(choices))], -(1 << 63), (1 << 63) - 1))


def parsed(change: Callable[[ModelProto, Rng], None]) -> Callable[[bytes, Rng], bytes]:
    def apply(data: bytes, rng: Rng) -> bytes:
        model = ModelProto.FromString(data)
        change(model, rng)
        return model.SerializeToString()

    return apply


MUTATIONS: dict[str, Callable[[bytes, Rng], bytes]] = {
    "bits": flip_bits,
    "length": truncate,
    "dim": parsed(edit_dim),
    "names": parsed(swap_names),
    "attribute": parsed(edit_attribute),
    "value": parsed(edit_value),
    "operators": parsed(swap_operators),
}


def case(sources: dict[str, bytes], seed: int, index: int) -> tuple[str, str, bytes]:
    """The model, the mutation and the damaged bytes of one case: of nothing else but seed and index."""
    rng = np.random.default_rng((seed, index))
    name = list(sources)[rng.integers(len(sources))]
    kind = list(MUTATIONS)[index % len(MUTATIONS)]
    return name, kind, MUTATIONS[kind](sources[name], rng)


# ---------------------------------------------------------------------------------------------
# One case
# ---------------------------------------------------------------------------------------------


def attempt(data: bytes) -> str:
    """What became of the bytes: "ran", a `jq.Error` with its stage, or a line that starts with DEFECT."""
    import jax

    from jq.errors import Error
    from jq.evidence.inspection import inspect
    from jq.graph.read import load
    from jq.passes.prepare import prepare
    from jq.readings.tracing import trace

    stage = "load"
    try:
        graph = load(data)
        stage = "inspect"
        with contextlib.suppress(Error):
            inspect(graph)
        stage = "prepare"
        graph = prepare(graph)
        stage = "trace"
        fn = trace(graph)
        stage = "run"
        shapes = {v.name: tuple(d if isinstance(d, int) else 1 for d in v.shape or ()) for v in graph.inputs}
        if sum(np.prod(s, dtype=float) for s in shapes.values()) > RUN_ELEMENTS:
            return "traced, inputs too large to run"
        outputs = fn(graph.params, {v.name: blank(shapes[v.name], v.dtype) for v in graph.inputs})
        jax.block_until_ready(outputs)
    except Error as error:
        if "\n" in str(error):
            return f"DEFECT: several lines: {error!r}"
        return f"{type(error).__name__} at {stage}\t{error}"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"DEFECT: {type(error).__name__} at {stage} ({Path(where.filename).name}:{where.lineno}): {error}".splitlines()[
            0
        ]
    return "ran"


def blank(shape: tuple[int, ...], dtype: np.dtype | None) -> np.ndarray:
    return np.full(shape, "", object) if dtype is not None and dtype.hasobject else np.zeros(shape, dtype or np.float32)


def child(data: bytes, results: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # XLA logs what it refuses
    outcome = attempt(data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.send(outcome if peak <= RESIDENT else f"DEFECT: {peak / 1e9:.1f} GB resident, then: {outcome}")
    results.close()
    os._exit(0)  # XLA's threads need no farewell


def isolated(cases: list[bytes], jobs: int) -> list[str]:
    """`attempt` of each case in a fork of this process, which has imported JAX, never used it, and has one thread."""
    context = multiprocessing.get_context("fork")
    waiting, running, outcomes = list(enumerate(cases))[::-1], {}, [""] * len(cases)
    again = set()  # a fork of a Python with libraries hangs once in thousands: what is ours hangs twice
    while waiting or running:
        while waiting and len(running) < jobs:
            index, data = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(data, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = index, process, time.monotonic() + SECONDS
        ready = wait(running, timeout=0.5)
        for receiver, (index, process, deadline) in list(running.items()):
            if receiver in ready:
                outcomes[index] = received(receiver, process)
            elif time.monotonic() > deadline:
                outcomes[index] = f"DEFECT: no answer after {SECONDS} s"
                if index not in again:
                    again.add(index)
                    waiting.append((index, cases[index]))
            else:
                continue
            del running[receiver]
            process.kill()
            process.join()
    return outcomes


def received(receiver: Connection, process: BaseProcess) -> str:
    try:
        return str(receiver.recv())
    except EOFError:
        process.join()
        code = process.exitcode or 0
        return f"DEFECT: died of {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """XLA's compilations kept for this run only: most damage leaves the program as it was."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield


def main(
    cases: Annotated[int, typer.Option(help="How many.")] = 300,
    seed: Annotated[int, typer.Option(help="Together with the index it makes the case.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes at a time.")] = 1,
    suite: Annotated[
        bool, typer.Option("--suite", help="Of onnx's backend suite in place of the zoo's models.")
    ] = False,
    only: Annotated[int | None, typer.Option(help="Run this one case in this process.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines, appended to; results/mutate.jsonl by default.")] = None,
) -> None:
    """Run the cases, print a table of outcomes and every defect; exit code 1 if there is one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    import jq.evidence.inspection
    import jq.ops.families
    import jq.passes  # noqa: F401  imported before the forks

    sources = models(suite)
    if only is not None:
        name, kind, data = case(sources, seed, only)
        print(f"case {only} of seed {seed}: {kind} of {name}, {len(data)} bytes: {attempt(data)}")
        return
    start = time.perf_counter()
    made = [case(sources, seed, index) for index in range(cases)]
    with own_cache():
        outcomes = isolated([data for *_, data in made], jobs)
    seconds = time.perf_counter() - start

    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    defects = []
    for index, ((name, kind, _), outcome) in enumerate(zip(made, outcomes, strict=True)):
        defect = outcome.startswith("DEFECT")
        counts["defect" if defect else outcome.partition("\t")[0], kind] += 1
        if defect:
            defects.append({"case": index, "model": name, "mutation": kind, "outcome": outcome})
    table = Table("outcome", *MUTATIONS, "all", title=f"{cases} cases of seed {seed} in {seconds:.0f} s")
    for label in sorted({label for label, _ in counts}):
        row = [counts[label, kind] for kind in MUTATIONS]
        table.add_row(label, *map(str, row), str(sum(row)))
    console = Console(highlight=False, width=120)
    console.print(table)
    for found in defects:
        console.print(Text(json.dumps(found)), soft_wrap=True)
    totals: collections.Counter[str] = collections.Counter()
    for (label, _), count in counts.items():
        totals[label] += count
    record = {
        "seed": seed,
        "cases": cases,
        "models": "suite" if suite else list(sources),
        "seconds": round(seconds),
        "outcomes": dict(totals),
    }
    with (out or RESULTS / "mutate.jsonl").open("a") as file:
        file.write(json.dumps(record | {"defects": defects}) + "\n")
    raise typer.Exit(1 if defects else 0)


if __name__ == "__main__":
    typer.run(main)
