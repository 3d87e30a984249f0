"""Trials of configs on one model: each quantizes it, and counts how far its outputs are from the float model's."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jq.compat.quark.external import store_outside
from jq.compat.quark.quantization.config.config import Config, QConfig
from jq.compat.quark.translate import translate
from jq.data.sources import open_source
from jq.errors import ConfigError, check_choice
from jq.evaluation import metrics
from jq.graph.read import load
from jq.pipeline import Measured, quantize
from jq.readings.named import open_reading
from jq.util import files
from jq.util.progress import log


def l2_metric(base_input: np.ndarray, ref_input: np.ndarray) -> float:
    """Return the mean squared difference, which Quark calls L2.

    >>> l2_metric(np.array([0.0, 0.0]), np.array([0.0, 2.0]))
    2.0
    """
    return float(np.mean(np.square(base_input - ref_input)))


def l1_metric(base_input: np.ndarray, ref_input: np.ndarray) -> float:
    """Return the mean absolute difference."""
    return float(np.mean(np.abs(base_input - ref_input)))


def cos_metric(base_input: np.ndarray, ref_input: np.ndarray) -> float:
    """Return the cosine of two arrays on the scale from 0 to 1.

    >>> cos_metric(np.array([1.0, 0.0]), np.array([-1.0, 0.0]))
    0.0
    """
    return 0.5 + 0.5 * metrics.cosine(base_input, ref_input)


def psnr_metric(base_input: np.ndarray, ref_input: np.ndarray) -> float:
    """Return the PSNR in dB for a peak of 255, at most 100."""
    mean = l2_metric(base_input, ref_input)
    return 100.0 if mean < 1e-10 else 20 * math.log10(255 / math.sqrt(mean))


def ssim_metric(base_input: np.ndarray, ref_input: np.ndarray) -> float:
    """Return the SSIM of two arrays, each as a single window, for a peak of 255."""
    one, two = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    means, spreads = (base_input.mean(), ref_input.mean()), (base_input.std(), ref_input.std())
    alike = (2 * means[0] * means[1] + one) * (2 * spreads[0] * spreads[1] + two)
    return float(alike / ((means[0] ** 2 + means[1] ** 2 + one) * (spreads[0] ** 2 + spreads[1] ** 2 + two)))


Metric = Callable[[np.ndarray, np.ndarray], float]
Evaluator = Callable[[str], float]
METRICS: Mapping[str, Metric] = {
    "L2": l2_metric, "L1": l1_metric, "cos": cos_metric, "psnr": psnr_metric, "ssim": ssim_metric
}  # fmt: skip
_LARGER_IS_BETTER = ("cos", "psnr", "ssim")


class Trials:
    """Quantizations of one model by many configs, compared with the float model.

    Without an evaluator, a trial's loss is a metric of its outputs and the float model's, negative where larger is better;
    with one, which takes a file and returns a score, the score that was lost.
    """

    def __init__(
        self, model: str | os.PathLike[str], data: Any, evaluate_on: Any, metric: str, evaluator: Evaluator | None
    ) -> None:
        check_choice("search_metric", metric, METRICS)
        self.seconds = 0.0  # that quantizing has taken
        self._path, self._graph, self._measured = os.fspath(model), load(model), dict[str, Any]()
        self._data = None if data is None else list(open_source(data, self._graph.inputs).samples())
        self._seen = self._data if evaluate_on is None else _samples(evaluate_on)
        if evaluator is None and self._seen is None:
            raise ConfigError("a search needs data to compare outputs on, or an evaluator; got neither")
        self._metric, self._evaluator = metric, evaluator
        self._score = 0.0 if evaluator is None else float(evaluator(self._path))
        self._float = self._outputs(self._path) if evaluator is None else []

    @property
    def counted(self) -> str:
        """The name of what a loss is, for the log."""
        return "lost score" if self._evaluator is not None else self._metric

    def shown(self, loss: float) -> float:
        """Return a loss as the metric that it comes from."""
        return -loss if self._turned else loss

    @property
    def _turned(self) -> bool:
        return self._evaluator is None and self._metric in _LARGER_IS_BETTER

    def loss(self, config: Config | QConfig, output: Path) -> float:
        """Return the loss of a config, and write its model."""
        translation, start = translate(config, self._graph), time.perf_counter()
        for note in translation.notes:
            log.info("%s", note)
        data = translation.inputs.sampled(self._data, translation.config.seed)
        measured: Measured | None = self._measured if translation.graph is None else None
        model = self._path if translation.graph is None else translation.graph
        given: dict[str, Any] = {"format": translation.format, "opset": translation.opset, "spill": translation.spill}
        quantize(model, data, translation.config, output=output, measured=measured, **given)
        if translation.external:
            store_outside(output)
        self.seconds += time.perf_counter() - start
        if self._evaluator is not None:
            return self._score - float(self._evaluator(os.fspath(output)))
        pairs = zip(self._float, self._outputs(output), strict=True)
        mean = float(np.mean([METRICS[self._metric](base, other) for base, other in pairs]))
        return -mean if self._turned else mean

    def _outputs(self, model: str | Path) -> list[np.ndarray]:
        """Return the outputs for each sample, flat and one behind the other."""
        run, seen = open_reading(model), self._seen or ()
        return [np.concatenate([np.ravel(output) for output in run(sample).values()]) for sample in seen]


def _samples(data: Any) -> list[Any]:
    """Return the samples of a reader or an iterable, from the start."""
    if hasattr(data, "get_next"):
        if hasattr(data, "rewind"):
            data.rewind()
        return list(iter(data.get_next, None))
    return list(data)


class Journal:
    """The log of a search: `auto_search.log` in its folder, and jq's own log."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, list[str]()

    def note(self, line: str) -> None:
        """Add a line."""
        log.info("%s", line)
        self._lines.append(line)
        files.write(self._path, "\n".join(self._lines) + "\n")

    def ranking(self, losses: Mapping[int, float], shown: Callable[[float], float]) -> None:
        """Add the configs, the best first."""
        self.note("configs, best first:")
        for index, loss in sorted(losses.items(), key=lambda pair: (pair[1], pair[0])):
            self.note(f"config {index}: {shown(loss):.6g}")
