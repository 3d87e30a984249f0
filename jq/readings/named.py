"""Readings by their names: how the user says who runs a model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from jq.errors import ModelError, check_choice
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.readings.integer import TARGETS
from jq.readings.integer import load as load_chip
from jq.readings.packing import pack
from jq.readings.provider import RUNTIME, Provider, available, provider_of, short_name
from jq.readings.runtime import Reading, onnxruntime_reading
from jq.readings.tracing import trace
from jq.util import files

READINGS = (RUNTIME, "jq", *TARGETS)
AnyReading: TypeAlias = str | Provider | Reading


@dataclasses.dataclass(frozen=True, eq=False)
class NamedReading:
    """A function from inputs to outputs, and what a result calls it."""

    name: str
    run: Reading

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The model's outputs."""
        return self.run(inputs)


def open_reading(model: ModelLike, reading: AnyReading = RUNTIME, *, original: ModelLike | None = None) -> Reading:
    """Return the function from one sample to the outputs of a model, by the reading's name.

    It is onnxruntime on the CPU ("onnxruntime"), any of its providers ("vitisai", or a `Provider` with options), jq in
    float32 ("jq"), or a target of `jq.integer` ("aie2_x1", ...). A function is returned unchanged. `original` is what a
    graph was loaded from: onnxruntime reads a large model from its file.

    >>> import jq.zoo
    >>> run = open_reading(jq.zoo.path("fashion_resnet"), "cpu")
    >>> run({"input": jq.zoo.evaluation_set()[0][:1]})["logits"].shape
    (1, 10)
    """
    if callable(reading):
        return reading
    provider = provider_of(reading)
    if provider is not None:
        source = model if original is None else original
        if isinstance(
            source, (str, os.PathLike)
        ):  # onnxruntime's own words for a file that it cannot read are no sentence
            with files.reading(source, ModelError, "the model "):
                os.stat(source)
        return onnxruntime_reading(source, provider)
    check_choice("reading", reading, dict.fromkeys((*READINGS, *map(short_name, available()), "vitisai")))
    graph = model if isinstance(model, Graph) else load(model)
    if reading == "jq":
        import jax

        fn, params = trace(graph), pack(graph)
        run = fn if fn.static_inputs else jax.jit(fn)
        return NamedReading("jq", lambda sample: run(params, sample))
    assert isinstance(reading, str)
    return NamedReading(reading, load_chip(graph, reading))


def reading_name(reading: AnyReading) -> str:
    """Return the name that a result has of its reading.

    >>> reading_name(Provider("VitisAIExecutionProvider"))
    'vitisai'
    """
    if isinstance(reading, str):
        return reading
    return reading.short if isinstance(reading, Provider) else str(getattr(reading, "name", "own"))
