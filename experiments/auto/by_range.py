"""The vendor's way to an accuracy target beside `jq.auto`: one layer at a time into float, by the range of its activations.

    python experiments/auto/by_range.py MODEL.onnx --data CALIBRATION.npz --target "kl 0.01" [--config A8W8] [--seconds 600]

AMD's agent ranks layers by the dynamic range of their activations, promotes the first one, quantizes and evaluates the
whole model anew, and goes on: until the target holds, until PSNR gains less than 0.5 dB over three promotions, or at 30 %
of the layers. Where these rules would stop it before it is as accurate as `jq.auto`, that is marked, and it goes on, until
all layers are in float or the time is up, so that the evaluations to the same accuracy can be compared. Both decide on the
same samples, one in four, and start from the same config. The rows go to experiments/results/auto_by_range.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jq
from experiments.common import RESULTS, command, versions
from jq.data.sources import decides, open_source
from jq.evaluation.metrics import psnr
from jq.ops.linear import linear_layer
from jq.pipeline import Result
from jq.plan.selection import literal
from jq.readings.runtime import onnxruntime_reading
from jq.research import RUNGS, Rung
from jq.research.goals import goal_of
from jq.research.islands import apart, islands, work
from jq.research.judging import Judge

_HELD_OUT, _SHARE, _GAIN, _PATIENCE = 4, 0.3, 0.5, 3


def promoted(
    path: Path, data: Any, config: jq.QuantConfig, judge: Judge, error: float, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each model that is quantized and evaluated, until one has no more than an error."""
    start, measured, names, levels = time.perf_counter(), {}, list[str](), list[float]()
    result = jq.quantize(path, data, config, measured=measured)
    layers = by_range(result)
    while True:
        score, level = judge.score(result.model), peak(judge, result)
        count = len(islands(result.graph, apart(result.graph, result.plan, config)))
        cost, narrow = work(result.graph, result.plan)
        took = time.perf_counter() - start
        levels.append(level)
        stale = len(levels) > _PATIENCE and levels[-1] - levels[-1 - _PATIENCE] < _GAIN
        many = len(names) >= _SHARE * len(layers)
        yield {"layers": len(names), "value": score.value, "error": score.error, "islands": count, "cost": cost,
               "in_8_bits": narrow, "seconds": took, "stops": score.holds or stale or many}  # fmt: skip
        if score.error <= error or len(names) == len(layers) or took > seconds:
            return
        names.append(layers[len(names)])
        changed = config.replace(exclude=(*config.exclude, *map(literal, names)))
        result = jq.quantize(path, data, changed, measured=measured)


def by_range(result: Result) -> list[str]:
    """The layers with weights, those of the largest range of their output first."""
    stats = result.stats
    assert stats is not None
    ranges = {}
    for node in result.graph.nodes:
        if linear_layer(result.graph, node) is not None and node.outputs[0] in stats.tensors:
            low, high = stats.range(node.outputs[0])
            ranges[node.label] = high - low
    return sorted(ranges, key=lambda label: -ranges[label])


def peak(judge: Judge, result: Result) -> float:
    """The least PSNR of an output on the deciding samples."""
    run, levels = onnxruntime_reading(result.model), []
    for sample, reference in zip(judge.deciding.samples, judge.deciding.reference, strict=True):
        outputs = run(sample)
        levels += [psnr(reference[k], outputs[k]) for k in reference if reference[k].dtype.kind == "f"]
    return min(levels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", default="kl 0.01")
    parser.add_argument("--config", default="A8W8")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "auto_by_range.jsonl")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    graph, (goal, _) = jq.load(arguments.model), goal_of(arguments.target, None)
    samples = list(open_source(arguments.data, graph.inputs).samples())
    judge = Judge.of(goal, graph, [s for i, s in enumerate(samples) if decides(i, _HELD_OUT)], None, None)
    config = jq.presets[arguments.config].replace(held_out=_HELD_OUT)
    base = Rung(arguments.config, lambda climb: True, lambda climb: jq.presets[arguments.config])
    ours = [base, *(r for r in RUNGS if r.name == "islands")]
    start = time.perf_counter()
    result = jq.auto(arguments.model, arguments.data, target=arguments.target, rungs=ours)
    print(f"jq.auto: {len(result.rungs)} evaluations, {time.perf_counter() - start:.0f} s\n{result}", flush=True)
    reached = min(t.score.error for t in result.rungs if t.score is not None)
    rows = []
    for row in promoted(arguments.model, arguments.data, config, judge, reached, arguments.seconds):
        rows.append(row)
        text = (
            "{layers:3} layers  {value:.4g}  error {error:.4g}  islands {islands:2}  cost {cost:.2f}  {seconds:.0f} s"
        )
        print(text.format(**row), "(the vendor's rules stop)" if row["stops"] else "", flush=True)
    record = {"experiment": "auto_by_range", "model": arguments.model.name, **versions(), "command": command()}
    record |= {"target": str(goal), "config": arguments.config, "by_range": rows, "auto": result.to_dict()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.out, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
