"""A reader as the vendor's guides write it, and a model quantized by each config once."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationDataReader

import jq
from jq.compat.quark import Config, ModelQuantizer, QuantizationConfig, get_default_config
from tests.short import short_resnet

IMAGES = jq.zoo.calibration_set()[0][:12]
MODEL = short_resnet()


class ListReader(CalibrationDataReader):
    """Built from a list, without `rewind` and without `__len__`."""

    def __init__(self, images: np.ndarray = IMAGES) -> None:
        self.samples = iter([{"input": image[None]} for image in images])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.samples, None)


def logits(model: onnx.ModelProto, images: np.ndarray = IMAGES) -> np.ndarray:
    """What plain onnxruntime makes of a model."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"input": images})[0]


def agreement(model: onnx.ModelProto) -> float:
    """Cosine of the model's logits and the float model's."""
    ours, floats = logits(model).ravel(), logits(onnx.load(MODEL)).ravel()
    return float(ours @ floats / np.linalg.norm(ours) / np.linalg.norm(floats))


def quantized(config: QuantizationConfig | str, **arguments: Any) -> onnx.ModelProto:
    """The bundled model, quantized on a dozen images, with nothing printed and no warning let through."""
    settings = get_default_config(config) if isinstance(config, str) else config
    settings.print_summary = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ModelQuantizer(Config(settings)).quantize_model(
            str(MODEL), calibration_data_reader=ListReader(), **arguments
        )


@pytest.fixture(scope="session")
def by_name() -> Any:
    """A named config's model, made once."""
    return functools.cache(quantized)


@pytest.fixture(scope="session")
def graph() -> jq.Graph:
    return jq.load(MODEL)
