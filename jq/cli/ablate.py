"""`jq-quant ablate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jq.cli.application import command
from jq.cli.options import Workers, check_output, executor_of, use_all_cores
from jq.cli.show import answer, table
from jq.util import files

_WRITERS = {".md": "to_markdown", ".tex": "to_latex", ".svg": "to_svg"}


@command(writes=("output", "summary"))
def ablate(
    experiment: Annotated[Path, typer.Argument(help="A .toml or .py file, as in experiments/.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Append rows to this .jsonl or .csv file [EXPERIMENT.jsonl]."),
    ] = None,
    summary: Annotated[
        list[Path] | None,
        typer.Option(
            help="Write means, spreads over seeds and intervals as .md or .tex, or a plot as .svg; may be repeated."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--model", help="Run only this model of the experiment; may be repeated.")
    ] = None,
    workers: Workers = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the groups of runs, but run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON document.")] = False,
) -> None:
    """Quantize models with many configs and seeds, and tabulate the results.

    Shared steps are done once, and compiled programs serve a whole group. Rows already in the table are
    not computed again: the same command resumes an interrupted run. Several processes may append to one table.

    Example: jq-quant ablate experiments/ablations/bundled.toml -o results.csv --summary results.md
    """
    from jq.research import ablate as run
    from jq.research import read_experiment, work_of

    use_all_cores()
    output = output or experiment.with_suffix(".jsonl")
    for path in summary or []:
        check_output("--summary", path, _WRITERS)
    wanted = read_experiment(experiment, only or ())
    if dry_run:
        work = work_of(wanted, output)
        runs = [{"hash": r.hash, "model": r.subject, "config": r.name, "seed": r.config.seed, "group": i}
                for i, group in enumerate(work.groups) for r in group.runs]  # fmt: skip
        groups = [(i, g.subject, len(g.runs), g.results, _configs([r.name for r in g.runs])) for i, g in
                  enumerate(work.groups)]  # fmt: skip
        columns = ("group", "model", "runs", "results", "configs")
        title = f"{len(runs)} runs left, {len(work.done)} done"
        note = "A group is calibrated once; results counts those that can differ."
        answer(as_json, {"done": len(work.done), "runs": runs}, table(columns, groups, title), note)
        return
    with executor_of(workers) as executor:
        results = run(wanted, output, executor=executor)
    for path in summary or []:
        files.write(path, getattr(results, _WRITERS[path.suffix])())
    written = (f"written: {path}" for path in (output, *(summary or [])))
    answer(as_json, list(results.rows), table(*results.cells()), *written)


def _configs(names: list[str]) -> str:
    """Return the first few distinct names."""
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - 4} more" if len(different) > 4 else ""
    return ", ".join(different[:4]) + more
