"""The page of accuracy, from the rows of bench/quantize.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.bench.tasks import MEASURES

HEAD = """# Accuracy, beside other tools

Each row is one network, quantized by one tool with its own defaults from the same calibration samples, and evaluated by
onnxruntime. Top-1 of 500 images moves by a point with the last bits of a sum, so each row also has what compares every
sample with what the float network makes of it: agreement (the same class, the same word), the KL divergence of the
outputs and their signal-to-noise ratio. Brackets hold 95 % intervals, by a bootstrap over the samples with a fixed
seed; p is McNemar's exact test of the quantized network against the float one. Bold is the best of each network
among the presets XINT8, whose scales are powers of two. Those of A8W8 and of onnxruntime are floats.

Images are a research set from ImageNet, 64 images of COCO, rendered words, and sentence pairs of STS; none is part of the
repository. This page is made from the rows in `experiments/results/accuracy.jsonl` by the command that measures them:

    python experiments/bench/quantize.py MODEL.onnx:KIND[:LABELS] ... --images NPZ --eval FOLDER --tasks FOLDER \\
        --quark PYTHON --onnxsim PYTHON --onnxruntime --page docs/accuracy.md
"""
_BEST = {"value": max, "agreement": max, "kl": min, "sqnr": max}
_FORMAT = {"change": (100, "+.1f"), "agreement": (100, ".1f"), "kl": (1, ".4f"), "sqnr": (1, ".1f")}


def page(rows: Sequence[dict[str, Any]]) -> str:
    """All tables, the last row of each model, tool and preset counting."""
    parts = [HEAD, overview(rows)]
    for name, own in _by_model(rows).items():
        parts += [f"## {name}\n", _described(own), _table(own)]
    return "\n".join(parts)


def overview(rows: Sequence[dict[str, Any]]) -> str:
    """One table: the measure of each model by each tool; brackets hold the interval of its change from the float model."""
    models = _by_model(rows)
    tools = dict.fromkeys((r["tool"], r["config"]) for own in models.values() for r in own)
    lines = [["", "", "float", *(" ".join(tool) for tool in tools)]]
    lines.append(["---"] * len(lines[0]))
    for name, own in models.items():
        made = {(r["tool"], r["config"]): r for r in own}
        good = [r for r in own if "failed" not in r]
        best = max((r["value"] for r in good if _is_xint8(r)), default=None)
        cells = []
        for tool in tools:
            row = made.get(tool)
            if row is None or "failed" in row:
                cells.append("-" if row is None else "fails")
                continue
            low, high = (100 * end for end in row["change"][1:])
            text = f"{100 * row['value']:.1f}"
            text = f"**{text}**" if row["value"] == best and _is_xint8(row) else text
            cells.append(f"{text} [{low:+.1f}, {high:+.1f}]")
        floats = f"{100 * good[0]['float']:.1f}" if good else ""
        lines.append([name, MEASURES.get(own[0]["kind"], "top-1"), floats, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def into(text: str, table: str) -> str:
    """A page with a table between its marks."""
    begin, end = "<!-- accuracy -->\n", "<!-- end -->\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"the page needs two lines, {begin.strip()} and {end.strip()}, between which the table goes")
    return before + begin + "\n" + table + "\n" + end + after


def _by_model(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The last row of each tool and preset, by the models' names."""
    last = {(r["name"], r["tool"], r["config"]): r for r in rows}
    found: dict[str, list[dict[str, Any]]] = {}
    for (name, *_), row in last.items():
        found.setdefault(name, []).append(row)
    return found


def _described(rows: Sequence[dict[str, Any]]) -> str:
    known = next((r for r in rows if "failed" not in r), None)
    if known is None:
        return "No tool quantized it.\n"
    name = MEASURES.get(known["kind"], "top-1")
    return f"{name} of the float network: {100 * known['float']:.1f}, on {known['samples']} samples.\n"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    measured = [r for r in rows if "failed" not in r]
    name = MEASURES.get(rows[0]["kind"], "top-1")
    columns = [c for c in _FORMAT if any(r[c] is not None for r in measured)]
    titles = {"change": "change", "agreement": "agreement, %", "kl": "KL", "sqnr": "SQNR, dB"}
    best = {}
    for column, better in _BEST.items():
        values = [_value(r, column) for r in measured if _is_xint8(r) and r.get(column) is not None]
        best[column] = better(values) if len(values) > 1 else None
    lines = [["", name, *(titles[c] for c in columns), "p", "seconds", "MB"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        tool = f"{row['tool']} {row['config']}"
        if "failed" in row:
            lines.append([tool, "fails", *[""] * (len(lines[0]) - 2)])
            continue
        cells = [_bold(f"{100 * row['value']:.1f}", row, "value", best)]
        cells += [_bold(_interval(row[c], *_FORMAT[c]), row, c, best) for c in columns]
        p = "" if row["p"] is None else f"{row['p']:.2g}"
        lines.append([tool, *cells, p, f"{row['wall']:.1f}", f"{row['megabytes']:.0f}"])
    failures = [f"{r['tool']} {r['config']} fails: `{r['failed']}`\n" for r in rows if "failed" in r]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n" + "".join(f"\n{f}" for f in failures)


def _is_xint8(row: dict[str, Any]) -> bool:
    return str(row["config"]).startswith("XINT8")


def _value(row: dict[str, Any], column: str) -> float:
    return row[column] if column == "value" else row[column][0]


def _bold(text: str, row: dict[str, Any], column: str, best: dict[str, Any]) -> str:
    known = best.get(column) is not None and _is_xint8(row) and row.get(column) is not None
    return f"**{text}**" if known and _value(row, column) == best[column] else text


def _interval(estimate: list[float] | None, factor: float, form: str) -> str:
    if estimate is None:
        return ""
    value, low, high = (f"{factor * v:{form}}" for v in estimate)
    return f"{value} [{low}, {high}]"
