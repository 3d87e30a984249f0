"""Are the outputs of a quantized model worth anything? Both models run in onnxruntime on a few samples."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import ModelProto

from jq.arithmetic.losses import decibels
from jq.data.arrays import Sample
from jq.data.sources import judged_samples
from jq.errors import ModelError
from jq.evidence.verdict import OutputLoss, OutputsVerdict, distances, kind_of_scores
from jq.graph import Graph
from jq.readings.runtime import onnxruntime_reading
from jq.util.mapped import release
from jq.util.progress import log

_WORTHLESS = 6.0  # dB: a detector that finds nothing keeps 0, classifiers within a point of float keep 12 and more


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """A float model's outputs on a few samples, computed once: quantized models are compared with them."""

    graph: Graph
    samples: Sequence[Sample]
    outputs: Sequence[Mapping[str, Any]] | None  # of each sample; None where onnxruntime does not run the model

    @classmethod
    def of(cls, graph: Graph, data: Any, seed: int = 0) -> Reference:
        """The outputs of a graph on the first samples of some data."""
        samples = judged_samples(data, graph.inputs, seed, models=2)
        return cls(graph, samples, _outputs(graph, samples))


def _outputs(model: Graph | ModelProto, samples: Sequence[Sample]) -> list[dict[str, np.ndarray]] | None:
    try:
        run = onnxruntime_reading(model)
        return [run(sample) for sample in samples]
    except ModelError as error:
        log.info("outputs are not compared: %s", error)
        return None
    finally:
        for array in model.params.values() if isinstance(model, Graph) else ():
            release(array)


def output_losses(reference: Reference, quantized: ModelProto) -> OutputsVerdict:
    """Return the loss of each output of floats; none where onnxruntime does not run one of the models."""
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, x, y in _pairs(reference, quantized):
        pairs.setdefault(name, []).append((x, y))
    graph = reference.graph
    losses = [_loss(graph, v.name, pairs[v.name]) for v in graph.outputs if v.name in pairs]
    count = max(map(len, pairs.values()), default=0)
    return OutputsVerdict(tuple(losses), f"{count} samples of the calibration data")


def _loss(graph: Graph, name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> OutputLoss:
    kept = _kept(*np.sum([_powers(x, y) for x, y in pairs], axis=0))
    kind = kind_of_scores(graph, name, pairs[0][0].shape)
    if not kind:
        return OutputLoss(name, kept)
    compared = jax.jit(functools.partial(distances, kind))  # one program, not one for each of its operations
    apart = np.array([compared(x, y) for x, y in pairs])
    divergence, other = apart.mean(axis=0)
    return OutputLoss(name, kept, 1 - float(other), float(divergence), few=len(pairs))


def output_error(reference: Reference, quantized: ModelProto) -> float:
    """Return the mean over the outputs' channels of the squared error, relative to the channel's power, at most 1.

    So scores count beside boxes that are a thousand times as large. 0 where onnxruntime does not run one of the models.
    """
    errors = []
    for _, x, y in _pairs(reference, quantized):
        channels = [
            v.swapaxes(0, 1).reshape(v.shape[1], -1) if v.ndim > 1 and v.size else v.reshape(1, -1) for v in (x, y)
        ]
        powers = np.array([_powers(a, b) for a, b in zip(*channels, strict=True)])
        with np.errstate(all="ignore"):
            errors.append(np.nan_to_num(np.minimum(powers[:, 1] / powers[:, 0], 1), nan=1.0).mean())
    return float(np.mean(errors)) if errors else 0.0


def _pairs(reference: Reference, quantized: ModelProto) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield outputs of floats as both models give them, by name and sample; none where one of them does not run."""
    made = None if reference.outputs is None else _outputs(quantized, reference.samples)
    for x, y in zip(reference.outputs or (), made or (), strict=made is not None):
        for name in x.keys() & y.keys():
            tensors = isinstance(x[name], np.ndarray) and isinstance(y[name], np.ndarray)
            if tensors and x[name].dtype == np.float32 and x[name].shape == y[name].shape:
                yield name, x[name], y[name]


def _powers(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Signal and noise where the float output is finite."""
    x, y = (v[np.isfinite(x)].astype(np.float64) for v in (x, y))
    return float(np.square(x).sum()), float(np.square(x - y).sum())


def _kept(signal: float, noise: float) -> float:
    return decibels(signal, noise) if math.isfinite(noise) else -math.inf


def warn_of_outputs(losses: Iterable[OutputLoss]) -> None:
    """Warn of outputs of which quantization leaves little or nothing, with ways out."""
    lost = [f"{o.name!r} {o.sqnr:.1f} dB" for o in losses if o.sqnr is not None and o.sqnr < _WORTHLESS]
    if lost:
        text = "on calibration data, quantization leaves little of the output "
        ways = (
            "finetune (XINT8_ADAROUND), more bits (A8W8, A16W8), or `jq-quant compare` for the tensors that lose most"
        )
        warnings.warn(f"{text}{', '.join(lost)}: the result will probably be useless; try {ways}", stacklevel=3)
