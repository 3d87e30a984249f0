"""Observers: their laws, and what they see against numpy in float64 and onnxruntime's collectors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnxruntime.quantization import calibrate

from jq.arithmetic.exponents import base_exponent
from jq.arithmetic.formats import INT8, INT16, UINT8
from jq.calibration.observers import (
    TIE_EXPONENTS,
    ErrorTable,
    HistogramObserver,
    Moments,
    MovingRange,
    Observer,
    Range,
    Ties,
)

pytestmark = pytest.mark.filterwarnings("error")


def exact_leaves(observer):
    """What merges without rounding; the other leaves are float sums."""
    sums = {"total", "square", "sums", "decay"} | ({"low", "high"} if type(observer) is MovingRange else set())
    return set(observer.init(1, observer.place(np.zeros(1), np.ones(1)))) - sums


@functools.cache
def compiled(observer: Observer):
    return jax.jit(observer.observe)


def observed(observer, x, place=()):
    """What the device sees, as the host adds it up: in 64 bits."""
    used = {k: jnp.asarray(v) for k, v in dict(place).items() if k != "edges"}
    return wide(compiled(observer)(jnp.asarray(x), used))


def wide(state):
    kinds = {"i": np.int64, "f": np.float64}
    return {k: np.asarray(v, kinds[np.asarray(v).dtype.kind]) for k, v in state.items()}


def folded(observer, parts, place, rows):
    return functools.reduce(observer.merge, (observed(observer, x, place) for x in parts), none(observer, place, rows))


def none(observer, place, rows):
    return wide(observer.init(rows, place))


def assert_states(a, b, exact, rtol=1e-6):
    assert a.keys() == b.keys()
    for k in a:
        assert a[k].shape == b[k].shape, k
        np.testing.assert_allclose(a[k], b[k], rtol=0 if k in exact else rtol, atol=0 if k in exact else 1e-30)


LAWFUL = [
    Range(),
    Range(absolute=True),
    Range(1),
    Range(-1, absolute=True),
    MovingRange(weight=0.25),
    MovingRange(0, weight=0.01),
    Moments(),
    Moments(1),
    ErrorTable(grid=UINT8, candidates=6),
    ErrorTable(grid=INT8.narrow, candidates=5, parts=5),
    HistogramObserver(bins=16, growth=3),
    HistogramObserver(bins=7, growth=5, absolute=True, double=False),
    HistogramObserver(1, bins=8, growth=3, centred=True),
]
STREAMS = st.lists(
    arrays(np.float32, (3, 4), elements=st.integers(-64, 64).map(lambda i: i / 8)), min_size=1, max_size=6
)


class TestLaws:
    @pytest.mark.parametrize("observer", LAWFUL, ids=repr)
    @given(stream=STREAMS, data=st.data())
    @settings(max_examples=25, deadline=None)
    def test_data_split_anywhere_give_the_same_state(self, observer, stream, data):
        rows = observer.rows((3, 4))
        place = observer.place(np.full(rows, -2.0), np.full(rows, 2.0))
        whole = folded(observer, stream, place, rows)
        cut = data.draw(st.integers(0, len(stream)))
        halves = [folded(observer, part, place, rows) for part in (stream[:cut], stream[cut:])]
        assert_states(observer.merge(*halves), whole, exact_leaves(observer))
        # right to left: with the law above, merge is associative
        from_right = none(observer, place, rows)
        for x in reversed(stream):
            from_right = observer.merge(observed(observer, x, place), from_right)
        assert_states(from_right, whole, exact_leaves(observer))

    @pytest.mark.parametrize("observer", LAWFUL, ids=repr)
    def test_no_data_merge_as_nothing(self, observer, rng):
        x = rng.standard_normal((3, 4), np.float32)
        rows = observer.rows(x.shape)
        place = observer.place(np.full(rows, -2.0), np.full(rows, 2.0))
        state, empty = observed(observer, x, place), none(observer, place, rows)
        for merged in (observer.merge(empty, state), observer.merge(state, empty)):
            assert_states(merged, state, exact=set(state))
        assert_states(observer.merge(empty, empty), empty, exact=set(empty))

    @pytest.mark.parametrize("observer", LAWFUL, ids=repr)
    def test_device_and_host_merge_alike_and_keep_the_structure(self, observer, rng):
        x, y = rng.standard_normal((2, 3, 4), np.float32)
        rows = observer.rows(x.shape)
        place = observer.place(np.full(rows, -2.0), np.full(rows, 2.0))
        used = {k: jnp.asarray(v) for k, v in place.items() if k != "edges"}
        init, a, b = observer.init(rows, used), compiled(observer)(x, used), compiled(observer)(y, used)
        on_device = jax.jit(observer.merge)(a, b)
        shapes = [jax.tree.map(lambda v: (v.shape, v.dtype), s) for s in (init, a, on_device)]
        assert shapes[0] == shapes[1] == shapes[2]
        assert_states(wide(on_device), observer.merge(wide(a), wide(b)), exact_leaves(observer))
        assert all(isinstance(v, np.ndarray) for v in observer.merge(wide(a), wide(b)).values())
        updated = observer.update(a, jnp.asarray(y), used)
        assert_states(wide(updated), wide(on_device), exact_leaves(observer))

    def test_merge_keeps_the_order_of_the_data(self):
        observer = MovingRange(weight=0.5)
        first, second = (observed(observer, np.full(2, v, np.float32)) for v in (1, 3))
        assert observer.finish(observer.merge(first, second))["low"] == 2
        three = observer.merge(observer.merge(second, second), first)
        assert observer.finish(three)["high"] == 2


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_range_equals_numpy(rng, axis, absolute):
    x = rng.standard_normal((2, 3, 5), np.float32)
    state = observed(Range(axis, absolute), x)
    y = np.abs(x) if absolute else x
    channels = [y] if axis is None else np.moveaxis(y, axis, 0)
    np.testing.assert_array_equal(state["low"], [c.min() for c in channels])
    np.testing.assert_array_equal(state["high"], [c.max() for c in channels])
    assert Range(axis).rows(x.shape) == len(channels) == len(state["low"])


@pytest.mark.parametrize("axis", [None, 0, 2])
def test_moments_equal_numpy(rng, axis):
    x = rng.normal(3, 2, (4, 3, 500)).astype(np.float32)
    state = observed(Moments(axis), x)
    channels = [x] if axis is None else np.moveaxis(x, axis, 0)
    assert state["count"].tolist() == [c.size for c in channels]
    np.testing.assert_allclose(state["total"], [c.sum(dtype=np.float64) for c in channels], rtol=1e-5)
    np.testing.assert_allclose(state["square"], [np.square(c, dtype=np.float64).sum() for c in channels], rtol=1e-5)


@pytest.mark.parametrize("observer", [Range(), Range(0), Moments(), Moments(0)], ids=repr)
def test_a_number_is_a_tensor(observer):
    state = observed(observer, np.float32(-3))
    expected = {"low": -3, "high": -3} if isinstance(observer, Range) else {"count": 1, "total": -3, "square": 9}
    assert {k: v.tolist() for k, v in state.items()} == {k: [v] for k, v in expected.items()}


@pytest.mark.parametrize("weight", [0.01, 0.3, 1.0])
@given(seed=st.integers(0, 99), count=st.integers(1, 12), cut=st.integers(0, 12))
@settings(max_examples=25, deadline=None)
def test_moving_range_is_the_plain_recurrence(weight, seed, count, cut):
    stream = np.random.default_rng(seed).standard_normal((count, 2, 6), np.float32)
    for axis in (None, 0):
        observer = MovingRange(axis, weight=weight)
        rows = observer.rows((2, 6))
        parts = [folded(observer, part, {}, rows) for part in (stream[:cut], stream[cut:])]
        found = observer.finish(observer.merge(*parts))
        for key, reduce in (("low", np.min), ("high", np.max)):
            m = reduce(stream.astype(np.float64), axis=(1, 2) if axis is None else 2)
            average = m[0]
            for value in m[1:]:
                average = average + weight * (value - average)
            np.testing.assert_allclose(found[key], np.atleast_1d(average), rtol=1e-5, atol=1e-6)


def test_moving_range_of_a_tiny_weight_stays_with_the_first():
    observer = MovingRange(weight=1e-8)
    state = folded(observer, [np.full(3, v, np.float32) for v in (1, 5, 9)], {}, 1)
    np.testing.assert_allclose(observer.finish(state)["low"], 1, rtol=1e-6)


def error_oracle(x, exponents, grid):
    """Total and clipped squared error in units of the squared scale, in float64."""
    scaled = x.astype(np.float64).reshape(-1) / np.ldexp(1.0, np.asarray(exponents))[:, None]
    low, high = grid.qmin - grid.middle, grid.qmax - grid.middle
    total = np.square(scaled - np.clip(np.rint(scaled), low, high)).sum(1)
    return total, np.square(scaled - np.clip(scaled, low, high)).sum(1)


def table(observer, x, place):
    state = observed(observer, x, place)
    return observer.finish(state, place) | {k: state[k] for k in ("low", "high")}


def assert_table(observer, x, place, rtol=1e-5):
    state = table(observer, x, place)
    exponents = np.maximum(int(place["coarsest"][0]) - np.arange(observer.candidates), -126)  # no normal scale is finer
    total, clipped = error_oracle(x, exponents, observer.grid)
    assert state["total"].shape == (1, observer.candidates) and state["clipped"].shape == (1, observer.parts)
    np.testing.assert_allclose(state["total"][0], total, rtol=rtol)
    # what lies within is rounded to 2**-16 of the scale, or to the finest
    finer = np.maximum(exponents - 16, -126)[: observer.parts] - exponents[: observer.parts]
    assert (
        np.abs(state["clipped"][0] - clipped[: observer.parts])
        <= rtol * clipped[: observer.parts] + x.size * 4.0 ** (finer - 1)
    ).all()
    power = np.square(x.astype(np.float64)).sum() / np.ldexp(1.0, 2 * exponents[0])
    np.testing.assert_allclose(state["power"], [power], rtol=rtol)
    assert state["low"] == x.min(initial=np.inf) and state["high"] == x.max(initial=-np.inf)


class TestErrorTable:
    @pytest.mark.parametrize(
        "shape", [(1,), (7,), (4096,), (4097,), (5000,), (12289,), (75264,), (1, 7, 7, 1280), (2, 3), ()]
    )
    @pytest.mark.parametrize(
        "observer",
        [ErrorTable(grid=UINT8, candidates=6, parts=6), ErrorTable(grid=INT8.narrow, candidates=5)],
        ids=["uint8", "int8"],
    )
    def test_equals_numpy(self, rng, shape, observer):
        """Values that saturate in all candidates but the coarse: the place is for a smaller range."""
        x = rng.laplace(0.3, 1, shape).astype(np.float32)
        assert_table(observer, x, observer.place(np.array([-0.5]), np.array([2.0])))

    @pytest.mark.parametrize("scale", [1e-25, 1e-4, 3e4, 1e18])
    def test_equals_numpy_at_all_scales(self, rng, scale):
        observer = ErrorTable(grid=UINT8, candidates=16, parts=16)
        x = (rng.standard_normal(777) * scale).astype(np.float32)
        assert_table(observer, x, observer.place(x.min(keepdims=True), x.max(keepdims=True)))

    @pytest.mark.parametrize(
        "scale",
        [1e-31, 1e30, 1e36],
    )
    def test_equals_numpy_at_the_ends_of_float32(self, rng, scale):
        observer = ErrorTable(grid=UINT8, candidates=6)
        x = (rng.standard_normal(777) * scale / 3).astype(np.float32)
        assert_table(observer, x, observer.place(x.min(keepdims=True), x.max(keepdims=True)), rtol=0.05)

    @pytest.mark.parametrize("size", [1, 1024, 4095, 4096, 4097, 8192, 12288, 16390])
    def test_every_element_counts_once(self, size):
        """One value at a time, at the ends of the pieces and of the tensor."""
        observer = ErrorTable(grid=INT8.narrow, candidates=5)
        place = observer.place(np.array([-1.0]), np.array([1.0]))
        for index in {0, size // 2, size - 1, min(4095, size - 1), min(4096, size - 1)}:
            for value in (-5.0, 7.0):
                x = np.zeros(size, np.float32)
                x[index] = value
                assert_table(observer, x, place)

    @pytest.mark.parametrize("grid", [UINT8, INT8.narrow, INT8, INT16.narrow], ids=repr)
    def test_ties_and_bounds_are_exact(self, grid):
        observer = ErrorTable(grid=grid, candidates=3, parts=3)
        low, high = grid.qmin - grid.middle, grid.qmax - grid.middle
        assert -low in (high, high + 1)
        for steps in (
            np.array([low - 1, low - 0.5, low, low + 0.5, high - 0.5, high, high + 0.5, high + 1]),
            np.arange(-40.5, 40),
            np.arange(low, high + 1.0),
        ):
            x = (steps / 8).astype(np.float32)
            place = observer.place_at(np.array([-2], np.int32))  # x is in steps of the middle candidate
            state = table(observer, x, place)
            total, clipped = error_oracle(x, [-2, -3, -4], grid)
            assert state["total"][0, 1] == total[1]
            np.testing.assert_allclose(state["total"][0], total, rtol=1e-6)
            assert state["clipped"][0, 1] == clipped[1]

    def test_on_the_grid_nothing_is_lost(self):
        x = np.arange(-127, 128, dtype=np.float32) / 16
        observer = ErrorTable(grid=INT8.narrow, candidates=5, parts=5)
        place = observer.place(x.min(keepdims=True), x.max(keepdims=True))
        state = table(observer, x, place)
        assert int(place["coarsest"][0]) == -3
        assert state["total"][0, 1] == 0 and (np.delete(state["total"][0], 1) > 0).all()

    def test_no_elements(self):
        observer = ErrorTable(grid=UINT8, candidates=6)
        x = np.zeros((2, 0), np.float32)
        assert_table(observer, x, observer.place(np.array([np.inf]), np.array([-np.inf])))

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("size", [3, 4097, 131073])
    def test_shows_what_is_not_finite(self, bad, size):
        observer = ErrorTable(grid=UINT8, candidates=6)
        x = np.ones(size, np.float32)
        x[size // 2] = bad
        state = table(observer, x, observer.place(np.array([-1.0]), np.array([1.0])))
        if np.isnan(bad):
            assert np.isnan(state["power"]).all()
        else:
            assert state["high" if bad > 0 else "low"] == bad

    @given(
        st.floats(-(2.0**100), 2.0**100, width=32),
        st.floats(-(2.0**100), 2.0**100, width=32),
        st.sampled_from([UINT8, INT8.narrow]),
    )
    @settings(max_examples=200, deadline=None)
    def test_base_exponent_is_the_formula(self, a, b, grid):
        """Section a.1 of Quark's behaviour, in numpy."""
        low, high = min(a, b, 0), max(a, b, 0)
        scale = np.float32(2 * max(-low, high) / (grid.qmax - grid.qmin))
        scale = np.float32(1) if scale < np.finfo(np.float32).tiny else scale
        position = int(np.rint(-np.log2(np.clip(scale, np.float32(2.0**-127), np.float32(2.0**127)))))
        assert int(base_exponent(min(a, b), max(a, b), grid)) == -position
        assert int(ErrorTable(grid=grid, candidates=6).place(low, high)["coarsest"][0]) == -position + 2


def counted(observer, *tensors):
    """The histogram of a stream, growing as calibration does; the place is made for the first tensor."""
    x = np.abs(tensors[0]) if observer.absolute else tensors[0]
    low, high = (np.array([v], np.float32) for v in (x.min(), x.max()))
    place, state = observer.place(low, high), None
    state = none(observer, place, 1)
    for x in tensors:
        seen = observed(observer, x, place)
        while not observer.covers(place, seen["low"], seen["high"]).all():
            observer, place, state = observer.grown(place, state, 2 * observer.growth + 1)
            seen = observed(observer, x, place)
        state = observer.merge(state, seen)
    return observer.finish({k: v[0] for k, v in state.items()}, {k: v[0] for k, v in place.items()})


SAMPLES = {
    "normal": lambda rng: rng.standard_normal(1000),
    "relu": lambda rng: np.maximum(rng.standard_normal(1000), 0),
    "uniform": lambda rng: rng.uniform(-1, 3, 1000),
    "far from zero": lambda rng: rng.uniform(1000, 1001, 1000),
    "few distinct": lambda rng: rng.integers(-8, 9, 1000) / 4,
    "negative": lambda rng: -np.exp(rng.standard_normal(1000)),
    "tiny": lambda rng: 1e-30 * rng.standard_normal(1000),
    "huge": lambda rng: 1e30 * rng.standard_normal(1000),
    "one value": lambda rng: np.array([-2.5]),
    "zeros": lambda rng: np.zeros(1000),
    "constant": lambda rng: np.full(1000, 5.1),
    "negative constant": lambda rng: np.full(1000, -77.7),
    "neighbours": lambda rng: np.resize([1, np.nextafter(np.float32(1), np.float32(2))], 1000),
}


def sample(name, seed=0):
    return SAMPLES[name](np.random.default_rng(seed)).astype(np.float32)


class TestHistogram:
    @pytest.mark.parametrize("growth", [1, 3])
    @pytest.mark.parametrize("bins", [1, 2048])
    def test_equals_numpy_with_float64_edges(self, bins, growth):
        for name in SAMPLES:
            x = sample(name)
            found = counted(HistogramObserver(bins=bins, growth=growth), x)
            counts, edges = np.histogram(x.astype(np.float64), bins)
            np.testing.assert_array_equal(found.counts, counts, name)
            np.testing.assert_array_equal(found.edges, edges, name)

    @pytest.mark.parametrize("growth", [1, 3])
    @pytest.mark.parametrize("bins", [1, 128])
    @pytest.mark.parametrize("form", ["plain", "absolute", "centred"])
    def test_equals_numpy_with_float32_edges(self, bins, growth, form):
        for name in SAMPLES:
            if name in ("neighbours",):  # no 2048 bins of float32 fit in: numpy raises
                continue
            x = sample(name)
            observer = HistogramObserver(
                bins=bins, growth=growth, double=False, absolute=form == "absolute", centred=form == "centred"
            )
            found = counted(observer, x)
            y, limit = np.abs(x) if form == "absolute" else x, np.abs(x).max()
            with_range = {"range": (-limit, limit)} if form == "centred" else {}
            try:
                counts, edges = np.histogram(y, bins, **with_range)
            except ValueError:  # of 2048 bins around a constant, some are empty of float32 numbers
                continue
            edges = edges.astype(np.float32)
            np.testing.assert_array_equal(found.edges, edges, name)
            np.testing.assert_array_equal(found.counts, np.histogram(y, edges)[0], name)
            np.testing.assert_array_equal(found.counts, counts, name)

    @given(
        st.integers(0, 2**32), st.sampled_from([1, 7, 300]), st.floats(1e-6, 1e6), st.floats(-100, 100), st.booleans()
    )
    @settings(max_examples=40, deadline=None)
    def test_counts_by_its_edges(self, seed, bins, width, offset, double):
        """Values near edges and on them: what decides is edge <= x < edge, of the exact edges."""
        rng = np.random.default_rng(seed)
        x = np.float32(offset) + rng.uniform(0, width, 32).astype(np.float32)
        edges = np.linspace(x.min().astype(np.float64), x.max(), bins + 1)
        near = rng.choice(edges, 32).astype(np.float32)
        up, down = (np.nextafter(near, np.float32(v)) for v in (np.inf, -np.inf))
        x = np.clip(np.concatenate([x, near, up, down]), x.min(), x.max())
        observer = HistogramObserver(bins=bins, double=double)
        found = counted(observer, x)
        assume((np.diff(found.edges) > 0).all())  # of a few float32 numbers numpy makes no more bins
        assert found.counts.sum() == x.size
        np.testing.assert_array_equal(
            found.counts, np.histogram(x.astype(np.float64), found.edges.astype(np.float64))[0]
        )

    @pytest.mark.parametrize("double", [True, False])
    @pytest.mark.parametrize("factors", [(1, 1.5), (1, 0.5, 2.9), (1, 8, 3), (1, 40)])
    def test_grown_edges_count_like_numpy(self, factors, double):
        bins = 50
        for name in ("normal", "relu", "uniform", "negative", "few distinct"):
            stream = [np.float32(f) * sample(name, i) for i, f in enumerate(factors)]
            found = counted(HistogramObserver(bins=bins, growth=3, double=double), *stream)
            everything = np.concatenate(stream).astype(np.float64)
            np.testing.assert_array_equal(found.counts, np.histogram(everything, found.edges.astype(np.float64))[0])
            assert found.counts.sum() == everything.size
            # the bins of the first tensor are numpy's, and others of their width follow as far as is needed
            inner = np.histogram(stream[0].astype(np.float64) if double else stream[0], bins)[1]
            start = int(np.argmin(np.abs(found.edges - inner[0])))
            np.testing.assert_array_equal(found.edges[start : start + bins + 1], inner)
            np.testing.assert_allclose(
                np.diff(found.edges), (inner[-1] - inner[0]) / bins, rtol=1e-2 if not double else 1e-9
            )
            low, high = everything.min(), everything.max()
            assert found.edges[0] <= low and (start == 0 or low < found.edges[1])
            end = start + bins
            assert high <= found.edges[-1] and (end == found.edges.size - 1 or found.edges[-2] < high)

    def test_number_of_grown_bins_is_the_formula(self):
        """ceil(overshoot / width) on each side, of numbers that divide evenly and that do not."""
        first = np.linspace(-1, 1, 17, dtype=np.float32)
        for low, high in [(-1, 1), (-1, 1.25), (-2, 1), (-1.5, 3.5), (-1.01, 1.01), (-9, 7.2)]:
            found = counted(HistogramObserver(bins=8, growth=3), first, np.array([low, high], np.float32))
            left, right = (int(np.ceil(abs(v) * 4 - 4)) for v in np.float32([low, high]).astype(np.float64))
            assert found.counts.size == 8 + left + right, (low, high)
            np.testing.assert_allclose(found.edges, np.linspace(-1 - left / 4, 1 + right / 4, 9 + left + right))

    @pytest.mark.parametrize(("form", "method"), [("absolute", "percentile"), ("centred", "entropy")])
    @pytest.mark.parametrize("factors", [(1,), (1, 0.5), (1, 2, 0.1), (1, 1.01, 5)])
    def test_streams_equal_onnxruntime(self, form, method, factors):
        for name in ("normal", "relu", "uniform"):
            stream = [np.float32(f) * sample(name, i) for i, f in enumerate(factors)]
            collector = calibrate.HistogramCollector(method, form == "absolute", 64, 64, 99.999, "same")
            for part in stream:
                collector.collect({"x": part})
            counts, edges, *_ = collector.get_histogram_dict()["x"]
            absolute = form == "absolute"
            found = counted(
                HistogramObserver(bins=64, growth=3, absolute=absolute, centred=not absolute, double=False), *stream
            )
            # Where a side grew, edges may differ in the last bits, and with them a value on one.
            if found.counts.size == counts.size:
                np.testing.assert_allclose(found.edges, edges, rtol=1e-5, atol=1e-6)
                assert np.abs(found.counts - counts).sum() <= (0 if max(factors) == 1 else 6)
            else:  # onnxruntime's centred histogram grows on both sides
                assert form == "centred" and found.counts.size < counts.size
                margin = int(np.argmin(np.abs(edges - found.edges[0])))
                inner = counts[margin : margin + found.counts.size]
                assert np.abs(found.counts - inner).sum() <= 6 and counts.sum() == found.counts.sum()

    def test_growing_keeps_the_counts(self):
        observer = HistogramObserver(bins=20, growth=3)
        x = sample("normal")
        place = observer.place(x.min(keepdims=True), x.max(keepdims=True))
        state = observed(observer, x, place)
        before = observer.finish({k: v[0] for k, v in state.items()}, {k: v[0] for k, v in place.items()})
        for _ in range(3):
            observer, place, state = observer.grown(place, state, 2 * observer.growth + 1)
            after = observer.finish({k: v[0] for k, v in state.items()}, {k: v[0] for k, v in place.items()})
            np.testing.assert_array_equal(after.counts, before.counts)
            np.testing.assert_array_equal(after.edges, before.edges)
            assert state["counts"].shape == none(observer, place, 1)["counts"].shape
        assert observer.growth == 31

    @pytest.mark.parametrize("growth", [1, 3])
    @pytest.mark.parametrize("size", [1, 2, 1000])
    def test_a_value_on_the_last_edge_is_in_the_last_bin(self, growth, size):
        x = np.r_[0, np.full(size, 4)].astype(np.float32)
        assert counted(HistogramObserver(bins=4, growth=growth), x).counts.tolist() == [1, 0, 0, size]

    def test_a_value_on_an_inner_edge_is_in_the_bin_above(self):
        x, more = np.float32([0, 4]), np.float32([4, 5, 4])
        found = counted(HistogramObserver(bins=4, growth=3), x, more)
        assert found.edges.tolist() == [0, 1, 2, 3, 4, 5]
        assert found.counts.tolist() == [1, 0, 0, 0, 4]

    def test_magnitudes_below_the_first_edge_do_not_count(self):
        """As in onnxruntime, whose histogram of magnitudes grows to the right only."""
        observer = HistogramObserver(bins=4, growth=3, absolute=True, double=False)
        found = counted(observer, np.float32([2, -4]), np.float32([1, -3, 4]))
        assert found.edges.tolist() == [2, 2.5, 3, 3.5, 4] and found.counts.tolist() == [1, 0, 1, 2]

    def test_channels_are_apart(self, rng):
        x = rng.standard_normal((4, 3, 200), np.float32) * np.float32([[[1], [10], [0.1]]])
        observer = HistogramObserver(1, bins=32, growth=3)
        rows = np.moveaxis(x, 1, 0).reshape(3, -1)
        place = observer.place(rows.min(1), rows.max(1))
        state = observed(observer, x, place)
        for i, row in enumerate(rows):
            found = observer.finish({k: v[i] for k, v in state.items()}, {k: v[i] for k, v in place.items()})
            counts, edges = np.histogram(row.astype(np.float64), 32)
            np.testing.assert_array_equal(found.counts, counts)
            np.testing.assert_array_equal(found.edges, edges)

    @pytest.mark.parametrize("value", [0.0, -3.0, 5.1, 1e6, 1e8])
    def test_constants_are_counted(self, value):
        x = np.full(100, value, np.float32)
        found = counted(HistogramObserver(growth=3), x)
        counts, edges = np.histogram(x.astype(np.float64), 2048)
        np.testing.assert_array_equal(found.edges, edges)
        np.testing.assert_array_equal(found.counts, counts)

    @pytest.mark.parametrize("value", [1e-35, 1e37, 1e38, 3e38])
    def test_ranges_at_the_ends_of_float32(self, value):
        x = np.linspace(-1, 1, 1001, dtype=np.float32) * np.float32(value)
        x[np.abs(x) < np.finfo(np.float32).tiny] = 0  # as the device does
        found = counted(HistogramObserver(bins=64, growth=3), x)
        np.testing.assert_array_equal(found.counts, np.histogram(x.astype(np.float64), 64)[0])


def test_ties_of_no_sample():
    """A Compress may leave none."""
    state = Ties().observe(np.zeros((0, 4), np.float32), None)
    assert state["seen"] == 0 and not np.any(state["ties"])


def test_ties_are_those_of_the_two_largest_values(rng):
    x = np.round(rng.standard_normal((64, 9)), 1).astype(np.float32)  # of which some have the same two
    top = np.sort(x, axis=1)[:, -2:]
    state = Ties(last=127).observe(x, None)
    assert 0 < state["equal"][0] == (top[:, 0] == top[:, 1]).sum() < len(x)
    steps = 2.0 ** np.asarray(TIE_EXPONENTS)
    shares = np.where(top[:, :1] >= 127 * steps, 1, np.maximum(0, 1 - (top[:, 1:] - top[:, :1]) / steps))
    np.testing.assert_allclose(state["ties"][0], shares.sum(0), rtol=1e-5)
