"""Scales of what only a saturating function reads: by the error behind it, against the function itself in numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import jq
from jq.arithmetic.formats import INT8
from jq.calibration.observed import focused_tensors
from jq.calibration.observers import ErrorsBehind
from jq.calibration.stats import Stats
from jq.config import presets
from jq.ops.saturating import saturating_reader
from tests.passes.models import build, normal

Function = Callable[[np.ndarray], np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS: dict[tuple[str, bool], Function] = {
    ("Sigmoid", False): sigmoid,
    ("Sigmoid", True): lambda x: x * sigmoid(x),
    ("Tanh", False): np.tanh,
    ("HardSigmoid", True): lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    ("HardSwish", False): lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
}


def rounded(x: np.ndarray, scale: float, least: int = -127, most: int = 127) -> np.ndarray:
    return np.clip(np.rint(x / scale), least, most) * scale


def lost(f: Function, x: np.ndarray, scale: float) -> float:
    """The squared error of a function of codes."""
    x = x.astype(np.float64)
    return float(np.square(f(rounded(x, scale)) - f(x)).sum())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_error_is_that_of_the_functions_values(function: tuple[str, bool]) -> None:
    f, (name, gates) = FUNCTIONS[function], function
    x = np.random.default_rng(0).normal(-2, 4, (40, 500)).astype(np.float32)
    x[0, 0] = -60
    observer = ErrorsBehind(function=name, gates=gates, grid=INT8.narrow)
    state = observer.update(observer.init(1, {}), x)
    totals = observer.finish({k: np.asarray(v, np.float64) for k, v in state.items()})
    np.testing.assert_allclose(observer.scales * 127, [2 ** (7 - k / 2) for k in range(13)])
    for scale, total in zip(observer.scales[3:], totals[3:], strict=True):  # slopes are those of fine steps
        assert total == pytest.approx(lost(f, x, scale), rel=0.1)


def test_no_elements_are_no_error() -> None:
    observer = ErrorsBehind(function="Sigmoid", gates=True, grid=INT8.narrow)
    state = observer.update(observer.init(1, {}), np.zeros((0, 3), np.float32))
    assert not np.any(state["sums"])


# --- Through which readers ---


def readers(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",)) -> tuple[str, bool] | None:
    conv = helper.make_node("Conv", ["x", "w"], ["t"], name="conv")
    arrays = {"w": normal(4, 4, 1, 1), "shape": np.array([2, 4, 30]), "k": normal(1)}
    return saturating_reader(jq.load(build([conv, *nodes], arrays, outputs=outputs)), "t")


SIGMOID = helper.make_node("Sigmoid", ["t"], ["s"])
GATE = helper.make_node("Mul", ["s", "t"], ["y"])


def test_what_a_saturating_function_alone_reads() -> None:
    assert readers(SIGMOID, GATE) == ("Sigmoid", True)
    assert readers(SIGMOID, outputs=("s",)) == ("Sigmoid", False)
    moved = helper.make_node("Reshape", ["t", "shape"], ["r"]), helper.make_node("Tanh", ["r"], ["y"])
    assert readers(*moved) == ("Tanh", False)
    third = helper.make_node("HardSigmoid", ["t"], ["y"], alpha=1 / 6, beta=0.5)
    assert readers(third) == ("HardSigmoid", False)


def test_what_others_read_too() -> None:
    assert readers(SIGMOID, outputs=("s", "t")) is None
    assert readers(SIGMOID, helper.make_node("Relu", ["t"], ["y"]), outputs=("s", "y")) is None
    assert readers(SIGMOID, GATE, outputs=("s", "y")) is None  # a Sigmoid that is an output is no gate alone
    assert readers(SIGMOID, helper.make_node("Add", ["s", "t"], ["y"])) is None
    assert readers(SIGMOID, helper.make_node("Mul", ["t", "k"], ["y"]), outputs=("s", "y")) is None
    assert readers(helper.make_node("HardSigmoid", ["t"], ["y"])) is None  # of slope 0.2
    assert readers(helper.make_node("Relu", ["t"], ["y"])) is None
    assert readers(helper.make_node("Softmax", ["t"], ["y"])) is None


def model(gated: bool) -> onnx.ModelProto:
    weight = (np.eye(4) * np.array([1.0, 1, 1, -12])).astype(np.float32).reshape(4, 4, 1, 1)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["t"], name="conv"),
        helper.make_node("Sigmoid", ["t"], ["s" if gated else "y"]),
    ]
    return build([*nodes, GATE] if gated else nodes, {"w": weight}, x=("N", 4, 8, 8))


def data(count: int = 6) -> np.ndarray:
    x = np.random.default_rng(4).normal(size=(count, 4, 8, 8)).astype(np.float32)
    x[:, 3] = np.abs(x[:, 3])  # so that the last channel, times -12, is where the function is flat
    return x


def test_only_8_bits_of_searched_symmetric_scales_are_judged_so() -> None:
    graph = jq.load(model(True))
    assert focused_tensors(graph, presets["A8W8"]) == {("Sigmoid", True): ("t",)}
    assert focused_tensors(graph, presets["XINT8"]) == {("Sigmoid", True): ("t",)}
    for other in (
        presets["XINT8"].replace(strict_quark=True),
        presets["XINT8"].replace(method="nonoverflow"),
        presets["A8W8"].replace(strict_quark=True),
        presets["A8W8"].replace(method="percentile"),
        presets["A16W8"],
        presets["U8S8_AAWS"].replace(method="minmax"),
        presets["BF16"],
    ):
        assert focused_tensors(graph, other) == {}
    stats = jq.calibrate(jq.load(jq.zoo.path("fashion_resnet")), jq.zoo.calibration_set()[0][:2])
    assert not any(isinstance(o, ErrorsBehind) for o in stats.observers.values())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("factor", [1, 20])  # with 20, values reach beyond all candidates
def test_the_scale_loses_least_behind_the_function(gated: bool, factor: int, tmp_path: Path) -> None:
    f, graph, x, config = FUNCTIONS["Sigmoid", gated], jq.load(model(gated)), data(), presets["A8W8"]
    x[:, 3] *= factor
    t = x * np.array([1, 1, 1, -12], np.float32)[:, None, None]
    jq.calibrate(graph, x, config).save(tmp_path / "stats")
    stats = Stats.load(tmp_path / "stats")
    scale = float(jq.activation_qparams(graph, stats, config)["t"].scale)
    best = min(lost(f, t, 2 ** (7 - k / 2) / 127) for k in range(13))
    assert lost(f, t, scale) <= 1.05 * best < 0.5 * lost(f, t, np.abs(t).max() / 127)
    assert jq.make_plan(graph, stats, config)["t"].scale == np.float32(scale)
    assert jq.activation_ranges(stats, config)["t"] == stats.range("t")  # as onnxruntime's


@pytest.mark.parametrize("gated", [True, False])
def test_the_power_of_two_loses_least_behind_the_function(gated: bool) -> None:
    f, graph, x = FUNCTIONS["Sigmoid", gated], jq.load(model(gated)), data()
    t = x * np.array([1, 1, 1, -12], np.float32)[:, None, None]
    stats = jq.calibrate(graph, x, "XINT8")
    behind = int(jq.activation_qparams(graph, stats, "XINT8")["t"].exponent)
    losses = {e: lost(f, t, 2.0**e) for e in range(-8, 2)}
    assert losses[behind] <= 1.05 * min(losses.values())
    assert behind < stats.best_exponent("t"), "as without the function: the case shows nothing"


def test_where_nothing_is_flat_the_range_stays() -> None:
    graph, x = jq.load(model(True)), np.abs(data()[:, :4]) * np.array([200, 100, 100, -1e-3], np.float32)[:, None, None]
    config = presets["A8W8"]
    scale = jq.activation_qparams(graph, jq.calibrate(graph, x, config), config)["t"].scale
    assert scale == np.float32((x * np.array([1, 1, 1, -12], np.float32)[:, None, None]).max() / 127)
