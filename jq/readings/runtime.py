"""onnxruntime as one more reading of a model: a function from inputs to outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto

from jq.errors import ModelError
from jq.graph import Graph
from jq.graph.write import to_model

Reading: TypeAlias = Callable[[Mapping[str, Any]], dict[str, np.ndarray]]


def onnxruntime_reading(model: str | os.PathLike[str] | bytes | ModelProto | Graph) -> Reading:
    """Return the model as onnxruntime runs it on the CPU; a model that it does not load or run is a ModelError.

    >>> import jq.zoo
    >>> run = onnxruntime_reading(jq.zoo.path("fashion_resnet"))
    >>> run({"input": jq.zoo.evaluation_set()[0][:2]})["logits"].shape
    (2, 10)
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    source = to_model(model) if isinstance(model, Graph) else model
    try:
        source = source.SerializeToString() if isinstance(source, ModelProto) else source
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no common class for its own, protobuf has a limit of 2 GB
        raise ModelError(f"onnxruntime does not load this model: {_first_line(error)}") from error
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        try:
            outputs = session.run(names, {k: np.asarray(v) for k, v in inputs.items()})
        except Exception as error:
            raise ModelError(f"onnxruntime does not run this model: {_first_line(error)}") from error
        return dict(zip(names, outputs, strict=True))

    return run


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
