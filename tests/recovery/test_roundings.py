"""Roundings on the quadratic form of a layer: what they give is on the grid, and better than the nearest codes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jq
from jq.arithmetic.formats import INT2, INT4
from jq.plan import QParams
from jq.recovery.descent import CoordinateDescent
from jq.recovery.feedback import GPFQ, GPTQ
from jq.recovery.flexround import FlexRound
from jq.recovery.quadratic_form import Form
from jq.recovery.rounding import compiled, nearest
from tests.sampling import sampled

ROUNDINGS = [GPTQ(), GPFQ(), FlexRound(), CoordinateDescent()]
W4A4 = jq.presets["W4A4"]


def named(value: object) -> str:
    return type(value).__name__


def layer(inputs: int, outputs: int, groups: int = 1, seed: int = 0) -> tuple[jax.Array, Form]:
    """Weights (groups, inputs, outputs), and the form of correlated inputs after a ReLU."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((groups, 500, 4)) @ rng.standard_normal((groups, 4, inputs))
    x = np.maximum(x + 0.3 * rng.standard_normal(x.shape), 0)
    mean = x.mean(1, keepdims=True)
    a = np.einsum("gpk,gpl->gkl", x - mean, x - mean) / x.shape[1]
    w = rng.standard_normal((groups, inputs, outputs)) / np.sqrt(inputs)
    zeros = jnp.zeros((groups, inputs, outputs))
    form = Form(jnp.float32(a), zeros, jnp.float32(0), jnp.float32(mean), np.zeros((groups, 1, outputs), np.float32))
    return jnp.float32(w), form


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=named)
@pytest.mark.parametrize(("inputs", "groups"), [(48, 1), (9, 5)])
def test_less_error_than_the_nearest_codes(rounding, inputs, groups):
    w, form = layer(inputs, 16, groups)
    qparams = QParams(np.float32(2**-4), np.int32(0), INT4.narrow)
    rounded = np.asarray(jax.jit(lambda r: r(w, qparams, form))(compiled(rounding)))
    codes = rounded / qparams.scale
    assert np.array_equal(codes, np.rint(codes)) and np.abs(codes).max() <= 7
    assert form(rounded - w) < 0.99 * form(nearest(w, qparams) - w)


@pytest.mark.parametrize("rounding", [GPTQ(), GPFQ()], ids=named)
def test_an_uncorrelated_input_leaves_the_nearest_codes(rounding):
    w, form = layer(6, 8)
    form = Form(jnp.eye(6)[None], form.r, form.c, form.mean_x, form.mean_e)
    qparams = QParams(np.float32(2**-3), np.int32(0), INT4.narrow)
    assert np.allclose(rounding(w, qparams, form), nearest(w, qparams))


@pytest.mark.parametrize("rounding", [GPTQ(damping=1e-6), GPFQ()], ids=named)
def test_two_inputs_by_hand(rounding):
    """Of two equal inputs, the second takes back what rounding of the first adds."""
    w = jnp.float32([[[0.4], [0.4]]])
    a = jnp.float32([[[1.0, 0.999], [0.999, 1.0]]])
    zero = jnp.zeros((1, 2, 1))
    form = Form(a, zero, jnp.float32(0), np.zeros((1, 1, 2), np.float32), np.zeros((1, 1, 1), np.float32))
    qparams = QParams(np.float32(1), np.int32(0), INT4.narrow)
    assert np.asarray(rounding(w, qparams, form)).ravel().tolist() == [0, 1]  # a sum of 1 for 0.8; nearest is 0


def test_errors_by_output_add_up():
    w, form = layer(12, 4, 3)
    d = 0.1 * np.random.default_rng(1).standard_normal(w.shape).astype(np.float32)
    assert np.isclose(form.by_output(d).sum() + form.c, form(d), rtol=1e-5)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return jq.zoo.calibration_set()[0][:48]


@pytest.fixture(scope="module")
def evaluation() -> np.ndarray:
    return jq.zoo.evaluation_set()[0][:400]


class TestLowBits:
    @staticmethod
    def sqnr(result: jq.Result, x: np.ndarray) -> float:
        graph = jq.load(jq.zoo.path("fashion_resnet"))
        want = np.asarray(jq.trace(graph)(graph.params, {"input": x})["logits"], np.float64)
        have = jq.fake_quant(result.graph)(result.graph.params, result.plan, {"input": x})["logits"]
        return float(10 * np.log10(np.square(want).sum() / np.square(want - have).sum()))

    @pytest.mark.parametrize("preset", ["W4A8", "W4A4", "W2A4"])
    def test_formats(self, preset, images):
        result = jq.quantize(jq.zoo.path("fashion_resnet"), images, preset)
        bits = {"W4A8": (4, 8), "W4A4": (4, 4), "W2A4": (2, 4)}[preset]
        plan = result.plan
        grids = [q.grid for q in plan.weights.values() if q.grid.bits < 32]
        assert (grids[0].bits, grids[-1].bits, min(g.bits for g in grids)) == (8, 8, bits[0])
        assert (plan["input"].grid.bits, plan["logits"].grid.bits) == (8, 8)
        assert min(q.grid.bits for q in plan.activations.values()) == bits[1]
        for qparams in plan.weights.values():
            if qparams.grid.bits < 32:
                exponents = np.log2(np.asarray(qparams.scale, np.float64))
                assert np.ndim(qparams.scale) == 1 and np.array_equal(exponents, np.rint(exponents))

    def test_positive_tensors_have_all_codes(self, images):
        result = jq.quantize(jq.zoo.path("fashion_resnet"), images, "W4A4")
        graph = result.graph
        relus = [n.outputs[0] for n in graph.nodes if n.op_type == "Relu"]
        zeros = {t: int(result.plan[t].zero_point) for t in relus if result.plan[t].grid.bits == 4}
        assert zeros and set(zeros.values()) == {0}

    def test_the_scale_is_the_best_of_the_candidates(self):
        """Each channel's exponent by its own error, against all candidates by hand."""
        from jq.plan.scales import weight_qparams

        graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
        name = "stem.weight"
        w = np.asarray(graph.params[name], np.float64)
        scale = np.asarray(weight_qparams(graph, W4A4, {name: graph.params[name]})[name].scale)
        for channel, s in zip(w, scale, strict=True):
            errors = {
                e: np.square(channel - np.clip(np.rint(channel * 2.0**-e), -7, 7) * 2.0**e).sum() for e in range(-9, 2)
            }
            assert np.isclose(errors[round(np.log2(s))], min(errors.values()))

    def test_exponents_of_weights_are_worth_decibels(self, images, evaluation):
        plain, tuned = (
            self.sqnr(
                jq.quantize(
                    jq.zoo.path("fashion_resnet"),
                    images,
                    jq.presets["W2A4"].replace(finetune="descent", tune_weight_exponents=value),
                ),
                evaluation,
            )
            for value in (False, True)
        )
        assert tuned > plain + 1, (plain, tuned)

    @pytest.mark.parametrize("stage", sampled(["descent", "block"], 2))
    def test_constraints_hold_with_tuned_exponents(self, stage, images):
        config = jq.presets["XINT8"].replace(finetune=stage, tune_weight_exponents=True, finetune_steps=8)
        result = jq.quantize(jq.zoo.path("fashion_resnet"), images, config)
        assert jq.npu.constraints.violations(result.graph, result.plan, config) == []
        assert all(q.is_power_of_two for q in result.plan.weights.values())

    def test_the_npu_does_not_take_them(self):
        findings = {
            preset: {f.rule for f in jq.lint(jq.zoo.path("fashion_resnet"), preset)} for preset in ("W4A8", "XINT8")
        }
        assert "research-format" in findings["W4A8"] and "research-format" not in findings["XINT8"]

    @pytest.mark.parametrize("option", ["per_channel", "symmetric", "weight_symmetric"])
    def test_they_need_a_config_without_constraints(self, option):
        value = option == "per_channel"
        with pytest.raises(jq.ConfigError, match="constraints=\\(\\)"):
            jq.presets["XINT8"].replace(**{option: value})
        jq.presets["XINT8"].replace(constraints=(), **{option: value})


def test_codes_of_two_bits():
    assert [INT2.qmin, INT2.qmax, INT2.narrow.qmin] == [-2, 1, -1] and INT2.dtype == np.dtype("int4")
    for low, high in itertools.pairwise(range(INT2.qmin, INT2.qmax + 1)):
        assert high - low == 1
