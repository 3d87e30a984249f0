"""Stages of a quantization side by side: weights before and after equalization, outputs before and after finetuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jq.evidence.plots import before_after_plot
from jq.evidence.report import Section, channel_ranges
from jq.evidence.verdict import OutputsVerdict
from jq.graph import Graph
from jq.plan import Plan
from jq.plan.scales import channel_axes
from jq.util.mapped import release

_SHOWN = 24  # weights


def equalization_sections(before: Graph, after: Graph, plan: Plan) -> Iterator[Section]:
    """Yield how far the channels of weights differ before and after equalization, the most uneven first.

    The spread of a weight is the range of its widest channel divided by that of its median one: with one scale for all, the
    median channel has fewer steps by this factor.
    """
    axes, rows = channel_axes(after), list[tuple[str, float, float]]()
    for name in plan.weights:
        one, other = before.params.get(name), after.params.get(name)
        if one is None or other is None or one.shape != other.shape:
            continue
        same = np.array_equal(one, other)
        uneven, even = (None if same else spread(weight, axes.get(name)) for weight in (one, other))
        release(one)
        release(other)
        if uneven is not None and even is not None:
            rows.append((name, uneven, even))
    if not rows:
        return
    rows.sort(key=lambda row: -row[1])
    shown = rows[:_SHOWN]
    yield Section(
        f"Before and after equalization: {len(rows)} weights",
        ("weight", "widest channel relative to the median, before", "after"),
        [(name, f"{uneven:.2f}", f"{even:.2f}") for name, uneven, even in shown],
        before_after_plot("range of the widest channel relative to the median, logarithmic", shown),
    )


def spread(weight: np.ndarray, axis: int | None) -> float | None:
    """Return the range of a weight's widest channel by that of its median one; None of what has no channels.

    >>> spread(np.float32([[1, -1], [4, 0], [0, 2]]), 0)
    2.0
    """
    channels = channel_ranges(weight, axis)
    if channels is None:
        return None
    wide = [max(abs(low), abs(high)) for low, high in channels]
    median = float(np.median(wide))
    return max(wide) / median if median > 0 else None


def finetuning_sections(
    before: tuple[Mapping[str, Any], Plan, OutputsVerdict], after: tuple[Mapping[str, Any], Plan, OutputsVerdict]
) -> Iterator[Section]:
    """Yield what finetuning made of the outputs, and how much of each weight it changed, the most first.

    Both are params, a plan and a verdict.
    """
    known = {loss.name: loss for loss in before[2].outputs}
    rows = [
        (f"{loss.name}: {figure}", known[loss.name].figures().get(figure, ""), value)
        for loss in after[2].outputs
        if loss.name in known
        for figure, value in loss.figures().items()
    ]
    if rows:
        yield Section("Before and after finetuning", ("output", "before", "after"), rows)
    shares = {
        name: float(np.mean(before[1][name].given_back(before[0][name]) != qparams.given_back(after[0][name])))
        for name, qparams in after[1].weights.items()
        if name in before[1] and name in before[0] and name in after[0]
    }
    changed = sorted(((name, share) for name, share in shares.items() if share), key=lambda pair: -pair[1])
    if changed:
        cells = [(name, f"{share:.1%}") for name, share in changed[:_SHOWN]]
        yield Section(f"Weights that finetuning changed: {len(changed)}", ("weight", "share of its values"), cells)
