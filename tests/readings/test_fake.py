"""The fake-quant reading against onnxruntime on the exported model, and as a function of its plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import jq
from jq.arithmetic.formats import INT8
from jq.arithmetic.numerics import power_of_two
from tests.sampling import sampled


@pytest.fixture(scope="module")
def images():
    return jq.zoo.calibration_set()[0]


@pytest.fixture(scope="module", params=sampled(jq.zoo.models(), 2))
def result(request, images):
    return jq.quantize(jq.zoo.path(request.param), images[:32])


def session(model):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_every_code_of_every_tensor_is_onnxruntimes(result, images):
    model = onnx.ModelProto.FromString(result.model.SerializeToString())
    quantizers = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    names = [n.input[0].removesuffix("_QuantizeLinear_Input") for n in quantizers]
    assert set(names) == set(result.plan.activations)
    model.graph.output.extend(onnx.ValueInfoProto(name=n.output[0]) for n in quantizers)
    x = {"input": images[-8:]}
    expected = session(model).run([n.output[0] for n in quantizers], x)
    outputs, seen = jq.fake_quant(result.graph, taps=names)(result.graph.params, result.plan, x)
    for name, codes in zip(names, expected, strict=True):
        found = result.plan[name]
        ours = np.rint(np.asarray(seen[name]) / found.scale) + found.zero_point
        np.testing.assert_array_equal(ours, codes, err_msg=name)
    np.testing.assert_array_equal(outputs["logits"], session(result.model).run(None, x)[0])


def test_packed_params_and_jit_give_the_same(result, images):
    qfn, x = jq.fake_quant(result.graph), {"input": images[-8:]}
    plain = qfn(result.graph.params, result.plan, x)["logits"]
    packed = jax.jit(qfn)(jq.pack(result.graph), result.plan, x)["logits"]
    np.testing.assert_array_equal(packed, plain)


def test_many_plans_in_one_call(result, images):
    """vmap over stacked plans is each plan by itself."""

    def coarser(name):
        found = result.plan[name]
        return result.plan.replace({name: jq.QParams(found.scale * 2, found.zero_point, found.grid)})

    plans = [result.plan, *(coarser(name) for name in list(result.plan.activations)[:2])]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plans)
    qfn, x = jq.fake_quant(result.graph), {"input": images[-4:]}
    together = jax.vmap(lambda plan: qfn(result.graph.params, plan, x)["logits"])(stacked)
    for plan, found in zip(plans, together, strict=True):
        np.testing.assert_array_equal(found, qfn(result.graph.params, plan, x)["logits"])
    assert not np.array_equal(together[0], together[1])


def test_gradients_go_straight_through(result, images):
    qfn, x = jq.fake_quant(result.graph), {"input": images[-4:]}
    weight = next(k for k in result.plan.weights if result.graph.params[k].ndim == 4)

    def loss(value, scale):
        found = result.plan[weight]
        plan = result.plan.replace({weight: jq.QParams(scale, found.zero_point, found.grid)})
        return jnp.square(qfn({**result.graph.params, weight: value}, plan, x)["logits"]).sum()

    by_value, by_scale = jax.grad(loss, (0, 1))(result.graph.params[weight], jnp.float32(result.plan[weight].scale))
    assert np.isfinite(by_value).all() and np.abs(by_value).max() > 0
    assert np.isfinite(by_scale) and by_scale != 0


def test_the_gradient_of_a_scale_is_that_of_lsq():
    """Rounding error inside the range, the bound outside: Esser et al., Learned Step Size Quantization."""
    x = jnp.array([0.3, 0.8, 99.0, -99.0])
    slope = jax.vmap(jax.grad(lambda s, v: jq.QParams(s, np.float32(0), INT8).fake_quant(v)), (None, 0))(0.5, x)
    expected = [round(0.3 / 0.5) - 0.3 / 0.5, round(0.8 / 0.5) - 0.8 / 0.5, 127, -128]
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(0.25, True), (2.0**-126, True), (2.0**40, True), (0.3, False), (np.float32([0.25, 0.25]), False)],
)
def test_powers_of_two(scale, expected):
    assert jq.QParams(np.float32(scale), np.int32(0), INT8).is_power_of_two is expected


def test_channels_and_codes_of_another_scale():
    x = np.float32([[0.3, 9.0], [0.3, 9.0]])
    channels = jq.QParams(np.float32([0.25, 4]), np.int32([0, 0]), INT8, axis=1)
    np.testing.assert_array_equal(channels.fake_quant(x), [[0.25, 8], [0.25, 8]])
    np.testing.assert_array_equal(channels.fake_quant(x.T, axis=0), [[0.25, 0.25], [8, 8]])
    moved = jq.QParams(power_of_two(-1), np.int32(0), INT8, coded=power_of_two(-3))
    np.testing.assert_array_equal(moved.fake_quant(np.float32([1.0])), [4.0])  # 8 codes of 1/8, read as halves
    np.testing.assert_array_equal(moved.stored(np.float32([1.0])), [8])


def test_an_unknown_tensor_is_named(result):
    with pytest.raises(jq.ConfigError, match=r"logit.* is not quantized.*logits"):
        result.plan["logit"]
    with pytest.raises(jq.ConfigError, match="not quantized"):
        result.plan.replace({"nothing": None})
