"""Ranges equal onnxruntime's calibrators, or the least of their cost by brute force."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.quantization import calibrate, quant_utils

from jq.arithmetic.formats import INT8, INT16, INT32, UINT8, UINT16, Integer
from jq.calibration.observers import Histogram
from jq.errors import ConfigError, ModelError
from jq.plan import ranges
from jq.plan.ranges import entropy, layerwise_percentile, mse, percentile, scale_zero_point, weight_range
from tests.conftest import SHARED

pytestmark = pytest.mark.filterwarnings("error")


GRIDS = [INT8, INT8.narrow, UINT8, INT16, INT16.narrow, UINT16]
SAMPLES = {
    "normal": lambda rng: rng.standard_normal(5000),
    "relu": lambda rng: np.maximum(rng.standard_normal(5000), 0),
    "laplace with outliers": lambda rng: np.r_[rng.laplace(size=3000), -17, 80],
    "uniform": lambda rng: rng.uniform(-1, 3, 3000),
    "positive": lambda rng: rng.uniform(3, 5, 1000),
    "negative": lambda rng: -np.exp(rng.standard_normal(1000)),
    "sigmoid": lambda rng: 1 / (1 + np.exp(-9 * rng.standard_normal(3000))),
    "two values": lambda rng: rng.choice([-0.25, 1.5], 1000),
    "few values": lambda rng: rng.standard_normal(7),
    "one value": lambda rng: np.array([-2.5]),
    "constant": lambda rng: np.full(100, 5.1),
    "negative constant": lambda rng: np.full(100, -5.1),
    "zeros": lambda rng: np.zeros(100),
    "tiny": lambda rng: 1e-30 * rng.standard_normal(3000),
    "too small for a scale": lambda rng: 1e-36 * rng.standard_normal(3000),
    "huge": lambda rng: 1e30 * rng.standard_normal(3000),
}
NAMES = sorted(SAMPLES)


def sample(name: str, seed: int = 0) -> np.ndarray:
    return SAMPLES[name](np.random.default_rng(seed)).astype(np.float32)


def oracle(x, method, *, bins, quantized_bins=128, percent=99.999, symmetric=False):
    """Return onnxruntime's histogram, the extremes it saw, and its range."""
    collector = calibrate.HistogramCollector(method, symmetric, bins, quantized_bins, percent, "same")
    for part in x if isinstance(x, list) else [x]:
        collector.collect({"x": part})
    counts, edges, low, high, *_ = collector.get_histogram_dict()["x"]
    return Histogram(counts, edges), low, high, collector.compute_collection_result()["x"][:2]


def histogram(x: np.ndarray, symmetric: bool, bins: int = 512) -> tuple[Histogram, np.float32, np.float32]:
    limit = np.abs(x).max()
    counts, edges = np.histogram(np.abs(x) if symmetric else x, bins, range=(0 if symmetric else -limit, limit))
    return Histogram(counts, edges.astype(np.float32)), x.min(), x.max()


def assert_same(ours, theirs):
    np.testing.assert_array_equal(ours, theirs)
    assert {np.asarray(x).dtype for x in ours} == {np.asarray(x).dtype for x in theirs}


def fake_quant(x, low, high, grid: Integer, symmetric: bool):
    scale, zero_point = scale_zero_point(low, high, grid, symmetric=symmetric)
    scale, zero_point = np.float64(scale), np.float64(zero_point)
    return (np.clip(np.rint(x / scale) + zero_point, grid.qmin, grid.qmax) - zero_point) * scale


def cost(h: Histogram, low, high, grid, symmetric, power=2):
    edges = h.edges.astype(np.float64)
    centres = (edges[1:] + edges[:-1]) / 2
    return np.sum(h.counts * np.abs(centres - fake_quant(centres, low, high, grid, symmetric)) ** power)


class TestPercentile:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("percent", [0, 50, 99, 99.99, 99.999, 100])
    def test_equals_onnxruntime(self, name, symmetric, percent):
        for bins in (1, 128, 2048):
            h, low, high, expected = oracle(sample(name), "percentile", bins=bins, percent=percent, symmetric=symmetric)
            assert_same(percentile(h, low, high, percent, symmetric=symmetric), expected)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_equals_onnxruntime_on_merged_histograms(self, symmetric):
        parts = [sample("uniform"), 2 * sample("normal"), sample("laplace with outliers")]
        h, low, high, expected = oracle(parts, "percentile", bins=200, percent=99.9, symmetric=symmetric)
        assert_same(percentile(h, low, high, 99.9, symmetric=symmetric), expected)

    def test_share_that_rounds_below_one_ends_at_the_last_edge(self):
        h = Histogram(np.ones(6, np.int64), np.arange(7, dtype=np.float32))
        assert np.cumsum(h.counts / h.counts.sum())[-1] < 1
        assert percentile(h, -6, 6, 100, symmetric=True) == (-6, 6)

    @given(st.sampled_from(NAMES), st.booleans(), st.lists(st.floats(0, 100), min_size=2))
    @settings(max_examples=40, deadline=None)
    def test_grows_with_percent_within_the_observed_range(self, name, symmetric, percents):
        h, low, high = histogram(sample(name), symmetric)
        found = np.array([percentile(h, low, high, p, symmetric=symmetric) for p in sorted(percents)])
        assert (found[:, 0] >= low).all() and (found[:, 1] <= high).all()
        assert (np.diff(found[:, 0]) <= 0).all() and (np.diff(found[:, 1]) >= 0).all()

    @pytest.mark.parametrize("percent", [-1, 101, np.nan])
    def test_refuses_what_is_no_percentage(self, percent):
        with pytest.raises(ConfigError, match="percent"):
            percentile(*histogram(sample("normal"), True), percent, symmetric=True)


class TestEntropy:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(("bins", "quantized_bins"), [(128, 128), (512, 128), (333, 31), (300, 255), (40, 1)])
    def test_equals_onnxruntime(self, name, bins, quantized_bins):
        h, low, high, expected = oracle(sample(name), "entropy", bins=bins, quantized_bins=quantized_bins)
        if name == "constant" and bins % quantized_bins:
            # All of it lies in the bins that remain when the others are merged: no divergence is finite.
            assert expected[0] > expected[1]
            expected = low, high
        assert_same(entropy(h, low, high, quantized_bins), expected)

    @pytest.mark.parametrize(
        ("name", "bins", "quantized_bins"),
        [("laplace with outliers", 2048, 128), ("relu", 2048, 128), ("normal", 8001, 7945)],  # its loops take seconds
    )
    def test_equals_onnxruntime_with_many_bins(self, name, bins, quantized_bins):
        h, low, high, expected = oracle(sample(name), "entropy", bins=bins, quantized_bins=quantized_bins)
        assert_same(entropy(h, low, high, quantized_bins), expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NAMES)
    def test_equals_onnxruntime_with_the_usual_8001_bins(self, name):
        h, low, high, expected = oracle(sample(name), "entropy", bins=8001, quantized_bins=128)
        assert_same(entropy(h, low, high, 128), (low, high) if name == "constant" else expected)

    def test_equals_onnxruntime_on_merged_histograms(self):
        parts = [sample("uniform"), 2 * sample("normal"), sample("laplace with outliers")]
        h, low, high, expected = oracle(parts, "entropy", bins=40, quantized_bins=64)
        assert h.counts.size > 40
        assert_same(entropy(h, low, high, 64), expected)

    @given(
        st.integers(0, 2**32), st.integers(2, 90), st.integers(1, 60), st.floats(0, 1), st.sampled_from([3, 1 << 40])
    )
    @settings(max_examples=60, deadline=None)
    def test_every_divergence_equals_onnxruntime_to_the_bit(self, seed, bins, quantized_bins, empty, most):
        """Through the narrowest of equals: histograms with many empty bins, and counts beyond float32's integers."""
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, most, bins) * (rng.random(bins) > empty)
        edges = np.linspace(-3, 3, bins + 1, dtype=np.float32)
        half = np.arange(quantized_bins // 2, bins // 2 + 1)
        if not counts.any() or not half.size:
            return
        start, stop = bins // 2 - half, np.minimum(bins // 2 + half + 1, bins)
        ours = ranges._divergence(counts, start, stop, quantized_bins)
        seen = []
        collector = calibrate.HistogramCollector("entropy", False, bins, quantized_bins, 0, "same")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calibrate.np, "argmin", lambda kl: seen.append(kl.copy()) or 0)
            collector.get_entropy_threshold((counts, edges, edges[0], edges[-1]), quantized_bins)
        np.testing.assert_array_equal(ours, seen[0])

    def test_is_minmax_with_one_candidate_or_none(self):
        for bins in (127, 128):
            h, low, high = histogram(sample("normal"), False, bins)
            assert entropy(h, low, high, 128) == (low, high)

    def test_cuts_outliers(self):
        low, high = entropy(*histogram(sample("laplace with outliers"), False, 2048), 128)
        assert low > -17 and high < 40

    def test_blocks_do_not_show(self, monkeypatch):
        arguments = histogram(sample("laplace with outliers"), False, 701)
        whole = entropy(*arguments, 128)
        monkeypatch.setattr(ranges, "_ENTROPY_BLOCK", 5000)
        assert entropy(*arguments, 128) == whole

    def test_refuses_no_bins(self):
        with pytest.raises(ConfigError, match="quantized_bins"):
            entropy(*histogram(sample("normal"), False), 0)


class TestMse:
    @given(st.sampled_from(NAMES), st.booleans(), st.sampled_from(GRIDS))
    @settings(max_examples=60, deadline=None)
    def test_never_worse_than_minmax_nor_wider(self, name, symmetric, grid):
        h, low, high = histogram(sample(name), symmetric)
        found = mse(h, low, high, grid, symmetric=symmetric)
        assert min(low, 0) <= found[0] <= found[1] <= max(high, 0)
        assert cost(h, *found, grid, symmetric) <= cost(h, low, high, grid, symmetric) * (1 + 1e-9)

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("grid", [INT8.narrow, UINT8])
    @pytest.mark.parametrize("name", ["normal", "relu", "laplace with outliers", "positive", "sigmoid"])
    def test_is_the_least_of_all_candidates(self, name, grid, symmetric):
        h, low, high = histogram(sample(name), symmetric)
        wide = np.array([min(low, 0), max(high, 0)])
        if symmetric:
            wide = np.abs(wide).max() * np.array([-1, 1])
        costs = [cost(h, *(wide * k / 128).astype(np.float32), grid, symmetric) for k in range(1, 129)]
        np.testing.assert_allclose(
            cost(h, *mse(h, low, high, grid, symmetric=symmetric), grid, symmetric), min(costs), rtol=1e-9
        )

    def test_of_equals_the_widest(self):
        """A value in the middle of its bin that every candidate of a coarse grid takes to zero."""
        h = Histogram(np.array([0, 0, 4]), np.array([-3, -1, 1, 3], np.float32) * 1e-40)
        assert mse(h, np.float32(0), np.float32(1e-40), UINT8, symmetric=False) == (0, np.float32(1e-40))

    def test_refuses_no_candidates(self):
        with pytest.raises(ConfigError, match="steps"):
            mse(*histogram(sample("normal"), True), INT8, symmetric=True, steps=0)


class TestLayerwisePercentile:
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize(("metric", "power"), [("mae", 1), ("mse", 2)])
    @pytest.mark.parametrize("name", NAMES)
    def test_is_the_first_least_percentile(self, name, symmetric, metric, power):
        h, low, high = histogram(sample(name), symmetric, 2048)
        percents = (90, 99, 99.9, 99.99)
        candidates = [percentile(h, low, high, p, symmetric=symmetric) for p in percents]
        costs = [cost(h, *c, INT8, False, power) for c in candidates]
        found = layerwise_percentile(h, low, high, INT8, symmetric=symmetric, percents=percents, metric=metric)
        np.testing.assert_allclose(cost(h, *found, INT8, False, power), min(costs), rtol=1e-9)
        assert found in candidates

    def test_metrics_differ_on_outliers(self):
        h, low, high = histogram(sample("laplace with outliers"), True, 2048)
        args = {"symmetric": True, "percents": (99, 100)}
        assert (
            layerwise_percentile(h, low, high, INT8, metric="mae", **args)[1]
            < layerwise_percentile(h, low, high, INT8, metric="mse", **args)[1]
        )

    @pytest.mark.parametrize("options", [{"metric": "mea"}, {"percents": ()}, {"percents": (99, 101)}])
    def test_refuses(self, options):
        with pytest.raises(ConfigError, match=r"metric|percents"):
            layerwise_percentile(*histogram(sample("normal"), True), INT8, symmetric=True, **options)


FLOATS = st.floats(-(2.0**126), 2.0**126, width=32) | st.sampled_from([0.0, -0.0, 1e-37, -3e-38, 1e-45])


class TestScaleZeroPoint:
    @given(FLOATS, FLOATS, st.sampled_from(GRIDS), st.booleans())
    @settings(max_examples=400, deadline=None)
    def test_equals_onnxruntime(self, a, b, grid, symmetric):
        low, high = np.float32(min(a, b)), np.float32(max(a, b))
        limits = (np.array(q, grid.dtype) for q in (grid.qmin, grid.qmax))
        zero_point, scale = quant_utils.compute_scale_zp(np.array(low), np.array(high), *limits, symmetric)
        assert_same(scale_zero_point(low, high, grid, symmetric=symmetric), (scale, zero_point))

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("grid", [*GRIDS, INT32], ids=repr)
    def test_is_elementwise_and_keeps_zero(self, grid, symmetric):
        low, high = np.array([[-1, 0, 2, -3e38], [-2, 0, 1e-45, -5]], np.float32), np.float32(4)
        scale, zero_point = scale_zero_point(low, high, grid, symmetric=symmetric)
        for i in np.ndindex(low.shape):
            assert_same((scale[i], zero_point[i]), scale_zero_point(low[i], high, grid, symmetric=symmetric))
        assert (zero_point >= grid.qmin).all() and (zero_point <= grid.qmax).all()

    def test_no_width(self):
        for symmetric in (True, False):
            assert scale_zero_point(0, 0, UINT8, symmetric=symmetric) == (1, 0)


class TestWeightRange:
    @pytest.mark.parametrize("axis", [None, 0, 1, -1])
    @pytest.mark.parametrize("method", ["minmax", "percentile", "mse"])
    def test_is_per_channel(self, rng, method, axis):
        w = rng.laplace(size=(3, 4, 2, 5)).astype(np.float32)
        low, high = weight_range(w, axis, method, grid=INT8.narrow, symmetric=True)
        assert low.shape == high.shape == (() if axis is None else (w.shape[axis],)) and low.dtype == np.float32
        channels = [w] if axis is None else np.moveaxis(w, axis, 0)
        each = [weight_range(np.array(c), None, method, grid=INT8.narrow, symmetric=True) for c in channels]
        np.testing.assert_array_equal(np.reshape([low, high], (2, -1)).T, each)
        if method == "minmax":
            assert each == [(c.min(), c.max()) for c in channels]

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("method", ["percentile", "mse"])
    @pytest.mark.parametrize("name", ["normal", "relu", "laplace with outliers", "positive", "tiny", "huge"])
    def test_is_the_least_of_all_candidates(self, name, method, symmetric):
        w = sample(name).astype(np.float64)
        wide = np.array([min(w.min(), 0), max(w.max(), 0)])
        if method == "percentile":
            candidates = [np.percentile(w, [100 - p, p]) for p in (99.9, 99.99, 99.999, 99.9999)]
        else:
            wide = np.abs(wide).max() * np.array([-1, 1]) if symmetric else wide
            candidates = [wide * k / 128 for k in range(1, 129)]
        unit = np.abs(w).max()

        def error(low, high):
            return np.mean(np.square((w - fake_quant(w, low, high, INT8.narrow, symmetric)) / unit))

        found = weight_range(w.astype(np.float32), None, method, grid=INT8.narrow, symmetric=symmetric)
        np.testing.assert_allclose(error(*found), min(error(*c) for c in candidates), rtol=1e-4)

    @pytest.mark.parametrize("axis", [None, 0])
    def test_blocks_do_not_show(self, rng, axis, monkeypatch):
        w = rng.standard_normal((7, 50)).astype(np.float32)
        whole = weight_range(w, axis, "mse", grid=INT8, symmetric=False)
        for block in (1, 20, 120):
            monkeypatch.setattr(ranges, "_WEIGHT_BLOCK", block)
            np.testing.assert_array_equal(weight_range(w, axis, "mse", grid=INT8, symmetric=False), whole)

    @pytest.mark.parametrize("method", ["minmax", "percentile", "mse"])
    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 2), ()])
    def test_zeros_and_empty(self, method, shape):
        for axis in (None, 0)[: 1 + bool(shape)]:
            low, high = weight_range(np.zeros(shape, np.float16), axis, method, grid=INT8, symmetric=False)
            assert low.dtype == high.dtype == np.float32 and not low.any() and not high.any()

    def test_refuses(self):
        with pytest.raises(ConfigError, match="Did you mean 'minmax'"):
            weight_range(np.ones(3), None, "min_max", grid=INT8, symmetric=True)
        for bad in (np.nan, np.inf):
            with pytest.raises(ModelError, match="NaN or Inf"):
                weight_range(np.array([1, bad], np.float32), None, grid=INT8, symmetric=True)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bins", [1, 2, 128, 333])
def test_degenerate_histograms_have_a_range(bins, symmetric):
    empty = Histogram(np.zeros(bins, np.int64), np.linspace(-1, 1, bins + 1, dtype=np.float32))
    for name in ("zeros", "constant", "negative constant", "one value", "too small for a scale", "huge", None):
        arguments = histogram(sample(name), symmetric, bins) if name else (empty, np.float32(0), np.float32(0))
        found = [
            percentile(*arguments, symmetric=symmetric),
            layerwise_percentile(*arguments, UINT8, symmetric=symmetric),
            mse(*arguments, UINT8, symmetric=symmetric),
            entropy(*arguments, 128),
        ]
        assert np.isfinite(found).all()
        assert name or not np.any(found)
        scale, _ = scale_zero_point(*np.array(found).T, UINT8, symmetric=symmetric)
        assert np.isfinite(scale).all() and (scale > 0).all()


@pytest.mark.skipif(SHARED is None, reason="no folder shared/spec beside the repository: reference ranges are absent")
@pytest.mark.parametrize("name", ["cnn", "ref"])
def test_reference_ranges(name):
    """The ranges that onnxruntime's calibrators gave for whole models."""
    expected = {
        m: json.loads((SHARED / f"ort_reference/{name}.ranges.{m}.json").read_text())
        for m in ("MinMax", "Percentile", "Entropy")
    }
    tensors = activations(SHARED / f"quark_reference/{name}", sorted(expected["MinMax"]))
    equal = 0
    for tensor, x in tensors.items():
        low, high = x.min(), x.max()
        limit = np.abs(x).max()
        magnitudes = Histogram(*np.histogram(np.abs(x), 2048))
        signed = Histogram(*np.histogram(x, 128, range=(-limit, limit)))
        found = {
            "MinMax": weight_range(x, None, grid=INT8, symmetric=False),
            "Percentile": percentile(magnitudes, low, high, 99.999, symmetric=True),
            "Entropy": entropy(signed, low, high, 128),
        }
        # Convolutions of onnxruntime differ by a last bit between processors and thread counts.
        same_input = (low, high) == tuple(expected["MinMax"][tensor])
        equal += same_input
        for method, limits in found.items():
            np.testing.assert_allclose(limits, expected[method][tensor], rtol=0 if same_input else 1e-6)
    assert equal > len(tensors) / 2


def activations(stem: Path, names: list[str]) -> dict[str, np.ndarray]:
    model = onnx.load(f"{stem}.onnx")
    inputs = dict(np.load(f"{stem}.calib.npz"))
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in inputs)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    count = len(next(iter(inputs.values())))
    runs = [session.run(None, {k: v[i : i + 1] for k, v in inputs.items()}) for i in range(count)]
    outputs = {o.name: np.stack(x) for o, x in zip(session.get_outputs(), zip(*runs, strict=True), strict=True)}
    return {n: inputs[n] if n in inputs else outputs[n] for n in names}
