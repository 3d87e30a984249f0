"""Tables of an ablation: factors in columns, the best in bold, intervals and tests beside the means."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

import jq
from jq.research.tables import Results

RNG = np.random.default_rng(0)


def row(config: str, seed: int, right: np.ndarray, *, model: str = "m", **options: object) -> dict:
    mean = float(right.mean())
    return {
        "model": model, "config": config, "seed": seed, "digest": f"{config}{seed}", "options": json.dumps(options),
        "float_top1": 0.9, "top1": mean, "top1_low": None, "change_low": mean - 0.92, "change_high": mean - 0.88,
        "change": mean - 0.9, "agreement": mean, "agreement_low": mean - 0.01, "agreement_high": mean + 0.01,
        "kl": 1 - mean, "kl_low": None, "kl_high": None, "sqnr": None, "added_seconds": 1.0,
        "hits": base64.b64encode(np.packbits(right)).decode(),
    }  # fmt: skip


@pytest.fixture
def results() -> Results:
    rows = []
    for rate, share in ((0.1, 0.9), (0.2, 0.7)):
        for stage in (None, "block"):
            config = f"finetune={stage} finetune_rate={rate}"
            rights = [RNG.random(1000) < share + 0.05 * (stage is not None) for _ in range(2)]
            rows += [row(config, seed, right, finetune=stage, finetune_rate=rate) for seed, right in enumerate(rights)]
    return Results(rows)


def test_options_that_differ_are_columns(results):
    columns, cells = results.cells()
    assert columns[:4] == ["model", "finetune", "finetune_rate", "seeds"]
    assert [c[1:3] for c in cells] == [["none", "0.1"], ["block", "0.1"], ["none", "0.2"], ["block", "0.2"]]
    assert r"\begin{tabular}{lll" in results.to_latex()
    wide = [{f"option{i}": i * n for i in range(1, 6)} for n in range(3)]
    many = Results([row(str(n), 0, np.ones(8, bool), **options) for n, options in enumerate(wide)])
    assert many.cells()[0][:2] == ["model", "config"]  # five are more than a table has room for
    words = Results([row(n, 0, np.ones(8, bool), batch=b) for n, b in (("small", 4), ("large", 8))])
    columns, cells = words.cells()  # a name of one's own says more than the options
    assert columns[:3] == ["model", "config", "batch"] and [c[:3] for c in cells] == [
        ["m", "small", "4"],
        ["m", "large", "8"],
    ]
    alike = Results([row(n, 0, np.ones(8, bool), batch=4) for n in "ab"])
    assert alike.cells()[0][:2] == ["model", "config"]


def test_the_best_is_bold_once_for_each_measure(results):
    text = results.to_markdown()
    (line,) = [line for line in text.splitlines() if "**" in line]
    assert "| block | 0.1 |" in line and line.count("**") == 6  # top-1, agreement and KL
    assert results.to_latex().count(r"\textbf{") == 3 and "**" not in str(results.cells())


def test_intervals_stand_beside_means(results):
    first = results.summary()[0]
    means = [np.mean([r[f"agreement_{end}"] for r in results.rows[:2]]) for end in ("low", "high")]
    assert first.intervals["agreement"] == pytest.approx(tuple(means))
    assert f"[{100 * means[0]:.2f}, {100 * means[1]:.2f}]" in results.to_markdown()
    assert set(first.intervals) == {"change", "agreement"}


def test_each_config_is_tested_against_the_best(results):
    def right(i: int) -> np.ndarray:
        each = (
            np.unpackbits(np.frombuffer(base64.b64decode(r["hits"]), np.uint8)) for r in results.rows[2 * i : 2 * i + 2]
        )
        return sum(v.astype(int) for v in each)

    best, other = right(1), right(2)
    lines = results.summary()
    assert lines[1].p is None
    assert lines[2].p == jq.metrics.sign_test(int((best > other).sum()), int((other > best).sum())) < 1e-6
    assert results.cells()[0][-1] == "p" and results.cells()[1][1][-1] == ""


def test_models_are_told_apart():
    rights = [np.arange(100) < n for n in (90, 80, 50, 60)]
    rows = [
        row(c, 0, v, model=m)
        for (m, c), v in zip([("m", "a"), ("m", "b"), ("n", "a"), ("n", "b")], rights, strict=True)
    ]
    lines = Results(rows).summary()
    assert [line.p is None for line in lines] == [True, False, False, True]
    assert lines[1].p == jq.metrics.sign_test(10, 0)
