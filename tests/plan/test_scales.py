"""Exponents and scales against Quark's rules, written in plain numpy from its description (section a)."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import jq
from jq.arithmetic.formats import INT8, INT16, UINT8
from jq.arithmetic.numerics import fake_quant
from jq.config import QuantConfig
from jq.plan import QParams
from jq.plan.scales import minmse_exponents

pytestmark = pytest.mark.filterwarnings("error")

DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(0, 1, n),
    "relu": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n),
    "shifted": lambda rng, n: rng.uniform(3, 5, n),
    "negative": lambda rng, n: -np.exp(rng.standard_normal(n)),
    "outliers": lambda rng, n: rng.standard_normal(n) * np.where(rng.random(n) < 0.01, 60, 1),
    "cauchy": lambda rng, n: np.clip(rng.standard_cauchy(n), -1e4, 1e4),
    "constant": lambda rng, n: np.full(n, rng.uniform(-1, 1)),
    "powers of two": lambda rng, n: np.exp2(rng.integers(-9, 3, n)),
    "on the grid": lambda rng, n: rng.integers(-127, 128, n) / 8,
    "between the grid": lambda rng, n: (rng.integers(-120, 120, n) + 0.5) / 16,
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.02),
    "zeros": lambda rng, n: np.zeros(n),
}
SCALES = [1.0, 1e-30, 1e-5, 0.7, 333.0, 1e20, 1e30]


def made(name, seed, size, scale=1.0):
    return (DISTRIBUTIONS[name](np.random.default_rng(seed), size) * scale).astype(np.float32)


def quark_candidates(low, high, grid):
    """Positions p0 - 1 ... p0 + 3 around that of the symmetric scale."""
    reach = max(-np.float64(low), np.float64(high), 0)
    scale = np.float32(2 * reach / (grid.qmax - grid.qmin))
    scale = np.float32(1) if scale < np.finfo(np.float32).tiny else scale
    return int(np.rint(-np.log2(scale))) + np.array([-1, 0, 1, 2, 3])


def quark_costs(values, weights, positions, grid):
    zero_point = (grid.qmin + grid.qmax + 1) // 2
    costs = []
    for position in positions:
        scale = 2.0 ** -int(position)
        code = np.clip(np.rint(values / scale) + zero_point, grid.qmin, grid.qmax)
        costs.append(np.sum(weights * np.square(values - (code - zero_point) * scale)))
    return np.array(costs)


def assert_exponent(exponent, positions, costs):
    """The first of the least; sums in float32 may choose another whose cost is less than 1e-5 worse."""
    assert -exponent in positions
    best, found = int(np.argmin(costs)), int(np.flatnonzero(positions == -exponent)[0])
    assert found == best or costs[best] < costs[found] <= costs[best] * (1 + 1e-5), (positions, costs, -exponent)


def assert_minmse(exponent, x, grid):
    x = x.astype(np.float64).reshape(-1)
    positions = quark_candidates(x.min(initial=0), x.max(initial=0), grid)
    assert_exponent(int(exponent), positions, quark_costs(x, 1, positions, grid))


def quark_histogram(stream, bins):
    """The running histogram: the first sample's bins, then as many more of that width as are needed."""
    counts, edges = np.histogram(stream[0].astype(np.float64), bins)
    for x in stream[1:]:
        x = x.astype(np.float64)
        width = (edges[-1] - edges[0]) / counts.size
        left = max(0, int(np.ceil((edges[0] - x.min()) / width)))
        right = max(0, int(np.ceil((x.max() - edges[-1]) / width)))
        if left or right:
            edges = np.linspace(edges[0] - left * width, edges[-1] + right * width, counts.size + left + right + 1)
            counts = np.pad(counts, (left, right))
        counts = counts + np.histogram(x, edges)[0]
    return counts, edges


@pytest.fixture(scope="module")
def graph():
    """One tensor in, one out; small, so that a calibration takes milliseconds once it is compiled."""
    node = helper.make_node("Neg", ["x"], ["y"])
    value = helper.make_tensor_value_info("x", 1, ["N", 96])
    built = helper.make_graph([node], "g", [value], [helper.make_tensor_value_info("y", 1, ["N", 96])])
    return jq.load(helper.make_model(built, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def exponents(graph, stream, **options):
    stats = jq.calibrate(graph, np.stack(stream), QuantConfig(batch=4, **options))
    return {k: int(v.exponent) for k, v in jq.activation_qparams(graph, stats).items()}


class TestMinMSE:
    @given(
        st.lists(
            st.tuples(st.sampled_from(sorted(DISTRIBUTIONS)), st.integers(0, 999), st.sampled_from(SCALES)),
            min_size=8,
            max_size=8,
        )
    )
    @settings(max_examples=40, deadline=None)
    def test_of_weights(self, kinds):
        sizes = [1, 5, 300, 1000, 4095, 4096, 4097, 9000]
        arrays = [made(k, seed, size, scale) for (k, seed, scale), size in zip(kinds, sizes, strict=True)]
        for grid in (INT8.narrow, INT16.narrow):
            for exponent, array in zip(minmse_exponents(arrays, grid), arrays, strict=True):
                assert_minmse(exponent, array, grid)

    def test_of_many_weights_of_all_sizes_at_once(self):
        sizes = [0, 1, 2, 4095, 4096, 4097, 0, 8192, 12289, 7, 200_000, 1]
        arrays = [made(k, i, n) for i, (n, k) in enumerate(zip(sizes, sorted(DISTRIBUTIONS), strict=False))]
        arrays.append(np.float32(-0.3))  # a scalar
        arrays.append(made("laplace", 5, 3 * 5 * 7).reshape(3, 5, 7))
        arrays = [np.asarray(a) for a in arrays]
        found = minmse_exponents(arrays, INT8.narrow)
        for exponent, array in zip(found, arrays, strict=True):
            assert_minmse(exponent, array, INT8.narrow)
        alone = [int(minmse_exponents([a], INT8.narrow)[0]) for a in arrays]
        assert found.tolist() == alone
        order = np.random.default_rng(0).permutation(len(arrays))
        assert minmse_exponents([arrays[i] for i in order], INT8.narrow).tolist() == found[order].tolist()

    def test_of_no_weights(self, graph):
        assert minmse_exponents([], INT8.narrow).shape == (0,)
        assert jq.weight_qparams(graph) == {}

    @pytest.mark.parametrize("grid", [INT8.narrow, INT16.narrow], ids=repr)
    @pytest.mark.parametrize("size", [1, 4096, 5000])
    def test_of_zeros_is_position_minus_one(self, grid, size):
        assert minmse_exponents([np.zeros(size, np.float32)], grid).tolist() == [1]

    @pytest.mark.parametrize("shift", range(-4, 5))
    def test_of_equals_the_coarsest(self, shift):
        """Values that several grids hold exactly."""
        x = np.float32([96, -48, 32, 8, 0]) * np.float32(2.0**shift)
        positions = quark_candidates(x.min(), x.max(), INT8.narrow)
        costs = quark_costs(x.astype(np.float64), 1, positions, INT8.narrow)
        assert (costs == 0).sum() > 1
        assert -int(minmse_exponents([x], INT8.narrow)[0]) == positions[costs == 0][0]

    @given(
        st.sampled_from(sorted(DISTRIBUTIONS)),
        st.integers(0, 999),
        st.sampled_from(SCALES),
        st.floats(0.2, 5),
        st.booleans(),
    )
    @settings(max_examples=60, deadline=None)
    def test_of_activations(self, graph, name, seed, scale, growth, parts):
        x = made(name, seed, 6 * 96, scale).reshape(6, 96) * np.float32([[1], [1], [1], [1], [growth], [1]])
        found = exponents(graph, x[:, None].reshape(6, 96), error_parts=parts)
        assert_minmse(found["x"], x, UINT8)
        assert_minmse(found["y"], -x, UINT8)

    @given(st.sampled_from(sorted(DISTRIBUTIONS)), st.integers(0, 99), st.sampled_from([2.0, 6.0, 40.0, 1e3, 1e5]))
    @settings(max_examples=25, deadline=None)
    def test_of_activations_that_outgrow_the_first(self, graph, name, seed, growth):
        """The candidates are chosen from 32 samples; the others are much larger."""
        x = made(name, seed, 40 * 96).reshape(40, 96)
        x[32 + seed % 8] *= np.float32(growth)
        assert_minmse(exponents(graph, x)["x"], x, UINT8)

    def test_of_signed_activations(self, graph):
        for name in sorted(DISTRIBUTIONS):
            x = made(name, 3, 5 * 96).reshape(5, 96)
            assert_minmse(exponents(graph, x, activation=INT8)["x"], x, INT8.narrow)


class TestMinMSEHistogram:
    @given(
        st.sampled_from(sorted(DISTRIBUTIONS)),
        st.integers(0, 999),
        st.sampled_from([1.0, 1e-20, 0.3, 1e20]),
        st.lists(st.sampled_from([0.1, 0.9, 1.0, 1.3, 3.0]), min_size=1, max_size=5),
    )
    @settings(max_examples=50, deadline=None)
    def test_equals_a_running_histogram(self, graph, name, seed, scale, factors):
        stream = [made(name, seed + i, 96, f * scale) for i, f in enumerate(factors)]
        if np.ptp(stream[0]) < 0.04 * np.ptp(np.stack(stream)) and np.ptp(stream[0]):
            stream = stream[:1]  # hundreds of thousands of bins, growing to both sides with room to spare
        if not np.ptp(stream[0]) and np.ptp(np.stack(stream)) > 1:
            stream = stream[:1]  # bins of a unit's width for a constant
        assume(np.ptp(stream[0]) or np.abs(stream[0]).max() < 1e6)  # no room for 2048 bins: numpy raises
        counts, edges = quark_histogram(stream, 2048)
        x = np.stack(stream)
        centres = ((edges[1:] + edges[:-1]) / 2).astype(np.float32).astype(np.float64)
        positions = quark_candidates(x.min(), x.max(), UINT8)
        costs = quark_costs(centres, counts, positions, UINT8)
        assert_exponent(exponents(graph, stream, method="minmse_hist")["x"], positions, costs)

    def test_differs_from_minmse_where_bins_are_coarse(self, graph):
        """With few bins the centres decide, not the values."""
        x = np.resize(np.float32([0.0, 1.0]), (4, 96))
        counts, edges = np.histogram(x.astype(np.float64), 3)
        positions = quark_candidates(0, 1, UINT8)
        costs = quark_costs(
            ((edges[1:] + edges[:-1]) / 2).astype(np.float32).astype(np.float64), counts, positions, UINT8
        )
        assert -exponents(graph, x, method="minmse_hist", bins=3)["x"] == positions[np.argmin(costs)]


@given(st.sampled_from(sorted(DISTRIBUTIONS)), st.integers(0, 999), st.sampled_from(SCALES))
@settings(max_examples=40, deadline=None)
def test_nonoverflow_is_the_nearest_exponent_of_the_range(graph, name, seed, scale):
    x = made(name, seed, 3 * 96, scale).reshape(3, 96)
    found = exponents(graph, x, method="nonoverflow")
    assert -found["x"] == quark_candidates(x.min(), x.max(), UINT8)[1]
    assert -found["y"] == quark_candidates(-x.max(), -x.min(), UINT8)[1]


@pytest.fixture(scope="module")
def weighted():
    """Every kind of weight: with output channels on axis 0 or 1, shared by readers of both, with none."""
    rng = np.random.default_rng(1)
    shapes = {"conv": (6, 4, 3, 3), "bias": (6,), "transposed": (6, 5, 2, 2), "gemm": (5, 7), "gemm_t": (3, 7)}
    shapes |= {"matmul": (3, 3), "both": (3, 3), "alpha": ()}
    weights = {k: rng.laplace(size=s).astype(np.float32) for k, s in shapes.items()}
    weights["conv"][2] = 0
    weights["gemm"][:, 1] *= 1e-3
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "conv", "bias"], ["a"]),
        node("ConvTranspose", ["a", "transposed"], ["b"]),
        node("GlobalAveragePool", ["b"], ["c"]),
        node("Flatten", ["c"], ["d"]),
        node("Gemm", ["d", "gemm"], ["e"]),
        node("Gemm", ["e", "gemm_t"], ["f"], transB=1),
        node("MatMul", ["f", "matmul"], ["g"]),
        node("Gemm", ["g", "both"], ["h"], transB=1),
        node("MatMul", ["h", "both"], ["i"]),
        node("Mul", ["i", "alpha"], ["y"]),
    ]
    inputs, outputs = (helper.make_tensor_value_info(n, 1, None) for n in ("x", "y"))
    inputs = helper.make_tensor_value_info("x", 1, ["N", 4, 5, 5])
    built = helper.make_graph(
        nodes, "g", [inputs], [outputs], [numpy_helper.from_array(v, k) for k, v in weights.items()]
    )
    model = helper.make_model(built, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return jq.load(model), weights


class TestWeights:
    def test_unsigned_formats_are_refused_or_centred(self, weighted):
        graph, weights = weighted
        with contextlib.suppress(jq.ConfigError):
            found = jq.weight_qparams(graph, QuantConfig(weight=UINT8))["conv"]
            back = fake_quant(weights["conv"], found.scale, found.zero_point, found.grid)
            assert np.abs(back - weights["conv"]).max() < float(found.scale) * 64

    CHANNELS = {"conv": 0, "transposed": 1, "gemm": 1, "gemm_t": 0, "matmul": 1}  # noqa: RUF012

    def test_powers_of_two(self, weighted):
        graph, weights = weighted
        found = jq.weight_qparams(graph)
        assert found.keys() == weights.keys()
        for name, array in weights.items():
            assert_minmse(found[name].exponent, array, INT8.narrow)
            assert found[name].zero_point == 0 and found[name].axis is None and found[name].grid == INT8.narrow

    def test_powers_of_two_without_search(self, weighted):
        graph, weights = weighted
        for name, q in jq.weight_qparams(graph, QuantConfig(weight_method="minmax")).items():
            assert -int(q.exponent) == quark_candidates(weights[name].min(), weights[name].max(), INT8.narrow)[1]

    @pytest.mark.parametrize("per_channel", [False, True])
    def test_float_scales(self, weighted, per_channel):
        graph, weights = weighted
        found = jq.weight_qparams(graph, jq.presets["A8W8"].replace(per_channel=per_channel))
        for name, array in weights.items():
            axis = self.CHANNELS.get(name) if per_channel else None
            channels = [array] if axis is None else np.moveaxis(array, axis, 0)
            reach = np.array([np.abs(c).max() for c in channels], np.float64)
            scale = np.where(reach == 0, 1, 2 * reach / 254).astype(np.float32)
            assert found[name].axis == axis, name
            np.testing.assert_array_equal(found[name].scale, scale if axis is not None else scale[0])
            assert found[name].scale.dtype == np.float32 and not found[name].zero_point.any()
            assert np.shape(found[name].zero_point) == np.shape(found[name].scale)

    def test_of_other_params(self, weighted):
        graph, weights = weighted
        halved = {k: v / 4 for k, v in weights.items()}
        before, after = jq.weight_qparams(graph), jq.weight_qparams(graph, params=halved)
        assert all(int(after[k].exponent) == int(before[k].exponent) - 2 for k in weights)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_refuses_what_is_not_finite(self, weighted, bad):
        graph, weights = weighted
        damaged = weights | {"gemm": np.full_like(weights["gemm"], bad)}
        with pytest.raises(jq.ModelError, match="weight 'gemm' holds NaN or Inf"):
            jq.weight_qparams(graph, params=damaged)


class TestFloatActivations:
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("format", [INT8, UINT8], ids=repr)
    def test_minmax_equals_the_formula(self, graph, symmetric, format):
        for name in ("normal", "relu", "shifted", "negative", "zeros"):
            x = made(name, 0, 4 * 96).reshape(4, 96)
            config = jq.presets["A8W8"].replace(activation=format, symmetric=symmetric, batch=4)
            found = jq.activation_qparams(graph, jq.calibrate(graph, x, config))["x"]
            low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
            grid = format.narrow if symmetric else format
            if symmetric:
                low, high = -max(-low, high), max(-low, high)
            if low == high:
                assert (found.scale, found.zero_point) == (1, 0)
                continue
            np.testing.assert_allclose(found.scale, (high - low) / (grid.qmax - grid.qmin), rtol=1e-7)
            zero = grid.middle if symmetric else np.rint(grid.qmin - low / ((high - low) / (grid.qmax - grid.qmin)))
            assert found.zero_point == zero and found.grid == format  # which is where it saturates

    @pytest.mark.parametrize("method", ["percentile", "entropy", "mse", "layerwise_percentile"])
    def test_a_float_method_with_powers_of_two_is_its_nearest(self, graph, method):
        x = made("outliers", 0, 8 * 96).reshape(8, 96)
        config = jq.presets["A8W8"].replace(method=method, batch=4, percentile=99.0, percentiles=(99.0, 99.9))
        stats = jq.calibrate(graph, x, config)
        scale = jq.activation_qparams(graph, stats)["x"].scale
        powers = jq.activation_qparams(graph, stats, config.replace(scale="power_of_two"))["x"]
        assert 2**-0.5 <= float(powers.scale / scale) <= 2**0.5
        assert float(np.log2(powers.scale)).is_integer()
        assert 254 * float(scale) / 2 <= np.abs(x).max() * (1 + 1e-6)


def test_qparams_is_a_pytree_that_maps(rng):
    x = rng.standard_normal(64, np.float32)
    each = [QParams(np.float32(2.0**-e), np.int32(e), INT8) for e in (3, 5, 7)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    assert isinstance(stacked, QParams) and stacked.grid == INT8 and stacked.scale.shape == (3,)
    assert len(jax.tree.leaves(stacked)) == 2
    found = jax.vmap(lambda q: fake_quant(x, q.scale, q.zero_point, q.grid))(stacked)
    for q, y in zip(each, found, strict=True):
        codes = np.clip(np.rint(x / q.scale) + q.zero_point, -128, 127)
        np.testing.assert_array_equal(y, (codes - q.zero_point) * q.scale)
    assert stacked.exponent.tolist() == [-3, -5, -7]
    other = QParams(np.float32(1), np.int32(0), UINT8)
    assert jax.tree.structure(other) != jax.tree.structure(each[0])
    slope = jax.grad(lambda q: fake_quant(np.float32(3e3), q.scale, q.zero_point.astype(float), q.grid), allow_int=True)
    assert slope(QParams(np.float32(0.5), np.float32(0), INT8)).scale == 127


@pytest.mark.parametrize("method", ["minmse", "minmse_hist"])
def test_statistics_of_eight_bits_serve_sixteen(method):
    config = jq.presets["XINT8"].replace(method=method)
    wide = config.replace(activation=INT16, weight=INT16)
    graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), config)
    images = jq.zoo.calibration_set()[0][:32]
    found = jq.activation_qparams(graph, jq.calibrate(graph, images, config), wide)
    measured = jq.activation_qparams(graph, jq.calibrate(graph, images, wide), wide)
    assert {t: int(q.exponent) for t, q in found.items()} == {t: int(q.exponent) for t, q in measured.items()}
