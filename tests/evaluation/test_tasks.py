"""Metrics of tasks, against definitions by hand and numpy, and metrics of the user's on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import jq
from jq.cli import main
from jq.errors import DataError
from jq.evaluation.estimates import Estimate
from jq.evaluation.tasks import METRICS, cosine, mean_iou, model_outputs, spearman, words

MODEL = jq.zoo.path("fashion_resnet")


def test_mean_iou_by_sets(rng: np.random.Generator) -> None:
    masks = rng.integers(0, 3, (5, 8, 8))
    masks[0, 0] = 255
    scores = rng.standard_normal((5, 1, 4, 8, 8)).astype(np.float32)
    guess, kept = scores[:, 0].argmax(1), masks != 255
    shares = []
    for c in range(4):
        one, other = (guess == c) & kept, (masks == c) & kept
        shares.append((one & other).sum() / (one | other).sum())
    assert mean_iou({"y": list(scores)}, masks) == pytest.approx(np.mean(shares))
    with pytest.raises(DataError, match="masks need scores"):
        mean_iou({"y": [np.zeros((1, 4))]}, masks[:1])


def test_words_collapse_repeats_between_blanks() -> None:
    read = np.eye(4, dtype=np.float32)[[0, 2, 2, 0, 2, 3, 3]][None]
    truth = np.array([[2, 2, 3, 0], [2, 3, 0, 0]])
    assert words({"y": [read, read]}, truth) == 0.5


def test_spearman_with_ties_is_the_correlation_of_mean_ranks(rng: np.random.Generator) -> None:
    rows = [rng.standard_normal((1, 6)) for _ in range(20)]
    cosines = [
        float(np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(rows[::2], rows[1::2], strict=True)
    ]
    truth = rng.integers(0, 4, 10).astype(float)
    ranks = [[sum(v < w for v in x) + (sum(v == w for v in x) + 1) / 2 for w in x] for x in (cosines, truth.tolist())]
    assert spearman({"y": rows}, truth) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    with pytest.raises(DataError, match="two samples for each score"):
        spearman({"y": rows}, truth[:3])


def test_changes_have_the_interval_of_what_is_drawn_again(rng: np.random.Generator) -> None:
    one, two = (rng.random((200, 1)) < share for share in (0.9, 0.8))
    metric = METRICS["words"]
    found = metric.change(one.astype(float), two.astype(float))
    error = np.std(two.astype(float) - one) / np.sqrt(200)
    assert found.value == pytest.approx(two.mean() - one.mean())
    assert (found.low, found.high) == pytest.approx((found.value - 1.96 * error, found.value + 1.96 * error), abs=0.012)
    assert metric.change(one.astype(float), one.astype(float)) == Estimate(0.0, 0.0, 0.0)


def test_cosine_of_a_model_with_itself() -> None:
    outputs = model_outputs(MODEL, jq.zoo.evaluation_set()[0][:4])
    assert cosine(outputs, np.concatenate(outputs["logits"])) == pytest.approx(1)
    with pytest.raises(DataError, match="a truth for each of 4 samples; got none"):
        cosine(outputs, None)


def test_a_metric_of_the_users_on_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images, labels = jq.zoo.evaluation_set()
    np.save(tmp_path / "x.npy", images[:40])
    np.save(tmp_path / "y.npy", labels[:40])
    (tmp_path / "metric.py").write_text(
        "import numpy as np\n"
        "def right(outputs, truth):\n"
        "    return float(np.mean([v.argmax() == t for v, t in zip(outputs['logits'], truth)]))\n"
    )
    given = [
        "evaluate",
        "--model",
        str(MODEL),
        "--data",
        f"{tmp_path}/x.npy",
        "--labels",
        f"{tmp_path}/y.npy",
        "--json",
    ]
    with pytest.raises(SystemExit) as end:
        main([*given, "--metric", f"{tmp_path}/metric.py:right"])
    assert end.value.code == 0
    document = json.loads(capfd.readouterr().out)
    scores = jq.evaluate.model_scores(MODEL, images[:40]).values
    assert document["metric"]["values"][str(MODEL)] == np.mean(scores.argmax(1) == labels[:40])
    with pytest.raises(SystemExit) as end:
        main([*given, "--metric", "mask"])
    assert end.value.code == 2 and "Did you mean 'masks'" in capfd.readouterr().err
