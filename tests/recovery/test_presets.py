"""Presets with finetuning: each runs, and is not worse for it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest

import jq
from jq.errors import ConfigError
from tests.conftest import onnxruntime_outputs
from tests.recovery.test_finetuning import (
    HELD_OUT,
    IMAGES,
    decibels,
    small,
)
from tests.sampling import sampled

STEPS = {"finetune_steps": 40, "finetune_batch": 6}
NAMES = (
    "A8W8_ADAROUND", "A8W8_ADAQUANT", "BF16_ADAQUANT", "U16S8_AAWS_ADAQUANT", "S8S8_AAWS_ADAROUND", "BFP16_ADAQUANT",
    "XINT8_ACCURATE", "A16W8_ADAQUANT", "MXINT8_ADAQUANT", "INT8_CNN_ACCURATE",
)  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "XINT8_ADAROUND": {"bias": "int32", "finetune_steps": 150},
    "A8W8_ADAROUND": {"per_channel": True},
    "A8W8_ADAQUANT": {"per_channel": True},
    "S8S8_AAWS_ADAROUND": {"per_channel": True, "finetune": "adaround+block"},
    "A8W8": {"per_channel": True, "finetune": "bias"},
    "U8U8_AAWA": {"finetune": "adaquant+network"},
    "A8W8_ADAROUND_CONFIG": {"finetune": "bias+block"},
    "VINT8": {"finetune": "adaround+network"},
}


@functools.cache
def wanted() -> np.ndarray:
    return onnxruntime_outputs(onnx.load_from_string(small()), {"x": HELD_OUT})[0]


def run(result: jq.Result) -> np.ndarray:
    """By onnxruntime, or by jq where the file has the vendor's operators."""
    if {n.domain for n in result.model.graph.node} - {"", "com.microsoft"}:
        found = jq.load(result.model)
        return np.asarray(jq.trace(found)(found.params, {"x": HELD_OUT})["y"])
    return onnxruntime_outputs(result.model, {"x": HELD_OUT})[0]


@functools.cache
def without(config: jq.QuantConfig) -> float:
    return decibels(wanted(), run(jq.quantize(small(), IMAGES, config)))


def check(config: jq.QuantConfig) -> None:
    assert config.finetune
    result = jq.quantize(small(), IMAGES, config)
    have, plain = run(result), without(config.replace(finetune=None))
    assert np.isfinite(have).all() and decibels(wanted(), have) > plain - 1, (plain, decibels(wanted(), have))
    simulated = np.asarray(jq.fake_quant(result.graph)(result.graph.params, result.plan, {"x": HELD_OUT})["y"])
    assert decibels(have, simulated) > decibels(wanted(), have) + 6  # ties between codes apart


@pytest.mark.parametrize("name", sampled(NAMES, 3))
def test_a_preset_is_not_worse_than_without(name):
    check(jq.presets[name].replace(**STEPS))


def changed(name: str) -> jq.QuantConfig:
    return jq.presets[name].replace(**STEPS | CHANGES[name])


@pytest.mark.parametrize("name", sampled(CHANGES, 3))
def test_changed_presets(name):
    check(changed(name))


def test_what_quark_computes_is_not_finetuned():
    with pytest.raises(ConfigError, match="finetuning needs strict_quark=False"):
        jq.quantize(small(), IMAGES, jq.presets["XINT8"].replace(strict_quark=True, finetune="adaround"))


def test_biases_of_products_have_the_scales_of_products():
    result = jq.quantize(
        small(), IMAGES, jq.presets["XINT8"].replace(bias="int32", finetune="block", cle=False, **STEPS)
    )
    of = {n.inputs[2]: n for n in result.graph.nodes if n.op_type in ("Conv", "Gemm")}
    assert len(of) == 5
    for name, reader in of.items():
        product = float(result.plan[reader.inputs[0]].scale) * float(result.plan[reader.inputs[1]].scale)
        assert float(result.plan[name].scale) == product


def test_wide_residual_parts_of_a_bundled_network():
    """A network of a size that is used, on images that it has not seen."""
    images = jq.zoo.calibration_set()[0][:32]
    x = jq.zoo.evaluation_set()[0][:200]
    path = jq.zoo.path("fashion_resnet")
    (want,) = onnxruntime_outputs(onnx.load(path), {"input": x})
    found = {}
    for stages in (None, "adaround"):
        config = jq.presets["XINT8"].replace(finetune=stages, finetune_steps=60)
        found[stages] = decibels(want, onnxruntime_outputs(jq.quantize(path, images, config).model, {"input": x})[0])
    assert found["adaround"] > found[None], found
