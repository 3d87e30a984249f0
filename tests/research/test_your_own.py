"""The templates of docs/guides/your_own.md: they run as they stand there, and do what they say."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jq
from jq.arithmetic.formats import INT8
from jq.plan import QParams
from tests.passes.models import build, node, normal
from tests.recovery.test_adaround import CASES, brute, random_form

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "your_own.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


@functools.cache
def guide() -> dict[str, Any]:
    """The names that the guide's code leaves, run from top to bottom."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks():
        exec(compile(block, str(GUIDE), "exec", dont_inherit=True), names)  # noqa: S102  our own page
    return names


def test_each_kind_takes_under_40_lines():
    assert len(blocks()) == 5 and all(block.count("\n") < 40 for block in blocks())


def test_the_observer_counts_zeros():
    g = guide()
    taps = list(g["sparse"])
    _, seen = jq.trace(g["graph"], taps=taps)(g["graph"].params, {"input": g["images"]})
    assert len(taps) > 20
    for tensor in taps:
        assert g["sparse"][tensor] == pytest.approx(np.mean(np.asarray(seen[tensor]) == 0), abs=2e-3), tensor


def test_the_search_clips_less_and_the_constraints_hold():
    g = guide()
    plan, careful, graph, config = g["plan"], g["careful"], g["graph"], g["whole"]
    moved = [t for t in plan.activations if float(plan[t].scale) != float(careful[t].scale)]
    assert moved and jq.npu.constraints.violations(graph, careful, config) == []
    assert all(careful[t].is_power_of_two for t in careful.activations)
    _, seen = jq.trace(graph, taps=["input"])(graph.params, {"input": g["images"]})
    x, found = np.asarray(seen["input"], np.float64), g["little_clipping"](g["stats"], plan, 0.01)["input"]
    scale, grid = float(found.scale), found.grid
    off = x - np.clip(np.rint(x / scale), grid.qmin - 128, grid.qmax - 128) * scale
    beyond = (x > (grid.qmax - 128) * scale) | (x < (grid.qmin - 128) * scale)
    assert np.sum(off[beyond] ** 2) <= 0.0101 * np.sum(off**2)


def test_scales_of_unknown_tensors_are_refused():
    g = guide()
    with pytest.raises(jq.ConfigError, match=r"Did you mean 'input'"):
        jq.make_plan(g["graph"], g["stats"], g["whole"], scales={"inputs": g["plan"]["input"]})


@pytest.mark.parametrize("case", CASES)
def test_the_rounding_is_better_than_nearest_and_on_the_grid(case):
    found, shape = CASES[case]
    form = random_form(2, shape[1], shape[2], shape[0], off=0.1)
    columns = np.random.default_rng(3).uniform(-3, 3, shape).astype(np.float32)
    scale = np.broadcast_to(np.asarray(found.scale).reshape((shape[0], 1, shape[2]) if found.axis == 0 else ()), shape)
    result = np.asarray(jax.jit(lambda r, c: r(c, found, form))(guide()["InTurn"](), columns))
    nearest = np.clip(np.rint(columns / scale), -127, 127) * scale
    assert float(form(result - columns)) < 0.9 * float(form(nearest - columns))
    np.testing.assert_allclose(result / scale, np.rint(result / scale), atol=1e-4)


def test_the_rounding_is_near_the_best_of_all():
    """It may go beyond up and down, so it may even be below the best of these."""
    ratios = []
    for seed in range(8):
        w, form, least = brute(seed)
        one = QParams(np.float32(0.25), np.int32(0), INT8.narrow)
        ratios.append(float(form(guide()["InTurn"]()(w, one, form) - w)) / least)
    assert np.median(ratios) < 1.3, ratios


def test_finetuning_takes_it():
    """Weights change, to codes of the plan; and a plain function does as well."""
    g = guide()
    changed = [k for k, a in g["params"].items() if not np.array_equal(a, g["graph"].params[k])]
    weights = [k for k in changed if k in g["tuned"].weights and g["graph"].params[k].ndim == 4]
    assert len(weights) > 5
    for name in weights:
        codes = np.asarray(g["params"][name]) / float(g["tuned"][name].scale)
        np.testing.assert_array_equal(codes, np.rint(codes))


def test_a_plain_function_rounds_too():
    arrays = {"w": normal(4, 3, 1, 1, seed=1), "b": normal(4, seed=2)}
    graph = jq.prepare(jq.load(build([node("Conv", ["x", "w", "b"], ["y"])], arrays, x=("N", 3, 4, 4))), "XINT8")
    x = normal(8, 3, 4, 4, seed=3)
    plan = jq.make_plan(graph, jq.calibrate(graph, x))
    calls, rounding = [], guide()["InTurn"](1)

    def watched(columns: Any, qparams: Any, form: Any) -> Any:
        calls.append(columns.shape)
        return rounding(columns, qparams, form)

    jq.finetune(graph, plan, x, jq.presets["XINT8"].replace(finetune="own:watched"), roundings={"watched": watched})
    assert calls == [(1, 3, 4)]


def test_the_target_floors():
    """A convolution in whole numbers, floored, as its input is."""
    arrays = {"w": normal(4, 3, 1, 1, seed=1), "b": normal(4, seed=2)}
    x = normal(8, 3, 4, 4, seed=3)
    result = jq.quantize(build([node("Conv", ["x", "w", "b"], ["y"])], arrays, x=("N", 3, 4, 4)), x, guide()["config"])
    y, _ = jq.integer.load(result.model, target=guide()["floors"]).explain({"x": x})
    plan, given = result.plan, result.graph.params
    at = {k: int(plan[k].exponent) for k in ("x", "w", "b", "y")}
    (weight, bias), codes = (
        (np.rint(np.asarray(given[k], np.float64) * 2.0 ** -at[k]) for k in ("w", "b")),
        np.clip(np.floor(x.astype(np.float64) * 2.0 ** -at["x"]), -128, 127),
    )
    total = np.einsum("nchw,oc->nohw", codes, weight[:, :, 0, 0]) * 2.0 ** (at["x"] + at["w"])
    total += (bias * 2.0 ** at["b"])[:, None, None]
    want = np.clip(np.floor(total * 2.0 ** -at["y"]), -128, 127) * 2.0 ** at["y"]
    np.testing.assert_array_equal(np.asarray(y["y"]), want)
    assert not np.array_equal(np.asarray(jq.integer.load(result.model, target="aie2_x1")({"x": x})["y"]), want)
