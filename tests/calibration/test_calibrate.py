"""Calibration against numpy on onnxruntime's intermediate tensors, and against Quark's own results."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import jq
from jq.arithmetic.formats import UINT8
from jq.calibration.observed import focused_tensors
from jq.calibration.observers import HistogramObserver, Range
from jq.config import QuantConfig
from jq.recovery.equalization import predicted_noise
from tests.conftest import SHARED
from tests.plan.test_scales import assert_minmse, quark_candidates

OPTIMIZED = True  # results of the program that users run are the same for all sizes of batches

A8W8 = jq.presets["A8W8"]
node = helper.make_node


def built(nodes, shape, outputs, weights=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in dict(weights).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def tensors_of(model, x):
    """All tensors of all samples as onnxruntime computes them, one sample at a time."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    name = model.graph.input[0].name
    names = [o for n in model.graph.node for o in n.output if o]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    runs = [session.run(names, {name: x[i : i + 1]}) for i in range(len(x))]
    return {name: x} | {n: np.stack(v) for n, v in zip(names, zip(*runs, strict=True), strict=True)}


@pytest.fixture(scope="module")
def tiny():
    """Conv-Relu-Conv-Add, MatMul, Softmax, and a Clip."""
    rng = np.random.default_rng(3)
    weights = {
        "w1": rng.standard_normal((4, 2, 3, 3), np.float32) / 3,
        "b1": rng.standard_normal(4, np.float32),
        "w2": rng.standard_normal((2, 4, 1, 1), np.float32),
        "wm": rng.standard_normal((50, 6), np.float32),
        "low": np.float32(-0.5),
        "high": np.float32(1.5),
    }
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["conv"], pads=[1] * 4),
        node("Relu", ["conv"], ["relu"]),
        node("Conv", ["relu", "w2"], ["conv2"]),
        node("Add", ["conv2", "x"], ["add"]),
        node("Flatten", ["add"], ["flat"]),
        node("MatMul", ["flat", "wm"], ["matmul"]),
        node("Softmax", ["matmul"], ["softmax"]),
        node("Neg", ["matmul"], ["neg"]),
        node("Clip", ["neg", "low", "high"], ["clip"]),
    ]
    return built(nodes, ["N", 2, 5, 5], ["softmax", "clip"], weights)


@pytest.fixture(scope="module")
def graph(tiny):
    return jq.load(tiny)


@pytest.fixture(scope="module")
def data():
    return np.random.default_rng(4).standard_normal((17, 2, 5, 5), np.float32)


@pytest.fixture(scope="module")
def oracle(tiny, data):
    return tensors_of(tiny, data)


@pytest.fixture(scope="module")
def line():
    """One small tensor through one operator: what compiles in no time."""
    return jq.load(built([node("Tanh", ["x"], ["y"])], ["N", 8], ["y"]))


@pytest.fixture(scope="module")
def samples():
    return np.random.default_rng(5).standard_normal((48, 8), np.float32)


def bytes_of(stats, folder):
    path = Path(folder) / "stats"
    stats.save(path)
    return path.read_bytes()


def exponents(graph, stats):
    return {k: int(v.exponent) for k, v in jq.activation_qparams(graph, stats).items()}


def table(x, exponents):
    """Summed squared error of x on UINT8 around its zero point, in float64."""
    x, scale = x.astype(np.float64).reshape(-1), np.ldexp(1.0, exponents)[:, None]
    scaled = x / scale
    total = np.square((scaled - np.clip(np.rint(scaled), -128, 127)) * scale).sum(1)
    return total, np.square((scaled - np.clip(scaled, -128, 127)) * scale).sum(1)


def assert_like_numpy(stats, oracle, absent=()):
    assert set(stats.tensors) == set(oracle) - set(absent)
    for name in stats.tensors:
        x = oracle[name]
        np.testing.assert_allclose(stats.range(name), (x.min(), x.max()), rtol=1e-4, atol=1e-5, err_msg=name)
        if "errors" in stats.observers:
            found = stats.errors(name)
            total, clipped = table(x, found["exponent"])
            finest = np.ldexp(1.0, 2 * int(found["exponent"][-1]))
            np.testing.assert_allclose(found["total"], total, rtol=2e-2, atol=x.size * finest * 1e-3, err_msg=name)
            np.testing.assert_allclose(
                found["clipped"], clipped[: found["clipped"].size], rtol=2e-2, atol=x.size * finest * 1e-2, err_msg=name
            )
        else:
            moments = stats.rows(name, "moments")
            assert moments["count"].tolist() == [x.size]
            scale = np.abs(x).max()
            np.testing.assert_allclose(moments["total"], [x.sum(dtype=np.float64)], rtol=1e-4, atol=1e-4 * scale)
            np.testing.assert_allclose(moments["square"], [np.square(x, dtype=np.float64).sum()], rtol=1e-4)


class TestAgainstOnnxruntime:
    @pytest.mark.parametrize("parts", [False, True])
    def test_errors(self, graph, data, oracle, parts):
        """Without what a Relu or a Clip alone reads, whose range is the output's."""
        stats = jq.calibrate(graph, data, QuantConfig(batch=8, error_parts=parts))
        assert stats.samples == 17
        assert_like_numpy(stats, oracle, absent={"conv", "neg"})
        for name in stats.tensors:
            assert_minmse(stats.best_exponent(name), oracle[name], UINT8)

    @pytest.mark.parametrize(("config", "absent"), [(QuantConfig(method="nonoverflow"), {"conv", "neg"}), (A8W8, ())])
    def test_ranges_and_moments(self, graph, data, oracle, config, absent):
        assert_like_numpy(jq.calibrate(graph, data, config.replace(batch=8)), oracle, absent)

    def test_histograms(self, graph, data, oracle):
        stats = jq.calibrate(graph, data, QuantConfig(method="minmse_hist", bins=64, batch=8))
        for name in stats.tensors:
            found, x = stats.histogram(name), oracle[name].astype(np.float64)
            assert found.counts.sum() == x.size
            counts = np.histogram(x, found.edges)[0] if name == "x" else None
            if counts is not None:  # of the input all bits are known
                np.testing.assert_array_equal(found.counts, counts)
            else:
                cumulative = np.searchsorted(np.sort(x.ravel()), found.edges[1:-1])
                assert np.abs(np.cumsum(found.counts)[:-1] - cumulative).max() <= 3

    @pytest.mark.parametrize("method", ["minmse", "nonoverflow"])
    def test_bundled_model(self, method):
        path, images = jq.zoo.path("fashion_resnet"), jq.zoo.calibration_set()[0][:12]
        graph, found = jq.load(path), tensors_of(onnx.load(path), images)
        stats = jq.calibrate(graph, images, QuantConfig(method=method))
        cut = set(found) - set(stats.tensors)
        readers = {n.input[0]: n.op_type for n in onnx.load(path).graph.node}
        assert cut and all(readers[c] in ("Relu", "Clip") for c in cut)
        assert_like_numpy(stats, found, cut)

    @pytest.mark.parametrize("weight", [0.01, 0.5])
    def test_moving_average(self, graph, data, oracle, weight):
        config = QuantConfig(method="nonoverflow", moving_average=weight, batch=4)
        stats = jq.calibrate(graph, data, config)
        for name in stats.tensors:
            for found, reduce in zip(stats.range(name), (np.min, np.max), strict=True):
                m = [float(reduce(sample)) for sample in oracle[name]]
                average = functools.reduce(lambda v, new: v + weight * (new - v), m)
                np.testing.assert_allclose(found, average, rtol=1e-4, atol=1e-5)


class TestRules:
    def test_what_a_relu_or_clip_alone_reads_has_the_outputs_scale(self, graph, data):
        for method in ("minmse", "minmse_hist", "nonoverflow"):
            found = jq.activation_qparams(graph, jq.calibrate(graph, data, QuantConfig(method=method, batch=8)))
            assert found["conv"] is found["relu"] and found["neg"] is found["clip"]
            assert found["clip"].exponent == -6  # values of [-0.5, 1.5]

    def test_float_scales_too(self, graph, data, oracle):
        found = jq.activation_qparams(graph, jq.calibrate(graph, data, A8W8.replace(batch=8)))
        assert found["conv"].scale == found["relu"].scale
        np.testing.assert_allclose(found["relu"].scale, oracle["relu"].max() / 127, rtol=1e-5)

    def test_softmax_has_the_range_of_its_definition(self, graph, data):
        for method in ("minmse", "minmse_hist", "nonoverflow"):
            stats = jq.calibrate(graph, data, QuantConfig(method=method, batch=8))
            assert exponents(graph, stats)["softmax"] == -7
        found = jq.activation_qparams(graph, jq.calibrate(graph, data, A8W8.replace(symmetric=False, batch=8)))
        np.testing.assert_allclose(found["softmax"].scale, 1 / 255, rtol=1e-6)

    def test_with_another_reader_it_keeps_its_own(self, samples):
        nodes = [
            node("Mul", ["x", "four"], ["t"]),
            node("Clip", ["t", "low", "high"], ["y"]),
            node("Neg", ["t"], ["z"]),
        ]
        weights = {"four": np.float32(4), "low": np.float32(0), "high": np.float32(1)}
        graph = jq.load(built(nodes, ["N", 8], ["y", "z"], weights))
        found = exponents(graph, jq.calibrate(graph, samples, QuantConfig(method="nonoverflow")))
        reach = 4 * samples
        assert found["t"] == -quark_candidates(reach.min(), reach.max(), UINT8)[1] and found["y"] == -7

    def test_chains(self, samples):
        nodes = [node("Neg", ["x"], ["t"]), node("Relu", ["t"], ["r"]), node("Clip", ["r", "low", "high"], ["y"])]
        graph = jq.load(built(nodes, ["N", 8], ["y"], {"low": np.float32(0), "high": np.float32(0.5)}))
        found = exponents(graph, jq.calibrate(graph, samples))
        assert set(found) == {"x", "t", "r", "y"}
        assert found["r"] == found["y"] < found["t"]

    @pytest.mark.parametrize(
        "method",
        [
            "minmse",
            "nonoverflow",
            "minmse_hist",
        ],
    )
    def test_tensors_of_no_elements(self, samples, method):
        nodes = [node("Slice", ["x", "zero", "zero", "one"], ["none"]), node("Neg", ["x"], ["y"])]
        graph = jq.load(built(nodes, ["N", 8], ["y", "none"], {"zero": np.array([0]), "one": np.array([1])}))
        found = jq.activation_qparams(graph, jq.calibrate(graph, samples, QuantConfig(method=method)))
        assert np.isfinite(found["none"].scale) and found["none"].scale > 0


class Reader:
    """onnxruntime's CalibrationDataReader."""

    def __init__(self, x, size=1, rewind=False):
        self.x, self.size, self.at = x, size, 0
        if rewind:
            self.rewind = lambda: setattr(self, "at", 0)

    def get_next(self):
        if self.at >= len(self.x):
            return None
        self.at += self.size
        return {"x": self.x[self.at - self.size : self.at]}


class Again:
    """An iterable without a length, that raises after some samples in all."""

    def __init__(self, x, stop=None):
        self.x, self.left = x, math.inf if stop is None else stop

    def __iter__(self):
        for sample in self.x:
            if self.left <= 0:
                raise RuntimeError("the disk is gone")
            self.left -= 1
            yield {"x": sample[None]}


def forms(x, folder):
    np.save(folder / "x.npy", x)
    np.savez(folder / "x.npz", x=x)
    (folder / "each").mkdir()
    for i, sample in enumerate(x):
        np.save(folder / "each" / f"{i:03}.npy", sample[None])
    return {
        "dict": {"x": x},
        "list of samples": [{"x": s[None]} for s in x],
        "list of arrays": [s[None] for s in x],
        "reader with rewind": Reader(x, rewind=True),
        "iterable": Again(x),
        "npy": folder / "x.npy",
        "npz": str(folder / "x.npz"),
        "folder": folder / "each",
    }


class TestData:
    @pytest.mark.parametrize("method", ["minmse", "minmse_hist", "nonoverflow"])
    def test_forms_give_the_same_bytes(self, line, samples, method, tmp_path):
        config = QuantConfig(method=method, batch=8)
        expected = bytes_of(jq.calibrate(line, samples[:11], config), tmp_path)
        for name, form in forms(samples[:11], tmp_path).items():
            assert bytes_of(jq.calibrate(line, form, config), tmp_path) == expected, name

    @pytest.mark.parametrize("method", ["minmse", "minmse_hist", "nonoverflow"])
    def test_what_is_read_once_gives_the_same_exponents(self, line, samples, method):
        config = QuantConfig(method=method, batch=8)
        expected = exponents(line, jq.calibrate(line, samples, config))
        for form in (({"x": s[None]} for s in samples), Reader(samples), (s[None] for s in samples)):
            assert exponents(line, jq.calibrate(line, form, config)) == expected

    def test_float_methods_read_twice_or_say_so(self, line, samples):
        config = A8W8.replace(method="percentile", histogram_range="all")
        with pytest.raises(jq.DataError, match="twice"):
            jq.calibrate(line, iter([{"x": samples}]), config)
        found = [
            jq.calibrate(line, d, config) for d in (samples, [samples[:40], samples[40:]], Reader(samples, 6, True))
        ]
        for stats in found:
            counts, edges = np.histogram(np.abs(samples), 2048)
            np.testing.assert_array_equal(stats.histogram("x").counts, counts)
            np.testing.assert_array_equal(stats.histogram("x").edges, edges)

    @pytest.mark.parametrize("method", ["minmse", "minmse_hist", "nonoverflow"])
    def test_a_short_last_batch_counts_once(self, line, samples, method):
        x = samples[:17].copy()
        x[16] *= 1.25  # what fills the batch up would show
        one, *others = (jq.calibrate(line, x, QuantConfig(method=method, batch=b)) for b in (1, 8, 16, 32))
        for other in others:
            assert other.samples == one.samples == 17
            for name, state in one.states.items():
                for leaf, value in state.items():
                    exact = leaf in ("low", "high", "count", "counts")
                    np.testing.assert_allclose(other.states[name][leaf], value, rtol=0 if exact else 1e-5, atol=0)
            assert exponents(line, other) == exponents(line, one)

    def test_a_step_is_compiled_once(self, samples, caplog, monkeypatch):
        """Full and short batches, and a second run of the same graph."""
        monkeypatch.setenv("JQ_CACHE", "off")  # else it may lie on disk
        graph = jq.load(built([node("Sinh", ["x"], ["y"])], ["N", 8], ["y"]))
        config = QuantConfig(batch=8)

        def compiled(count):
            caplog.clear()
            with jax.log_compiles(), caplog.at_level(logging.DEBUG, "jax"):
                jq.calibrate(graph, samples[:count], config)
            return sum("Compiling jit(program" in r.getMessage() for r in caplog.records)

        assert compiled(43) == 1
        assert compiled(48) == compiled(17) == 0

    @pytest.mark.parametrize("form", [np.asarray, list, lambda x: iter(list(x))], ids=["array", "list", "iterator"])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_refuses_what_is_not_finite(self, line, samples, form, bad):
        x = samples[:, None].copy()
        x[41, 0, 3] = bad
        data = x[:, 0] if form is np.asarray else form(x)
        with pytest.raises(jq.DataError, match=r"sample 41.*'x'.*NaN or Inf"):
            jq.calibrate(line, data, QuantConfig(batch=8))

    def test_refuses_empty_data(self, line):
        for empty in ([], np.zeros((0, 8), np.float32), iter([]), Reader(np.zeros((0, 8)))):
            with pytest.raises(jq.DataError):
                jq.calibrate(line, empty)


@pytest.fixture(scope="module")
def logarithm():
    """A tensor so large that XLA's minimum and maximum drop NaN."""
    nodes = [node("Log", ["x"], ["log"]), node("Neg", ["log"], ["y"])]
    return jq.load(built(nodes, ["N", 131_073], ["y"]))


METHODS = [QuantConfig(method=m, batch=4) for m in ("minmse", "minmse_hist", "nonoverflow")] + [A8W8.replace(batch=4)]


class TestNotFinite:
    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("at", [0, 34])
    @pytest.mark.parametrize(("value", "kind"), [(-1.0, "NaN"), (0.0, "Inf")])
    @pytest.mark.parametrize("config", METHODS, ids=lambda c: c.method)
    def test_names_the_tensor_and_the_samples(self, logarithm, config, value, kind, at):
        x = np.full((36, 131_073), 2, np.float32)
        x[at, 70_000] = value
        # The first sample is also looked at by itself, for the range of a histogram.
        begin = at // 4 * 4
        found = rf"'log' has {kind} in samples {begin} to ({begin + 3}|0):"
        with pytest.raises(jq.DataError, match=found):
            jq.calibrate(logarithm, x, config)

    @pytest.mark.parametrize("size", [4, 200_000])
    @pytest.mark.parametrize("method", ["minmse", "minmse_hist", "nonoverflow"])
    def test_overflow(self, method, size):
        nodes = [node("Exp", ["x"], ["e"]), node("Neg", ["e"], ["n"]), node("Sub", ["e", "e"], ["d"])]
        graph = jq.load(built(nodes, ["N", size], ["n", "d"]))
        x = np.ones((3, size), np.float32)
        x[2, size // 2] = 100
        with pytest.raises(jq.DataError, match=r"tensor '[end]' has (Inf|NaN) in samples 2 to 2"):
            jq.calibrate(graph, x, QuantConfig(method=method, batch=1))


class TestGrowth:
    @pytest.mark.parametrize("factor", [3, 1000, 1e6])
    @pytest.mark.parametrize("batch", [8, 48])
    def test_outgrown_candidates_of_what_can_be_read_again(self, line, samples, factor, batch):
        x = samples.copy()
        x[40:] *= np.float32(factor)
        for data in (x, list(x[:, None]), Again(x)):
            stats = jq.calibrate(line, data, QuantConfig(batch=batch))
            assert stats.samples == 48
            assert_minmse(stats.best_exponent("x"), x, UINT8)
            assert_minmse(stats.best_exponent("y"), np.tanh(x), UINT8)
            found = stats.errors("x")
            np.testing.assert_allclose(found["total"], table(x, found["exponent"])[0], rtol=1e-4)

    def test_outgrown_candidates_of_what_is_read_once(self, line, samples):
        x = samples.copy()
        x[40:] *= 1000
        stats = jq.calibrate(line, ({"x": s[None]} for s in x), QuantConfig(batch=8))
        assert_minmse(stats.best_exponent("x"), x, UINT8)
        assert len(stats.errors("x")["total"]) == 16
        x[40:] *= 1000
        with pytest.raises(jq.DataError, match="tensor 'x' needs exponents beyond the candidates from the first 32"):
            jq.calibrate(line, ({"x": s[None]} for s in x), QuantConfig(batch=8))

    def test_clipping_is_no_proof_against_a_coarser_candidate(self, line):
        """The coarsest is missing and best: one value clips, many round alike there and at the next, and to 0 below."""
        x = np.full((5504, 8), 0.5, np.float32)
        x[0, 0], x[-1, -1] = 31, 1.4 * 127
        stats = jq.calibrate(line, x, QuantConfig(batch=1376))
        assert_minmse(stats.best_exponent("x"), x, UINT8)
        assert stats.best_exponent("x") == 1

    def test_all_zeros_at_first(self, line, samples):
        x = samples.copy()
        x[:40] = 0
        assert_minmse(jq.calibrate(line, x).best_exponent("x"), x, UINT8)
        assert exponents(line, jq.calibrate(line, x[:40])) == {"x": 1, "y": 1}

    @pytest.mark.parametrize("factors", [(1, 5), (4, 1, 30), (1, 2, 4, 8, 16)])
    def test_histograms_that_grow_equal_those_with_room(self, line, samples, factors, tmp_path):
        x = samples.copy()
        for i, factor in enumerate(factors):
            x[1 + 7 * i :] *= np.float32(factor) / (factors[i - 1] if i else 1)
        config = QuantConfig(method="minmse_hist", bins=64, batch=8)
        grown = jq.calibrate(line, x, config)
        with_room = jq.calibrate(line, x, config, observers={"histogram": HistogramObserver(bins=64, growth=255)})
        assert with_room.observers["histogram"].growth == 255 > grown.observers["histogram"].growth > 3
        for tensor in ("x", "y"):
            a, b = grown.histogram(tensor), with_room.histogram(tensor)
            np.testing.assert_array_equal(a.counts, b.counts)
            np.testing.assert_array_equal(a.edges, b.edges)
            assert a.counts.sum() == x.size
        np.testing.assert_array_equal(
            grown.histogram("x").counts, np.histogram(x.astype(float), grown.histogram("x").edges)[0]
        )
        assert grown.rows("x", "moments")["count"] == x.size


def test_histograms_that_would_grow_without_end(line, samples):
    """A first sample of next to nothing: bins enough for the others, or an error that names the tensor."""
    config = QuantConfig(method="minmse_hist", batch=8)
    grown = jq.calibrate(line, np.concatenate([samples[:1] / 20, samples]), config)
    assert grown.histogram("x").counts.sum() == 49 * 8
    with pytest.raises(jq.DataError, match=r"tensor 'x' exceeds .* bins"):
        jq.calibrate(line, np.concatenate([samples[:1] / 1e4, samples]), config)


class TestLike:
    @pytest.mark.parametrize("method", ["minmse", "minmse_hist", "nonoverflow"])
    def test_merged_runs_equal_one(self, line, samples, method):
        config = QuantConfig(method=method, batch=8)
        whole = jq.calibrate(line, samples, config)
        first = jq.calibrate(line, samples[:32], config)
        merged = first.merge(jq.calibrate(line, samples[32:], config, like=first))
        assert merged.samples == 48 and exponents(line, merged) == exponents(line, whole)
        for name, state in whole.states.items():
            for leaf, value in state.items():
                exact = leaf in ("low", "high", "count", "counts")
                np.testing.assert_allclose(merged.states[name][leaf], value, rtol=0 if exact else 1e-12, atol=0)

    def test_the_second_run_may_be_of_smaller_values(self, line, samples):
        x = samples.copy()
        x[24:] /= 16
        first = jq.calibrate(line, x[:24])
        merged = first.merge(jq.calibrate(line, x[24:], like=first))
        assert_minmse(merged.best_exponent("x"), x, UINT8)

    def test_the_second_run_may_grow_histograms(self, line, samples):
        config = QuantConfig(method="minmse_hist", bins=64)
        first = jq.calibrate(line, samples[:24], config)
        merged = first.merge(jq.calibrate(line, 9 * samples[24:], config, like=first))
        assert merged.histogram("x").counts.sum() == samples.size

    def test_no_value_is_lost_silently(self, line, samples):
        config = A8W8.replace(method="percentile", histogram_range="all", symmetric=False)
        first = jq.calibrate(line, samples[:24], config)
        with contextlib.suppress(jq.DataError):  # that would be right too
            merged = first.merge(jq.calibrate(line, 9 * samples[24:], config, like=first))
            assert merged.histogram("x").counts.sum() == samples.size

    def test_larger_values_than_the_candidates_serve(self, line, samples):
        first = jq.calibrate(line, samples[:24])
        second = jq.calibrate(line, 100 * samples, like=first)
        with pytest.raises(jq.DataError, match="exceeds the range of its candidate"):
            jq.activation_qparams(line, second)


class TestCheckpoint:
    @pytest.mark.parametrize("stop", [1, 2, 22, 40])
    @pytest.mark.parametrize("method", ["minmse", "minmse_hist", "nonoverflow", "grown"])
    def test_goes_on_with_the_same_bytes(self, line, samples, method, stop, tmp_path):
        config = QuantConfig(method="minmse_hist" if method == "grown" else method, batch=4)
        x = samples * np.where(np.arange(48) > 9, 20, 1).astype(np.float32)[:, None] if method == "grown" else samples
        # samples that are read before the stream begins: the head, for the inputs
        stopped = Again(x, stop + 1)
        path = tmp_path / "checkpoint"
        with pytest.raises(RuntimeError, match="disk"):
            jq.calibrate(line, stopped, config, checkpoint=path)
        if stop > 36:
            assert path.exists() and jq.Stats.load(path).samples % 4 == 0
        resumed = jq.calibrate(line, Again(x), config, checkpoint=path)
        assert not path.exists() and resumed.samples == 48
        assert bytes_of(resumed, tmp_path) == bytes_of(jq.calibrate(line, Again(x), config), tmp_path)

    def test_does_not_read_again_what_was_counted(self, line, samples, tmp_path):
        class Counting:
            again, read = True, 0

            def __iter__(self):
                for i, sample in enumerate(samples):
                    if i == self.stop:
                        raise RuntimeError("stopped")
                    yield {"x": sample[None]}

        data, seen = Counting(), []
        data.stop = 45
        with pytest.raises(RuntimeError):
            jq.calibrate(line, data, QuantConfig(batch=4), checkpoint=tmp_path / "c")
        seen = jq.Stats.load(tmp_path / "c")
        assert 32 <= seen.samples < 48
        data.stop = None
        assert jq.calibrate(line, data, QuantConfig(batch=4), checkpoint=tmp_path / "c").samples == 48

    @pytest.mark.parametrize("stop", [52, 60, 90])
    def test_in_the_second_pass(self, line, samples, stop, tmp_path):
        x = samples.copy()
        x[40:] *= 1000
        path = tmp_path / "checkpoint"
        with pytest.raises(RuntimeError, match="disk"):
            jq.calibrate(line, Again(x, stop), QuantConfig(batch=4), checkpoint=path)
        resumed = jq.calibrate(line, Again(x), QuantConfig(batch=4), checkpoint=path)
        assert_minmse(resumed.best_exponent("x"), x, UINT8)
        assert bytes_of(resumed, tmp_path) == bytes_of(jq.calibrate(line, Again(x), QuantConfig(batch=4)), tmp_path)

    def test_refuses_that_of_another_run(self, line, samples, tmp_path):
        path = tmp_path / "checkpoint"
        config = QuantConfig(batch=4)

        def stop():
            path.unlink(missing_ok=True)
            with pytest.raises(RuntimeError, match="disk"):
                jq.calibrate(line, Again(samples, 45), config, checkpoint=path)
            assert path.exists()

        other = jq.load(built([node("Sin", ["x"], ["y"])], ["N", 8], ["y"]))
        stop()
        for graph, data, options in [
            (line, Again(samples + 1), config),
            (line, samples[:40], config),
            (line, Again(samples), config.replace(method="nonoverflow")),
            (line, Again(samples), config.replace(batch=8)),
            (other, Again(samples), config),
        ]:
            with pytest.raises(jq.DataError, match="another model, config or data"):
                jq.calibrate(graph, data, options, checkpoint=path)
        assert jq.calibrate(line, Again(samples), config, checkpoint=path).samples == 48

    def test_refuses_that_of_another_constant(self, samples, tmp_path):
        """That differs in the middle of 2,000 elements, which numpy does not print."""
        indices = np.zeros(2000, np.int64)

        def gather(indices):
            nodes = [node("Gather", ["x", "i"], ["y"], axis=1)]
            return jq.load(built(nodes, ["N", 8], ["y"], {"i": indices}))

        path = tmp_path / "checkpoint"
        with pytest.raises(RuntimeError, match="disk"):
            jq.calibrate(gather(indices), Again(samples, 45), QuantConfig(batch=4), checkpoint=path)
        other = indices.copy()
        other[1000] = 7
        with pytest.raises(jq.DataError, match="another model, config or data"):
            jq.calibrate(gather(other), Again(samples), QuantConfig(batch=4), checkpoint=path)
        assert jq.calibrate(gather(indices), Again(samples), QuantConfig(batch=4), checkpoint=path).samples == 48

    def test_a_damaged_one_is_an_error_of_ours(self, line, samples, tmp_path):
        (tmp_path / "c").write_bytes(b"damaged")
        with pytest.raises(jq.DataError, match="is not a statistics file"):
            jq.calibrate(line, samples, checkpoint=tmp_path / "c")


@pytest.mark.parametrize("data", [np.zeros((3, 9), np.float32), "absent.npy", 5, [{"y": np.zeros((1, 8), np.float32)}]])
def test_refuses_data_that_do_not_fit(line, data):
    with pytest.raises(jq.DataError):
        jq.calibrate(line, data)


def test_observers_of_ones_own(graph, data, oracle):
    stats = jq.calibrate(graph, data, QuantConfig(method="nonoverflow"), observers={"channels": Range(1)})
    for name in ("x", "add"):
        np.testing.assert_allclose(
            stats.rows(name, "channels")["low"], oracle[name].min((0, 1, 3, 4) if name != "x" else (0, 2, 3)), rtol=1e-4
        )


def run(script, folder, *arguments, environment=(), wait=True):
    """A Python process of its own."""
    path = Path(folder) / "script.py"
    path.write_text(script)
    started = subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jq.__file__).parents[1])} | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return finish(started) if wait else started


def finish(process):
    try:
        output, _ = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"hangs after {process.communicate()[0]}")
    assert process.returncode == 0, output
    return output


DEVICES = """
import sys, jax, jq, numpy as np
from jq.config import QuantConfig
from jq.calibration.observers import HistogramObserver
from jq.recovery.equalization import predicted_noise
assert len(jax.devices()) == 8
graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
images = jq.zoo.calibration_set()[0][:13]
for count in (1, 8):
    mesh = jax.make_mesh((count,), ("batch",), devices=jax.devices()[:count])
    counts = {"histogram": HistogramObserver(growth=3)}
    stats = jq.calibrate(graph, images, QuantConfig(batch=6), mesh=mesh, observers=counts)
    stats.save(f"{sys.argv[1]}/{count}")
    other = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    seen = predicted_noise(other, jq.presets["XINT8"], images, mesh).seen
    np.savez(f"{sys.argv[1]}/seen.{count}.npz", **{f"{t}.{k}": v for t, c in seen.items() for k, v in vars(c).items()})
"""


def assert_same_statistics(a, b, graph):
    assert a.samples == b.samples and a.tensors == b.tensors
    for name, state in a.states.items():
        for leaf, value in state.items():
            exact = leaf in ("low", "high", "count", "counts")
            np.testing.assert_allclose(
                b.states[name][leaf], value, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-2
            )
    assert exponents(graph, a) == exponents(graph, b)


def test_eight_devices_equal_one(tmp_path):
    """13 samples in batches of 6, or of 8 on eight devices, the last of which see none."""
    run(DEVICES, tmp_path, tmp_path, environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    one, eight = (jq.Stats.load(tmp_path / count) for count in "18")
    assert one.histogram("input").counts.sum() == 13 * 28 * 28
    assert_same_statistics(one, eight, graph)
    with np.load(tmp_path / "seen.1.npz") as one, np.load(tmp_path / "seen.8.npz") as eight:
        assert one.files == eight.files and len(one.files) > 20
        assert_same_channels(one, eight)


def assert_same_channels(a, b):
    """What equalization makes of them depends on their last bits."""
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=1e-4, atol=1e-5, err_msg=name)


PROCESSES = """
import sys, jax
folder, port, rank = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
import numpy as np, jq
from jq.config import QuantConfig
from jq.recovery.equalization import predicted_noise
assert len(jax.devices()) == 2 and len(jax.local_devices()) == 1
mesh = jax.make_mesh((2,), ("batch",), devices=jax.devices())
graph, x = jq.load(f"{folder}/line.onnx"), np.load(f"{folder}/x.npy")
for method in ("minmse", "minmse_hist"):
    stats = jq.calibrate(graph, x, QuantConfig(method=method, batch=6), mesh=mesh, checkpoint=f"{folder}/checkpoint.{method}")
    stats.save(f"{folder}/{method}.{rank}")
other = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
seen = predicted_noise(other, jq.presets["XINT8"], jq.zoo.calibration_set()[0][:13], mesh).seen
np.savez(f"{folder}/seen.{rank}.npz", **{f"{t}.{k}": v for t, c in seen.items() for k, v in vars(c).items()})
jax.distributed.shutdown()
"""


def test_two_processes_equal_one(samples, tmp_path):
    onnx.save(built([node("Tanh", ["x"], ["y"])], ["N", 8], ["y"]), tmp_path / "line.onnx")
    np.save(tmp_path / "x.npy", samples[:45])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [run(PROCESSES, tmp_path, tmp_path, port, rank, wait=False) for rank in (0, 1)]
    try:
        for process in both:
            finish(process)
    finally:  # one waits for the other
        for process in both:
            process.kill()
    graph = jq.load(tmp_path / "line.onnx")
    for method in ("minmse", "minmse_hist"):
        one = jq.calibrate(graph, samples[:45], QuantConfig(method=method, batch=6))
        each = [jq.Stats.load(tmp_path / f"{method}.{rank}") for rank in (0, 1)]
        for stats in each:
            assert_same_statistics(one, stats, graph)
        assert (tmp_path / f"{method}.0").read_bytes() == (tmp_path / f"{method}.1").read_bytes()
    assert not list(tmp_path.glob("checkpoint*"))
    other = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    seen = predicted_noise(other, jq.presets["XINT8"], jq.zoo.calibration_set()[0][:13]).seen
    wanted = {f"{t}.{k}": v for t, c in seen.items() for k, v in vars(c).items()}
    for rank in (0, 1):
        with np.load(tmp_path / f"seen.{rank}.npz") as found:
            assert_same_channels(wanted, found)


@functools.cache
def reference(name):
    """The prepared graph, Quark's calibration data, and what Quark made of them."""
    stem = SHARED / "quark_reference" / name
    expected = json.loads(Path(f"{stem}.XINT8.json").read_text())
    return jq.prepare(jq.load(f"{stem}.onnx")), dict(np.load(f"{stem}.calib.npz")), expected


@pytest.mark.skipif(SHARED is None, reason="no folder shared/spec beside the repository: Quark's results are absent")
class TestQuark:
    @pytest.mark.parametrize("method", ["minmse_hist", "minmse"])
    @pytest.mark.parametrize("name", ["cnn", "ref", "zoo", "cle", "t_smallw"])
    def test_positions_of_activations(self, name, method):
        graph, data, expected = reference(name)
        stats = jq.calibrate(graph, data, QuantConfig(method=method, batch=8))
        found = {k: -v for k, v in exponents(graph, stats).items()}
        positions = {k: -round(math.log2(high / 127)) for k, (_, high) in expected["calib_ranges"].items()}
        inlined = {k for k in positions if k.startswith("_inlfunc_")}  # inside of what Quark takes apart
        # Where a function saturates we search behind it, which Quark does not.
        focused = {t for names in focused_tensors(graph, QuantConfig(method=method)).values() for t in names}
        compared = positions.keys() - inlined - focused
        assert {k: found[k] for k in compared} == {k: positions[k] for k in compared}
        assert len(inlined) <= 1 and len(compared) >= len(positions) - 5

    @pytest.mark.parametrize("name", ["cnn", "zoo"])
    def test_positions_of_weights(self, name):
        graph, _, expected = reference(name)
        found = {k: -int(v.exponent) for k, v in jq.weight_qparams(graph).items()}
        for made in graph.nodes:  # Quark calls a folded weight by the output of the BatchNormalization
            if made.op_type in ("Conv", "Gemm"):
                for suffix, weight in zip(("_weight", "_bias"), made.inputs[1:], strict=False):
                    found[made.outputs[0] + suffix] = found[weight]
        compared = {k: v["pos"] for k, v in expected["weights"].items() if not k.startswith("z_bn_alone")}
        assert {k: found[k.removesuffix("_quantized")] for k in compared} == compared
        assert len(compared) >= len(expected["weights"]) - 2

    @pytest.mark.parametrize("name", ["cnn", "ref"])
    def test_float_scales_of_weights(self, name):
        graph, _, _ = reference(name)
        expected = json.loads((SHARED / f"quark_reference/{name}.A8W8.json").read_text())["weights"]
        found = jq.weight_qparams(graph, A8W8)
        same = {k: v for k, v in expected.items() if k.removesuffix("_quantized") in found and v["dtype"] == "INT8"}
        assert len(same) >= 4
        for name, quark in same.items():
            np.testing.assert_allclose(found[name.removesuffix("_quantized")].scale, quark["scale"], rtol=1e-6)
