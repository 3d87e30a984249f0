"""What int16 in some layers gives for its bit operations: by an integer program, greedily, and by the usual guess.

    python experiments/ablations/mixed_precision.py [MODEL.onnx:PREP[:LABELS] ...] [--images NPZ] [--eval FOLDER] [--only]
        [--count 100] [--limit 32] [--budgets 1.1 1.25 1.5 2]

Models, data and metrics are those of experiments/ablations/joint_search.py; differences are to int8 everywhere. Each
model is prepared and equalized as the preset XINT8 does; layers get int8 or int16 (activations and weights), chosen with
`jq.research.format_table` on `--limit` images, and biases are corrected for what was chosen. The guess is the rule of
thumb: the first and the last layer in int16. `cost` is in bit operations of int8 everywhere, `predicted` the sum of the
layers' losses, `measured` the loss on the same images. All are run by onnxruntime on images that no choice has seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common import RESULTS, beside, parser_of, setup

OUT = RESULTS / "mixed_precision.jsonl"


def variants(
    cores: Sequence[int], path: str, data: str, limit: int, budgets: Sequence[float], folder: str
) -> dict[str, dict[str, Any]]:
    """The quantized models in a folder, and what was said of them."""
    setup(cores, len(cores))
    import jq
    from jq.research.mixed import FORMATS, overridden

    x, config, found = np.load(data), jq.presets["XINT8"], {}
    graph = jq.equalize(jq.prepare(jq.load(path), config), config, x)
    stats = jq.calibrate(graph, x, config)
    start = time.perf_counter()
    formats = {name: FORMATS[name] for name in ("int8", "int16")}
    table = jq.research.format_table(graph, x, config, formats=formats, stats=stats, limit=limit)
    seconds = time.perf_counter() - start

    def export(name: str, config: jq.QuantConfig, cost: float, **facts: float) -> None:
        corrected = jq.correct_biases(graph, jq.make_plan(graph, stats, config), stats)
        jq.export(corrected, jq.make_plan(corrected, stats, config), path=f"{folder}/{name}.onnx")
        found[name] = {"cost": round(cost, 3), "limit": limit, **facts}

    def total(chosen: Sequence[int]) -> float:
        return float(table.prices[np.arange(len(chosen)), chosen].sum() / table.prices[:, 0].sum())

    export("int8", config, 1.0, measured=table.whole[0], seconds=round(seconds, 1))
    ends = [int(i in (0, len(table.nodes) - 1)) for i in range(len(table.nodes))]
    raised = {name: formats["int16"] for name, end in zip(table.nodes, ends, strict=True) if end}
    export("first and last", overridden(config, table.nodes, raised), total(ends))
    for budget in budgets:
        for solver in ("milp", "greedy"):
            start = time.perf_counter()
            mixed = table.choose(budget, solver)
            spent = time.perf_counter() - start
            facts = {"predicted": mixed.predicted, "measured": mixed.measured, "seconds": round(spent, 1)}
            export(f"{solver} {budget:g}", mixed.config, mixed.spent, **facts)
    everywhere = overridden(config, table.nodes, dict.fromkeys(table.nodes, formats["int16"]))
    export("int16", everywhere, total([1] * len(ends)), measured=table.whole[1])
    return found


def main() -> None:
    parser = parser_of(__doc__, OUT)
    parser.add_argument("--limit", type=int, default=32, help="images that layers are measured on")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.1, 1.25, 1.5, 2.0])
    args = parser.parse_args()
    beside(parser, args, "mixed_precision", variants, args.limit, args.budgets)


if __name__ == "__main__":
    main()
