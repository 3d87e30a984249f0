"""Regions in a wider format: what they cost, how many there are, and that the outputs gain by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import jq
from jq.arithmetic.formats import INT16, UINT8
from jq.pipeline import Calibrated, calibrated
from jq.plan.selection import literal
from jq.readings.runtime import onnxruntime_reading
from jq.research.islands import apart, islands, work
from jq.research.losses import divergences
from jq.research.widening import Wide, fused, part_losses, widened

GRAPH = jq.load(jq.zoo.path("fashion_mobilenet"))
IMAGES = jq.zoo.calibration_set()[0][:24]
ASYMMETRIC = jq.presets["A8W8"].replace(per_channel=True, activation=UINT8, symmetric=False, method="mse")
MEASURED: dict[str, Any] = {}


def ready_of(config: jq.QuantConfig) -> Calibrated:
    return calibrated(GRAPH, IMAGES, config, measured=MEASURED)


def cost_of(config: jq.QuantConfig) -> float:
    ready = ready_of(config)
    return work(ready.graph, ready.guarded.plan)[0]


def error_of(config: jq.QuantConfig) -> float:
    """The squared error of the logits, by onnxruntime, on images that nothing was calibrated on."""
    others = jq.zoo.calibration_set()[0][24:56]
    made = jq.quantize(GRAPH, IMAGES, config, measured=MEASURED).model
    one, two = (onnxruntime_reading(m)({"input": others})["logits"] for m in (GRAPH, made))
    return float(np.square(one - two, dtype=np.float64).mean())


def regions_of(ready: Calibrated, config: jq.QuantConfig) -> int:
    return len(islands(ready.graph, apart(ready.graph, ready.guarded.plan, config)))


@pytest.mark.parametrize(("preset", "wide"), [("asymmetric", "int16"), ("XINT8", "float"), ("asymmetric", "bf16")])
def test_what_is_widened_stays_within_its_bounds_and_gains(preset: str, wide: Wide) -> None:
    config = ASYMMETRIC if preset == "asymmetric" else jq.presets[preset]
    ready, named = ready_of(config), frozenset(n.label for n in GRAPH.nodes)
    losses = part_losses(ready, divergences(GRAPH), wide)
    made = widened(config, ready, losses, wide, 1.5, 1, named, cost_of)
    assert made is not None
    after = ready_of(made)
    assert 1 < work(after.graph, after.guarded.plan)[0] <= 1.5 + 1e-9
    assert regions_of(after, made) <= regions_of(ready, config) + 1
    if wide != "bf16":  # of whose bits eight are the mantissa's: not always better than eight of a tensor's own scale
        assert error_of(made) < error_of(config)


def test_no_room_and_nothing_that_can_be_named() -> None:
    ready, named = ready_of(ASYMMETRIC), frozenset(n.label for n in GRAPH.nodes)
    losses = part_losses(ready, divergences(GRAPH), "int16")
    assert widened(ASYMMETRIC, ready, losses, "int16", 1.0, 1, named, cost_of) is None
    assert widened(ASYMMETRIC, ready, losses, "int16", 1.5, 1, frozenset(), cost_of) is None


def test_a_layer_is_apart_with_the_activation_that_takes_its_result() -> None:
    ready = ready_of(ASYMMETRIC)
    parts = [p for p in fused(ready.graph, ready.guarded.plan.nodes) if len(p.nodes) > 1]
    assert parts and all(p.nodes[-1].outputs[0] == p.output for p in parts)
    overrides = {literal(parts[0].nodes[-1].label): {"activation": INT16, "symmetric": True}}
    wide = ready_of(config := ASYMMETRIC.replace(overrides=overrides))
    regions = islands(wide.graph, apart(wide.graph, wide.guarded.plan, config))
    assert frozenset(n.outputs[0] for n in parts[0].nodes) in regions


def test_losses_of_parts_are_shares_of_the_whole() -> None:
    losses = part_losses(ready_of(ASYMMETRIC), divergences(GRAPH), "float")
    assert all(loss >= 0 for loss in losses.values()) and any(name.startswith("weights of ") for name in losses)
    assert 0.3 < sum(losses.values()) < 3  # errors of single tensors nearly add up
    narrower = part_losses(
        ready_of(ASYMMETRIC), divergences(GRAPH), "int16"
    )  # whose regions round weights to 8 bits, too
    assert {k: v for k, v in losses.items() if not k.startswith("weights of ")} == pytest.approx(narrower)
