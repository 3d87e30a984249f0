"""An ablation of 48 runs as one piece of work, beside 48 separate runs, and what `vmap` over runs would cost.

    python experiments/bench/ablate.py together EXPERIMENT.toml       # jq.research.ablate, in a fresh process
    python experiments/bench/ablate.py separate EXPERIMENT.toml       # each run in a fresh process
    python experiments/bench/ablate.py one_process EXPERIMENT.toml    # each run by itself, all in one process
    python experiments/bench/ablate.py report EXPERIMENT.toml         # the ratios, and whether all numbers are equal
    python experiments/bench/ablate.py vmap                           # programs of runs stacked, beside one by one

A separate run is what a user does without the runner: `jq.quantize` from a file to a file, and its evaluation. Its
evaluation is the runner's own, so that numbers can be held against each other bit by bit; onnxruntime takes longer for
it. All have the same persistent compilation cache, warm (run `together` once before), which favours the separate ones:
with an empty one the first of them compiles what the others load.

Each kind appends its rows to a file in `--folder`; `separate` and `one_process` go on where they stopped, so that they
can be measured in parts (`--limit` runs each), and with `--every 4` take one seed of four, whose time `report` counts
four times. `report` appends a line to experiments/results/ablate.jsonl. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import RESULTS, all_versions, command, fresh, machine

OUT = RESULTS / "ablate.jsonl"
NUMBERS = ("samples", "sqnr", "float_top1", "top1", "agreement", "kl", "digest")


def start(cores: Sequence[int]) -> None:
    os.sched_setaffinity(0, cores)
    import jax

    jax.config.update("jax_num_cpu_devices", len(cores))


def together(cores: Sequence[int], experiment: str, output: str) -> None:
    start(cores)
    import jq

    jq.research.ablate(jq.research.read_experiment(experiment), output)


def run_alone(experiment: str, index: int, folder: str) -> dict[str, Any]:
    """One run by itself: its numbers."""
    import jq
    from jq.research.ablation import _bench, _digest, _opened, runs_of

    wanted = jq.research.read_experiment(experiment)
    sources = {name: _opened(subject) for name, subject in wanted.subjects.items()}
    run = runs_of(wanted, sources)[index]
    subject = wanted.subjects[run.subject]
    data = sources[run.subject].calibration(run.config.seed)
    result = jq.quantize(subject.model, data, run.config, output=f"{folder}/alone.onnx")
    params = {k: result.graph.params[k] for k in result.graph.params}
    found = _bench(sources[run.subject]).measurer(result.graph)(result.graph, params, result.plan)
    return {"hash": run.hash, **found, "digest": _digest(params, result.plan)}


def alone(cores: Sequence[int], experiment: str, index: int, folder: str) -> dict[str, Any]:
    start(cores)
    return run_alone(experiment, index, folder)


def one_process(cores: Sequence[int], experiment: str, indices: Sequence[int], folder: str) -> list[dict[str, Any]]:
    start(cores)
    rows = []
    for index in indices:
        begun = time.perf_counter()
        rows.append({"index": index, **run_alone(experiment, index, folder), "wall": time.perf_counter() - begun})
    return rows


def stacked(cores: Sequence[int], runs: int) -> list[dict[str, Any]]:
    """Seconds of a layer's rounding and of a block's gradient steps for some runs, one by one and under `vmap`."""
    start(cores)
    import jax

    import jq
    from jq.plan import QParams
    from jq.recovery.adaround import AdaRound
    from jq.recovery.descent import CoordinateDescent
    from jq.recovery.quadratic_form import Form
    from jq.recovery.rounding import Then

    rng, rows = np.random.default_rng(0), []
    scale = QParams(np.float32(0.25), np.int32(0), jq.arithmetic.formats.INT8.narrow)
    x, w = rng.standard_normal((400, 576), np.float32), rng.standard_normal((1, 576, 64), np.float32)
    form = Form((x.T @ x)[None] / 400, np.zeros_like(w), np.float32(0), np.zeros((1, 1, 576), np.float32), w[:, :1] * 0)

    def rounded(rate: Any, w: Any) -> Any:
        return Then(AdaRound(learning_rate=rate), CoordinateDescent())(w, scale, form)

    graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    images = jq.zoo.calibration_set()[0][:10]
    plan = jq.make_plan(graph, jq.calibrate(graph, images))
    qfn, fn = jq.fake_quant(graph), jq.trace(graph)
    target = fn(graph.params, {"input": images})["logits"]

    def descended(rate: Any, params: Any) -> Any:
        def loss(params: Any) -> Any:
            return jax.numpy.mean((qfn(params, plan, {"input": images})["logits"] - target) ** 2)

        def step(_: Any, params: Any) -> Any:
            return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))

        return jax.lax.fori_loop(0, 5, step, params)

    rates = np.linspace(0.05, 0.2, runs).astype(np.float32)
    floats = {k: v for k, v in graph.params.items() if v.dtype == np.float32}
    for name, program, start_at in (("rounding", rounded, w), ("gradients", descended, floats)):
        one, all_at_once = jax.jit(program), jax.jit(jax.vmap(program))
        many = jax.tree.map(lambda a: np.stack([a] * runs), start_at)
        loop = lambda one=one, start_at=start_at: [one(r, start_at) for r in rates]  # noqa: E731
        stack = lambda f=all_at_once, many=many: f(rates, many)  # noqa: E731
        single, together = jax.block_until_ready(loop()), jax.block_until_ready(stack())
        equal = all(
            np.array_equal(a, b[i]) for i, s in enumerate(single) for a, b in
            zip(jax.tree.leaves(s), jax.tree.leaves(together), strict=True)
        )  # fmt: skip
        seconds = {"one_by_one": best(loop), "vmap": best(stack)}
        rows.append({"part": name, "runs": runs, **{k: round(v, 4) for k, v in seconds.items()}, "equal": equal})
    return rows


def best(run: Any, rounds: int = 3) -> float:
    import jax

    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begun)
    return min(found)


def report(args: argparse.Namespace) -> dict[str, Any]:
    rows = {r["hash"]: r for r in lines(args.folder / "together.jsonl")}
    found: dict[str, Any] = {"runs": len(rows), "together": lines(args.folder / "seconds.jsonl")[-1]["wall"]}
    for kind in ("separate", "one_process"):
        others = lines(args.folder / f"{kind}.jsonl")
        if others:
            found[f"{kind}_measured"] = len(others)
            found[kind] = round(sum(r["wall"] for r in others) * len(rows) / len(others), 1)
            found[f"ratio_to_{kind}"] = round(found["together"] / found[kind], 4)
            found[f"equal_to_{kind}"] = all(rows[r["hash"]][k] == r[k] for r in others for k in NUMBERS)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["together", "separate", "one_process", "report", "vmap"])
    parser.add_argument("experiment", nargs="?", default=str(Path(__file__).parents[1] / "ablations" / "bundled.toml"))
    parser.add_argument("--folder", type=Path, default=Path("ablate-bench"))
    parser.add_argument("--limit", type=int, help="separate runs in this part")
    parser.add_argument("--every", type=int, default=1, help="take one separate run of so many")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    args.folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    if args.kind == "together":
        output = args.folder / "together.jsonl"
        output.unlink(missing_ok=True)
        fresh(together, cores, args.experiment, str(output))
        append(args.folder / "seconds.jsonl", [{"wall": round(time.perf_counter() - begun, 2)}])
        print(f"{time.perf_counter() - begun:.1f} s")
        return
    if args.kind in ("separate", "one_process"):
        path, total = args.folder / f"{args.kind}.jsonl", len(lines(args.folder / "together.jsonl"))
        indices = range(0, total, args.every)[len(lines(path)) :][: args.limit]
        if args.kind == "one_process":
            append(path, fresh(one_process, cores, args.experiment, list(indices), str(args.folder)))
        for index in indices if args.kind == "separate" else []:
            begun = time.perf_counter()
            row = fresh(alone, cores, args.experiment, index, str(args.folder))
            append(path, [{"index": index, **row, "wall": round(time.perf_counter() - begun, 2)}])
        print(f"{len(lines(path))} of {total} runs, {sum(r['wall'] for r in lines(path)):.1f} s")
        return
    found = report(args) if args.kind == "report" else {"rows": fresh(stacked, cores, 4)}
    line = {"bench": "ablate", "kind": args.kind, "threads": len(cores), **fresh(all_versions), "machine": machine()}
    line |= {"command": command(), **found}
    print(json.dumps(found, indent=2))
    append(args.out, [line])


if __name__ == "__main__":
    main()
